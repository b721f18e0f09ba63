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
)

// TestPausedDriverThatWakesWritesNothing: it was paused for longer than its lease, another one drives, and whatever it believes,
// the document keeps it from writing. One whose clock stood still meanwhile believes that it has the lease.
func TestPausedDriverThatWakesWritesNothing(t *testing.T) {
	for name, clockStood := range map[string]bool{"its clock went on": false, "its clock stood still": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				a, b := w.open(w.config("a")), w.open(w.config("b"))
				if !a.TakeLease(t.Context()) || b.TakeLease(t.Context()) {
					t.Fatal("the first one should drive")
				}
				if err := a.Drive(t.Context(), count); err != nil {
					t.Fatal(err)
				}
				time.Sleep(leaseLife + time.Second) // a is paused
				if clockStood {
					l := *a.lease.Load()
					l.until = time.Now().Add(leaseLife)
					a.lease.Store(&l)
				}
				if !b.TakeLease(t.Context()) {
					t.Fatal("nobody drives")
				}
				if err := b.Drive(t.Context(), count); err != nil {
					t.Fatal(err)
				}
				before, _ := w.stored()
				if a.Document().Version >= before.Version {
					t.Fatal("the paused one knows of what happened")
				}
				for range 2 {
					if err := a.Drive(t.Context(), count); !errors.Is(err, ErrNotDriver) {
						t.Errorf("the paused one wrote: %v", err)
					}
				}
				if after, _ := w.stored(); after.Version != before.Version || a.Drives() || *after.Driver != (document.Driver{Replica: "b", Term: 2}) {
					t.Errorf("version %d became %d, driver %+v; a believes that it drives: %v", before.Version, after.Version, after.Driver, a.Drives())
				}
				if clockStood && a.Document().Version != before.Version {
					t.Error("it did not learn by the conflict")
				}
				if !b.Drives() || a.TakeLease(t.Context()) {
					t.Error("the lease went back")
				}
			})
		})
	}
}

// TestPausedBeforeItsTerm: a replica that got the lease and is paused before it wrote itself into the document does not do so once
// the lease is another's.
func TestPausedBeforeItsTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b := w.open(w.config("a")), w.open(w.config("b"))
		until := time.Now().Add(leaseLife)
		time.Sleep(leaseLife + time.Second)
		if !b.TakeLease(t.Context()) {
			t.Fatal("nobody drives")
		}
		if err := a.beginTerm(t.Context(), until); !errors.Is(err, ErrNotDriver) {
			t.Errorf("got %v", err)
		}
		if doc, _ := w.stored(); doc.Driver.Replica != "b" || !b.Drives() {
			t.Errorf("driver %+v", doc.Driver)
		}
	})
}

// TestLeaseGoesOn: at once if its holder ends, after its life if it dies; one replica drives at a time, each in a term of its own.
func TestLeaseGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		holds := map[string]*Hold{}
		stop := map[string]context.CancelFunc{}
		for _, name := range []string{"a", "b", "c"} {
			h := w.open(w.config(name))
			ctx, cancel := context.WithCancel(t.Context())
			holds[name], stop[name] = h, cancel
			go h.Run(ctx)
			time.Sleep(100 * time.Millisecond)
		}
		driver := func() (one *Hold) {
			t.Helper()
			for _, h := range holds {
				if h.Drives() && one != nil {
					t.Fatalf("%s and %s drive", h.Replica(), one.Replica())
				} else if h.Drives() {
					one = h
				}
			}
			if one == nil {
				t.Fatal("nobody drives")
			}
			return one
		}
		first := driver()
		if first.Replica() != "a" {
			t.Errorf("%s drives", first.Replica())
		}
		select {
		case <-first.Driving():
		default:
			t.Error("it is not told that it drives")
		}
		for range 600 {
			time.Sleep(time.Second)
			if driver() != first {
				t.Fatal("the lease moved while its holder lives")
			}
		}
		stop["a"]() // it ends, and gives it up
		time.Sleep(leaseEvery * 12 / 10)
		second := driver()
		if second == first || second.Document().Driver.Term != 2 {
			t.Errorf("%s drives, in term %d", second.Replica(), second.Document().Driver.Term)
		}
		// The next one dies: it gives nothing up.
		second.lease.Store(nil)
		stop[second.Replica()]()
		delete(holds, second.Replica())
		time.Sleep(leaseLife + leaseEvery*12/10)
		if third := driver(); third == second || third.Document().Driver.Term != 3 {
			t.Errorf("%s drives, in term %d", third.Replica(), third.Document().Driver.Term)
		}
	})
}

// TestSameReplicaAgain: a start of the same name takes a new term, so that what is left of the one before does not drive beside it.
func TestSameReplicaAgain(t *testing.T) {
	w := newWorld(t)
	before := w.open(w.config("a"))
	if !before.TakeLease(t.Context()) {
		t.Fatal("it does not drive")
	}
	after := w.open(w.config("a"))
	if !after.TakeLease(t.Context()) {
		t.Fatal("it does not drive")
	}
	if err := before.Drive(t.Context(), count); !errors.Is(err, ErrNotDriver) {
		t.Errorf("got %v", err)
	}
	if err := after.Drive(t.Context(), count); err != nil {
		t.Error(err)
	}
}

// TestTwoUnderOneNameDoNotTakeTurns: a process that was paused, and meanwhile started again elsewhere, leaves the term to the new one for
// minutes; each term is a version of the document.
func TestTwoUnderOneNameDoNotTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		before, after := w.open(w.config("a")), w.open(w.config("a"))
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for _, h := range []*Hold{before, after} {
			wg.Go(func() { h.Run(ctx) })
			time.Sleep(time.Second)
		}
		time.Sleep(10 * time.Minute)
		doc, _ := w.stored()
		if doc.Driver.Term > 6 {
			t.Errorf("in ten minutes they took %d terms", doc.Driver.Term)
		}
		if before.Drives() && after.Drives() {
			t.Error("both drive")
		}
		cancel()
		wg.Wait()
	})
}

// TestDriverThatCannotLeavesItToOthers: to those that can. Where there is none, it takes the lease again, in the same term, so that
// nothing is written.
func TestDriverThatCannotLeavesItToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b := w.open(w.config("a")), w.open(w.config("b"))
		var broken atomic.Bool
		a.OnDrive(func() error {
			if broken.Load() {
				return errors.New("its key cannot be opened")
			}
			return nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { a.Run(ctx) })
		time.Sleep(time.Minute)
		if !a.Drives() {
			t.Fatal("it does not drive")
		}
		before, _ := w.stored()
		broken.Store(true)
		for range 600 { // b is listed, and is down
			time.Sleep(time.Second)
		}
		if now, _ := w.stored(); now.Version != before.Version {
			t.Errorf("version %d became %d by nobody who drives", before.Version, now.Version)
		}
		wg.Go(func() { b.Run(ctx) })
		time.Sleep(standBack + 2*leaseEvery)
		if !b.Drives() || a.Drives() {
			t.Errorf("a, which cannot, drives: %v; b, which can: %v", a.Drives(), b.Drives())
		}
		broken.Store(false)
		time.Sleep(2 * standBack)
		if !b.Drives() || a.Drives() {
			t.Error("the lease went back though its holder lives")
		}
		cancel()
		wg.Wait()
	})
}

// TestAloneItDrivesWhateverIsWrong: there is nobody to leave it to.
func TestAloneItDrivesWhateverIsWrong(t *testing.T) {
	w := newWorld(t)
	h := w.open(w.config("a"))
	h.OnDrive(func() error { return errors.New("its key cannot be opened") })
	for range 3 {
		if !h.TakeLease(t.Context()) {
			t.Fatal("it does not drive")
		}
	}
}
