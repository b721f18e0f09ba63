package sds

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"testing"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// testCA is a root and an intermediate of one trust domain.
type testCA struct {
	t            *testing.T
	domain       trust.Domain
	root, issuer *x509.Certificate
	key          *ecdsa.PrivateKey
	generation   uint64
}

func newCA(t *testing.T, domain string) *testCA {
	t.Helper()
	d, err := trust.ParseDomain(domain)
	must(t, err)
	rootKey, key := newKey(t), newKey(t)
	ca := &testCA{t: t, domain: d, key: key}
	ca.root = ca.sign(caTemplate(domain+" root"), nil, rootKey, rootKey)
	ca.issuer = ca.sign(caTemplate(domain+" issuer"), ca.root, key, rootKey)
	return ca
}

func caTemplate(name string) *x509.Certificate {
	return &x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, NotAfter: time.Now().Add(24 * time.Hour)}
}

func (ca *testCA) sign(template, parent *x509.Certificate, key, parentKey *ecdsa.PrivateKey) *x509.Certificate {
	ca.t.Helper()
	template.NotBefore = time.Now().Add(-time.Minute)
	template.SerialNumber, _ = rand.Int(rand.Reader, big.NewInt(1<<62))
	if parent == nil {
		parent = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), parentKey)
	must(ca.t, err)
	cert, err := x509.ParseCertificate(der)
	must(ca.t, err)
	return cert
}

// bundle returns the root and others as a bundle of the domain.
func (ca *testCA) bundle(more ...*x509.Certificate) *trust.Bundle {
	ca.t.Helper()
	ca.generation++
	b, err := trust.NewBundle(ca.domain, ca.generation, append(more, ca.root))
	must(ca.t, err)
	return b
}

func (ca *testCA) emptyBundle() *trust.Bundle {
	ca.t.Helper()
	b, err := trust.NewBundle(ca.domain, 99, nil)
	must(ca.t, err)
	return b
}

// identity issues an SVID for a path.
func (ca *testCA) identity(path string) *trust.Identity {
	ca.t.Helper()
	id, err := trust.ParseID(ca.domain.URI() + path)
	must(ca.t, err)
	key := newKey(ca.t)
	leaf := ca.sign(&x509.Certificate{
		URIs:                  []*url.URL{id.URL()},
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		NotAfter:              time.Now().Add(time.Hour),
	}, ca.issuer, key, ca.key)
	out, err := trust.NewIdentity(id, []*x509.Certificate{leaf, ca.issuer}, key, ca.bundle(), time.Now())
	must(ca.t, err)
	return out
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	return key
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
