package stores

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/kube"
	"github.com/chancery-project/chancery/ca/store/postgres"
	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	pgtest.Stop()
	os.Exit(code)
}

var quiet = slog.New(slog.DiscardHandler)

func parsed(t *testing.T, c Config) *Place {
	t.Helper()
	if err := c.SetDefaults("/var/log/audit.jsonl"); err != nil {
		t.Fatal(err)
	}
	p, err := Parse(c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestDefaults: what a store's config leaves out, by kind.
func TestDefaults(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	host = strings.ToLower(host)
	for _, c := range []struct {
		config                             Config
		kind, words, replica, dir, another string
		shared                             bool
	}{
		{Config{SQLite: "/s/state.db"}, "sqlite", "/s/state.db", "server", "/s", "state.sqlite", false},
		{Config{SQLite: "/s/state.db", Replica: "a", Dir: "/d"}, "sqlite", "/s/state.db", "a", "/d", "state.sqlite", false},
		{Config{Postgres: &postgres.Config{URL: "postgres://u@h/d?sslmode=verify-full"}, SealingKey: "/k"}, "postgres", "schema chancery of postgres://u@h/d", host, "/var/log", "state.postgres", true},
		{Config{Kubernetes: &kube.Config{Namespace: "ca", InCluster: true}, SealingKey: "/k", Replica: "b.c-1"}, "kubernetes", "Secret ca/chancery-state", "b.c-1", "/var/log", "state.kubernetes.name", true},
	} {
		p := parsed(t, c.config)
		if p.Kind() != c.kind || p.String() != c.words || p.Replica() != c.replica || p.Shared() != c.shared || !strings.Contains(p.Another(), c.another) {
			t.Errorf("%+v: %s, %s, %s, %t", c.config, p.Kind(), p, p.Replica(), p.Shared())
		}
		if p.AdminSocket() != c.dir+"/admin.sock" || p.Mark() != c.dir+"/state.mark" || p.Beside("roots.pem") != c.dir+"/roots.pem" {
			t.Errorf("%+v: %s, %s", c.config, p.AdminSocket(), p.Mark())
		}
	}
}

// TestErrors: what could not be followed is refused by its field, with what would be right.
func TestErrors(t *testing.T) {
	pg := &postgres.Config{URL: "postgres://u@h/d"}
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{}, "state: set one of sqlite, postgres and kubernetes"},
		{Config{SQLite: "s", Postgres: pg}, "state: more than one of"},
		{Config{Postgres: pg, Kubernetes: new(kube.Config)}, "state: more than one of"},
		{Config{Postgres: pg}, "state.sealingKey is missing"},
		{Config{Kubernetes: &kube.Config{Namespace: "n", InCluster: true}}, "state.sealingKey is missing"},
		{Config{SQLite: "s", Replica: "A"}, `state.replica: "A" cannot be a replica's name`},
		{Config{SQLite: "s", Replica: "a_b"}, "set one such as server-1"},
		{Config{SQLite: "s", Replica: strings.Repeat("a", 254)}, "1 to 253"},
		{Config{Postgres: &postgres.Config{URL: "postgres://u:secret@h/d"}, SealingKey: "k"}, "state.postgres: url"},
		{Config{Kubernetes: &kube.Config{Namespace: "n"}, SealingKey: "k"}, "state.kubernetes: neither kubeconfig nor inCluster"},
		{Config{Kubernetes: &kube.Config{Namespace: "N", InCluster: true}, SealingKey: "k"}, "state.kubernetes: namespace"},
	} {
		if err := c.config.SetDefaults("/a"); err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(c.config); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%+v: %v; want %q", c.config, err, c.want)
		}
	}
}

// TestInvariant11NoStoreIsMadeByOpening, and what is made holds no document yet.
func TestInvariant11NoStoreIsMadeByOpening(t *testing.T) {
	places := map[string]func(t *testing.T) *Place{
		"sqlite": func(t *testing.T) *Place { return parsed(t, Config{SQLite: filepath.Join(t.TempDir(), "state.db")}) },
		"postgres": func(t *testing.T) *Place {
			c := pgtest.Shared(t)
			return parsed(t, Config{Postgres: &postgres.Config{URL: c.URL(c.Database(t), pgtest.Admin)}, SealingKey: "/k"})
		},
	}
	for name, place := range places {
		t.Run(name, func(t *testing.T) {
			p := place(t)
			for range 2 {
				if st, err := p.Open(t.Context(), quiet); !errors.Is(err, store.ErrMissing) || st != nil {
					t.Fatalf("opened: %v, %v", st, err)
				}
			}
			if _, _, err := p.Read(t.Context()); !errors.Is(err, store.ErrMissing) {
				t.Errorf("read: %v", err)
			}
			if err := p.Explain(store.ErrMissing, "s.yaml"); !strings.Contains(err.Error(), "chancery authority init -c s.yaml") {
				t.Error(err)
			}
			st, err := p.Create(t.Context(), quiet)
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := st.Load(t.Context()); !errors.Is(err, store.ErrMissing) {
				t.Errorf("what was made has a document: %v", err)
			}
			if err := st.Create(t.Context(), 7, []byte("x")); err != nil {
				t.Fatal(err)
			}
			again, err := p.Open(t.Context(), quiet)
			if p.Shared() != (err == nil) || !p.Shared() && !errors.Is(err, store.ErrLocked) {
				t.Errorf("a second time: %v", err)
			}
			if err == nil {
				again.Close()
			}
			if data, version, err := p.Read(t.Context()); err != nil || string(data) != "x" || version != 7 {
				t.Errorf("read while it is open: %q, %d, %v", data, version, err)
			}
			if err := st.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestDirThatIsNone: it is said by its field and file, before a store is made.
func TestDirThatIsNone(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ dir, want string }{
		"missing": {filepath.Join(dir, "none"), "none: no such file or directory"},
		"a file":  {file, "file is not a folder"},
	} {
		p := parsed(t, Config{SQLite: filepath.Join(dir, "state.db"), Dir: c.dir})
		for _, open := range []func() (store.Store, error){
			func() (store.Store, error) { return p.Create(t.Context(), quiet) },
			func() (store.Store, error) { return p.Open(t.Context(), quiet) },
		} {
			st, err := open()
			if err == nil {
				st.Close()
				t.Errorf("%s: it was opened", name)
			} else if got := p.Explain(err, "s.yaml").Error(); !strings.HasPrefix(got, "config s.yaml: state.dir: ") || !strings.Contains(got, c.want) || !strings.Contains(got, "it should be a folder of this server alone") {
				t.Errorf("%s: %s", name, got)
			}
		}
		if _, err := os.Stat(filepath.Join(dir, "state.db")); err == nil {
			t.Errorf("%s: a store was made", name)
		}
	}
}
