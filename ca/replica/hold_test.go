package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

// world is one store, for several replicas. They share a database that is opened once: its methods are safe for concurrent use.
type world struct {
	t      testing.TB
	dir    string
	store  store.Store
	sealer *keys.Sealer
}

func newWorld(t testing.TB) *world {
	t.Helper()
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	w := &world{t, dir, st, must(keys.CreateSealer(filepath.Join(dir, "state.key")))}
	doc := document.New()
	doc.State(td)
	if err := st.Create(t.Context(), doc.Version, must(doc.Encode(w.sealer))); err != nil {
		t.Fatal(err)
	}
	return w
}

// config is that of a replica without an issuance log.
func (w *world) config(name string) Config {
	return Config{Name: name, Domain: td, Store: w.store, Sealer: w.sealer, Mark: filepath.Join(w.dir, name+".mark"), Logger: slog.New(slog.NewTextHandler(w.t.Output(), nil))}
}

func (w *world) open(c Config) *Hold {
	w.t.Helper()
	h, err := Open(w.t.Context(), c)
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

// count is a change that counts.
func count(next *document.Document) error {
	next.State(td).CRLNumber++
	return nil
}

// stored is the document in the store.
func (w *world) stored() (*document.Document, []byte) {
	w.t.Helper()
	data, version, err := w.store.Load(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return must(document.Decode(data, version, w.sealer)), data
}

// history is a store that keeps all that was stored, for who wants to see that it is one line.
type history struct {
	store.Store
	mu   sync.Mutex // guards data
	data [][]byte
}

func (h *history) Replace(ctx context.Context, old, next uint64, data []byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := h.Store.Replace(ctx, old, next, data)
	if err == nil {
		h.data = append(h.data, bytes.Clone(data))
	}
	return err
}

// linear fails the test unless each version follows the one before.
func (h *history) linear(t testing.TB, first []byte, s *keys.Sealer, version uint64) {
	t.Helper()
	last := first
	for _, data := range h.data {
		version++
		d, err := document.Decode(data, version, s)
		if err != nil {
			t.Fatal(err)
		}
		if d.Previous != document.Hash(last) {
			t.Errorf("version %d does not follow the one before", version)
		}
		last = data
	}
}

// TestNothingIsLostWhenSeveralChange: each change that was confirmed is there, on one line of versions.
func TestNothingIsLostWhenSeveralChange(t *testing.T) {
	w := newWorld(t)
	h := &history{Store: w.store}
	_, first := w.stored()
	w.store = h
	const replicas, each = 4, 15
	var wg sync.WaitGroup
	for i := range replicas {
		hold := w.open(w.config(fmt.Sprintf("r%d", i)))
		wg.Go(func() {
			for range each {
				if err := hold.Change(t.Context(), count); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	doc, _ := w.stored()
	if n := doc.State(td).CRLNumber; n != replicas*each {
		t.Errorf("%d of %d changes are there", n, replicas*each)
	}
	if len(doc.Live()) != replicas || doc.Version != 1+replicas+replicas*each {
		t.Errorf("version %d, replicas %+v", doc.Version, doc.Logs)
	}
	h.linear(t, first, w.sealer, 1)
}

// TestChangeSeesTheNewestDocument, not the one that the replica had; an error of the change writes nothing.
func TestChangeSeesTheNewestDocument(t *testing.T) {
	w := newWorld(t)
	a, b := w.open(w.config("a")), w.open(w.config("b"))
	if err := b.Change(t.Context(), count); err != nil {
		t.Fatal(err)
	}
	var seen []uint64
	if err := a.Change(t.Context(), func(next *document.Document) error {
		seen = append(seen, next.State(td).CRLNumber)
		return count(next)
	}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(seen, []uint64{0, 1}) || a.Document().State(td).CRLNumber != 2 {
		t.Errorf("the change saw %v and left %d", seen, a.Document().State(td).CRLNumber)
	}
	version := a.Document().Version
	no := errors.New("no")
	if err := a.Change(t.Context(), func(*document.Document) error { return no }); !errors.Is(err, no) {
		t.Error(err)
	}
	if err := a.Change(t.Context(), func(*document.Document) error { return ErrUnchanged }); err != nil {
		t.Error(err)
	}
	if doc, _ := w.stored(); doc.Version != version {
		t.Errorf("version %d became %d by changes that change nothing", version, doc.Version)
	}
}

// faulty is a store that fails as it is told.
type faulty struct {
	store.Store
	mu      sync.Mutex // guards all below
	load    error
	replace error
	done    bool // though it fails, the change is made
	after   func()
}

func (f *faulty) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *faulty) Load(ctx context.Context) ([]byte, uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.load != nil {
		return nil, 0, f.load
	}
	return f.Store.Load(ctx)
}

func (f *faulty) Replace(ctx context.Context, old, next uint64, data []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.replace == nil {
		return f.Store.Replace(ctx, old, next, data)
	}
	if f.done {
		if err := f.Store.Replace(ctx, old, next, data); err != nil {
			return err
		}
		if f.after != nil {
			f.after()
		}
	}
	return f.replace
}

// TestWriteThatFailedAndHappened is recognised, also if another replica has changed the document since. One that did not happen is
// an error, and of one of which nobody can know the next change finds out.
func TestWriteThatFailedAndHappened(t *testing.T) {
	w := newWorld(t)
	b := w.open(w.config("b"))
	f := &faulty{Store: w.store}
	w.store = f
	a := w.open(w.config("a"))
	lost := errors.New("the connection was lost")
	number := func() uint64 { d, _ := w.stored(); return d.State(td).CRLNumber }

	f.set(func() { f.replace = lost })
	if err := a.Change(t.Context(), count); !errors.Is(err, lost) || number() != 0 {
		t.Errorf("what did not happen: %v, %d", err, number())
	}
	f.set(func() { f.done = true })
	if err := a.Change(t.Context(), count); err != nil || number() != 1 {
		t.Errorf("what happened: %v, %d", err, number())
	}
	f.set(func() {
		f.after = func() {
			if err := b.Change(t.Context(), count); err != nil {
				t.Error(err)
			}
		}
	})
	if err := a.Change(t.Context(), count); err != nil || number() != 3 {
		t.Errorf("what happened, before another's change: %v, %d", err, number())
	}
	f.set(func() {
		f.after = func() {
			for range 3 {
				if err := b.Change(t.Context(), count); err != nil {
					t.Error(err)
				}
			}
		}
	})
	if err := a.Change(t.Context(), count); err != nil || number() != 7 {
		t.Errorf("what happened, before several changes of another: %v, %d", err, number())
	}
	f.set(func() { f.after, f.load = nil, lost })
	if err := a.Change(t.Context(), count); !errors.Is(err, lost) || !strings.Contains(err.Error(), "whether it happened is not known") || errors.Is(err, store.ErrConflict) {
		t.Errorf("what nobody knows: %v", err)
	}
	f.set(func() { f.replace, f.load = nil, nil })
	if err := a.Change(t.Context(), count); err != nil || number() != 8 { // the same change of the same document: it has happened
		t.Errorf("the next one: %v, %d", err, number())
	}
	if err := a.Change(t.Context(), count); err != nil || number() != 9 {
		t.Errorf("the one after: %v, %d", err, number())
	}
}

// TestSameChangeUnderOneName: of two processes under one name, as one that was paused and started again elsewhere, neither takes what the
// other wrote for its own.
func TestSameChangeUnderOneName(t *testing.T) {
	w := newWorld(t)
	before, after := w.open(w.config("a")), w.open(w.config("a"))
	for _, h := range []*Hold{before, after} {
		if err := h.Change(t.Context(), count); err != nil {
			t.Fatal(err)
		}
	}
	if doc, _ := w.stored(); doc.State(td).CRLNumber != 2 {
		t.Errorf("two numbers were taken, and the document has %d", doc.State(td).CRLNumber)
	}
}

// TestFollowsWhatOthersChange: soon after it is woken, and by itself within seconds.
func TestFollowsWhatOthersChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b := w.open(w.config("a")), w.open(w.config("b"))
		taken := uint64(0)
		b.OnTake(func(_ context.Context, d *document.Document) { taken = d.Version })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- b.Run(ctx) }()
		time.Sleep(time.Second)
		drain(b)
		if err := a.Change(t.Context(), count); err != nil {
			t.Fatal(err)
		}
		b.Wake()
		synctest.Wait()
		if v := a.Document().Version; b.Document().Version != v || taken != v {
			t.Errorf("woken, it has version %d (told %d), not %d", b.Document().Version, taken, v)
		}
		select {
		case <-b.Changed():
		default:
			t.Error("nobody is told of the change")
		}
		if err := a.Change(t.Context(), count); err != nil {
			t.Fatal(err)
		}
		time.Sleep(pollEvery * 11 / 10)
		synctest.Wait()
		if b.Document().Version != a.Document().Version {
			t.Error("not woken, it does not follow")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func drain(h *Hold) {
	select {
	case <-h.Changed():
	default:
	}
}

// TestOutageInTheLog: a store that is away for a moment is a warning, one that stays away an error, and each is said once.
func TestOutageInTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		f := &faulty{Store: w.store}
		w.store = f
		var out lines
		c := w.config("a")
		c.Logger = slog.New(slog.NewTextHandler(&out, nil))
		h := w.open(c)
		go h.Run(t.Context())
		down := errors.New("the store is down")
		for _, c := range []struct {
			off    time.Duration
			levels string
		}{{3 * pollEvery, "WARN INFO"}, {time.Hour, "WARN ERROR INFO"}, {2 * pollEvery, "WARN INFO"}} {
			time.Sleep(time.Minute)
			out.take()
			f.set(func() { f.load, f.replace = down, down })
			time.Sleep(c.off)
			f.set(func() { f.load, f.replace = nil, nil })
			time.Sleep(time.Minute)
			var levels []string
			for line := range strings.Lines(out.take()) {
				if _, after, found := strings.Cut(line, "level="); found && strings.Contains(line, "authority document") {
					level, _, _ := strings.Cut(after, " ")
					levels = append(levels, level)
				}
			}
			if got := strings.Join(levels, " "); got != c.levels {
				t.Errorf("off for %s: %s; should be %s", c.off, got, c.levels)
			}
		}
	})
}

// lines keeps what is logged.
type lines struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// take returns what was logged since the last call.
func (l *lines) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.text.Reset()
	return l.text.String()
}

// TestStoreThatIsDown: the document stays, Fresh says since when and why, nothing is changed, and it comes back by itself. It is no
// reason to stop serving.
func TestStoreThatIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		f := &faulty{Store: w.store}
		w.store = f
		h := w.open(w.config("a"))
		go h.Run(t.Context())
		time.Sleep(time.Minute)
		if at, why := h.Fresh(); why != nil || time.Since(at) > pollEvery*11/10 {
			t.Errorf("confirmed at %s, %v", at, why)
		}
		down := errors.New("the store is down")
		f.set(func() { f.load, f.replace = down, down })
		began, before := time.Now(), h.Document()
		time.Sleep(time.Hour)
		at, why := h.Fresh()
		if !errors.Is(why, down) || at.After(began) || began.Sub(at) > pollEvery*11/10 {
			t.Errorf("confirmed at %s, %v", at, why)
		}
		if err := h.Change(t.Context(), count); !errors.Is(err, down) {
			t.Errorf("a change: %v", err)
		}
		if h.Document() != before || h.Err() != nil {
			t.Errorf("the document changed, or it should not serve: %v", h.Err())
		}
		f.set(func() { f.load, f.replace = nil, nil })
		time.Sleep(pollEvery * 11 / 10)
		if at, why := h.Fresh(); why != nil || at.Before(began) {
			t.Errorf("after it is back: confirmed at %s, %v", at, why)
		}
		if err := h.Change(t.Context(), count); err != nil {
			t.Error(err)
		}
	})
}
