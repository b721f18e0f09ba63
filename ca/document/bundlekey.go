package document

import (
	"time"

	"github.com/chancery-project/chancery/trust"
)

// This file is about what protects agents from who has a stolen key of an authority: the key that signs bundles (decision D6; package
// bundlekey makes and opens it), and the note of when an authority was last tainted (D4).

// PublicBundleKey returns the key that agents pin; nil if there is none yet.
func (s *DomainState) PublicBundleKey() []byte {
	if s.BundleKey == nil {
		return nil
	}
	return s.BundleKey.Public
}

// NoteTaints notes in a document that is about to be stored whether an authority is tainted in it that was not in the one before. It
// is done for every change, so that none can forget it.
func (d *Document) NoteTaints(before *Document) {
	for name, state := range d.Domains {
		var was map[string]*time.Time
		if old := before.Domains[name]; old != nil {
			was = old.Tainted()
		}
		for i := range state.Authorities {
			if a := &state.Authorities[i]; a.Tainted != nil && was[string(a.Kind)+a.ID] == nil {
				state.TaintedAt = d.Version
			}
		}
	}
}

// Tainted returns since when authorities are tainted, by kind and ID.
func (s *DomainState) Tainted() map[string]*time.Time {
	all := map[string]*time.Time{}
	for i := range s.Authorities {
		if a := &s.Authorities[i]; a.Tainted != nil {
			all[string(a.Kind)+a.ID] = a.Tainted
		}
	}
	return all
}

// TaintedAt returns the version that last tainted an authority of a trust domain; 0 if none did.
func (d *Document) TaintedAt(td trust.Domain) uint64 {
	if state := d.Of(td); state != nil {
		return state.TaintedAt
	}
	return 0
}
