package anchor

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("td"))

func newRoot(name string) *x509.Certificate {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	x := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	return must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, x, x, key.Public(), key))))
}

func newKey() ed25519.PrivateKey {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return must(key, err)
}

func bundle(generation uint64, roots ...*x509.Certificate) *chanceryv1.Bundle {
	b := &chanceryv1.Bundle{TrustDomain: "td", Generation: generation}
	for _, r := range roots {
		b.Roots = append(b.Roots, r.Raw)
	}
	return b
}

func sign(key ed25519.PrivateKey, b *chanceryv1.Bundle) *chanceryv1.SignedBundle {
	s := trust.SignBundle(key, must(proto.Marshal(b)))
	return &chanceryv1.SignedBundle{Bundle: s.Bundle, Signature: s.Signature, Key: s.Key}
}

func open(t *testing.T, dir string) (*Anchor, *strings.Builder) {
	t.Helper()
	log := new(strings.Builder)
	return must(Open(Config{File: filepath.Join(dir, "bundle"), Domain: td, Logger: slog.New(slog.NewTextHandler(log, nil))})), log
}

// TestD6OncePinned: from the first signed bundle on its key alone changes the roots, also after a restart.
func TestD6OncePinned(t *testing.T) {
	dir := t.TempDir()
	a, _ := open(t, dir)
	one, two := newRoot("one"), newRoot("two")
	key, other := newKey(), newKey()

	if b := must(a.Take(bundle(9, one), nil)); b.Generation() != 9 || a.Pinned() || a.Bundle() != nil {
		t.Error("a server without a bundle key is taken at its word, and nothing is kept")
	}
	if _, err := a.Offer(sign(other, bundle(10, two))); err == nil || !strings.Contains(err.Error(), "no bundle key is pinned") {
		t.Errorf("from somebody who was not verified: %v", err)
	}
	// What is signed counts, whatever stands beside it.
	if b := must(a.Take(bundle(5, two), sign(key, bundle(3, one)))); b.Generation() != 3 || !b.Roots()[0].Equal(one) || !a.Pinned() {
		t.Errorf("generation %d", b.Generation())
	}
	for restarts := range 2 {
		forged := sign(key, bundle(4, two))
		forged.Bundle = must(proto.Marshal(bundle(5, two)))
		for name, tc := range map[string]struct {
			plain  *chanceryv1.Bundle
			signed *chanceryv1.SignedBundle
			want   string
		}{
			"unsigned":                {bundle(4, one), nil, "the bundle is not signed"},
			"another key":             {bundle(4, two), sign(other, bundle(4, two)), "pinned is " + trust.KeyFingerprint(key.Public().(ed25519.PublicKey))},
			"changed":                 {nil, forged, "does not verify"},
			"two of one generation":   {nil, sign(key, bundle(3, two)), "two bundles of generation 3"},
			"no roots":                {nil, sign(key, bundle(4)), "0 certificates"},
			"another domain":          {nil, sign(key, &chanceryv1.Bundle{TrustDomain: "other", Generation: 4, Roots: [][]byte{two.Raw}}), `bundle of "other"`},
			"something else, signed":  {nil, &chanceryv1.SignedBundle{Bundle: []byte("x"), Key: key.Public().(ed25519.PublicKey), Signature: ed25519.Sign(key, []byte("x"))}, "does not verify"},
			"an empty signed message": {bundle(4, one), &chanceryv1.SignedBundle{}, "it is empty"},
		} {
			if b, err := a.Take(tc.plain, tc.signed); err == nil || !strings.Contains(err.Error(), tc.want) || b != nil {
				t.Errorf("%s, restart %d: %v", name, restarts, err)
			}
		}
		if _, err := a.Take(nil, sign(key, bundle(2, one))); !is[*trust.Older](err) {
			t.Errorf("an older one: %v", err)
		}
		if _, err := a.Offer(sign(key, bundle(2, two))); !is[*trust.Older](err) {
			t.Errorf("an older one from somebody who was not verified: %v", err)
		}
		if news, err := a.Offer(sign(key, bundle(3, one))); news || err != nil {
			t.Errorf("the same from somebody who was not verified: %v, %v", news, err)
		}
		if b := a.Bundle(); b.Generation() != 3 || !b.Roots()[0].Equal(one) {
			t.Errorf("restart %d: it has generation %d", restarts, b.Generation())
		}
		var log *strings.Builder
		if a, log = open(t, dir); log.Len() > 0 {
			t.Errorf("it said %s", log)
		}
	}
	if news := must(a.Offer(sign(key, bundle(7, two)))); !news || !a.Bundle().Roots()[0].Equal(two) {
		t.Error("a newer bundle by the pinned key is not taken from somebody who was not verified")
	}
	if info := must(os.Stat(filepath.Join(dir, "bundle"))); info.Mode().Perm() != 0o600 {
		t.Errorf("its mode is %v", info.Mode())
	}
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// TestD6ARootThatLeft: it is known over restarts, until it comes back by a bundle.
func TestD6ARootThatLeft(t *testing.T) {
	dir := t.TempDir()
	a, _ := open(t, dir)
	one, two, never := newRoot("one"), newRoot("two"), newRoot("never")
	key := newKey()
	must(a.Take(nil, sign(key, bundle(1, one))))
	must(a.Take(nil, sign(key, bundle(2, one, two))))
	if a.HasLeft(one) || a.HasLeft(never) {
		t.Error("none has left")
	}
	must(a.Take(nil, sign(key, bundle(3, two))))
	a, _ = open(t, dir)
	if !a.HasLeft(one) || a.HasLeft(two) || a.HasLeft(never) {
		t.Error("one has left, and no other")
	}
	must(a.Take(nil, sign(key, bundle(4, one, two))))
	if a.HasLeft(one) {
		t.Error("one is back")
	}
}

// What cannot be read is as good as nothing, and said; what cannot be written counts in memory, is said, and written later.
func TestAFileOfNoUse(t *testing.T) {
	key := newKey()
	for name, data := range map[string]string{
		"empty": "", "unknown field": `{"format":1,"more":1}`, "format": `{"format":2}`, "not signed": `{"format":1,"bundle":"","signature":"","key":""}`,
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "bundle"), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
		a, log := open(t, dir)
		if !strings.Contains(log.String(), "pinned anew") || a.Pinned() {
			t.Errorf("%s: it said %q", name, log)
		}
		must(a.Take(nil, sign(key, bundle(1, newRoot("one")))))
		if a, log := open(t, dir); log.Len() > 0 || !a.Pinned() {
			t.Errorf("%s: afterwards it said %q", name, log)
		}
	}
}

// Each step of a write fails in each way: what is in the file is the bundle before or the one after, and the next bundle mends it.
func TestFaultsOfTheFile(t *testing.T) {
	key, root := newKey(), newRoot("one")
	one := func(n int, mode durabletest.Mode) int {
		dir := t.TempDir()
		a, log := open(t, dir)
		must(a.Take(nil, sign(key, bundle(1, root))))
		d := durabletest.Watch(t, dir)
		d.FailAt(n, mode)
		if b := must(a.Take(nil, sign(key, bundle(2, root)))); b.Generation() != 2 || a.Bundle().Generation() != 2 {
			t.Errorf("%s: in memory it is %d", d.Failed(), b.Generation())
		}
		left, after := open(t, d.Copy())
		if g := left.Bundle().Generation(); g != 1 && g != 2 || after.Len() > 0 {
			t.Errorf("%s: the file has %d: %s", d.Failed(), g, after)
		} else if g == 1 && !strings.Contains(log.String(), "cannot be kept") {
			t.Errorf("%s: it is not said", d.Failed())
		}
		if !d.Dead() {
			must(a.Take(nil, sign(key, bundle(2, root)))) // the same again
			if left, _ := open(t, d.Copy()); left.Bundle().Generation() != 2 {
				t.Errorf("%s: it is not mended", d.Failed())
			}
		}
		return d.Steps()
	}
	total := one(-1, "")
	for n := range total {
		for _, mode := range durabletest.Modes {
			one(n, mode)
		}
	}
}

// Whatever the file holds makes an error, or something that the key in it has signed.
// TestD10TheLine: the bundle that the pinned key has signed may be of another domain of the same authority by now, the own one is among
// its kin; and the roots of each vouch for its own identities only. Nobody's word but that key's is taken for it.
func TestD10TheLine(t *testing.T) {
	key, r1, r2 := newKey(), newRoot("r1"), newRoot("r2")
	old := must(trust.ParseDomain("old"))
	domain := func(d string, roots ...*x509.Certificate) *chanceryv1.DomainRoots {
		return &chanceryv1.DomainRoots{TrustDomain: d, Roots: bundle(0, roots...).GetRoots()}
	}
	with := func(b *chanceryv1.Bundle, kin ...*chanceryv1.DomainRoots) *chanceryv1.Bundle { b.Kin = kin; return b }
	file := filepath.Join(t.TempDir(), "bundle")
	open := func() *Anchor { return must(Open(Config{File: file, Domain: old})) }
	a := open()
	first := bundle(1, r1)
	first.TrustDomain = "old"
	if _, err := a.Take(with(bundle(1, r2), domain("old", r1)), nil); err == nil || !strings.Contains(err.Error(), "nothing signs that it has taken its place") {
		t.Errorf("a server's word that the domain is another one: %v", err)
	}
	if b, err := a.Take(with(first, domain("new", r2)), nil); err != nil || len(b.Kin()) != 1 {
		t.Errorf("a server's word of kin, before a key is pinned: %v, %v", b, err)
	}
	first.Kin = nil
	must(a.Take(nil, sign(key, first)))
	for name, b := range map[string]*chanceryv1.Bundle{
		"not of the line":  with(bundle(2, r2), domain("older")),
		"twice":            with(bundle(2, r2), domain("old", r1), domain("old")),
		"not in order":     with(bundle(2, r2), domain("x"), domain("old", r1)),
		"itself":           with(bundle(2, r2), domain("old", r1), domain("td")),
		"a shared root":    with(bundle(2, r2), domain("old", r2)),
		"no roots":         with(bundle(2), domain("old", r1)),
		"no domain":        with(bundle(2, r2), domain("", r1)),
		"no certificate":   with(bundle(2, r2), &chanceryv1.DomainRoots{TrustDomain: "old", Roots: [][]byte{{1}}}),
		"of nobody's name": with(&chanceryv1.Bundle{TrustDomain: "TD", Generation: 2, Roots: [][]byte{r2.Raw}}, domain("old", r1)),
	} {
		if got, err := a.Take(nil, sign(key, b)); err == nil {
			t.Errorf("%s: taken as %v", name, got)
		}
	}
	if _, err := a.Take(nil, sign(newKey(), with(bundle(2, r2), domain("old", r1)))); err == nil {
		t.Error("another key made it another domain")
	}
	must(a.Take(nil, sign(key, with(bundle(2, r2), domain("old", r1)))))
	must(a.Take(nil, sign(key, with(bundle(3, r2), domain("old"))))) // it is a former one now
	for range 2 {
		b := a.Bundle()
		if b.Domain() != td || b.Generation() != 3 || b.Of(old) == nil || len(b.Of(old).Roots()) != 0 || b.Of(old).Generation() != 3 || len(b.All()) != 1 {
			t.Errorf("what counts is %v", b)
		}
		if !a.HasLeft(r1) || a.HasLeft(r2) {
			t.Error("it is not known which root has left")
		}
		a = open() // and the same after a restart
	}
}

func FuzzParse(f *testing.F) {
	dir := f.TempDir()
	a := must(Open(Config{File: filepath.Join(dir, "bundle"), Domain: td}))
	must(a.Take(nil, sign(newKey(), bundle(1, newRoot("one")))))
	f.Add(must(os.ReadFile(filepath.Join(dir, "bundle"))))
	f.Add([]byte(`{"format":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		a := &Anchor{config: Config{Domain: td}}
		if a.parse(data) == nil && (a.bundle == nil || a.signed.Verify(a.key) != nil) {
			t.Errorf("%q is taken", data)
		}
	})
}
