// Package second owns the life of the issuer that signs beside the active one while a migration has two trust domains sign: that may take
// longer than an issuer lives, so it is followed by another under the same root at half of its life, in the steps of every other.
//
// It refuses to decide when a migration gets on: that is for package rotate/stages.
package second

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/trust"
)

// Config says what it works on.
type Config struct {
	Domain trust.Domain
	Sealer *keys.Sealer
	TTL    time.Duration // of issuers
	Held   *held.Issuers
	Drive  func(context.Context, func(next *document.Document) error) error
	// Ready reports whether a prepared issuer may follow another one now: everybody has its CRL, or there is no more time.
	Ready func(next *document.Authority, using *x509.Certificate) (bool, error)
	Drop  func(context.Context, ...document.Key) // deletes keys that no document names
}

// Mind does once what is the driver's to do.
func Mind(ctx context.Context, c Config, doc *document.Document, now time.Time) error {
	state := doc.State(c.Domain)
	x, next := state.Second(), state.NextSecond()
	if x == nil {
		return nil
	}
	using, err := x.X509()
	if err != nil {
		return err
	}
	if next == nil {
		begin, life, err := x.Life()
		if err != nil || now.Sub(begin) <= life/2 {
			return err
		}
		return c.prepare(ctx, doc, x.ID)
	}
	if ready, err := c.Ready(next, using); err != nil || !ready && !x.Ended(now) {
		return err
	}
	return c.Drive(ctx, func(d *document.Document) error {
		s := d.State(c.Domain)
		if s.Second() == nil || s.Second().ID != x.ID || s.NextSecond() == nil || s.NextSecond().ID != next.ID {
			return replica.ErrUnchanged // somebody was faster, or the phase is over
		}
		up, err := d.PromoteSecond(c.Domain, now)
		if err != nil {
			return err
		}
		return c.Held.Try(ctx, d, up)
	})
}

// prepare makes the next one.
func (c *Config) prepare(ctx context.Context, doc *document.Document, using string) error {
	r := doc.State(c.Domain).Rotation
	ttl := c.TTL
	if ttl == 0 {
		ttl = ca.DefaultIssuerTTL
	}
	cert, key, err := c.Held.NewIssuer(ctx, doc, r.ToRoot, ttl)
	if err != nil {
		return fmt.Errorf("making the next issuer of trust domain %s: %w", r.Migration.To, err)
	}
	tried := false
	err = c.Drive(ctx, func(d *document.Document) error {
		s := d.State(c.Domain)
		if s.Second() == nil || s.Second().ID != using || s.NextSecond() != nil {
			return replica.ErrUnchanged
		}
		if err := d.PrepareSecond(c.Domain, key, c.Sealer, cert); err != nil {
			return err
		}
		tried = true
		return c.Held.Try(ctx, d, s.NextSecond())
	})
	if !tried {
		c.Drop(ctx, key)
	}
	return err
}
