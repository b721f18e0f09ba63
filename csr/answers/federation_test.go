package answers

import (
	"crypto/x509"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/trust"
)

// TestD6FederationIsSignedOnce for all agents, and anew for other bundles, another own domain or another key; the version of the document
// alone makes none.
func TestD6FederationIsSignedOnce(t *testing.T) {
	domain := func(name string) trust.Domain { return must(trust.ParseDomain(name)) }
	r1, r2 := root(1), root(2)
	one := func(sequence uint64, roots ...*x509.Certificate) *trust.Bundle {
		return must(trust.NewBundle(domain("one.test"), sequence, roots))
	}
	two := must(trust.NewBundle(domain("two.test"), 7, nil))
	by := signer(1)
	var f Federation
	signed := func(own string, version uint64, by *trust.BundleSigner, all ...*trust.Bundle) (*chanceryv1.SignedFederation, string) {
		t.Helper()
		m, err := f.Signed(domain(own), version, all, by)
		if err != nil {
			t.Fatal(err)
		}
		if err := (trust.SignedFederation{Federation: m.GetFederation(), Signature: m.GetSignature(), Key: m.GetKey()}).Verify(by.Public()); err != nil {
			t.Fatal(err)
		}
		var x chanceryv1.Federation
		if err := proto.Unmarshal(m.GetFederation(), &x); err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf("%s %d:", x.GetTrustDomain(), x.GetVersion())
		for _, b := range x.GetBundles() {
			text += fmt.Sprintf(" %s/%d/%d", b.GetTrustDomain(), b.GetSequence(), len(b.GetRoots()))
		}
		return m, text
	}
	var last *chanceryv1.SignedFederation
	for i, c := range []struct {
		own     string
		version uint64
		by      *trust.BundleSigner
		all     []*trust.Bundle
		want    string
		same    bool
	}{
		{"own.test", 3, by, nil, "own.test 3:", false},
		{"own.test", 4, by, nil, "own.test 3:", true},
		{"own.test", 5, by, []*trust.Bundle{two, one(1, r1)}, "own.test 5: one.test/1/1 two.test/7/0", false},
		{"own.test", 6, by, []*trust.Bundle{one(1, r1), two}, "own.test 5: one.test/1/1 two.test/7/0", true},
		{"own.test", 7, by, []*trust.Bundle{one(2, r1), two}, "own.test 7: one.test/2/1 two.test/7/0", false},
		{"own.test", 8, by, []*trust.Bundle{one(2, r1, r2), two}, "own.test 8: one.test/2/2 two.test/7/0", false},
		{"new.test", 9, by, []*trust.Bundle{one(2, r1, r2), two}, "new.test 9: one.test/2/2 two.test/7/0", false},
		{"new.test", 9, signer(2), []*trust.Bundle{one(2, r1, r2), two}, "new.test 9: one.test/2/2 two.test/7/0", false},
		{"new.test", 10, by, nil, "new.test 10:", false},
		{"new.test", 11, by, nil, "new.test 10:", true},
		{"new.test", 12, by, nil, "new.test 10:", true},
		{"new.test", 14, by, nil, "new.test 14:", false}, // version 13 may have said something else, and other servers told
		{"new.test", 13, by, nil, "new.test 14:", true},
		{"new.test", 15, by, nil, "new.test 14:", true},
	} {
		m, text := signed(c.own, c.version, c.by, c.all...)
		if text != c.want || (m == last) != c.same {
			t.Errorf("step %d: %s, the same message as before: %v; want %s, %v", i, text, m == last, c.want, c.same)
		}
		last = m
	}

	var many []*trust.Bundle
	for i := range MaxFederated + 1 {
		many = append(many, must(trust.NewBundle(domain(fmt.Sprintf("td%d", i)), 1, nil)))
	}
	if _, err := f.Signed(td, 1, many, by); err == nil || !strings.Contains(err.Error(), "101 foreign trust domains") {
		t.Errorf("too many: %v", err)
	}
	large := must(trust.NewBundle(domain("large.test"), 1, []*x509.Certificate{root(600 << 10), root(500 << 10)}))
	if _, err := f.Signed(td, 1, []*trust.Bundle{large}, by); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("too large: %v", err)
	}
}

// TestRootsWithKin: each of the authority's trust domains goes with its own roots.
func TestRootsWithKin(t *testing.T) {
	b := must(must(trust.NewBundle(td, 4, []*x509.Certificate{root(1)})).WithKin(
		must(trust.NewBundle(must(trust.ParseDomain("z.test")), 1, []*x509.Certificate{root(2), root(3)})),
		must(trust.NewBundle(must(trust.ParseDomain("a.test")), 1, nil))))
	m := Roots(b)
	if m.GetTrustDomain() != td.String() || m.GetGeneration() != 4 || len(m.GetRoots()) != 1 || len(m.GetKin()) != 2 ||
		m.GetKin()[0].GetTrustDomain() != "a.test" || len(m.GetKin()[0].GetRoots()) != 0 || m.GetKin()[1].GetTrustDomain() != "z.test" || len(m.GetKin()[1].GetRoots()) != 2 {
		t.Errorf("what is sent is %v", m)
	}
}
