package csr

import (
	"encoding/pem"
	"strings"
	"sync/atomic"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/trust"
)

// rendered is what all answers of one issuer share, in the forms that the two APIs send.
type rendered struct {
	issuer *ca.Issuer
	ski    string
	calls  *evidence.Calls // those that go by this issuer now
	pem    []string        // intermediates, one an element; then all roots in one
	der    [][]byte        // intermediates
	bundle *chanceryv1.Bundle
}

// renderCache holds the rendering of the issuer of the moment.
type renderCache struct{ p atomic.Pointer[rendered] }

func (c *renderCache) of(i *ca.Issuer, l *evidence.Ledger) *rendered {
	if r := c.p.Load(); r != nil && r.issuer == i {
		return r
	}
	b := i.Bundle()
	r := &rendered{issuer: i, ski: i.SKI(), calls: l.Calls(i.SKI()), bundle: &chanceryv1.Bundle{TrustDomain: b.Domain().String(), Generation: b.Generation()}}
	for _, x := range i.Chain() {
		r.pem = append(r.pem, string(trust.EncodeCertificates(x)))
		r.der = append(r.der, x.Raw)
	}
	r.pem = append(r.pem, string(b.PEM()))
	for _, x := range b.Roots() {
		r.bundle.Roots = append(r.bundle.Roots, x.Raw)
	}
	c.p.Store(r)
	return r
}

// leave ends a call that began by the issuer; nil for one that found none.
func (r *rendered) leave() {
	if r != nil {
		r.calls.Leave()
	}
}

// leaf says of a certificate what the ledger keeps.
func (r *rendered) leaf(c *ca.Certificate) evidence.Leaf {
	return evidence.Leaf{Issuer: r.ski, Serial: c.Serial, Generation: r.bundle.GetGeneration(), NotAfter: c.NotAfter}
}

func (r *rendered) istioChain(leaf []byte) []string {
	var text strings.Builder
	text.Grow(64 + len(leaf)*4/3 + len(leaf)/48 + 4)                    // frame, base64, line ends: one allocation instead of five
	_ = pem.Encode(&text, &pem.Block{Type: "CERTIFICATE", Bytes: leaf}) // a Builder takes everything
	return append(append(make([]string, 0, len(r.pem)+1), text.String()), r.pem...)
}

func (r *rendered) nativeChain(leaf []byte) [][]byte {
	return append([][]byte{leaf}, r.der...)
}
