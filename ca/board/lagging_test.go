package board

import (
	"slices"
	"testing"
)

// TestLaggingAreThoseWhoDoNotSayThatTheyRead a format, those whom nobody has heard of included; who is not asked for does not count.
func TestLaggingAreThoseWhoDoNotSayThatTheyRead(t *testing.T) {
	notes := []Note{{Replica: "new", Format: 4}, {Replica: "newer", Format: 5}, {Replica: "old", Format: 3}, {Replica: "dead", Format: 1}}
	if got := Lagging([]string{"new", "newer", "old", "silent"}, notes, 4); !slices.Equal(got, []string{"old", "silent"}) {
		t.Error(got)
	}
	if got := Lagging([]string{"new", "newer"}, notes, 4); got != nil {
		t.Error(got)
	}
}
