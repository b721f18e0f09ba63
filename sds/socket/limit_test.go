package socket

import "testing"

func TestLimitCountsEachUserButRoot(t *testing.T) {
	l := &Limit{most: 2, conns: map[uint32]int{}}
	for range 2 {
		if err := l.enter(65534); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.enter(65534); err == nil {
		t.Error("a third connection of one user was let in")
	}
	for range 10 {
		if err := l.enter(0); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.enter(1337); err != nil {
		t.Errorf("another user was kept out: %v", err)
	}
	l.leave(65534)
	if err := l.enter(65534); err != nil {
		t.Errorf("after one left: %v", err)
	}
	l.leave(65534)
	l.leave(65534)
	l.leave(1337)
	l.leave(0)
	if len(l.conns) != 0 {
		t.Errorf("%v is left", l.conns)
	}
	if err := (*Limit)(nil).enter(1); err != nil {
		t.Errorf("no limit refused: %v", err)
	}
	if most := NewLimit().most; most < 1 || most > maxPerUser {
		t.Errorf("the limit is %d", most)
	}
}
