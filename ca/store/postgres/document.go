package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/chancery-project/chancery/ca/store"
)

// Load implements store.Document.
func (s *Store) Load(ctx context.Context) (data []byte, version uint64, err error) {
	err = s.call(ctx, "loading document from", func(ctx context.Context) error {
		var v, size int64
		err := s.pool.QueryRow(ctx, s.sql.load, asBytes).Scan(&v, &size, &data)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return store.ErrMissing
		case err != nil:
			return err
		case size > store.MaxDocument:
			return fmt.Errorf("it has %d bytes; at most %d are read", size, store.MaxDocument)
		case v <= 0 || v > store.MaxVersion:
			return fmt.Errorf("its version is %d; it should be 1 to %d", v, uint64(store.MaxVersion))
		}
		version = uint64(v)
		return nil
	})
	if err != nil {
		return nil, 0, err
	}
	return data, version, nil
}

// Create implements store.Document.
func (s *Store) Create(ctx context.Context, version uint64, data []byte) error {
	return s.call(ctx, "creating document in", func(ctx context.Context) error {
		if err := store.CheckDocument(0, version, data); err != nil {
			return err
		}
		return s.change(ctx, s.sql.create, int64(version), blob(data))
	})
}

// Replace implements store.Document. A row is changed by one at a time, and who waited for it looks at its version again.
func (s *Store) Replace(ctx context.Context, old, next uint64, data []byte) error {
	return s.call(ctx, "replacing document in", func(ctx context.Context) error {
		if err := store.CheckDocument(old, next, data); err != nil {
			return err
		}
		return s.change(ctx, s.sql.replace, int64(next), blob(data), int64(old))
	})
}

// change runs a statement that changes one row, or none if another was faster.
func (s *Store) change(ctx context.Context, statement string, args ...any) error {
	tag, err := s.pool.Exec(ctx, statement, args...)
	if err == nil && tag.RowsAffected() != 1 {
		err = store.ErrConflict
	}
	return err
}

// blob keeps nothing from being sent as NULL.
func blob(data []byte) []byte {
	if data == nil {
		return []byte{}
	}
	return data
}
