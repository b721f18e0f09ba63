package authority

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/replica"
)

// This file puts a new issuer into use in two steps. A verifier that has CRLs refuses every leaf of an issuer whose CRL it lacks (decision D22): so the CRL of a new issuer is out before its first leaf.

// reconnect is how long after a start agents may need to be back: they try again after a minute and a half at most. The
// server may have ended before the CRL of the issuer that it prepared was out.
const reconnect = 2 * time.Minute

// due reports whether a prepared issuer should sign: once nobody can have a valid leaf who was last seen before it was
// prepared, and so may lack its CRL; sooner if the one in use has not that long.
func (a *Keeper) due(next *Authority, using *x509.Certificate, now time.Time) bool {
	lead := a.lead(using)
	return now.Sub(next.Created) >= lead && now.Sub(a.running) >= reconnect || using.NotAfter.Sub(now) < lead
}

// announced returns why an issuer waits whose CRL should be out before it signs, if there is time for another try.
func (a *Keeper) announced(ctx context.Context, next *Authority, using *x509.Certificate, now time.Time) error {
	if why := a.announce(ctx); why != nil && using.NotAfter.Sub(now) >= a.lead(using) {
		return &waitsError{next.ID, why}
	}
	return nil
}

// lead is how long an issuer is prepared before it signs.
func (a *Keeper) lead(cert *x509.Certificate) time.Duration {
	return min(held.MaxTTL(a.config.Profiles), cert.NotAfter.Sub(cert.NotBefore)/6)
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
		was := ""
		if now, err := next.Active(a.config.Domain, KindIssuer); err == nil && now.ID == id && next.Prepared(a.config.Domain) == nil {
			return replica.ErrUnchanged // another replica was faster
		} else if err == nil {
			was = now.ID
		}
		if err := next.Promote(a.config.Domain, id); err != nil {
			return err
		}
		x, err := next.Active(a.config.Domain, KindIssuer)
		if err != nil {
			return err
		}
		next.State(a.config.Domain).Renewed(was, x.ID)
		return a.held.Try(ctx, next, x)
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

// HoldsPrepared returns why an issuer that waits to sign could not sign here; nil if each could, or if none waits.
func (a *Keeper) HoldsPrepared(ctx context.Context) error {
	doc := a.Document()
	state := a.stateOf(doc)
	for i := range state.Authorities {
		next := &state.Authorities[i]
		if next.Kind != KindIssuer || next.State != StatePrepared {
			continue
		}
		use, err := a.held.Open(ctx, doc, next)
		if err != nil {
			return fmt.Errorf("issuer %s is prepared, and cannot be opened here: %w", next.ID, err)
		}
		a.held.Keep(use)
	}
	return nil
}

// CRLSigners returns the issuers whose CRLs verifiers need, one for each name and key.
func (a *Keeper) CRLSigners(ctx context.Context) ([]CRLSigner, error) {
	if err := a.MaySign(); err != nil {
		return nil, err
	}
	return a.held.CRLSigners(ctx, a.Document())
}
