package pkcs10_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"net"
	"testing"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/tbs"
	"github.com/chancery-project/chancery/csr/pkcs10"
	"github.com/chancery-project/chancery/trust"
)

// requests are of each kind of key and each part that is read.
func requests(t testing.TB) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	add := func(name string, key crypto.Signer, r x509.CertificateRequest) {
		der, err := x509.CreateCertificateRequest(rand.Reader, &r, key)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = der
	}
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rsa2048, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	add("P-256", p256, x509.CertificateRequest{})
	add("P-384", p384, x509.CertificateRequest{})
	add("Ed25519", ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)), x509.CertificateRequest{})
	add("RSA", rsa2048, x509.CertificateRequest{})
	add("RSA-PSS", rsa2048, x509.CertificateRequest{SignatureAlgorithm: x509.SHA256WithRSAPSS})
	add("names", p256, x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "a", Organization: []string{"b", "c"}},
		DNSNames: []string{"d.example"}, IPAddresses: []net.IP{{10, 0, 0, 1}},
		ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 0}}},
	})
	add("password", p256, x509.CertificateRequest{
		//lint:ignore SA1019 there is no other way to write a challenge password
		Attributes: []pkix.AttributeTypeAndValueSET{{
			Type: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 7}, Value: [][]pkix.AttributeTypeAndValue{{{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "x"}}},
		}},
	})
	return out
}

func TestParseSaysWhatX509Says(t *testing.T) {
	for name, der := range requests(t) {
		r := compare(t, der)
		if r == nil {
			t.Errorf("%s: not read", name)
			continue
		}
		if err := r.CheckSignature(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for n := range der {
			if _, err := pkcs10.Parse(der[:n]); err == nil {
				t.Errorf("%s: the first %d bytes were read", name, n)
			}
		}
	}
}

// FuzzParse changes requests: what both readers take, both understand alike. (crypto/x509 also looks into the strings of
// the subject and at extensions that are of no use here.)
func FuzzParse(f *testing.F) {
	for _, der := range requests(f) {
		f.Add(der)
	}
	f.Fuzz(func(t *testing.T, der []byte) { compare(t, der) })
}

func compare(t *testing.T, der []byte) *pkcs10.Request {
	t.Helper()
	r, err := pkcs10.Parse(der)
	if err != nil {
		return nil
	}
	x, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil
	}
	if x.PublicKey == nil { // of a kind that is in no certificate, such as X25519; nobody certifies it here either
		if _, err := ca.TypeOf(r.PublicKey); err == nil {
			t.Errorf("key %v, crypto/x509 knows none", r.PublicKey)
		}
		return r
	}
	if !trust.SameKey(r.PublicKey, x.PublicKey) {
		t.Errorf("key %v, crypto/x509 %v", r.PublicKey, x.PublicKey)
	}
	if (r.CheckSignature() == nil) != (x.CheckSignature() == nil) {
		t.Errorf("signature: %v, crypto/x509: %v", r.CheckSignature(), x.CheckSignature())
	}
	var san []byte
	for _, e := range x.Extensions {
		if e.Id.Equal(tbs.OIDSAN) {
			san = e.Value
		}
	}
	if !bytes.Equal(r.SAN, san) {
		t.Errorf("names %x, crypto/x509 %x", r.SAN, san)
	}
	if len(r.Subject) != len(x.Subject.Names) {
		t.Errorf("subject %v, crypto/x509 %v", r.Subject, x.Subject.Names)
	}
	return r
}
