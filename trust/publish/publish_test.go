package publish

import (
	"testing"
	"time"
)

// TestCanaryBeforeLive walks through a rotation: the canary has each set first, the live one when the lead is over, whoever writes it.
func TestCanaryBeforeLive(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	const lead = 10 * time.Minute
	live, canary := Object{}, Object{}
	take := func(s Step, want string) {
		if s.Canary {
			canary = Object{want, s.Since}
		}
		if s.Live {
			live = Object{Roots: want}
		}
	}
	step := func(want string, wantCanary, wantLive bool) {
		t.Helper()
		s := Next(live, canary, want, lead, now)
		if s.Canary != wantCanary || s.Live != wantLive {
			t.Errorf("canary %t, live %t; want %t, %t (%+v)", s.Canary, s.Live, wantCanary, wantLive, s)
		}
		if !s.Live && live.Roots != want && s.Due.Before(now) {
			t.Errorf("due at %s, and nothing is done", s.Due)
		}
		take(s, want)
	}
	step("1", true, true) // at first both
	step("1", false, false)
	now = now.Add(time.Hour)
	step("12", true, false)
	now = now.Add(lead - time.Second)
	step("12", false, false) // also for another replica, which reads when from the canary
	now = now.Add(time.Second)
	step("12", false, true)
	step("12", false, false)
	now = now.Add(time.Hour)
	step("123", true, false)
	step("12", true, false) // taken back: the live one never had it
	now = now.Add(lead)
	step("12", false, false)
	canary.Roots = "edited"
	step("12", true, false)
	live.Roots = "edited"
	now = now.Add(lead)
	step("12", false, true)
	canary.Since = now.Add(time.Hour) // nonsense
	step("12", true, false)
	live = Object{}
	step("12", false, true) // deleted: put back at once
}

func TestBundleName(t *testing.T) {
	if got := BundleName("chancery.dev/workload", Live); got != "chancery.dev:workload:live" {
		t.Error(got)
	}
}
