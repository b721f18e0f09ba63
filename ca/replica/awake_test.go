package replica

import (
	"errors"
	"testing"
	"time"
)

// TestD4WokenReplicaAsksFirst: a process that did not run for a while signs nothing before it has asked the store, as it may have been
// declared dead and its root retired meanwhile. What was asked before it fell asleep is not enough; a store that is away is.
func TestD4WokenReplicaAsksFirst(t *testing.T) {
	w := newWorld(t)
	s := &hung{Store: w.store}
	w.store = s
	a, b := w.open(w.config("a")), w.open(w.config("b"))
	sleep := func() (woken time.Time) {
		t.Helper()
		a.beat.Store(time.Now().Add(-doze - time.Second).UnixNano())
		if err := a.MaySign(); !errors.Is(err, ErrWoken) {
			t.Errorf("before anybody has noticed: %v", err)
		}
		woken = time.Now()
		a.pulse(woken)
		a.pulse(woken.Add(time.Second))
		if err := a.MaySign(); !errors.Is(err, ErrWoken) {
			t.Errorf("awake, and it has not asked: %v", err)
		}
		return woken
	}
	a.pulse(time.Now())
	if err := a.MaySign(); err != nil {
		t.Fatal(err)
	}
	woken := sleep()
	if err := b.Change(t.Context(), count); err != nil {
		t.Fatal(err)
	}
	a.confirm(woken.Add(-time.Second), nil, true) // an answer of before
	if err := a.MaySign(); !errors.Is(err, ErrWoken) || time.Since(a.fresh.Load().confirmed) < time.Second {
		t.Errorf("an answer of before has come: %v; confirmed at %s", err, a.fresh.Load().confirmed)
	}
	a.Follow(t.Context())
	if err := a.MaySign(); err != nil || a.Document().Version != b.Document().Version {
		t.Errorf("it has asked: %v; version %d of %d", err, a.Document().Version, b.Document().Version)
	}
	sleep()
	f := &faulty{Store: s.Store}
	a.config.Store = f
	f.set(func() { f.load = errors.New("the store is away") })
	a.Follow(t.Context())
	if err := a.MaySign(); err != nil {
		t.Errorf("the store is away: %v", err)
	}
}
