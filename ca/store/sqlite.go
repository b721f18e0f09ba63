package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/chancery-project/chancery/ca/durable"
)

// SQLite is the embedded store: one row in a database file, held by one process.
type SQLite struct {
	db   *sql.DB
	path string
	lock *os.File

	mu      sync.Mutex    // guards both
	changed chan struct{} // closed at the next change
	lease   lease

	closing sync.Once
	closed  chan struct{} // closed by Close
}

// OpenSQLite opens an existing database; ErrMissing if there is none, ErrLocked if another process holds it.
func OpenSQLite(ctx context.Context, path string) (*SQLite, error) {
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("opening state %s: %w", path, ErrMissing)
	}
	return openSQLite(ctx, path, "rw")
}

// CreateSQLite opens a database, making the file with mode 0600 if it does not exist.
func CreateSQLite(ctx context.Context, path string) (*SQLite, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600) // SQLite itself would follow the umask
	if err != nil {
		return nil, fmt.Errorf("creating state: %w", err)
	}
	f.Close()
	return openSQLite(ctx, path, "rw")
}

func openSQLite(ctx context.Context, path, mode string) (*SQLite, error) {
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, fmt.Errorf("opening state %s: %w", path, err)
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("opening state %s: %w", path, err)
	}
	dsn := (&url.URL{Scheme: "file", Path: abs}).String() + "?mode=" + mode +
		"&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=busy_timeout(5000)"
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("opening state %s: %w", path, err)
	}
	db.SetMaxOpenConns(1)
	s := &SQLite{db: db, path: path, lock: lock, changed: make(chan struct{}), closed: make(chan struct{})}
	const schema = `CREATE TABLE IF NOT EXISTS document (id INTEGER PRIMARY KEY CHECK (id = 1), version INTEGER NOT NULL, data BLOB NOT NULL);` + noteSchema
	if _, err := db.ExecContext(ctx, schema); err != nil {
		s.Close()
		return nil, fmt.Errorf("opening state %s: %w", path, err)
	}
	return s, nil
}

// lockFile takes an advisory lock that the kernel drops with the process, and writes the owner into the file.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		owner := make([]byte, 20)
		n, _ := f.Read(owner)
		f.Close()
		return nil, fmt.Errorf("%w (pid %s)", ErrLocked, strings.TrimSpace(string(owner[:n])))
	}
	if err := f.Truncate(0); err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
		if err != nil {
			f.Close()
			return nil, err
		}
	}
	return f, nil
}

// Load implements Document.
func (s *SQLite) Load(ctx context.Context) (data []byte, version uint64, err error) {
	var size int64
	err = s.db.QueryRowContext(ctx, `SELECT iif(length(data) <= ?, data, NULL), length(data), version FROM document WHERE id = 1`, MaxDocument).
		Scan(&data, &size, &version)
	if errors.Is(err, sql.ErrNoRows) {
		err = ErrMissing
	} else if err == nil && size > MaxDocument {
		err = fmt.Errorf("it has %d bytes; at most %d are read", size, MaxDocument)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("loading document from %s: %w", s.path, s.why(ctx, err))
	}
	return data, version, nil
}

// Create implements Document.
func (s *SQLite) Create(ctx context.Context, version uint64, data []byte) error {
	if err := CheckDocument(0, version, data); err != nil {
		return fmt.Errorf("creating document in %s: %w", s.path, err)
	}
	return s.change(ctx, "creating", `INSERT INTO document (id, version, data) VALUES (1, ?, ?) ON CONFLICT DO NOTHING`, version, blob(data))
}

// Replace implements Document. When it returns an error other than ErrConflict, the write may or may not have happened:
// Load tells.
func (s *SQLite) Replace(ctx context.Context, old, next uint64, data []byte) error {
	if err := CheckDocument(old, next, data); err != nil {
		return fmt.Errorf("replacing document in %s: %w", s.path, err)
	}
	return s.change(ctx, "replacing", `UPDATE document SET version = ?, data = ? WHERE id = 1 AND version = ?`, next, blob(data), old)
}

// blob keeps the driver from storing nothing as NULL.
func blob(data []byte) []byte {
	if data == nil {
		return []byte{}
	}
	return data
}

// change runs a statement that changes one row, or none if another was faster.
func (s *SQLite) change(ctx context.Context, doing, statement string, args ...any) error {
	var res sql.Result
	err := durable.Do(durable.Step{Kind: durable.Commit, Path: s.path}, func(int) (err error) {
		res, err = s.db.ExecContext(ctx, statement, args...)
		return err
	})
	var n int64
	if err == nil {
		n, err = res.RowsAffected()
	}
	if err == nil && n != 1 {
		err = ErrConflict
	}
	if err != nil {
		return fmt.Errorf("%s document in %s: %w", doing, s.path, s.why(ctx, err))
	}
	s.news()
	return nil
}

// Close closes the database and lets go of the lock.
func (s *SQLite) Close() (err error) {
	s.closing.Do(func() {
		close(s.closed)
		err = errors.Join(s.db.Close(), s.lock.Close())
	})
	return err
}
