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
)

// broken is one way to violate a lint: in the template before it is written, in the bytes after it is written, or in
// what the certificate is held against.
type broken struct {
	lint     string
	ca       bool // a signing certificate
	template func(*template)
	bytes    func([]byte) []byte
	held     func(*linted)
}

// Every lint is violated by at least one certificate, and that certificate is not signed.
var violations = []broken{
	{lint: "one_uri_san", template: func(t *template) { t.uri = "" }, bytes: dropURI},
	{lint: "leaf_id_has_path", template: func(t *template) { t.uri = "spiffe://cluster.local" }},
	{lint: "leaf_id_has_path", template: func(t *template) { t.uri = "spiffe://cluster.local/" }},
	{lint: "leaf_id_has_path", template: func(t *template) { t.uri = "https://cluster.local/ns/a/sa/b" }},
	{lint: "san_critical_without_subject", bytes: func(b []byte) []byte { return clearCritical(b, []byte{0x55, 0x1d, 0x11}) }},
	{lint: "signing_id_without_path", ca: true, template: func(t *template) { t.uri = "spiffe://cluster.local/x" }},
	{lint: "signing_id_without_path", ca: true, template: func(t *template) { t.uri = "spiffe://other" }},
	{lint: "basic_constraints", template: func(t *template) { t.ca = true }},
	{lint: "basic_constraints", bytes: func(b []byte) []byte { return clearCritical(b, []byte{0x55, 0x1d, 0x13}) }},
	{lint: "key_usage_present_and_critical", bytes: func(b []byte) []byte { return clearCritical(b, []byte{0x55, 0x1d, 0x0f}) }},
	{lint: "signing_key_usage", ca: true, template: func(t *template) { t.keyUsage = x509.KeyUsageCRLSign }},
	{lint: "leaf_key_usage_digital_signature", template: func(t *template) { t.keyUsage = x509.KeyUsageKeyAgreement }},
	{lint: "leaf_key_usage_no_signing", template: func(t *template) { t.keyUsage |= x509.KeyUsageCertSign }},
	{lint: "leaf_key_usage_no_signing", template: func(t *template) { t.keyUsage |= x509.KeyUsageCRLSign }},
	{lint: "leaf_ext_key_usage", bytes: func(b []byte) []byte { // clientAuth becomes codeSigning
		return replace(b, []byte{0x2b, 6, 1, 5, 5, 7, 3, 2}, []byte{0x2b, 6, 1, 5, 5, 7, 3, 3})
	}},
	{lint: "version_3", held: func(l *linted) { l.cert.Version = 1 }},
	{lint: "serial", template: func(t *template) { t.serial = []byte{0} }},
	{lint: "serial", template: func(t *template) { t.serial = append([]byte{1}, make([]byte, 20)...) }},
	{lint: "issuer_name", held: func(l *linted) { l.issuer = &Issuer{name: []byte("x"), ski: l.issuer.ski, notAfter: l.issuer.notAfter} }},
	{lint: "key_identifiers", template: func(t *template) { t.aki = []byte{1, 2, 3} }},
	{lint: "key_identifiers", held: func(l *linted) { l.cert.SubjectKeyId = nil }},
	{lint: "extensions", held: func(l *linted) { l.cert.Extensions = append(l.cert.Extensions, l.cert.Extensions[0]) }},
	{lint: "extensions", held: func(l *linted) {
		l.cert.UnhandledCriticalExtensions = append(l.cert.UnhandledCriticalExtensions, oidAttestation)
	}},
	{lint: "signing_subject", ca: true, template: func(t *template) { t.subject = emptyName }},
	{lint: "validity", template: func(t *template) { t.notBefore = t.notAfter.Add(time.Hour) }},
	{lint: "validity", template: func(t *template) { t.notBefore = time.Now().Add(time.Minute) }},
	{lint: "validity", template: func(t *template) { t.notAfter = time.Now().Add(25 * time.Hour) }},
	{lint: "validity", held: func(l *linted) { l.issuer = &Issuer{name: l.issuer.name, ski: l.issuer.ski, notAfter: time.Now()} }},
	{lint: "what_was_asked", template: func(t *template) { t.uri = "spiffe://cluster.local/ns/a/sa/other" }},
	{lint: "what_was_asked", template: func(t *template) { t.dns = []string{"added.example"} }},
	{lint: "what_was_asked", template: func(t *template) { t.ips = []netip.Addr{netip.MustParseAddr("127.0.0.1")} }},
	{lint: "what_was_asked", held: func(l *linted) { l.cert.PublicKey = l.issuer.key.Public() }},
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
		err := l.run()
		if err == nil || !strings.Contains(err.Error(), "lint "+v.lint+" (") {
			t.Errorf("a violation of %s gave: %v", v.lint, err)
		}
		caught[v.lint] = true
	}
	for _, l := range lints {
		if !caught[l.name] {
			t.Errorf("no violation of lint %s is tested", l.name)
		}
		if l.section == "" {
			t.Errorf("lint %s names no section", l.name)
		}
	}
}

// violate builds a certificate as Issuer.build does, with the violation in.
func violate(t *testing.T, i *Issuer, p *Profile, r *Request, v broken) *linted {
	t.Helper()
	now := time.Now()
	tm, err := i.template(p, r, now)
	if err != nil {
		t.Fatal(err)
	}
	if v.template != nil {
		v.template(tm)
	}
	tbs, err := tm.marshal()
	if err != nil {
		t.Fatal(err)
	}
	der, err := assemble(tbs, i.algorithm.id, []byte{0})
	if err != nil {
		t.Fatal(err)
	}
	if v.bytes != nil {
		der = v.bytes(der)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatalf("%s: the violation does not parse: %v", v.lint, err)
	}
	l := &linted{cert: cert, issuer: i, profile: p, request: r, now: now}
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
	if string(cert.RawTBSCertificate) != string(token.tbs) {
		t.Error("the certificate's signed bytes differ from those that Prepare linted")
	}
	if err := c.check(); err != nil {
		t.Error(err)
	}
}
