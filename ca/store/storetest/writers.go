package storetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/store"
)

// documentOf returns a document that says which version it is, in each part, so that a mix shows.
func documentOf(version uint64) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "version %020d;", version), 100+int(version%7)*400)
}

func manyCreate(t *testing.T, c Config) {
	all := open(t, c, 4)
	var mu sync.Mutex
	won := map[string]bool{}
	atOnce(12, func(i int) {
		text := fmt.Sprint("by ", i)
		switch err := all[i%len(all)].Create(context.WithoutCancel(t.Context()), uint64(i)+1, []byte(text)); {
		case err == nil:
			mu.Lock()
			won[text] = true
			mu.Unlock()
		case !errors.Is(err, store.ErrConflict):
			t.Error(err)
		}
	})
	if len(won) != 1 {
		t.Fatalf("%d created the document", len(won))
	}
	for _, s := range all {
		if data, v, err := s.Load(t.Context()); err != nil || !won[string(data)] || string(data) != fmt.Sprint("by ", v-1) {
			t.Errorf("version %d: %q, %v; %v won", v, data, err, won)
		}
	}
}

// entry is what a writer adds to the document.
type entry struct {
	Writer, N int
	Version   uint64
}

// History is a document, [] at first, to which writers add, each from its own handle, so that a lost update shows.
type History struct {
	// Patient is set where calls may fail for a while: a writer tries again until its context ends, and looks whether what failed
	// has happened.
	Patient bool

	mu   sync.Mutex
	told []entry // what was confirmed
}

// Write adds n entries by compare-and-swap, as often as it takes.
func (h *History) Write(ctx context.Context, s store.Document, writer, n int) error {
	for i := 0; i < n; {
		err := h.add(ctx, s, writer, i)
		switch {
		case err == nil:
			i++
		case errors.Is(err, store.ErrConflict):
		case !h.Patient || ctx.Err() != nil:
			return err
		default:
			select {
			case <-ctx.Done():
				return err
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	return nil
}

// add adds an entry, unless it is there: a try before, of which nothing is known, may have done it.
func (h *History) add(ctx context.Context, s store.Document, writer, n int) error {
	data, v, err := s.Load(ctx)
	if err != nil {
		return err
	}
	all, err := entries(data, v)
	if err != nil {
		return err
	}
	for _, e := range all {
		if e.Writer == writer && e.N == n {
			h.confirm(e)
			return nil
		}
	}
	added := entry{writer, n, v + 1}
	if data, err = json.Marshal(append(all, added)); err != nil {
		return err
	}
	if err := s.Replace(ctx, v, v+1, data); err != nil {
		return err
	}
	h.confirm(added)
	return nil
}

func (h *History) confirm(e entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.told = append(h.told, e)
}

func entries(data []byte, version uint64) (all []entry, err error) {
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, fmt.Errorf("version %d: %w", version, err)
	}
	if len(all) > 0 && all[len(all)-1].Version != version {
		return nil, fmt.Errorf("version %d ends with %+v", version, all[len(all)-1])
	}
	return all, nil
}

// Check says what of the document is not one history with all that was confirmed in it.
func (h *History) Check(ctx context.Context, s store.Document, first uint64) error {
	data, v, err := s.Load(ctx)
	if err != nil {
		return err
	}
	all, err := entries(data, v)
	if err != nil {
		return err
	}
	var wrong []error
	if want := first + uint64(len(all)); v != want {
		wrong = append(wrong, fmt.Errorf("%d entries since version %d, at version %d", len(all), first, v))
	}
	at, seen := map[uint64]entry{}, map[[2]int]bool{}
	for i, e := range all {
		if seen[[2]int{e.Writer, e.N}] {
			wrong = append(wrong, fmt.Errorf("%+v is there twice", e))
		}
		seen[[2]int{e.Writer, e.N}] = true
		if e.Version != first+1+uint64(i) {
			wrong = append(wrong, fmt.Errorf("entry %d is %+v", i, e))
		}
		at[e.Version] = e
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.told {
		if at[e.Version] != e {
			wrong = append(wrong, fmt.Errorf("%+v was confirmed, and version %d was made by %+v", e, e.Version, at[e.Version]))
		}
	}
	return errors.Join(wrong...)
}

// Confirmed returns how many changes were confirmed.
func (h *History) Confirmed() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.told)
}

func manyWriters(t *testing.T, c Config) {
	const writers, each = 8, 12
	all := open(t, c, 4)
	must(t, all[0].Create(t.Context(), 1<<32, []byte("[]")))
	var h History
	atOnce(writers, func(i int) {
		if err := h.Write(context.WithoutCancel(t.Context()), all[i%len(all)], i, each); err != nil {
			t.Error(err)
		}
	})
	if n := h.Confirmed(); n != writers*each {
		t.Errorf("%d changes were confirmed", n)
	}
	for _, s := range all {
		if err := h.Check(t.Context(), s, 1<<32); err != nil {
			t.Error(err)
		}
	}
}

// confirmed: who loads after a change was confirmed, by any handle, sees it, or a later one; and nobody sees a mix of two.
func confirmed(t *testing.T, c Config) {
	all := open(t, c, 4)
	const last = 60
	must(t, all[0].Create(t.Context(), 1, documentOf(1)))
	var mu sync.Mutex
	known := uint64(1)
	atOnce(len(all), func(i int) {
		for ctx := context.WithoutCancel(t.Context()); ; {
			mu.Lock()
			before := known
			mu.Unlock()
			data, v, err := all[i].Load(ctx)
			if err != nil || v < before || !bytes.Equal(data, documentOf(v)) {
				t.Errorf("version %d, %d bytes (%.40q), %v; version %d had been confirmed", v, len(data), data, err, before)
				return
			}
			if v == last {
				return
			}
			if i > 1 { // who only reads
				continue
			}
			if err := all[i].Replace(ctx, v, v+1, documentOf(v+1)); err == nil {
				mu.Lock()
				known = max(known, v+1)
				mu.Unlock()
			} else if !errors.Is(err, store.ErrConflict) {
				t.Error(err)
				return
			}
		}
	})
}
