package ceremony

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/trust"
)

// readBounded reads a regular file; a secret one may be open to its owner only.
func readBounded(path string, secret bool) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if secret && info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s has mode %04o; a private key should have 0600", path, info.Mode().Perm())
	}
	data, err := io.ReadAll(io.LimitReader(f, trust.MaxPEMBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > trust.MaxPEMBytes {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, trust.MaxPEMBytes)
	}
	return data, nil
}

// set is a folder that appears complete or not at all: files are written into a folder beside it, which is then renamed.
type set struct {
	dir, work  string
	committing bool // commit has begun
}

func newSet(dir string) (*set, error) {
	s := &set{dir: dir, work: dir + ".incomplete"}
	err := durable.MakeDir(s.work)
	if errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("%s is left from a ceremony that did not end, or another one runs; nothing in it counts: remove it first", s.work)
	} else if err != nil {
		return nil, fmt.Errorf("making output folder: %w", err)
	}
	return s, nil
}

// write adds a file, durably.
func (s *set) write(name string, data []byte, mode os.FileMode) error {
	if err := durable.WriteNew(filepath.Join(s.work, name), data, mode); err != nil {
		return fmt.Errorf("writing output %s: %w", name, err)
	}
	return nil
}

// commit makes the folder appear under its name, unless something has that name by now.
func (s *set) commit() error {
	if err := durable.SyncDirectory(s.work); err != nil {
		return fmt.Errorf("writing output: %w", err)
	}
	s.committing = true
	if err := durable.RenameFree(s.work, s.dir); err != nil {
		return fmt.Errorf("naming output folder %s: %w", s.dir, err)
	}
	if err := durable.SyncDirectory(filepath.Dir(s.dir)); err != nil {
		return fmt.Errorf("writing output: %w", err)
	}
	return nil
}

// drop removes what was written, after a failure. A folder that has its name already is ours only if the one beside it
// has gone: renaming can fail, and be done.
func (s *set) drop() error {
	if _, err := os.Lstat(s.work); s.committing && errors.Is(err, fs.ErrNotExist) {
		return errors.Join(durable.RemoveTree(s.dir), durable.SyncDirectory(filepath.Dir(s.dir)))
	}
	return durable.RemoveTree(s.work)
}
