package postgres

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/chancery-project/chancery/ca/store"
)

// Hold implements store.Lease, by the database's clock.
func (s *Store) Hold(ctx context.Context, holder string, life time.Duration) (held bool, by string, err error) {
	err = s.call(ctx, "taking the lease in", func(ctx context.Context) error {
		if err := store.CheckLease(holder, life); err != nil {
			return err
		}
		for {
			var taken bool
			err := s.pool.QueryRow(ctx, s.sql.hold, holder, life.Milliseconds()).Scan(&by, &held, &taken)
			if err != nil && !errors.Is(err, pgx.ErrNoRows) {
				return err
			}
			// Else it was free, and somebody else got it: who is not known yet.
			if err == nil && (held || taken) {
				return nil
			}
		}
	})
	if err != nil {
		return false, "", err
	}
	return held, by, nil
}

// GiveUp implements store.Lease.
func (s *Store) GiveUp(ctx context.Context, holder string) error {
	return s.call(ctx, "giving up the lease in", func(ctx context.Context) error {
		_, err := s.pool.Exec(ctx, s.sql.giveUp, holder)
		return err
	})
}

// PutNote implements store.Notes.
func (s *Store) PutNote(ctx context.Context, replica string, data []byte) error {
	return s.call(ctx, "writing a note into", func(ctx context.Context) error {
		if err := store.CheckNote(replica, data); err != nil {
			return err
		}
		tag, err := s.pool.Exec(ctx, s.sql.updateNote, replica, blob(data))
		if err != nil || tag.RowsAffected() > 0 {
			return err
		}
		return s.newNote(ctx, replica, blob(data))
	})
}

// newNote adds a note. One is added at a time, so that there are not too many.
func (s *Store) newNote(ctx context.Context, replica string, data []byte) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, s.sql.lockNotes); err != nil {
			return err
		}
		var others int64
		if err := tx.QueryRow(ctx, s.sql.countNotes, replica).Scan(&others); err != nil {
			return err
		}
		if others >= store.MaxNotes {
			return store.ErrTooManyNotes
		}
		_, err := tx.Exec(ctx, s.sql.insertNote, replica, data)
		return err
	})
}

// Notes implements store.Notes.
func (s *Store) Notes(ctx context.Context) (all map[string][]byte, err error) {
	err = s.call(ctx, "reading notes from", func(ctx context.Context) error {
		all = map[string][]byte{}
		rows, err := s.pool.Query(ctx, s.sql.list, asBytes)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var name string
			var size int64
			var data []byte
			if err := rows.Scan(&name, &size, &data); err != nil {
				return err
			}
			if err := store.CheckReadNote(name, size, len(all)); err != nil {
				return err
			}
			all[name] = data
		}
		return rows.Err()
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// DropNote implements store.Notes.
func (s *Store) DropNote(ctx context.Context, replica string) error {
	return s.call(ctx, "deleting a note from", func(ctx context.Context) error {
		_, err := s.pool.Exec(ctx, s.sql.drop, replica)
		return err
	})
}
