package storetest

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/store"
)

// hasNotes fails the test unless a store has these notes and no others.
func hasNotes(t *testing.T, s store.Notes, want map[string]string) {
	t.Helper()
	all, err := s.Notes(t.Context())
	if must(t, err); len(all) != len(want) {
		t.Fatalf("%d notes; want %d", len(all), len(want))
	}
	for name, text := range want {
		if got, ok := all[name]; !ok || string(got) != text {
			t.Errorf("the note of %.40s is %.40q (%t); want %.40q", name, got, ok, text)
		}
	}
}

func notes(t *testing.T, c Config) {
	all := open(t, c, 2)
	a, b, ctx := all[0], all[1], t.Context()
	hasNotes(t, a, nil)
	must(t, a.DropNote(ctx, "a"))
	own := []byte("by a")
	must(t, a.PutNote(ctx, "a", own))
	clear(own)
	hasNotes(t, b, map[string]string{"a": "by a"})
	must(t, b.PutNote(ctx, "b", []byte("by b \x00\xff\\x")))
	must(t, a.PutNote(ctx, "a", []byte("again by a")))
	want := map[string]string{"a": "again by a", "b": "by b \x00\xff\\x"}
	hasNotes(t, a, want)
	hasNotes(t, b, want)
	got, err := a.Notes(ctx)
	must(t, err)
	clear(got["a"])
	hasNotes(t, a, want)
	// They have nothing to do with the document.
	_, _, err = a.Load(ctx)
	refused(t, c, "loading from a store with notes only", err, store.ErrMissing)
	must(t, a.Create(ctx, 1, []byte("one")))
	must(t, b.PutNote(ctx, "b", nil))
	want["b"] = ""
	hasNotes(t, a, want)
	holds(t, a, 1, []byte("one"))
	for range 2 {
		must(t, a.DropNote(ctx, "b"))
		hasNotes(t, b, map[string]string{"a": "again by a"})
	}
	must(t, a.PutNote(ctx, "b", []byte("back")))
	hasNotes(t, b, map[string]string{"a": "again by a", "b": "back"})
}

var (
	goodNames = []string{"a", "0", "a-b.c--d", "host-1.example", "xn--a", strings.Repeat("a", store.MaxName), "document", "lease", "note"}
	badNames  = []string{"", "A", "a_b", "-a", "a-", ".a", "a.", "a/b", "../a", "a b", "a\x00", "ä", "%41", strings.Repeat("a", store.MaxName+1)}
)

func boundsOfNotes(t *testing.T, c Config) {
	all := open(t, c, 2)
	s, ctx := all[0], t.Context()
	want := map[string]string{}
	for _, name := range goodNames {
		must(t, s.PutNote(ctx, name, []byte("of "+name)))
		want[name] = "of " + name
	}
	for _, name := range badNames {
		refused(t, c, fmt.Sprintf("a note of %q", name), s.PutNote(ctx, name, []byte("x")), nil)
	}
	largest := bytes.Repeat([]byte("\xff\x00ab"), c.MaxNote/4+1)[:c.MaxNote]
	must(t, s.PutNote(ctx, "a", largest))
	want["a"] = string(largest)
	refused(t, c, "too large a note", s.PutNote(ctx, "a", append(largest, 0)), nil)
	hasNotes(t, all[1], want)
}

func manyNotes(t *testing.T, c Config) {
	all := open(t, c, 4)
	ctx := context.WithoutCancel(t.Context())
	want := map[string]string{}
	for i := range store.MaxNotes - 2 {
		want[fmt.Sprint("replica-", i)] = fmt.Sprint("note ", i)
	}
	atOnce(len(all), func(w int) {
		for i := w; i < store.MaxNotes-2; i += len(all) {
			if err := all[w].PutNote(ctx, fmt.Sprint("replica-", i), fmt.Append(nil, "note ", i)); err != nil {
				t.Error(err)
			}
		}
	})
	hasNotes(t, all[0], want)
	for _, name := range []string{"last-1", "last-2"} {
		must(t, all[0].PutNote(ctx, name, []byte(name)))
		want[name] = name
	}
	refused(t, c, "one note too many", all[1].PutNote(ctx, "one-more", []byte("x")), nil)
	must(t, all[1].PutNote(ctx, "replica-7", []byte("again"))) // one that is there is no more
	want["replica-7"] = "again"
	hasNotes(t, all[2], want)
	must(t, all[2].DropNote(ctx, "replica-8"))
	delete(want, "replica-8")
	must(t, all[3].PutNote(ctx, "one-more", []byte("x")))
	want["one-more"] = "x"
	hasNotes(t, all[0], want)
}

// holding fails the test unless a call of Hold gives what is wanted.
func holding(t *testing.T, s store.Lease, holder string, life time.Duration, wantBy string) {
	t.Helper()
	held, by, err := s.Hold(t.Context(), holder, life)
	if must(t, err); held != (wantBy == holder) || by != wantBy {
		t.Fatalf("%s asked and got %t, held by %q; want %q", holder, held, by, wantBy)
	}
}

func lease(t *testing.T, c Config) {
	all := open(t, c, 2)
	a, b, ctx := all[0], all[1], t.Context()
	must(t, a.GiveUp(ctx, "a")) // nobody has it
	holding(t, a, "a", time.Minute, "a")
	holding(t, b, "b", time.Minute, "a")
	holding(t, a, "a", time.Minute, "a")
	must(t, b.GiveUp(ctx, "b")) // it is not his
	holding(t, b, "b", time.Minute, "a")
	must(t, a.GiveUp(ctx, "a"))
	must(t, a.GiveUp(ctx, "a"))
	holding(t, b, "b", time.Minute, "b") // at once
	holding(t, a, "a", time.Minute, "b")
	// It goes by the name: after a restart a replica has it still.
	holding(t, a, "b", time.Minute, "b")
	must(t, b.GiveUp(ctx, "b"))
	for _, name := range goodNames {
		holding(t, a, name, time.Minute, name)
		must(t, b.GiveUp(ctx, name))
	}
}

// leaseEnds: a lease that is not kept goes to who asks, no sooner than its time is over; who had it learns that. One that is
// kept does not.
func leaseEnds(t *testing.T, c Config) {
	all := open(t, c, 2)
	a, b := all[0], all[1]
	const life = time.Second
	began := time.Now()
	holding(t, a, "a", time.Minute, "a")
	holding(t, a, "a", life, "a") // from now on, also if it was to last longer
	eventually(t, "b has the lease", func() (bool, error) {
		held, by, err := b.Hold(t.Context(), "b", time.Minute)
		if err == nil && !held && by != "a" {
			t.Fatalf("it is held by %q", by)
		}
		return held, err
	})
	if took := time.Since(began); took < life {
		t.Errorf("b took over after %s", took)
	}
	holding(t, a, "a", life, "b")
	must(t, a.GiveUp(t.Context(), "a")) // what he does not have any more
	holding(t, a, "a", life, "b")
	must(t, b.GiveUp(t.Context(), "b"))

	holding(t, a, "a", life, "a")
	holding(t, a, "a", time.Minute, "a")
	for end := time.Now().Add(life + life/2); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		holding(t, b, "b", time.Minute, "a")
	}
}

// leaseContention: of all who ask at the same moment one has it, and all others hear who.
func leaseContention(t *testing.T, c Config) {
	const askers = 12
	all := open(t, c, 4)
	ctx := context.WithoutCancel(t.Context())
	for round := range 4 {
		var mu sync.Mutex
		winners, told := map[string]bool{}, map[string]bool{}
		atOnce(askers, func(i int) {
			name := fmt.Sprint("asker-", i)
			held, by, err := all[i%len(all)].Hold(ctx, name, time.Minute)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if told[by] = true; held {
				winners[name] = true
			}
		})
		if len(winners) != 1 || !maps.Equal(winners, told) {
			t.Fatalf("round %d: held by %v; told was %v", round, winners, told)
		}
		for name := range winners {
			if round%2 == 0 {
				must(t, all[0].GiveUp(ctx, name))
				continue
			}
			// The next round is about one whose time is over.
			holding(t, all[0], name, time.Second, name)
			eventually(t, "the lease is free", func() (bool, error) {
				held, _, err := all[1].Hold(ctx, "next", time.Second)
				return held, err
			})
			must(t, all[1].GiveUp(ctx, "next"))
		}
	}
}

func boundsOfLease(t *testing.T, c Config) {
	s, ctx := open(t, c, 1)[0], t.Context()
	for _, name := range badNames {
		_, _, err := s.Hold(ctx, name, time.Minute)
		refused(t, c, fmt.Sprintf("a lease for %q", name), err, nil)
	}
	for _, life := range []time.Duration{-time.Minute, 0, time.Millisecond, time.Second - 1, time.Minute + 1, time.Hour, 1<<63 - 1} {
		_, _, err := s.Hold(ctx, "a", life)
		refused(t, c, fmt.Sprintf("a lease of %s", life), err, nil)
	}
	holding(t, s, "b", time.Minute, "b") // nobody got it
}
