package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/postgres"
	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
	"github.com/chancery-project/chancery/ca/store/storetest"
)

// within waits for what should happen.
func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within a minute: " + what)
		}
	}
}

// watched counts calls of a Watch that runs until the test ends.
func watched(t *testing.T, s *postgres.Store) func() int {
	t.Helper()
	var mu sync.Mutex
	n := 0
	var wg sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(func() { stop(); wg.Wait() })
	wg.Go(func() {
		if err := s.Watch(ctx, func() { mu.Lock(); n++; mu.Unlock() }); err != nil {
			t.Errorf("Watch: %v", err)
		}
	})
	return func() int { mu.Lock(); defer mu.Unlock(); return n }
}

// TestKillWhileReplacing kills the database at any moment under load, again and again: what was confirmed is there, in one history.
func TestKillWhileReplacing(t *testing.T) {
	const writers, kills = 4, 5
	c := pgtest.New(t)
	url := c.URL(c.Database(t), pgtest.Admin)
	h := storetest.History{Patient: true}
	first := create(t, url)
	if err := first.Create(t.Context(), 1, []byte("[]")); err != nil {
		t.Fatal(err)
	}
	calls := watched(t, first)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	for w := range writers {
		s := create(t, url)
		wg.Go(func() {
			if err := h.Write(ctx, s, w, 1<<30); ctx.Err() == nil {
				t.Error(err)
			}
		})
	}
	for kill := range kills {
		told := h.Confirmed()
		within(t, "work goes on", func() bool { return h.Confirmed() > told+10+kill })
		c.Kill()
		seen := calls()
		c.Start(t)
		within(t, "Watch listens again", func() bool { return calls() > seen })
	}
	told := h.Confirmed()
	within(t, "work goes on after the last one", func() bool { return h.Confirmed() > told+10 })
	stop()
	wg.Wait()
	if err := h.Check(t.Context(), first, 1); err != nil {
		t.Error(err)
	}
	t.Logf("%d changes over %d kills", h.Confirmed(), kills)
}

// TestPausedDatabase: no call waits longer than it should, none says less than what is wrong, and all goes on afterwards.
func TestPausedDatabase(t *testing.T) {
	c := pgtest.New(t)
	url := c.URL(c.Database(t), pgtest.Admin)
	s, other := create(t, url), create(t, url)
	s.SetTimes(300*time.Millisecond, 200*time.Millisecond)
	if err := s.Create(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	calls := watched(t, s)
	within(t, "Watch listens", func() bool { return calls() > 0 })
	c.Pause()
	t.Cleanup(c.Resume)
	// More of them at a time than there are connections.
	var wg sync.WaitGroup
	for range 12 {
		wg.Go(func() {
			_, _, err := s.Load(t.Context())
			if err == nil || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "has not answered within 300ms") || !strings.Contains(err.Error(), c.Socket) {
				t.Errorf("got %v", err)
			}
		})
	}
	wg.Wait()
	if _, err := postgres.Open(shortly(t), postgres.Config{URL: url}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("opening gave %v", err)
	}
	replaced := s.Replace(t.Context(), 1, 2, []byte("two")) // this one may happen when the database goes on
	if !errors.Is(replaced, context.DeadlineExceeded) {
		t.Errorf("replacing gave %v", replaced)
	}
	seen := calls()
	c.Resume()
	within(t, "Watch listens again", func() bool { return calls() > seen })
	_, v, err := other.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	within(t, "the document can be changed", func() bool {
		if err := s.Replace(t.Context(), v, v+1, []byte("three")); err == nil {
			return true
		}
		_, v, err = s.Load(t.Context())
		return false
	})
	data, _, err := other.Load(t.Context())
	if err != nil || string(data) != "three" {
		t.Errorf("got %q, %v", data, err)
	}
}

// shortly is a context that ends before long.
func shortly(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// TestSilentConnectionIsGivenUp: one that died without a word, as after a failover of the network, is noticed, and replaced.
func TestSilentConnectionIsGivenUp(t *testing.T) {
	c := pgtest.Shared(t)
	db := c.Database(t)
	over := storetest.NewProxy(t, "unix", c.SocketFile())
	s, other := create(t, "postgres://"+pgtest.Admin+"@"+over.Addr+"/"+db), create(t, c.URL(db, pgtest.Admin))
	s.SetTimes(500*time.Millisecond, 200*time.Millisecond)
	if err := other.Create(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	calls := watched(t, s)
	within(t, "Watch listens", func() bool { return calls() > 0 })
	seen := calls()
	over.Lose()
	if err := other.Replace(t.Context(), 1, 2, []byte("two")); err != nil {
		t.Fatal(err)
	}
	within(t, "Watch tells of the change", func() bool { return calls() > seen })
	within(t, "calls work again", func() bool { _, v, err := s.Load(t.Context()); return err == nil && v == 2 })
}

// TestWatchThatFailsSaysSo: once, with the reason, though all else works; and that it works again.
func TestWatchThatFailsSaysSo(t *testing.T) {
	c := pgtest.Shared(t)
	db := c.Database(t)
	create(t, c.URL(db, pgtest.Admin))
	c.Exec(t, db, "CREATE ROLE one LOGIN CONNECTION LIMIT 1", "GRANT ALL ON SCHEMA chancery TO one", "GRANT ALL ON ALL TABLES IN SCHEMA chancery TO one")
	s := create(t, c.URL(db, "one")) // which keeps its one connection
	logged := new(lines)
	s.LogTo(slog.New(slog.NewTextHandler(logged, nil)))
	calls := watched(t, s)
	within(t, "it says that it fails", func() bool { return strings.Contains(logged.String(), "watching the state fails") })
	if text := logged.String(); !strings.Contains(text, "too many connections") || !strings.Contains(text, db+" (schema chancery)") {
		t.Errorf("it says: %s", text)
	}
	if n := calls(); n > 0 {
		t.Errorf("it told of %d changes", n)
	}
	c.Exec(t, db, "ALTER ROLE one CONNECTION LIMIT -1")
	within(t, "it works again", func() bool { return strings.Contains(logged.String(), "works again") && calls() > 0 })
	if text := logged.String(); strings.Count(text, "\n") != 2 {
		t.Errorf("it says: %s", text)
	}
}

// lines collects a log.
type lines struct {
	mu   sync.Mutex // guards text
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}
func (l *lines) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.text.String() }

// TestRestart: with each way in which PostgreSQL is stopped, callers hear of it, and it goes on.
func TestRestart(t *testing.T) {
	c := pgtest.New(t)
	s := create(t, c.URL(c.Database(t), pgtest.Admin))
	if err := s.Create(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	calls := watched(t, s)
	for _, mode := range []string{"fast", "immediate"} {
		within(t, "Watch listens", func() bool { return calls() > 0 })
		c.Shutdown(t, mode)
		seen := calls()
		if _, _, err := s.Load(t.Context()); err == nil || errors.Is(err, store.ErrMissing) || strings.ContainsAny(err.Error(), "\n\t") {
			t.Errorf("%s: loading gave %v", mode, err)
		}
		c.Start(t)
		within(t, "calls work again", func() bool { _, _, err := s.Load(t.Context()); return err == nil })
		within(t, "Watch listens again", func() bool { return calls() > seen })
	}
}

// TestFailover: with synchronous replication a failover loses nothing that was confirmed, and a URL with both hosts finds the
// new primary. The standby is not taken before.
func TestFailover(t *testing.T) {
	primary := pgtest.New(t)
	db := primary.Database(t)
	standby := primary.Standby(t)
	primary.Exec(t, "postgres", "ALTER SYSTEM SET synchronous_standby_names = '*'")
	primary.Reload(t, "synchronous_standby_names", "*")
	both := url.Values{"host": {standby.Socket + "," + primary.Socket}, "port": {strconv.Itoa(standby.Port) + "," + strconv.Itoa(primary.Port)}}
	s := create(t, "postgres://"+pgtest.Admin+"@/"+db+"?"+both.Encode())
	_, err := postgres.Open(t.Context(), postgres.Config{URL: standby.URL(db, pgtest.Admin)})
	if err == nil || !strings.Contains(err.Error(), "read only") {
		t.Errorf("a standby was opened: %v", err)
	}
	if err := s.Create(t.Context(), 1, []byte("1")); err != nil {
		t.Fatal(err)
	}
	calls := watched(t, s)
	within(t, "Watch listens", func() bool { return calls() > 0 })
	for v := uint64(1); v < 20; v++ {
		if err := s.Replace(t.Context(), v, v+1, fmt.Append(nil, v+1)); err != nil {
			t.Fatal(err)
		}
	}
	primary.Kill()
	seen := calls()
	standby.Exec(t, "postgres", "SELECT pg_promote()") // its own synchronous_standby_names is empty
	within(t, "calls work again", func() bool { _, _, err := s.Load(t.Context()); return err == nil })
	if data, v, err := s.Load(t.Context()); err != nil || v != 20 || string(data) != "20" {
		t.Errorf("after the failover: version %d, %q, %v", v, data, err)
	}
	if err := s.Replace(t.Context(), 20, 21, []byte("21")); err != nil {
		t.Error(err)
	}
	within(t, "Watch listens again", func() bool { return calls() > seen })
}
