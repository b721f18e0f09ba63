package document

import (
	"maps"
	"slices"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// This file has the changes that a rotation makes. Package rotate/stages decides when.

// Activate makes an authority the active one of its kind; the one before retires. It reports whether there is such an authority, and
// refuses a tainted one.
func (s *DomainState) Activate(kind AuthorityKind, id string, now time.Time) bool {
	next := s.Get(kind, id)
	if next == nil || next.Tainted != nil && next.State != StateActive {
		return false
	}
	for i := range s.Authorities {
		if a := &s.Authorities[i]; a.Kind == kind && a.State == StateActive && a != next {
			at := now.UTC().Truncate(time.Second)
			a.State, a.Retired = StateRetiring, &at
		}
	}
	next.State, next.Retired, next.Wanted = StateActive, nil, false
	return true
}

// Retire notes that an authority signs no certificate from now on, whatever it was before: the successor of a migration that is rolled back
// has signed for its share.
func (s *DomainState) Retire(kind AuthorityKind, id string, now time.Time) {
	if a := s.Get(kind, id); a != nil && a.State != StateRetiring {
		at := now.UTC().Truncate(time.Second)
		a.State, a.Retired, a.Wanted = StateRetiring, &at, false
	}
}

// Taint notes that an authority's key may be known to others.
func (s *DomainState) Taint(kind AuthorityKind, id string, now time.Time) {
	if a := s.Get(kind, id); a != nil && a.Tainted == nil {
		at := now.UTC().Truncate(time.Second)
		a.Tainted = &at
	}
}

// DropRoot takes a root out of the bundle, and with it the issuers under it: nobody trusts them any more. The generation grows.
func (s *DomainState) DropRoot(id string) {
	s.Authorities = slices.DeleteFunc(s.Authorities, func(a Authority) bool { return a.RootID() == id })
	s.Generation++
}

// DropIssuer forgets an issuer.
func (s *DomainState) DropIssuer(id string) {
	s.Authorities = slices.DeleteFunc(s.Authorities, func(a Authority) bool { return a.Kind == KindIssuer && a.ID == id })
}

// EndRotation moves the rotation under way to those that have ended.
func (s *DomainState) EndRotation(outcome string, now time.Time) {
	if s.Rotation == nil {
		return
	}
	s.Past = append([]PastRotation{{Rotation: *s.Rotation, Ended: now.UTC(), Outcome: outcome}}, s.Past[:min(len(s.Past), MaxPast-1)]...)
	s.Rotation = nil
}

// reissue moves a rotation into the epoch of a restored document: what replicas and consumers have acknowledged was another bundle's
// generation and another document's version, of which nobody knows whether they led here. The phase's gates begin anew.
func (s *DomainState) reissue(version uint64, now time.Time) {
	r := s.Rotation
	if r == nil {
		return
	}
	if r.Version = version; r.Generation != 0 {
		r.Generation = s.Generation
	}
	if now = now.UTC(); now.After(r.Since) {
		r.Since = now
	}
	r.Spread = time.Time{}
}

// Clone returns a copy that shares nothing which changes: bytes and certificates are never changed in place.
func (d *Document) Clone() *Document {
	n := *d
	n.Logs, n.Before = slices.Clone(d.Logs), slices.Clone(d.Before)
	for i := range n.Logs {
		n.Logs[i].DeclaredDead = clone(n.Logs[i].DeclaredDead)
	}
	n.Driver, n.Imported = clone(d.Driver), clone(d.Imported)
	n.Foreign = maps.Clone(d.Foreign)
	for name, f := range n.Foreign {
		n.Foreign[name] = clone(f)
	}
	if d.Domains == nil {
		return &n
	}
	n.Domains = make(map[string]*DomainState, len(d.Domains))
	for name, s := range d.Domains {
		n.Domains[name] = s.clone()
	}
	return &n
}

func (s *DomainState) clone() *DomainState {
	if s == nil {
		return nil
	}
	n := *s
	n.Authorities, n.Below = slices.Clone(s.Authorities), slices.Clone(s.Below)
	for i := range n.Authorities {
		a := &n.Authorities[i]
		a.Retired, a.Tainted = clone(a.Retired), clone(a.Tainted)
	}
	n.Revocations = slices.Clone(s.Revocations)
	for i := range n.Revocations {
		r := &n.Revocations[i]
		r.IssuedBefore, r.Restored, r.Until = clone(r.IssuedBefore), clone(r.Restored), clone(r.Until)
	}
	n.Former = slices.Clone(s.Former)
	n.Requested, n.CRL, n.BundleKey = clone(s.Requested), clone(s.CRL), clone(s.BundleKey)
	if n.Rotation = clone(s.Rotation); n.Rotation != nil {
		n.Rotation.unshare()
	}
	n.Past = slices.Clone(s.Past)
	for i := range n.Past {
		n.Past[i].unshare()
	}
	return &n
}

func (r *Rotation) unshare() {
	r.Paused, r.Overrides, r.Migration = clone(r.Paused), slices.Clone(r.Overrides), r.Migration.Clone()
}

func clone[T any](p *T) *T {
	if p == nil {
		return nil
	}
	n := *p
	return &n
}

// Rotating returns the rotation under way in a trust domain, nil if there is none. Callers must not change it.
func (d *Document) Rotating(td trust.Domain) *Rotation {
	if s := d.Of(td); s != nil {
		return s.Rotation
	}
	return nil
}
