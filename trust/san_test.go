package trust

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"math/big"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
)

// withNames returns a certificate whose subject alternative names are these, as they are: type and bytes.
func withNames(t *testing.T, names ...any) *x509.Certificate {
	t.Helper()
	var b cryptobyte.Builder
	b.AddASN1(cbasn1.SEQUENCE, func(b *cryptobyte.Builder) {
		for i := 0; i < len(names); i += 2 {
			b.AddASN1(cbasn1.Tag(names[i].(int)).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes([]byte(names[i+1].(string))) })
		}
	})
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: b.BytesOrPanic()}},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatalf("%q does not parse: %v", names, err)
	}
	return cert
}

// What is compared is what is in the certificate, not what net/url makes of it.
func TestLeafIDIsReadByteForByte(t *testing.T) {
	const uri, dns = 6, 2
	const good = "spiffe://td/ns/foo/sa/web"
	if id, err := LeafID(withNames(t, dns, "web.example", uri, good)); err != nil || id.String() != good {
		t.Errorf("got %s, %v", id, err)
	}
	for _, bad := range []string{"SPIFFE://td/ns/foo/sa/web", "Spiffe://td/ns/foo/sa/web", good + "#", good + "?", "spiffe://td/ns/foo/sa/%77eb"} {
		cert := withNames(t, uri, bad)
		if id, err := LeafID(cert); err == nil {
			t.Errorf("%s is taken for %s", bad, id)
		} else if !strings.Contains(err.Error(), "SPIFFE ID") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	for _, names := range [][]any{{}, {dns, "web.example"}, {uri, good, uri, good}, {uri, good, uri, "https://example.org/"}} {
		if _, err := LeafID(withNames(t, names...)); err == nil || !strings.Contains(err.Error(), "URI SANs; an SVID has exactly one") {
			t.Errorf("%q: %v", names, err)
		}
	}
}
