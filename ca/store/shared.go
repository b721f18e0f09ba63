package store

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// This file is what the embedded store has for several replicas. One process holds it: lease and changes are its own.

const noteSchema = `
CREATE TABLE IF NOT EXISTS note (replica TEXT PRIMARY KEY, data BLOB NOT NULL)`

// lease is who has it. It is kept in memory: no other process can have it, and in the database it would cost a write to the disk
// each few seconds for as long as the server runs.
type lease struct {
	holder string
	until  time.Time
}

// Hold implements Lease, by this machine's clock.
func (s *SQLite) Hold(ctx context.Context, holder string, life time.Duration) (held bool, by string, err error) {
	if err = CheckLease(holder, life); err == nil {
		err = s.usable(ctx)
	}
	if err != nil {
		return false, "", fmt.Errorf("taking the lease in %s: %w", s.path, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); s.lease.holder == holder || !now.Before(s.lease.until) {
		s.lease = lease{holder, now.Add(life)}
	}
	return s.lease.holder == holder, s.lease.holder, nil
}

// GiveUp implements Lease.
func (s *SQLite) GiveUp(ctx context.Context, holder string) error {
	if err := s.usable(ctx); err != nil {
		return fmt.Errorf("giving up the lease in %s: %w", s.path, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease.holder == holder {
		s.lease = lease{}
	}
	return nil
}

// usable returns why nothing can be done with the store.
func (s *SQLite) usable(ctx context.Context) error {
	select {
	case <-s.closed:
		return ErrClosed
	default:
		return ctx.Err()
	}
}

// PutNote implements Notes.
func (s *SQLite) PutNote(ctx context.Context, replica string, data []byte) error {
	if err := CheckNote(replica, data); err != nil {
		return fmt.Errorf("writing a note into %s: %w", s.path, err)
	}
	const statement = `INSERT INTO note (replica, data) SELECT ?1, ?2 WHERE (SELECT count(*) FROM note WHERE replica != ?1) < ?3
		ON CONFLICT (replica) DO UPDATE SET data = excluded.data`
	res, err := s.db.ExecContext(ctx, statement, replica, blob(data), MaxNotes)
	var n int64
	if err == nil {
		n, err = res.RowsAffected()
	}
	if err == nil && n == 0 {
		err = ErrTooManyNotes
	}
	if err != nil {
		return fmt.Errorf("writing the note of replica %s into %s: %w", replica, s.path, s.why(ctx, err))
	}
	s.news()
	return nil
}

// Notes implements Notes.
func (s *SQLite) Notes(ctx context.Context) (map[string][]byte, error) {
	all, err := s.notes(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading notes from %s: %w", s.path, s.why(ctx, err))
	}
	return all, nil
}

func (s *SQLite) notes(ctx context.Context) (map[string][]byte, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT replica, iif(length(data) <= ?, data, NULL), length(data) FROM note LIMIT ?`, MaxNote, MaxNotes+1)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	all := map[string][]byte{}
	for rows.Next() {
		var name string
		var data []byte
		var size int64
		if err := rows.Scan(&name, &data, &size); err != nil {
			return nil, err
		}
		if err := CheckReadNote(name, size, len(all)); err != nil {
			return nil, err
		}
		all[name] = data
	}
	return all, rows.Err()
}

// DropNote implements Notes.
func (s *SQLite) DropNote(ctx context.Context, replica string) error {
	if _, err := s.db.ExecContext(ctx, `DELETE FROM note WHERE replica = ?`, replica); err != nil {
		return fmt.Errorf("deleting the note of replica %s from %s: %w", replica, s.path, s.why(ctx, err))
	}
	s.news()
	return nil
}

// Watch implements Store.
func (s *SQLite) Watch(ctx context.Context, changed func()) error {
	for {
		s.mu.Lock()
		next := s.changed
		s.mu.Unlock()
		changed()
		select {
		case <-ctx.Done():
			return nil
		case <-s.closed:
			return fmt.Errorf("watching %s: %w", s.path, ErrClosed)
		case <-next:
		}
	}
}

// news wakes who watches.
func (s *SQLite) news() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.changed)
	s.changed = make(chan struct{})
}

// why says of an error that came after Close, or with the end of a context, that it is that: the engine has words of its own.
func (s *SQLite) why(ctx context.Context, err error) error {
	if errors.Is(err, ErrConflict) || errors.Is(err, ErrMissing) {
		return err
	}
	select {
	case <-s.closed:
		return ErrClosed
	default:
	}
	if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
		return fmt.Errorf("%w (%w)", ctx.Err(), err)
	}
	return err
}

// ErrTooManyNotes: there are MaxNotes of other replicas.
var ErrTooManyNotes = fmt.Errorf("there are notes of %d other replicas already; `chancery replica forget NAME` drops those that are gone", MaxNotes)

// CheckDocument is what every store holds a document to that comes as a version after old, which is 0 for the first.
func CheckDocument(old, next uint64, data []byte) error {
	if next <= old || next > MaxVersion {
		return fmt.Errorf("version %d after %d; it should be above that, and at most %d", next, old, uint64(MaxVersion))
	}
	if len(data) > MaxDocument {
		return fmt.Errorf("the document has %d bytes; at most %d are stored", len(data), MaxDocument)
	}
	return nil
}

// CheckReadNote is what every store holds a note to that it reads, before it reads its bytes; with how many were read before it.
func CheckReadNote(replica string, size int64, before int) error {
	if before >= MaxNotes {
		return fmt.Errorf("there are more than %d notes", MaxNotes)
	}
	if size > MaxNote {
		return fmt.Errorf("the note of replica %.300q has %d bytes; at most %d are read", replica, size, MaxNote)
	}
	return nil
}

// NoteRoom is how many bytes the note of one replica may have in a store: MaxNote, unless its engine takes less.
func NoteRoom(s Notes) int {
	if less, ok := s.(interface{ NoteRoom() int }); ok {
		return less.NoteRoom()
	}
	return MaxNote
}

// CheckNote is what every store holds a note to.
func CheckNote(replica string, data []byte) error {
	if err := CheckName(replica); err != nil {
		return fmt.Errorf("name of replica: %w", err)
	}
	if len(data) > MaxNote {
		return fmt.Errorf("the note of replica %s has %d bytes; at most %d are stored", replica, len(data), MaxNote)
	}
	return nil
}

// CheckLease is what every store holds a lease to.
func CheckLease(holder string, life time.Duration) error {
	if err := CheckName(holder); err != nil {
		return fmt.Errorf("holder of the lease: %w", err)
	}
	if life < time.Second || life > time.Minute {
		return fmt.Errorf("a lease of %s; it should be between 1s and 1m", life)
	}
	return nil
}

// CheckName checks a name of a replica or of who holds the lease: the names are those of objects in Kubernetes too.
func CheckName(s string) error {
	if len(s) == 0 || len(s) > MaxName {
		return fmt.Errorf("it has %d bytes; 1 to %d are allowed", len(s), MaxName)
	}
	for i, c := range []byte(s) {
		inner := c == '-' || c == '.'
		if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || inner && i > 0 && i < len(s)-1) {
			return errors.New("only a-z, 0-9, and between these - and . are allowed")
		}
	}
	return nil
}
