package issuelog

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// disk writes the files of a log. Its methods say what is on disk when they return without an error.
type disk struct {
	dir string
	// fault, if set, is asked before each step, for tests: how many bytes of it to do (all if negative) and which error
	// to return after it.
	fault func(step, name string) (do int, err error)
}

// Steps that can fail, as disk.fault names them.
const (
	stepJournal   = "journal write"
	stepTruncate  = "journal truncate"
	stepWrite     = "write"
	stepSync      = "sync"
	stepTemporary = "checkpoint write"
	stepRename    = "checkpoint rename"
)

// do runs a step unless a fault comes first.
func (d *disk) do(step, name string, data []byte, f func([]byte) error) error {
	if d.fault != nil {
		n, err := d.fault(step, name)
		if n >= 0 && n < len(data) {
			data = data[:n]
		}
		if n != 0 {
			err = errors.Join(f(data), err)
		}
		return err
	}
	return f(data)
}

func (d *disk) path(name string) string { return filepath.Join(d.dir, name) }

// append writes to a journal. It is not synced: the kernel has it, whatever becomes of the process. A second sync for
// each group of entries would cost a tenth of all that a server issues, and the audit log has them synced.
func (d *disk) append(f *os.File, data []byte) error {
	return d.do(stepJournal, f.Name(), data, func(b []byte) error {
		_, err := f.Write(b)
		return err
	})
}

// truncate empties a journal. It is not synced: what comes back after a crash is in the tree already.
func (d *disk) truncate(f *os.File) error {
	return d.do(stepTruncate, f.Name(), nil, func([]byte) error { return f.Truncate(0) })
}

// replace writes a file whole or not at all.
func (d *disk) replace(name string, data []byte) error {
	tmp := d.path(name + ".new")
	err := d.do(stepTemporary, name, data, func(b []byte) error { return writeSynced(tmp, b) })
	if err == nil {
		err = d.do(stepRename, name, nil, func([]byte) error {
			return errors.Join(os.Rename(tmp, d.path(name)), syncDir(d.dir))
		})
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", d.path(name), err)
	}
	return nil
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// writer writes tiles and bundles, and syncs many at a time.
type writer struct {
	disk *disk
	open []*os.File
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
	if have, err := os.ReadFile(path); err != nil || !bytes.Equal(have, data) {
		err := t.disk.do(stepWrite, name, data, func(b []byte) error {
			if err := f.Truncate(0); err != nil {
				return err
			}
			_, err := f.Write(b)
			return err
		})
		if err != nil {
			return fmt.Errorf("writing %s: %w", path, err)
		}
	}
	if len(t.open) < maxOpen {
		return nil
	}
	return t.sync()
}

func (t *writer) create(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return nil, err
		}
		f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
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
		errs = append(errs, t.disk.do(stepSync, f.Name(), nil, func([]byte) error { return f.Sync() }), f.Close())
	}
	t.open = t.open[:0]
	for dir := range t.dirs {
		errs = append(errs, syncDir(dir))
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
