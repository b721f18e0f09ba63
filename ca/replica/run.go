package replica

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/chancery-project/chancery/ca/document"
)

// This file follows the store, and keeps the lease. The lease keeps two replicas from doing the same work. What keeps a holder
// from writing that was paused, and does not know that another took over, is the document: who takes the lease writes itself into
// it as the driver, with a term of its own, and whoever drives changes that very document, or learns by the conflict.

const (
	leaseLife  = 15 * time.Second
	leaseEvery = 5 * time.Second
	// standBack is for how long a replica leaves the lease to others that could make use of it, and twinRest for how long it does so
	// for another process that drives under its name.
	standBack = time.Minute
	twinRest  = 3 * time.Minute
)

// lease is what this replica knows of its lease.
type lease struct {
	until time.Time
	term  uint64 // in which it drives; 0: it has not taken a term yet
}

// Run follows the store and tries to have the lease, until ctx ends. Then it gives the lease up.
func (h *Hold) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { h.keepLease(ctx) })
	wg.Go(func() { h.keepPulse(ctx) })
	for {
		timer := time.NewTimer(about(pollEvery))
		select {
		case <-ctx.Done():
			timer.Stop()
			wg.Wait()
			return nil
		case <-h.wake:
		case <-timer.C:
		}
		timer.Stop()
		h.Follow(ctx)
	}
}

// about returns a duration near d, so that replicas do not do the same in step.
func about(d time.Duration) time.Duration { return d*9/10 + rand.N(d/5) }

// Wake has Run look at the store soon.
func (h *Hold) Wake() { signal(h.wake) }

// Follow looks at the store once and takes over what is new. What is wrong Fresh and Err tell.
func (h *Hold) Follow(ctx context.Context) {
	if h.acquire(ctx) != nil {
		return
	}
	defer h.release()
	was := h.snapshot.Load()
	failed := h.reload(ctx)
	if h.snapshot.Load() == was && h.take != nil {
		h.take(ctx, was) // what did not work then may work now, store or not
	}
	if failed != nil {
		return
	}
	if err := h.putMark(); err == nil && h.Ours(h.snapshot.Load()) == nil {
		err = h.register(ctx) // somebody may have declared us dead
		if err != nil {
			h.config.Logger.Error("this replica is not registered in the authority document", "reason", err.Error())
		}
	}
}

// Driving is signalled when this replica begins to drive.
func (h *Hold) Driving() <-chan struct{} { return h.driving }

// Drives reports whether this replica drives changes now. Drive holds each change to it again.
func (h *Hold) Drives() bool { return h.mayDrive(h.Document()) == nil }

func (h *Hold) mayDrive(d *document.Document) error {
	l := h.lease.Load()
	switch {
	case d.Driver == nil || l == nil || l.term == 0:
		return ErrNotDriver
	case *d.Driver != document.Driver{Replica: h.config.Name, Term: l.term}:
		return fmt.Errorf("%w: %s does", ErrNotDriver, d.Driver.Replica)
	case !time.Now().Before(l.until):
		return ErrNotDriver
	}
	return nil
}

// Drive is Change for changes that only the driver makes: ErrNotDriver if the document that f would change, or the lease, is
// another's.
func (h *Hold) Drive(ctx context.Context, f func(next *document.Document) error) error {
	return h.Change(ctx, func(next *document.Document) error {
		if err := h.mayDrive(next); err != nil {
			return err
		}
		return f(next)
	})
}

func (h *Hold) keepLease(ctx context.Context) {
	for {
		h.TakeLease(ctx)
		timer := time.NewTimer(about(leaseEvery))
		select {
		case <-ctx.Done():
			timer.Stop()
			h.giveUp(context.WithoutCancel(ctx))
			return
		case <-timer.C:
		}
	}
}

// OnDrive sets what says why this replica could do nothing if it drove, as where it cannot open a key; nil if it could. Where there are
// others, it leaves the lease to them for a while. It is called before Run.
func (h *Hold) OnDrive(unfit func() error) { h.unfit = unfit }

// TakeLease tries once to have the lease, or to keep it, and reports whether this replica drives. Run calls it again and again.
func (h *Hold) TakeLease(ctx context.Context) bool {
	if h.Err() != nil { // it could change nothing, and others may
		h.giveUp(ctx)
		return false
	}
	if !h.mayTry(ctx) {
		return false
	}
	timed, cancel := context.WithTimeout(ctx, leaseEvery)
	defer cancel()
	begun := time.Now()
	held, by, err := h.config.Store.Hold(timed, h.config.Name, leaseLife)
	was := h.lease.Load()
	switch {
	case err != nil: // the lease ends by itself
		h.config.Logger.Debug("lease not taken", "reason", err.Error())
		return h.Drives()
	case !held:
		if h.lease.Store(nil); was != nil {
			h.config.Logger.Info("another replica drives changes", "replica", by)
		}
		return false
	}
	now := &lease{until: begun.Add(leaseLife)}
	if d := h.Document().Driver; d != nil && d.Replica == h.config.Name && h.term != 0 && d.Term >= h.term {
		if d.Term > h.term {
			h.leaveToTwin()
			return false
		}
		now.term = h.term // nobody has driven since, whoever had the lease
	}
	if h.lease.Store(now); h.Drives() {
		if was == nil {
			signal(h.driving)
		}
		return true
	}
	h.term = 0
	if err := h.beginTerm(ctx, now.until); err != nil {
		h.config.Logger.Warn("this replica has the lease, and does not drive changes yet", "reason", err.Error())
	}
	return h.Drives()
}

// mayTry reports whether to try to have the lease: not while it is left to others.
func (h *Hold) mayTry(ctx context.Context) bool {
	if time.Now().Before(h.rest) {
		return false
	}
	if h.lease.Load() == nil || h.unfit == nil || len(h.Document().Live()) <= 1 {
		return true
	}
	why := h.unfit()
	if why != nil {
		h.config.Logger.Warn("this replica cannot drive changes to any use; another one may for now", "reason", why.Error())
		h.rest = time.Now().Add(standBack)
		h.giveUp(ctx)
	}
	return why == nil
}

// leaveToTwin is for when another process drives under this replica's name, as one that was started while this one was paused: each
// would take the term from the other. The lease in the store is its own, too.
func (h *Hold) leaveToTwin() {
	h.lease.Store(nil)
	h.term, h.rest = 0, time.Now().Add(twinRest)
	h.config.Logger.Error("another process drives changes under the name of this replica: each needs a name of its own (state.replica)", "replica", h.config.Name)
}

// beginTerm writes this replica into the document as the driver, if it still has the lease by then.
func (h *Hold) beginTerm(ctx context.Context, until time.Time) error {
	var term uint64
	err := h.Change(ctx, func(next *document.Document) error {
		if !time.Now().Before(until) {
			return ErrNotDriver
		}
		term = 1
		if next.Driver != nil {
			term = next.Driver.Term + 1
		}
		next.Driver = &document.Driver{Replica: h.config.Name, Term: term}
		return nil
	})
	if err != nil {
		return err
	}
	h.term = term
	h.lease.Store(&lease{until, term})
	h.config.Logger.Info("this replica drives changes", "replica", h.config.Name, "term", term)
	signal(h.driving)
	return nil
}

// giveUp lets another drive at once.
func (h *Hold) giveUp(ctx context.Context) {
	if h.lease.Swap(nil) == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := h.config.Store.GiveUp(ctx, h.config.Name); err != nil {
		h.config.Logger.Warn("the lease was not given up; it ends by itself", "reason", err.Error())
	}
}
