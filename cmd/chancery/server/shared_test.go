package server

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/ca/store/postgres"
	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
	"github.com/chancery-project/chancery/ca/store/storetest"
)

// TestStoreThatFlaps: a server hears of each change by another one, without waiting for its own look every 10 s; while the store is out
// of reach it issues on and is ready, all the same; and however often that happens, nothing of it stays.
func TestStoreThatFlaps(t *testing.T) {
	const changes, flaps = 15, 40
	c := pgtest.New(t)
	db := c.Database(t)
	over := storetest.NewProxy(t, "unix", c.SocketFile())
	srv, stop := startedOn(t, fmt.Sprintf("{postgres: {url: %q}, sealingKey: state.key, replica: ca-1}", "postgres://"+pgtest.Admin+"@"+over.Addr+"/"+db), "")
	other, err := postgres.Open(t.Context(), postgres.Config{URL: c.URL(db, pgtest.Admin)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Close() })
	followed := func() {
		t.Helper()
		var version uint64
		if err := replica.Change(t.Context(), other, srv.sealer, func(next *document.Document) error { version = next.Version; return nil }); err != nil {
			t.Fatal(err)
		}
		soon(t, "the change is followed", func() bool { return srv.authority.Document().Version >= version })
	}
	left := changes
	soon(t, "changes are followed: without Watch each of them takes 10 s", func() bool { followed(); left--; return left == 0 })

	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	for range flaps {
		over.Cut()
		srv.authority.Wake()
		soon(t, "it is noticed", func() bool { _, why := srv.authority.Fresh(); return why != nil })
		if _, err := srv.authority.Issuer(); err != nil {
			t.Errorf("while the store is out of reach: %v", err)
		}
		if err := srv.ready(); err != nil {
			t.Errorf("while the store is out of reach it is not ready: %v", err)
		}
		over.Mend()
		followed()
	}
	soon(t, "goroutines and files are as many as before", func() bool {
		return runtime.NumGoroutine() <= goroutines+flaps/2 && openFiles(t) <= files+flaps/2
	})
	t.Logf("%d goroutines and %d files before, %d and %d after", goroutines, files, runtime.NumGoroutine(), openFiles(t))
	stop()
}

// soon waits for what should happen.
func soon(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within a minute: " + what)
		}
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}
