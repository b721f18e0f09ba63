package document

import (
	"cmp"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/document/line"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// This file is about lines of trust domains: one authority, and the trust domains that it is, was, and is about to be. A line has the name
// of the first for ever: what is sealed, noted or authenticated by a trust domain's name is by that.

// MaxForeign bounds the foreign trust domains whose bundles a document has.
const MaxForeign = 128

// formatBefore is the format of documents without lines and foreign trust domains, which versions before this one read, too.
const formatBefore = 3

// Needs returns the lowest format in which a document can be written: a server of the version before goes on with one that says nothing
// new. For a migration, or a federation, all servers must read Format: see board.Lagging.
func (d *Document) Needs() int {
	if len(d.Foreign) > 0 {
		return Format
	}
	for _, s := range d.Domains {
		if s == nil {
			continue
		}
		if s.Domain != "" || len(s.Former) > 0 || s.Rotation != nil && s.Rotation.Migration != nil ||
			slices.ContainsFunc(s.Past, func(p PastRotation) bool { return p.Migration != nil }) ||
			slices.ContainsFunc(s.Authorities, func(a Authority) bool { return a.Domain != "" }) {
			return Format
		}
	}
	return formatBefore
}

// Line returns the key of the line that a trust domain is of: by its name, by what it is now, was before, or is about to be.
func (d *Document) Line(td trust.Domain) (key trust.Domain, ok bool) {
	if d.Domains[td.String()] != nil {
		return td, true
	}
	for name, s := range d.Domains {
		if s != nil && slices.Contains(s.names(name), td.String()) {
			key, err := trust.ParseDomain(name)
			return key, err == nil
		}
	}
	return td, false
}

// Of returns what a document has of the line of a trust domain; nil if it has none. It must not be changed.
func (d *Document) Of(td trust.Domain) *DomainState {
	key, _ := d.Line(td)
	return d.Domains[key.String()]
}

// names returns the trust domains of a line: what it is now, the other one of a migration, the former ones. Key is the line's.
func (s *DomainState) names(key string) []string {
	all := append([]string{cmp.Or(s.Domain, key)}, s.Former...)
	if r := s.Rotation; r != nil && r.Migration != nil {
		all = append(all, r.Migration.From, r.Migration.To)
	}
	for i := range s.Authorities {
		if s.Authorities[i].Domain != "" {
			all = append(all, s.Authorities[i].Domain)
		}
	}
	slices.Sort(all[1:])
	all = append(all[:1], slices.DeleteFunc(slices.Compact(all[1:]), func(n string) bool { return n == all[0] })...)
	if !slices.Contains(all, key) { // it is somebody's name still
		all = append(all, key)
	}
	return all
}

// Names returns the trust domains of a line, the present one first.
func (d *Document) Names(td trust.Domain) []trust.Domain {
	key, ok := d.Line(td)
	if !ok {
		return []trust.Domain{td}
	}
	var all []trust.Domain
	for _, name := range d.Domains[key.String()].names(key.String()) {
		if x, err := trust.ParseDomain(name); err == nil {
			all = append(all, x)
		}
	}
	return all
}

// Present returns the trust domain that a line is now. Key is its name.
func (s *DomainState) Present(key trust.Domain) trust.Domain {
	if s.Domain == "" {
		return key
	}
	if x, err := trust.ParseDomain(s.Domain); err == nil {
		return x
	}
	return key
}

// Present returns the trust domain that the line of a trust domain is now; that itself, if the document has none.
func (d *Document) Present(td trust.Domain) trust.Domain {
	key, ok := d.Line(td)
	if !ok {
		return td
	}
	return d.Domains[key.String()].Present(key)
}

// DomainFor returns the trust domain in which an identity of a line gets its certificates now. Key is the line's.
func (s *DomainState) DomainFor(key trust.Domain, id trust.ID) trust.Domain {
	r, present := s.Rotation, s.Present(key)
	if r == nil || r.Migration == nil || !r.Gives(id) {
		return present
	}
	if to, err := trust.ParseDomain(r.Migration.To); err == nil {
		return to
	}
	return present
}

// Gives reports whether an identity gets its certificates from a migration's successor: nobody before everybody trusts that; then its share;
// then all, as after a rollback, whose successor is where it came from.
func (r *Rotation) Gives(id trust.ID) bool {
	switch {
	case r.Migration == nil || r.Phase == PhasePrepare || r.Phase == PhaseDistribute:
		return false
	case r.Phase == PhaseIssue:
		return r.Migration.Takes(id)
	}
	return true
}

// Second returns the issuer that signs beside the active one, for the other trust domain of a migration; nil if there is none.
func (s *DomainState) Second() *Authority {
	if r := s.Rotation; r != nil && r.Migration != nil && r.Phase == PhaseIssue {
		return s.Get(KindIssuer, r.ToIssuer)
	}
	return nil
}

// NextSecond returns the issuer that is to follow Second, for the same trust domain; nil if there is none.
func (s *DomainState) NextSecond() *Authority {
	second := s.Second()
	for i := range s.Authorities {
		a := &s.Authorities[i]
		if second != nil && a.Kind == KindIssuer && a.State == StatePrepared && a.ID != second.ID && a.RootID() == s.Rotation.ToRoot {
			return a
		}
	}
	return nil
}

// PrepareSecond adds an issuer that is to follow Second, and signs no certificate yet.
func (d *Document) PrepareSecond(td trust.Domain, key Key, s *keys.Sealer, cert *x509.Certificate) error {
	state := d.State(td)
	if state.Second() == nil || RootOf([]*x509.Certificate{cert}) != state.Rotation.ToRoot {
		return fmt.Errorf("no migration has a second issuer under root %s", RootOf([]*x509.Certificate{cert}))
	}
	return d.add(td, KindIssuer, StatePrepared, key, s, cert)
}

// PromoteSecond makes NextSecond what signs; the one before retires.
func (d *Document) PromoteSecond(td trust.Domain, now time.Time) (*Authority, error) {
	state := d.State(td)
	next := state.NextSecond()
	if next == nil {
		return nil, errors.New("no issuer is prepared for the other trust domain of the migration")
	}
	was := state.Rotation.ToIssuer
	state.Rotation.ToIssuer, next.Wanted = next.ID, false
	state.Retire(KindIssuer, was, now)
	return next, nil
}

// Become makes another trust domain the present one of a line. The one before is a former one from then on.
func (s *DomainState) Become(key, to trust.Domain) {
	was := s.Present(key)
	if was == to {
		return
	}
	for i := range s.Authorities {
		a := &s.Authorities[i]
		if of := a.DomainOf(was); of == to {
			a.Domain = ""
		} else {
			a.Domain = of.String()
		}
	}
	s.Domain = to.String()
	s.Former = append(slices.DeleteFunc(s.Former, func(n string) bool { return n == to.String() }), was.String())
}

// CheckMigration says why a line cannot become another trust domain.
func (d *Document) CheckMigration(td, to trust.Domain) error {
	key, ok := d.Line(td)
	if !ok {
		return d.lacks(td)
	}
	s := d.Domains[key.String()]
	switch {
	case s.Present(key) == to:
		return fmt.Errorf("trust domain %s is the present one already", to)
	case d.Foreign[to.String()] != nil:
		return fmt.Errorf("trust domain %s is federated, so others vouch for it; end that first", to)
	case len(s.Former) >= line.MaxFormer && !slices.Contains(s.Former, to.String()):
		return fmt.Errorf("this authority was %d trust domains before, and no more are remembered", len(s.Former))
	}
	if other, taken := d.Line(to); taken && other != key {
		return fmt.Errorf("trust domain %s is of another authority in the same state, %s", to, other)
	}
	return nil
}

// checkLines says what is wrong with lines and foreign trust domains. It is done before a document is stored, too: no server could start
// with one that fails.
func (d *Document) checkLines() error {
	taken := map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(d.Domains)) {
		s := d.Domains[key]
		if s == nil {
			continue
		}
		if err := s.checkLine(); err != nil {
			return fmt.Errorf("trust domain %.80q: %w", key, err)
		}
		for _, name := range s.names(key) {
			if of, is := taken[name]; is {
				return fmt.Errorf("trust domain %.80q is of two authorities, %.80q and %.80q", name, of, key)
			}
			taken[name] = key
		}
	}
	if len(d.Foreign) > MaxForeign {
		return fmt.Errorf("it has bundles of %d foreign trust domains; at most %d are read", len(d.Foreign), MaxForeign)
	}
	for _, name := range slices.Sorted(maps.Keys(d.Foreign)) {
		if _, err := trust.ParseDomain(name); err != nil {
			return fmt.Errorf("foreign trust domain: %w", err)
		}
		if d.Foreign[name] == nil {
			return fmt.Errorf("it has null for foreign trust domain %s", name)
		}
		if of, is := taken[name]; is {
			return fmt.Errorf("trust domain %s is both foreign and of the authority %.80q (decision D24)", name, of)
		}
	}
	return nil
}

func (s *DomainState) checkLine() error {
	is := line.Parts{Present: s.Domain, Former: s.Former}
	for i := range s.Past {
		is.Past = append(is.Past, s.Past[i].Migration)
	}
	if r := s.Rotation; r != nil {
		switch is.Migration = r.Migration; {
		case r.Phase == PhaseIssue && r.Migration == nil:
			return fmt.Errorf("rotation %.80q is in phase %s, which only a migration has", r.ID, r.Phase)
		case r.Migration != nil && r.Kind != KindRoot:
			return fmt.Errorf("rotation %.80q is a migration of a %.40q; each trust domain has a root of its own (decision D10)", r.ID, r.Kind)
		}
	}
	for i := range s.Authorities {
		is.Authorities = append(is.Authorities, s.Authorities[i].Domain)
	}
	return is.Check()
}

// Bundle returns the roots that are trusted now: those of the line's present trust domain and, as kin, those of a migration's other one and
// former trust domains, which have none. A tainted root is trusted until its leaves have been replaced.
func (d *Document) Bundle(td trust.Domain) (*trust.Bundle, error) {
	key, ok := d.Line(td)
	if !ok {
		return nil, d.lacks(td)
	}
	state := d.Domains[key.String()]
	present := state.Present(key)
	roots := map[trust.Domain][]*x509.Certificate{}
	for _, name := range state.Former {
		if x, err := trust.ParseDomain(name); err == nil {
			roots[x] = nil
		}
	}
	for i := range state.Authorities {
		a := &state.Authorities[i]
		if a.Kind != KindRoot {
			continue
		}
		cert, err := a.X509()
		if err != nil {
			return nil, err
		}
		of := a.DomainOf(present)
		roots[of] = append(roots[of], cert)
	}
	own, err := trust.NewBundle(present, state.Generation, roots[present])
	if err != nil {
		return nil, err
	}
	var kin []*trust.Bundle
	for of, theirs := range roots {
		if of == present {
			continue
		}
		b, err := trust.NewBundle(of, state.Generation, theirs)
		if err != nil {
			return nil, err
		}
		kin = append(kin, b)
	}
	if len(kin) == 0 {
		return own, nil
	}
	return own.WithKin(kin...)
}
