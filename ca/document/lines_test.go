package document

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/ca/document/line"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

func domain(name string) trust.Domain { return must(trust.ParseDomain(name)) }

// migrating is a document whose line migrates from cluster.local to new.example, with both roots and issuers in it, and their CAs.
func migrating(t *testing.T, phase Phase) (*Document, *keys.Sealer) {
	t.Helper()
	dir := t.TempDir()
	sealer := must(keys.CreateSealer(filepath.Join(dir, "key")))
	log := must(audit.Open(filepath.Join(dir, "audit.jsonl")))
	t.Cleanup(func() { log.Close() })
	from := must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: log}))
	to := must(ca.Create(t.Context(), ca.CreateConfig{Domain: domain("new.example"), LogID: ca.MinLogID, Log: log}))
	d := New()
	for _, err := range []error{
		d.Add(td, KindRoot, Key{Signer: from.RootKey}, sealer, from.Root), d.Add(td, KindIssuer, Key{Signer: from.IssuerKey}, sealer, from.Issuer),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	s := d.State(td)
	s.Rotation = &Rotation{ID: "m", Kind: KindRoot, FromRoot: s.Authorities[0].ID, FromIssuer: s.Authorities[1].ID, Phase: PhasePrepare, Migration: &Migration{From: "cluster.local", To: "new.example", Share: 30}}
	err := d.AddSuccessors(td, sealer, &Made{Key: Key{Signer: to.RootKey}, Certificate: to.Root}, &Made{Key: Key{Signer: to.IssuerKey}, Certificate: to.Issuer})
	if err != nil {
		t.Fatal(err)
	}
	s.Rotation.Phase = phase
	return d, sealer
}

// TestD10AMigrationHasTwoRootsThatAreNotShared: the bundle is that of the present trust domain, the other one is its kin, and what was one
// stays known by its name.
func TestD10AMigrationHasTwoRootsThatAreNotShared(t *testing.T) {
	d, sealer := migrating(t, PhaseIssue)
	to := domain("new.example")
	check := func(of trust.Domain, kin string, roots int) {
		t.Helper()
		for _, by := range []trust.Domain{td, to} {
			b, err := d.Bundle(by)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, k := range b.Kin() {
				names = append(names, fmt.Sprintf("%s/%d", k.Domain(), len(k.Roots())))
			}
			if b.Domain() != of || len(b.Roots()) != roots || strings.Join(names, " ") != kin || b.Generation() != d.State(td).Generation {
				t.Errorf("by %s: bundle of %s with %d roots, kin %v, generation %d", by, b.Domain(), len(b.Roots()), names, b.Generation())
			}
		}
	}
	check(td, "new.example/1", 1)
	s := d.State(to)
	if s != d.State(td) || len(d.Domains) != 1 || d.Present(to) != td || s.Second() == nil || s.Second().Domain != "new.example" {
		t.Fatalf("%+v", s)
	}
	b := must(d.Bundle(td))
	if b.HasRoot(must(s.Get(KindRoot, s.Rotation.ToRoot).X509())) != true || b.Of(td).Roots()[0].Equal(b.Of(to).Roots()[0]) {
		t.Error("the roots are shared")
	}
	// The end: the old root leaves, and the line is the new domain.
	s.Rotation.Phase = PhaseReissue
	s.Activate(KindRoot, s.Rotation.ToRoot, time.Now())
	s.Activate(KindIssuer, s.Rotation.ToIssuer, time.Now())
	s.Become(td, to)
	if s.Authorities[0].Domain != "cluster.local" || s.Authorities[2].Domain != "" {
		t.Errorf("what is of the other domain is not said: %+v", s.Authorities)
	}
	s.DropRoot(s.Rotation.FromRoot)
	s.EndRotation("done", time.Now())
	check(to, "cluster.local/0", 1)
	if !slices.Equal(d.Names(td), []trust.Domain{to, td}) || !slices.Equal(d.Names(domain("other")), []trust.Domain{domain("other")}) {
		t.Error(d.Names(td))
	}
	// What was sealed by the line's name opens, also what was made for the new domain.
	again, err := Decode(must(d.Encode(sealer)), 1, sealer)
	if err != nil {
		t.Fatal(err)
	}
	x := must(again.Active(to, KindIssuer))
	if _, err := x.OpenKey(t.Context(), td, sealer, nil); err != nil {
		t.Error(err)
	}
	if err := again.CheckMigration(td, to); err == nil {
		t.Error("it migrates to where it is")
	}
	if err := again.CheckMigration(td, td); err != nil {
		t.Errorf("it cannot go back: %v", err)
	}
	again.State(td).Become(td, td)
	if s := again.State(td); s.Present(td) != td || !slices.Equal(s.Former, []string{"new.example"}) {
		t.Errorf("%s, %v", s.Domain, s.Former)
	}
}

// TestD17WhoGetsWhichDomain: nobody before all trust it, then its share, the same ones as it grows, then all; after a rollback nobody.
func TestD17WhoGetsWhichDomain(t *testing.T) {
	d, _ := migrating(t, PhasePrepare)
	s, to := d.State(td), domain("new.example")
	id := func(i int) trust.ID {
		return must(trust.WorkloadID(td, fmt.Sprintf("ns%d", i%7), fmt.Sprintf("a%d", i)))
	}
	count := func() (n int) {
		for i := range 1000 {
			of := s.DomainFor(td, id(i))
			if of == to {
				n++
			}
			if s.DomainFor(td, id(i).WithDomain(to)) != of {
				t.Fatalf("%s depends on the domain that was asked for", id(i))
			}
		}
		return n
	}
	for phase, want := range map[Phase][2]int{PhasePrepare: {0, 0}, PhaseDistribute: {0, 0}, PhaseIssue: {240, 360}, PhaseActivate: {1000, 1000}, PhaseReissue: {1000, 1000}} {
		if s.Rotation.Phase = phase; count() < want[0] || count() > want[1] {
			t.Errorf("%s: %d", phase, count())
		}
	}
	s.Rotation.Phase = PhaseIssue
	had := map[int]bool{}
	for share := 0; share <= 100; share += 10 {
		s.Rotation.Migration.Share = share
		for i := range 1000 {
			gets := s.DomainFor(td, id(i)) == to
			if had[i] && !gets {
				t.Fatalf("%s goes back at a share of %d", id(i), share)
			}
			had[i] = gets
		}
		if n := count(); share == 0 && n != 0 || share == 100 && n != 1000 {
			t.Errorf("a share of %d is %d of 1000", share, n)
		}
	}
	s.Rotation.Migration.Share, s.Rotation.Migration.Namespaces = 0, []string{"ns3"}
	for i := range 1000 {
		if gets := s.DomainFor(td, id(i)) == to; gets != (i%7 == 3) {
			t.Fatalf("%s: %t", id(i), gets)
		}
	}
	r := s.Rotation // a rollback
	r.FromRoot, r.ToRoot, r.FromIssuer, r.ToIssuer, r.Back, r.Phase = r.ToRoot, r.FromRoot, r.ToIssuer, r.FromIssuer, true, PhaseActivate
	r.Migration.From, r.Migration.To = r.Migration.To, r.Migration.From
	s.Retire(KindIssuer, r.FromIssuer, time.Now())
	if n := count(); n != 0 || s.Second() != nil || d.Prepared(td) != nil {
		t.Errorf("after a rollback %d get the new domain", n)
	}
}

// TestSecondIssuerIsFollowed under its own root, while the first one is renewed as ever.
func TestSecondIssuerIsFollowed(t *testing.T) {
	d, sealer := migrating(t, PhaseIssue)
	s := d.State(td)
	was := s.Rotation.ToIssuer
	log := must(audit.Open(filepath.Join(t.TempDir(), "audit.jsonl")))
	defer log.Close()
	x := s.Get(KindRoot, s.Rotation.ToRoot)
	root := must(ca.NewIssuer(ca.IssuerConfig{Domain: domain("new.example"), Key: must(x.OpenKey(t.Context(), td, sealer, nil)), Chain: must(x.Certificates()),
		Bundle: must(d.Bundle(td)), LogID: ca.MinLogID, Log: log}))
	cert, key, err := root.NewIssuer(t.Context(), time.Hour, audit.Requester{})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.PrepareSecond(td, Key{Signer: key}, sealer, cert); err != nil {
		t.Fatal(err)
	}
	next := s.NextSecond()
	if next == nil || next.Domain != "new.example" || d.Prepared(td) != nil || s.Second().ID != was {
		t.Fatalf("%+v", next)
	}
	if d.DropPrepared(td); s.NextSecond() == nil || s.Second() == nil {
		t.Fatal("the issuers of a migration are dropped with what the first one left")
	}
	if up, err := d.PromoteSecond(td, time.Now()); err != nil || s.Second().ID != up.ID || up.ID == was || s.Get(KindIssuer, was).State != StateRetiring || s.NextSecond() != nil {
		t.Errorf("%+v, %v", up, err)
	}
	if _, err := d.PromoteSecond(td, time.Now()); err == nil {
		t.Error("nothing is promoted")
	}
}

// TestFormatGrowsWithWhatIsSaid: a server of the version before reads documents that say nothing new, and no others.
func TestFormatGrowsWithWhatIsSaid(t *testing.T) {
	plain := New()
	plain.State(td).Generation = 1
	migrates, _ := migrating(t, PhaseIssue)
	ended, _ := migrating(t, PhaseIssue)
	ended.State(td).EndRotation("aborted", time.Now())
	ended.State(td).DropRoot(ended.State(td).Authorities[2].ID)
	moved := New()
	moved.State(td).Become(td, domain("new.example"))
	federates := New()
	federates.Foreign = map[string]*foreign.Domain{"partner.example": {}}
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	for name, tc := range map[string]struct {
		d    *Document
		want int
	}{"plain": {plain, 3}, "migrates": {migrates, 4}, "migrated": {moved, 4}, "migration that ended": {ended, 4}, "federates": {federates, 4}} {
		var e envelope
		if err := json.Unmarshal(must(tc.d.Encode(sealer)), &e); err != nil {
			t.Fatal(err)
		}
		var got struct{ Format int }
		if err := json.Unmarshal(e.Document, &got); err != nil || got.Format != tc.want || tc.d.Needs() != tc.want {
			t.Errorf("%s: format %d, want %d", name, got.Format, tc.want)
		}
	}
}

// TestOddLinesAreRefused, before they are stored and when they are read.
func TestOddLinesAreRefused(t *testing.T) {
	many := func(n int) (all []string) {
		for i := range n {
			all = append(all, fmt.Sprintf("d%d", i))
		}
		return all
	}
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	base, _ := migrating(t, PhaseIssue)
	for want, change := range map[string]func(d *Document, s *DomainState){
		"Upper":                     func(_ *Document, s *DomainState) { s.Domain = "Upper" },
		"at most 16":                func(_ *Document, s *DomainState) { s.Former = many(line.MaxFormer + 1) },
		"occurs twice":              func(_ *Document, s *DomainState) { s.Former = []string{"a", "a"} },
		"only a migration":          func(_ *Document, s *DomainState) { s.Rotation.Migration = nil },
		"a root of its own":         func(_ *Document, s *DomainState) { s.Rotation.Kind = KindIssuer },
		"to itself":                 func(_ *Document, s *DomainState) { s.Rotation.Migration.From = "new.example" },
		"0 to 100":                  func(_ *Document, s *DomainState) { s.Rotation.Migration.Share = 101 },
		"257 namespaces":            func(_ *Document, s *DomainState) { s.Rotation.Migration.Namespaces = many(line.MaxNamespaces + 1) },
		"twice":                     func(_ *Document, s *DomainState) { s.Rotation.Migration.Namespaces = []string{"a", "a"} },
		`namespace "a/b"`:           func(_ *Document, s *DomainState) { s.Rotation.Migration.Namespaces = []string{"a/b"} },
		"none of this line's":       func(_ *Document, s *DomainState) { s.Authorities[0].Domain = "stranger.example" },
		"of two authorities":        func(d *Document, _ *DomainState) { d.Domains["new.example"] = &DomainState{} },
		"both foreign and of":       func(d *Document, _ *DomainState) { d.Foreign = map[string]*foreign.Domain{"new.example": {}} },
		"null for foreign":          func(d *Document, _ *DomainState) { d.Foreign = map[string]*foreign.Domain{"partner": nil} },
		"foreign trust domain":      func(d *Document, _ *DomainState) { d.Foreign = map[string]*foreign.Domain{"Partner": {}} },
		"129 foreign trust domains": func(d *Document, _ *DomainState) { d.Foreign = strangers(MaxForeign + 1) },
		"the migration's trust domain": func(_ *Document, s *DomainState) {
			s.Past = []PastRotation{{Rotation: Rotation{Migration: &Migration{}}}}
		},
	} {
		d := base.Clone()
		change(d, d.State(td))
		if _, err := d.Encode(sealer); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("stored: %v, want %q", err, want)
		}
		raw := must(json.Marshal(d))
		if _, err := Decode(must(json.Marshal(envelope{raw, sealer.MAC(raw)})), d.Version, sealer); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("read: %v, want %q", err, want)
		}
	}
	if _, err := base.Encode(sealer); err != nil {
		t.Errorf("a change of a clone is one of the document: %v", err)
	}
}

func strangers(n int) map[string]*foreign.Domain {
	all := map[string]*foreign.Domain{}
	for i := range n {
		all[fmt.Sprintf("d%d.example", i)] = &foreign.Domain{}
	}
	return all
}

// TestD17RevokedInOneDomainIsRevokedInAll of the line.
func TestD17RevokedInOneDomainIsRevokedInAll(t *testing.T) {
	d, _ := migrating(t, PhaseIssue)
	moved := "spiffe://new.example/ns/foo/sa/web"
	names := d.Names(td)
	for id, want := range map[string]string{web: "", moved: "", "spiffe://other.example/ns/foo/sa/web": "trust domain cluster.local or new.example"} {
		err := (&Predicate{SPIFFEID: id}).Check(names, time.Now())
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", id, err)
		}
	}
	first := must(d.Revoke(td, Revocation{Predicate: Predicate{SPIFFEID: moved}, Time: time.Now(), Actor: "a"}))
	if again := must(d.Revoke(domain("new.example"), Revocation{Predicate: Predicate{SPIFFEID: web}, Time: time.Now(), Actor: "b"})); again.ID != first.ID {
		t.Error("one identity is revoked twice")
	}
	if err := d.Restore(td, must(trust.ParseID(web)), time.Now()); err != nil || d.Revocations(td)[0].Restored == nil {
		t.Errorf("%v, %+v", err, d.Revocations(td))
	}
}
