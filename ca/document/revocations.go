package document

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/document/revoked"
	"github.com/chancery-project/chancery/trust"
)

// Revocations are stored as predicates (decision D13); package revocation finds what they mean.

// MaxRevocations bounds those that a trust domain has at a time.
const MaxRevocations = 10_000

// maxActor bounds the name of who revoked.
const maxActor = 256

// What package revoked owns, under the names by which others know it.
type (
	// Predicate says which certificates are revoked.
	Predicate = revoked.Predicate
	// Revocation is a predicate that was revoked.
	Revocation = revoked.Revocation
	// CRL says what the CRLs of one number are.
	CRL = revoked.CRL
)

// LastCRL returns what the last CRLs are. Without a content only the number counts.
func (s *DomainState) LastCRL() CRL {
	if s.CRL == nil {
		return CRL{Number: s.CRLNumber}
	}
	return *s.CRL
}

// NextCRL takes the next number, for CRLs that are otherwise as c says.
func (s *DomainState) NextCRL(c CRL) CRL {
	c.Number = s.LastCRL().Number + 1
	s.CRL, s.CRLNumber = &c, 0
	return c
}

// endedStays is how long the revocation of a certificate that has ended stays, so that clocks which are behind find it on
// a CRL.
const endedStays = time.Hour

// NeedsResolved returns the version of the document from which on a log must have been searched to have all that is revoked.
func (s *DomainState) NeedsResolved() uint64 {
	var last uint64
	for _, r := range s.Revocations {
		last = max(last, r.Version)
	}
	return last
}

// Revocations returns those of a trust domain. Callers must not change them.
func (d *Document) Revocations(td trust.Domain) []Revocation {
	if state := d.Of(td); state != nil {
		return state.Revocations
	}
	return nil
}

// dropOver forgets revocations of certificates that have all ended.
func (s *DomainState) dropOver(now time.Time) {
	kept := s.Revocations[:0]
	for _, r := range s.Revocations {
		if r.Until == nil || now.Before(r.Until.Add(endedStays)) {
			kept = append(kept, r)
		}
	}
	s.Revocations = kept
}

// Revoke adds a revocation and gives it an ID. One that stands already is returned as it is.
func (d *Document) Revoke(td trust.Domain, r Revocation) (Revocation, error) {
	state := d.State(td)
	state.dropOver(r.Time)
	for _, have := range state.Revocations {
		// A node alone is bound to the moment: it means more now than then.
		if have.Predicate.Equal(&r.Predicate) && have.Restored == nil && (r.Node == "" || r.IssuedBefore != nil) {
			return have, nil
		}
	}
	if len(r.Actor) > maxActor {
		return r, fmt.Errorf("the actor's name has %d bytes; at most %d are kept", len(r.Actor), maxActor)
	}
	if len(state.Revocations) >= MaxRevocations {
		return r, fmt.Errorf("there are %d revocations already, and no more fit: those by serial, node and time are forgotten once the certificates "+
			"have ended, those of an identity some time after `chancery restore`", len(state.Revocations))
	}
	b := make([]byte, 8)
	rand.Read(b) // never fails
	r.ID, r.Version = hex.EncodeToString(b), d.Version
	state.Revocations = append(state.Revocations, r)
	return r, nil
}

// Restore ends the revocation of an identity.
func (d *Document) Restore(td trust.Domain, id trust.ID, now time.Time) error {
	until := now.Add(ca.LeafTTLLimit)
	found := false
	state := d.State(td)
	for i := range state.Revocations {
		if r := &state.Revocations[i]; r.Names(id) && r.Restored == nil {
			r.Restored, r.Until, found = &now, &until, true
		}
	}
	if !found {
		return fmt.Errorf("%s is not revoked; `chancery revoke list` prints what is", id)
	}
	return nil
}
