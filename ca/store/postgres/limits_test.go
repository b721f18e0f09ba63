package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
	"github.com/chancery-project/chancery/ca/store/storetest"
)

// TestWhatSomebodyElseWrote: who can write the database cannot make a server read more than it should, or take nonsense.
func TestWhatSomebodyElseWrote(t *testing.T) {
	c := pgtest.Shared(t)
	db := c.Database(t)
	s := create(t, c.URL(db, pgtest.Admin))
	for _, tc := range []struct{ row, want string }{
		{fmt.Sprintf("(1, 1, convert_to(repeat('x', %d), 'UTF8'))", store.MaxDocument), ""},
		{fmt.Sprintf("(1, 1, convert_to(repeat('x', %d), 'UTF8'))", store.MaxDocument+1), "at most 16777216 are read"},
		{fmt.Sprintf("(1, 1, convert_to(repeat('x', %d), 'UTF8'))", 64<<20), "at most 16777216 are read"}, // less than one where it lies
		{"(1, 0, 'x')", "its version is 0"},
		{"(1, -1, 'x')", "its version is -1"},
		{fmt.Sprintf("(1, %d, 'x')", uint64(store.MaxVersion+1)), "its version is"},
	} {
		c.Exec(t, db, "ALTER TABLE chancery.document DROP CONSTRAINT IF EXISTS document_version_check", "DELETE FROM chancery.document", "INSERT INTO chancery.document VALUES "+tc.row)
		_, _, err := s.Load(t.Context())
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v; want %q", tc.row, err, tc.want)
		}
	}
	for _, tc := range []struct{ rows, want string }{
		{fmt.Sprintf("SELECT 'a', convert_to(repeat('x', %d), 'UTF8')", store.MaxNote), ""},
		{fmt.Sprintf("SELECT 'a', convert_to(repeat('x', %d), 'UTF8')", store.MaxNote+1), `"a" has 1048577 bytes; at most 1048576 are read`},
		{fmt.Sprintf("SELECT 'r' || n, 'x' FROM generate_series(1, %d) n", store.MaxNotes), ""},
		{fmt.Sprintf("SELECT 'r' || n, 'x' FROM generate_series(1, %d) n", store.MaxNotes+1), "more than 256 notes"},
		{"SELECT repeat('x', 2000), 'x'", ""}, // a name that nobody has
	} {
		c.Exec(t, db, "DELETE FROM chancery.note", "INSERT INTO chancery.note "+tc.rows)
		all, err := s.Notes(t.Context())
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %d notes, %v; want %q", tc.rows, len(all), err, tc.want)
		}
	}
	// A lease for ever, or by nobody that can be.
	c.Exec(t, db, "INSERT INTO chancery.lease VALUES (1, 'X Y', 'infinity')")
	if held, by, err := s.Hold(t.Context(), "a", time.Second); held || by != "X Y" || err != nil {
		t.Errorf("held %t by %q, %v", held, by, err)
	}
}

// TestDefaultsOfTheDatabase do not change what we do: what is confirmed is on disk, callers conflict and do not fail, and nobody
// else's functions are called.
func TestDefaultsOfTheDatabase(t *testing.T) {
	c := pgtest.Shared(t)
	db := c.Database(t)
	for name, value := range map[string]string{
		"synchronous_commit": "off", "default_transaction_isolation": "serializable", "statement_timeout": "'1ms'", "lock_timeout": "'1ms'",
		"search_path": "evil, pg_catalog", "bytea_output": "escape", "standard_conforming_strings": "off", "client_min_messages": "debug1",
	} {
		c.Exec(t, "postgres", fmt.Sprintf("ALTER DATABASE %s SET %s = %s", db, name, value))
	}
	c.Exec(t, db, "SET statement_timeout = 0; CREATE SCHEMA evil; CREATE FUNCTION evil.octet_length(bytea) RETURNS integer LANGUAGE sql AS 'SELECT 1/0'; CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''-infinity''::timestamptz'")
	url := c.URL(db, pgtest.Admin)
	s := create(t, url)
	for name, want := range map[string]string{
		"synchronous_commit": "on", "default_transaction_isolation": "read committed", "transaction_isolation": "read committed", "statement_timeout": "10s",
		"lock_timeout": "10s", "idle_in_transaction_session_timeout": "20s", "search_path": "pg_catalog", "application_name": "chancery",
	} {
		if got, err := s.Ask(t.Context(), "SHOW "+name); got != want || err != nil {
			t.Errorf("%s is %q, %v; want %q", name, got, err, want)
		}
	}
	if err := s.Create(t.Context(), 1, []byte("[]")); err != nil {
		t.Fatal(err)
	}
	var h storetest.History
	var wg sync.WaitGroup
	for w := range 4 {
		other := create(t, url)
		wg.Go(func() {
			if err := h.Write(t.Context(), other, w, 10); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := h.Check(t.Context(), s, 1); err != nil || h.Confirmed() != 40 {
		t.Errorf("%d confirmed, %v", h.Confirmed(), err)
	}
	// Where all replicas are asked for more than on, that is left.
	c.Exec(t, "postgres", fmt.Sprintf("ALTER DATABASE %s SET synchronous_commit = remote_apply", db))
	if got, err := create(t, url).Ask(t.Context(), "SHOW synchronous_commit"); got != "remote_apply" || err != nil {
		t.Errorf("synchronous_commit is %q, %v", got, err)
	}
}

// TestFewConnections: as many calls as there may be, a server has four connections and one for Watch, and none once it is closed.
func TestFewConnections(t *testing.T) {
	c := pgtest.Shared(t)
	db := c.Database(t)
	s := create(t, c.URL(db, pgtest.Admin))
	if err := s.Create(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	admin := c.Connect(t, "postgres", pgtest.Admin)
	defer admin.Close(context.Background())
	connections := func() (n int) {
		t.Helper()
		if err := admin.QueryRow(context.Background(), "SELECT count(*) FROM pg_stat_activity WHERE datname = '"+db+"'").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	calls := watched(t, create(t, c.URL(db, pgtest.Admin))) // this one is another's
	within(t, "Watch listens", func() bool { return calls() > 0 })
	others := connections()
	ctx, stop := context.WithCancel(t.Context())
	own := make(chan error, 1)
	go func() { own <- s.Watch(ctx, func() {}) }()
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			for range 10 {
				if _, _, err := s.Load(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	most := 0
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for running := true; running; {
		most = max(most, connections()-others)
		select {
		case <-done:
			running = false
		default:
		}
	}
	if most < 2 || most > 5 {
		t.Errorf("%d connections; want some, and 5 at most", most)
	}
	stop()
	if err := <-own; err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	within(t, "its connections are gone", func() bool { return connections() < others })
}

// TestLastPlaceForANote is taken by one, of all who want it at the same moment.
func TestLastPlaceForANote(t *testing.T) {
	c := pgtest.Shared(t)
	db := c.Database(t)
	var all []store.Store
	for range 4 {
		all = append(all, create(t, c.URL(db, pgtest.Admin)))
	}
	for round := range 5 {
		c.Exec(t, db, "DELETE FROM chancery.note", fmt.Sprintf("INSERT INTO chancery.note SELECT 'r' || n, 'x' FROM generate_series(1, %d) n", store.MaxNotes-1))
		var mu sync.Mutex
		var wg sync.WaitGroup
		took := 0
		for i := range 12 {
			wg.Go(func() {
				switch err := all[i%4].PutNote(t.Context(), fmt.Sprint("late-", i), nil); {
				case err == nil:
					mu.Lock()
					took++
					mu.Unlock()
				case !errors.Is(err, store.ErrTooManyNotes):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if took != 1 {
			t.Fatalf("round %d: %d took the last place", round, took)
		}
	}
}
