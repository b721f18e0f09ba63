package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// maxCopy bounds what Read copies, in bytes of database and write-ahead log each.
const maxCopy = 256 << 20

// ErrChanging: the database changed each time while it was copied.
var ErrChanging = errors.New("it is being written to")

// Read returns the document of a database, for who only looks: whether a process holds the store or not, its lock is not
// touched, nothing in its folder is written, and the right to read its files is enough. It reads a copy of database and
// write-ahead log, in a temporary folder that only this user can read. ErrMissing as for OpenSQLite and Load.
func Read(ctx context.Context, path string) (data []byte, version uint64, err error) {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, 0, fmt.Errorf("reading state %s: %w", path, ErrMissing)
	}
	dir, err := os.MkdirTemp("", "chancery-state-")
	if err != nil {
		return nil, 0, fmt.Errorf("reading state %s: %w", path, err)
	}
	defer os.RemoveAll(dir)
	tmp := filepath.Join(dir, "state.db")
	if err := copyStill(ctx, path, tmp); err != nil {
		return nil, 0, fmt.Errorf("reading state %s: %w", path, err)
	}
	s, err := OpenSQLite(ctx, tmp)
	if err != nil {
		return nil, 0, fmt.Errorf("reading a copy of state %s: %w", path, err)
	}
	defer s.Close()
	data, version, err = s.Load(ctx)
	if errors.Is(err, ErrMissing) {
		err = fmt.Errorf("reading state %s: %w", path, ErrMissing) // not the copy's name
	}
	return data, version, err
}

// copyStill copies database and log at a moment at which neither changed: a copy of two moments could be neither.
func copyStill(ctx context.Context, from, to string) error {
	const tries = 5
	for range tries {
		before := looks(from)
		if err := copyFile(from, to); err != nil {
			return err
		}
		if err := copyFile(from+"-wal", to+"-wal"); errors.Is(err, fs.ErrNotExist) {
			os.Remove(to + "-wal") // of an earlier try
		} else if err != nil {
			return err
		}
		if looks(from) == before {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return ErrChanging
}

// look is what shows that a file changed.
type look struct {
	size int64
	time time.Time
}

func looks(path string) (all [2]look) {
	for i, p := range []string{path, path + "-wal"} {
		if info, err := os.Stat(p); err == nil {
			all[i] = look{info.Size(), info.ModTime()}
		}
	}
	return all
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(out, io.LimitReader(in, maxCopy+1))
	if err = errors.Join(err, out.Close()); err != nil {
		return err
	}
	if n > maxCopy {
		return fmt.Errorf("%s has more than %d bytes", from, int64(maxCopy))
	}
	return nil
}
