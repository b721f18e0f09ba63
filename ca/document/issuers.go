package document

import (
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// This file is about one issuer following another.

// ReplaceIssuer makes cert the active issuer. The former one retires: no certificate is signed with it any more, and what
// it signed stays valid, since each leaf is sent with its issuer. Its key stays for its CRLs until its leaves have ended.
func (d *Document) ReplaceIssuer(td trust.Domain, key Key, s *keys.Sealer, cert *x509.Certificate, chain ...*x509.Certificate) error {
	if err := d.retire(td); err != nil {
		return err
	}
	return d.Add(td, KindIssuer, key, s, cert, chain...)
}

// retire retires the active issuer.
func (d *Document) retire(td trust.Domain) error {
	old, err := d.Active(td, KindIssuer)
	if err != nil {
		return err
	}
	now := time.Now().UTC().Truncate(time.Second)
	old.State, old.Retired = StateRetiring, &now
	d.DropEndedIssuers(td, now)
	d.DropPrepared(td)
	return nil
}

// DropEndedIssuers forgets retired issuers whose certificates have ended, so that the document does not grow for ever, and
// the keys of those whose last leaf has ended, whatever profile it had.
func (d *Document) DropEndedIssuers(td trust.Domain, now time.Time) {
	state := d.State(td)
	kept := state.Authorities[:0]
	for _, a := range state.Authorities {
		if cert, err := a.X509(); a.Kind == KindIssuer && a.State == StateRetiring && err == nil {
			if now.After(cert.NotAfter) {
				continue
			}
			if a.Retired != nil && now.After(a.Retired.Add(ca.LeafTTLLimit)) {
				a.Key, a.KeyRef, a.CRL = nil, "", nil
			}
		}
		kept = append(kept, a)
	}
	state.Authorities = kept
}

// Prepared returns the issuer that waits to sign, nil if there is none. That of a rotation is another matter: it waits for the rotation's
// gates, and meanwhile the issuer in use may have to be followed by one under the same root.
func (d *Document) Prepared(td trust.Domain) *Authority {
	if state := d.Of(td); state != nil {
		for i := range state.Authorities {
			if a := &state.Authorities[i]; a.Kind == KindIssuer && a.State == StatePrepared && !state.isSuccessor(a) {
				return a
			}
		}
	}
	return nil
}

// isSuccessor reports whether an issuer is that of a rotation, or, of a migration in which both sign, is to follow it under the same root.
func (s *DomainState) isSuccessor(a *Authority) bool {
	r := s.Rotation
	return r != nil && (a.ID == r.ToIssuer || s.Second() != nil && a.RootID() == r.ToRoot)
}

// DropPrepared forgets issuers that have never signed a certificate, but for that of a rotation.
func (d *Document) DropPrepared(td trust.Domain) {
	state := d.State(td)
	kept := state.Authorities[:0]
	for _, a := range state.Authorities {
		if a.Kind != KindIssuer || a.State != StatePrepared || state.isSuccessor(&a) {
			kept = append(kept, a)
		}
	}
	state.Authorities = kept
}

// Promote makes a prepared issuer the active one.
func (d *Document) Promote(td trust.Domain, id string) error {
	state := d.State(td)
	at := slices.IndexFunc(state.Authorities, func(a Authority) bool { return a.Kind == KindIssuer && a.ID == id && a.State == StatePrepared })
	if at < 0 { // an ID alone may be that of the active one, certified anew
		return fmt.Errorf("issuer %s is not prepared any more", id)
	}
	up := state.Authorities[at]
	up.State, up.Wanted = StateActive, false
	state.Authorities = slices.Delete(state.Authorities, at, at+1)
	if err := d.retire(td); err != nil {
		return err
	}
	state.Authorities = append(state.Authorities, up)
	return nil
}

// Retired reports whether a certificate is that of an issuer that was replaced.
func (s *DomainState) Retired(cert *x509.Certificate) bool {
	return slices.ContainsFunc(s.Authorities, func(x Authority) bool {
		have, err := x.X509()
		return err == nil && x.Kind == KindIssuer && x.State == StateRetiring && have.Equal(cert)
	})
}

// LastSigned returns a time after which an issuer has signed no leaf; the future for one that may sign still. Versions that
// did not note it retired an issuer as they made the next.
func (s *DomainState) LastSigned(x *Authority) time.Time {
	switch {
	case x.State != StateRetiring:
		return time.Now()
	case x.Retired != nil:
		return *x.Retired
	}
	for i := range s.Authorities {
		if next := &s.Authorities[i]; next.Kind == KindIssuer && next.State != StatePrepared && next.Created.After(x.Created) {
			return next.Created // they are in the order in which they were made
		}
	}
	return time.Now()
}

// KeepCRLs keeps the last CRLs of issuers, by ID, and reports whether there were not as good ones.
func (s *DomainState) KeepCRLs(crls map[string][]byte) (changed bool) {
	for i := range s.Authorities {
		x := &s.Authorities[i]
		if crl := crls[x.ID]; crl != nil && x.Kind == KindIssuer && x.KeepCRL(crl) {
			changed = true
		}
	}
	return changed
}
