package foreign

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
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
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

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

// pinned is an anchor that has pinned a key, of a domain that was another one before.
func pinned(key ed25519.PrivateKey) *anchor.Anchor {
	a := must(anchor.Open(anchor.Config{Domain: must(trust.ParseDomain("old.test"))}))
	b := &chanceryv1.Bundle{TrustDomain: "new.test", Generation: 1, Roots: [][]byte{newRoot("own").Raw}, Kin: []*chanceryv1.DomainRoots{{TrustDomain: "old.test"}}}
	s := trust.SignBundle(key, must(proto.Marshal(b)))
	must(a.Take(nil, &chanceryv1.SignedBundle{Bundle: s.Bundle, Signature: s.Signature, Key: s.Key}))
	return a
}

func foreignBundle(td string, sequence uint64, roots ...*x509.Certificate) *chanceryv1.ForeignBundle {
	b := &chanceryv1.ForeignBundle{TrustDomain: td, Sequence: sequence}
	for _, r := range roots {
		b.Roots = append(b.Roots, r.Raw)
	}
	return b
}

func sign(key ed25519.PrivateKey, own string, version uint64, bundles ...*chanceryv1.ForeignBundle) *chanceryv1.SignedFederation {
	s := trust.SignFederation(key, must(proto.Marshal(&chanceryv1.Federation{TrustDomain: own, Version: version, Bundles: bundles})))
	return &chanceryv1.SignedFederation{Federation: s.Federation, Signature: s.Signature, Key: s.Key}
}

func (d *Domains) text() string {
	all, _ := d.Bundles()
	var out []string
	for _, b := range all {
		out = append(out, fmt.Sprintf("%s/%d/%d", b.Domain(), b.Generation(), len(b.Roots())))
	}
	return strings.Join(out, " ")
}

// TestD6WhatIsSaidOfForeignDomains counts by the pinned key alone, over restarts, and never goes back.
func TestD6WhatIsSaidOfForeignDomains(t *testing.T) {
	key := newKey()
	c := Config{File: filepath.Join(t.TempDir(), "federation"), Anchor: pinned(key)}
	d := Open(c)
	a, b := newRoot("a"), newRoot("b")
	take := func(m *chanceryv1.SignedFederation, want string) {
		t.Helper()
		_, before := d.Bundles()
		was := d.text()
		if err := d.Take(m); err != nil {
			t.Errorf("refused: %v", err)
		}
		if d.text() != want {
			t.Errorf("known is %q; want %q", d.text(), want)
		}
		select {
		case <-before:
			if was == want {
				t.Error("nothing is new, and everybody is woken")
			}
		default:
			if was != want {
				t.Error("nobody is woken")
			}
		}
	}
	refused := func(m *chanceryv1.SignedFederation, want string) (older bool) {
		t.Helper()
		was := d.text()
		err := d.Take(m)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
		if d.text() != was {
			t.Errorf("what was refused is known: %s", d.text())
		}
		_, older = errors.AsType[*trust.Older](err)
		return older
	}
	take(sign(key, "new.test", 5, foreignBundle("a.test", 1, a), foreignBundle("b.test", 9)), "a.test/1/1 b.test/9/0")
	take(sign(key, "new.test", 5, foreignBundle("a.test", 1, a), foreignBundle("b.test", 9)), "a.test/1/1 b.test/9/0")
	take(sign(key, "new.test", 3, foreignBundle("a.test", 1, a), foreignBundle("b.test", 9)), "a.test/1/1 b.test/9/0") // another server has looked earlier
	take(sign(key, "old.test", 4, foreignBundle("a.test", 1, a), foreignBundle("b.test", 9)), "a.test/1/1 b.test/9/0") // and before the migration ended
	if !refused(sign(key, "new.test", 4, foreignBundle("a.test", 1, a)), "version 5 was there before") {
		t.Error("a server that is behind is a liar")
	}
	if refused(sign(key, "new.test", 5, foreignBundle("a.test", 1, a)), "two words on foreign trust domains of version 5") {
		t.Error("two words of one version are nothing")
	}
	for want, m := range map[string]*chanceryv1.SignedFederation{
		"pinned is":                      sign(newKey(), "new.test", 9, foreignBundle("a.test", 2, b)),
		"none of the own trust domains":  sign(key, "other.test", 9),
		"trust domain is empty":          sign(key, "", 9),
		"expected the order":             sign(key, "new.test", 9, foreignBundle("b.test", 1, b), foreignBundle("a.test", 1, a)),
		"each once":                      sign(key, "new.test", 9, foreignBundle("b.test", 1, b), foreignBundle("b.test", 1, a)),
		"occurs twice":                   sign(key, "new.test", 9, foreignBundle("a.test", 1, a, a)),
		"has the character 'A'":          sign(key, "new.test", 9, foreignBundle("A.test", 1, a)),
		"roots of a.test: x509":          sign(key, "new.test", 9, &chanceryv1.ForeignBundle{TrustDomain: "a.test", Roots: [][]byte{{1}}}),
		"101 trust domains; at most 100": sign(key, "new.test", 9, make([]*chanceryv1.ForeignBundle, 101)...),
		"it is empty":                    {},
	} {
		refused(m, want)
	}
	take(sign(key, "new.test", 6, foreignBundle("a.test", 2, a, b)), "a.test/2/2")
	d = Open(c) // the same after a restart
	if d.text() != "a.test/2/2" {
		t.Errorf("after a restart known is %q", d.text())
	}
	refused(sign(key, "new.test", 5, foreignBundle("a.test", 1, a)), "version 6 was there before")
	take(sign(key, "new.test", 7), "") // federation has ended
	if d = Open(c); d.text() != "" {
		t.Errorf("after a restart known is %q", d.text())
	}

	var log strings.Builder
	c.Anchor, c.Logger = pinned(newKey()), slog.New(slog.NewTextHandler(&log, nil))
	if d = Open(c); d.word != nil || !strings.Contains(log.String(), "is of no use") {
		t.Errorf("what another key has signed counts; the log has %s", &log)
	}
	c.Anchor = must(anchor.Open(anchor.Config{Domain: must(trust.ParseDomain("old.test"))}))
	if err := Open(Config{Anchor: c.Anchor}).Take(sign(key, "new.test", 8)); err == nil || !strings.Contains(err.Error(), "no bundle key is pinned") {
		t.Errorf("without a pinned key: %v", err)
	}
}

// TestFaultsOfTheFile: whatever fails, the file has the word before or the new one, and what counts is the new one.
func TestFaultsOfTheFile(t *testing.T) {
	key := newKey()
	kept, first, second := pinned(key), sign(key, "new.test", 1), sign(key, "new.test", 2, foreignBundle("a.test", 1, newRoot("a")))
	in := func(dir string) *Domains { return Open(Config{File: filepath.Join(dir, "federation"), Anchor: kept}) }
	one := func(n int, mode durabletest.Mode) int {
		dir := t.TempDir()
		d := in(dir)
		if err := d.Take(first); err != nil {
			t.Fatal(err)
		}
		w := durabletest.Watch(t, dir)
		w.FailAt(n, mode)
		if err := d.Take(second); err != nil || d.text() != "a.test/1/1" {
			t.Errorf("%s: %v, in memory it is %q", w.Failed(), err, d.text())
		}
		if left := in(w.Copy()); left.word == nil || left.word.version != 1 && left.word.version != 2 {
			t.Errorf("%s: the file has %v", w.Failed(), left.word)
		}
		if !w.Dead() {
			if err := d.Take(second); err != nil { // as with each update
				t.Error(err)
			}
			if left := in(w.Copy()); left.text() != "a.test/1/1" {
				t.Errorf("%s: it is not mended", w.Failed())
			}
		}
		return w.Steps()
	}
	total := one(-1, "")
	for n := range total {
		for _, mode := range durabletest.Modes {
			one(n, mode)
		}
	}
}

func FuzzParse(f *testing.F) {
	key := newKey()
	kept := pinned(key)
	dir := f.TempDir()
	d := Open(Config{File: filepath.Join(dir, "federation"), Anchor: kept})
	if err := d.Take(sign(key, "new.test", 1, foreignBundle("a.test", 1, newRoot("a")))); err != nil {
		f.Fatal(err)
	}
	f.Add(must(os.ReadFile(filepath.Join(dir, "federation"))))
	f.Add([]byte(`{"format":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		d := &Domains{config: Config{Anchor: kept}}
		if d.parse(data) == nil && (d.word == nil || d.signed.Verify(kept.Key()) != nil) {
			t.Errorf("%q is taken", data)
		}
	})
}

// FuzzFederation is for what the key has signed: whatever it says, nothing that is no bundle is taken.
func FuzzFederation(f *testing.F) {
	key := newKey()
	kept := pinned(key)
	f.Add(must(proto.Marshal(&chanceryv1.Federation{TrustDomain: "new.test", Version: 1, Bundles: []*chanceryv1.ForeignBundle{foreignBundle("a.test", 1, newRoot("a"))}})))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := trust.SignFederation(key, data)
		d := Open(Config{Anchor: kept})
		if d.Take(&chanceryv1.SignedFederation{Federation: s.Federation, Signature: s.Signature, Key: s.Key}) != nil {
			return
		}
		all, _ := d.Bundles()
		for i, b := range all {
			if i > 0 && b.Domain().String() <= all[i-1].Domain().String() {
				t.Errorf("%s comes after %s", b.Domain(), all[i-1].Domain())
			}
		}
	})
}
