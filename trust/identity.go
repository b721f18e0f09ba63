package trust

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// Identity is an X509-SVID with its key and the bundle it was verified against: one snapshot that is never changed
// (invariant 6). Its fields must not be modified.
type Identity struct {
	ID         ID
	Chain      []*x509.Certificate // leaf first, then intermediates; no root
	Key        crypto.Signer
	Bundle     *Bundle
	ReceivedAt time.Time // wall clock; renewal counts from here, not from the backdated NotBefore (decision D20)

	fits *Bundle // whose roots it was verified against last; nil if it was not
}

// NewIdentity returns the identity after checking that it works (invariant 7): the key belongs to the leaf, the leaf
// is an SVID for want, or for the same path in another domain of the bundle (WithKin), and the chain verifies against the bundle at time now.
func NewIdentity(want ID, chain []*x509.Certificate, key crypto.Signer, b *Bundle, now time.Time) (*Identity, error) {
	if len(chain) == 0 {
		return nil, errors.New("the chain is empty")
	}
	if !SameKey(chain[0].PublicKey, key.Public()) {
		return nil, fmt.Errorf("certificate with serial %x is for another key than ours", chain[0].SerialNumber.Bytes())
	}
	id, _, err := Verify(chain, Only(b), now)
	if err != nil {
		return nil, err
	}
	if id != want && (b.Of(want.Domain()) == nil || id != want.WithDomain(id.Domain())) {
		return nil, fmt.Errorf("certificate is for %s; asked for %s", id, want)
	}
	return &Identity{ID: id, Chain: chain, Key: key, Bundle: b, ReceivedAt: now.Round(0), fits: b}, nil
}

// WithBundle returns the same SVID with another bundle, against which it must verify, too (invariant 7). An SVID that
// has ended works for nobody and takes any. That it is on a CRL of the bundle is no objection: whom to trust does not
// wait for a new SVID (decision D6). Against the same roots it is not verified again: most bundles that come bring nothing new.
func (i *Identity) WithBundle(b *Bundle, now time.Time) (*Identity, error) {
	next := *i
	if now.Before(i.NotAfter()) && !b.SameRoots(i.fits) {
		if _, _, err := Verify(i.Chain, Only(b.WithCRLs(nil)), now); err != nil {
			return nil, err
		}
		next.fits = b
	}
	next.Bundle = b
	return &next, nil
}

// Leaf returns the SVID's own certificate.
func (i *Identity) Leaf() *x509.Certificate { return i.Chain[0] }

// Serial returns the leaf's serial number in lower-case hex.
func (i *Identity) Serial() string { return fmt.Sprintf("%x", i.Leaf().SerialNumber.Bytes()) }

// NotAfter returns the leaf's end.
func (i *Identity) NotAfter() time.Time { return i.Leaf().NotAfter }

// TLSCertificate returns the chain and key for crypto/tls.
func (i *Identity) TLSCertificate() *tls.Certificate {
	c := &tls.Certificate{PrivateKey: i.Key, Leaf: i.Leaf()}
	for _, x := range i.Chain {
		c.Certificate = append(c.Certificate, x.Raw)
	}
	return c
}
