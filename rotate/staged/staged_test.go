package staged

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/rotate/stages"
)

// bubble runs a test with a clock of its own.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// TestRootRotation goes all the way with two servers: what signs when, who is waited for, what is told, and what is left.
func TestRootRotation(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", nil)
		a, b := w.drives("a"), w.all["b"]
		before := w.state()
		r1, i1 := must(a.k.Document().Active(td, document.KindRoot)), must(a.k.Document().Active(td, document.KindIssuer))
		a.m.look(t.Context(), time.Now())
		if len(w.state().Authorities) != 2 || w.phase() != "" {
			t.Fatal("something began by itself")
		}
		if err := b.m.Start(t.Context(), "uid 0", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err != nil { // not who drives
			t.Fatal(err)
		}
		b.audited(t, `"actor":"uid 0"`, "rotate start: rotation", "of the root, reason asked")
		if err := b.m.Start(t.Context(), "uid 0", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err == nil || !strings.Contains(err.Error(), "under way") {
			t.Errorf("a second one: %v", err)
		}

		w.until("a", document.PhaseDistribute)
		s := w.state()
		r := s.Rotation
		if s.Generation != before.Generation+1 || r.Generation != s.Generation || r.FromRoot != r1.ID || r.FromIssuer != i1.ID || s.Get(document.KindRoot, r.ToRoot) == nil {
			t.Fatalf("generation %d after %d; %+v", s.Generation, before.Generation, r)
		}
		if got := w.issues(a); got != i1.ID {
			t.Errorf("issuer %s signs", got)
		}
		w.keysFit()

		// One that does not acknowledge is waited for, by name; so is one whose consumers are behind.
		b.numb = true
		for range 3 {
			w.acknowledge("a", "b")
			w.drives("a").m.look(t.Context(), time.Now())
			time.Sleep(time.Minute)
		}
		st := b.m.Status()
		if w.phase() != document.PhaseDistribute || st.Rotation == nil || !slices.ContainsFunc(st.Gates, func(g stages.Gate) bool {
			return g.Name == stages.GateReplicas && !g.Passed && strings.Contains(fmt.Sprint(g.Waiting), "replica b")
		}) {
			t.Fatalf("phase %s; %+v", w.phase(), st.Gates)
		}
		b.numb = false
		w.behind = []board.Behind{{Consumer: 7, Until: time.Now().Add(30 * time.Minute)}}
		for range 3 {
			w.acknowledge("a", "b")
			w.drives("a").m.look(t.Context(), time.Now())
		}
		if w.phase() != document.PhaseDistribute {
			t.Fatal("a consumer that is behind does not count")
		}
		w.behind = nil
		w.acknowledge("a", "b")
		w.drives("a").m.look(t.Context(), time.Now())
		if w.phase() != document.PhaseActivate {
			t.Fatalf("phase %s", w.phase())
		}
		b.k.Follow(t.Context())
		for _, x := range []*server{a, b} {
			if got := w.issues(x); got != r.ToIssuer {
				t.Errorf("%s signs with %s", x.name, got)
			}
		}
		w.until("a", document.PhaseReissue)
		begun := time.Now()
		w.until("a", document.PhaseRetire)
		if time.Since(begun) < 20*time.Minute {
			t.Errorf("after %s the root left, though a server that was cut off may have signed for longer", time.Since(begun))
		}
		if s := w.state(); s.Get(document.KindRoot, r1.ID) != nil || s.Get(document.KindIssuer, i1.ID) != nil || s.Generation != before.Generation+2 {
			t.Errorf("generation %d, with %d authorities", s.Generation, len(s.Authorities))
		}
		w.until("a", "")
		s = w.state()
		if len(s.Past) != 1 || s.Past[0].Outcome != stages.OutcomeDone || len(s.Authorities) != 2 || must(a.k.Document().Active(td, document.KindRoot)).ID != r.ToRoot {
			t.Fatalf("in the end: %+v; %d authorities", s.Past, len(s.Authorities))
		}
		w.keysFit() // the old root's is deleted
		for _, words := range [][]string{{"successor is prepared, and distributed"}, {"signs from now on"}, {"certificates of the issuer before are replaced"}, {"it leaves the bundle"}, {"of the root: done"}} {
			a.audited(t, append(words, "server a", r.ID)...)
		}
		time.Sleep(time.Second)
		b.k.Follow(t.Context())
		b.m.look(t.Context(), time.Now())
		for _, x := range []*server{a, b} {
			if !strings.Contains(x.log.String(), "outcome=done") || !strings.Contains(x.log.String(), "phase=retire") && x == a {
				t.Errorf("the log of %s does not tell of it:\n%s", x.name, x.log)
			}
			w.issues(x)
		}
		if !strings.Contains(a.log.String(), "gate=consumers") {
			t.Errorf("no gate is told:\n%s", a.log)
		}
		want := "# HELP chancery_ca_rotations_ended_total Rotations of roots and issuers that have ended since the server's start, by kind and outcome.\n" +
			"# TYPE chancery_ca_rotations_ended_total counter\nchancery_ca_rotations_ended_total{kind=\"root\",outcome=\"done\"} 1\n"
		if err := testutil.GatherAndCompare(a.reg, strings.NewReader(want), "chancery_ca_rotations_ended_total"); err != nil {
			t.Error(err)
		}
	})
}

// TestCrashOfTheDriverAtEachWrite: whichever write of a rotation the driver dies at, before it or after, its successor brings the rotation
// to the same end, and no key is lost or left.
func TestCrashOfTheDriverAtEachWrite(t *testing.T) {
	for _, made := range []bool{false, true} {
		for n, done := 0, false; !done; n++ {
			if n > 30 {
				t.Fatal("it has no end")
			}
			t.Run(fmt.Sprint(made, " ", n), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					w := newWorld(t, "a b", nil)
					if err := w.drives("b").m.Start(t.Context(), "test", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err != nil {
						t.Fatal(err)
					}
					id := w.state().Rotation.ID
					f := &failing{Store: w.store, left: -1}
					a := w.start("a", f)
					w.drives("a")
					f.left, f.made = n, made
					for range 150 {
						a.m.look(t.Context(), time.Now())
						if f.dead {
							break
						}
						w.acknowledge("a", "b")
						time.Sleep(time.Minute)
						if w.phase() == "" {
							done = true // it took fewer writes
							return
						}
						if !a.k.TakeLease(t.Context()) {
							break // that was the write
						}
					}
					if !f.dead {
						t.Fatal("it did not come to the write")
					}
					w.drives("b")
					w.acknowledge("b")
					w.start("a", w.store)
					w.until("b", "")
					s := w.state()
					if len(s.Past) != 1 || s.Past[0].ID != id || s.Past[0].Outcome != stages.OutcomeDone || len(s.Authorities) != 2 || s.Generation != 3 {
						t.Errorf("it ended with %+v, generation %d, %d authorities", s.Past, s.Generation, len(s.Authorities))
					}
					for _, a := range s.Authorities {
						if !w.keys.refs[a.KeyRef] {
							t.Errorf("the key of %s %s is gone", a.Kind, a.ID)
						}
					}
					w.issues(w.all["a"])
					w.issues(w.all["b"])
				})
			})
		}
	}
}

// TestLeaseMovesAtEachStep: two managers take turns, and each believes now and then that it drives still.
func TestLeaseMovesAtEachStep(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", nil)
		if err := w.all["b"].m.Start(t.Context(), "test", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err != nil {
			t.Fatal(err)
		}
		var seen []document.Phase
		for n := range 400 {
			name := []string{"a", "b"}[n%2]
			w.drives(name).m.look(t.Context(), time.Now())
			w.all[[]string{"b", "a"}[n%2]].m.look(t.Context(), time.Now())
			if p := w.phase(); len(seen) == 0 || seen[len(seen)-1] != p {
				seen = append(seen, p)
			}
			if w.phase() == "" {
				break
			}
			w.acknowledge("a", "b")
			time.Sleep(20 * time.Second)
		}
		want := []document.Phase{"prepare", "distribute", "activate", "reissue", "retire", ""}
		if !slices.Equal(seen, want) && !slices.Equal(seen, want[1:]) {
			t.Errorf("phases were %q", seen)
		}
		if s := w.state(); len(s.Authorities) != 2 || s.Generation != 3 || len(s.Past) != 1 {
			t.Errorf("%d authorities, generation %d, past %+v", len(s.Authorities), s.Generation, s.Past)
		}
		w.keysFit()
	})
}

// TestD6Compromise: a tainted authority never signs again, whatever an admin asks for, and leaves every bundle; of a compromised issuer its root, too.
func TestD6Compromise(t *testing.T) {
	for _, kind := range []document.AuthorityKind{document.KindRoot, document.KindIssuer} {
		t.Run(string(kind), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, "a b", nil)
				a := w.drives("a")
				plan, err := a.m.Plan(Asked{Kind: kind, Reason: document.ReasonCompromised})
				if err != nil || plan.FromRoot == "" || len(plan.Phases) != 5 || !strings.Contains(strings.Join(plan.Notes, "\n"), "tainted at once") ||
					(kind == document.KindIssuer) != strings.Contains(strings.Join(plan.Notes, "\n"), "X509_V_FLAG_CRL_CHECK_ALL") || !strings.Contains(strings.Join(plan.Notes, "\n"), "kept apart from the old") {
					t.Errorf("plan: %+v, %v", plan, err)
				}
				if err := a.m.Start(t.Context(), "test", Asked{Kind: kind, Reason: document.ReasonCompromised}); err != nil {
					t.Fatal(err)
				}
				a.audited(t, "rotate start", "reason compromised")
				r := w.state().Rotation
				if x := w.state().Get(document.KindIssuer, r.FromIssuer); r.Kind != document.KindRoot || x.Tainted == nil || (w.state().Get(document.KindRoot, r.FromRoot).Tainted != nil) != (kind == document.KindRoot) {
					t.Fatalf("%+v; issuer %+v", r, x)
				}
				for _, phase := range []document.Phase{document.PhasePrepare, document.PhaseDistribute, document.PhaseActivate, document.PhaseReissue} {
					w.until("a", phase)
					version := a.k.Document().Version
					for _, what := range []string{"abort", "rollback"} {
						if err := a.m.Change(t.Context(), "test", Change{What: what}); err == nil || a.k.Document().Version != version {
							t.Errorf("%s in %s: %v", what, phase, err)
						}
					}
				}
				w.until("a", "")
				s := w.state()
				if s.Get(document.KindRoot, r.FromRoot) != nil || s.Get(document.KindIssuer, r.FromIssuer) != nil || s.Past[0].Outcome != stages.OutcomeDone {
					t.Errorf("in the end there are %d authorities, %+v", len(s.Authorities), s.Past)
				}
				w.keysFit() // the tainted keys are gone, too
			})
		})
	}
}

// TestRollbackInEachPhase: in each phase before retire the way back is open, for roots and issuers; at its end all is as it was.
func TestRollbackInEachPhase(t *testing.T) {
	for _, kind := range []document.AuthorityKind{document.KindRoot, document.KindIssuer} {
		for _, phase := range []document.Phase{document.PhasePrepare, document.PhaseDistribute, document.PhaseActivate, document.PhaseReissue, document.PhaseRetire} {
			if kind == document.KindIssuer && phase == document.PhaseRetire {
				continue
			}
			t.Run(fmt.Sprint(kind, " ", phase), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					w := newWorld(t, "a b", nil)
					a := w.drives("a")
					if err := a.m.Start(t.Context(), "test", Asked{Kind: kind, Reason: document.ReasonAsked}); err != nil {
						t.Fatal(err)
					}
					r := w.state().Rotation
					w.until("a", phase)
					err := w.all["b"].m.Change(t.Context(), "uid 7", Change{What: "rollback", Rotation: r.ID})
					if phase == document.PhaseRetire {
						if err == nil || !strings.Contains(err.Error(), "another rotation") {
							t.Errorf("once the old root is gone: %v", err)
						}
						return
					}
					if err != nil {
						t.Fatal(err)
					}
					w.all["b"].audited(t, `"actor":"uid 7"`, "rotate rollback: rotation "+r.ID)
					w.until("a", "")
					s := w.state()
					want := stages.OutcomeAborted
					if phase == document.PhaseActivate || phase == document.PhaseReissue {
						want = stages.OutcomeRolledBack
					}
					if s.Past[0].Outcome != want {
						t.Errorf("outcome %q", s.Past[0].Outcome)
					}
					w.acknowledge("a", "b")
					for _, x := range []*server{a, w.all["b"]} {
						if got := w.issues(x); got != r.FromIssuer {
							t.Errorf("%s signs with %s", x.name, got)
						}
					}
					if roots := must(a.k.Document().Bundle(td)).Roots(); len(roots) != 1 {
						t.Errorf("%d roots", len(roots))
					}
					w.keysFit()
				})
			})
		}
	}
}

// TestPauseOverrideAndAudit: who pauses, resumes and overrides is in the audit log before it happens; without that nothing does.
func TestInvariant10ChangesAreAuditedFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", nil)
		a, b := w.drives("a"), w.all["b"]
		if err := b.m.Change(t.Context(), "test", Change{What: "pause"}); err == nil || !strings.Contains(err.Error(), "no rotation") {
			t.Errorf("without a rotation: %v", err)
		}
		if err := a.m.Start(t.Context(), "test", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err != nil {
			t.Fatal(err)
		}
		w.until("a", document.PhaseDistribute)
		id := w.state().Rotation.ID
		b.numb = true
		for name, c := range map[string]Change{
			"another rotation": {What: "pause", Rotation: "ff"}, "no such change": {What: "stop"}, "no such gate": {What: "override", Gate: "door", Because: "x"},
			"no reason": {What: "override", Gate: stages.GateReplicas}, "not paused": {What: "resume"},
		} {
			if err := b.m.Change(t.Context(), "test", c); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
		if err := b.m.Change(t.Context(), "uid 1", Change{What: "pause", Rotation: id}); err != nil {
			t.Fatal(err)
		}
		b.numb = false
		for range 5 {
			w.acknowledge("a", "b")
			w.drives("a").m.look(t.Context(), time.Now())
			time.Sleep(30 * time.Minute)
		}
		if w.phase() != document.PhaseDistribute || !strings.Contains(a.log.String(), "a rotation is paused") {
			t.Errorf("while paused it went on to %s:\n%s", w.phase(), a.log)
		}
		b.numb = true
		if err := a.m.Change(t.Context(), "uid 2", Change{What: "resume"}); err != nil {
			t.Fatal(err)
		}
		delete(w.notes, "b") // it was never heard of
		w.acknowledge("a")
		for range 3 {
			w.drives("a").m.look(t.Context(), time.Now())
			time.Sleep(40 * time.Minute)
		}
		if n := strings.Count(a.log.String(), "a rotation waits"); n != 1 || !strings.Contains(a.log.String(), "replica b") {
			t.Errorf("%d warnings in two hours say who is waited for:\n%s", n, a.log)
		}
		for _, gate := range []string{stages.GateReplicas, stages.GateConsumers} {
			if err := a.m.Change(t.Context(), "uid 3", Change{What: "override", Gate: gate, Because: "b burnt down"}); err != nil {
				t.Fatal(err)
			}
			a.audited(t, `"actor":"uid 3"`, "gate "+gate, "b burnt down")
		}
		w.drives("a").m.look(t.Context(), time.Now())
		if w.phase() != document.PhaseActivate {
			t.Errorf("with both gates overridden it is in %s: %+v", w.phase(), a.m.Status().Gates)
		}
		b.audited(t, `"actor":"uid 1"`, "rotate pause: rotation "+id)
		a.audited(t, `"actor":"uid 2"`, "rotate resume")

		// Without an audit log nothing happens.
		version := a.k.Document().Version
		a.m.config.Log.Close()
		if err := a.m.Change(t.Context(), "test", Change{What: "pause"}); err == nil {
			t.Error("it was paused without a line in the audit log")
		}
		w.acknowledge("a", "b")
		b.numb = false
		w.acknowledge("b")
		a.m.look(t.Context(), time.Now())
		if w.phase() != document.PhaseActivate || !strings.Contains(a.m.Status().Trouble, "audit log") {
			t.Errorf("it went from version %d to %d, %s: %q", version, a.k.Document().Version, w.phase(), a.m.Status().Trouble)
		}
	})
}

// TestPolicy: an issuer is rotated at half of its life; a root at the age that an admin set (decision D11), and never without.
func TestD11Policy(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", nil)
		first := w.issues(w.drives("a"))
		for range 45 { // hours, of 100
			w.acknowledge("a", "b")
			w.drives("a").m.look(t.Context(), time.Now())
			time.Sleep(time.Hour)
		}
		if w.state().Rotation != nil || len(w.state().Authorities) != 2 {
			t.Fatal("before half of its life something began")
		}
		time.Sleep(6 * time.Hour)
		w.drives("a").m.look(t.Context(), time.Now())
		r := w.state().Rotation
		if r == nil || r.Kind != document.KindIssuer || r.Reason != document.ReasonPolicy || r.FromIssuer != first {
			t.Fatalf("past half of its life: %+v", r)
		}
		w.all["a"].audited(t, `"actor":"policy"`, "of the issuer, reason policy")
		w.all["a"].k.Mind(t.Context())
		if w.all["a"].k.Document().Prepared(td) != nil {
			t.Error("the authority prepares another one beside it")
		}
		// Somebody stops it: the policy leaves them time, and comes back.
		if err := w.all["a"].m.Change(t.Context(), "test", Change{What: "abort"}); err != nil {
			t.Fatal(err)
		}
		for _, later := range []time.Duration{0, 30 * time.Minute, 31 * time.Minute} {
			time.Sleep(later)
			w.drives("a").m.look(t.Context(), time.Now())
			if (w.state().Rotation != nil) != (later == 31*time.Minute) {
				t.Errorf("after another %s: %+v", later, w.state().Rotation)
			}
		}
		w.until("a", "")
		if got := w.issues(w.all["a"]); got == first {
			t.Error("the old issuer signs")
		}
		w.keysFit()

		// A root has no age unless an admin says so.
		w.age = 40 * time.Hour
		w.acknowledge("a", "b")
		if w.drives("a").m.look(t.Context(), time.Now()); w.state().Rotation != nil {
			t.Fatal("a root is rotated, and no admin wrote a policy")
		}
		w.start("a", w.store)
		w.drives("a").m.look(t.Context(), time.Now())
		if r := w.state().Rotation; r == nil || r.Kind != document.KindRoot || r.Reason != document.ReasonPolicy {
			t.Fatalf("with a policy: %+v", r)
		}
		w.until("a", "")
		if s := w.state(); len(s.Past) != 3 || len(s.Authorities) != 2 {
			t.Errorf("past %+v", s.Past)
		}
		w.keysFit()
	})
}

// TestIssuerThatEndsIsFollowed: gates that do not pass, a pause, a driver that does nothing: an issuer ends, and certificates go on.
func TestIssuerThatEndsIsFollowed(t *testing.T) {
	for name, c := range map[string]struct {
		kind document.AuthorityKind
		hold func(w *world, a *server)
		want func(w *world, r *document.Rotation, signs string) bool
	}{
		"gates": {document.KindIssuer, func(w *world, a *server) { w.all["b"].numb = true }, func(w *world, r *document.Rotation, signs string) bool {
			return signs == r.ToIssuer && r.FromIssuer != signs // by an override of the policy
		}},
		"pause": {document.KindIssuer, func(w *world, a *server) {
			if err := a.m.Change(w.t.Context(), "test", Change{What: "pause"}); err != nil {
				w.t.Fatal(err)
			}
		}, func(w *world, r *document.Rotation, signs string) bool {
			return signs == r.FromIssuer
		}},
		"root": {document.KindRoot, func(w *world, a *server) { w.all["b"].numb = true }, func(w *world, r *document.Rotation, signs string) bool {
			return w.state().Get(document.KindIssuer, signs).RootID() == r.FromRoot && r.FromIssuer == signs && r.Phase == document.PhaseDistribute
		}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				w := newWorld(t, "a b", func(c *authority.Config) { c.IssuerTTL = 10 * time.Hour })
				a := w.drives("a")
				first := w.issues(a)
				if err := a.m.Start(t.Context(), "test", Asked{Kind: c.kind, Reason: document.ReasonAsked}); err != nil {
					t.Fatal(err)
				}
				w.until("a", document.PhaseDistribute)
				c.hold(w, a)
				for range 12 * 60 { // minutes; two hours more than it lives
					w.drives("a").m.look(t.Context(), time.Now())
					a.k.Mind(t.Context())
					w.acknowledge("a", "b")
					w.issues(a)
					time.Sleep(time.Minute)
				}
				if signs := w.issues(a); signs == first || !c.want(w, w.state().Rotation, signs) {
					t.Errorf("issuer %s signs; it was %s, and the rotation is %+v", signs, first, w.state().Rotation)
				}
				// It goes on to its end.
				w.all["b"].numb = false
				if name == "pause" {
					if err := a.m.Change(t.Context(), "test", Change{What: "resume"}); err != nil {
						t.Fatal(err)
					}
				}
				w.until("a", "")
				if got := w.issues(a); w.state().Get(document.KindIssuer, got) == nil {
					t.Errorf("issuer %s signs", got)
				}
			})
		})
	}
}

// TestSuccessorThatCannotBeMade: a key store that fails is told, tried again ever more seldom, and the lease goes to another server.
func TestSuccessorThatCannotBeMade(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a b", nil)
		a := w.drives("a")
		if err := a.m.Start(t.Context(), "test", Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}); err != nil {
			t.Fatal(err)
		}
		w.keys.broken = fmt.Errorf("the token is gone")
		tries := 0
		for range 600 {
			before := a.m.retry.wait
			a.m.look(t.Context(), time.Now())
			if a.m.retry.wait != before {
				tries++
			}
			time.Sleep(time.Second)
			if !a.k.TakeLease(t.Context()) {
				break // it leaves it to others
			}
		}
		if got := a.m.Status().Trouble; !strings.Contains(got, "the token is gone") || w.phase() != document.PhasePrepare {
			t.Errorf("trouble %q in %s", got, w.phase())
		}
		if n := strings.Count(a.log.String(), "a rotation does not go on"); n != 1 || tries > 12 {
			t.Errorf("%d lines, %d tries:\n%s", n, tries, a.log)
		}
		w.keys.broken = nil
		time.Sleep(maxRetry)
		w.until("b", "")
		w.keysFit()
	})
}

// TestWhatCannotBeRotatedHere: the answer says what to do instead, and nothing is changed.
func TestWhatCannotBeRotatedHere(t *testing.T) {
	made := must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: must(newLog(t))}))
	w := newWorld(t, "a", func(c *authority.Config) { c.Roots, c.Parented = append(c.Roots, made.Root), true })
	a := w.drives("a")
	for kind, want := range map[document.AuthorityKind]string{document.KindRoot: "chancery ceremony", document.KindIssuer: "renewed by a parent", "key": `"root" or "issuer"`} {
		if err := a.m.Start(t.Context(), "test", Asked{Kind: kind, Reason: document.ReasonAsked}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", kind, err)
		}
		if _, err := a.m.Plan(Asked{Kind: kind, Reason: document.ReasonAsked}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("plan %s: %v", kind, err)
		}
	}
	if err := a.m.Start(t.Context(), "test", Asked{Kind: document.KindRoot, Reason: document.ReasonPolicy}); err == nil {
		t.Error("somebody starts what only a policy does")
	}
	if a.m.look(t.Context(), time.Now()); a.m.Status().Rotation != nil || a.m.Status().Trouble != "" || bytes.Contains(a.log.Bytes(), []byte("rotation")) {
		t.Errorf("%s", a.log)
	}
}
