package checkup

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
)

// TestRotations: what is found of one that does not get on.
func TestRotations(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(s *State, r *Rotation)
		want   []string
	}{
		{"none", func(s *State, _ *Rotation) { s.Rotation = nil }, nil},
		{"on its way", func(*State, *Rotation) {}, nil},
		{"within twice the estimate", func(s *State, r *Rotation) { r.Since = s.Time.Add(-2 * time.Hour) }, nil},
		{"beyond it", func(s *State, r *Rotation) { r.Since = s.Time.Add(-2*time.Hour - time.Second) }, []string{"warning rotation.waiting"}},
		{"a short estimate", func(s *State, r *Rotation) { *r.PhaseEstimate, r.Since = 1, s.Time.Add(-9*time.Minute) }, nil},
		{"no estimate", func(s *State, r *Rotation) { r.PhaseEstimate, r.Since = nil, s.Time.Add(-23*time.Hour) }, nil},
		{"a migration in issue, as long as an admin wants", func(s *State, r *Rotation) {
			r.PhaseEstimate, r.Since, r.Phase, r.FromDomain, r.ToDomain = nil, s.Time.Add(-999*time.Hour), "issue", "old", "new"
		}, nil},
		{"no estimate, for more than a day", func(s *State, r *Rotation) { r.PhaseEstimate, r.Since = nil, s.Time.Add(-25*time.Hour) }, []string{"warning rotation.waiting"}},
		{"paused over night", func(s *State, r *Rotation) {
			r.Since, r.Paused = s.Time.Add(-23*time.Hour), new(s.Time.Add(-23*time.Hour))
		}, nil},
		{"paused for long", func(s *State, r *Rotation) {
			r.Since, r.Paused = s.Time.Add(-25*time.Hour), new(s.Time.Add(-25*time.Hour))
		}, []string{"warning rotation.paused"}},
		{"paused though the key is known", func(s *State, r *Rotation) {
			r.Reason, r.Paused = string(document.ReasonCompromised), new(s.Time.Add(-61*time.Minute))
		}, []string{"warning rotation.paused"}},
		{"trouble for a moment", func(_ *State, r *Rotation) { r.Trouble = "no key" }, nil},
		{"trouble", func(s *State, r *Rotation) { r.Trouble, r.Since = "no key", s.Time.Add(-3*time.Minute) }, []string{"warning rotation.failing"}},
		{"overridden", func(s *State, r *Rotation) {
			r.Overrides = []Override{{"consumers", "distribute", "they are gone", "unix:eve", s.Time}}
		}, []string{"warning rotation.overridden"}},
	} {
		s := caWith(t, RenewedByServer)
		s.Rotation = &Rotation{
			ID: "a", Kind: "root", Phase: "distribute", Started: s.Time.Add(-time.Hour), Since: s.Time.Add(-time.Minute), PhaseEstimate: new(3600.0),
			Gates: []Gate{{Name: "replicas", Passed: true}, {Name: "consumers", Waiting: []string{"web: rejected it", "and 3 more"}}, {Name: "readers"}},
		}
		c.change(s, s.Rotation)
		if got := judged(t, s); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
		for _, f := range Judge(s) {
			if f.ID == "rotation.waiting" && !strings.Contains(f.Problem, ", and waits for consumers (web: rejected it; and 3 more), readers") {
				t.Errorf("%s: %s", c.name, f.Problem)
			}
		}
	}
}

// TestRotationOfADocument: what files say of one, for doctor while no server runs.
func TestRotationOfADocument(t *testing.T) {
	if RotationOf(nil) != nil || RotationOf(new(document.DomainState)) != nil {
		t.Error("there is a rotation in nothing")
	}
	at := time.Now()
	r := RotationOf(&document.DomainState{Rotation: &document.Rotation{
		ID: "a", Kind: document.KindRoot, Reason: document.ReasonAsked, Phase: document.PhaseReissue, Started: at, Since: at, Paused: &at, PausedBy: "unix:eve", Back: true,
		Overrides: []document.Override{{Gate: "readers", Phase: document.PhaseDistribute, Because: "x", Actor: "y", Time: at}},
	}})
	if r.Kind != "root" || r.Phase != "reissue" || r.PausedBy != "unix:eve" || !r.Back || r.Overrides[0].Because != "x" || r.Gates == nil {
		t.Errorf("%+v", r)
	}
}
