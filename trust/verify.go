package trust

import (
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/chancery-project/chancery/trust/san"
)

// LeafID returns the SPIFFE ID of a leaf certificate after the checks that X509-SVID asks of a validator before path
// validation: exactly one URI SAN that is a SPIFFE ID with a path (sections 2, 5.2), not a CA (4.1, 5.2), and neither
// keyCertSign nor cRLSign in its key usage (4.3, 5.2). Usages that are there must allow TLS.
func LeafID(leaf *x509.Certificate) (ID, error) {
	uri, err := san.URI(leaf)
	if err != nil {
		return ID{}, err
	}
	id, err := ParseID(uri)
	if err != nil {
		return ID{}, err
	}
	if leaf.IsCA {
		return ID{}, fmt.Errorf("certificate of %s is a CA certificate; it may not authenticate (X509-SVID section 4.1)", id)
	}
	if leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0 {
		return ID{}, fmt.Errorf("certificate of %s may sign certificates or CRLs (X509-SVID section 4.3)", id)
	}
	if leaf.KeyUsage != 0 && leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
		return ID{}, fmt.Errorf("certificate of %s may not be used for signatures (no digitalSignature), as a TLS handshake needs (RFC 8446 section 4.4.2.2)", id)
	}
	if !ForTLS(leaf, x509.ExtKeyUsageServerAuth) && !ForTLS(leaf, x509.ExtKeyUsageClientAuth) {
		return ID{}, fmt.Errorf("certificate of %s is for other purposes than TLS (extended key usage without serverAuth and clientAuth)", id)
	}
	return id, nil
}

// ForTLS reports whether a certificate's extended key usage, if it has one, allows a role in TLS. Verify asks for either, since it does not know the
// role of the peer.
func ForTLS(leaf *x509.Certificate, role x509.ExtKeyUsage) bool {
	return len(leaf.ExtKeyUsage)+len(leaf.UnknownExtKeyUsage) == 0 ||
		slices.Contains(leaf.ExtKeyUsage, role) || slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageAny)
}

// Verify checks a peer's chain (leaf first, as sent in the handshake) against the bundle of the leaf's own trust
// domain and no other (X509-SVID section 5.2), at time now. bundleOf returns nil for a domain that is not trusted.
// A leaf that is on a CRL of that bundle is refused. It returns the peer's ID and the verified chains.
func Verify(chain []*x509.Certificate, bundleOf func(Domain) *Bundle, now time.Time) (ID, [][]*x509.Certificate, error) {
	if len(chain) == 0 {
		return ID{}, nil, errors.New("peer sent no certificate")
	}
	if len(chain) > MaxCertificates {
		return ID{}, nil, fmt.Errorf("peer sent %d certificates; at most %d are read", len(chain), MaxCertificates)
	}
	id, err := LeafID(chain[0])
	if err != nil {
		return ID{}, nil, err
	}
	b := bundleOf(id.Domain())
	if b == nil {
		return ID{}, nil, fmt.Errorf("certificate of %s: trust domain %s is not trusted here", id, id.Domain())
	}
	intermediates := x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	options := x509.VerifyOptions{Roots: b.poolFor(chain), Intermediates: intermediates, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}
	var chains [][]*x509.Certificate
	if options.Roots != nil { // crypto/x509 tries the signature of each root of one name, also after it has found the one: 5 of them take three times as long
		chains, err = chain[0].Verify(options)
	}
	if options.Roots == nil || err != nil { // what a certificate says of keys is a hint
		options.Roots = b.pool
		chains, err = chain[0].Verify(options)
	}
	if err != nil {
		return ID{}, nil, fmt.Errorf("certificate of %s (serial %x, valid %s to %s): %w", id, chain[0].SerialNumber.Bytes(),
			chain[0].NotBefore.UTC().Format(time.RFC3339), chain[0].NotAfter.UTC().Format(time.RFC3339), err)
	}
	if err := b.crls.Check(chain[0]); err != nil {
		return ID{}, nil, fmt.Errorf("certificate of %s: %w", id, err)
	}
	return id, chains, nil
}

// PathTo returns the path from a signing certificate, the first of the chain, to a root of the bundle or of its kin, both included. As
// crypto/x509 sees it the path ends there: what a CA above says of certificates below the first is not judged.
func (b *Bundle) PathTo(chain []*x509.Certificate, now time.Time) ([]*x509.Certificate, error) {
	intermediates := x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	paths, err := chain[0].Verify(x509.VerifyOptions{
		Roots: b.pool, Intermediates: intermediates, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	for _, k := range b.kin {
		if err == nil {
			break
		}
		if path, other := k.PathTo(chain, now); other == nil {
			return path, nil
		}
	}
	if err != nil {
		return nil, err
	}
	return paths[0], nil
}

// Only returns a bundle lookup that knows a single bundle, with its kin.
func Only(b *Bundle) func(Domain) *Bundle { return b.Of }
