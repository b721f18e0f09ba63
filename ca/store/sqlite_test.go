package store

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func create(t *testing.T, path string) *SQLite {
	t.Helper()
	s, err := CreateSQLite(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestLoadCreateReplace(t *testing.T) {
	s := create(t, filepath.Join(t.TempDir(), "state.db"))
	ctx := t.Context()
	if _, _, err := s.Load(ctx); !errors.Is(err, ErrMissing) {
		t.Errorf("loading from an empty store gave %v", err)
	}
	if err := s.Replace(ctx, 1, 2, []byte("x")); !errors.Is(err, ErrConflict) {
		t.Errorf("replacing nothing gave %v", err)
	}
	if err := s.Create(ctx, 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	if err := s.Create(ctx, 1, []byte("other")); !errors.Is(err, ErrConflict) {
		t.Errorf("creating twice gave %v", err)
	}
	if err := s.Replace(ctx, 1, 2, []byte("two")); err != nil {
		t.Fatal(err)
	}
	if err := s.Replace(ctx, 1, 2, []byte("late")); !errors.Is(err, ErrConflict) {
		t.Errorf("replacing an old version gave %v", err)
	}
	if data, v, err := s.Load(ctx); string(data) != "two" || v != 2 || err != nil {
		t.Errorf("loaded %q, version %d, %v", data, v, err)
	}
}

func TestOneOfManyWritersWins(t *testing.T) {
	s := create(t, filepath.Join(t.TempDir(), "state.db"))
	if err := s.Create(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	won := 0
	for range 20 {
		wg.Go(func() {
			if err := s.Replace(t.Context(), 1, 2, []byte("x")); err == nil {
				mu.Lock()
				won++
				mu.Unlock()
			} else if !errors.Is(err, ErrConflict) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won != 1 {
		t.Errorf("%d writers won", won)
	}
}

func TestInvariant11OpenDoesNotCreate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	if _, err := OpenSQLite(t.Context(), path); !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("opening made a file")
	}
}

func TestSecondProcessIsKeptOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s := create(t, path)
	if _, err := OpenSQLite(t.Context(), path); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), "pid ") {
		t.Errorf("a second opener got %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := OpenSQLite(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
	for _, f := range []string{path, path + ".lock"} {
		if info, err := os.Stat(f); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v, %v", f, info.Mode(), err)
		}
	}
}

func TestNotADatabase(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	if err := os.WriteFile(path, []byte(strings.Repeat("not a database ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenSQLite(t.Context(), path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
}

var _ Store = (*SQLite)(nil)

// TestLeaseWritesNothing: a server keeps its lease every few seconds for as long as it runs, and a disk that rests should rest.
func TestLeaseWritesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s := create(t, path)
	before := looks(path)
	for range 3 {
		if held, _, err := s.Hold(t.Context(), "a", time.Minute); !held || err != nil {
			t.Fatal(held, err)
		}
	}
	if err := s.GiveUp(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if after := looks(path); after != before || before[1].size == 0 {
		t.Errorf("the database was written: %v became %v", before, after)
	}
}
