package zlint

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/mldsa"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"time"

	zx509 "github.com/zmap/zcrypto/x509"
)

func certificate(t *testing.T, key crypto.Signer, edit func(*x509.Certificate)) []byte {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1 << 40), Subject: pkix.Name{CommonName: "a"}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, SubjectKeyId: []byte{1, 2, 3}, AuthorityKeyId: []byte{1, 2, 3},
	}
	edit(template)
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestFindingsAreNamed(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if err := Certificate(certificate(t, key, func(*x509.Certificate) {})); err != nil {
		t.Error(err)
	}
	err = Certificate(certificate(t, key, func(c *x509.Certificate) { c.URIs = []*url.URL{{Path: "a"}} }))
	if err == nil || !strings.Contains(err.Error(), "e_ext_san_uri_relative (error)") {
		t.Errorf("a URI without a scheme: %v", err)
	}
	// The one lint that is left out: a trust domain need not be a full domain name.
	if err := Certificate(certificate(t, key, func(c *x509.Certificate) { c.URIs = []*url.URL{{Scheme: "spiffe", Host: "a"}} })); err != nil {
		t.Errorf("a trust domain of one label: %v", err)
	}
	if err := Certificate([]byte("x")); err == nil || !strings.Contains(err.Error(), "parsing certificate") {
		t.Errorf("no certificate: %v", err)
	}
	if err := CRL([]byte("x")); err == nil || !strings.Contains(err.Error(), "parsing CRL") {
		t.Errorf("no CRL: %v", err)
	}
}

// zlint does not know ML-DSA: lints on the key do not apply to it, all others do. If this fails, docs/ceremony.md can
// say better.
func TestMLDSAKeysAreUnknownToZlint(t *testing.T) {
	key, err := mldsa.GenerateKey(mldsa.MLDSA65())
	if err != nil {
		t.Fatal(err)
	}
	good := certificate(t, key, func(*x509.Certificate) {})
	if err := Certificate(good); err != nil {
		t.Error(err)
	}
	parsed, err := zx509.ParseCertificate(good)
	if err != nil || parsed.PublicKeyAlgorithm != zx509.UnknownPublicKeyAlgorithm {
		t.Errorf("zlint reads the key as %v, %v", parsed.PublicKeyAlgorithm, err)
	}
	err = Certificate(certificate(t, key, func(c *x509.Certificate) { c.URIs = []*url.URL{{Path: "a"}} }))
	if err == nil || !strings.Contains(err.Error(), "e_ext_san_uri_relative") {
		t.Errorf("a URI without a scheme: %v", err)
	}
}
