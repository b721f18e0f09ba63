package authority

import (
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/document"
)

// Lifetimes hold for what Init makes and for every issuer after it.
func TestLifetimes(t *testing.T) {
	c := setup(t, t.TempDir())
	c.RootTTL, c.IssuerTTL = 90*24*time.Hour, 36*time.Hour
	doc, err := Init(t.Context(), c, "test")
	if err != nil {
		t.Fatal(err)
	}
	lives := func(doc *Document, kind document.AuthorityKind) time.Duration {
		t.Helper()
		a, err := doc.Active(c.Domain, kind)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := a.X509()
		if err != nil {
			t.Fatal(err)
		}
		return cert.NotAfter.Sub(cert.NotBefore.Add(ca.DefaultBackdate)).Round(time.Minute)
	}
	if root, issuer := lives(doc, KindRoot), lives(doc, KindIssuer); root != c.RootTTL || issuer != c.IssuerTTL {
		t.Errorf("root and issuer live %s and %s, want %s and %s", root, issuer, c.RootTTL, c.IssuerTTL)
	}
	c.IssuerTTL = 12 * time.Hour // changed in the config
	k := driving(t, c)
	if err := k.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if root, issuer := lives(k.Document(), KindRoot), lives(k.Document(), KindIssuer); root != c.RootTTL || issuer != c.IssuerTTL {
		t.Errorf("after a renewal root and issuer live %s and %s, want %s and %s", root, issuer, c.RootTTL, c.IssuerTTL)
	}
}
