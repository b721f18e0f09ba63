package handshakes

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/credentials"
)

// shaker is a handshake that computes for a while after each of two messages, and counts how many do at a time.
type shaker struct {
	credentials.TransportCredentials
	takes     time.Duration
	now, most atomic.Int64
	order     func(stage, name byte)
}

func (s *shaker) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	for stage := range byte(2) {
		p := make([]byte, 1)
		if _, err := io.ReadFull(c, p); err != nil {
			return nil, nil, err
		}
		now := s.now.Add(1)
		for most := s.most.Load(); now > most && !s.most.CompareAndSwap(most, now); most = s.most.Load() {
		}
		time.Sleep(s.takes)
		s.order(stage, p[0])
		s.now.Add(-1)
	}
	return c, nil, nil
}

// world is a bounded shaker and what it did.
type world struct {
	*shaker
	bound   credentials.TransportCredentials
	refused atomic.Int64

	mu   sync.Mutex // guards did
	did  []string
	wait sync.WaitGroup
}

func newWorld(c Config, takes time.Duration) *world {
	w := &world{}
	w.shaker = &shaker{takes: takes, order: func(stage, name byte) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.did = append(w.did, string([]byte{name, '1' + stage}))
	}}
	c.Refused = func() { w.refused.Add(1) }
	w.bound = Bound(w.shaker, c)
	return w
}

// shake has one side do a handshake and returns the other side.
func (w *world) shake(result *error) net.Conn {
	theirs, ours := net.Pipe()
	w.wait.Go(func() {
		_, _, err := w.bound.ServerHandshake(ours)
		ours.Close()
		if result != nil {
			*result = err
		}
	})
	return theirs
}

// No more are computed at a time than there are places, however many come, and all that come in time are.
func TestD19HandshakesAtOnceAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(Config{AtOnce: 3, MaxWait: time.Minute}, 10*time.Millisecond)
		begun := time.Now()
		for range 30 {
			c := w.shake(nil)
			w.wait.Go(func() { c.Write([]byte("ab")) })
		}
		w.wait.Wait()
		// 20 rounds of three; which of them come last may leave places free for the two steps of one.
		if n, took := w.most.Load(), time.Since(begun); n != 3 || took < 200*time.Millisecond || took > 220*time.Millisecond || len(w.did) != 60 {
			t.Errorf("%d at a time, %d steps, in %s; want 3, 60, 200ms to 220ms", n, len(w.did), took)
		}
	})
}

// Who connects and says nothing, or stops in the middle, takes no place.
func TestD19SilentConnectionsTakeNoPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(Config{AtOnce: 1}, time.Millisecond)
		var silent []net.Conn
		for i := range 20 {
			c := w.shake(nil)
			silent = append(silent, c)
			if i%2 == 0 {
				c.Write([]byte("s"))
			}
		}
		synctest.Wait()
		time.Sleep(time.Second)
		begun := time.Now()
		var err error
		c := w.shake(&err)
		c.Write([]byte("a"))
		c.Write([]byte("a"))
		synctest.Wait()
		time.Sleep(5 * time.Millisecond)
		synctest.Wait()
		if err != nil || w.did[len(w.did)-1] != "a2" {
			t.Errorf("after %s: %v, %v; want the whole handshake", time.Since(begun), err, w.did)
		}
		for _, c := range silent {
			c.Close()
		}
		w.wait.Wait()
		wantFree(t, w, 1)
	})
}

// wantFree checks that all places have been given back.
func wantFree(t *testing.T, w *world, places int) {
	t.Helper()
	if l := w.bound.(*bound).line; l.free != places || l.begun.Len()+l.new.Len() != 0 {
		t.Errorf("%d places are free, %d and %d wait; want %d, none, none", l.free, l.begun.Len(), l.new.Len(), places)
	}
}

// A handshake that was begun goes on before new ones are begun, and is never sent away; a new one is, when its time is over.
func TestD19WhatWasBegunComesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(Config{AtOnce: 1, MaxWait: 2 * time.Second}, 3*time.Second)
		errs := make([]error, 3)
		a := w.shake(&errs[0])
		a.Write([]byte("a"))
		synctest.Wait() // a computes
		b := w.shake(&errs[1])
		b.Write([]byte("b"))
		time.Sleep(1500 * time.Millisecond)
		c := w.shake(&errs[2])
		c.Write([]byte("c"))
		w.wait.Go(func() { a.Write([]byte("a")) })
		w.wait.Go(func() { c.Write([]byte("c")) })
		w.wait.Wait()
		if errs[0] != nil || !errors.Is(errs[1], errBusy) {
			t.Errorf("a ended with %v, b with %v; want none, and %v", errs[0], errs[1], errBusy)
		}
		if w.did[0] != "a1" || w.refused.Load() < 1 {
			t.Errorf("%v, %d refused", w.did, w.refused.Load())
		}
		wantFree(t, w, 1)
	})
}

// One that was begun is not sent away however long it waits, and goes before who came before.
func TestD19BegunBeforeNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &line{free: 1}
		l.enter(false, 0)
		got := make(chan string, 2)
		go func() {
			if l.enter(false, time.Hour) {
				got <- "new"
			}
		}()
		synctest.Wait()
		go func() {
			l.enter(true, time.Second)
			got <- "begun"
		}()
		synctest.Wait()
		time.Sleep(time.Minute)
		for _, want := range []string{"begun", "new"} {
			l.leave()
			if first := <-got; first != want {
				t.Errorf("%s comes first", first)
			}
		}
		l.leave()
		if l.free != 1 {
			t.Errorf("%d places are free; want 1", l.free)
		}
	})
}

// No place is held once a handshake has failed, and clones share the places.
func TestFailedHandshakesGiveTheirPlaceBack(t *testing.T) {
	w := newWorld(Config{AtOnce: 1}, 0)
	w.TransportCredentials = credentials.NewTLS(nil) // for Clone
	for range 3 {
		var err error
		c := w.shake(&err)
		c.Write([]byte("a"))
		c.Close()
		w.wait.Wait()
		if err == nil {
			t.Error("a connection that ended in its handshake is taken for one that stands")
		}
	}
	wantFree(t, w, 1)
	if w.bound.Clone().(*bound).line != w.bound.(*bound).line {
		t.Error("a clone has a bound of its own")
	}
}
