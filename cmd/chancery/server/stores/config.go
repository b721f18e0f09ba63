package stores

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/kube"
	"github.com/chancery-project/chancery/ca/store/postgres"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// Config says where the authority document lies: in exactly one of SQLite, Postgres and Kubernetes. The latter two are
// shared: several servers, each a replica with a name of its own, work on one document.
type Config struct {
	// SQLite is the database file, which one server holds. Who can write it can roll it back or delete it, but not forge it.
	SQLite string `json:"sqlite,omitempty"`
	// Postgres is a PostgreSQL database, for several servers. Who can write it can do as much, to all of them.
	Postgres *postgres.Config `json:"postgres,omitempty"`
	// Kubernetes is a Secret and what lies beside it, for several servers. Who can write it can do as much, to all of them.
	Kubernetes *kube.Config `json:"kubernetes,omitempty"`
	// SealingKey is the file of the key that seals private keys and authenticates the state. Default: state.key in
	// the folder of SQLite; required for a shared store, whose replicas all have the same. Who can read it and the state has
	// the CA's keys: keep them apart.
	SealingKey string `json:"sealingKey,omitempty"`
	// Replica names this server among those on one shared store: a-z, 0-9, - and . between them. Default: the host's name in
	// lower case; with SQLite server. Each server needs a name that stays and that no other has.
	Replica string `json:"replica,omitempty"`
	// Dir is the folder of admin.sock, roots.pem and state.mark, of this server alone. Default: that of SQLite; for a shared
	// store that of auditLog. Who can write it can answer in the server's place, and hide from it that the state was rolled back.
	Dir string `json:"dir,omitempty"`
}

// Paths are the fields that name files.
func (c *Config) Paths() []*string {
	paths := []*string{&c.SQLite, &c.SealingKey, &c.Dir}
	if c.Postgres != nil {
		paths = append(paths, &c.Postgres.PasswordFile)
	}
	if c.Kubernetes != nil {
		paths = append(paths, c.Kubernetes.Paths()...)
	}
	return paths
}

// SetDefaults fills in what is left out. Paths should be absolute.
func (c *Config) SetDefaults(auditLog string) error {
	switch {
	case c.SQLite != "" && !c.shared():
		process.SetDefault(&c.SealingKey, filepath.Join(filepath.Dir(c.SQLite), "state.key"))
		process.SetDefault(&c.Dir, filepath.Dir(c.SQLite))
	case auditLog != "":
		process.SetDefault(&c.Dir, filepath.Dir(auditLog))
	}
	if c.Postgres != nil {
		process.SetDefault(&c.Postgres.Schema, "chancery")
	}
	if c.Kubernetes != nil {
		process.SetDefault(&c.Kubernetes.Name, kube.DefaultName)
	}
	switch host, err := os.Hostname(); {
	case !c.shared():
		process.SetDefault(&c.Replica, "server") // there is no other, and hosts of containers change their names
	case c.Replica == "" && err != nil:
		return fmt.Errorf("state.replica: the host has no name to take (%w); set one", err)
	default:
		process.SetDefault(&c.Replica, strings.ToLower(host))
	}
	return nil
}

func (c *Config) shared() bool { return c.Postgres != nil || c.Kubernetes != nil }

// check refuses what could not be followed.
func (c *Config) check() error {
	n := 0
	for _, set := range []bool{c.SQLite != "", c.Postgres != nil, c.Kubernetes != nil} {
		if set {
			n++
		}
	}
	switch {
	case n == 0:
		return errors.New("state: set one of sqlite, postgres and kubernetes; sqlite names a file, such as state.db")
	case n > 1:
		return errors.New("state: more than one of sqlite, postgres and kubernetes is set; set the one where the state lies")
	case c.SealingKey == "" && c.shared():
		return errors.New("state.sealingKey is missing; name the file of the sealing key, which all servers on this store have, and which should not lie with the store")
	}
	if err := store.CheckName(c.Replica); err != nil {
		return fmt.Errorf("state.replica: %.80q cannot be a replica's name: %w; set one such as server-1", c.Replica, err)
	}
	if c.Postgres != nil {
		if err := c.Postgres.Check(); err != nil {
			return fmt.Errorf("state.postgres: %w", err)
		}
	}
	if c.Kubernetes != nil {
		if err := c.Kubernetes.Check(); err != nil {
			return fmt.Errorf("state.kubernetes: %w", err)
		}
	}
	return nil
}
