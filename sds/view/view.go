// Package view owns what one caller may see at one moment, and what each name that it may ask for means in that: an answer with
// the version of its content.
//
// It refuses to answer with a validation context that would accept anybody, and knows of no streams.
package view

import "github.com/chancery-project/chancery/trust"

// View is all that one caller may see at one moment. It is immutable (invariant 6).
type View struct {
	// Identities of the caller; the first is its default. None means that the caller is known but nothing has been
	// issued to it yet: streams wait.
	Identities []*trust.Identity

	// Hints tells the identities apart for the workload (Workload API, "hint"); parallel to Identities or shorter.
	Hints []string

	// Bundles of all trusted domains with their CRLs, the caller's own first.
	Bundles []*trust.Bundle

	// Naming maps a service, "NS/NAME", to the identities that may serve it.
	Naming map[string][]trust.ID

	// Generation grows with each change of the view.
	Generation uint64
}

// Own returns the bundle of the caller's own trust domain; nil if there is none yet.
func (v *View) Own() *trust.Bundle {
	if len(v.Bundles) == 0 {
		return nil
	}
	return v.Bundles[0]
}

// BundleOf returns the bundle that an identity's peers verify it against.
func (v *View) BundleOf(id *trust.Identity) *trust.Bundle {
	for _, b := range v.Bundles {
		if b.Domain() == id.ID.Domain() {
			return b
		}
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
// acknowledges of it says which generation of the bundle it has.
func (v *View) TrustsOwn(name string) bool {
	switch k := KindOf(name); k {
	case KindRoots, KindAll, KindService:
		return true
	case KindDomain:
		return v.Own() != nil && v.Own().Domain().URI() == name
	}
	return false
}
