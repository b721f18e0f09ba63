package issuelog

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/chancery-project/chancery/ca/durable"
)

// disk writes the files of a log. Its methods say what is on disk when they return without an error.
type disk struct{ dir string }

func (d *disk) path(name string) string { return filepath.Join(d.dir, name) }

// append writes to a journal. It is not synced: the kernel has it, whatever becomes of the process. A second sync for
// each group of entries would cost a tenth of all that a server issues, and the audit log has them synced.
func (d *disk) append(f *durable.File, data []byte) error {
	_, err := f.Write(data)
	return err
}

// truncate empties a journal. It is not synced: what comes back after a crash is in the tree already.
func (d *disk) truncate(f *durable.File) error { return f.Empty() }

// replace writes a file whole or not at all.
func (d *disk) replace(name string, data []byte) error {
	if err := durable.Replace(d.path(name), data, 0o600); err != nil {
		return fmt.Errorf("writing %s: %w", d.path(name), err)
	}
	return nil
}

// writer writes tiles and bundles, and syncs many at a time.
type writer struct {
	disk *disk
	open []*durable.File
	dirs map[string]bool // whose entries are to be synced
}

// maxOpen bounds the open files of a writer.
const maxOpen = 64

// write writes one file. A file that has the same bytes already is only synced: it may be part of a checkpoint that a
// reader has, and is never written again.
func (t *writer) write(name string, data []byte) error {
	path := t.disk.path(name)
	f, err := t.create(path)
	if err != nil {
		return fmt.Errorf("writing log: %w", err)
	}
	t.open = append(t.open, f)
	if have, err := readBounded(path, len(data)); err != nil || !bytes.Equal(have, data) {
		if err = f.Empty(); err == nil {
			_, err = f.Write(data)
		}
		if err != nil {
			return fmt.Errorf("writing %s: %w", path, err)
		}
	}
	if len(t.open) < maxOpen {
		return nil
	}
	return t.sync()
}

func (t *writer) create(path string) (*durable.File, error) {
	f, err := durable.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		if err := durable.MakeDirsUnsynced(filepath.Dir(path)); err != nil {
			return nil, err
		}
		f, err = durable.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	}
	// Folders that are new have to survive a crash too, each in the one above it.
	for dir := filepath.Dir(path); len(dir) >= len(t.disk.dir) && !t.dirs[dir]; dir = filepath.Dir(dir) {
		t.dirs[dir] = true
	}
	return f, err
}

// sync makes durable what was written, names included.
func (t *writer) sync() error {
	var errs []error
	for _, f := range t.open {
		errs = append(errs, f.Sync(), f.Close())
	}
	t.open = t.open[:0]
	for dir := range t.dirs {
		errs = append(errs, durable.SyncDirectory(dir))
	}
	clear(t.dirs)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("syncing log %s: %w", t.disk.dir, err)
	}
	return nil
}

// abandon closes what is open after an error.
func (t *writer) abandon() {
	for _, f := range t.open {
		f.Close()
	}
	t.open = nil
}
