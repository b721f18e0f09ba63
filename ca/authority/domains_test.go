package authority

import (
	"context"
	"crypto/x509"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/below"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

func parse(t *testing.T, name string) trust.Domain {
	t.Helper()
	td, err := trust.ParseDomain(name)
	if err != nil {
		t.Fatal(err)
	}
	return td
}

func parseID(t *testing.T, text string) trust.ID {
	t.Helper()
	id, err := trust.ParseID(text)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// change changes what the document has of the line.
func change(t *testing.T, k *Keeper, f func(next *Document, s *document.DomainState)) {
	t.Helper()
	if err := k.Change(t.Context(), func(next *Document) error { f(next, next.State(k.config.Domain)); return nil }); err != nil {
		t.Fatal(err)
	}
}

// migrate brings a line to where both trust domains sign: identities of the namespace "moved" get the new one.
func migrate(t *testing.T, k *Keeper) {
	t.Helper()
	rotating(t, k, KindRoot)
	change(t, k, func(_ *Document, s *document.DomainState) {
		s.Rotation.Migration = &document.Migration{From: "cluster.local", To: "new.example", Namespaces: []string{"moved"}}
	})
	if err := k.MakeSuccessors(t.Context(), "0123456789abcdef"); err != nil {
		t.Fatal(err)
	}
	phase(t, k, document.PhaseDistribute)
	phase(t, k, document.PhaseIssue)
}

func phase(t *testing.T, k *Keeper, p document.Phase) {
	t.Helper()
	change(t, k, func(_ *Document, s *document.DomainState) { s.Rotation.Phase = p })
}

// give issues what an identity gets now.
func give(t *testing.T, k *Keeper, id trust.ID) (trust.ID, []*x509.Certificate) {
	t.Helper()
	issuer, as, err := k.IssuerFor(id)
	if err != nil {
		t.Fatalf("%s: %v", id, err)
	}
	key, err := ca.GenerateKey(ca.P256)
	if err != nil {
		t.Fatal(err)
	}
	token, err := issuer.Prepare(k.config.Profiles[0], ca.Request{ID: as, PublicKey: key.Public()})
	if err != nil {
		t.Fatalf("%s: %v", as, err)
	}
	made, err := issuer.Issue(t.Context(), token)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(made.DER)
	if err != nil {
		t.Fatal(err)
	}
	return as, append([]*x509.Certificate{leaf}, issuer.Chain()...)
}

// verifies reports whether a chain leads to the roots of a trust domain, as verifiers see it that know no trust domains.
func verifies(b *trust.Bundle, chain []*x509.Certificate) bool {
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	for _, r := range b.Roots() {
		roots.AddCert(r)
	}
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	return err == nil
}

// TestD10MigrationIssuesEachDomainUnderItsOwnRoot, by namespace, with a real document, from the first successor until the old trust domain is
// a former one; the config may have any of the names.
func TestD10MigrationIssuesEachDomainUnderItsOwnRoot(t *testing.T) {
	c := setup(t, t.TempDir())
	c.Mark = filepath.Join(t.TempDir(), "state.mark")
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	from, to := c.Domain, parse(t, "new.example")
	web, moved := parseID(t, "spiffe://cluster.local/ns/stays/sa/web"), parseID(t, "spiffe://cluster.local/ns/moved/sa/web")
	check := func(id trust.ID, want trust.Domain) {
		t.Helper()
		as, chain := give(t, k, id)
		b := k.issuer.Load().Bundle()
		got, _, err := trust.Verify(chain, trust.Only(b), time.Now())
		if err != nil || got != as || as != id.WithDomain(want) {
			t.Errorf("%s came as %s, %s, %v; want it in %s", id, as, got, err, want)
		}
		for _, other := range append(b.Kin(), b) {
			if verifies(other, chain) != (other.Domain() == want) {
				t.Errorf("%s verifies by the roots of %s: %t", as, other.Domain(), !(other.Domain() == want))
			}
		}
	}
	denied := func(id trust.ID, want string) {
		t.Helper()
		p, err := k.Issuers()
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Allows(id); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("exactly %s: %v, want %q", id, err, want)
		}
	}
	check(web, from)
	rotating(t, k, KindRoot)
	change(t, k, func(_ *Document, s *document.DomainState) {
		s.Rotation.Migration = &document.Migration{From: "cluster.local", To: "new.example", Namespaces: []string{"moved"}}
	})
	before := k.Document().State(from).Generation
	if err := k.MakeSuccessors(t.Context(), "0123456789abcdef"); err != nil {
		t.Fatal(err)
	}
	s := k.Document().State(from)
	root, issuer := s.Get(KindRoot, s.Rotation.ToRoot), s.Get(KindIssuer, s.Rotation.ToIssuer)
	if root == nil || issuer == nil || root.Domain != "new.example" || issuer.Domain != "new.example" || issuer.RootID() != root.ID || s.Generation == before {
		t.Fatalf("the successors are %+v and %+v, generation %d", root, issuer, s.Generation)
	}
	phase(t, k, document.PhaseDistribute)
	if err := k.HoldsPrepared(t.Context()); err != nil {
		t.Fatal(err)
	}
	check(moved, from)
	denied(moved.WithDomain(to), "phase distribute of the migration from trust domain cluster.local to new.example; ask for "+moved.String())

	phase(t, k, document.PhaseIssue)
	check(moved, to)
	check(moved.WithDomain(to), to)
	check(web, from)
	check(web.WithDomain(to), from)
	for _, id := range []trust.ID{web, moved, web.WithDomain(to), moved.WithDomain(to)} {
		denied(id, "")
	}
	denied(parseID(t, "spiffe://stranger.example/ns/moved/sa/web"), "ask for "+moved.WithDomain(to).String())
	if all, err := k.CRLSigners(t.Context()); err != nil || len(all) != 2 || all[0].Issuer == nil || all[1].Issuer == nil {
		t.Errorf("CRLs: %+v, %v", all, err)
	}
	if names := k.Expiries(); len(names) != 4 {
		t.Errorf("%d certificates are watched: %v", len(names), names)
	}
	if all := k.Keys(); len(all) != 4 || all[1].Name != k.SecondKey() {
		t.Errorf("keys: %+v", all)
	}

	change(t, k, func(_ *Document, s *document.DomainState) {
		now := time.Now()
		s.Activate(KindRoot, s.Rotation.ToRoot, now)
		s.Activate(KindIssuer, s.Rotation.ToIssuer, now)
		s.Rotation.Phase = document.PhaseActivate
	})
	check(web, to)
	check(moved, to)
	denied(web, "ask for "+web.WithDomain(to).String())
	if i, err := k.Issuer(); err != nil || i.Domain() != to || i.Bundle().Domain() != from || k.Present() != from || k.SecondKey() != "" {
		t.Errorf("%v, %v", i, err)
	}
	k.mindIssuer(t.Context(), k.issuer.Load().Certificate().NotBefore.Add(4*24*time.Hour)) // as without a migration
	if next := k.Document().Prepared(from); next == nil || next.Domain != "new.example" {
		t.Errorf("the new issuer is followed by %+v", next)
	}

	change(t, k, func(d *Document, s *document.DomainState) {
		s.Become(from, to)
		s.DropRoot(s.Rotation.FromRoot)
		s.EndRotation("done", time.Now())
	})
	check(web, to)
	denied(web, "not issued any more, or not yet; ask for "+web.WithDomain(to).String())
	if b := k.issuer.Load().Bundle(); b.Domain() != to || len(b.Roots()) != 1 || len(b.Kin()) != 1 || len(b.Kin()[0].Roots()) != 0 || k.Present() != to {
		t.Errorf("in the end the bundle is of %s, with %d roots and kin %v", b.Domain(), len(b.Roots()), b.Kin())
	}
	// After a restart, by each name; the mark is the line's.
	for _, name := range []trust.Domain{to, from} {
		c.Domain = name
		k = open(t, c)
		check(web, to)
	}
	c.Domain = parse(t, "stranger.example")
	if _, err := Open(t.Context(), c); err == nil || !strings.Contains(err.Error(), "stranger.example") {
		t.Errorf("a stranger's config: %v", err)
	}
	c.Domain = to
	if _, err := Init(t.Context(), c, "test"); !errors.Is(err, store.ErrConflict) {
		t.Errorf("an authority is made beside it: %v", err)
	}
}

// TestSecondIssuerIsRenewed in time, in the two steps of every other, while the first one is, too.
func TestSecondIssuerIsRenewed(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	migrate(t, k)
	announced := 0
	trouble := errors.New("the CRL is not out")
	k.Announce(func(context.Context) error { announced++; return trouble })
	const day = 24 * time.Hour
	begin := time.Now()
	second := func() string { return k.pair.Load().Second.SKI() }
	was := second()
	k.mindSecond(t.Context(), begin.Add(3*day))
	if s := k.stateOf(k.Document()); s.NextSecond() != nil {
		t.Fatal("it is followed before half of its life")
	}
	k.mindSecond(t.Context(), begin.Add(4*day))
	k.mindSecond(t.Context(), begin.Add(4*day))
	s := k.stateOf(k.Document())
	next := s.NextSecond()
	if next == nil || next.Domain != "new.example" || len(s.Authorities) != 5 || second() != was {
		t.Fatalf("past half of its life it is followed by %+v, of %d authorities", next, len(s.Authorities))
	}
	k.mindIssuer(t.Context(), begin.Add(4*day))
	if first := k.Document().Prepared(c.Domain); first == nil || first.Domain != "" || k.stateOf(k.Document()).NextSecond() == nil {
		t.Fatalf("the first one is followed by %+v", first)
	}
	k.mindSecond(t.Context(), begin.Add(5*day+time.Hour))
	if announced == 0 || second() != was {
		t.Fatalf("it signs before its CRL is out, after %d looks", announced)
	}
	trouble = nil
	k.mindSecond(t.Context(), begin.Add(5*day+time.Hour))
	if second() != next.ID || k.stateOf(k.Document()).Get(KindIssuer, was).State != StateRetiring {
		t.Fatalf("%s signs, want %s", second(), next.ID)
	}
	if as, chain := give(t, k, parseID(t, "spiffe://cluster.local/ns/moved/sa/web")); as.Domain() != parse(t, "new.example") || !chain[0].NotAfter.After(time.Now()) {
		t.Error(as)
	}
	if all, err := k.CRLSigners(t.Context()); err != nil || len(all) != 4 {
		t.Errorf("%d issuers sign CRLs, %v", len(all), err)
	}
}

// TestMigrationGoesOnWhereASecondIssuerCannotBeOpened for the trust domain that can be issued; the server says that it is not whole.
func TestMigrationGoesOnWhereASecondIssuerCannotBeOpened(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	migrate(t, k)
	if err := k.Whole(); err != nil {
		t.Fatal(err)
	}
	change(t, k, func(_ *Document, s *document.DomainState) {
		x := s.Get(KindIssuer, s.Rotation.ToIssuer)
		x.Key, x.KeyRef = nil, "token:gone"
	})
	k = open(t, c)
	if err := k.Whole(); err == nil || !strings.Contains(err.Error(), "trust domain new.example") {
		t.Errorf("%v", err)
	}
	if as, _ := give(t, k, parseID(t, "spiffe://cluster.local/ns/stays/sa/web")); as.Domain() != c.Domain {
		t.Error(as)
	}
	if _, _, err := k.IssuerFor(parseID(t, "spiffe://cluster.local/ns/moved/sa/web")); !errors.Is(err, ca.ErrNotReady) {
		t.Errorf("%v", err)
	}
	p, err := k.Issuers()
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"spiffe://new.example/ns/moved/sa/web", "spiffe://new.example/ns/stays/sa/web"} { // by name: not for now, which is no refusal for ever
		_, err := p.As(parseID(t, id))
		if denied := p.Allows(parseID(t, id)); denied != nil || !errors.Is(err, ca.ErrNotReady) {
			t.Errorf("exactly %s: denied %v, %v", id, denied, err)
		}
	}
}

// TestD4UnconfirmedReplicaBoundsBothDomains: while both trust domains sign, a replica that the store has not confirmed signs nothing in either
// that outlives its root: the old one's leaves as the migration goes on, and the new one's after a rollback.
func TestD4UnconfirmedReplicaBoundsBothDomains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, r := record(quick(t, t.TempDir()))
		if _, err := Init(t.Context(), c, "test"); err != nil {
			t.Fatal(err)
		}
		k := driving(t, c)
		migrate(t, k)
		r.down.Store(true)
		time.Sleep(40 * time.Minute)
		k.Follow(t.Context())
		left := time.Until(k.stateOf(k.Document()).Rotation.NotBefore)
		_, old := give(t, k, parseID(t, "spiffe://cluster.local/ns/stays/sa/web"))
		_, moved := give(t, k, parseID(t, "spiffe://cluster.local/ns/moved/sa/web"))
		if life := time.Until(old[0].NotAfter); life > left {
			t.Errorf("%s in the old trust domain, whose root may leave in %s", life, left)
		}
		if life := time.Until(moved[0].NotAfter); life > left {
			t.Errorf("%s in the new trust domain, whose root may leave in %s after a rollback", life, left)
		}
		time.Sleep(left)
		if _, _, err := k.IssuerFor(parseID(t, "spiffe://cluster.local/ns/moved/sa/web")); !errors.Is(err, ca.ErrNotReady) {
			t.Errorf("once it may have left: %v", err)
		}
	})
}

// TestWhatCannotMigrate says so, and what to do instead.
func TestWhatCannotMigrate(t *testing.T) {
	c := setup(t, t.TempDir())
	doc, err := Init(t.Context(), c, "test")
	if err != nil {
		t.Fatal(err)
	}
	k := open(t, c)
	if err := k.Migratable(parse(t, "mesh.example")); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	root := doc.State(c.Domain).Authorities[0].ID
	offline := doc.Clone()
	offline.State(c.Domain).Authorities[0].Key = nil
	over := doc.Clone()
	over.State(c.Domain).Below = []below.Issuers{{To: "spiffe://cluster.local/ns/chancery/sa/east", Root: root, Until: now.Add(time.Hour)}}
	ended := doc.Clone()
	ended.State(c.Domain).Below = []below.Issuers{{To: "spiffe://cluster.local/ns/chancery/sa/east", Root: root, Until: now.Add(-time.Hour)}}
	for name, tc := range map[string]struct {
		doc      *Document
		to       string
		plugged  string
		parented bool
		want     []string
	}{
		"plugged in":   {doc, "mesh.example", "/certs", false, []string{"plugged in from /certs", "another authority"}},
		"a parent":     {doc, "mesh.example", "", true, []string{"`parent`", "another authority"}},
		"offline":      {offline, "mesh.example", "", false, []string{"kept elsewhere", "another authority"}},
		"servers":      {over, "mesh.example", "", false, []string{"spiffe://cluster.local/ns/chancery/sa/east until", "`issuers`"}},
		"one label":    {doc, "new-td", "", false, nil},
		"a dot":        {doc, "mesh.", "", false, []string{"no certificate could be issued in trust domain mesh.,", "like prod or mesh.example"}},
		"servers gone": {ended, "mesh.example", "", false, nil},
	} {
		err := held.Migratable(tc.doc, c.Domain, parse(t, tc.to), tc.plugged, tc.parented, now)
		if (err == nil) != (tc.want == nil) || slices.ContainsFunc(tc.want, func(w string) bool { return !strings.Contains(err.Error(), w) }) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
