// Package view owns what one caller may see at one moment, and what each name that it may ask for means in that: an answer with
// the version of its content.
//
// It refuses to answer with a validation context that would accept anybody, and knows of no streams.
package view

import (
	"slices"
	"strings"

	"github.com/chancery-project/chancery/trust"
)

// View is all that one caller may see at one moment. It is immutable (invariant 6).
type View struct {
	// Identities of the caller; the first is its default. None means that the caller is known but nothing has been
	// issued to it yet: streams wait.
	Identities []*trust.Identity

	// Hints tells the identities apart for the workload (Workload API, "hint"); parallel to Identities or shorter.
	Hints []string

	// Bundles of all trusted domains with their CRLs: the caller's own first, with its kin, then foreign ones.
	Bundles []*trust.Bundle

	// Naming maps a service, "NS/NAME", to the identities that may serve it; nobody may where there are none.
	Naming map[string][]trust.ID

	// Asks says that whoever may serve another service is being asked for. If not, there is no such service.
	Asks bool

	// Generation grows with each change of the view.
	Generation uint64
}

// Own returns the bundle of the caller's own trust domain with its kin; nil if there is none yet.
func (v *View) Own() *trust.Bundle {
	if len(v.Bundles) == 0 {
		return nil
	}
	return v.Bundles[0]
}

// domains returns the bundles of all trust domains one by one: the own ones first, of which former ones have no roots, then foreign ones.
// No foreign one is one of the own (decision D24).
func (v *View) domains() []*trust.Bundle {
	if v.Own() == nil {
		return nil
	}
	out := append([]*trust.Bundle{v.Own()}, v.Own().Kin()...)
	for _, b := range v.Bundles[1:] {
		if v.Own().Of(b.Domain()) == nil {
			out = append(out, b)
		}
	}
	return out
}

// trusted returns those of the domains that anything is trusted of, or may be again: former ones are left out.
func (v *View) trusted() []*trust.Bundle {
	return slices.DeleteFunc(v.domains(), func(b *trust.Bundle) bool { return v.isFormer(b) })
}

// isFormer reports whether a bundle is that of a trust domain that the own one was before.
func (v *View) isFormer(b *trust.Bundle) bool {
	return len(b.Roots()) == 0 && b.Domain() != v.Own().Domain() && v.Own().Of(b.Domain()) != nil
}

// BundleOf returns the bundle that an identity's peers verify it against: that of its own trust domain alone.
func (v *View) BundleOf(id *trust.Identity) *trust.Bundle {
	for _, b := range v.domains() {
		if b.Domain() == id.ID.Domain() {
			return b
		}
	}
	if b := id.Bundle.Of(id.ID.Domain()); b != nil {
		return b
	}
	return id.Bundle
}

// Hint returns the hint of the identity with this index. Hints must be unique in a response and at most 1,024 bytes
// (SPIFFE Workload API, section 5.2.1): the first holder keeps it, the others have none.
func (v *View) Hint(i int) string {
	if i >= len(v.Hints) || len(v.Hints[i]) > 1024 {
		return ""
	}
	for _, earlier := range v.Hints[:i] {
		if earlier == v.Hints[i] {
			return ""
		}
	}
	return v.Hints[i]
}

// TrustsOwn reports whether a name is that of a validation context with the roots of the caller's own trust domain: what the caller
// acknowledges of it says which generation of the bundle it has. During a migration a context of one of the two domains says that of none.
func (v *View) TrustsOwn(name string) bool {
	own := v.Own()
	switch k := KindOf(name); k {
	case KindRoots, KindAll:
		return true
	case KindService:
		return own == nil || len(v.servedBy(v.Naming[strings.TrimPrefix(name, PrefixService)]).own) > 0
	case KindDomain:
		if own == nil {
			return false
		}
		for _, b := range append([]*trust.Bundle{own}, own.Kin()...) {
			if b.Domain().URI() == name {
				return len(b.Roots()) == len(own.All())
			}
		}
	}
	return false
}

// Narrowed reports whether a name is that of a context which had all roots of the own trust domain before a migration began, and has those of one of
// its two domains since: who goes by it refuses peers that have moved, whatever other contexts he has.
func (v *View) Narrowed(name string) bool {
	own := v.Own()
	return own != nil && name == own.Domain().URI() && !v.TrustsOwn(name)
}
