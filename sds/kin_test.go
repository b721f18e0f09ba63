package sds

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"

	"github.com/chancery-project/chancery/sds/consumers"
	"github.com/chancery-project/chancery/sds/view"
	"github.com/chancery-project/chancery/trust"
)

// line is a bundle with kin: both domains of a migration, and former ones without roots.
func line(t *testing.T, own *testCA, kin ...*trust.Bundle) *trust.Bundle {
	t.Helper()
	b, err := own.bundle().WithKin(kin...)
	must(t, err)
	return b
}

// former is a trust domain that an authority had.
func former(t *testing.T, name string) *trust.Bundle { return newCA(t, name).emptyBundle() }

// subjects are those of the certificates in a context, by trust domain where it has those, and its matchers.
func subjects(t *testing.T, s *tlsv3.Secret) string {
	t.Helper()
	c := s.GetValidationContext()
	names := func(pem []byte) string {
		certs, err := trust.ParseCertificates(pem)
		must(t, err)
		var out []string
		for _, x := range certs {
			out = append(out, strings.TrimSuffix(x.Subject.CommonName, " root"))
		}
		slices.Sort(out)
		return strings.Join(out, ",")
	}
	var parts []string
	if typed := c.GetCustomValidatorConfig().GetTypedConfig(); typed != nil {
		cfg := new(tlsv3.SPIFFECertValidatorConfig)
		must(t, typed.UnmarshalTo(cfg))
		for _, d := range cfg.GetTrustDomains() {
			parts = append(parts, d.GetName()+"="+names(d.GetTrustBundle().GetInlineBytes()))
		}
	} else {
		parts = append(parts, names(c.GetTrustedCa().GetInlineBytes()))
	}
	for _, m := range c.GetMatchTypedSubjectAltNames() {
		parts = append(parts, m.GetMatcher().GetExact())
	}
	return strings.Join(parts, " ")
}

// answer is what a name means in a view.
func answer(t *testing.T, v *View, name string) string {
	t.Helper()
	a := v.Answer(nil, name)
	switch a.Standing {
	case view.Unknown:
		return "unknown"
	case view.Pending:
		return "pending"
	}
	if a.Identity != nil {
		return a.Identity.ID.String()
	}
	s, err := a.Build()
	must(t, err)
	must(t, s.ValidateAll())
	return subjects(t, s)
}

// Both domains of a migration are one authority: plain contexts have the roots of both, those of a domain its own, and those of a former
// one nobody. Foreign roots are nowhere but under their own names and in ALL (decision D24).
func TestD24KinAndForeignDomainsInEachContext(t *testing.T) {
	old, next, gone, foreign := newCA(t, "old.test"), newCA(t, "new.test"), former(t, "gone.test"), newCA(t, "foreign.test")
	web, moved := old.identity("/ns/foo/sa/web"), next.identity("/ns/foo/sa/web")
	naming := map[string][]trust.ID{"foo/web": {web.ID}}
	v := &View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{line(t, old, next.bundle(), gone), foreign.bundle()}, Naming: naming}
	const nobody = "nobody is trusted"
	for name, want := range map[string]string{
		"ROOTCA":                "new.test,old.test",
		"service:foo/web":       "new.test,old.test spiffe://new.test/ns/foo/sa/web spiffe://old.test/ns/foo/sa/web",
		"spiffe://old.test":     "old.test",
		"spiffe://new.test":     "new.test",
		"spiffe://gone.test":    nobody,
		"spiffe://foreign.test": "foreign.test=foreign.test",
		"spiffe://nowhere.test": "unknown",
		"ALL":                   "foreign.test=foreign.test new.test=new.test old.test=old.test",
		"default":               web.ID.String(),

		"spiffe://old.test/ns/foo/sa/web":     web.ID.String(),
		"spiffe://new.test/ns/foo/sa/web":     web.ID.String(),
		"spiffe://gone.test/ns/foo/sa/web":    web.ID.String(),
		"spiffe://foreign.test/ns/foo/sa/web": "unknown",
		"spiffe://new.test/ns/foo/sa/other":   "unknown",
	} {
		if got := answer(t, v, name); got != want {
			t.Errorf("%s is %q; want %q", name, got, want)
		}
	}

	// The migration is over: the new domain comes first, the old one has no roots any more.
	v = &View{Identities: []*trust.Identity{moved}, Bundles: []*trust.Bundle{line(t, next, former(t, "old.test"), gone), foreign.bundle()}, Naming: naming}
	for name, want := range map[string]string{
		"ROOTCA":                          "new.test",
		"service:foo/web":                 "new.test spiffe://new.test/ns/foo/sa/web spiffe://old.test/ns/foo/sa/web",
		"spiffe://old.test":               nobody,
		"spiffe://new.test":               "new.test",
		"ALL":                             "foreign.test=foreign.test new.test=new.test",
		"spiffe://old.test/ns/foo/sa/web": moved.ID.String(),
	} {
		if got := answer(t, v, name); got != want {
			t.Errorf("once it is over, %s is %q; want %q", name, got, want)
		}
	}

	// A foreign domain that is one of the own by now has no say.
	v = &View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{line(t, old, gone), newCA(t, "gone.test").bundle()}}
	if got := answer(t, v, "ALL") + ", " + answer(t, v, "spiffe://gone.test"); got != "old.test=old.test, "+nobody {
		t.Errorf("a foreign domain with a former own name: %s", got)
	}
}

// A plain context cannot bind a root to a domain: a service with own identities has the own roots and matchers for these alone; foreign ones
// alone are taken by Envoy's SPIFFE validator, each by its own roots.
func TestD24ServicesOfForeignIdentities(t *testing.T) {
	own, one, two := newCA(t, "own.test"), newCA(t, "one.test"), newCA(t, "two.test")
	id := func(text string) trust.ID {
		id, err := trust.ParseID(text)
		must(t, err)
		return id
	}
	a, b, c, d, lost := id("spiffe://own.test/a"), id("spiffe://one.test/b"), id("spiffe://two.test/c"), id("spiffe://empty.test/d"), id("spiffe://lost.test/e")
	v := &View{
		Identities: []*trust.Identity{own.identity("/web")}, Bundles: []*trust.Bundle{own.bundle(), one.bundle(), two.bundle(), newCA(t, "empty.test").emptyBundle()},
		Naming: map[string][]trust.ID{"s/own": {a, a}, "s/mixed": {b, a}, "s/one": {b}, "s/two": {c, b, lost}, "s/empty": {d}, "s/lost": {lost}, "s/none": {},
			"s/alias": {a, id("spiffe://alias.test/a")}, "s/same path": {a, id("spiffe://one.test/a"), id("spiffe://alias.test/other")}},
	}
	for name, want := range map[string]string{
		"s/own":   "own.test spiffe://own.test/a | ",
		"s/mixed": "own.test spiffe://own.test/a | spiffe://one.test/b",
		"s/one":   "one.test=one.test spiffe://one.test/b | ",
		"s/two":   "one.test=one.test two.test=two.test spiffe://one.test/b spiffe://two.test/c | spiffe://lost.test/e",
		"s/empty": "nobody is trusted | spiffe://empty.test/d",
		"s/lost":  "nobody is trusted | spiffe://lost.test/e",
		"s/none":  "nobody is trusted | ",

		"s/alias":     "own.test spiffe://own.test/a | ", // servers list aliases beside what they stand for
		"s/same path": "own.test spiffe://own.test/a | spiffe://one.test/a spiffe://alias.test/other",
	} {
		if got := answer(t, v, "service:"+name) + " | " + strings.Join(v.LeftOut(name), " "); got != want {
			t.Errorf("service:%s is %q; want %q", name, got, want)
		}
	}
	for name, want := range map[string]bool{
		"s/own": true, "s/mixed": true, "s/one": false, "s/two": false, "s/none": false, "s/unknown": false,
	} {
		if v.TrustsOwn("service:"+name) != want {
			t.Errorf("an ACK of service:%s counts for the own bundle: %v", name, !want)
		}
	}
}

// During a migration a context of one of the two domains says nothing of who has the roots of both: it is none of those that a rotation goes
// by (decision D1).
func TestD1ContextsOfOneDomainDuringAMigration(t *testing.T) {
	old, next, gone := newCA(t, "old.test"), newCA(t, "new.test"), former(t, "gone.test")
	for _, c := range []struct {
		own  *trust.Bundle
		want string
	}{
		{old.bundle(), "ALL ROOTCA spiffe://old.test"},
		{line(t, old, gone), "ALL ROOTCA spiffe://old.test"},
		{line(t, old, next.bundle(), gone), "ALL ROOTCA"},
		{line(t, next, former(t, "old.test"), gone), "ALL ROOTCA spiffe://new.test"},
	} {
		v := &View{Bundles: []*trust.Bundle{c.own}}
		var got []string
		for _, name := range []string{"ALL", "ROOTCA", "spiffe://gone.test", "spiffe://new.test", "spiffe://old.test", "spiffe://foreign.test", "default"} {
			if v.TrustsOwn(name) {
				got = append(got, name)
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("with %d kin an ACK counts of %v; want %s", len(c.own.Kin()), got, c.want)
		}
	}
}

// A proxy that goes by the old domain's roots alone in one of its contexts would refuse peers there that have moved: it is behind as long as the
// migration has both, though it has acknowledged all that it was sent (decision D1).
func TestD1AContextThatAMigrationNarrows(t *testing.T) {
	old, next := newCA(t, "old.test"), newCA(t, "new.test")
	web, moved := old.identity("/web"), next.identity("/web")
	at := func(b *trust.Bundle, n uint64) View {
		id := web
		if b.Domain() == next.domain {
			id = moved
		}
		return View{Identities: []*trust.Identity{id}, Bundles: []*trust.Bundle{b.WithGeneration(n)}, Generation: n}
	}
	first := at(old.bundle(), 1)
	box := newBox(&first)
	table := openTable(t, t.TempDir())
	a := start(t, withTable(box, table))
	c := a.sotw("default", "ROOTCA", "spiffe://old.test")
	c.next()
	c.ack("default", "ROOTCA", "spiffe://old.test")
	waitState(t, table, "before", 1, func(s consumers.State) bool { return s.Generation == 1 && len(s.Lagging) == 0 })

	box.set(at(line(t, old, next.bundle()), 2))
	c.next()
	c.ack("default", "ROOTCA", "spiffe://old.test")
	waitStream(a, "the roots of both", func(st StreamStatus) bool {
		return len(st.Resources) == 3 && !slices.ContainsFunc(st.Resources, func(r ResourceStatus) bool { return r.Acked.Generation < 2 })
	})
	s := table.State(2)
	if s.Generation != 1 || len(s.Lagging) != 1 || !strings.Contains(s.Lagging[0].Why, "newest roots in spiffe://old.test") {
		t.Errorf("with one context of the old domain alone it is %+v", s)
	}
	c.ack("default", "ROOTCA") // asks for these alone
	c.next()
	waitState(t, table, "without that", 2, func(s consumers.State) bool { return s.Generation == 2 && len(s.Lagging) == 0 })

	c.ack("default", "ROOTCA", "spiffe://old.test")
	c.next()
	c.ack("default", "ROOTCA", "spiffe://old.test")
	box.set(at(line(t, next, former(t, "old.test")), 3))
	c.next()
	c.ack("default", "ROOTCA", "spiffe://old.test")
	waitState(t, table, "the old domain is left", 3, func(s consumers.State) bool { return s.Generation == 3 && len(s.Lagging) == 0 })
}

// D5 holds with kin: a leaf of the new domain waits until its root is acknowledged, and works as long as that is there.
func TestD5ALeafOfTheOtherDomainWaits(t *testing.T) {
	old, next := newCA(t, "old.test"), newCA(t, "new.test")
	web, moved := old.identity("/ns/foo/sa/web"), next.identity("/ns/foo/sa/web")
	alone, both := old.bundle(), line(t, old, next.bundle())
	box := newBox(&View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{alone}, Generation: 1})
	a := start(t, Config{Attest: box.attest})
	c := a.sotw("default", "ROOTCA")
	c.next()
	c.ack("default", "ROOTCA")
	waitStream(a, "acknowledged", func(st StreamStatus) bool { return len(st.Resources) == 2 && st.Resources[0].Acked.Version != "" })
	box.set(View{Identities: []*trust.Identity{moved}, Bundles: []*trust.Bundle{both}, Generation: 2})
	got := c.next()
	if subjects(t, got["ROOTCA"]) != "new.test,old.test" {
		t.Errorf("the roots are %s", subjects(t, got["ROOTCA"]))
	}
	wantIdentity(t, got["default"], web)
	c.ack("default", "ROOTCA")
	wantIdentity(t, c.next()["default"], moved)

	now := time.Now()
	for name, c := range map[string]struct {
		id   *trust.Identity
		b    *trust.Bundle
		want bool
	}{
		"old, both":           {web, both, true},
		"new, both":           {moved, both, true},
		"new, new alone":      {moved, line(t, next, former(t, "old.test")), true},
		"old, new alone":      {web, line(t, next, former(t, "old.test")), false},
		"new, old alone":      {moved, alone, false},
		"by the other's root": {forged(t, next, "spiffe://old.test/ns/foo/sa/web"), both, false},
		"nothing":             {web, nil, false},
	} {
		if view.StillWorks(c.id.Chain, c.b, now) != c.want {
			t.Errorf("%s: it works: %v", name, !c.want)
		}
	}
}

// forged is an identity of another domain than that of the CA which signs it.
func forged(t *testing.T, by *testCA, text string) *trust.Identity {
	t.Helper()
	id, err := trust.ParseID(text)
	must(t, err)
	other := *by
	other.domain = id.Domain()
	return other.identity(id.Path())
}

// A foreign root vouches for identities of its own domain only: whatever else it signs is refused by who has the bundles from the Workload
// API, and by our own verifier.
func TestD24AForeignRootSignsAnOwnIdentity(t *testing.T) {
	old, next, foreign := newCA(t, "old.test"), newCA(t, "new.test"), newCA(t, "foreign.test")
	own := line(t, old, next.bundle())
	box := newBox(&View{Identities: []*trust.Identity{old.identity("/web")}, Bundles: []*trust.Bundle{own, foreign.bundle()}})
	a := start(t, Config{Attest: box.attest})
	x, err := a.workload().FetchX509Context(a.context())
	must(t, err)
	want(t, "bundles", x.Bundles.Len(), 3)
	lookup := func(d trust.Domain) *trust.Bundle {
		if d == foreign.bundle().Domain() {
			return foreign.bundle()
		}
		return own.Of(d)
	}
	for name, c := range map[string]struct {
		id    *trust.Identity
		taken bool
	}{
		"own":                      {old.identity("/a"), true},
		"kin":                      {next.identity("/a"), true},
		"foreign":                  {foreign.identity("/a"), true},
		"foreign root, own name":   {forged(t, foreign, "spiffe://old.test/a"), false},
		"foreign root, kin's name": {forged(t, foreign, "spiffe://new.test/a"), false},
		"own root, foreign name":   {forged(t, old, "spiffe://foreign.test/a"), false},
		"own root, kin's name":     {forged(t, old, "spiffe://new.test/a"), false},
		"foreign root, no domain":  {forged(t, foreign, "spiffe://nowhere.test/a"), false},
	} {
		if _, _, err := x509svid.Verify(c.id.Chain, x.Bundles); (err == nil) != c.taken {
			t.Errorf("%s, by go-spiffe: %v", name, err)
		}
		if _, _, err := trust.Verify(c.id.Chain, lookup, time.Now()); (err == nil) != c.taken {
			t.Errorf("%s, by trust.Verify: %v", name, err)
		}
	}
}

// What the Workload API says of kin: each domain has a bundle of its own, a former one none; the SVID comes with that of its own domain.
func TestWorkloadAPIWithKin(t *testing.T) {
	old, next := newCA(t, "old.test"), newCA(t, "new.test")
	web, moved := old.identity("/web"), next.identity("/web")
	box := newBox(&View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{old.bundle()}})
	a := start(t, Config{Attest: box.attest})
	seen := func() string {
		t.Helper()
		x, err := a.workload().FetchX509Context(a.context())
		must(t, err)
		all, err := a.workload().FetchX509Bundles(a.context())
		must(t, err)
		want(t, "bundles of both calls", all.Len(), x.Bundles.Len())
		var names []string
		for _, b := range x.Bundles.Bundles() {
			names = append(names, b.TrustDomain().Name())
		}
		slices.Sort(names)
		return x.DefaultSVID().ID.String() + " " + strings.Join(names, " ")
	}
	want(t, "before", seen(), "spiffe://old.test/web old.test")
	box.set(View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{line(t, old, next.bundle())}})
	want(t, "accepted", seen(), "spiffe://old.test/web new.test old.test")
	box.set(View{Identities: []*trust.Identity{moved}, Bundles: []*trust.Bundle{line(t, old, next.bundle())}})
	want(t, "moved", seen(), "spiffe://new.test/web new.test old.test")
	box.set(View{Identities: []*trust.Identity{moved}, Bundles: []*trust.Bundle{line(t, next, former(t, "old.test"))}})
	want(t, "over", seen(), "spiffe://new.test/web new.test")
}

// holder counts who asks for which service.
type holder struct {
	mu    sync.Mutex
	holds map[string]int
}

func (h *holder) Hold(service string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if service == "foo/full" {
		return fmt.Errorf("no room")
	}
	h.holds[service]++
	return nil
}

func (h *holder) Drop(service string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.holds[service]--; h.holds[service] == 0 {
		delete(h.holds, service)
	}
}

func (h *holder) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []string
	for _, name := range slices.Sorted(maps.Keys(h.holds)) {
		out = append(out, fmt.Sprintf("%s:%d", name, h.holds[name]))
	}
	return strings.Join(out, " ")
}

func (h *holder) wait(t *testing.T, want string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); h.String() != want; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("asked for is %q; want %q", h, want)
		}
	}
}

// A service is asked for as long as somebody has its name; until there is a word a proxy waits, and never gets a context without matchers.
func TestD25AServiceIsAskedFor(t *testing.T) {
	ca := newCA(t, "own.test")
	web := ca.identity("/web")
	base := View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{ca.bundle()}, Asks: true}
	box, h := newBox(&base), &holder{holds: map[string]int{}}
	a := start(t, Config{Attest: box.attest, Services: h})
	d := a.delta(nil, "service:foo/web", "service:foo", "service:foo/full")
	want(t, "names", namesOf(d.next()), "")
	want(t, "removed", d.removed(), "service:foo")
	d.ack()
	other := a.sotw("service:foo/web", "service:foo/api")
	a.waitForAll("asking", 2, func(st StreamStatus) bool { return len(st.Resources) > 1 })
	want(t, "asked for", h.String(), "foo/api:1 foo/web:2")
	if !strings.Contains(a.log.String(), "service name refused") {
		t.Error("nobody hears of the name that there was no room for")
	}

	known := base
	known.Naming = map[string][]trust.ID{"foo/web": {web.ID}}
	box.set(known)
	want(t, "context", subjects(t, d.next()["service:foo/web"]), "own.test spiffe://own.test/web")
	want(t, "context", subjects(t, other.next()["service:foo/web"]), "own.test spiffe://own.test/web")
	d.ack()
	other.ack()
	none := base
	none.Naming = map[string][]trust.ID{"foo/web": {}}
	box.set(none)
	want(t, "context", subjects(t, d.next()["service:foo/web"]), "nobody is trusted")
	want(t, "context", subjects(t, other.next()["service:foo/web"]), "nobody is trusted")
	must(t, other.stream.CloseSend())
	h.wait(t, "foo/web:1")
	a.conn.Close()
	h.wait(t, "")
}
