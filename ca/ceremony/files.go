package ceremony

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

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
type set struct{ dir, work string }

func newSet(dir string) (*set, error) {
	s := &set{dir, dir + ".incomplete"}
	err := os.Mkdir(s.work, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("%s is left from a ceremony that did not end, or another one runs; nothing in it counts: remove it first", s.work)
	} else if err != nil {
		return nil, fmt.Errorf("making output folder: %w", err)
	}
	return s, nil
}

// write adds a file, durably.
func (s *set) write(name string, data []byte, mode os.FileMode) error {
	f, err := os.OpenFile(filepath.Join(s.work, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return fmt.Errorf("writing output: %w", err)
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("writing output %s: %w", name, err)
	}
	return nil
}

// commit makes the folder appear under its name, unless something has that name by now.
func (s *set) commit() error {
	if err := syncDir(s.work); err != nil {
		return fmt.Errorf("writing output: %w", err)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, s.work, unix.AT_FDCWD, s.dir, unix.RENAME_NOREPLACE); err != nil {
		return fmt.Errorf("naming output folder %s: %w", s.dir, err)
	}
	if err := syncDir(filepath.Dir(s.dir)); err != nil {
		return fmt.Errorf("writing output: %w", err)
	}
	return nil
}

// drop removes what was written, after a failure.
func (s *set) drop() error { return os.RemoveAll(s.work) }

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
