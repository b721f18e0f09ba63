// Package storetest owns the contract of stores: a suite that the tests of every implementation run, against the real engine,
// and a connection that can be cut. It is imported by tests only.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/store"
)

// Config says what the suite may expect.
type Config struct {
	// New makes an empty store, of its own for each test, and returns what opens it: each time another handle on the same one, as
	// another process would have it. The suite closes the handles.
	New func(t *testing.T) (open func(t *testing.T) store.Store)
	// Alone is set for a store that one process holds: one handle at a time is opened.
	Alone bool
	// MaxDocument and MaxNote are the most bytes that the engine takes. Default: store.MaxDocument, store.MaxNote.
	MaxDocument, MaxNote int
	// Name is what each error says: which store it was. A part of it that is the same for all that New makes.
	Name string
	// Cut makes an empty store and opens two handles on it; the connections of the first can be cut. Nil where there are none.
	Cut func(t *testing.T) (over *Proxy, first, second store.Store)
}

// patience is how long something may take that should happen. Nothing waits for that long where all is well.
const patience = 60 * time.Second

// Run runs the suite.
func Run(t *testing.T, c Config) {
	if c.MaxDocument == 0 {
		c.MaxDocument = store.MaxDocument
	}
	if c.MaxNote == 0 {
		c.MaxNote = store.MaxNote
	}
	for _, part := range []struct {
		name string
		run  func(*testing.T, Config)
	}{
		{"document", document}, {"versions", versions}, {"content", content}, {"largest document", largest}, {"reopen", reopen},
		{"many create", manyCreate}, {"many writers", manyWriters}, {"what is confirmed is seen", confirmed},
		{"notes", notes}, {"bounds of notes", boundsOfNotes}, {"many notes", manyNotes},
		{"lease", lease}, {"lease that ends", leaseEnds}, {"lease under contention", leaseContention}, {"bounds of a lease", boundsOfLease},
		{"watch", watch}, {"slow watcher", slowWatcher}, {"ended context", endedContext}, {"closed", closed}, {"close ends what waits", closeEnds},
		{"cut", cutOff}, {"hang", hang},
	} {
		t.Run(part.name, func(t *testing.T) { part.run(t, c) })
	}
}

// open opens n handles on a new store, or one time n the same where there can be one only.
func open(t *testing.T, c Config, n int) []store.Store {
	t.Helper()
	opener := c.New(t)
	all := make([]store.Store, n)
	for i := range all {
		if i > 0 && c.Alone {
			all[i] = all[0]
			continue
		}
		s := opener(t)
		t.Cleanup(func() { s.Close() })
		all[i] = s
	}
	return all
}

// must fails the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// holds fails the test unless a store holds a document as given.
func holds(t *testing.T, s store.Document, version uint64, data []byte) {
	t.Helper()
	got, v, err := s.Load(t.Context())
	if err != nil || v != version || !bytes.Equal(got, data) {
		t.Fatalf("got version %d, %d bytes (%.40q), %v; want version %d, %d bytes (%.40q)", v, len(got), got, err, version, len(data), data)
	}
}

// refused fails the test unless an error names the store, and is want, or none of those that callers tell apart if want is nil.
func refused(t *testing.T, c Config, what string, err, want error) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), c.Name) || want != nil && !errors.Is(err, want) {
		t.Errorf("%s gave %v; want %v, naming %s", what, err, want, c.Name)
		return
	}
	for _, special := range []error{store.ErrMissing, store.ErrConflict, store.ErrLocked, store.ErrClosed} {
		if want == nil && errors.Is(err, special) {
			t.Errorf("%s gave %v, which is also %q", what, err, special)
		}
	}
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() (bool, error)) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		done, err := ok()
		if done {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s; %v", what, patience, err)
		}
	}
}

func document(t *testing.T, c Config) {
	all := open(t, c, 2)
	s, other, ctx := all[0], all[1], t.Context()
	_, _, err := s.Load(ctx)
	refused(t, c, "loading from an empty store", err, store.ErrMissing)
	refused(t, c, "replacing nothing", s.Replace(ctx, 1, 2, []byte("x")), store.ErrConflict)
	_, _, err = s.Load(ctx)
	refused(t, c, "loading from a store that is still empty", err, store.ErrMissing)
	must(t, s.Create(ctx, 1, []byte("one")))
	holds(t, other, 1, []byte("one"))
	refused(t, c, "creating twice", other.Create(ctx, 1, []byte("other")), store.ErrConflict)
	refused(t, c, "creating twice, above", other.Create(ctx, 2, []byte("other")), store.ErrConflict)
	must(t, other.Replace(ctx, 1, 2, []byte("two")))
	holds(t, s, 2, []byte("two"))
	refused(t, c, "replacing an old version", s.Replace(ctx, 1, 2, []byte("late")), store.ErrConflict)
	refused(t, c, "replacing an old version, above", s.Replace(ctx, 1, 3, []byte("late")), store.ErrConflict)
	refused(t, c, "replacing a version that is not there yet", s.Replace(ctx, 3, 4, []byte("early")), store.ErrConflict)
	for _, h := range all {
		holds(t, h, 2, []byte("two"))
	}
}

func versions(t *testing.T, c Config) {
	s, ctx := open(t, c, 1)[0], t.Context()
	for _, bad := range []uint64{0, store.MaxVersion + 1, 1 << 63, 1<<64 - 1} {
		refused(t, c, fmt.Sprintf("creating version %d", bad), s.Create(ctx, bad, []byte("x")), nil)
	}
	_, _, err := s.Load(ctx)
	refused(t, c, "loading from an empty store", err, store.ErrMissing)
	at := uint64(7)
	must(t, s.Create(ctx, at, documentOf(at)))
	for _, next := range []uint64{8, 1<<32 - 1, 1 << 32, 1<<32 + 1, 5<<32 + 9, 1<<53 + 1, store.MaxVersion - 1, store.MaxVersion} { // 1<<53 + 1: no float holds it
		for _, bad := range []uint64{0, at - 1, at, store.MaxVersion + 1, 1<<64 - 1} {
			refused(t, c, fmt.Sprintf("version %d after %d", bad, at), s.Replace(ctx, at, bad, []byte("x")), nil)
		}
		must(t, s.Replace(ctx, at, next, documentOf(next)))
		at = next
		holds(t, s, at, documentOf(at))
	}
}

func content(t *testing.T, c Config) {
	s, ctx := open(t, c, 1)[0], t.Context()
	var each []byte
	for i := range 256 {
		each = append(each, byte(i), 0, byte(255-i))
	}
	own := bytes.Clone(each)
	must(t, s.Create(ctx, 1, own))
	clear(own) // what a store is given remains its giver's
	holds(t, s, 1, each)
	got, _, err := s.Load(ctx)
	must(t, err)
	clear(got) // and the other way round
	holds(t, s, 1, each)
	for i, data := range [][]byte{{0}, []byte(`\x00`), []byte("\r\n"), []byte("\xff\xfe\x80"), []byte(`'"%s$1`), {}, nil, each} {
		v := uint64(i) + 2
		must(t, s.Replace(ctx, v-1, v, data))
		holds(t, s, v, data)
	}
}

func largest(t *testing.T, c Config) {
	all := open(t, c, 2)
	s, ctx := all[0], t.Context()
	data := make([]byte, c.MaxDocument+1)
	x := uint32(1)
	for i := range data { // that no engine can compress
		x ^= x << 13
		x ^= x >> 17
		x ^= x << 5
		data[i] = byte(x >> 11)
	}
	refused(t, c, "creating more than fits", s.Create(ctx, 1, data), nil)
	must(t, s.Create(ctx, 1, data[:c.MaxDocument]))
	holds(t, all[1], 1, data[:c.MaxDocument])
	must(t, s.Replace(ctx, 1, 2, data[1:]))
	holds(t, all[1], 2, data[1:])
	refused(t, c, "replacing by more than fits", s.Replace(ctx, 2, 3, data), nil)
	holds(t, s, 2, data[1:])
}

func reopen(t *testing.T, c Config) {
	opener, ctx := c.New(t), t.Context()
	first := opener(t)
	must(t, first.Create(ctx, 3, []byte("three")))
	must(t, first.PutNote(ctx, "a", []byte("note")))
	held, _, err := first.Hold(ctx, "a", time.Minute)
	if must(t, err); !held {
		t.Error("a free lease was not given")
	}
	must(t, first.Close())
	again := opener(t)
	defer again.Close()
	holds(t, again, 3, []byte("three"))
	if all, err := again.Notes(ctx); err != nil || len(all) != 1 || string(all["a"]) != "note" {
		t.Errorf("notes: %q, %v", all, err)
	}
	want := "a" // Close does not give it up
	if c.Alone {
		want = "b" // who had it had the store
	}
	if held, by, err := again.Hold(ctx, "b", time.Minute); held != c.Alone || by != want || err != nil {
		t.Errorf("the lease: %t, by %q, %v; want it by %q", held, by, err, want)
	}
}

// ended returns what a call gave, or an error if it has not ended after a time.
func ended(what string, call func() error) error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		return fmt.Errorf("%s has not ended after %s", what, patience)
	}
}

// calls are all methods that take a context and end by themselves.
func calls(s store.Store) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"Load":     func(ctx context.Context) error { _, _, err := s.Load(ctx); return err },
		"Create":   func(ctx context.Context) error { return s.Create(ctx, 1, []byte("x")) },
		"Replace":  func(ctx context.Context) error { return s.Replace(ctx, 1, 2, []byte("x")) },
		"Hold":     func(ctx context.Context) error { _, _, err := s.Hold(ctx, "x", time.Minute); return err },
		"GiveUp":   func(ctx context.Context) error { return s.GiveUp(ctx, "x") },
		"PutNote":  func(ctx context.Context) error { return s.PutNote(ctx, "x", []byte("x")) },
		"Notes":    func(ctx context.Context) error { _, err := s.Notes(ctx); return err },
		"DropNote": func(ctx context.Context) error { return s.DropNote(ctx, "x") },
	}
}

// atOnce calls f with 0 to n-1 at the same time, and waits for all.
func atOnce(n int, f func(int)) {
	start, done := make(chan struct{}), make(chan struct{})
	for i := range n {
		go func() {
			<-start
			f(i)
			done <- struct{}{}
		}()
	}
	close(start)
	for range n {
		<-done
	}
}
