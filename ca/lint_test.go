package ca

import (
	"crypto/x509"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"

	"github.com/chancery-project/chancery/ca/lint"
	"github.com/chancery-project/chancery/ca/tbs"
)

// broken is one way to violate a lint: in the template before it is written, in the bytes after it is written, or in
// what the certificate is held against.
type broken struct {
	lint     string
	ca       bool // a signing certificate
	template func(*tbs.Template)
	bytes    func([]byte) []byte
	held     func(*lint.Subject)
}

// Every lint is violated by at least one certificate, and that certificate is not signed.
var violations = []broken{
	{lint: "one_uri_san", template: func(t *tbs.Template) { t.URI = "" }, bytes: dropURI},
	{lint: "leaf_id_has_path", template: func(t *tbs.Template) { t.URI = "spiffe://cluster.local" }},
	{lint: "leaf_id_has_path", template: func(t *tbs.Template) { t.URI = "spiffe://cluster.local/" }},
	{lint: "leaf_id_has_path", template: func(t *tbs.Template) { t.URI = "https://cluster.local/ns/a/sa/b" }},
	{lint: "san_critical_without_subject", bytes: func(b []byte) []byte { return clearCritical(b, []byte{0x55, 0x1d, 0x11}) }},
	{lint: "signing_id_without_path", ca: true, template: func(t *tbs.Template) { t.URI = "spiffe://cluster.local/x" }},
	{lint: "signing_id_without_path", ca: true, template: func(t *tbs.Template) { t.URI = "spiffe://other" }},
	{lint: "basic_constraints", template: func(t *tbs.Template) { t.CA = true }},
	{lint: "basic_constraints", bytes: func(b []byte) []byte { return clearCritical(b, []byte{0x55, 0x1d, 0x13}) }},
	{lint: "key_usage_present_and_critical", bytes: func(b []byte) []byte { return clearCritical(b, []byte{0x55, 0x1d, 0x0f}) }},
	{lint: "signing_key_usage", ca: true, template: func(t *tbs.Template) { t.KeyUsage = x509.KeyUsageCRLSign }},
	{lint: "leaf_key_usage_digital_signature", template: func(t *tbs.Template) { t.KeyUsage = x509.KeyUsageKeyAgreement }},
	{lint: "leaf_key_usage_no_signing", template: func(t *tbs.Template) { t.KeyUsage |= x509.KeyUsageCertSign }},
	{lint: "leaf_key_usage_no_signing", template: func(t *tbs.Template) { t.KeyUsage |= x509.KeyUsageCRLSign }},
	{lint: "leaf_ext_key_usage", bytes: func(b []byte) []byte { // clientAuth becomes codeSigning
		return replace(b, []byte{0x2b, 6, 1, 5, 5, 7, 3, 2}, []byte{0x2b, 6, 1, 5, 5, 7, 3, 3})
	}},
	{lint: "version_3", held: func(l *lint.Subject) { l.Version = 1 }},
	{lint: "serial", template: func(t *tbs.Template) { t.Serial = []byte{0} }},
	{lint: "serial", template: func(t *tbs.Template) { t.Serial = append([]byte{1}, make([]byte, 20)...) }},
	{lint: "signature_algorithm", template: func(t *tbs.Template) { t.Algorithm = []byte{0x30, 0x00} }},
	{lint: "issuer_name", held: func(l *lint.Subject) { l.IssuerName = []byte("x") }},
	{lint: "key_identifiers", template: func(t *tbs.Template) { t.AKI = []byte{1, 2, 3} }},
	{lint: "key_identifiers", held: func(l *lint.Subject) { l.SKI = nil }},
	{lint: "extensions", held: func(l *lint.Subject) { l.Extensions = append(l.Extensions, l.Extensions[0]) }},
	{lint: "extensions", held: func(l *lint.Subject) {
		l.Extensions = append(l.Extensions, lint.Extension{OID: []byte{1}, Critical: true})
	}},
	{lint: "signing_subject", ca: true, template: func(t *tbs.Template) { t.Subject = tbs.EmptyName }},
	{lint: "path_length", ca: true, held: func(l *lint.Subject) { l.IssuerPathLen = 0; l.IssuerSKI = nil }},
	{lint: "path_length", ca: true, template: func(t *tbs.Template) { t.PathLen = 2 }, held: limit(2)},
	{lint: "path_length", ca: true, template: func(t *tbs.Template) { t.PathLen = -1 }, held: limit(2)},
	{lint: "cross_certificate", ca: true, held: func(l *lint.Subject) { l.Existing = &x509.Certificate{RawSubject: tbs.EmptyName} }},
	{lint: "cross_certificate", ca: true, held: func(l *lint.Subject) {
		l.Existing = &x509.Certificate{RawSubject: l.Contents.Subject, SubjectKeyId: l.SKI}
	}},
	{lint: "cross_certificate", ca: true, held: func(l *lint.Subject) {
		l.Existing = &x509.Certificate{RawSubject: l.Contents.Subject, SubjectKeyId: l.SKI, RawSubjectPublicKeyInfo: l.SPKI}
		l.Issuer = l.Contents.Subject
	}},
	{lint: "validity", template: func(t *tbs.Template) { t.NotBefore = t.NotAfter.Add(time.Hour) }},
	{lint: "validity", template: func(t *tbs.Template) { t.NotBefore = time.Now().Add(time.Minute) }},
	{lint: "validity", template: func(t *tbs.Template) { t.NotAfter = time.Now().Add(25 * time.Hour) }},
	{lint: "validity", held: func(l *lint.Subject) { l.IssuerNotAfter = time.Now() }},
	{lint: "what_was_asked", template: func(t *tbs.Template) { t.URI = "spiffe://cluster.local/ns/a/sa/other" }},
	{lint: "what_was_asked", template: func(t *tbs.Template) { t.DNS = []string{"added.example"} }},
	{lint: "what_was_asked", template: func(t *tbs.Template) { t.IPs = []netip.Addr{netip.MustParseAddr("127.0.0.1")} }},
	{lint: "what_was_asked", held: func(l *lint.Subject) { l.SPKI = nil }},
}

// limit puts a path length into the issuer.
func limit(pathLen int) func(*lint.Subject) {
	return func(l *lint.Subject) { l.IssuerPathLen = pathLen }
}

func TestEachLintRefusesItsViolation(t *testing.T) {
	i, _, _ := newIssuer(t, CreateConfig{})
	caught := map[string]bool{}
	for _, v := range violations {
		p, r := profile(t, ProfileConfig{}), &Request{ID: id(t, "spiffe://cluster.local/ns/a/sa/b"), PublicKey: publicKey(t, P256)}
		if v.ca {
			p, r.CA = issuerProfile(time.Hour), &CARequest{Domain: i.domain, CommonName: "x"}
		}
		l := violate(t, i, p, r, v)
		err := l.Run()
		if err == nil || !strings.Contains(err.Error(), "lint "+v.lint+" (") {
			t.Errorf("a violation of %s gave: %v", v.lint, err)
		}
		caught[v.lint] = true
	}
	for _, l := range lint.Lints {
		if !caught[l.Name] {
			t.Errorf("no violation of lint %s is tested", l.Name)
		}
		if l.Section == "" {
			t.Errorf("lint %s names no section", l.Name)
		}
	}
}

// violate builds a certificate as Issuer.build does, with the violation in.
func violate(t *testing.T, i *Issuer, p *Profile, r *Request, v broken) *lint.Subject {
	t.Helper()
	now := time.Now()
	kt, err := TypeOf(r.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	tm, err := i.template(p, r, kt, now)
	if err != nil {
		t.Fatal(err)
	}
	if v.template != nil {
		v.template(tm)
	}
	signed, err := tm.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if v.bytes != nil {
		signed = v.bytes(signed)
	}
	c, err := lint.Read(signed)
	if err != nil {
		t.Fatalf("%s: the violation does not parse: %v", v.lint, err)
	}
	l := i.subject(c, p, r, tm.SPKI, now)
	if v.held != nil {
		v.held(l)
	}
	return l
}

// dropURI turns the URI SAN into a DNS name of the same length.
func dropURI(der []byte) []byte { return replace(der, []byte{0x86, 0x00}, []byte{0x82, 0x00}) }

// clearCritical turns an extension's critical flag to FALSE. DER would leave it out; crypto/x509 reads it all the same.
func clearCritical(der, oid []byte) []byte {
	b := cryptobyte.NewBuilder(nil)
	b.AddASN1(cbasn1.OBJECT_IDENTIFIER, func(b *cryptobyte.Builder) { b.AddBytes(oid) })
	header := b.BytesOrPanic()
	return replace(der, slices.Concat(header, []byte{1, 1, 0xff}), slices.Concat(header, []byte{1, 1, 0x00}))
}

func replace(in, old, by []byte) []byte {
	return []byte(strings.Replace(string(in), string(old), string(by), 1))
}

// What was linted is, to the byte, what is signed.
func TestInvariant1SignedBytesAreTheLintedOnes(t *testing.T) {
	i, _, _ := newIssuer(t, CreateConfig{})
	token, err := i.Prepare(profile(t, ProfileConfig{}), Request{ID: id(t, "spiffe://cluster.local/ns/a/sa/b"), PublicKey: publicKey(t, P256)})
	if err != nil {
		t.Fatal(err)
	}
	c, err := i.Issue(t.Context(), token)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(c.DER)
	if err != nil {
		t.Fatal(err)
	}
	if string(cert.RawTBSCertificate) != string(token.message) {
		t.Error("the certificate's signed bytes differ from those that Prepare linted")
	}
	if err := c.check(); err != nil {
		t.Error(err)
	}
}
