// Package secret writes identities and bundles as Envoy secrets: TLS certificates and validation contexts.
//
// It refuses to write a validation context that would accept anybody: where there are no roots it writes one that
// nothing can verify against.
package secret

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/chancery-project/chancery/trust"
)

// Certificate returns a chain, leaf first and without the root, and its key.
func Certificate(chain []*x509.Certificate, key crypto.Signer) (*tlsv3.Secret, error) {
	keyPEM, err := trust.EncodeKey(key)
	if err != nil {
		return nil, err
	}
	return CertificatePEM(trust.EncodeCertificates(chain...), keyPEM), nil
}

// CertificatePEM returns a chain and its key that are in PEM already.
func CertificatePEM(chain, key []byte) *tlsv3.Secret {
	return &tlsv3.Secret{Type: &tlsv3.Secret_TlsCertificate{TlsCertificate: &tlsv3.TlsCertificate{
		CertificateChain: inline(chain),
		PrivateKey:       inline(key),
	}}}
}

// Roots returns a validation context with roots and CRLs and, where peers must have one of certain identities, a URI matcher for each.
//
// Envoy looks up leaves only: for issuers it would want a CRL of the root, whose key may be offline. And it refuses all
// leaves of an issuer without a CRL once there is any, so there is either one for each or none (decision D22).
func Roots(roots []*x509.Certificate, crls *trust.CRLs, peers []string) *tlsv3.Secret {
	c := &tlsv3.CertificateValidationContext{TrustedCa: inline(trust.EncodeCertificates(orNobody(roots)...)), MatchTypedSubjectAltNames: matchers(peers)}
	if crls := crls.PEM(); len(crls) > 0 {
		c.Crl, c.OnlyVerifyLeafCertCrl = inline(crls), true
	}
	return validation(c)
}

// matchers returns one for each identity.
func matchers(peers []string) (out []*tlsv3.SubjectAltNameMatcher) {
	for _, p := range peers {
		out = append(out, &tlsv3.SubjectAltNameMatcher{
			SanType: tlsv3.SubjectAltNameMatcher_URI,
			Matcher: &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: p}},
		})
	}
	return out
}

// RootsPEM returns a validation context with roots that are in PEM already; there must be at least one.
func RootsPEM(roots []byte) *tlsv3.Secret {
	return validation(&tlsv3.CertificateValidationContext{TrustedCa: inline(roots)})
}

// RootsByDomain returns Envoy's SPIFFE validator, which verifies each peer against the roots of the peer's own domain
// and no other. A flat pool of all roots would let any domain vouch for the identities of another (decision D24). It takes
// no CRLs: Envoy's SPIFFE validator ignores them, and one that is sent would only look as if it worked (decision D23). Where peers must have
// one of certain identities, it has a URI matcher for each.
func RootsByDomain(bundles []*trust.Bundle, peers []string) (*tlsv3.Secret, error) {
	cfg := new(tlsv3.SPIFFECertValidatorConfig)
	for _, b := range bundles {
		cfg.TrustDomains = append(cfg.TrustDomains, &tlsv3.SPIFFECertValidatorConfig_TrustDomain{
			Name:        b.Domain().String(),
			TrustBundle: inline(trust.EncodeCertificates(RootsOf(b)...)),
		})
	}
	typed, err := anypb.New(cfg)
	if err != nil {
		return nil, err
	}
	return validation(&tlsv3.CertificateValidationContext{
		MatchTypedSubjectAltNames: matchers(peers),
		CustomValidatorConfig:     &corev3.TypedExtensionConfig{Name: "envoy.tls.cert_validator.spiffe", TypedConfig: typed},
	}), nil
}

// Nobody returns a validation context that no certificate satisfies.
func Nobody() *tlsv3.Secret { return RootsPEM(trust.EncodeCertificates(nobody())) }

// RootsOf returns a bundle's roots for a client. An empty bundle means that nothing of the domain is trusted (Trust
// Domain and Bundle, section 4), but Envoy takes an empty trusted_ca as leave to verify nothing, and go-spiffe drops
// a whole message over it; so they get a root that nothing verifies against.
func RootsOf(b *trust.Bundle) []*x509.Certificate { return orNobody(b.Roots()) }

func orNobody(roots []*x509.Certificate) []*x509.Certificate {
	if len(roots) == 0 {
		return []*x509.Certificate{nobody()}
	}
	return roots
}

// nobody is the certificate of a CA whose key is forgotten as soon as it is made, so that nothing can ever verify
// against it. It is no root of anything (invariant 11): it stands for "no roots" where the wire cannot say so.
var nobody = sync.OnceValue(func() *x509.Certificate {
	cert, err := newNobody()
	if err != nil { // neither input nor environment can bring this about
		panic(fmt.Sprintf("making the certificate that stands for no roots: %v", err))
	}
	return cert
})

func newNobody() (*x509.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "nobody is trusted"},
		NotBefore:             time.Unix(0, 0),
		NotAfter:              time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), // RFC 5280 4.1.2.5: no end
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func validation(c *tlsv3.CertificateValidationContext) *tlsv3.Secret {
	return &tlsv3.Secret{Type: &tlsv3.Secret_ValidationContext{ValidationContext: c}}
}

func inline(b []byte) *corev3.DataSource {
	return &corev3.DataSource{Specifier: &corev3.DataSource_InlineBytes{InlineBytes: b}}
}
