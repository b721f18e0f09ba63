// Package stores owns where a server's config says that the state lies: its `state` group, and opening what it names.
//
// It refuses a group that could not be followed before anything is opened, to make a store where one is expected (invariant
// 11), and to let a server that has others beside it keep keys that those could not use (decision D12).
package stores

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/kube"
	"github.com/chancery-project/chancery/ca/store/postgres"
)

// Place is a Config that was checked.
type Place struct{ config Config }

// Parse checks a config without opening anything. Its defaults should be set, its paths absolute.
func Parse(c Config) (*Place, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	return &Place{c}, nil
}

// Shared reports whether several servers may work on the store.
func (p *Place) Shared() bool { return p.config.shared() }

// Replica is this server's name among them.
func (p *Place) Replica() string { return p.config.Replica }

// Kind says which kind of store it is: sqlite, postgres or kubernetes, as in the config.
func (p *Place) Kind() string {
	switch {
	case p.config.Postgres != nil:
		return "postgres"
	case p.config.Kubernetes != nil:
		return "kubernetes"
	}
	return "sqlite"
}

// String says where the state lies, for messages.
func (p *Place) String() string {
	switch c := p.config; {
	case c.Postgres != nil:
		return fmt.Sprintf("schema %s of %s", c.Postgres.Schema, withoutPassword(c.Postgres.URL))
	case c.Kubernetes != nil:
		return fmt.Sprintf("Secret %s/%s", c.Kubernetes.Namespace, c.Kubernetes.Name)
	}
	return p.config.SQLite
}

// Another says how to name another store in the config.
func (p *Place) Another() string {
	return map[string]string{
		"sqlite": "name another file in state.sqlite", "postgres": "name another schema in state.postgres", "kubernetes": "set another state.kubernetes.name",
	}[p.Kind()]
}

// Beside is a file in the folder that belongs to this server alone.
func (p *Place) Beside(name string) string { return filepath.Join(p.config.Dir, name) }

// Mark is the file with the highest version of the document that this server has seen (decision D9).
func (p *Place) Mark() string { return p.Beside("state.mark") }

// AdminSocket is where the server answers admins (decision D14).
func (p *Place) AdminSocket() string { return p.Beside("admin.sock") }

// Open opens the store; store.ErrMissing if there is none, store.ErrLocked if another process holds it alone.
func (p *Place) Open(ctx context.Context, logger *slog.Logger) (store.Store, error) {
	return p.open(ctx, logger, false)
}

// Create opens the store, and makes it if it does not exist. A document it does not make.
func (p *Place) Create(ctx context.Context, logger *slog.Logger) (store.Store, error) {
	return p.open(ctx, logger, true)
}

func (p *Place) open(ctx context.Context, logger *slog.Logger, create bool) (store.Store, error) {
	if err := p.checkDir(); err != nil {
		return nil, err
	}
	switch c := p.config; {
	case c.Postgres != nil:
		open := postgres.Open
		if create {
			open = postgres.Create
		}
		st, err := open(ctx, *c.Postgres)
		if err == nil {
			st.LogTo(logger)
		}
		return some(st, err)
	case c.Kubernetes != nil && create:
		return some(kube.Create(ctx, *c.Kubernetes, logger))
	case c.Kubernetes != nil:
		return some(kube.Open(ctx, *c.Kubernetes, logger))
	case create:
		return some(store.CreateSQLite(ctx, c.SQLite))
	}
	return some(store.OpenSQLite(ctx, p.config.SQLite))
}

// errDir is about state.dir.
type errDir struct{ error }

// checkDir sees to it that there is a folder for what is this server's own, before a store is made or written. That of the
// embedded store is the store's to look for.
func (p *Place) checkDir() error {
	dir := p.config.Dir
	if !p.Shared() && dir == filepath.Dir(p.config.SQLite) {
		return nil
	}
	info, err := os.Stat(dir)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a folder", dir)
	}
	if err != nil {
		return errDir{fmt.Errorf("state.dir: %w; it should be a folder of this server alone, for admin.sock, roots.pem and state.mark", err)}
	}
	return nil
}

// some returns no store beside an error: one would be an interface that holds nil.
func some[S store.Store](s S, err error) (store.Store, error) {
	if err != nil {
		return nil, err
	}
	return s, nil
}

// withoutPassword is a database's URL for messages.
func withoutPassword(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "a PostgreSQL database"
	}
	u.RawQuery = ""
	return u.Redacted()
}

// Read returns the document for who only looks: without its lock or a right to write, where the store is a file.
func (p *Place) Read(ctx context.Context) (data []byte, version uint64, err error) {
	if !p.Shared() {
		return store.Read(ctx, p.config.SQLite)
	}
	st, err := p.Open(ctx, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, 0, err
	}
	defer st.Close()
	return st.Load(ctx)
}

// Explain says what to do about a state that cannot be opened; file is the config.
func (p *Place) Explain(err error, file string) error {
	_, dir := errors.AsType[errDir](err)
	switch {
	case dir:
		return fmt.Errorf("config %s: %w", file, err)
	case errors.Is(err, store.ErrMissing):
		return fmt.Errorf("%w: run `chancery authority init -c %s` once", err, file)
	case errors.Is(err, store.ErrLocked):
		return fmt.Errorf("%w, which is a server or another command; stop it, or name another file in state.sqlite of %s", err, file)
	}
	return err
}
