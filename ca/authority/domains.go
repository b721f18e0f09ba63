package authority

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/authority/second"
	"github.com/chancery-project/chancery/trust"
)

// This file is about a line that migrates from one trust domain to another: two issuers sign then, each for its share of the identities.

// pairUp joins the issuer of the moment and that of the other trust domain, by the document in use.
func (a *Keeper) pairUp(ctx context.Context) {
	was := a.pair.Load()
	next := a.held.Pair(ctx, a.Document(), *a.inUse.Load(), was)
	a.pair.Store(next)
	if next.Lacks != nil && (was == nil || was.Lacks == nil || was.Lacks.Error() != next.Lacks.Error()) {
		a.config.Logger.Error("nothing is issued for one trust domain of the migration", "reason", next.Lacks.Error())
	}
	if i := next.Second.Issuer; i != nil && (was == nil || was.Second.Issuer != i) {
		a.config.Logger.Info("issuer in use for its share of the identities", "issuer", i.SKI(), "trust_domain", i.Domain().String(), "not_after", i.NotAfter().UTC())
	}
}

// Issuers returns what signs at the moment: one issuer, or one for each trust domain of a migration, both by one document; or why nothing can be
// issued.
func (a *Keeper) Issuers() (*held.Pair, error) {
	p := a.pair.Load()
	if p == nil {
		_, err := a.usable(nil, nil)
		return nil, err
	}
	first, err := a.usable(p.First.Issuer, nil)
	if err != nil {
		return nil, err
	}
	second := p.Second.Issuer
	if second != nil {
		if second, err = a.usable(second, nil); err != nil {
			return p.With(first, nil, err), nil // who is of the first domain is not held up
		}
	}
	return p.With(first, second, p.Lacks), nil
}

// IssuerFor returns the issuer that signs for an identity of any trust domain of the line, and the identity in the one in which it gets its
// certificates now (decision D17); or why nothing can be issued for it.
func (a *Keeper) IssuerFor(id trust.ID) (*ca.Issuer, trust.ID, error) {
	p, err := a.Issuers()
	if err != nil {
		return nil, id, err
	}
	return p.For(id)
}

// Names returns the trust domains of the line, the present one first.
func (a *Keeper) Names() []trust.Domain { return a.Document().Names(a.config.Domain) }

// Present returns the trust domain that the line is now.
func (a *Keeper) Present() trust.Domain { return a.Document().Present(a.config.Domain) }

// Whole returns why something cannot be issued though there is an issuer: that of a migration's other trust domain.
func (a *Keeper) Whole() error {
	if p := a.pair.Load(); p != nil {
		return p.Lacks
	}
	return nil
}

// Migratable returns why this server cannot migrate its line to a trust domain, and what to do instead; nil if it can.
func (a *Keeper) Migratable(to trust.Domain) error {
	dir := ""
	if a.config.Plugged != nil {
		dir = a.config.Plugged.Dir
	}
	return held.Migratable(a.Document(), a.config.Domain, to, dir, a.config.Parented, time.Now())
}

// mindSecond sees to it that the issuer which signs beside the active one gets a successor in time. It is for the driver.
func (a *Keeper) mindSecond(ctx context.Context, now time.Time) {
	c, doc := a.config, a.Document()
	if a.stateOf(doc).Second() == nil {
		return
	}
	err := second.Mind(ctx, second.Config{
		Domain: c.Domain, Sealer: c.Sealer, TTL: c.IssuerTTL, Held: a.held, Drive: a.Drive, Drop: a.dropMade,
		Ready: func(next *Authority, using *x509.Certificate) (bool, error) {
			if !next.Wanted && !a.due(next, using, now) {
				return false, nil
			}
			err := a.announced(ctx, next, using, now)
			return err == nil, err
		},
	}, doc, now)
	if err != nil {
		err = fmt.Errorf("the issuer of the migration's other trust domain: %w", err)
	}
	a.tell(err, a.issuer.Load(), now)
}
