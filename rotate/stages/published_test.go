package stages

import (
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
)

// TestD3ReadersCountFromPublication: what is read is published first, or readers could not have read it: their time counts from then.
func TestD3ReadersCountFromPublication(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	v := &view{now: now, r: &document.Rotation{Phase: document.PhaseDistribute}, e: Evidence{Floor: time.Minute, Unpublished: []string{"ConfigMap a/b"}}}
	s := &document.DomainState{Rotation: v.r}
	passed := []Gate{{Name: GateReplicas, Passed: true}}
	if v.noteSpread(s, passed) || !v.r.Spread.IsZero() {
		t.Error("the time of readers began before all was published")
	}
	if g := v.readers(); g.Passed || !strings.Contains(strings.Join(g.Waiting, "; "), "ConfigMap a/b") {
		t.Errorf("the gate says %+v", g)
	}
	v.e.Unpublished = nil
	if !v.noteSpread(s, passed) || !v.r.Spread.Equal(now) {
		t.Errorf("it began at %s", v.r.Spread)
	}
	v.e.Unpublished = []string{"a ConfigMap that was edited since"}
	v.now = now.Add(time.Minute + skew)
	if g := v.readers(); !g.Passed {
		t.Errorf("the gate says %+v", g)
	}
}
