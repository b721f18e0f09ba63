package trust

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
)

// Bundle is the set of root certificates that vouch for one trust domain and, where they are known, the CRLs of its
// issuers. It is immutable: a change makes a new one, of the roots with a higher generation.
type Bundle struct {
	domain     Domain
	generation uint64
	roots      []*x509.Certificate
	pool       *x509.CertPool
	crls       *CRLs
}

// NewBundle checks and sorts the roots: each must be a CA certificate that may sign certificates, and none may occur
// twice. An empty set is valid and means that nothing of this domain is trusted (Trust Domain and Bundle section 4).
func NewBundle(d Domain, generation uint64, roots []*x509.Certificate) (*Bundle, error) {
	if d.IsZero() {
		return nil, errors.New("bundle without a trust domain")
	}
	if len(roots) > MaxCertificates {
		return nil, fmt.Errorf("bundle of %s has %d roots; at most %d are allowed", d, len(roots), MaxCertificates)
	}
	sorted := slices.Clone(roots)
	slices.SortFunc(sorted, func(a, b *x509.Certificate) int { return bytes.Compare(a.Raw, b.Raw) })
	pool := x509.NewCertPool()
	for i, c := range sorted {
		if !c.BasicConstraintsValid || !c.IsCA {
			return nil, fmt.Errorf("bundle of %s: certificate %q is not a CA certificate", d, c.Subject)
		}
		if c.KeyUsage != 0 && c.KeyUsage&x509.KeyUsageCertSign == 0 {
			return nil, fmt.Errorf("bundle of %s: certificate %q may not sign certificates (no keyCertSign)", d, c.Subject)
		}
		if i > 0 && c.Equal(sorted[i-1]) {
			return nil, fmt.Errorf("bundle of %s: certificate %q occurs twice", d, c.Subject)
		}
		pool.AddCert(c)
	}
	return &Bundle{domain: d, generation: generation, roots: sorted, pool: pool}, nil
}

// Domain returns the trust domain that the roots vouch for.
func (b *Bundle) Domain() Domain { return b.domain }

// Generation returns the number of this version; a later bundle of the same domain has a higher one.
func (b *Bundle) Generation() uint64 { return b.generation }

// Roots returns the root certificates in the order of their DER bytes. Callers must not change them.
func (b *Bundle) Roots() []*x509.Certificate { return slices.Clip(b.roots) }

// CRLs returns the CRLs of the domain's issuers; nil where none are known.
func (b *Bundle) CRLs() *CRLs { return b.crls }

// WithCRLs returns the same roots with other CRLs, which NewCRLs has verified against them; nil takes them away.
func (b *Bundle) WithCRLs(c *CRLs) *Bundle {
	next := *b
	next.crls = c
	return &next
}

// WithGeneration returns the same roots and CRLs under another number.
func (b *Bundle) WithGeneration(n uint64) *Bundle {
	next := *b
	next.generation = n
	return &next
}

// PEM returns the roots as concatenated PEM blocks.
func (b *Bundle) PEM() []byte { return EncodeCertificates(b.roots...) }

// DER returns the roots' DER bytes, concatenated, as the SPIFFE Workload API has them.
func (b *Bundle) DER() []byte { return ConcatDER(b.roots) }

// SameRoots reports whether both bundles hold the same domain and roots, whatever their generations and CRLs.
func (b *Bundle) SameRoots(o *Bundle) bool {
	return o != nil && b.domain == o.domain &&
		slices.EqualFunc(b.roots, o.roots, func(x, y *x509.Certificate) bool { return x.Equal(y) })
}

// ConcatDER returns the DER bytes of the certificates, one after the other.
func ConcatDER(certs []*x509.Certificate) []byte {
	var out []byte
	for _, c := range certs {
		out = append(out, c.Raw...)
	}
	return out
}
