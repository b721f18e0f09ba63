package staged

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/rotate/stages"
	"github.com/chancery-project/chancery/trust"
)

var newTD = must(trust.ParseDomain("new.example"))

func moving(share int, namespaces ...string) Asked {
	return Asked{Kind: document.KindRoot, Reason: document.ReasonAsked, Migrate: &stages.Target{Domain: newTD, Share: share, Namespaces: namespaces}}
}

// TestMigration goes all the way with two servers, and back: what is in the document, the log and the status, and which keys are left.
func TestMigration(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", nil)
		a, b := w.drives("a"), w.all["b"]
		w.acknowledge("a", "b")
		p, err := b.m.Plan(moving(0))
		if err != nil || len(p.Phases) != 6 || p.Phases[2].Phase != document.PhaseIssue || !strings.Contains(fmt.Sprint(p.Notes), "spiffe://new.example/") {
			t.Fatalf("%v: %+v", err, p)
		}
		if err := b.m.Start(t.Context(), "uid 0", moving(0, "a")); err != nil {
			t.Fatal(err)
		}
		b.audited(t, `"actor":"uid 0"`, "trust migrate start: migration", "from cluster.local to new.example, issuing to identities of the namespace a")
		w.until("a", document.PhaseIssue)
		w.keysFit()
		s := w.state()
		bundle := must(a.k.Document().Bundle(td))
		if s.Generation != 2 || bundle.Domain() != td || len(bundle.Roots()) != 1 || len(bundle.Kin()) != 1 || bundle.Kin()[0].Domain() != newTD || len(bundle.Kin()[0].Roots()) != 1 {
			t.Fatalf("generation %d: %v with kin %v", s.Generation, bundle.Domain(), bundle.Kin())
		}
		w.behind = []board.Behind{{Consumer: 7, Until: time.Now().Add(300 * time.Minute)}}
		for range 3 {
			a.m.look(t.Context(), time.Now())
			w.acknowledge("a", "b")
			time.Sleep(time.Hour)
		}
		st := b.m.Status()
		if w.phase() != document.PhaseIssue || len(st.Former) != 1 || st.Former[0].Kind != "presents" || st.Former[0].Count != 1 {
			t.Fatalf("phase %s: %+v", w.phase(), st.Former)
		}
		w.behind = nil
		if err := b.m.Change(t.Context(), "uid 0", Change{What: "issue", Share: new(stages.All)}); err != nil {
			t.Fatal(err)
		}
		b.audited(t, `"actor":"uid 0"`, "trust migrate issue: migration", "issuing to all identities")
		w.until("a", document.PhaseReissue)
		if w.state().Present(td) != td {
			t.Error("the line has its new name before the old root is gone")
		}
		w.until("a", "")
		w.keysFit()
		s = w.state()
		if s.Present(td) != newTD || fmt.Sprint(s.Former) != "[cluster.local]" || s.Past[0].Outcome != stages.OutcomeDone || len(s.Authorities) != 2 || b.m.Status().Domain != newTD {
			t.Fatalf("%s, formerly %v: %+v", s.Present(td), s.Former, s.Past)
		}

		// Back, with a rollback on the way.
		home := Asked{Kind: document.KindRoot, Reason: document.ReasonAsked, Migrate: &stages.Target{Domain: td, Share: stages.All}}
		for _, outcome := range []string{stages.OutcomeRolledBack, stages.OutcomeDone} {
			if err := a.m.Start(t.Context(), "uid 0", home); err != nil {
				t.Fatal(err)
			}
			if outcome == stages.OutcomeRolledBack {
				w.until("a", document.PhaseReissue)
				if err := a.m.Change(t.Context(), "uid 0", Change{What: "rollback"}); err != nil {
					t.Fatal(err)
				}
			}
			w.until("a", "")
			if got := w.state().Past[0].Outcome; got != outcome {
				t.Fatalf("it ended as %s, not %s", got, outcome)
			}
			if outcome == stages.OutcomeRolledBack && w.state().Present(td) != newTD {
				t.Errorf("after a rollback the line is %s", w.state().Present(td))
			}
		}
		w.keysFit()
		if s := w.state(); s.Present(td) != td || fmt.Sprint(s.Former) != "[new.example]" || len(s.Authorities) != 2 {
			t.Errorf("%s, formerly %v", s.Present(td), s.Former)
		}
	})
}

// TestD24MigrationNeedsAllServers: and nothing in the config of the one that is asked against it; else neither document nor audit log has anything of it.
func TestD24MigrationNeedsAllServers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", nil)
		a := w.drives("a")
		refused := func(want string) {
			t.Helper()
			if err := a.m.Start(t.Context(), "uid 0", moving(0)); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("start: %v; want %q", err, want)
			}
			if _, err := a.m.Plan(moving(0)); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("plan: %v; want %q", err, want)
			}
			if w.phase() != "" {
				t.Error("it was begun")
			}
		}
		refused("replica a, b does not say that it reads documents with a migration")
		w.acknowledge("a", "b")
		n := w.notes["b"]
		n.Format = document.Format - 1
		w.notes["b"] = n
		refused("replica b does not say")
		w.acknowledge("b")
		a.m.config.Refuses = func(d trust.Domain) error { return fmt.Errorf("%s is an alias", d) }
		refused("new.example is an alias")
		a.m.config.Refuses = nil
		if err := a.k.Change(t.Context(), func(d *document.Document) error {
			d.Foreign = map[string]*foreign.Domain{newTD.String(): {Bundle: []byte("{}"), Since: time.Now(), Actor: "test"}}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		refused("federated")
		to := moving(0)
		to.Migrate.Domain = must(trust.ParseDomain("third.example"))
		p, err := a.m.Plan(to)
		if err != nil || !slices.ContainsFunc(p.Notes, func(n string) bool { return strings.HasPrefix(n, "new.example federates: ") }) {
			t.Errorf("%v: %q", err, p.Notes)
		}
	})
}
