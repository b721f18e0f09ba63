package foreign

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

var now = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func domain(t testing.TB, name string) trust.Domain {
	t.Helper()
	td, err := trust.ParseDomain(name)
	if err != nil {
		t.Fatal(err)
	}
	return td
}

// root makes a root certificate whose name has so many bytes.
func root(t testing.TB, size int) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: strings.Repeat("r", size)}, NotBefore: now, NotAfter: now.Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// numbered is a bundle; a number below 0 is none.
func numbered(t testing.TB, n int, roots ...*x509.Certificate) *spiffebundle.Bundle {
	b := &spiffebundle.Bundle{Domain: domain(t, "b.example"), Roots: roots}
	if n >= 0 {
		b.Sequence, b.HasSequence = uint64(n), true
	}
	return b
}

// TestSequenceNeverGoesBack: each pair of a stored bundle and one that comes.
func TestSequenceNeverGoesBack(t *testing.T) {
	one, two := root(t, 1), root(t, 1)
	for _, c := range []struct {
		name              string
		have, come        *spiffebundle.Bundle
		changed, older    bool
		unordered, isKept bool // the bundle before is still the previous one
	}{
		{name: "the first", come: numbered(t, 7, one), changed: true},
		{name: "the first, without a number", come: numbered(t, -1, one), changed: true},
		{name: "the same", have: numbered(t, 7, one), come: numbered(t, 7, one)},
		{name: "the same without a number", have: numbered(t, -1, one), come: numbered(t, -1, one)},
		{name: "newer", have: numbered(t, 7, one), come: numbered(t, 8, two), changed: true, isKept: true},
		{name: "newer by number alone", have: numbered(t, 7, one), come: numbered(t, 8, one), changed: true},
		{name: "newer and empty", have: numbered(t, 7, one), come: numbered(t, 8), changed: true, isKept: true},
		{name: "older", have: numbered(t, 7, one), come: numbered(t, 6, two), older: true},
		{name: "older with the same content", have: numbered(t, 7, one), come: numbered(t, 6, one), older: true},
		{name: "the number is gone", have: numbered(t, 7, one), come: numbered(t, -1, two), older: true},
		{name: "number 0 is gone", have: numbered(t, 0, one), come: numbered(t, -1, one), changed: true},
		{name: "a number came", have: numbered(t, -1, one), come: numbered(t, 1, one), changed: true},
		{name: "other content, same number", have: numbered(t, 7, one), come: numbered(t, 7, two), changed: true, unordered: true, isKept: true},
		{name: "other content, no numbers", have: numbered(t, -1, one), come: numbered(t, -1, two), changed: true, unordered: true, isKept: true},
	} {
		var all Domains
		if c.have != nil {
			var err error
			if all, _, err = Take(nil, c.have, "unix:root", false, now); err != nil {
				t.Fatal(err)
			}
		}
		before := maps.Clone(all)
		v, err := Judge(all, c.come)
		if errors.Is(err, ErrOlder) != c.older || err == nil && v.Change != c.changed || v.Unordered != c.unordered {
			t.Errorf("%s: judged %+v, %v", c.name, v, err)
		}
		next, changed, err := Take(all, c.come, "https://b.example/", false, now.Add(time.Hour))
		if changed != c.changed || errors.Is(err, ErrOlder) != c.older || err != nil && !c.older {
			t.Errorf("%s: changed %v, %v", c.name, changed, err)
		}
		if !maps.Equal(all, before) {
			t.Errorf("%s: what was there before is not as it was", c.name)
		}
		if !changed {
			if !maps.Equal(next, all) {
				t.Errorf("%s: changed all the same", c.name)
			}
			continue
		}
		got := next["b.example"]
		if b, err := Read(next, c.come.Domain); err != nil || !b.Same(c.come) || b.Sequence != c.come.Sequence || b.HasSequence != c.come.HasSequence {
			t.Errorf("%s: reads as %+v, %v", c.name, b, err)
		}
		if got.Actor != "https://b.example/" || !got.Fetched() || !got.Since.Equal(now.Add(time.Hour)) || (got.Previous != nil) != c.isKept {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

// An admin's word takes what is older; nothing else of it is different.
func TestOlderOnAnAdminsWord(t *testing.T) {
	one, two := root(t, 1), root(t, 1)
	all, _, err := Take(nil, numbered(t, 7, one), "https://b.example/", false, now)
	if err != nil {
		t.Fatal(err)
	}
	next, changed, err := Take(all, numbered(t, 3, two), "unix:root", true, now)
	if err != nil || !changed || next["b.example"].Fetched() {
		t.Fatalf("%v, %v", changed, err)
	}
	if next, _, err = Take(next, numbered(t, 4, one), "https://b.example/", false, now); err != nil { // it counts from there
		t.Error(err)
	}
	if _, same, err := Take(next, numbered(t, 4, one), "unix:root", true, now); err != nil || same {
		t.Errorf("the same again: %v, %v", same, err)
	}
}

// The roots before the present ones stay to compare with, however often a number or a hint alone changes.
func TestPreviousAreOtherRoots(t *testing.T) {
	one, two := root(t, 1), root(t, 1)
	var all Domains
	for n, r := range []*x509.Certificate{one, two, two, two} {
		var err error
		if all, _, err = Take(all, numbered(t, n, r), "unix:root", false, now); err != nil {
			t.Fatal(err)
		}
	}
	b, err := spiffebundle.Parse(domain(t, "b.example"), all["b.example"].Previous)
	if err != nil || !b.Same(numbered(t, 0, one)) {
		t.Errorf("%+v, %v", b, err)
	}
}

// A stored bundle that this binary cannot read is replaced on an admin's word only: what came after it is not known.
func TestStoredBundleThatCannotBeRead(t *testing.T) {
	all := Domains{"b.example": {Bundle: []byte("{"), Actor: "https://b.example/"}}
	come := numbered(t, 1, root(t, 1))
	if _, changed, err := Take(all, come, "https://b.example/", false, now); err == nil || changed || !strings.Contains(err.Error(), "trust import --older") {
		t.Errorf("%v, %v", changed, err)
	}
	next, changed, err := Take(all, come, "unix:root", true, now)
	if err != nil || !changed || next["b.example"].Previous != nil {
		t.Errorf("%v, %v, %+v", changed, err, next["b.example"])
	}
}

func TestForget(t *testing.T) {
	all, _, err := Take(nil, numbered(t, 1, root(t, 1)), "unix:root", false, now)
	if err != nil {
		t.Fatal(err)
	}
	if next, was := Forget(all, domain(t, "c.example")); was || len(next) != 1 {
		t.Error("forgets what is not there")
	}
	if next, was := Forget(all, domain(t, "b.example")); !was || next != nil || len(all) != 1 {
		t.Errorf("%v, %v", next, was)
	}
	if b, err := Read(nil, domain(t, "b.example")); b != nil || err != nil {
		t.Errorf("%v, %v", b, err)
	}
}

// TestBounds: no trust domain takes more than its share, and all together no more than a document should carry.
func TestBounds(t *testing.T) {
	big := []*x509.Certificate{}
	for range 40 {
		big = append(big, root(t, 1900)) // about 5.5 kB in JSON: 220 kB in all
	}
	of := func(name string, n uint64, roots []*x509.Certificate) *spiffebundle.Bundle {
		return &spiffebundle.Bundle{Domain: domain(t, name), Roots: roots, Sequence: n, HasSequence: true}
	}
	if _, _, err := Take(nil, of("b.example", 1, append(big, big[0], root(t, 5000), root(t, 5000), root(t, 5000), root(t, 5000), root(t, 5000), root(t, 5000))), "x", false, now); err == nil || !strings.Contains(err.Error(), "at most 262144 are kept of one trust domain") {
		t.Errorf("one large bundle: %v", err)
	}
	var all Domains
	var err error
	for i := range 4 {
		if all, _, err = Take(all, of(fmt.Sprintf("d%d.example", i), 1, big), "x", false, now); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := Take(all, of("e.example", 1, big), "x", false, now); err == nil || !strings.Contains(err.Error(), "at most 1048576 are kept") {
		t.Errorf("a fifth large bundle: %v", err)
	}
	all, changed, err := Take(all, of("d0.example", 2, big[1:]), "x", false, now)
	if err != nil || !changed || all["d0.example"].Previous != nil {
		t.Errorf("without room for the bundle before: %v, %v", changed, err)
	}
	all = nil
	for i := range MaxDomains {
		if all, _, err = Take(all, of(fmt.Sprintf("d%d.example", i), 1, nil), "x", false, now); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := Take(all, of("e.example", 1, nil), "x", false, now); err == nil || !strings.Contains(err.Error(), "at most 100 are kept") {
		t.Errorf("one domain too many: %v", err)
	}
	if _, _, err := Take(all, of("d0.example", 2, nil), "x", false, now); err != nil {
		t.Errorf("a change of one that is there: %v", err)
	}
}
