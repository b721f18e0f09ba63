package postgres_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/postgres"
	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
	"github.com/chancery-project/chancery/ca/store/storetest"
)

// fromDocs returns the statements in docs/postgres.md, block by block.
func fromDocs(t *testing.T) [][]string {
	t.Helper()
	data, err := os.ReadFile("../../../docs/postgres.md")
	if err != nil {
		t.Fatal(err)
	}
	var all [][]string
	for i, block := range strings.Split(string(data), "```") {
		text, ok := strings.CutPrefix(block, "sql\n")
		if i%2 == 0 || !ok {
			continue
		}
		var statements []string
		for s := range strings.SplitSeq(text, ";") {
			if s = strings.TrimSpace(s); s != "" {
				statements = append(statements, s)
			}
		}
		all = append(all, statements)
	}
	if len(all) != 3 {
		t.Fatalf("docs/postgres.md has %d blocks of SQL", len(all))
	}
	return all
}

// TestSetUpOfTheDocs: one role that owns its database.
func TestSetUpOfTheDocs(t *testing.T) {
	c := pgtest.New(t)
	c.Exec(t, "postgres", fromDocs(t)[0]...)
	s := create(t, c.URL("chancery", "chancery"))
	if err := s.Create(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	again, err := postgres.Open(t.Context(), postgres.Config{URL: c.URL("chancery", "chancery")})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if data, v, err := again.Load(t.Context()); err != nil || v != 1 || string(data) != "one" {
		t.Errorf("version %d, %q, %v", v, data, err)
	}
}

// TestRightsOfTheDocs: a server's role with the rights in docs/postgres.md, and no others, does all that a store does; without any
// one of them it does not.
func TestRightsOfTheDocs(t *testing.T) {
	c := pgtest.New(t)
	c.Exec(t, "postgres", fromDocs(t)[1]...)
	rights := fromDocs(t)[2]
	database := func(t *testing.T, rights []string) (server string) {
		t.Helper()
		db := c.Database(t)
		c.Exec(t, "postgres", "ALTER DATABASE "+db+" OWNER TO chancery_owner")
		create(t, c.URL(db, "chancery_owner")).Close()
		owner := c.Connect(t, db, "chancery_owner")
		defer owner.Close(t.Context())
		for _, r := range rights {
			if _, err := owner.Exec(t.Context(), r); err != nil {
				t.Fatalf("%s: %v", r, err)
			}
		}
		return c.URL(db, "chancery")
	}
	t.Run("with all of them", func(t *testing.T) {
		storetest.Run(t, storetest.Config{
			Name: "PostgreSQL ",
			New: func(t *testing.T) func(*testing.T) store.Store {
				url := database(t, rights)
				return func(t *testing.T) store.Store {
					s, err := postgres.Open(t.Context(), postgres.Config{URL: url})
					if err != nil {
						t.Fatal(err)
					}
					return s
				}
			},
		})
	})
	for _, less := range lessRights(rights) {
		t.Run("without "+less.what, func(t *testing.T) {
			s, err := postgres.Open(t.Context(), postgres.Config{URL: database(t, less.rights)})
			if err == nil {
				defer s.Close()
				_, _, loaded := s.Load(t.Context())
				if errors.Is(loaded, store.ErrMissing) {
					loaded = nil
				}
				err = errors.Join(loaded, s.Create(t.Context(), 1, []byte("x")), s.Replace(t.Context(), 1, 2, []byte("y")),
					s.PutNote(t.Context(), "a", nil), s.PutNote(t.Context(), "a", nil), s.DropNote(t.Context(), "a"))
				_, _, held := s.Hold(t.Context(), "a", 1e9)
				_, _, again := s.Hold(t.Context(), "a", 1e9)
				_, listed := s.Notes(t.Context())
				err = errors.Join(err, held, again, listed, s.GiveUp(t.Context(), "a"))
			}
			if err == nil || !strings.Contains(err.Error(), "permission denied") || !strings.Contains(err.Error(), "docs/postgres.md") {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Run("it cannot make or drop tables", func(t *testing.T) {
		url := database(t, rights)
		_, err := postgres.Create(t.Context(), postgres.Config{URL: url, Schema: "other"})
		if err == nil || !strings.Contains(err.Error(), "permission denied") || !strings.Contains(err.Error(), "owns") {
			t.Errorf("making tables: %v", err)
		}
		s, err := postgres.Create(t.Context(), postgres.Config{URL: url}) // they are there: nothing to be made
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		for _, statement := range []string{"DELETE FROM chancery.document RETURNING ''", "UPDATE chancery.schema_version SET version = 7 RETURNING ''", "DROP TABLE chancery.note"} {
			if _, err := s.Ask(t.Context(), statement); err == nil || !strings.Contains(err.Error(), "permission denied") && !strings.Contains(err.Error(), "must be owner") {
				t.Errorf("%s: %v", statement, err)
			}
		}
	})
}

// less is what remains of rights without one.
type less struct {
	what   string
	rights []string
}

// lessRights leaves out each right once.
func lessRights(rights []string) (all []less) {
	for i, statement := range rights {
		statement = statement[strings.Index(statement, "GRANT"):]
		list, on, _ := strings.Cut(strings.TrimPrefix(statement, "GRANT "), " ON ")
		for _, right := range strings.Split(list, ", ") {
			for _, object := range strings.Split(on[:strings.Index(on, " TO ")], ", ") {
				without := append(append([]string{}, rights[:i]...), statement, fmt.Sprintf("REVOKE %s ON %s FROM chancery", right, object))
				all = append(all, less{right + " on " + object, append(without, rights[i+1:]...)})
			}
		}
	}
	return all
}

// TestInvariant11OpenDoesNotCreate: what is not there is an error, and stays not there.
func TestInvariant11OpenDoesNotCreate(t *testing.T) {
	c := pgtest.Shared(t)
	url := c.URL(c.Database(t), pgtest.Admin)
	for range 2 {
		_, err := postgres.Open(t.Context(), postgres.Config{URL: url})
		if !errors.Is(err, store.ErrMissing) || !strings.Contains(err.Error(), c.Socket) || !strings.Contains(err.Error(), "authority init") {
			t.Errorf("got %v", err)
		}
	}
	s := create(t, url) // tables alone are no document
	if _, _, err := s.Load(t.Context()); !errors.Is(err, store.ErrMissing) {
		t.Errorf("got %v", err)
	}
	if _, err := postgres.Open(t.Context(), postgres.Config{URL: url, Schema: "other"}); !errors.Is(err, store.ErrMissing) {
		t.Errorf("another schema: %v", err)
	}
	if _, err := postgres.Open(t.Context(), postgres.Config{URL: c.URL("nonexistent", pgtest.Admin)}); err == nil || errors.Is(err, store.ErrMissing) || !strings.Contains(err.Error(), "nonexistent") {
		t.Errorf("a database that is not there: %v", err)
	}
}

// TestSchemasAreApart: two authorities in one database know nothing of each other.
func TestSchemasAreApart(t *testing.T) {
	c := pgtest.Shared(t)
	url := c.URL(c.Database(t), pgtest.Admin)
	var all []*postgres.Store
	for _, schema := range []string{"one", strings.Repeat("b", 63)} {
		s, err := postgres.Create(t.Context(), postgres.Config{URL: url, Schema: schema})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if err := s.Create(t.Context(), 1, []byte(schema)); err != nil {
			t.Error(err)
		}
		if err := s.PutNote(t.Context(), schema, nil); err != nil {
			t.Error(err)
		}
		if held, by, err := s.Hold(t.Context(), schema, 1e9); !held || err != nil {
			t.Errorf("held by %q, %v", by, err)
		}
		all = append(all, s)
	}
	for _, s := range all {
		if notes, err := s.Notes(t.Context()); err != nil || len(notes) != 1 {
			t.Errorf("%d notes, %v", len(notes), err)
		}
	}
}

// TestConcurrentMigrations: whoever comes at the same time makes tables once; and an upgrade is made once.
func TestConcurrentMigrations(t *testing.T) {
	c := pgtest.Shared(t)
	url := c.URL(c.Database(t), pgtest.Admin)
	all := func(open func() (*postgres.Store, error)) {
		t.Helper()
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				s, err := open()
				if err != nil {
					t.Error(err)
					return
				}
				s.Close()
			})
		}
		wg.Wait()
	}
	all(func() (*postgres.Store, error) { return postgres.Create(t.Context(), postgres.Config{URL: url}) })
	s := create(t, url)
	if err := s.Create(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	// A newer version comes: no second try of this would succeed.
	restore := postgres.WithMigrations(`ALTER TABLE @schema.document ADD COLUMN more integer NOT NULL DEFAULT 7`, `CREATE TABLE @schema.more (id integer); INSERT INTO @schema.more VALUES (7)`)
	defer restore()
	all(func() (*postgres.Store, error) { return postgres.Open(t.Context(), postgres.Config{URL: url}) })
	if more, err := s.Ask(t.Context(), `SELECT count(*)::text || ' ' || (SELECT more FROM chancery.document) FROM chancery.more`); more != "1 7" || err != nil {
		t.Errorf("%q, %v", more, err)
	}
	// The older one goes on while it runs, and is not started again.
	restore()
	if err := s.Replace(t.Context(), 1, 2, []byte("two")); err != nil {
		t.Error(err)
	}
	for name, open := range map[string]func() (*postgres.Store, error){
		"Open":   func() (*postgres.Store, error) { return postgres.Open(t.Context(), postgres.Config{URL: url}) },
		"Create": func() (*postgres.Store, error) { return postgres.Create(t.Context(), postgres.Config{URL: url}) },
	} {
		if _, err := open(); err == nil || !strings.Contains(err.Error(), "of version 3, which a newer chancery made; this one knows 1") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestMigrationThatFails leaves all as it was.
func TestMigrationThatFails(t *testing.T) {
	c := pgtest.Shared(t)
	url := c.URL(c.Database(t), pgtest.Admin)
	restore := postgres.WithMigrations(`CREATE TABLE @schema.more (id integer)`, `SELECT 1/0`)
	defer restore()
	if _, err := postgres.Create(t.Context(), postgres.Config{URL: url}); err == nil || !strings.Contains(err.Error(), "division by zero") {
		t.Errorf("got %v", err)
	}
	restore()
	if _, err := postgres.Open(t.Context(), postgres.Config{URL: url}); !errors.Is(err, store.ErrMissing) {
		t.Errorf("afterwards: %v", err)
	}
	create(t, url)
}

// TestWrongPassword: its error says whose, and not what it was; nor does PostgreSQL's log.
func TestWrongPassword(t *testing.T) {
	c := pgtest.New(t)
	ca := c.TLS(t)
	c.Exec(t, "postgres", fromDocs(t)[0]...)
	c.Exec(t, "postgres", "ALTER ROLE chancery PASSWORD 'right'")
	file := filepath.Join(t.TempDir(), "password")
	config := postgres.Config{URL: fmt.Sprintf("postgres://chancery@localhost:%d/chancery?sslmode=verify-full&channel_binding=require&sslrootcert=%s", c.Port, ca), PasswordFile: file}
	write := func(password string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(password+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("hunter2")
	_, err := postgres.Create(t.Context(), config)
	if err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "password authentication failed") || !strings.Contains(err.Error(), "passwordFile") {
		t.Errorf("got %v", err)
	}
	if strings.Contains(c.Log(t), "hunter2") {
		t.Error("PostgreSQL's log has it")
	}
	write("right")
	s, err := postgres.Create(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if used, err := s.Ask(t.Context(), `SELECT ssl::text FROM pg_catalog.pg_stat_ssl WHERE pid = pg_backend_pid()`); used != "true" || err != nil {
		t.Errorf("TLS: %q, %v", used, err)
	}
	// The password is exchanged while we run.
	c.Exec(t, "postgres", "ALTER ROLE chancery PASSWORD 'new'", "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'chancery'")
	write("new")
	within(t, "calls work with the new password", func() bool { _, _, err := s.Load(t.Context()); return errors.Is(err, store.ErrMissing) })
}

// TestTLS: a server that cannot show a certificate for its name, of the CA that is asked for, gets no password.
func TestTLS(t *testing.T) {
	c := pgtest.New(t)
	name, address := fmt.Sprintf("postgres://admin@localhost:%d/postgres", c.Port), fmt.Sprintf("postgres://admin@127.0.0.1:%d/postgres", c.Port)
	open := func(url string) error {
		s, err := postgres.Open(t.Context(), postgres.Config{URL: url})
		if err == nil {
			s.Close()
		}
		return err
	}
	if err := open(address + "?sslmode=require"); err == nil || !strings.Contains(err.Error(), "TLS") {
		t.Errorf("a server without TLS: %v", err)
	}
	ca := c.TLS(t)
	other := pgtest.New(t).TLS(t)
	c.Exec(t, "postgres", "ALTER ROLE admin PASSWORD 'right'")
	t.Setenv("PGPASSWORD", "right")
	for _, tc := range []struct{ url, want string }{
		{name + "?sslmode=verify-full&sslrootcert=" + ca, "no tables of Chancery"}, // it was reached
		{address + "?sslmode=verify-ca&sslrootcert=" + ca, "no tables of Chancery"},
		{address + "?sslmode=require", "no tables of Chancery"},
		{address + "?sslmode=verify-full&sslrootcert=" + ca, "127.0.0.1"}, // its name is localhost
		{name + "?sslmode=verify-full", "certificate"},
		{name + "?sslmode=verify-full&sslrootcert=" + other, "certificate"},
		{name + "?sslmode=verify-ca&sslrootcert=" + other, "certificate"},
	} {
		within(t, tc.url+" says "+tc.want, func() bool { err := open(tc.url); return err != nil && strings.Contains(err.Error(), tc.want) })
	}
}
