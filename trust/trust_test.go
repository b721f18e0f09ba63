package trust

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseID(t *testing.T) {
	for _, s := range []string{
		"spiffe://cluster.local/ns/foo/sa/web", "spiffe://a/b", "spiffe://1.2.3.4/x", "spiffe://td_1-2.x/A-Z_0.9",
		"spiffe://td/" + strings.Repeat("a", MaxIDLen-len("spiffe://td/")),
	} {
		id, err := ParseID(s)
		if err != nil || id.String() != s {
			t.Errorf("%.60q: %q, %v", s, id, err)
		}
	}
	for _, s := range []string{
		"", "spiffe://", "spiffe://td", "spiffe://td/", "spiffe:///ns/a", "SPIFFE://td/a", "spiffe://TD/a", "https://td/a", "spiffe:/td/a",
		"spiffe://td//a", "spiffe://td/a/", "spiffe://td/./a", "spiffe://td/a/..", "spiffe://td/a%20b", "spiffe://td/a?b", "spiffe://td/a#b",
		"spiffe://td:80/a", "spiffe://u@td/a", "spiffe://td/ä", "spiffe://x,istiod.istio-system.svc,y/ns/foo/sa/bar", "spiffe://td/a b",
		"spiffe://td/a\x00", "spiffe://" + strings.Repeat("a", MaxDomainLen+1) + "/b", "spiffe://td/" + strings.Repeat("a", MaxIDLen),
	} {
		if id, err := ParseID(s); err == nil || !id.IsZero() {
			t.Errorf("%.60q was read as %q", s, id)
		}
	}
}

func TestIDParts(t *testing.T) {
	td, err := ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	id, err := WorkloadID(td, "foo", "my.app")
	if err != nil {
		t.Fatal(err)
	}
	ns, sa, ok := id.Workload()
	if !ok || ns != "foo" || sa != "my.app" || id.Domain() != td || id.Path() != "/ns/foo/sa/my.app" || id.Reserved() {
		t.Errorf("parts of %s: %q %q %v", id, ns, sa, ok)
	}
	if _, err := WorkloadID(td, "foo/sa/x", "y"); err == nil {
		t.Error("a namespace with a slash made an ID")
	}
	for _, s := range []string{"spiffe://td/ns/a", "spiffe://td/ns/a/sa/b/c", "spiffe://td/x/a/sa/b", "spiffe://td/ns/a/sb/b"} {
		id, err := ParseID(s)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, ok := id.Workload(); ok {
			t.Errorf("%s passes as a workload's", s)
		}
	}
	for s, want := range map[string]bool{"spiffe://td/chancery/server": true, "spiffe://td/chancery": true, "spiffe://td/chanceryx/a": false} {
		id, err := ParseID(s)
		if err != nil {
			t.Fatal(err)
		}
		if id.Reserved() != want {
			t.Errorf("%s reserved: %v", s, !want)
		}
	}
	if got := id.WithDomain(Domain{"new"}).String(); got != "spiffe://new/ns/foo/sa/my.app" {
		t.Errorf("in another domain: %s", got)
	}
	if SystemID(td, "server").String() != "spiffe://cluster.local/chancery/server" {
		t.Error("the server's own ID")
	}
}

func FuzzParseID(f *testing.F) {
	for _, s := range []string{"spiffe://td/a/b", "spiffe://td", "spiffe://td/a%2f", "spiffe://td/../a", "spiffe://TD/a", "spiffe://a,b/c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseID(s)
		if err != nil {
			return
		}
		u, err := url.Parse(s)
		if err != nil {
			t.Fatalf("%q is an ID but no URL: %v", s, err)
		}
		if u.Scheme != "spiffe" || u.Host != id.Domain().String() || u.Path != id.Path() || u.RawQuery != "" || u.Fragment != "" || u.User != nil || id.URL().String() != s {
			t.Errorf("%q is read as %q %q, and as a URL %q %q", s, id.Domain(), id.Path(), u.Host, u.Path)
		}
	})
}

// testCA signs whatever a test needs, right or wrong.
type testCA struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func sign(t testing.TB, template, parent *x509.Certificate, pub crypto.PublicKey, key crypto.Signer) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, pub, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func newTestCA(t testing.TB, name string) *testCA {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	return &testCA{key, sign(t, template, template, key.Public(), key)}
}

// leaf issues an SVID for a new key, with changes.
func (c *testCA) leaf(t testing.TB, uri string, change func(*x509.Certificate)) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	if uri != "" {
		u, err := url.Parse(uri)
		if err != nil {
			t.Fatal(err)
		}
		template.URIs = []*url.URL{u}
	}
	if change != nil {
		change(template)
	}
	key := newKey(t)
	return sign(t, template, c.cert, key.Public(), c.key), key
}

func (c *testCA) bundle(t testing.TB, td string) *Bundle {
	t.Helper()
	b, err := NewBundle(Domain{td}, 1, []*x509.Certificate{c.cert})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Each MUST on a validator, in X509-SVID sections 2, 3.2 and 5.2.
func TestVerify(t *testing.T) {
	c, foreign := newTestCA(t, "root"), newTestCA(t, "foreign")
	second := &url.URL{Scheme: "spiffe", Host: "td", Path: "/second"}
	for name, tc := range map[string]struct {
		uri    string
		by     *testCA
		change func(*x509.Certificate)
		want   string // part of the error; empty = accepted
	}{
		"an SVID":             {"spiffe://td/ns/a/sa/b", c, nil, ""},
		"with DNS SAN":        {"spiffe://td/a", c, func(x *x509.Certificate) { x.DNSNames = []string{"a.b"} }, ""},
		"no URI SAN":          {"", c, func(x *x509.Certificate) { x.DNSNames = []string{"a.b"} }, "0 URI SANs"},
		"two URI SANs":        {"spiffe://td/a", c, func(x *x509.Certificate) { x.URIs = append(x.URIs, second) }, "2 URI SANs"},
		"no path":             {"spiffe://td", c, nil, "no path"},
		"another scheme":      {"https://td/a", c, nil, "not a SPIFFE ID"},
		"CA certificate":      {"spiffe://td/a", c, func(x *x509.Certificate) { x.IsCA = true }, "CA certificate"},
		"keyCertSign":         {"spiffe://td/a", c, func(x *x509.Certificate) { x.KeyUsage |= x509.KeyUsageCertSign; x.IsCA = false }, "sign certificates"},
		"cRLSign":             {"spiffe://td/a", c, func(x *x509.Certificate) { x.KeyUsage |= x509.KeyUsageCRLSign }, "sign certificates"},
		"no digitalSignature": {"spiffe://td/a", c, func(x *x509.Certificate) { x.KeyUsage = x509.KeyUsageKeyAgreement }, "no digitalSignature"},
		"no key usage":        {"spiffe://td/a", c, func(x *x509.Certificate) { x.KeyUsage = 0 }, ""},
		"for code only": {"spiffe://td/a", c, func(x *x509.Certificate) {
			x.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning}
		}, "other purposes than TLS"},
		"for an unknown purpose": {"spiffe://td/a", c, func(x *x509.Certificate) {
			x.ExtKeyUsage, x.UnknownExtKeyUsage = nil, []asn1.ObjectIdentifier{{1, 2, 3}}
		}, "other purposes than TLS"},
		"for all purposes":     {"spiffe://td/a", c, func(x *x509.Certificate) { x.ExtKeyUsage = nil }, ""},
		"for clients":          {"spiffe://td/a", c, func(x *x509.Certificate) { x.ExtKeyUsage = x.ExtKeyUsage[:1] }, ""},
		"no basic constraints": {"spiffe://td/a", c, func(x *x509.Certificate) { x.BasicConstraintsValid = false }, ""},
		"root path":            {"spiffe://td/", c, nil, "empty segment"},
		"domain in capitals":   {"spiffe://TD/a", c, nil, "character 'T'"},
		"2,048 bytes":          {"spiffe://td/" + strings.Repeat("a", MaxIDLen-len("spiffe://td/")), c, nil, ""},
		"2,049 bytes":          {"spiffe://td/" + strings.Repeat("a", MaxIDLen+1-len("spiffe://td/")), c, nil, "2049 bytes long"},
		"a critical extension": {"spiffe://td/a", c, func(x *x509.Certificate) {
			x.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3}, Critical: true, Value: []byte{5, 0}}}
		}, "unhandled critical extension"},
		"an extension": {"spiffe://td/a", c, func(x *x509.Certificate) {
			x.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3}, Value: []byte{5, 0}}}
		}, ""},
		"expired":                 {"spiffe://td/a", c, func(x *x509.Certificate) { x.NotAfter = time.Now().Add(-time.Second) }, "expired"},
		"not yet valid":           {"spiffe://td/a", c, func(x *x509.Certificate) { x.NotBefore = time.Now().Add(time.Minute) }, "not yet valid"},
		"unknown root":            {"spiffe://td/a", foreign, nil, "unknown authority"},
		"unknown trust domain":    {"spiffe://other/a", c, nil, "not trusted here"},
		"foreign root, own ID":    {"spiffe://td/a", foreign, nil, "unknown authority"},
		"own root, foreign ID":    {"spiffe://foreign/a", c, nil, "unknown authority"},
		"foreign root and its ID": {"spiffe://foreign/a", foreign, nil, ""},
	} {
		bundles := map[Domain]*Bundle{{"td"}: c.bundle(t, "td"), {"foreign"}: foreign.bundle(t, "foreign")}
		cert, _ := tc.by.leaf(t, tc.uri, tc.change)
		id, chains, err := Verify([]*x509.Certificate{cert}, func(d Domain) *Bundle { return bundles[d] }, time.Now())
		switch {
		case tc.want == "" && (err != nil || id.String() != tc.uri || len(chains) == 0):
			t.Errorf("%s: %q, %v", name, id, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want) || !id.IsZero()):
			t.Errorf("%s: %q, %v; want something about %q", name, id, err, tc.want)
		}
	}
	if _, _, err := Verify(nil, Only(c.bundle(t, "td")), time.Now()); err == nil {
		t.Error("an empty chain was accepted")
	}
	empty, err := NewBundle(Domain{"td"}, 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	cert, _ := c.leaf(t, "spiffe://td/a", nil)
	if _, _, err := Verify([]*x509.Certificate{cert}, Only(empty), time.Now()); err == nil {
		t.Error("an empty bundle trusts")
	}
}

// intermediate returns a CA below this one, with changes.
func (c *testCA) intermediate(t testing.TB, name string, change func(*x509.Certificate)) *testCA {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(3), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	if change != nil {
		change(template)
	}
	return &testCA{key, sign(t, template, c.cert, key.Public(), c.key)}
}

// Path validation follows RFC 5280 (X509-SVID section 5.1), and what authenticates is a leaf (section 3.2).
func TestVerifyPaths(t *testing.T) {
	root, other := newTestCA(t, "root"), newTestCA(t, "other")
	ca := func(change func(*x509.Certificate)) *testCA { return root.intermediate(t, "issuer", change) }
	good := ca(nil)
	below := ca(func(x *x509.Certificate) { x.MaxPathLen, x.MaxPathLenZero = 0, true })
	uri := func(host string) func(*x509.Certificate) {
		return func(x *x509.Certificate) { x.PermittedURIDomains, x.PermittedDNSDomainsCritical = []string{host}, true }
	}
	leaf := func(by *testCA, id string) *x509.Certificate {
		cert, _ := by.leaf(t, id, nil)
		return cert
	}
	deep := below.intermediate(t, "deep", nil)
	expired := ca(func(x *x509.Certificate) { x.NotAfter = time.Now().Add(-time.Minute) })
	noSign := ca(func(x *x509.Certificate) { x.KeyUsage = x509.KeyUsageCRLSign })
	noCA := ca(func(x *x509.Certificate) { x.IsCA, x.KeyUsage = false, x509.KeyUsageDigitalSignature })
	critical := ca(func(x *x509.Certificate) {
		x.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3}, Critical: true, Value: []byte{5, 0}}}
	})
	own, foreign := ca(uri("td.example")), ca(uri("other.example"))
	svid := ca(func(x *x509.Certificate) { x.URIs = []*url.URL{{Scheme: "spiffe", Host: "td"}} })
	for name, tc := range map[string]struct {
		chain []*x509.Certificate
		want  string
	}{
		"through an issuer":                  {[]*x509.Certificate{leaf(good, "spiffe://td/a"), good.cert}, ""},
		"with others in between":             {[]*x509.Certificate{leaf(good, "spiffe://td/a"), other.cert, good.cert, root.cert}, ""},
		"without the issuer":                 {[]*x509.Certificate{leaf(good, "spiffe://td/a")}, "unknown authority"},
		"the issuer alone":                   {[]*x509.Certificate{svid.cert}, "no path"},
		"the issuer first":                   {[]*x509.Certificate{good.cert, leaf(good, "spiffe://td/a")}, "0 URI SANs"},
		"the root that brought itself along": {[]*x509.Certificate{leaf(other, "spiffe://td/a"), other.cert}, "unknown authority"},
		"below the path length":              {[]*x509.Certificate{leaf(deep, "spiffe://td/a"), deep.cert, below.cert}, "too many intermediates"},
		"an issuer that ended":               {[]*x509.Certificate{leaf(expired, "spiffe://td/a"), expired.cert}, "expired"},
		"an issuer without keyCertSign":      {[]*x509.Certificate{leaf(noSign, "spiffe://td/a"), noSign.cert}, "unknown authority"},
		"an issuer that is no CA":            {[]*x509.Certificate{leaf(noCA, "spiffe://td/a"), noCA.cert}, "unknown authority"},
		"an issuer with what is critical":    {[]*x509.Certificate{leaf(critical, "spiffe://td/a"), critical.cert}, "unhandled critical extension"},
		"an issuer for this domain":          {[]*x509.Certificate{leaf(own, "spiffe://td.example/a"), own.cert}, ""},
		"an issuer for another domain":       {[]*x509.Certificate{leaf(foreign, "spiffe://td.example/a"), foreign.cert}, "not permitted"},
		"too many certificates":              {slices.Repeat([]*x509.Certificate{leaf(good, "spiffe://td/a")}, MaxCertificates+1), "at most 100"},
	} {
		bundleOf := func(d Domain) *Bundle { return root.bundle(t, d.String()) }
		id, _, err := Verify(tc.chain, bundleOf, time.Now())
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want) || !id.IsZero()) {
			t.Errorf("%s: %q, %v; want something about %q", name, id, err, tc.want)
		}
	}
}

func TestInvariant7NewIdentity(t *testing.T) {
	c, foreign := newTestCA(t, "root"), newTestCA(t, "foreign")
	cert, key := c.leaf(t, "spiffe://td/a", nil)
	want, err := ParseID("spiffe://td/a")
	if err != nil {
		t.Fatal(err)
	}
	other, err := ParseID("spiffe://td/b")
	if err != nil {
		t.Fatal(err)
	}
	if i, err := NewIdentity(want, []*x509.Certificate{cert}, key, c.bundle(t, "td"), time.Now()); err != nil || i.ID != want || i.Leaf() != cert {
		t.Errorf("a good identity: %v", err)
	} else if i.Serial() != "02" { // as in logs and CRLs: whole octets, so that texts are equal
		t.Errorf("serial 2 prints as %q", i.Serial())
	}
	for name, f := range map[string]func() (*Identity, error){
		"another key": func() (*Identity, error) {
			return NewIdentity(want, []*x509.Certificate{cert}, newKey(t), c.bundle(t, "td"), time.Now())
		},
		"another bundle": func() (*Identity, error) {
			return NewIdentity(want, []*x509.Certificate{cert}, key, foreign.bundle(t, "td"), time.Now())
		},
		"another ID": func() (*Identity, error) {
			return NewIdentity(other, []*x509.Certificate{cert}, key, c.bundle(t, "td"), time.Now())
		},
		"past its end": func() (*Identity, error) {
			return NewIdentity(want, []*x509.Certificate{cert}, key, c.bundle(t, "td"), time.Now().Add(2*time.Hour))
		},
		"no chain": func() (*Identity, error) { return NewIdentity(want, nil, key, c.bundle(t, "td"), time.Now()) },
	} {
		if i, err := f(); err == nil || i != nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestNewBundleRefuses(t *testing.T) {
	c := newTestCA(t, "root")
	leaf, _ := c.leaf(t, "spiffe://td/a", nil)
	for name, roots := range map[string][]*x509.Certificate{"a leaf": {leaf}, "a root twice": {c.cert, c.cert}, "too many": make([]*x509.Certificate, MaxCertificates+1)} {
		if _, err := NewBundle(Domain{"td"}, 1, roots); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	a, b := newTestCA(t, "a"), newTestCA(t, "b")
	x, err := NewBundle(Domain{"td"}, 1, []*x509.Certificate{a.cert, b.cert})
	if err != nil {
		t.Fatal(err)
	}
	y, err := NewBundle(Domain{"td"}, 2, []*x509.Certificate{b.cert, a.cert})
	if err != nil {
		t.Fatal(err)
	}
	if !x.SameRoots(y) || x.SameRoots(a.bundle(t, "td")) || x.SameRoots(nil) || string(x.PEM()) != string(y.PEM()) {
		t.Error("bundles are not compared by their roots")
	}
}

// handshake connects a client and a server over loopback and returns both errors. Not over a net.Pipe: that has no
// buffer, and two sides that both write an alert wait for each other.
func handshake(t *testing.T, client, server *tls.Config) (clientErr, serverErr error) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, err = c.Write([]byte("x"))
			c.Close()
		}
		done <- err
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	secured := tls.Client(c, client)
	clientErr = secured.Handshake()
	if clientErr == nil {
		_, clientErr = secured.Read(make([]byte, 1))
	}
	c.Close()
	return clientErr, <-done
}

func TestClientTLSAcceptsOneServerOnly(t *testing.T) {
	c, foreign := newTestCA(t, "root"), newTestCA(t, "foreign")
	identity := func(by *testCA, uri string) *Identity {
		cert, key := by.leaf(t, uri, nil)
		id, err := ParseID(uri)
		if err != nil {
			t.Fatal(err)
		}
		i, err := NewIdentity(id, []*x509.Certificate{cert}, key, by.bundle(t, id.Domain().String()), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	want := SystemID(Domain{"td"}, "server")
	client := ClientTLS(want, Only(c.bundle(t, "td")), func() *Identity { return nil })
	for name, tc := range map[string]struct {
		server *Identity
		want   string
	}{
		"the server":              {identity(c, want.String()), ""},
		"a workload":              {identity(c, "spiffe://td/ns/a/sa/b"), "expected spiffe://td/chancery/server"},
		"another CA's server":     {identity(foreign, want.String()), "unknown authority"},
		"another domain's server": {identity(foreign, "spiffe://other/chancery/server"), "not trusted"},
	} {
		err, _ := handshake(t, client, ServerTLS(func() *Identity { return tc.server }))
		if (tc.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err, serverErr := handshake(t, client, ServerTLS(func() *Identity { return nil })); err == nil || serverErr == nil {
		t.Error("a server without a certificate was accepted")
	}
	old := ServerTLS(func() *Identity { return identity(c, want.String()) })
	if err, _ := handshake(t, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}, old); err == nil {
		t.Error("TLS 1.2 was accepted")
	}
}

func TestParseKey(t *testing.T) {
	ec := newKey(t)
	r, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	sec1, err := x509.MarshalECPrivateKey(ec)
	if err != nil {
		t.Fatal(err)
	}
	block := func(kind string, der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	pkcs8, err := EncodeKey(ec)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"PKCS#8": string(pkcs8), "SEC 1": block("EC PRIVATE KEY", sec1), "PKCS#1": block("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(r)),
		"openssl ecparam": block("EC PARAMETERS", []byte{6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7}) + block("EC PRIVATE KEY", sec1),
	} {
		if _, err := ParseKey([]byte(text)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, text := range []string{"", "hello", block("CERTIFICATE", []byte{1}), block("PRIVATE KEY", []byte{1, 2, 3}), block("EC PARAMETERS", []byte{1})} {
		if key, err := ParseKey([]byte(text)); err == nil || key != nil {
			t.Errorf("%q was read as a key", text)
		}
	}
}

// The standard library's decoder skips a block that it cannot read; a bundle must not lose a root that way.
func TestParseCertificatesRefusesDamage(t *testing.T) {
	a, b := string(EncodeCertificates(newTestCA(t, "a").cert)), string(EncodeCertificates(newTestCA(t, "b").cert))
	damaged := strings.Replace(a, "\n", "\n?", 1)
	for name, text := range map[string]string{
		"first": damaged + b, "in the middle": b + damaged + b, "last": b + damaged, "cut off": b + a[:len(a)/2], "cut off before another": a[:len(a)/2] + "\n" + b,
	} {
		if certs, err := ParseCertificates([]byte(text)); err == nil || !strings.Contains(err.Error(), "does not decode") {
			t.Errorf("%s: %d certificates, %v", name, len(certs), err)
		}
	}
	if certs, err := ParseCertificates([]byte("# a\n" + a + "\n# b\n" + b + "\n")); err != nil || len(certs) != 2 {
		t.Errorf("with comments: %d certificates, %v", len(certs), err)
	}
}

func FuzzParseCertificates(f *testing.F) {
	c := newTestCA(f, "root")
	f.Add(EncodeCertificates(c.cert, c.cert))
	f.Add([]byte("# a comment\n-----BEGIN CERTIFICATE-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		certs, err := ParseCertificates(data)
		if err == nil && len(certs) == 0 {
			t.Error("no certificate and no error")
		}
		if err == nil {
			again, err := ParseCertificates(EncodeCertificates(certs...))
			if err != nil || len(again) != len(certs) {
				t.Fatalf("%d certificates do not survive being written: %v", len(certs), err)
			}
			for i, c := range certs {
				if !bytes.Equal(again[i].Raw, c.Raw) || !bytes.Contains(data, []byte("-----BEGIN CERTIFICATE-----")) {
					t.Errorf("certificate %d became another one", i)
				}
			}
			if n := bytes.Count(data, []byte("-----BEGIN")); n != len(certs) {
				t.Errorf("%d certificates out of %d blocks", len(certs), n)
			}
		}
	})
}

// FuzzParseKey: what is accepted signs, is the same after being written, and errors hold nothing of it.
func FuzzParseKey(f *testing.F) {
	c := newTestCA(f, "root")
	text, err := EncodeKey(c.key)
	if err != nil {
		f.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(c.key)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
	f.Add(append([]byte("-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"), text...))
	f.Add([]byte("-----BEGIN RSA PRIVATE KEY-----\nMAMCAQA=\n-----END RSA PRIVATE KEY-----\n"))
	f.Add([]byte("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMAMCAQA=\n-----END ENCRYPTED PRIVATE KEY-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		key, err := ParseKey(data)
		if err != nil {
			block, _ := pem.Decode(data)
			if block != nil && len(block.Bytes) > 8 && len(block.Type) < 40 && strings.Contains(err.Error(), string(block.Bytes)) {
				t.Errorf("the error holds the key: %v", err)
			}
			return
		}
		text, err := EncodeKey(key)
		if err != nil {
			return // of a kind that PKCS#8 does not write, such as X25519
		}
		again, err := ParseKey(text)
		if err != nil || !SameKey(again.Public(), key.Public()) {
			t.Errorf("the key does not survive being written: %v", err)
		}
	})
}

// Key identifiers are hints: they say where to look first, and take nobody out of the bundle.
func TestVerifyWhateverKeyIdentifiersSay(t *testing.T) {
	root, other := newTestCA(t, "one name"), newTestCA(t, "one name")
	cas := map[string]*testCA{
		"of the root":  root.intermediate(t, "issuer", nil),
		"of another":   {root.key, root.cert},
		"of no issuer": {root.key, root.cert},
		"none":         {root.key, root.cert},
	}
	leaves := map[string][]*x509.Certificate{}
	for name, ca := range cas {
		parent := *ca.cert
		switch name {
		case "of another":
			parent.SubjectKeyId = other.cert.SubjectKeyId
		case "of no issuer":
			parent.SubjectKeyId = []byte("nobody")
		case "none":
			parent.SubjectKeyId = nil
		}
		leaf, _ := (&testCA{ca.key, &parent}).leaf(t, "spiffe://td/a", nil)
		leaves[name] = []*x509.Certificate{leaf, ca.cert}
	}
	both, err := NewBundle(Domain{"td"}, 1, []*x509.Certificate{other.cert, root.cert})
	if err != nil {
		t.Fatal(err)
	}
	for name, chain := range leaves {
		if _, chains, err := Verify(chain, Only(both), time.Now()); err != nil || !chains[0][len(chains[0])-1].Equal(root.cert) {
			t.Errorf("key identifier %s: %v", name, err)
		}
		if _, _, err := Verify(chain, Only(other.bundle(t, "td")), time.Now()); err == nil {
			t.Errorf("key identifier %s: verified by a root that signed nothing", name)
		}
	}
}
