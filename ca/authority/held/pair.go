package held

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// Pair is what a server signs with by one document: the active issuer and, while a migration has two trust domains sign, that of the other
// one. It is immutable.
type Pair struct {
	First  Issuer
	Second Issuer // its Issuer is nil if there is none
	Lacks  error  // why there is no second one, if there should be

	line  trust.Domain
	state *document.DomainState
}

// Pair opens what signs beside the active issuer of a document. Who has a pair already gives it along: then its issuers are not checked again.
func (h *Issuers) Pair(ctx context.Context, d *document.Document, first Issuer, was *Pair) *Pair {
	line, _ := d.Line(h.config.Domain)
	p := &Pair{First: first, line: line, state: d.State(line)}
	x := p.state.Second()
	if x == nil {
		return p
	}
	var err error
	switch {
	case was != nil && was.Second.Issuer != nil && h.Is(was.Second.Issuer, d, x):
		p.Second = was.Second
	default:
		if p.Second, err = h.Open(ctx, d, x); err == nil {
			if err = h.Check(p.Second.Issuer); err == nil {
				h.Keep(p.Second)
			}
		}
	}
	if err != nil {
		p.Second, p.Lacks = Issuer{}, fmt.Errorf("the issuer of trust domain %s, to which identities migrate, cannot be used here: %w", x.DomainOf(line), err)
	}
	return p
}

// Alone returns a pair that is one issuer.
func Alone(i *ca.Issuer) *Pair {
	return &Pair{First: Issuer{Issuer: i}, line: i.Domain(), state: new(document.DomainState)}
}

// With returns a pair of the same document with issuers as they may be used now; itself, if they are its own.
func (p *Pair) With(first, second *ca.Issuer, lacks error) *Pair {
	if p.First.Issuer == first && p.Second.Issuer == second {
		return p
	}
	next := *p
	next.First.Issuer, next.Second.Issuer, next.Lacks = first, second, lacks
	return &next
}

// Has reports whether a trust domain is one of the line's.
func (p *Pair) Has(td trust.Domain) bool {
	return td == p.First.Domain() || p.First.Bundle().Of(td) != nil
}

// For returns the issuer that signs for an identity, and that identity in the trust domain in which it gets its certificates now: the asked
// one may be of any of the line's (decision D17).
func (p *Pair) For(id trust.ID) (*ca.Issuer, trust.ID, error) {
	as := id
	if of := p.state.DomainFor(p.line, id); of != id.Domain() {
		as = id.WithDomain(of)
	}
	i, err := p.As(as)
	return i, as, err
}

// Allows returns why an identity is not issued as it is asked for; nil if it is: for who gets exactly what it asks, or nothing (decision D17). An
// identity may have the trust domain that it is migrating from until nobody gets certificates of that, and the other one from when it is issued.
func (p *Pair) Allows(id trust.ID) error {
	now := p.state.DomainFor(p.line, id)
	r := p.state.Rotation
	switch {
	case id.Domain() == now:
		return nil
	case p.state.Second() != nil && (id.Domain().String() == r.Migration.From || id.Domain().String() == r.Migration.To): // if one cannot be signed now, As says so
		return nil
	case r != nil && r.Migration != nil:
		return fmt.Errorf("%s is not issued in phase %s of the migration from trust domain %s to %s; ask for %s", id, r.Phase, r.Migration.From, r.Migration.To, id.WithDomain(now))
	}
	return fmt.Errorf("%s is not issued any more, or not yet; ask for %s", id, id.WithDomain(now))
}

// As returns the issuer that signs for an identity exactly as it is, whichever share it is in.
func (p *Pair) As(id trust.ID) (*ca.Issuer, error) {
	switch of := id.Domain(); {
	case of == p.First.Domain():
		return p.First.Issuer, nil
	case p.Second.Issuer != nil && of == p.Second.Domain():
		return p.Second.Issuer, nil
	case p.Lacks != nil:
		return nil, fmt.Errorf("%w: %w", ca.ErrNotReady, p.Lacks)
	default:
		return nil, fmt.Errorf("%w: no issuer signs for trust domain %s", ca.ErrNotReady, of)
	}
}

// Expiries returns the end of each certificate that a server's work depends on, by a name for metrics.
func (p *Pair) Expiries() map[string]time.Time {
	out := map[string]time.Time{}
	if p == nil {
		return out
	}
	add := func(kind string, certs []*x509.Certificate) {
		for _, x := range certs {
			out[fmt.Sprintf("%s %x", kind, x.SubjectKeyId)] = x.NotAfter
		}
	}
	add("issuer", p.First.Chain())
	add("root", p.First.Bundle().All())
	if p.Second.Issuer != nil {
		add("issuer", p.Second.Chain())
	}
	return out
}
