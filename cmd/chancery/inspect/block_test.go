package inspect

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"
)

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func parseURL(t *testing.T, s string) *url.URL {
	t.Helper()
	u, err := url.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// text returns what the command prints for PEM.
func text(t *testing.T, data []byte) string {
	t.Helper()
	blocks, err := decode(data)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for _, b := range blocks {
		b.print(&out)
	}
	return out.String()
}

func certificate(t *testing.T, template *x509.Certificate) []byte {
	t.Helper()
	key := newKey(t)
	template.SerialNumber = big.NewInt(0xabc)
	if template.NotAfter.IsZero() {
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func TestInspectCertificate(t *testing.T) {
	spiffe := parseURL(t, "spiffe://cluster.local/ns/foo/sa/web")
	good := x509.Certificate{
		URIs: []*url.URL{spiffe}, KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	got := text(t, certificate(t, &good))
	for _, want := range []string{"SPIFFE ID    spiffe://cluster.local/ns/foo/sa/web", "serial       0abc", "key          p256", "usages       digitalSignature, serverAuth, clientAuth"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
	if strings.Contains(got, "finding") {
		t.Errorf("a good certificate has findings:\n%s", got)
	}

	ended := good
	ended.NotBefore, ended.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
	early := good
	early.NotBefore, early.NotAfter = time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
	two := good
	two.URIs = []*url.URL{spiffe, parseURL(t, "spiffe://cluster.local/other")}
	none := x509.Certificate{DNSNames: []string{"web.example"}, IPAddresses: []net.IP{net.IPv4(10, 0, 0, 1)}, URIs: []*url.URL{parseURL(t, "https://web.example/")}}
	for name, c := range map[string]struct {
		template *x509.Certificate
		want     string
	}{
		"ended":       {&ended, "finding      it has ended"},
		"early":       {&early, "finding      it is not valid yet"},
		"two IDs":     {&two, "finding"},
		"no ID":       {&none, "finding"},
		"other names": {&none, "names        https://web.example/, web.example, 10.0.0.1"},
		"CA": {&x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, Subject: pkix.Name{CommonName: "root"}},
			"usages       keyCertSign, cRLSign\n  CA           yes"},
	} {
		if got := text(t, certificate(t, c.template)); !strings.Contains(got, c.want) {
			t.Errorf("%s: no %q in:\n%s", name, c.want, got)
		}
	}
}

// TestInspectDoesNotSteerTerminals: names come from whoever made the certificate.
func TestInspectDoesNotSteerTerminals(t *testing.T) {
	got := text(t, certificate(t, &x509.Certificate{Subject: pkix.Name{CommonName: "a\x1b[2Jb"}}))
	got += text(t, pem.EncodeToMemory(&pem.Block{Type: "A\x1b[2J", Bytes: []byte("x")}))
	if strings.Contains(got, "\x1b") {
		t.Errorf("escape sequences pass:\n%q", got)
	}
}

func TestInspectRequest(t *testing.T) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		URIs: []*url.URL{parseURL(t, "spiffe://cluster.local/ns/foo/sa/web")}, DNSNames: []string{"web"}, IPAddresses: []net.IP{net.IPv4(10, 0, 0, 1)},
	}, newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	encode := func(der []byte) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	}
	got := text(t, encode(der))
	for _, want := range []string{"request\n", "spiffe://cluster.local/ns/foo/sa/web", "names        web, 10.0.0.1", "key          p256"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
	if strings.Contains(got, "finding") {
		t.Errorf("a good request has findings:\n%s", got)
	}
	der[len(der)-1] ^= 1
	if got := text(t, encode(der)); !strings.Contains(got, "the signature does not verify") {
		t.Errorf("a bad signature is not found:\n%s", got)
	}
	if got := text(t, encode(der[:20])); !strings.Contains(got, "does not parse") {
		t.Errorf("half a request:\n%s", got)
	}
}

func TestInspectCRL(t *testing.T) {
	key := newKey(t)
	issuer := &x509.Certificate{Subject: pkix.Name{CommonName: "issuer"}, KeyUsage: x509.KeyUsageCRLSign, SubjectKeyId: []byte{1, 2}}
	now := time.Now().Truncate(time.Second)
	encode := func(l x509.RevocationList) []byte {
		der, err := x509.CreateRevocationList(rand.Reader, &l, issuer, key)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})
	}
	empty := x509.RevocationList{Number: big.NewInt(7), ThisUpdate: now.Add(-time.Hour), NextUpdate: now.Add(time.Hour)}
	full, ended := empty, empty
	full.RevokedCertificateEntries = []x509.RevocationListEntry{
		{SerialNumber: big.NewInt(0xabc), RevocationTime: now, ReasonCode: 1}, {SerialNumber: big.NewInt(0xdd), RevocationTime: now},
	}
	ended.ThisUpdate, ended.NextUpdate = now.Add(-2*time.Hour), now.Add(-time.Hour)
	stamp := now.UTC().Format(time.RFC3339)
	for _, c := range []struct {
		name string
		pem  []byte
		want []string
	}{
		{"empty", encode(empty), []string{"CRL\n  issuer       CN=issuer\n  number       7\n  valid        " + empty.ThisUpdate.UTC().Format(time.RFC3339) + " to ", "issuer key   0102", "revoked      none\n"}},
		{"full", encode(full), []string{"revoked      0abc at " + stamp + ", keyCompromise\n", "revoked      dd at " + stamp + "\n"}},
		{"ended", encode(ended), []string{"finding      it has ended"}},
		{"garbage", pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: []byte("x")}), []string{"CRL\n", "finding      does not parse"}},
	} {
		got := text(t, c.pem)
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: no %q in:\n%s", c.name, want, got)
			}
		}
		if (c.name == "empty" || c.name == "full") && strings.Contains(got, "finding") {
			t.Errorf("%s has findings:\n%s", c.name, got)
		}
	}
}

func TestInspectNeverPrintsKeys(t *testing.T) {
	small, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	ec, err := x509.MarshalECPrivateKey(newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	for typ, der := range map[string][]byte{
		"RSA PRIVATE KEY": x509.MarshalPKCS1PrivateKey(small), "EC PRIVATE KEY": ec, "PRIVATE KEY": pkcs8, "ENCRYPTED PRIVATE KEY": []byte("x"),
	} {
		if got := text(t, pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der})); got != "private key (not shown)\n" {
			t.Errorf("%s prints as %q", typ, got)
		}
	}
}

func TestInspectGarbage(t *testing.T) {
	good := certificate(t, &x509.Certificate{DNSNames: []string{"a"}})
	for in, want := range map[string]string{
		"":                                       "there is no PEM block",
		"hello":                                  "there is no PEM block",
		string(good[:len(good)/2]):               "1 of 1 PEM blocks do not decode",
		string(good) + string(good[:40]):         "1 of 2 PEM blocks do not decode",
		"-----BEGIN X-----\n!!\n-----END X-----": "1 of 1 PEM blocks do not decode",
	} {
		if _, err := decode([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: got %v, want %q", in, err, want)
		}
	}
}
