// Package lines owns by which issuer a certificate is signed where one authority has two trust domains (decision D17): each call sees both
// issuers as one document has them.
//
// It refuses to substitute one identity for another: who asks for an identity by name gets that, or is told which one to ask for.
package lines

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/csr/answers"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/trust"
)

// Cache holds what all calls by one pair of issuers share. Its zero value is empty.
type Cache struct {
	last          atomic.Pointer[Call]
	first, second answers.Cache
}

// Call is what a call goes by. It is shared, and immutable.
type Call struct {
	pair          *held.Pair
	first, second *answers.Chains
}

// Of returns what calls by a pair go by. The ledger counts those under way: Leave is due for each.
func (c *Cache) Of(p *held.Pair, l *evidence.Ledger) (*Call, *evidence.Calls) {
	r := c.last.Load()
	if r == nil || r.pair != p {
		r = &Call{pair: p, first: c.first.Of(p.First.Issuer, l)}
		if i := p.Second.Issuer; i != nil {
			r.second = c.second.Of(i, l)
		}
		c.last.Store(r)
	}
	if r.second != nil {
		r.second.Calls().Enter()
	}
	return r, r.first.Calls()
}

// Leave ends a call; nil is one that found no issuer.
func (c *Call) Leave() {
	if c == nil {
		return
	}
	c.first.Leave()
	c.second.Leave()
}

// Chains returns what answers have in common that are not about one certificate.
func (c *Call) Chains() *answers.Chains { return c.first }

// For returns by what the certificate of an identity is signed in the trust domain that the plan gives it, and the identity in that.
func (c *Call) For(id trust.ID) (*answers.Chains, trust.ID, error) {
	i, as, err := c.pair.For(id)
	if err != nil {
		return nil, as, err
	}
	return c.of(i.Domain()), as, nil
}

// As returns by what the certificate of an identity is signed exactly as it was asked for. Denied is why it is not.
func (c *Call) As(id trust.ID) (_ *answers.Chains, denied, err error) {
	if denied := c.pair.Allows(id); denied != nil {
		return nil, denied, nil
	}
	i, err := c.pair.As(id)
	if err != nil {
		return nil, nil, err
	}
	return c.of(i.Domain()), nil, nil
}

func (c *Call) of(td trust.Domain) *answers.Chains {
	if c.second != nil && c.second.Issuer().Domain() == td {
		return c.second
	}
	return c.first
}

// Check returns an error for a trust domain that is none of the line's.
func (c *Call) Check(id trust.ID) error {
	if c.pair.Has(id.Domain()) {
		return nil
	}
	return fmt.Errorf("%s is not in trust domain %s", id, strings.Join(c.names(), " or "))
}

func (c *Call) names() []string {
	b := c.pair.First.Bundle()
	names := []string{b.Domain().String()}
	for _, k := range b.Kin() {
		names = append(names, k.Domain().String())
	}
	return names
}

// Says reports whether a name in a request says an identity: itself, or the same path in another trust domain of the line or in an alias
// of it (decision D17).
func (c *Call) Says(name string, id trust.ID, aliases []trust.Domain) bool {
	if name == id.String() {
		return true
	}
	if !strings.HasSuffix(name, id.Path()) {
		return false
	}
	other, err := trust.ParseID(name)
	return err == nil && other.Path() == id.Path() && (c.pair.Has(other.Domain()) || slices.Contains(aliases, other.Domain()))
}
