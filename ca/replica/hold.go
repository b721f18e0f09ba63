// Package replica owns one server's hold on the authority document: the newest version that it knows, changes by
// compare-and-swap, the mark of what it has seen, its own entry among the replicas, and the lease of the one that drives.
//
// It refuses a document that goes back behind one that was seen (decision D9), and to drive without the lease. What is in a
// document it leaves to its owner, package authority. It is called when the document changes, never when a certificate is
// issued.
package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// How often a replica does what, and how long it waits.
const (
	pollEvery    = 10 * time.Second // the store is asked, though no watch has said anything
	loadTimeout  = 10 * time.Second
	writeTimeout = 20 * time.Second
	stopTime     = 5 * time.Second // that a write still has when who asked for it does not wait any more
	maxTries     = 30              // of a change that others come in between of
	firstPause   = 5 * time.Millisecond
	maxPause     = 500 * time.Millisecond
	downAfter    = 5 * time.Minute // without the store, an outage is an error in the log; until then a warning
)

// Errors that callers tell apart.
var (
	// ErrUnchanged is what a change returns that finds nothing to change: nothing is written, and that is no error.
	ErrUnchanged = errors.New("nothing to change")
	// ErrNotDriver: another replica drives, or none does at the moment.
	ErrNotDriver = errors.New("this replica does not drive changes now")
	// ErrRolledBack: the store has a document that is older than one that was seen, or another one in its place (decision D9).
	ErrRolledBack = errors.New("the authority document is not the one that was seen before")
)

// Config says whose hold it is, and on what.
type Config struct {
	Name     string // of this replica
	Domain   trust.Domain
	Store    store.Store
	Sealer   *keys.Sealer
	Logger   *slog.Logger
	Log      *audit.Log        // for Forget
	Mark     string            // file of the mark; empty: none is kept
	Issuance document.LogState // its issuance log; zero without one
}

// Hold is a replica's hold on the document.
type Hold struct {
	config   Config
	by       string // the name, and a word of this process: what two under one name write must differ, too
	snapshot atomic.Pointer[document.Document]
	fresh    atomic.Pointer[freshness]
	told     atomic.Pointer[told]
	stamp    atomic.Pointer[stamp] // see Mark
	lease    atomic.Pointer[lease]
	logID    atomic.Uint32
	beat     atomic.Int64  // when this process was last known to run, and
	woke     atomic.Int64  // since when it has slept and not asked the store; 0: it did not. In Unix nanoseconds; see awake
	changed  chan struct{} // see Changed
	wake     chan struct{} // see Wake
	driving  chan struct{} // see Driving

	unfit func() error // see OnDrive
	term  uint64       // in which this process drove last; 0: none. Of who calls TakeLease, as is
	rest  time.Time    // until which it does not try to drive

	// lock is held by who sends to it. It guards all below, and changes of snapshot; it is held over store calls, so that changes
	// come one after the other.
	lock   chan struct{}
	data   []byte // stored form of the document
	marked uint64 // version that the mark has
	first  bool   // see First; not changed after Open
	take   func(context.Context, *document.Document)
	wrote  func(ctx context.Context, before, after *document.Document)
}

// freshness says when the store last confirmed the document.
type freshness struct {
	confirmed time.Time
	why       error // of the last try; nil if it did
	back      error // ErrRolledBack, from when that was found until the store confirms the document
	loud      bool  // the log has it as an error
}

// Open loads the document, holds it to the mark, and registers this replica in it if it is not there yet.
func Open(ctx context.Context, c Config) (*Hold, error) {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	h := &Hold{config: c, by: fmt.Sprintf("%s %08x", c.Name, rand.Uint32()), changed: make(chan struct{}, 1), wake: make(chan struct{}, 1), driving: make(chan struct{}, 1), lock: make(chan struct{}, 1)}
	data, version, err := c.Store.Load(ctx)
	if errors.Is(err, store.ErrMissing) {
		return nil, fmt.Errorf("%w: run `chancery authority init -c FILE` once", err)
	} else if err != nil {
		return nil, err
	}
	doc, err := document.Decode(data, version, c.Sealer)
	if err != nil {
		return nil, err
	}
	h.config.Domain, _ = doc.Line(c.Domain) // what is authenticated by its name has that for ever
	if err := h.checkMark(doc, data); err != nil {
		return nil, err
	}
	h.data = data
	h.snapshot.Store(doc)
	h.fresh.Store(&freshness{confirmed: time.Now()})
	if err := h.putMark(); err != nil { // before the document lists us: from then on a missing mark is an error
		return nil, err
	}
	if err := h.register(ctx); err != nil {
		return nil, err
	}
	return h, nil
}

// OnTake sets what is called with each document that comes into use, one after the other, and with the one in use each time that
// the store confirmed it. The lock of changes is held meanwhile. It is called before Run.
func (h *Hold) OnTake(f func(context.Context, *document.Document)) { h.take = f }

// OnWrite sets what is called after each change of this replica's. It is called before Run.
func (h *Hold) OnWrite(f func(ctx context.Context, before, after *document.Document)) { h.wrote = f }

// First reports whether no process of this replica has worked by a document before this one, as its mark says: then it has signed nothing
// for anybody. Without a mark that is not known.
func (h *Hold) First() bool { return h.first }

// Replica returns this replica's name.
func (h *Hold) Replica() string { return h.config.Name }

// LogID returns the log ID that leads every serial of this replica.
func (h *Hold) LogID() uint32 { return h.logID.Load() }

// Document returns the document in use. Callers must not change it.
func (h *Hold) Document() *document.Document { return h.snapshot.Load() }

// Domain returns the name of the line of trust domains that was opened, by whichever of its names.
func (h *Hold) Domain() trust.Domain { return h.config.Domain }

// Changed is signalled after each change of the document, but for quiet ones of this replica.
func (h *Hold) Changed() <-chan struct{} { return h.changed }

// Fresh returns when the store last confirmed the document in use, and why it did not since; nil if the last try did. While it
// does not, issuing goes on, and nothing is changed.
func (h *Hold) Fresh() (confirmed time.Time, why error) {
	f := h.fresh.Load()
	return f.confirmed, f.why
}

// Err returns why this replica should not serve, whatever its issuer can do: its document may be an older one than others have
// seen, or its log is that of another server. A store that is down is no reason: see Fresh.
func (h *Hold) Err() error {
	if back := h.fresh.Load().back; back != nil {
		return back
	}
	if err := h.MaySign(); err != nil {
		return err
	}
	if err := h.behind(time.Now()); err != nil {
		return err
	}
	return h.Ours(h.Document())
}

// Ours returns an error if a document has this replica's log under another name: then two servers have copies of it, and their
// serials and logs are not told apart.
func (h *Hold) Ours(d *document.Document) error {
	own := d.Own(h.config.Name, h.config.Issuance.Key)
	if own != nil && own.Replica != h.config.Name && own.Replica != "" {
		return fmt.Errorf("replica %s runs with a copy of the issuance log of this replica, %s: give each server a log of its own", own.Replica, h.config.Name)
	}
	return nil
}

// register sees to it that the document lists this replica as alive, under its name.
func (h *Hold) register(ctx context.Context) error {
	doc, c := h.snapshot.Load(), h.config
	own := doc.Own(c.Name, c.Issuance.Key)
	if own != nil {
		if err := own.Check(c.Issuance); err != nil {
			return err
		}
		h.logID.Store(own.ID)
		if own.DeclaredDead == nil && own.Replica == c.Name {
			return nil
		}
	}
	have := c.Issuance
	if have.Key == "" {
		have.ID = h.LogID()
	}
	err := h.change(ctx, false, func(next *document.Document) error { return next.Register(c.Name, have) })
	if err != nil {
		return err
	}
	own = h.snapshot.Load().Own(c.Name, c.Issuance.Key)
	h.logID.Store(own.ID)
	c.Logger.Info("registered as a replica", "replica", c.Name, "log_id", own.ID)
	return nil
}

// Change has f change a copy of the newest document, and stores it as the next version. If somebody else was faster, f is called
// again with what they stored: it must do nothing but change the copy. It takes the lock of changes.
func (h *Hold) Change(ctx context.Context, f func(next *document.Document) error) error {
	if err := h.acquire(ctx); err != nil {
		return err
	}
	defer h.release()
	return h.change(ctx, false, f)
}

// ChangeQuietly is Change for what only its maker needs to know of: Changed is not signalled.
func (h *Hold) ChangeQuietly(ctx context.Context, f func(next *document.Document) error) error {
	if err := h.acquire(ctx); err != nil {
		return err
	}
	defer h.release()
	return h.change(ctx, true, f)
}

// acquire takes the lock of changes, unless ctx ends before.
func (h *Hold) acquire(ctx context.Context) error {
	select {
	case h.lock <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for another change of the authority document: %w", ctx.Err())
	}
}

func (h *Hold) release() { <-h.lock }

// change is Change for who holds the lock or is alone.
func (h *Hold) change(ctx context.Context, quiet bool, f func(next *document.Document) error) error {
	pause := firstPause
	for n := 1; ; n++ {
		before := h.snapshot.Load()
		next, err := before.Next(h.data)
		if err != nil {
			return err
		}
		next.By = h.by
		if err := f(next); err != nil {
			if n < maxTries && h.reload(ctx) == nil && h.snapshot.Load().Version > before.Version {
				continue // it may think otherwise of what is there now
			}
			if errors.Is(err, ErrUnchanged) {
				return nil
			}
			return err
		}
		next.NoteTaints(before)
		next.Format = next.Needs()
		if err = h.write(ctx, next, quiet); err == nil && h.wrote != nil {
			h.wrote(context.WithoutCancel(ctx), before, next)
		}
		if !errors.Is(err, store.ErrConflict) || n == maxTries {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(time.Duration(rand.Int64N(int64(pause)) + 1)):
		}
		pause = min(2*pause, maxPause)
	}
}

// Change is Hold.Change for who has no hold, and needs none: no mark is asked, and nobody is registered.
func Change(ctx context.Context, st store.Store, s *keys.Sealer, f func(next *document.Document) error) error {
	for n := 1; ; n++ {
		data, version, err := st.Load(ctx)
		if err != nil {
			return err
		}
		doc, err := document.Decode(data, version, s)
		if err != nil {
			return err
		}
		next, err := doc.Next(data)
		if err != nil {
			return err
		}
		if err := f(next); errors.Is(err, ErrUnchanged) {
			return nil
		} else if err != nil {
			return err
		}
		next.NoteTaints(doc)
		next.Format, next.By = next.Needs(), ""
		if data, err = next.Encode(s); err != nil {
			return err
		}
		if err := st.Replace(ctx, version, next.Version, data); !errors.Is(err, store.ErrConflict) || n == maxTries {
			return err
		}
	}
}

// lasting returns a context that ends after a time, and, where parent ends before, a while after that.
func lasting(parent context.Context, long time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(parent), long)
	stop := context.AfterFunc(parent, func() {
		timer := time.AfterFunc(stopTime, cancel)
		context.AfterFunc(ctx, func() { timer.Stop() })
	})
	return ctx, func() {
		stop()
		cancel()
	}
}

// write replaces the stored document by next, which follows the one in use. It is not cut off as soon as ctx ends: nobody would know
// whether it happened. If it fails, it looks. Caller holds the lock or is alone.
func (h *Hold) write(ctx context.Context, next *document.Document, quiet bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	lasts, end := lasting(ctx, writeTimeout+loadTimeout+time.Second) // no less than what it does
	defer end()
	ctx = context.WithoutCancel(ctx)
	data, err := next.Encode(h.config.Sealer)
	if err != nil {
		return err
	}
	if len(data) > store.MaxDocument {
		return fmt.Errorf("the authority document would have %d bytes; at most %d are stored", len(data), store.MaxDocument)
	}
	timed, cancel := context.WithTimeout(lasts, writeTimeout)
	defer cancel()
	begun := time.Now()
	err = h.config.Store.Replace(timed, h.snapshot.Load().Version, next.Version, data)
	if err == nil {
		h.adopt(ctx, next, data, quiet)
		h.confirm(begun, nil, false)
		return nil
	}
	if failed := h.reload(lasts); failed != nil {
		return fmt.Errorf("%w; and whether it happened is not known: %w", hidden{err}, failed)
	}
	if bytes.Equal(h.data, data) || h.snapshot.Load().Has(next.Version, document.Hash(data)) {
		return nil
	}
	return err
}

// hidden is an error that is no conflict to those who would try again at once.
type hidden struct{ error }

// adopt makes a document the one in use. Caller holds the lock or is alone.
func (h *Hold) adopt(ctx context.Context, next *document.Document, data []byte, quiet bool) {
	h.data = data
	h.snapshot.Store(next)
	h.caughtUp()
	if h.take != nil {
		h.take(ctx, next)
	}
	if err := h.putMark(); err != nil { // tried again at the next look at the store
		h.config.Logger.Error("the mark of the newest document seen is not written; an older one would not be noticed after a restart", "reason", err.Error())
	}
	if !quiet {
		signal(h.changed)
	}
}

// signal is for channels that hold one signal: who is told will see what comes until then, too.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// reload takes the stored document over, if it is newer. Caller holds the lock or is alone.
func (h *Hold) reload(ctx context.Context) error {
	timed, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	begun := time.Now()
	data, version, err := h.config.Store.Load(timed)
	if ctx.Err() != nil && err != nil {
		return err // the server stops: that says nothing of the store
	}
	var next *document.Document
	answered := err == nil
	if answered {
		next, err = h.newer(data, version)
	}
	if err == nil && next != nil {
		h.adopt(ctx, next, data, false)
	}
	h.confirm(begun, err, answered)
	return err
}

// newer returns the document that the store has; nil if it is the one in use. One that cannot follow is refused (decision D9).
func (h *Hold) newer(data []byte, version uint64) (*document.Document, error) {
	have := h.snapshot.Load()
	switch {
	case version < have.Version:
		return nil, rolledBack("the store has version %d, and this replica has seen version %d", version, have.Version)
	case version == have.Version && bytes.Equal(data, h.data):
		return nil, nil
	}
	next, err := document.Decode(data, version, h.config.Sealer)
	switch {
	case err != nil:
		return nil, err
	case version == have.Version:
		return nil, rolledBack("the store has another version %d than the one that this replica has seen", version)
	case !next.Follows(have.Version, document.Hash(h.data)):
		return nil, rolledBack("version %d in the store does not follow the version %d that this replica has seen", version, have.Version)
	}
	return next, nil
}

// CheckStored returns why what the store has cannot be the document in use, or follow it; nil if it can.
func (h *Hold) CheckStored(ctx context.Context, data []byte, version uint64) error {
	if err := h.acquire(ctx); err != nil {
		return err
	}
	defer h.release()
	_, err := h.newer(data, version)
	return err
}

// rolledBack is ErrRolledBack, with what was found and what to do.
func rolledBack(format string, args ...any) error {
	return fmt.Errorf("%w: %s. An older copy was put in its place, or the store lost what it had confirmed; "+
		"if the copy is to stand, `chancery state import` issues it again, above all that was seen", ErrRolledBack, fmt.Sprintf(format, args...))
}

// confirm notes what a look at the store gave that began at a time. A store that is away for a moment is a warning: nobody has to do anything. One that stays
// away is an error, as is at once what the store answered and we refuse.
func (h *Hold) confirm(begun time.Time, err error, answered bool) {
	defer h.asked(begun) // what is signed from then on is by what it gave
	was := h.fresh.Load()
	now := &freshness{confirmed: was.confirmed, why: err, back: was.back, loud: was.loud && err != nil}
	level := slog.LevelWarn
	if errors.Is(err, ErrRolledBack) {
		now.back = err
	}
	if err == nil {
		now.confirmed, now.back = begun, nil
	} else if answered || time.Since(now.confirmed) > downAfter {
		level = slog.LevelError
	}
	switch {
	case err != nil && (was.why == nil || level == slog.LevelError && !was.loud):
		now.loud = level == slog.LevelError
		h.config.Logger.Log(context.Background(), level, "the store does not confirm the authority document; issuing goes on with the last one, and nothing is changed",
			"confirmed", now.confirmed.UTC(), "reason", err.Error())
	case err == nil && was.why != nil:
		h.config.Logger.Info("the store confirms the authority document again", "version", h.snapshot.Load().Version)
	}
	h.fresh.Store(now)
}
