package trust

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Bundle is the set of root certificates that vouch for one trust domain and, where they are known, the CRLs of its
// issuers, with the bundles of the authority's other domains (WithKin). It is immutable: a change makes a new one, of the roots with a higher generation.
type Bundle struct {
	domain     Domain
	generation uint64
	roots      []*x509.Certificate
	pool       *x509.CertPool
	byKey      map[string]*x509.CertPool // the roots of each subject key identifier
	crls       *CRLs
	kin        []*Bundle // of the same authority; none has kin of its own
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
	pool, byKey := x509.NewCertPool(), map[string]*x509.CertPool{}
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
		if key := string(c.SubjectKeyId); key != "" {
			if byKey[key] == nil {
				byKey[key] = x509.NewCertPool()
			}
			byKey[key].AddCert(c)
		}
	}
	return &Bundle{domain: d, generation: generation, roots: sorted, pool: pool, byKey: byKey}, nil
}

// poolFor returns those roots that a chain says it leads to, by key identifier; nil if it does not say, or names several.
func (b *Bundle) poolFor(chain []*x509.Certificate) *x509.CertPool {
	var found *x509.CertPool
	for _, c := range chain {
		if pool := b.byKey[string(c.AuthorityKeyId)]; pool != nil && pool != found {
			if found != nil {
				return nil
			}
			found = pool
		}
	}
	return found
}

// Domain returns the trust domain that the roots vouch for.
func (b *Bundle) Domain() Domain { return b.domain }

// Generation returns the number of this version; a later bundle of the same domain has a higher one.
func (b *Bundle) Generation() uint64 { return b.generation }

// Roots returns the root certificates in the order of their DER bytes. Callers must not change them.
func (b *Bundle) Roots() []*x509.Certificate { return slices.Clip(b.roots) }

// CRLs returns the CRLs of the domain's issuers; nil where none are known.
func (b *Bundle) CRLs() *CRLs { return b.crls }

// WithCRLs returns the same roots with other CRLs, which NewCRLs has verified against them; nil takes them away. They are those of the kin, too.
func (b *Bundle) WithCRLs(c *CRLs) *Bundle {
	next := *b
	next.crls = c
	next.kin = nil
	for _, k := range b.kin {
		next.kin = append(next.kin, k.WithCRLs(c))
	}
	return &next
}

// WithKin returns the bundle with those of the other trust domains of the same authority: both domains of a migration, and former
// ones, which have no roots. Their identities count as one (Aliases), their roots do not: each vouches for its own domain only
// (decision D10). Generation and CRLs become those of b.
func (b *Bundle) WithKin(kin ...*Bundle) (*Bundle, error) {
	next := *b
	next.kin = nil
	for _, k := range kin {
		if k.domain == b.domain || next.Of(k.domain) != nil {
			return nil, fmt.Errorf("bundle of %s: trust domain %s occurs twice", b.domain, k.domain)
		}
		for _, r := range k.roots {
			if next.HasRoot(r) {
				return nil, fmt.Errorf("bundle of %s: root %q is one of %s, too; trust domains do not share roots", b.domain, r.Subject, k.domain)
			}
		}
		own := *k
		own.kin, own.generation, own.crls = nil, b.generation, b.crls
		next.kin = append(next.kin, &own)
	}
	if n := len(next.All()); n > MaxCertificates {
		return nil, fmt.Errorf("bundle of %s has %d roots with those of its kin; at most %d are allowed", b.domain, n, MaxCertificates)
	}
	slices.SortFunc(next.kin, func(x, y *Bundle) int { return strings.Compare(x.domain.name, y.domain.name) })
	return &next, nil
}

// Kin returns the bundles of the other trust domains of the same authority, in the order of their names. Callers must not change them.
func (b *Bundle) Kin() []*Bundle { return slices.Clip(b.kin) }

// Of returns the bundle of one of the authority's trust domains: b itself, or one of its kin; nil for any other.
func (b *Bundle) Of(d Domain) *Bundle {
	if b == nil {
		return nil
	}
	if b.domain == d {
		return b
	}
	for _, k := range b.kin {
		if k.domain == d {
			return k
		}
	}
	return nil
}

// All returns the roots of the domain, then those of its kin: for verifiers that have one pool, such as Envoy's plain contexts.
func (b *Bundle) All() []*x509.Certificate {
	all := slices.Clone(b.roots)
	for _, k := range b.kin {
		all = append(all, k.roots...)
	}
	return all
}

// HasRoot reports whether a certificate is a root of the domain or of its kin.
func (b *Bundle) HasRoot(c *x509.Certificate) bool {
	return slices.ContainsFunc(b.All(), c.Equal)
}

// WithGeneration returns the same roots and CRLs under another number.
func (b *Bundle) WithGeneration(n uint64) *Bundle {
	next := *b
	next.generation = n
	next.kin = nil
	for _, k := range b.kin {
		next.kin = append(next.kin, k.WithGeneration(n))
	}
	return &next
}

// PEM returns the roots as concatenated PEM blocks.
func (b *Bundle) PEM() []byte { return EncodeCertificates(b.roots...) }

// DER returns the roots' DER bytes, concatenated, as the SPIFFE Workload API has them.
func (b *Bundle) DER() []byte { return ConcatDER(b.roots) }

// SameRoots reports whether both bundles hold the same domains and roots, whatever their generations and CRLs.
func (b *Bundle) SameRoots(o *Bundle) bool {
	return o != nil && b.domain == o.domain &&
		slices.EqualFunc(b.roots, o.roots, func(x, y *x509.Certificate) bool { return x.Equal(y) }) &&
		slices.EqualFunc(b.kin, o.kin, (*Bundle).SameRoots)
}

// ConcatDER returns the DER bytes of the certificates, one after the other.
func ConcatDER(certs []*x509.Certificate) []byte {
	var out []byte
	for _, c := range certs {
		out = append(out, c.Raw...)
	}
	return out
}
