package replica

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/store"
)

// hung is a store that takes calls, and answers none while it is told to.
type hung struct {
	store.Store
	hangs atomic.Bool
}

func (s *hung) wait(ctx context.Context) error {
	if !s.hangs.Load() {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func (s *hung) Load(ctx context.Context) ([]byte, uint64, error) {
	if err := s.wait(ctx); err != nil {
		return nil, 0, err
	}
	return s.Store.Load(ctx)
}

func (s *hung) Replace(ctx context.Context, old, next uint64, data []byte) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	return s.Store.Replace(ctx, old, next, data)
}

func (s *hung) Hold(ctx context.Context, holder string, life time.Duration) (bool, string, error) {
	if err := s.wait(ctx); err != nil {
		return false, "", err
	}
	return s.Store.Hold(ctx, holder, life)
}

func (s *hung) GiveUp(ctx context.Context, holder string) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	return s.Store.GiveUp(ctx, holder)
}

// TestStoreThatHangs keeps nobody who only looks, and a server that is told to stop no longer than changes on their way are given.
func TestStoreThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		s := &hung{Store: w.store}
		w.store = s
		h := w.open(w.config("a"))
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { h.Run(ctx) })
		time.Sleep(time.Minute)
		if !h.Drives() {
			t.Fatal("it does not drive")
		}
		s.hangs.Store(true)
		var calls atomic.Int32
		for range 5 { // of the renewal, of CRLs, of admins: they wait for each other
			wg.Go(func() {
				err := h.Change(ctx, func(next *document.Document) error { calls.Add(1); return count(next) })
				if err == nil {
					t.Error("what cannot be stored was changed")
				}
			})
		}
		synctest.Wait()
		begun := time.Now()
		for range 12 {
			time.Sleep(time.Second)
			now := time.Now()
			h.Document()
			h.Fresh()
			h.Drives()
			h.Mark()
			if err := h.Err(); err != nil {
				t.Errorf("a store that hangs is no reason not to serve: %v", err)
			}
			if time.Since(now) != 0 {
				t.Error("who only looks waits for the store")
			}
		}
		if time.Sleep(loadTimeout + writeTimeout - 11*time.Second); h.Drives() { // the next change is on its way
			t.Error("it drives without a lease")
		}
		if _, why := h.Fresh(); !errors.Is(why, context.DeadlineExceeded) {
			t.Errorf("after %s nothing is said of the store: %v", time.Since(begun), why)
		}
		told := time.Now()
		cancel()
		wg.Wait()
		if took := time.Since(told); took > stopTime+2*time.Second {
			t.Errorf("to stop took %s", took)
		}
		if n := calls.Load(); n == 5 {
			t.Error("changes were begun that nobody waited for any more")
		}
		s.hangs.Store(false)
		doc, _ := w.stored()
		again := w.open(w.config("a"))
		if err := again.Change(t.Context(), count); err != nil || doc.State(td).CRLNumber != 0 {
			t.Error(err, doc.State(td).CRLNumber)
		}
	})
}

// TestRolledBackStaysSo: a store that was rolled back is no better for being out of reach as well.
func TestRolledBackStaysSo(t *testing.T) {
	w := newWorld(t)
	f := &faulty{Store: w.store}
	w.store = f
	h := w.open(w.config("a"))
	old, version, err := w.store.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Change(t.Context(), count); err != nil {
		t.Fatal(err)
	}
	good := f.Store
	f.set(func() { f.Store = &older{good, old, version} })
	if h.Follow(t.Context()); !errors.Is(h.Err(), ErrRolledBack) {
		t.Fatalf("got %v", h.Err())
	}
	down := errors.New("the store is down")
	f.set(func() { f.load = down })
	h.Follow(t.Context())
	if _, why := h.Fresh(); !errors.Is(why, down) || !errors.Is(h.Err(), ErrRolledBack) {
		t.Errorf("the store: %v; may it serve: %v", why, h.Err())
	}
	f.set(func() { f.load, f.Store = nil, good })
	if h.Follow(t.Context()); h.Err() != nil {
		t.Errorf("the store has the right one again: %v", h.Err())
	}
}

// older is a store whose document was put back.
type older struct {
	store.Store
	data    []byte
	version uint64
}

func (o *older) Load(context.Context) ([]byte, uint64, error) { return o.data, o.version, nil }
