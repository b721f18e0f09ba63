package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/store"
)

// watcher is a running Watch. It loads after each call, as its users do.
type watcher struct {
	s    store.Store
	news chan struct{}
	done chan error
	stop context.CancelFunc
}

func watching(t *testing.T, s store.Store) *watcher {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	w := &watcher{s: s, news: make(chan struct{}, 1), done: make(chan error, 1), stop: stop}
	go func() {
		w.done <- s.Watch(ctx, func() {
			select {
			case w.news <- struct{}{}:
			default:
			}
		})
	}()
	t.Cleanup(stop)
	return w
}

// sees waits until, after a call, the store is as told. Without a call it never looks.
func (w *watcher) sees(t *testing.T, what string, ok func() (bool, error)) {
	t.Helper()
	deadline, end := time.After(patience), time.Now().Add(patience)
	var last error
	for {
		select {
		case <-w.news:
		case err := <-w.done:
			t.Fatalf("%s: Watch ended with %v", what, err)
		case <-deadline:
			t.Fatalf("%s: Watch has not told of it after %s; %v", what, patience, last)
		}
		var done bool
		for done, last = ok(); last != nil && time.Now().Before(end); done, last = ok() { // as a user does: it was told, so it looks
			time.Sleep(10 * time.Millisecond)
		}
		if done {
			return
		}
	}
}

func (w *watcher) seesVersion(t *testing.T, version uint64) {
	t.Helper()
	w.sees(t, fmt.Sprintf("version %d", version), func() (bool, error) {
		_, v, err := w.s.Load(t.Context())
		return v >= version, err
	})
}

func (w *watcher) seesNote(t *testing.T, replica, text string) {
	t.Helper()
	w.sees(t, fmt.Sprintf("note %q of %s", text, replica), func() (bool, error) {
		all, err := w.s.Notes(t.Context())
		return string(all[replica]) == text, err
	})
}

func watch(t *testing.T, c Config) {
	all := open(t, c, 3)
	own, other, ctx := all[0], all[1], t.Context()
	w := watching(t, own)
	idle := watching(t, all[2]) // a second one, which changes nothing
	<-w.news                    // it has begun: from here on each change is told of by itself
	<-idle.news
	must(t, own.Create(ctx, 1, []byte("one")))
	w.seesVersion(t, 1)
	idle.seesVersion(t, 1)
	must(t, other.Replace(ctx, 1, 2, []byte("two")))
	w.seesVersion(t, 2)
	idle.seesVersion(t, 2)
	must(t, own.Replace(ctx, 2, 3, []byte("three")))
	w.seesVersion(t, 3)
	idle.seesVersion(t, 3)
	must(t, other.PutNote(ctx, "a", []byte("by other")))
	w.seesNote(t, "a", "by other")
	must(t, own.PutNote(ctx, "b", []byte("by own")))
	w.seesNote(t, "b", "by own")
	must(t, other.PutNote(ctx, "a", []byte("again")))
	w.seesNote(t, "a", "again")
	must(t, other.DropNote(ctx, "a"))
	w.seesNote(t, "a", "")
	idle.seesNote(t, "b", "by own")
	for v := uint64(3); v < 20; v++ {
		must(t, all[v%3].Replace(ctx, v, v+1, documentOf(v+1)))
	}
	w.seesVersion(t, 20)
	idle.seesVersion(t, 20)

	w.stop()
	if err := ended("Watch", func() error { return <-w.done }); err != nil {
		t.Errorf("with its context Watch ended with %v", err)
	}
	must(t, other.Replace(ctx, 20, 21, documentOf(21)))
	idle.seesVersion(t, 21) // the other one goes on
	again := watching(t, own)
	again.seesVersion(t, 21) // what was changed while nobody watched
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := ended("Watch", func() error { return own.Watch(ctx, func() {}) }); err != nil {
		t.Errorf("with a context that had ended Watch gave %v", err)
	}
}

// slowWatcher: what changes while changed is at work is told of after it; it holds nobody up, and is not called twice at a time.
func slowWatcher(t *testing.T, c Config) {
	all := open(t, c, 2)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	in, out, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- all[0].Watch(ctx, func() {
			select {
			case in <- struct{}{}:
			case <-ctx.Done():
				return
			}
			select {
			case <-out:
			case <-ctx.Done():
			}
		})
	}()
	<-in // it is at work now
	must(t, all[1].Create(ctx, 1, documentOf(1)))
	for v := uint64(1); v < 10; v++ {
		must(t, all[1].Replace(ctx, v, v+1, documentOf(v+1)))
		holds(t, all[0], v+1, documentOf(v+1))
	}
	select {
	case <-in:
		t.Error("changed was called while it was at work")
	default:
	}
	out <- struct{}{}
	select {
	case <-in:
	case <-time.After(patience):
		t.Error("what changed meanwhile was not told of")
	}
	stop()
	if err := ended("Watch", func() error { return <-done }); err != nil {
		t.Errorf("Watch gave %v", err)
	}
}

func endedContext(t *testing.T, c Config) {
	s := open(t, c, 1)[0]
	cancelled, stop := context.WithCancel(t.Context())
	stop()
	late, stop := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer stop()
	for name, call := range calls(s) {
		for _, ctx := range []context.Context{cancelled, late} {
			err := ended(name, func() error { return call(ctx) })
			refused(t, c, name+" with an ended context", err, ctx.Err())
		}
	}
	_, _, err := s.Load(t.Context())
	refused(t, c, "loading after calls that ended before they began", err, store.ErrMissing)
	hasNotes(t, s, nil)
	holding(t, s, "y", time.Minute, "y")
}

func closed(t *testing.T, c Config) {
	all := open(t, c, 2)
	s := all[0]
	must(t, s.Create(t.Context(), 1, []byte("one")))
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	}
	for name, call := range calls(s) {
		refused(t, c, name+" after Close", ended(name, func() error { return call(t.Context()) }), store.ErrClosed)
	}
	refused(t, c, "Watch after Close", ended("Watch", func() error { return s.Watch(t.Context(), func() {}) }), store.ErrClosed)
	if !c.Alone {
		holds(t, all[1], 1, []byte("one")) // the other's is open
	}
}

// closeEnds: Close ends Watch, and calls that are at work.
func closeEnds(t *testing.T, c Config) {
	s := open(t, c, 1)[0]
	must(t, s.Create(t.Context(), 1, documentOf(1)))
	w := watching(t, s)
	<-w.news
	busy := make(chan error, 8)
	started := make(chan struct{}, 8)
	for range cap(busy) {
		go func() {
			for first := true; ; first = false {
				_, _, err := s.Load(t.Context())
				if first {
					started <- struct{}{}
				}
				if err != nil {
					busy <- err
					return
				}
			}
		}()
	}
	for range cap(busy) {
		<-started
	}
	must(t, ended("Close", s.Close))
	for range cap(busy) {
		refused(t, c, "loading while it is closed", ended("Load", func() error { return <-busy }), store.ErrClosed)
	}
	refused(t, c, "Watch while it is closed", ended("Watch", func() error { return <-w.done }), store.ErrClosed)
}

// cutOff: while its connection is cut a handle's calls fail, and with it again they work; what was changed meanwhile is told of.
func cutOff(t *testing.T, c Config) {
	if c.Cut == nil {
		t.Skip("this store has no connection")
	}
	over, s, other := c.Cut(t)
	t.Cleanup(func() { s.Close(); other.Close() })
	must(t, other.Create(t.Context(), 1, []byte("one")))
	w := watching(t, s)
	w.seesVersion(t, 1)
	for round := range uint64(3) {
		at := 2*round + 1
		over.Cut()
		for name, call := range calls(s) {
			ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
			refused(t, c, name+" while cut off", ended(name, func() error { return call(ctx) }), nil)
			stop()
		}
		must(t, other.Replace(t.Context(), at, at+1, []byte("while cut off")))
		over.Mend()
		w.seesVersion(t, at+1)
		must(t, other.Replace(t.Context(), at+1, at+2, []byte("afterwards")))
		w.seesVersion(t, at+2)
		eventually(t, "calls work again", func() (bool, error) {
			err := s.PutNote(t.Context(), "a", fmt.Append(nil, round))
			return err == nil, err
		})
	}
	w.stop()
	must(t, ended("Watch", func() error { return <-w.done }))
}

// hang: while nothing comes through a connection, calls end with their context, and Close ends.
func hang(t *testing.T, c Config) {
	if c.Cut == nil {
		t.Skip("this store has no connection")
	}
	over, s, other := c.Cut(t)
	t.Cleanup(func() { over.Mend(); s.Close(); other.Close() })
	must(t, other.Create(t.Context(), 1, []byte("one")))
	w := watching(t, s)
	w.seesVersion(t, 1)
	over.Hang()
	for name, call := range calls(s) {
		ctx, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
		err := ended(name, func() error { return call(ctx) })
		if stop(); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s while it hangs gave %v", name, err)
		}
		refused(t, c, name+" while it hangs", err, nil)
	}
	data, v, err := other.Load(t.Context()) // calls that were given up may happen, or not
	if must(t, err); v != 1 && v != 2 {
		t.Fatalf("version %d", v)
	}
	must(t, other.Replace(t.Context(), v, 3, data))
	over.Mend()
	w.seesVersion(t, 3)
	eventually(t, "calls work again", func() (bool, error) {
		err := s.PutNote(t.Context(), "a", []byte("again"))
		return err == nil, err
	})
	over.Hang()
	must(t, ended("Close", s.Close))
	refused(t, c, "Watch while it is closed", ended("Watch", func() error { return <-w.done }), store.ErrClosed)
}
