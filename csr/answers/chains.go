package answers

import (
	"encoding/pem"
	"strings"
	"sync/atomic"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/trust"
)

// Chains is what all answers of one issuer share, in the forms that the two APIs send.
type Chains struct {
	issuer *ca.Issuer
	ski    string
	calls  *evidence.Calls // those that go by this issuer now
	pem    []string        // intermediates, one an element; then all roots in one
	der    [][]byte        // intermediates
	bundle *chanceryv1.Bundle
}

// Cache holds the chains of the issuer of the moment. Its zero value is empty.
type Cache struct{ p atomic.Pointer[Chains] }

// Of returns the chains of an issuer; l counts the calls that go by it.
func (c *Cache) Of(i *ca.Issuer, l *evidence.Ledger) *Chains {
	if r := c.p.Load(); r != nil && r.issuer == i {
		return r
	}
	r := &Chains{issuer: i, ski: i.SKI(), calls: l.Calls(i.SKI(), i.Bundle().Generation()), bundle: Roots(i.Bundle())}
	for _, x := range i.Chain() {
		r.pem = append(r.pem, string(trust.EncodeCertificates(x)))
		r.der = append(r.der, x.Raw)
	}
	r.pem = append(r.pem, string(trust.EncodeCertificates(i.Bundle().All()...))) // of the own authority's trust domains, and no others (decision D24)
	c.p.Store(r)
	return r
}

// Issuer returns the issuer.
func (r *Chains) Issuer() *ca.Issuer { return r.issuer }

// Calls counts the calls that go by the issuer.
func (r *Chains) Calls() *evidence.Calls { return r.calls }

// Leave ends a call that began by the issuer; nil for one that found none.
func (r *Chains) Leave() {
	if r != nil {
		r.calls.Leave()
	}
}

// Leaf says of a certificate what the ledger keeps.
func (r *Chains) Leaf(c *ca.Certificate) evidence.Leaf {
	return evidence.Leaf{Issuer: r.ski, Serial: c.Serial, Generation: r.bundle.GetGeneration(), NotAfter: c.NotAfter}
}

// Bundle returns the roots. Callers must not change it.
func (r *Chains) Bundle() *chanceryv1.Bundle { return r.bundle }

// Istio returns the chain of a leaf in DER as Istio's clients know it: an element for each certificate, the last with all roots.
func (r *Chains) Istio(leaf []byte) []string {
	var text strings.Builder
	text.Grow(64 + len(leaf)*4/3 + len(leaf)/48 + 4)                    // frame, base64, line ends: one allocation instead of five
	_ = pem.Encode(&text, &pem.Block{Type: "CERTIFICATE", Bytes: leaf}) // a Builder takes everything
	return append(append(make([]string, 0, len(r.pem)+1), text.String()), r.pem...)
}

// Native returns the chain of a leaf in DER, without the roots.
func (r *Chains) Native(leaf []byte) [][]byte {
	return append([][]byte{leaf}, r.der...)
}
