package authority

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/replica"
)

// This file puts a new issuer into use in two steps, and opens issuers for their CRLs. A verifier that has CRLs refuses
// every leaf of an issuer whose CRL it lacks (decision D22): so the CRL of a new issuer is out before its first leaf.

// maxTTL is the longest life of a leaf.
func (c Config) maxTTL() time.Duration {
	longest := ca.DefaultMaxTTL
	for _, p := range c.Profiles {
		longest = max(longest, p.MaxTTL())
	}
	return longest
}

// reconnect is how long after a start agents may need to be back: they try again after a minute and a half at most. The
// server may have ended before the CRL of the issuer that it prepared was out.
const reconnect = 2 * time.Minute

// due reports whether a prepared issuer should sign: once nobody can have a valid leaf who was last seen before it was
// prepared, and so may lack its CRL; sooner if the one in use has not that long.
func (a *Keeper) due(next *Authority, using *ca.Issuer, now time.Time) bool {
	lead := a.lead(using.Certificate())
	return now.Sub(next.Created) >= lead && now.Sub(a.running) >= reconnect || using.NotAfter().Sub(now) < lead
}

// lead is how long an issuer is prepared before it signs.
func (a *Keeper) lead(cert *x509.Certificate) time.Duration {
	return min(a.config.maxTTL(), cert.NotAfter.Sub(cert.NotBefore)/6)
}

// prepare makes the next issuer under the active root. Roots being all that verifiers know, nobody needs to learn of it
// but by its CRL: each leaf is sent with its issuer.
func (a *Keeper) prepare(ctx context.Context) error {
	err := a.succeed(ctx, func(next *Document, key Key, cert *x509.Certificate) (*Authority, error) {
		err := next.Prepare(a.config.Domain, key, a.config.Sealer, cert)
		return next.Prepared(a.config.Domain), err
	})
	if next := a.Document().Prepared(a.config.Domain); err == nil && next != nil {
		a.config.Logger.Info("next issuer prepared; it signs once its CRL is everywhere", "issuer", next.ID)
	}
	return err
}

// changer is one of the ways to change the document: Change, or Drive.
type changer func(ctx context.Context, f func(next *Document) error) error

// activate puts a prepared issuer to use. A crash before the store leaves it prepared; after, the next start uses it.
func (a *Keeper) activate(ctx context.Context, change changer, id string) error {
	return change(ctx, func(next *Document) error {
		if now, err := next.Active(a.config.Domain, KindIssuer); err == nil && now.ID == id && next.Prepared(a.config.Domain) == nil {
			return replica.ErrUnchanged // another replica was faster
		}
		if err := next.Promote(a.config.Domain, id); err != nil {
			return err
		}
		x, err := next.Active(a.config.Domain, KindIssuer)
		if err != nil {
			return err
		}
		return a.tryOpen(ctx, next, x)
	})
}

// Announce sets what is called while an issuer waits to be used: it should return once the CRLs of all CRLSigners are out, or
// with the reason why they cannot be had now. It is called before Run.
func (a *Keeper) Announce(f func(context.Context) error) { a.announce = f }

// warnUnannounced is for an issuer that is to be used, whatever comes.
func (a *Keeper) warnUnannounced(why error) {
	if why != nil {
		a.config.Logger.Error("the CRL of the new issuer is not out before it signs; verifiers may refuse its first certificates for a moment", "reason", why.Error())
	}
}

// HoldsPrepared returns why the issuer that waits to sign could not sign here; nil if it could, or if none waits.
func (a *Keeper) HoldsPrepared(ctx context.Context) error {
	doc := a.Document()
	next := doc.Prepared(a.config.Domain)
	if next == nil {
		return nil
	}
	use, err := a.openHeld(ctx, doc, next)
	if err != nil {
		return fmt.Errorf("issuer %s is prepared, and cannot be opened here: %w", next.ID, err)
	}
	a.held.Store(next.ID, use)
	return nil
}

// CRLSigner is an issuer that may have live leaves, or will have.
type CRLSigner struct {
	ID       string
	Chain    []*x509.Certificate // its own, and those between it and the root
	Issuer   *ca.Issuer          // nil if it cannot sign a CRL; Why says why
	Why      error
	Retry    bool   // its key is somewhere, and may open another time
	CRL      []byte // its last one, where one is kept
	KeepCRL  bool   // its key lies outside: the last CRL should be kept
	MaxTTL   time.Duration
	NotAfter time.Time // of its certificate
}

// CRLSigners returns the issuers whose CRLs verifiers need, one for each name and key.
func (a *Keeper) CRLSigners(ctx context.Context) ([]CRLSigner, error) {
	doc, c := a.Document(), a.config
	state := doc.Domains[c.Domain.String()]
	if state == nil {
		return nil, fmt.Errorf("the authority document has nothing for trust domain %s", c.Domain)
	}
	if err := a.MaySign(); err != nil {
		return nil, err
	}
	var out []CRLSigner
	now := time.Now()
	for _, want := range []document.AuthorityState{StateActive, StatePrepared, StateRetiring} {
		for i := range state.Authorities {
			x := &state.Authorities[i]
			if x.Kind != KindIssuer || x.State != want {
				continue
			}
			chain, err := x.Certificates()
			if err != nil {
				return nil, err
			}
			live := ca.LeafTTLLimit // whatever the profile was
			if !x.HasKey() {        // no longer than needed: one that cannot sign ends the CRLs of all
				live = c.maxTTL() + time.Minute
			}
			if now.After(chain[0].NotAfter) || now.After(state.LastSigned(x).Add(live)) || signsAlready(out, chain[0]) {
				continue
			}
			s := CRLSigner{ID: x.ID, Chain: chain, CRL: x.CRL, KeepCRL: !x.HasKey(), MaxTTL: c.maxTTL(), NotAfter: chain[0].NotAfter}
			s.Issuer, s.Retry, s.Why = a.crlIssuer(ctx, doc, x, chain[0])
			out = append(out, s)
		}
	}
	return out, nil
}

func signsAlready(all []CRLSigner, cert *x509.Certificate) bool {
	for _, s := range all {
		if bytes.Equal(s.Chain[0].RawSubject, cert.RawSubject) && bytes.Equal(s.Chain[0].SubjectKeyId, cert.SubjectKeyId) {
			return true
		}
	}
	return false
}

// crlIssuer opens an issuer once. After an error, retry says whether it may work another time.
func (a *Keeper) crlIssuer(ctx context.Context, doc *Document, x *Authority, cert *x509.Certificate) (_ *ca.Issuer, retry bool, _ error) {
	if cert.KeyUsage&x509.KeyUsageCRLSign == 0 {
		return nil, false, errors.New("its certificate's key usage lacks cRLSign, so no verifier takes a CRL of it")
	}
	if v, ok := a.held.Load(x.ID); ok { // one key may have been certified under two names
		if have := v.(active).issuer; bytes.Equal(have.Certificate().RawSubject, cert.RawSubject) {
			return have, false, nil
		}
	}
	if !x.HasKey() {
		if a.config.Plugged != nil && x.State != StateRetiring {
			return nil, true, a.lacksKey(x) // the files may get it
		}
		return nil, false, errors.New("its key is not here any more")
	}
	use, err := a.openHeld(ctx, doc, x)
	if err != nil {
		return nil, true, err
	}
	a.held.Store(x.ID, use)
	return use.issuer, false, nil
}
