package wake

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
)

func TestHub(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h Hub
		var woken [3]atomic.Int32
		waiters := make([]*Waiter, len(woken))
		first, second := make(chan struct{}), make(chan struct{})
		for i := range waiters {
			waiters[i] = &Waiter{Wake: func() { woken[i].Add(1) }}
			h.Wait(waiters[i], first)
		}
		check := func(what string, want ...int32) {
			t.Helper()
			synctest.Wait()
			for i := range woken {
				if got := woken[i].Load(); got != want[i] {
					t.Fatalf("%s: waiter %d was woken %d times; want %d", what, i, got, want[i])
				}
			}
		}
		h.Leave(waiters[0])
		h.Wait(waiters[1], second)
		check("nothing closed", 0, 0, 0)
		close(first)
		check("first closed", 0, 0, 1)
		h.Wait(waiters[2], first)
		check("waiting for what has been", 0, 0, 1)
		h.Wait(waiters[0], first)
		check("closed before the wait", 1, 0, 1)
		h.Wait(waiters[2], second)
		close(second)
		check("second closed", 1, 1, 2)
		third := make(chan struct{})
		h.Wait(waiters[1], third)
		h.Leave(waiters[1])
		h.Leave(waiters[1])
		close(third)
		check("third closed after the last left", 1, 1, 2)
		if len(h.groups) != 0 {
			t.Errorf("%d groups left", len(h.groups))
		}
	})
}
