package csr

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
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/tbs"
	"github.com/chancery-project/chancery/trust"
)

const webURI = "spiffe://cluster.local/ns/foo/sa/web"

func mustID(t testing.TB, s string) trust.ID {
	t.Helper()
	id, err := trust.ParseID(s)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// csrKeys are made once: RSA keys are dear.
var csrKeys = sync.OnceValue(func() map[string]crypto.Signer {
	keys := map[string]crypto.Signer{"ed25519": ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))}
	for name, bits := range map[string]int{"rsa1024": 1024, "rsa2048": 2048} {
		keys[name], _ = rsa.GenerateKey(rand.Reader, bits)
	}
	for name, curve := range map[string]elliptic.Curve{"p224": elliptic.P224(), "p256": elliptic.P256(), "p384": elliptic.P384(), "p521": elliptic.P521()} {
		keys[name], _ = ecdsa.GenerateKey(curve, rand.Reader)
	}
	return keys
})

func makeCSR(t testing.TB, key string, r x509.CertificateRequest) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &r, csrKeys()[key])
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// wireCSR is a PKCS #10 request as RFC 2986 section 4 has it.
type wireCSR struct {
	TBS       asn1.RawValue
	Algorithm pkix.AlgorithmIdentifier
	Signature asn1.BitString
}

// changeCSR changes the signed part of a request behind its signature's back.
func changeCSR(t testing.TB, der []byte, change func(parts []asn1.RawValue)) []byte {
	t.Helper()
	var w wireCSR
	var parts []asn1.RawValue
	_, err := asn1.Unmarshal(der, &w)
	if err == nil {
		_, err = asn1.Unmarshal(w.TBS.FullBytes, &parts)
	}
	if err != nil {
		t.Fatal(err)
	}
	change(parts)
	tbs, err := asn1.Marshal(parts)
	if err != nil {
		t.Fatal(err)
	}
	w.TBS = asn1.RawValue{FullBytes: tbs}
	out, err := asn1.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// replaceAlgorithm says that a request was signed by way of another ECDSA algorithm.
func replaceAlgorithm(t testing.TB, der []byte, last ...int) []byte {
	t.Helper()
	var w wireCSR
	if _, err := asn1.Unmarshal(der, &w); err != nil {
		t.Fatal(err)
	}
	w.Algorithm = pkix.AlgorithmIdentifier{Algorithm: append(asn1.ObjectIdentifier{1, 2, 840, 10045}, last...)}
	out, err := asn1.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// withKey puts another public key into a request.
func withKey(t testing.TB, der []byte, pub crypto.PublicKey) []byte {
	t.Helper()
	spki, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		t.Fatal(err)
	}
	return changeCSR(t, der, func(parts []asn1.RawValue) { parts[2] = asn1.RawValue{FullBytes: spki} })
}

// names makes a subject alternative name extension of raw general names.
func names(t testing.TB, in ...asn1.RawValue) []pkix.Extension {
	t.Helper()
	der, err := asn1.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	return []pkix.Extension{{Id: tbs.OIDSAN, Value: der}}
}

func name(tag int, value string) asn1.RawValue {
	return asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tag, Bytes: []byte(value)}
}

func uris(t testing.TB, in ...string) []*url.URL {
	t.Helper()
	var out []*url.URL
	for _, s := range in {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, u)
	}
	return out
}

type csrCase struct {
	name   string
	der    []byte
	code   codes.Code // OK: accepted
	reason string
	text   string // in the detail
}

func csrCases(t testing.TB) []csrCase {
	plain := makeCSR(t, "p256", x509.CertificateRequest{})
	req := func(r x509.CertificateRequest) []byte { return makeCSR(t, "p256", r) }
	subject := func(n pkix.Name) []byte { return req(x509.CertificateRequest{Subject: n}) }
	sans := func(in ...asn1.RawValue) []byte {
		return req(x509.CertificateRequest{ExtraExtensions: names(t, in...)})
	}
	other, err := asn1.Marshal([]any{asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 311, 20, 2, 3}})
	if err != nil {
		t.Fatal(err)
	}
	badSignature := bytes.Clone(plain)
	badSignature[len(badSignature)-1] ^= 1
	twice := names(t, name(6, webURI))
	const bad, denied = codes.InvalidArgument, codes.PermissionDenied
	return []csrCase{
		{"empty", nil, bad, ReasonCSR, "0 bytes"},
		{"too large", make([]byte, maxCSR+1), bad, ReasonCSR, "16385 bytes"},
		{"no ASN.1", []byte("hello"), bad, ReasonCSR, "does not parse"},
		{"cut off", plain[:len(plain)-1], bad, ReasonCSR, "does not parse"},
		{"trailing data", append(bytes.Clone(plain), 0), bad, ReasonCSR, "trailing data"},
		{"bad signature", badSignature, bad, ReasonCSR, "does not prove possession"},
		{"another's key", withKey(t, plain, csrKeys()["p384"].Public()), bad, ReasonCSR, "does not prove possession"},
		{"names behind the signature's back", changeCSR(t, plain, func(p []asn1.RawValue) {
			p[1].FullBytes = []byte{0x30, 0x0d, 0x31, 0x0b, 0x30, 0x09, 6, 3, 0x55, 4, 10, 0x0c, 2, 'h', 'i'}
		}), bad, ReasonCSR, "does not prove possession"},
		{"RSA-1024", makeCSR(t, "rsa1024", x509.CertificateRequest{}), bad, ReasonCSR, "1024 bits"},
		{"RSA-16384", withKey(t, plain, &rsa.PublicKey{N: new(big.Int).SetBit(big.NewInt(1), 16383, 1), E: 65537}), bad, ReasonCSR, "16384 bits"},
		{"RSA exponent 3", withKey(t, plain, &rsa.PublicKey{N: csrKeys()["rsa2048"].Public().(*rsa.PublicKey).N, E: 3}), bad, ReasonCSR, "exponent 3"},
		{"P-224", makeCSR(t, "p224", x509.CertificateRequest{}), bad, ReasonCSR, "key"},
		{"P-521", makeCSR(t, "p521", x509.CertificateRequest{}), bad, ReasonCSR, "P-521"},
		{"Ed25519", makeCSR(t, "ed25519", x509.CertificateRequest{}), codes.OK, "", ""},
		{"P-256", plain, codes.OK, "", ""},
		{"P-384", makeCSR(t, "p384", x509.CertificateRequest{}), codes.OK, "", ""},
		{"RSA-2048", makeCSR(t, "rsa2048", x509.CertificateRequest{}), codes.OK, "", ""},
		{"RSA-PSS", makeCSR(t, "rsa2048", x509.CertificateRequest{SignatureAlgorithm: x509.SHA384WithRSAPSS}), codes.OK, "", ""},
		{"P-256 with SHA-512", req(x509.CertificateRequest{SignatureAlgorithm: x509.ECDSAWithSHA512}), codes.OK, "", ""},
		{"SHA-1", replaceAlgorithm(t, plain, 4, 1), bad, ReasonCSR, "ECDSA-SHA1 is not accepted"},
		{"an algorithm of another kind of key", replaceAlgorithm(t, makeCSR(t, "rsa2048", x509.CertificateRequest{}), 4, 3, 2), bad, ReasonCSR, "does not prove possession"},

		{"own ID as URI", req(x509.CertificateRequest{URIs: uris(t, webURI)}), codes.OK, "", ""},
		{"Istio's agent: own ID and an empty organisation", req(x509.CertificateRequest{URIs: uris(t, webURI), Subject: pkix.Name{Organization: []string{""}}}), codes.OK, "", ""},
		{"own ID as common name", subject(pkix.Name{CommonName: webURI}), codes.OK, "", ""},
		{"other extensions are not taken over", req(x509.CertificateRequest{ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 3, 1, 1, 0xff}}}}), codes.OK, "", ""},
		{"D17 foreign URI", req(x509.CertificateRequest{URIs: uris(t, "spiffe://cluster.local/ns/foo/sa/db")}), denied, ReasonCSRNames, "ns/foo/sa/db"},
		{"D17 own path in another domain", req(x509.CertificateRequest{URIs: uris(t, "spiffe://other.test/ns/foo/sa/web")}), denied, ReasonCSRNames, "other.test"},
		{"D17 own ID and a second URI", req(x509.CertificateRequest{URIs: uris(t, webURI, "https://example.com")}), denied, ReasonCSRNames, "example.com"},
		{"D17 a second URI in front", req(x509.CertificateRequest{URIs: uris(t, "https://example.com", webURI)}), denied, ReasonCSRNames, "example.com"},
		{"D17 own ID twice", sans(name(6, webURI), name(6, webURI)), denied, ReasonCSRNames, "more than one"},
		{"D17 own ID with a fragment that URL parsers drop", sans(name(6, webURI+"#")), denied, ReasonCSRNames, "web#"},
		{"D17 own ID in capitals that URL parsers lower", sans(name(6, strings.Replace(webURI, "spiffe", "SPIFFE", 1))), denied, ReasonCSRNames, "SPIFFE"},
		{"D17 own ID and a query", sans(name(6, webURI+"?")), denied, ReasonCSRNames, "web?"},
		{"D17 own ID, percent-encoded", sans(name(6, strings.Replace(webURI, "web", "%77eb", 1))), denied, ReasonCSRNames, "%77eb"},
		{"D17 the trust domain alone", req(x509.CertificateRequest{URIs: uris(t, "spiffe://cluster.local")}), denied, ReasonCSRNames, "cluster.local"},
		{"D17 an empty URI", sans(name(6, "")), denied, ReasonCSRNames, "URI"},
		{"D17 DNS", req(x509.CertificateRequest{URIs: uris(t, webURI), DNSNames: []string{"istiod.istio-system.svc"}}), denied, ReasonCSRNames, "istiod"},
		{"D17 IP", req(x509.CertificateRequest{IPAddresses: []net.IP{{10, 0, 0, 1}}}), denied, ReasonCSRNames, "type 7"},
		{"D17 email", req(x509.CertificateRequest{EmailAddresses: []string{"root@example.com"}}), denied, ReasonCSRNames, "root@"},
		{"D17 otherName, which crypto/x509 skips", sans(asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true, Bytes: other}), denied, ReasonCSRNames, "type 0"},
		{"D17 directoryName, which crypto/x509 skips", sans(name(6, webURI), asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 4, IsCompound: true, Bytes: []byte{0x30, 0}}), denied, ReasonCSRNames, "type 4"},
		{"D17 registeredID, which crypto/x509 skips", sans(name(8, "\x2a\x03")), denied, ReasonCSRNames, "type 8"},
		{"D17 no names in the extension", sans(), codes.OK, "", ""},
		{"two name extensions", req(x509.CertificateRequest{ExtraExtensions: append(twice, names(t, name(2, "example.com"))...)}), bad, ReasonCSR, "duplicate"},
		{"D17 foreign common name", subject(pkix.Name{CommonName: "web.foo.svc"}), denied, ReasonCSRNames, "web.foo.svc"},
		{"D17 organisation", subject(pkix.Name{Organization: []string{"system:masters"}}), denied, ReasonCSRNames, "system:masters"},
		{"D17 an empty organisation and another", subject(pkix.Name{Organization: []string{"", "system:masters"}}), denied, ReasonCSRNames, "system:masters"},
		{"D17 serial number", subject(pkix.Name{SerialNumber: "1"}), denied, ReasonCSRNames, "2.5.4.5"},
	}
}

func TestRequestCSR(t *testing.T) {
	id := mustID(t, webURI)
	for _, tc := range csrCases(t) {
		t.Run(tc.name, func(t *testing.T) {
			pub, d := parseCSR(tc.der, id, only(id))
			if tc.code == codes.OK {
				if d != nil {
					t.Fatal(d)
				}
				req, _ := x509.ParseCertificateRequest(tc.der)
				if !trust.SameKey(pub, req.PublicKey) {
					t.Error("another key came out")
				}
				return
			}
			wantRefusal(t, d, tc.code, tc.reason, tc.text)
			if pub != nil {
				t.Error("there is a key with the refusal")
			}
		})
	}
}

func wantRefusal(t testing.TB, d *Denial, code codes.Code, reason, text string) {
	t.Helper()
	if d == nil || d.Code != code || d.Reason != reason || !strings.Contains(d.Detail, text) {
		t.Errorf("got %+v, want %s %s with %q", d, code, reason, text)
	} else if len(d.Detail) > 600 {
		t.Errorf("the detail has %d bytes", len(d.Detail))
	}
}

func TestRequestPEM(t *testing.T) {
	der := makeCSR(t, "p256", x509.CertificateRequest{})
	block := func(kind string) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	good := block("CERTIFICATE REQUEST")
	for _, tc := range []struct{ name, in, text string }{
		{"as it should be", good, ""},
		{"OpenSSL's older name", block("NEW CERTIFICATE REQUEST"), ""},
		{"space around", "\n\n" + good + " \r\n\t", ""},
		{"text before", "Certificate Request:\n" + good, ""},
		{"empty", "", "not PEM"},
		{"DER", string(der), "not PEM"},
		{"cut off", good[:len(good)-10], "not PEM"},
		{"a certificate", block("CERTIFICATE"), `"CERTIFICATE"`},
		{"a key", block("PRIVATE KEY"), `"PRIVATE KEY"`},
		{"two", good + good, "more behind"},
		{"a key behind", good + block("PRIVATE KEY"), "more behind"},
		{"text behind", good + "x", "more behind"},
		{"a long type", block(strings.Repeat("A", 5000)), "AAAA"},
		{"too large", good + strings.Repeat("\n", 2*maxCSR), "at most 32768"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, d := decodePEM(tc.in)
			if tc.text == "" {
				if d != nil || !bytes.Equal(got, der) {
					t.Errorf("got %d bytes, %v", len(got), d)
				}
				return
			}
			wantRefusal(t, d, codes.InvalidArgument, ReasonCSR, tc.text)
		})
	}
}

// Whatever is accepted has a signature that proves possession of a key that we certify, and no name but the identity's.
func FuzzCSR(f *testing.F) {
	for _, tc := range csrCases(f) {
		f.Add(tc.der)
	}
	id := mustID(f, webURI)
	f.Fuzz(func(t *testing.T, der []byte) {
		pub, d := parseCSR(der, id, only(id))
		if d != nil {
			if pub != nil || d.Reason != ReasonCSR && d.Reason != ReasonCSRNames {
				t.Fatalf("refused with key %v, %+v", pub, d)
			}
			return
		}
		req, err := x509.ParseCertificateRequest(der)
		if err != nil { // it also looks into strings and extensions that nobody reads here: package pkcs10's own fuzzing compares
			return
		}
		if err := req.CheckSignature(); err != nil {
			t.Fatalf("accepted without proof of possession: %v", err)
		}
		if _, err := ca.TypeOf(pub); err != nil || !trust.SameKey(pub, req.PublicKey) {
			t.Fatalf("accepted key %v: %v", pub, err)
		}
		if len(req.DNSNames)+len(req.EmailAddresses)+len(req.IPAddresses) > 0 || len(req.URIs) > 1 {
			t.Fatalf("accepted names %q %q %q %q", req.DNSNames, req.EmailAddresses, req.IPAddresses, req.URIs)
		}
		if len(req.URIs) == 1 && req.URIs[0].String() != webURI {
			t.Fatalf("accepted the URI %q", req.URIs[0])
		}
		if cn := req.Subject.CommonName; cn != "" && cn != webURI {
			t.Fatalf("accepted the common name %q", cn)
		}
	})
}

// What is accepted is one CSR block and nothing else, and encoding it again gives the same bytes.
func FuzzPEM(f *testing.F) {
	good := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: makeCSR(f, "p256", x509.CertificateRequest{})}))
	for _, s := range []string{
		good, good + good, good[:50], "", "x" + good, good + "x", strings.Replace(good, "\n", "\nA: b\n\n", 1),
		strings.ReplaceAll(good, "\n", "\r\n"), strings.Replace(good, "CERTIFICATE REQUEST", "CERTIFICATE", 2),
		"-----BEGIN CERTIFICATE REQUEST-----\n-----END CERTIFICATE REQUEST-----\n" + good,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		der, d := decodePEM(s)
		if d != nil {
			if der != nil || d.Code != codes.InvalidArgument || d.Reason != ReasonCSR {
				t.Fatalf("refused with %d bytes, %+v", len(der), d)
			}
			return
		}
		if len(s) > 2*maxCSR || strings.Count(s, "-----BEGIN CERTIFICATE REQUEST-----")+strings.Count(s, "-----BEGIN NEW CERTIFICATE REQUEST-----") == 0 {
			t.Fatalf("accepted %.100q", s)
		}
		again, d := decodePEM(string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})))
		if d != nil || !bytes.Equal(again, der) {
			t.Fatalf("encoded again it became %d bytes, %v", len(again), d)
		}
	})
}

// only has a request's names say one identity, in one trust domain.
func only(id trust.ID) func(string) bool {
	return func(name string) bool { return name == id.String() }
}
