package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"testing"
)

// listing returns the names, sizes and modes of what lies in a folder.
func listing(t *testing.T, dir string) map[string]look {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]look{}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		all[e.Name()+" "+info.Mode().String()] = look{info.Size(), info.ModTime()}
	}
	return all
}

// TestReadLeavesNoTrace: whether a process holds the store, crashed or ended, Read gives what was last stored, and changes
// nothing in its folder.
func TestReadLeavesNoTrace(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	dir := t.TempDir()
	path := filepath.Join(dir, "state.db")
	if _, _, err := Read(t.Context(), path); !errors.Is(err, ErrMissing) {
		t.Errorf("no file: %v", err)
	}
	s := create(t, path)
	if _, _, err := Read(t.Context(), path); !errors.Is(err, ErrMissing) {
		t.Errorf("no document: %v", err)
	}
	if err := s.Create(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	if err := s.Replace(t.Context(), 1, 2, []byte("two")); err != nil {
		t.Fatal(err)
	}
	read := func(when string) {
		t.Helper()
		before := listing(t, dir)
		data, version, err := Read(t.Context(), path)
		if string(data) != "two" || version != 2 || err != nil {
			t.Errorf("%s: %q, version %d, %v", when, data, version, err)
		}
		if after := listing(t, dir); !reflect.DeepEqual(after, before) {
			t.Errorf("%s: the folder was %v and is %v", when, before, after)
		}
	}
	if info, err := os.Stat(path + "-wal"); err != nil || info.Size() == 0 {
		t.Fatalf("the test needs a write-ahead log with something in it: %v, %v", info, err)
	}
	read("while a process holds it") // and, as far as the files go, after that was killed
	s.Close()
	read("after it ended")
	left, err := filepath.Glob(filepath.Join(tmp, "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("copies are left: %v, %v", left, err)
	}
}

// TestReadNeverTakesTheLock: who opens the store finds it free, however often it is read.
func TestReadNeverTakesTheLock(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	path := filepath.Join(t.TempDir(), "state.db")
	s := create(t, path)
	if err := s.Create(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				data, _, err := Read(ctx, path)
				if err != nil && !errors.Is(err, ErrChanging) && ctx.Err() == nil || err == nil && string(data) != "one" {
					t.Errorf("read %q, %v", data, err)
					return
				}
			}
		})
	}
	for range 20 {
		s, err := OpenSQLite(t.Context(), path)
		if err != nil {
			t.Error(err)
			break
		}
		s.Close()
	}
	cancel()
	wg.Wait()
}
