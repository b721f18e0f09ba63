package staged

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/revocation"
	"github.com/chancery-project/chancery/rotate/stages"
)

// running is a server with all that is in a rotation, running; its consumers are none.
type running struct {
	*server
	board *board.Board
	stop  func()
}

// run starts one.
func (w *world) run(name string) *running {
	w.t.Helper()
	s := w.start(name, w.store)
	b := board.Open(board.Config{Store: w.store, Sealer: w.config.Sealer, Domain: td, Replica: name, Format: document.Format, Logger: s.m.config.Logger})
	s.m.config.Notes, s.m.config.Changed = b.All, b.Changed
	r := revocation.New(revocation.Config{
		Domain: td, Authority: s.k, Board: b, Logger: s.m.config.Logger, Publish: func(*revocation.Lists) {},
		Acknowledge: func(ctx context.Context, doc *authority.Document) error {
			b.Own(func(n *board.Note) {
				n.Acknowledged, n.Evidence = doc.Version, board.Evidence{Goal: doc.Domains[td.String()].Goal()}
			})
			return nil
		},
	})
	ctx, cancel := context.WithCancel(w.t.Context())
	var wg sync.WaitGroup
	watch := func(ctx context.Context) error {
		return w.store.Watch(ctx, func() { s.k.Wake(); b.Wake() })
	}
	for _, f := range []func(context.Context) error{s.k.Run, b.Run, r.Run, s.m.Run, watch} {
		wg.Go(func() {
			if err := f(ctx); err != nil {
				w.t.Error(err)
			}
		})
	}
	return &running{s, b, func() { cancel(); wg.Wait() }}
}

// TestServersRotateByThemselves: two servers with their boards, notes and CRLs, through a root's rotation in which the one that drives is lost in
// each phase, and through an issuer's by policy.
func TestServersRotateByThemselves(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", func(c *authority.Config) {
			c.Profiles = []*ca.Profile{must(ca.NewProfile("workload", ca.ProfileConfig{KeyTypes: []string{"p256"}, MaxTTL: "5m", DefaultTTL: "5m"}))}
			c.IssuerTTL = 3 * time.Hour
		})
		w.leaf = 5 * time.Minute
		all := map[string]*running{}
		for _, name := range []string{"a", "b"} {
			all[name] = w.run(name)
		}
		time.Sleep(time.Minute)
		first := w.issues(all["a"].server)
		if err := all["a"].m.Start(t.Context(), "test", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err != nil {
			t.Fatal(err)
		}
		var seen []document.Phase
		lost := 0
		for begun := time.Now(); ; time.Sleep(5 * time.Second) {
			phase := w.phase()
			if phase == "" {
				break
			}
			if time.Since(begun) > time.Hour {
				t.Fatalf("after an hour it is in %s: %+v\n%s", phase, all["a"].m.Status().Gates, all["a"].log)
			}
			for _, s := range all {
				w.issues(s.server)
			}
			if slices.Contains(seen, phase) {
				continue
			}
			seen = append(seen, phase)
			for name, s := range all { // the one that drives is lost, and starts anew
				if s.k.Drives() {
					lost++
					s.stop()
					all[name] = w.run(name)
					break
				}
			}
		}
		if s := w.state(); len(s.Past) != 1 || s.Past[0].Outcome != stages.OutcomeDone || s.Get(document.KindIssuer, first) != nil || s.Generation != 3 {
			t.Errorf("%+v, generation %d", s.Past, s.Generation)
		}
		if lost < 2 {
			t.Errorf("a driver was lost %d times, in %q", lost, seen)
		}
		w.keysFit()

		second := w.issues(all["a"].server)
		for begun := time.Now(); len(w.state().Past) < 2; time.Sleep(time.Minute) {
			if time.Since(begun) > 4*time.Hour {
				t.Fatalf("the issuer was not rotated: %+v\n%s", w.state().Rotation, all["a"].log)
			}
			for _, s := range all {
				w.issues(s.server)
			}
		}
		if p := w.state().Past[0]; p.Reason != document.ReasonPolicy || p.Kind != document.KindIssuer || p.FromIssuer != second || w.issues(all["b"].server) == second || len(p.Overrides) > 0 {
			t.Errorf("%+v", p)
		}
		for _, s := range all {
			s.stop()
		}
	})
}

// TestShortLives: with issuers of 20 s, as tests and demos have them, no moment is without one that signs, and a root's rotation comes to its end
// between those of issuers.
func TestShortLives(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", func(c *authority.Config) {
			c.Profiles = []*ca.Profile{must(ca.NewProfile("workload", ca.ProfileConfig{KeyTypes: []string{"p256"}, MaxTTL: "10s", DefaultTTL: "10s"}))}
			c.IssuerTTL, c.RootTTL = 20*time.Second, time.Hour
		})
		w.leaf = 10 * time.Second
		a, b := w.run("a"), w.run("b")
		asked := false
		for second := range 300 {
			time.Sleep(time.Second)
			w.issues(a.server)
			w.issues(b.server)
			if second < 60 || asked {
				continue
			}
			err := a.m.Start(t.Context(), "test", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked})
			if asked = err == nil; err != nil && !strings.Contains(err.Error(), "is under way") {
				t.Fatal(err)
			}
		}
		b.stop()
		a.stop()
		roots, issuers := 0, 0
		for _, p := range w.state().Past {
			switch {
			case p.Outcome != stages.OutcomeDone:
				t.Errorf("%+v", p)
			case p.Kind == document.KindRoot:
				roots++
			default:
				issuers++
			}
		}
		if n := strings.Count(a.log.String(), "kind=issuer outcome=done"); roots > 1 || issuers == 0 || n < 5 || strings.Count(a.log.String(), "kind=root outcome=done") != 1 {
			t.Errorf("%d issuers were rotated, and %d roots of the last %d:\n%s", n, roots, len(w.state().Past), a.log)
		}
		for _, s := range []*running{a, b} {
			if strings.Contains(s.log.String(), "level=ERROR") {
				t.Errorf("errors at %s:\n%s", s.name, s.log)
			}
		}
	})
}

// TestPlan: what would happen is said from what there is, and nothing happens.
func TestPlan(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", nil)
		a := w.drives("a")
		w.acknowledge("a", "b")
		a.m.config.Floor, a.m.config.Typical = 10*time.Minute, 20*time.Minute
		a.m.config.Blind = func() []string { return []string{"envoy 7", "spiffe-helper", "c", "d", "e", "f"} }
		n := w.notes["b"]
		n.Seen = time.Now().Add(-time.Hour)
		n.Evidence.Behind = []board.Behind{{Consumer: 1, Until: time.Now().Add(40 * time.Minute)}}
		w.notes["b"] = n
		version := a.k.Document().Version
		root, err := a.m.Plan(Asked{Kind: document.KindRoot, Reason: document.ReasonAsked})
		if err != nil {
			t.Fatal(err)
		}
		issuer, err := a.m.Plan(Asked{Kind: document.KindIssuer, Reason: document.ReasonAsked})
		if err != nil {
			t.Fatal(err)
		}
		phases := func(p Plan) (out []document.Phase) {
			for _, x := range p.Phases {
				out = append(out, x.Phase)
				if x.Does == "" || len(x.WaitsFor) == 0 || x.Least > x.Most && x.Most > 0 {
					t.Errorf("%+v", x)
				}
			}
			return out
		}
		if got := phases(root); !slices.Equal(got, []document.Phase{"prepare", "distribute", "activate", "reissue", "retire"}) || root.FromRoot == "" || root.FromIssuer == "" {
			t.Errorf("root: %q, %+v", got, root)
		}
		if got := phases(issuer); !slices.Equal(got, []document.Phase{"prepare", "distribute", "activate", "reissue"}) || issuer.FromRoot != "" || issuer.FromIssuer == "" {
			t.Errorf("issuer: %q, %+v", got, issuer)
		}
		if d, r := root.Phases[1], root.Phases[3]; d.Least != 10*time.Minute || d.Most != 40*time.Minute || r.Least != 10*time.Minute || r.Most != 40*time.Minute {
			t.Errorf("with certificates that count for 40 minutes: %s to %s, %s to %s", d.Least, d.Most, r.Least, r.Most)
		}
		notes := strings.Join(root.Notes, "\n")
		for _, want := range []string{"consumers that cannot enforce CRLs: 6, among them envoy 7, spiffe-helper, c, d, e:", "replica b was last heard of at", "the old root's key is deleted"} {
			if !strings.Contains(notes, want) {
				t.Errorf("the notes lack %q:\n%s", want, notes)
			}
		}
		if a.k.Document().Version != version || a.m.Status().Rotation != nil {
			t.Error("a plan changed something")
		}
		if err := a.m.Start(t.Context(), "test", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err != nil {
			t.Fatal(err)
		}
		if p, err := a.m.Plan(Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err != nil || !strings.Contains(p.Notes[0], "is under way") {
			t.Errorf("during another: %+v, %v", p.Notes, err)
		}
		want := "# HELP chancery_ca_rotation_phase 1 for the phase of the rotation that is under way; absent if none is.\n# TYPE chancery_ca_rotation_phase gauge\n" +
			"chancery_ca_rotation_phase{kind=\"root\",phase=\"prepare\",reason=\"asked\"} 1\n"
		if err := testutil.GatherAndCompare(a.reg, strings.NewReader(want), "chancery_ca_rotation_phase"); err != nil {
			t.Error(err)
		}
		if problems, err := testutil.GatherAndLint(a.reg); err != nil || len(problems) > 0 {
			t.Errorf("%+v, %v", problems, err)
		}
	})
}
