package below

import (
	"testing"
	"time"
)

// TestNote: one entry for each server and root, never moved back, forgotten an hour after its end, and seldom written.
func TestNote(t *testing.T) {
	now := time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)
	all, changed := Note(nil, Issuers{"east", "r1", now.Add(16 * time.Hour)}, now)
	if !changed || len(all) != 1 || !all[0].Until.Equal(now.Add(17*time.Hour)) {
		t.Fatalf("%t %v", changed, all)
	}
	for _, again := range []time.Duration{time.Hour, 17 * time.Hour} {
		if same, changed := Note(all, Issuers{"east", "r1", now.Add(again)}, now); changed || !same[0].Until.Equal(now.Add(17*time.Hour)) {
			t.Errorf("%s: %t %v", again, changed, same)
		}
	}
	all, _ = Note(all, Issuers{"east", "r2", now.Add(time.Hour)}, now)
	all, _ = Note(all, Issuers{"west", "r1", now.Add(time.Hour)}, now)
	if got := Under(all, "r1", now); len(got) != 2 || len(Under(all, "r1", now.Add(17*time.Hour))) != 0 || len(Under(all, "r1", now.Add(2*time.Hour))) != 1 {
		t.Errorf("%v of %v", got, all)
	}
	later := now.Add(3 * time.Hour)
	if all, _ = Note(all, Issuers{"north", "r2", later.Add(time.Hour)}, later); len(all) != 2 {
		t.Errorf("what has ended is kept: %v", all)
	}
}
