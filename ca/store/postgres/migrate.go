package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/chancery-project/chancery/ca/store"
)

// migrations make the tables: the n-th leads from version n to n+1. An older replica goes on working beside a newer one, so they
// only add, what has a default.
var migrations = []string{`
	CREATE TABLE @schema.document (
		id integer PRIMARY KEY CHECK (id = 1),
		version bigint NOT NULL CHECK (version > 0),
		data bytea NOT NULL
	);
	CREATE TABLE @schema.note (
		replica text COLLATE "C" PRIMARY KEY,
		data bytea NOT NULL
	);
	CREATE TABLE @schema.lease (
		id integer PRIMARY KEY CHECK (id = 1),
		holder text NOT NULL,
		until timestamptz NOT NULL
	)`}

// querier is a pool, or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// tablesVersion returns the version of the tables; 0 if there are none.
func (s *Store) tablesVersion(ctx context.Context, q querier) (int, error) {
	// Not by to_regclass: that may answer from a cache what it answered before somebody else made the tables.
	const tables = `SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = 'schema_version')`
	var there bool
	if err := q.QueryRow(ctx, tables, s.target.schema).Scan(&there); err != nil || !there {
		return 0, err
	}
	var v int
	if err := q.QueryRow(ctx, s.sql.version).Scan(&v); err != nil {
		return 0, fmt.Errorf("reading the version of its tables: %w", err)
	}
	if v > len(migrations) {
		return 0, fmt.Errorf("its tables are of version %d, which a newer chancery made; this one knows %d: use the newer one", v, len(migrations))
	}
	if v < 1 {
		return 0, fmt.Errorf("its tables say that they are of version %d", v)
	}
	return v, nil
}

// upgrade brings existing tables up to date.
func (s *Store) upgrade(ctx context.Context) error {
	v, err := s.tablesVersion(ctx, s.pool)
	switch {
	case err != nil:
		return err
	case v == 0:
		return fmt.Errorf("it has no tables of Chancery; `chancery authority init` makes them: %w", store.ErrMissing)
	case v == len(migrations):
		return nil
	}
	return s.migrate(ctx)
}

// migrate makes the tables, or brings them up to date. Who comes second waits, and finds it done.
func (s *Store) migrate(ctx context.Context) error {
	if v, err := s.tablesVersion(ctx, s.pool); err != nil || v == len(migrations) {
		return err // nothing that needs a right to make tables
	}
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, s.target.lockKey()); err != nil {
			return fmt.Errorf("waiting for others that make them: %w", err)
		}
		v, err := s.tablesVersion(ctx, tx)
		if err != nil || v == len(migrations) {
			return err
		}
		return s.migrateFrom(ctx, tx, v)
	})
	if err != nil {
		return fmt.Errorf("making tables: %w", err)
	}
	return nil
}

func (s *Store) migrateFrom(ctx context.Context, tx pgx.Tx, v int) error {
	schema := pgx.Identifier{s.target.schema}.Sanitize()
	var all []string
	if v == 0 {
		var there bool
		if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, s.target.schema).Scan(&there); err != nil {
			return err
		}
		if !there { // IF NOT EXISTS would ask for the right to make it even if it is there
			all = append(all, `CREATE SCHEMA @schema`)
		}
		all = append(all, `CREATE TABLE @schema.schema_version (id integer PRIMARY KEY CHECK (id = 1), version integer NOT NULL)`,
			`INSERT INTO @schema.schema_version (id, version) VALUES (1, 0)`)
	}
	all = append(all, migrations[v:]...)
	all = append(all, fmt.Sprintf(`UPDATE @schema.schema_version SET version = %d`, len(migrations)))
	for _, text := range all {
		for statement := range strings.SplitSeq(text, ";") {
			if _, err := tx.Exec(ctx, strings.ReplaceAll(statement, "@schema", schema)); err != nil {
				return refusedBy(err)
			}
		}
	}
	return nil
}

// refusedBy says which statement it was: a role that may not make tables is the common case.
func refusedBy(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == "42501" {
		return fmt.Errorf("%w; that takes the role that owns them", err)
	}
	return err
}
