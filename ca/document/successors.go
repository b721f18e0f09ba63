package document

import (
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// This file brings what a rotation leads to into the document. All of it is prepared: it signs nothing but CRLs, until package
// rotate/stages says so.

// Made is an authority that is to enter the document: its certificate, those between it and its root, and its key.
type Made struct {
	Key         Key
	Certificate *x509.Certificate
	Chain       []*x509.Certificate
}

// AddSuccessors enters the root and the issuer that the rotation under way leads to; each is nil if it is not made, or is there already. The
// bundle's generation grows, also for an issuer alone: its CRL is part of what consumers must have before it signs (decision D22).
func (d *Document) AddSuccessors(td trust.Domain, s *keys.Sealer, root, issuer *Made) error {
	state := d.State(td)
	r := state.Rotation
	switch {
	case r == nil:
		return errors.New("no rotation is under way")
	case root != nil && r.ToRoot != "" || issuer != nil && r.ToIssuer != "":
		return fmt.Errorf("rotation %s has its successor already", r.ID)
	}
	defer func() {
		if r.Phase == PhaseDistribute { // what was acknowledged by now was without it
			r.Generation, r.Version = state.Generation, d.Version
		}
	}()
	if root != nil {
		if err := d.add(td, KindRoot, StatePrepared, root.Key, s, root.Certificate); err != nil {
			return err
		}
		r.ToRoot = state.entered(r)
	} else {
		state.Generation++
	}
	if issuer == nil {
		return nil
	}
	if err := d.add(td, KindIssuer, StatePrepared, issuer.Key, s, issuer.Certificate, issuer.Chain...); err != nil {
		return err
	}
	r.ToIssuer = state.entered(r)
	return nil
}

// entered notes of the authority that entered the document last which trust domain it vouches for, and returns its ID.
func (s *DomainState) entered(r *Rotation) string {
	a := &s.Authorities[len(s.Authorities)-1]
	if r.Migration != nil {
		a.Domain = r.Migration.To
	}
	return a.ID
}

// LacksSuccessor reports whether the issuer that a rotation leads to is to be made here: there is none yet, or most of its life is over
// before it has signed anything.
func (s *DomainState) LacksSuccessor(rotation string, now time.Time) bool {
	r := s.Rotation
	if r == nil || r.ID != rotation || r.Reason == ReasonFiles || r.Phase != PhasePrepare && r.Phase != PhaseDistribute {
		return false
	}
	x := s.Get(KindIssuer, r.ToIssuer)
	if x == nil {
		return true
	}
	begin, life, err := x.Life()
	return err == nil && x.State == StatePrepared && now.Sub(begin) > life*3/4
}

// Renewed notes that one issuer took the place of another under the same root while a rotation is under way from that one, or to it.
func (s *DomainState) Renewed(old, now string) {
	a, b, r := s.Get(KindIssuer, old), s.Get(KindIssuer, now), s.Rotation
	if r == nil || b == nil || a != nil && a.RootID() != b.RootID() {
		return
	}
	switch old {
	case r.FromIssuer:
		r.FromIssuer = now
	case r.ToIssuer:
		r.ToIssuer = now
	}
}
