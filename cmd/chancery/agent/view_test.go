package agent

import (
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/csr/client/foreign"
	"github.com/chancery-project/chancery/csr/client/naming"
	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
)

func domainOf(name string) trust.Domain { return must(trust.ParseDomain(name)) }

// rootOf makes the root of a trust domain.
func rootOf(t *testing.T, log *audit.Log, name string) *x509.Certificate {
	return must(ca.Create(t.Context(), ca.CreateConfig{Domain: domainOf(name), LogID: ca.MinLogID + 1, Log: log})).Root
}

// TestD24AViewOfAllThatIsKnown: the own bundle with its kin, foreign ones that are none of the own, the config's word on a service before the
// server's; and whoever waits is woken for each change.
func TestD24AViewOfAllThatIsKnown(t *testing.T) {
	log := must(audit.Open(filepath.Join(t.TempDir(), "audit.jsonl")))
	defer log.Close()
	own, next, other := rootOf(t, log, "own.test"), rootOf(t, log, "next.test"), rootOf(t, log, "other.test")
	_, key, err := ed25519.GenerateKey(nil)
	must(key, err)
	kept := must(anchor.Open(anchor.Config{Domain: domainOf("own.test")}))
	signed := trust.SignBundle(key, must(proto.Marshal(&chanceryv1.Bundle{TrustDomain: "own.test", Generation: 1, Roots: [][]byte{own.Raw}})))
	must(kept.Take(nil, &chanceryv1.SignedBundle{Bundle: signed.Bundle, Signature: signed.Signature, Key: signed.Key}))
	var said bytes.Buffer
	config := map[string][]trust.ID{"foo/fixed": {must(trust.ParseID("spiffe://own.test/fixed"))}}
	k := &Keeper{
		logger: slog.New(slog.NewTextHandler(&said, nil)), foreign: foreign.Open(foreign.Config{Anchor: kept}), naming: naming.Open(naming.Config{}),
		Keeper: rotate.NewKeeper(rotate.KeeperConfig{ID: must(trust.ParseID("spiffe://own.test/web")), Logger: slog.New(slog.DiscardHandler)}),
	}
	source := SourceOf(k, config)
	text := func(v *sds.View) string {
		var out []string
		for _, b := range v.Bundles {
			out = append(out, fmt.Sprintf("%s+%d", b.Domain(), len(b.Kin())))
		}
		for _, s := range slices.Sorted(maps.Keys(v.Naming)) {
			out = append(out, fmt.Sprintf("%s=%d", s, len(v.Naming[s])))
		}
		return strings.Join(out, " ")
	}
	want := func(what, want string) {
		t.Helper()
		if v, _ := source(); text(v) != want || !v.Asks {
			t.Errorf("%s: the view is %q; want %q", what, text(v), want)
		}
	}
	woken := func(what string, changed <-chan struct{}) {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: nobody is woken", what)
		}
	}
	federation := func(version uint64, domains ...string) {
		m := &chanceryv1.Federation{TrustDomain: "own.test", Version: version}
		for _, d := range domains {
			m.Bundles = append(m.Bundles, &chanceryv1.ForeignBundle{TrustDomain: d, Sequence: 1, Roots: [][]byte{other.Raw}})
		}
		x := trust.SignFederation(key, must(proto.Marshal(m)))
		if err := k.foreign.Take(&chanceryv1.SignedFederation{Federation: x.Federation, Signature: x.Signature, Key: x.Key}); err != nil {
			t.Fatal(err)
		}
	}
	want("before there is anything", "foo/fixed=1")
	first, changed := source()
	if again, same := source(); again != first || same != changed {
		t.Error("the same is made twice")
	}
	federation(1, "foreign.test")
	woken("a foreign domain", changed)
	want("as long as there is no identity", "foo/fixed=1")

	s := services{k.naming, config}
	for _, name := range []string{"foo/api", "foo/fixed"} {
		if err := s.Hold(name); err != nil {
			t.Fatal(err)
		}
		defer s.Drop(name)
	}
	if asked, _ := k.naming.Asked(); len(asked) != 1 || asked[0] != "foo/api" {
		t.Errorf("the server is asked for %v", asked)
	}
	_, changed = source()
	k.naming.Take([]*chanceryv1.ServiceIdentities{{Service: "foo/api", SpiffeIds: []string{"spiffe://own.test/a", "spiffe://foreign.test/b"}}})
	woken("who serves a service", changed)
	want("with naming", "foo/api=2 foo/fixed=1")

	v := &views{keeper: k, naming: config, view: &sds.View{Asks: true}, said: map[string]string{}}
	line := must(must(trust.NewBundle(domainOf("own.test"), 2, []*x509.Certificate{own})).WithKin(must(trust.NewBundle(domainOf("next.test"), 2, []*x509.Certificate{next}))))
	federation(2, "foreign.test", "next.test")
	bundles, federated := k.foreign.Bundles()
	known, named := k.naming.Known()
	id := &trust.Identity{ID: must(trust.ParseID("spiffe://own.test/web")), Bundle: line}
	in := inputs{id: id, foreign: bundles, known: known, federated: federated, named: named}
	for range 2 {
		if got := text(v.make(in)); got != "own.test+1 foreign.test+0 foo/api=2 foo/fixed=1" {
			t.Errorf("with an identity the view is %q", got)
		}
	}
	if got := said.String(); strings.Count(got, "left out of a service's context") != 1 || !strings.Contains(got, "spiffe://foreign.test/b") {
		t.Errorf("of what is left out is said: %s", got)
	}
}

// TestWhatIsNamed: contexts of trust domains that nobody knows, and names of those that the own one was, or is about to leave.
func TestWhatIsNamed(t *testing.T) {
	log := must(audit.Open(filepath.Join(t.TempDir(), "audit.jsonl")))
	defer log.Close()
	bundle := func(name string, roots ...*x509.Certificate) *trust.Bundle {
		return must(trust.NewBundle(domainOf(name), 1, roots))
	}
	old, next := rootOf(t, log, "old.test"), rootOf(t, log, "next.test")
	names := []string{
		"default", "ROOTCA", "spiffe://old.test", "spiffe://old.test/ns/a/sa/b", "spiffe://next.test", "spiffe://gone.test/x", "service:old.test/x",
		"spiffe://nowhere.test", "spiffe://nowhere.test/id", "spiffe://foreign.test", "spiffe://", "spiffe://UPPER",
	}
	st := sds.StreamStatus{}
	for _, name := range names {
		st.Resources = append(st.Resources, sds.ResourceStatus{Name: name, Unknown: strings.Contains(name, "nowhere")})
	}
	for name, c := range map[string]struct {
		own           *trust.Bundle
		unknown, want string
	}{
		"nothing yet":          {nil, "", ""},
		"one domain":           {bundle("old.test", old), "nowhere.test", ""},
		"a former one":         {must(bundle("next.test", next).WithKin(bundle("gone.test"), bundle("old.test"))), "nowhere.test", "spiffe://gone.test/x spiffe://old.test spiffe://old.test/ns/a/sa/b"},
		"during the migration": {must(bundle("old.test", old).WithKin(bundle("gone.test"), bundle("next.test", next))), "nowhere.test", "spiffe://gone.test/x spiffe://old.test spiffe://old.test/ns/a/sa/b spiffe://next.test"},
	} {
		unknown, former := namesOf([]sds.StreamStatus{st, st}, c.own)
		if strings.Join(unknown, " ") != c.unknown || strings.Join(former, " ") != c.want {
			t.Errorf("%s: unknown are %v, former names %v", name, unknown, former)
		}
	}
	many := sds.StreamStatus{}
	for i := range 50 {
		many.Resources = append(many.Resources, sds.ResourceStatus{Name: fmt.Sprintf("spiffe://td%d", i), Unknown: true},
			sds.ResourceStatus{Name: fmt.Sprintf("spiffe://gone.test/%d%s", i, strings.Repeat("x", 500))})
	}
	unknown, former := namesOf([]sds.StreamStatus{many}, must(bundle("next.test", next).WithKin(bundle("gone.test"))))
	if len(unknown) != maxNames || len(former) != maxNames || len(former[0]) != maxNameBytes {
		t.Errorf("%d unknown, %d former names of %d bytes", len(unknown), len(former), len(former[0]))
	}
}
