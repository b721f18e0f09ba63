package postgres_test

import (
	"os"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/postgres"
	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
	"github.com/chancery-project/chancery/ca/store/storetest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	pgtest.Stop()
	os.Exit(code)
}

// create opens a store, whose tables are made where they are not there.
func create(t *testing.T, url string) *postgres.Store {
	t.Helper()
	s, err := postgres.Create(t.Context(), postgres.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestPostgres(t *testing.T) {
	c := pgtest.Shared(t)
	storetest.Run(t, storetest.Config{
		Name: "PostgreSQL ",
		New: func(t *testing.T) func(*testing.T) store.Store {
			url := c.URL(c.Database(t), pgtest.Admin)
			return func(t *testing.T) store.Store { return create(t, url) }
		},
		Cut: func(t *testing.T) (*storetest.Proxy, store.Store, store.Store) {
			db := c.Database(t)
			over := storetest.NewProxy(t, "unix", c.SocketFile())
			return over, create(t, "postgres://"+pgtest.Admin+"@"+over.Addr+"/"+db), create(t, c.URL(db, pgtest.Admin))
		},
	})
}

// TestErrorsNameTheDatabase: which host, database and schema it was.
func TestErrorsNameTheDatabase(t *testing.T) {
	c := pgtest.Shared(t)
	db := c.Database(t)
	s := create(t, c.URL(db, pgtest.Admin))
	_, _, err := s.Load(t.Context())
	if want := "loading document from PostgreSQL " + c.SocketFile() + "/" + db + " (schema chancery): there is no document"; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v", err)
	}
}
