package stages

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
)

// mutant is a machine that is wrong in one way: production Next and commands, with what they are given, or return, changed.
type mutant struct {
	name  string
	rules rules
	world world
}

// without is a machine that lacks a gate of a phase: it is given an override, and forgets it.
func without(p document.Phase, gate string) rules {
	return rules{
		input: func(d *document.Document, _ *Evidence, _ time.Time) {
			if r := domain(d).Rotation; r != nil && r.Phase == p {
				r.Overrides = append(r.Overrides, document.Override{Gate: gate, Phase: p, Time: time.Unix(1<<40, 0)})
			}
		},
		output: func(_, d *document.Document, _ time.Time) {
			for _, r := range rotations(domain(d)) {
				forged := len(r.Overrides)
				r.Overrides = slices.DeleteFunc(r.Overrides, func(o document.Override) bool { return o.Time.Unix() == 1<<40 })
				if forged != len(r.Overrides) && r.Since.Unix() >= 1<<40 {
					r.Since = r.Started
				}
			}
		},
	}
}

func rotations(s *document.DomainState) (all []*document.Rotation) {
	if s.Rotation != nil {
		all = append(all, s.Rotation)
	}
	for i := range s.Past {
		all = append(all, &s.Past[i].Rotation)
	}
	return all
}

// notes is a machine that reads notes otherwise.
func notes(f func(d *document.Document, n *board.Note, dead, vouches bool, now time.Time)) rules {
	return rules{input: func(d *document.Document, e *Evidence, now time.Time) {
		v := look(d, td, *e, now)
		changed := make([]board.Note, 0, servers)
		for _, n := range e.Notes {
			dead := slices.ContainsFunc(d.Logs, func(l document.LogState) bool { return l.Replica == n.Replica && l.DeclaredDead != nil })
			vouches := v != nil && v.vouches(&n)
			n.Evidence.Behind, n.Evidence.Settled = slices.Clone(n.Evidence.Behind), slices.Clone(n.Evidence.Settled)
			f(d, &n, dead, vouches, now)
			changed = append(changed, n)
		}
		e.Notes = changed
	}}
}

// dead is a machine that takes the entries of dead replicas otherwise.
func dead(f func(d *document.Document, e *Evidence)) rules {
	return rules{
		input: func(d *document.Document, e *Evidence, _ time.Time) {
			f(d, e)
		},
		output: func(before, d *document.Document, _ time.Time) { d.Logs = before.Clone().Logs },
	}
}

func longAgo(d *document.Document) {
	for i := range d.Logs {
		if at := d.Logs[i].DeclaredDead; at != nil {
			old := at.Add(-time.Hour)
			d.Logs[i].DeclaredDead = &old
		}
	}
}

func mutants() []mutant {
	two := world{start: root(), consumer: eAndC, home: [people]uint8{0: 2}}
	client := world{start: root(), consumer: onlyC}
	reader := world{start: root(), consumer: onlyC, reader: true}
	dies := world{start: root(), consumer: eAndC, home: [people]uint8{2, 0, 2}, faults: 1, kinds: "die"}
	sleeps := world{start: root(), consumer: onlyC, faults: 1, kinds: "sleep"}
	taint := world{start: []string{"root compromised"}, consumer: onlyC, commands: []string{"abort", "rollback"}, orders: 1}
	back := world{start: root(), consumer: onlyC, commands: []string{"rollback"}, orders: 1}
	agent := world{start: root(), consumer: onlyE}
	quit := func(d *document.Document, now time.Time) { domain(d).EndRotation(OutcomeAborted, now) }
	return append([]mutant{
		{"distribute does not wait for consumers", without(document.PhaseDistribute, GateConsumers), two},
		{"distribute does not wait for replicas", without(document.PhaseDistribute, GateReplicas), reader},
		{"distribute does not wait for readers", without(document.PhaseDistribute, GateReaders), reader},
		{"distribute does not wait for what the dead signed", without(document.PhaseDistribute, GateStragglers), dies},
		{"activate does not wait for replicas", without(document.PhaseActivate, GateReplicas), agent},
		{"reissue does not wait for consumers", without(document.PhaseReissue, GateConsumers), client},
		{"reissue does not wait for what the dead signed", without(document.PhaseReissue, GateStragglers), dies},
		{"readers count from when the phase begins (D3)", rules{input: func(d *document.Document, _ *Evidence, _ time.Time) {
			if r := domain(d).Rotation; r != nil && r.Phase == document.PhaseDistribute {
				r.Spread = r.Since
			}
		}}, reader},
		{"vacuous acknowledgement: who says nothing has nobody behind (D1)", notes(func(d *document.Document, n *board.Note, _, vouches bool, _ time.Time) {
			if !vouches {
				n.Acknowledged, n.Evidence = math.MaxUint64, board.Evidence{Goal: domain(d).Goal()}
			}
		}), client},
		{"sets about another phase count (D2)", notes(func(d *document.Document, n *board.Note, _, _ bool, _ time.Time) {
			n.Acknowledged, n.Evidence.Goal = math.MaxUint64, domain(d).Goal()
		}), client},
		{"evidence is lost with its replica: what it announced does not count (D2)", rules{input: func(d *document.Document, e *Evidence, now time.Time) {
			longAgo(d)
			notes(func(_ *document.Document, n *board.Note, _, _ bool, _ time.Time) { n.Evidence.Ahead = time.Time{} }).input(d, e, now)
		}, output: dead(nil).output}, dies},
		{"a stale signer is not reckoned with: it signs until its root may leave (D4)", dead(func(d *document.Document, _ *Evidence) {
			longAgo(d)
			if r := domain(d).Rotation; r != nil && r.Phase == document.PhaseReissue {
				r.NotBefore = time.Time{}
			}
		}), sleeps},
		{"a replica that is declared dead is forgotten (D4)", dead(func(d *document.Document, e *Evidence) {
			d.Logs = slices.DeleteFunc(d.Logs, func(l document.LogState) bool { return l.DeclaredDead != nil })
		}), dies},
		{"what a dead replica's note lists does not count (D2)", notes(func(_ *document.Document, n *board.Note, dead, _ bool, _ time.Time) {
			if dead {
				n.Evidence.Behind = nil
			}
		}), dies},
		{"a consumer that nobody knows counts as acknowledged (D1)", notes(func(_ *document.Document, n *board.Note, _, _ bool, _ time.Time) {
			n.Evidence.Lost = time.Time{}
		}), dies},
		{"a server settles by what it learnt in a phase before (D2)", rules{settles: true}, client},
		{"a consumer stops to count before its certificate ends (D1)", notes(func(_ *document.Document, n *board.Note, _, _ bool, now time.Time) {
			n.Evidence.Behind = slices.DeleteFunc(n.Evidence.Behind, func(b board.Behind) bool { return b.Until.Before(now.Add(90 * time.Second)) })
		}), client},
		{"the successor signs as soon as it is made", rules{output: func(_, d *document.Document, now time.Time) {
			s := domain(d)
			if r := s.Rotation; r != nil && r.Phase == document.PhaseDistribute {
				s.Activate(document.KindRoot, r.ToRoot, now)
				s.Activate(document.KindIssuer, r.ToIssuer, now)
				r.Phase, r.Version = document.PhaseActivate, d.Version
			}
		}}, two},
		{"the predecessor's root leaves when the successor signs", rules{output: func(before, d *document.Document, _ time.Time) {
			if r := domain(d).Rotation; r != nil && r.Phase == document.PhaseActivate && domain(before).Rotation.Phase == document.PhaseDistribute {
				domain(d).DropRoot(r.FromRoot)
			}
		}}, client},
		{"abort leaves a tainted authority to sign (D6)", rules{abort: func(d *document.Document, now time.Time) error { quit(d, now); return nil }}, taint},
		{"rollback makes a tainted authority sign again (D6)", rules{back: func(d *document.Document, now time.Time) error {
			s := domain(d)
			if p := s.Rotation.Phase; p != document.PhaseActivate && p != document.PhaseReissue {
				return Rollback(d, td, "admin", now)
			}
			tainted := map[string]*time.Time{}
			for i := range s.Authorities {
				a := &s.Authorities[i]
				tainted[a.ID], a.Tainted = a.Tainted, nil
			}
			err := Rollback(d, td, "admin", now)
			for i := range s.Authorities {
				s.Authorities[i].Tainted = tainted[s.Authorities[i].ID]
			}
			return err
		}}, taint},
		{"rollback does not replace what the successor signed", rules{back: func(d *document.Document, now time.Time) error {
			if err := Rollback(d, td, "admin", now); err != nil || domain(d).Rotation == nil {
				return err
			}
			s := domain(d)
			s.DropRoot(s.Rotation.FromRoot)
			s.Rotation.Phase, s.Rotation.Generation = document.PhaseRetire, s.Generation
			return nil
		}}, back},
		{"rollback of a phase that has gone too far", rules{back: func(d *document.Document, now time.Time) error {
			s := domain(d)
			if r := s.Rotation; r.Phase == document.PhaseRetire {
				s.Generation++
				s.Authorities = []document.Authority{authority(document.KindRoot, "R1", "", document.StateActive), authority(document.KindIssuer, "I1", "R1", document.StateActive)}
				r.Phase, r.Version, r.Back = document.PhaseActivate, d.Version, true
				r.FromRoot, r.ToRoot, r.FromIssuer, r.ToIssuer = "R2", "R1", "I2", "I1"
				return nil
			}
			return Rollback(d, td, "admin", now)
		}}, back},
		{"abort when the successor signs already", rules{abort: func(d *document.Document, now time.Time) error {
			s := domain(d)
			if r := s.Rotation; r.Phase == document.PhaseReissue {
				s.Activate(document.KindRoot, r.FromRoot, now)
				s.Activate(document.KindIssuer, r.FromIssuer, now)
				s.DropRoot(r.ToRoot)
				quit(d, now)
				return nil
			}
			return Abort(d, td, "admin", now)
		}}, world{start: root(), consumer: onlyC, commands: []string{"abort"}, orders: 1}},
		{"a phase's version moves with the document: no acknowledgement is ever enough", rules{input: func(d *document.Document, _ *Evidence, _ time.Time) {
			if r := domain(d).Rotation; r != nil {
				r.Version = d.Version
			}
		}}, client},
	}, migrationMutants()...)
}

// migrationMutants are wrong in what a migration has beside a rotation of the root.
func migrationMutants() []mutant {
	only2 := [people]uint8{2, 2, 2}
	client := world{start: []string{"migrate 0"}, consumer: onlyC, home: only2, commands: []string{"issue c", "issue 100"}, orders: 1}
	agent := world{start: []string{"migrate 100"}, consumer: onlyE, home: only2}
	both := world{start: []string{"migrate 100"}, consumer: eAndC, home: only2}
	blind := world{start: []string{"migrate 100"}, consumer: eAndC, home: only2, blind: onlyE}
	back := world{start: []string{"migrate 0"}, consumer: onlyC, home: only2, commands: []string{"issue c", "rollback", "abort"}, orders: 2}
	sleeps := world{start: []string{"migrate 0"}, consumer: onlyC, commands: []string{"issue 100"}, faults: 1, kinds: "sleep"}
	dies := world{start: []string{"migrate 100"}, consumer: onlyC, home: only2, commands: []string{"rollback"}, orders: 1, faults: 1, kinds: "die"}
	in := func(d *document.Document, p document.Phase) *document.Rotation {
		if r := domain(d).Rotation; r != nil && r.Phase == p {
			return r
		}
		return nil
	}
	return []mutant{
		{"migration: both sign before everybody trusts both", rules{output: func(_, d *document.Document, _ time.Time) {
			if r := in(d, document.PhaseDistribute); r != nil {
				r.Phase, r.Version, r.Generation = document.PhaseIssue, d.Version, 0
			}
		}}, both},
		{"migration: distribute does not wait for consumers", without(document.PhaseDistribute, GateConsumers), both},
		{"migration: who reads one domain only counts for both", rules{kinless: true}, blind},
		{"migration: phase issue ends before the share is whole", rules{input: func(d *document.Document, _ *Evidence, _ time.Time) {
			if r := in(d, document.PhaseIssue); r != nil {
				r.Migration.Share = All
			}
		}, output: func(before, d *document.Document, _ time.Time) {
			if r := domain(d).Rotation; r != nil && domain(before).Rotation.Migration != nil {
				r.Migration.Share = domain(before).Rotation.Migration.Share
			}
		}}, client},
		{"migration: phase issue never ends", rules{input: func(d *document.Document, _ *Evidence, _ time.Time) {
			if r := in(d, document.PhaseIssue); r != nil {
				r.Migration.Share = 0
			}
		}}, client},
		{"migration: the line is renamed once the new domain signs", rules{output: func(_, d *document.Document, _ time.Time) {
			if r := in(d, document.PhaseActivate); r != nil {
				domain(d).Domain = r.Migration.To
			}
		}}, agent},
		{"migration: the line is renamed, by its books, before its end", rules{output: func(_, d *document.Document, _ time.Time) {
			if in(d, document.PhaseReissue) != nil {
				domain(d).Become(td, newTD)
			}
		}}, agent},
		{"migration: the line keeps its name at the end", rules{output: func(_, d *document.Document, _ time.Time) {
			if in(d, document.PhaseRetire) != nil {
				domain(d).Domain, domain(d).Former = "", nil
			}
		}}, agent},
		{"migration: the line is renamed at the end of a rollback", rules{output: func(_, d *document.Document, _ time.Time) {
			if r := in(d, document.PhaseRetire); r != nil && r.Back {
				domain(d).Become(td, newTD)
			}
		}}, back},
		{"migration: the old root leaves once the share is whole", rules{output: func(before, d *document.Document, _ time.Time) {
			if r := in(d, document.PhaseActivate); r != nil && in(before, document.PhaseIssue) != nil {
				domain(d).DropRoot(r.FromRoot)
			}
		}}, client},
		{"migration: reissue does not wait for consumers", without(document.PhaseReissue, GateConsumers), client},
		{"migration: abort when the new domain is issued already", rules{abort: func(d *document.Document, now time.Time) error {
			s := domain(d)
			if r := in(d, document.PhaseIssue); r != nil {
				s.DropRoot(r.ToRoot)
				s.EndRotation(OutcomeAborted, now)
				return nil
			}
			return Abort(d, td, "admin", now)
		}}, back},
		{"migration: a rollback does not replace what the new domain had", rules{back: func(d *document.Document, now time.Time) error {
			issued := in(d, document.PhaseIssue) != nil
			if err := Rollback(d, td, "admin", now); err != nil || !issued {
				return err
			}
			s := domain(d)
			s.DropRoot(s.Rotation.FromRoot)
			s.Rotation.Phase, s.Rotation.Generation = document.PhaseRetire, s.Generation
			return nil
		}}, back},
		{"migration: a rollback does not wait for servers that issue the new domain", without(document.PhaseActivate, GateReplicas),
			world{start: []string{"migrate 100"}, consumer: onlyE, commands: []string{"rollback"}, orders: 1}},
		{"migration: a rollback does not reckon with what the dead signed", without(document.PhaseReissue, GateStragglers), dies},
		{"migration: a server that was cut off while both signed is not reckoned with (D4)", dead(func(d *document.Document, _ *Evidence) {
			longAgo(d)
			if r := in(d, document.PhaseReissue); r != nil {
				r.NotBefore = time.Time{}
			}
		}), sleeps},
	}
}

// TestMutants: each machine that is wrong in one way comes to what must never be, or never to its end, and the shortest history shows how.
func TestMutants(t *testing.T) {
	all, caught := mutants(), 0
	if testing.Short() { // worlds without faults are small
		all = slices.DeleteFunc(all, func(m mutant) bool { return m.world.faults > 0 })
	}
	for _, m := range all {
		w := m.world
		w.name, w.rules = m.name, m.rules
		o := w.explore(150_000, false)
		if o.bad == "" { // it does no harm; perhaps it does nothing
			o = w.explore(150_000, true)
		}
		if o.bad == "" {
			t.Errorf("%s: not caught in %d states (all: %v)", m.name, o.states, o.all)
			continue
		}
		caught++
		fmt.Printf("mutant: %s\n    %s\n    %s\n", m.name, o.path, o.bad)
	}
	fmt.Printf("mutants caught: %d of %d\n", caught, len(all))
}
