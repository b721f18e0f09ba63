package authority

import (
	"crypto/x509"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/trust"
)

// With a parent, an authority opens without an issuer; without one it does not.
func TestParentedOpensWithoutAnIssuer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		root, cert := parentCA(t)
		c := setup(t, t.TempDir())
		c.Roots, c.Parented = []*x509.Certificate{cert}, true
		if _, err := Init(t.Context(), c, "test"); err != nil {
			t.Fatal(err)
		}
		k := open(t, c)
		if _, err := k.Issuer(); err == nil || k.KeyName() != "" || len(k.Keys()) != 0 || len(k.Expiries()) != 0 {
			t.Errorf("there is an issuer: %v", err)
		}
		k.mindIssuer(t.Context(), time.Now()) // does nothing, and stands that there is none
		der, err := k.Request(t.Context(), "test", false)
		if err != nil {
			t.Fatal(err)
		}
		if err := k.Import(t.Context(), "test", []*x509.Certificate{answer(t, root, der, time.Hour)}); err != nil {
			t.Fatal(err)
		}
		issue(t, k)
		issue(t, open(t, c))
		without := c
		without.Parented = false
		issue(t, open(t, without)) // the parent was taken out of the config: its issuer lives on
		time.Sleep(2 * time.Hour)
		if _, err := open(t, c).Issuer(); err == nil {
			t.Error("an issuer that has ended is in use")
		}
		if _, err := Open(t.Context(), without); err == nil || !strings.Contains(err.Error(), "kept elsewhere") {
			t.Errorf("without a parent, and with an issuer that has ended: %v", err)
		}
	})
}

// Where the root's key lies here a parent is a mistake, and one is named for it.
func TestParentBesideOwnRoot(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	c.Parented = true
	if _, err := Open(t.Context(), c); err == nil || !strings.Contains(err.Error(), "authority init --root") {
		t.Errorf("got %v", err)
	}
}

// An authority that was plugged in from files goes over to a parent under the same root: what was adopted stays pinned.
func TestPluggedInGoesOverToAParent(t *testing.T) {
	c := setup(t, t.TempDir())
	dir := t.TempDir()
	c.Plugged = &Plugged{Dir: dir, Layout: files.CACerts}
	made := newCA(t, c)
	plugged(t, dir, made, made.Root)
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	c.Plugged, c.Parented = nil, true
	k := open(t, c)
	der, err := k.Request(t.Context(), "test", false)
	if err != nil {
		t.Fatal(err)
	}
	b, err := trust.NewBundle(c.Domain, 1, []*x509.Certificate{made.Root})
	if err != nil {
		t.Fatal(err)
	}
	root, err := ca.NewIssuer(ca.IssuerConfig{Domain: c.Domain, Key: made.RootKey, Chain: []*x509.Certificate{made.Root}, Bundle: b, LogID: ca.MinLogID, Log: c.Log})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Import(t.Context(), "test", []*x509.Certificate{answer(t, root, der, time.Hour)}); err != nil {
		t.Fatal(err)
	}
	issue(t, open(t, c))
}

// A server signs issuers of others with its root: with the terms given, whatever its own issuer may do. One whose root is kept
// elsewhere says so.
func TestSignsIssuersOfOthers(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := open(t, c)
	if err := k.SignsIssuers(); err != nil {
		t.Fatal(err)
	}
	key, err := ca.GenerateKey(ca.P384)
	if err != nil {
		t.Fatal(err)
	}
	chain, err := k.SignIssuer(t.Context(), key.Public(), ca.IssuerTerms{TTL: 2 * time.Hour, PathLen: 1}, audit.Requester{Method: "test"})
	if err != nil || len(chain) != 1 {
		t.Fatal(len(chain), err)
	}
	if cert := chain[0]; cert.MaxPathLen != 1 || !cert.IsCA || time.Until(cert.NotAfter) > 2*time.Hour || !trust.SameKey(cert.PublicKey, key.Public()) {
		t.Errorf("got %+v", cert)
	}
	if chain, err = k.SignIssuer(t.Context(), key.Public(), ca.IssuerTerms{TTL: 5 * ca.DefaultRootTTL}, audit.Requester{}); err != nil {
		t.Fatal(err)
	}
	root, err := k.Document().Active(c.Domain, KindRoot)
	if err != nil {
		t.Fatal(err)
	}
	above, err := root.X509()
	if err != nil {
		t.Fatal(err)
	}
	if cert := chain[0]; cert.NotAfter.After(above.NotAfter) || cert.MaxPathLen != 0 || !cert.MaxPathLenZero {
		t.Errorf("an issuer of a long life ends at %s, path length %d", cert.NotAfter, cert.MaxPathLen)
	}
	if k.Document().Version != 1 {
		t.Error("the document changed")
	}

	_, elsewhere := parentCA(t)
	off := setup(t, t.TempDir())
	off.Roots, off.Parented = []*x509.Certificate{elsewhere}, true
	if _, err := Init(t.Context(), off, "test"); err != nil {
		t.Fatal(err)
	}
	k = open(t, off)
	if err := k.SignsIssuers(); err == nil || !strings.Contains(err.Error(), "cannot sign issuers") {
		t.Errorf("got %v", err)
	}
	if _, err := k.SignIssuer(t.Context(), key.Public(), ca.IssuerTerms{TTL: time.Hour}, audit.Requester{}); err == nil {
		t.Error("signed without the root's key")
	}
}

// An issuer that a crash left prepared is put to use by the next start, also if the one in use has ended meanwhile.
func TestParentedTakesUpAPreparedIssuer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		root, cert := parentCA(t)
		c := setup(t, t.TempDir())
		c.Roots, c.Parented = []*x509.Certificate{cert}, true
		if _, err := Init(t.Context(), c, "test"); err != nil {
			t.Fatal(err)
		}
		k := open(t, c)
		ask := func(ttl time.Duration) []*x509.Certificate {
			der, err := k.Request(t.Context(), "test", false)
			if err != nil {
				t.Fatal(err)
			}
			return []*x509.Certificate{answer(t, root, der, ttl)}
		}
		if err := k.Import(t.Context(), "test", ask(time.Hour)); err != nil {
			t.Fatal(err)
		}
		if id, err := k.prepareImport(t.Context(), k.Change, "test", ask(4*time.Hour)); err != nil || id == "" {
			t.Fatal(id, err)
		}
		time.Sleep(2 * time.Hour)
		k = open(t, c)
		if _, err := k.Issuer(); err == nil {
			t.Fatal("an issuer that has ended is in use")
		}
		drive(t, k)
		k.mindIssuer(t.Context(), time.Now())
		issue(t, k)
	})
}
