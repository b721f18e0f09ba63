package parent

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/trust"
)

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func domain(t testing.TB) trust.Domain {
	t.Helper()
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	return td
}

// authority is a CA of the test's, made by crypto/x509.
type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// template is that of a CA that may do all that an issuer's parent should.
func template(name string) *x509.Certificate {
	serial := make([]byte, 16)
	rand.Read(serial)
	serial[0] = 1
	return &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour).UTC(),
		NotAfter: time.Now().Add(30 * 24 * time.Hour).UTC(), IsCA: true, BasicConstraintsValid: true, MaxPathLen: -1,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
}

// sign signs a template for a key; the zero authority signs itself.
func (a authority) sign(t testing.TB, tmpl *x509.Certificate, key crypto.Signer) authority {
	t.Helper()
	by, signer := a.cert, a.key
	if by == nil {
		by, signer = tmpl, key
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, by, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return authority{cert, key}
}

func bundle(t testing.TB, roots ...*x509.Certificate) *trust.Bundle {
	t.Helper()
	b, err := trust.NewBundle(domain(t), 1, roots)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A request says all that a parent has to know, and is signed by its key.
func TestRequest(t *testing.T) {
	for _, kt := range []ca.KeyType{ca.P256, ca.P384, ca.Ed25519, ca.RSA} {
		key, err := ca.GenerateKey(kt)
		if err != nil {
			t.Fatal(err)
		}
		der, err := Request(domain(t), key)
		if err != nil {
			t.Fatal(err)
		}
		csr, err := x509.ParseCertificateRequest(der)
		if err != nil {
			t.Fatal(err)
		}
		if err := csr.CheckSignature(); err != nil || !trust.SameKey(csr.PublicKey, key.Public()) {
			t.Errorf("%s: %v", kt, err)
		}
		if len(csr.URIs) != 1 || csr.URIs[0].String() != "spiffe://cluster.local" || csr.Subject.CommonName == "" || len(csr.Extensions) != 3 {
			t.Errorf("%s: URIs %v, subject %s, %d extensions", kt, csr.URIs, csr.Subject, len(csr.Extensions))
		}
		// A CA that copies the extensions gives what Check wants to see.
		root := authority{}.sign(t, template("root"), newKey(t))
		tmpl := template("")
		tmpl.RawSubject, tmpl.IsCA, tmpl.BasicConstraintsValid, tmpl.KeyUsage, tmpl.ExtraExtensions = csr.RawSubject, false, false, 0, csr.Extensions
		tmpl.SubjectKeyId = []byte("12345678901234567890")
		if _, err := Check(domain(t), key.Public(), []*x509.Certificate{root.sign(t, tmpl, key).cert}, bundle(t, root.cert), time.Now()); err != nil {
			t.Errorf("%s: %v", kt, err)
		}
	}
}

func TestCheckAcceptsAndOrdersAChain(t *testing.T) {
	key := newKey(t)
	root := authority{}.sign(t, template("root"), newKey(t))
	upper := root.sign(t, template("upper"), newKey(t))
	lower := upper.sign(t, template("lower"), newKey(t))
	issuer := lower.sign(t, template("issuer"), key)
	stranger := authority{}.sign(t, template("stranger"), newKey(t))
	for name, chain := range map[string][]*x509.Certificate{
		"in order":      {issuer.cert, lower.cert, upper.cert},
		"with its root": {issuer.cert, lower.cert, upper.cert, root.cert},
		"in disorder":   {issuer.cert, root.cert, stranger.cert, upper.cert, lower.cert},
	} {
		between, err := Check(domain(t), key.Public(), chain, bundle(t, root.cert), time.Now())
		if err != nil || !slices.EqualFunc(between, []*x509.Certificate{lower.cert, upper.cert}, func(a, b *x509.Certificate) bool { return a.Equal(b) }) {
			t.Errorf("%s: %d certificates between, %v", name, len(between), err)
		}
	}
	// A root that issues itself has nothing in between.
	self := authority{}.sign(t, template("self"), key)
	if between, err := Check(domain(t), key.Public(), []*x509.Certificate{self.cert}, bundle(t, self.cert), time.Now()); err != nil || len(between) != 0 {
		t.Errorf("a root: %d, %v", len(between), err)
	}
}

func uris(texts ...string) (out []*url.URL) {
	for _, s := range texts {
		u, err := url.Parse(s)
		if err != nil {
			panic(err)
		}
		out = append(out, u)
	}
	return out
}

// Every certificate that would break in a verifier's hands is refused, by name.
func TestCheckRefuses(t *testing.T) {
	none := func(*x509.Certificate) {}
	for name, tc := range map[string]struct {
		issuer, between func(*x509.Certificate)
		want            string
	}{
		"not a CA":            {func(c *x509.Certificate) { c.IsCA, c.MaxPathLen = false, 0 }, none, "not a CA certificate"},
		"no basicConstraints": {func(c *x509.Certificate) { c.BasicConstraintsValid = false }, none, "not a CA certificate"},
		"no keyCertSign":      {func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCRLSign }, none, "lacks keyCertSign"},
		"no cRLSign":          {func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCertSign }, none, "lacks cRLSign"},
		"no key usage":        {func(c *x509.Certificate) { c.KeyUsage = 0 }, none, "lacks keyCertSign"},
		"no subject":          {func(c *x509.Certificate) { c.Subject = pkix.Name{} }, none, "subject is empty"},
		"ended":               {func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }, none, "it ended at"},
		"not begun":           {func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) }, none, "in the future"},
		"another domain":      {func(c *x509.Certificate) { c.URIs = uris("spiffe://other") }, none, "may have spiffe://cluster.local only"},
		"an ID with a path":   {func(c *x509.Certificate) { c.URIs = uris("spiffe://cluster.local/ns/a/sa/b") }, none, "may have spiffe://cluster.local only"},
		"two URIs":            {func(c *x509.Certificate) { c.URIs = uris("spiffe://cluster.local", "https://a") }, none, "has 2 URIs"},
		"serverAuth only":     {func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }, none, "both serverAuth and clientAuth"},
		"code signing above": {none, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning} },
			"both serverAuth and clientAuth"},
		"no room below":       {none, func(c *x509.Certificate) { c.MaxPathLen, c.MaxPathLenZero = 0, true }, "path length of 0"},
		"the parent ended":    {none, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }, "does not lead to a root"},
		"the parent is no CA": {none, func(c *x509.Certificate) { c.IsCA, c.MaxPathLen = false, 0 }, "does not lead to a root"},
		"permitted elsewhere": {none, func(c *x509.Certificate) {
			c.PermittedURIDomains, c.PermittedDNSDomainsCritical = []string{"other"}, true
		}, "permit URIs of [other] only"},
		"excluded": {none, func(c *x509.Certificate) {
			c.ExcludedURIDomains, c.PermittedDNSDomainsCritical = []string{"cluster.local"}, true
		}, "exclude URIs"},
		"a lint": {func(c *x509.Certificate) {
			c.SubjectKeyId = []byte("12345678901234567890")
			c.AuthorityKeyId = nil
			c.SerialNumber = new(big.Int).Lsh(big.NewInt(1), 160)
		}, none, "zlint: "},
		"all of it is in order": {func(c *x509.Certificate) { c.URIs = uris("spiffe://cluster.local") }, func(c *x509.Certificate) {
			c.PermittedURIDomains, c.PermittedDNSDomainsCritical, c.MaxPathLen = []string{"cluster.local"}, true, 1
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			root := authority{}.sign(t, template("root"), newKey(t))
			above, own := template("between"), template("issuer")
			tc.between(above)
			tc.issuer(own)
			parent := root.sign(t, above, newKey(t))
			issuer := parent.sign(t, own, newKey(t))
			_, err := Check(domain(t), issuer.key.Public(), []*x509.Certificate{issuer.cert, parent.cert}, bundle(t, root.cert), time.Now())
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	root := authority{}.sign(t, template("root"), newKey(t))
	other := authority{}.sign(t, template("root"), newKey(t)) // of the same name
	issuer := root.sign(t, template("issuer"), newKey(t))
	for name, tc := range map[string]struct {
		key   crypto.PublicKey
		chain []*x509.Certificate
		roots *trust.Bundle
		want  string
	}{
		"nothing":         {issuer.key.Public(), nil, bundle(t, root.cert), "no issuing certificate"},
		"another key":     {newKey(t).Public(), []*x509.Certificate{issuer.cert}, bundle(t, root.cert), "for another key"},
		"another root":    {issuer.key.Public(), []*x509.Certificate{issuer.cert, root.cert}, bundle(t, other.cert), "does not lead to a root"},
		"no root at all":  {issuer.key.Public(), []*x509.Certificate{issuer.cert, root.cert}, bundle(t), "does not lead to a root"},
		"the wrong first": {issuer.key.Public(), []*x509.Certificate{root.cert, issuer.cert}, bundle(t, root.cert), "the first certificate should be"},
	} {
		if _, err := Check(domain(t), tc.key, tc.chain, tc.roots, time.Now()); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
