// Package durable owns the few steps by which files change so that a crash leaves them right: write, sync, rename, sync the
// folder. Logs, key files and stores take them from here, so that a test can come between any two of them (Inject).
//
// It refuses to decide what is to be durable, and when: that is its callers' invariant. It does not read.
package durable

import (
	"crypto/rand"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Kind says what a step does.
type Kind string

// The kinds of steps.
const (
	Create   Kind = "create"   // opens a file for writing, and makes it if it does not exist
	Write    Kind = "write"    // of Data, at the file's end or place
	Sync     Kind = "sync"     // of a file's content
	Truncate Kind = "truncate" // to nothing
	Rename   Kind = "rename"   // of Path to To
	Link     Kind = "link"     // of Path as To, too
	Remove   Kind = "remove"
	Mkdir    Kind = "mkdir"
	SyncDir  Kind = "syncdir" // of the names in a folder
	Commit   Kind = "commit"  // of a change to a database; the rest is its own
)

// Step is one step.
type Step struct {
	Kind     Kind
	Path, To string
	Data     []byte
}

// Around stands around a step: do does it and returns its error, of a write the first n bytes, or all if n is negative.
type Around func(s Step, do func(n int) error) error

// injected are the folders with an Around; nil almost always, and in every program that is not a test.
var injected atomic.Pointer[map[string]Around]

var injecting sync.Mutex // held while injected is exchanged

// Inject puts a function around each step below a folder, until remove is called. It is for tests of faults alone.
func Inject(dir string, a Around) (remove func()) {
	set := func(a Around) {
		injecting.Lock()
		defer injecting.Unlock()
		next := map[string]Around{}
		if old := injected.Load(); old != nil {
			maps.Copy(next, *old)
		}
		if next[dir] = a; a == nil {
			delete(next, dir)
		}
		if len(next) == 0 {
			injected.Store(nil)
		} else {
			injected.Store(&next)
		}
	}
	set(a)
	return func() { set(nil) }
}

// Do does a step that only its caller knows how to do.
func Do(s Step, do func(n int) error) error {
	all := injected.Load()
	if all == nil {
		return do(-1)
	}
	for dir, around := range *all {
		if rest, ok := strings.CutPrefix(s.Path, dir); ok && (rest == "" || os.IsPathSeparator(rest[0])) {
			return around(s, do)
		}
	}
	return do(-1)
}

func step(k Kind, path string, f func() error) error {
	return Do(Step{Kind: k, Path: path}, func(int) error { return f() })
}

// File is a file that is written to.
type File struct{ *os.File }

// OpenFile is os.OpenFile.
func OpenFile(path string, flag int, mode os.FileMode) (f *File, err error) {
	err = step(Create, path, func() error {
		file, err := os.OpenFile(path, flag, mode)
		f = &File{file}
		return err
	})
	if err != nil {
		if f != nil && f.File != nil {
			f.File.Close()
		}
		return nil, err
	}
	return f, nil
}

// Write writes all of data or returns an error.
func (f *File) Write(data []byte) (n int, err error) {
	if injected.Load() == nil { // every group of both logs comes this way
		return f.File.Write(data)
	}
	err = Do(Step{Kind: Write, Path: f.Name(), Data: data}, func(most int) error {
		if most < 0 || most > len(data) {
			most = len(data)
		}
		n, err = f.File.Write(data[:most])
		return err
	})
	if err == nil && n < len(data) {
		err = errors.New("a step was left out without an error")
	}
	return n, err
}

// Sync makes the file's content durable, not its name.
func (f *File) Sync() error { return step(Sync, f.Name(), f.File.Sync) }

// SyncData is Sync without the time of the last change.
func (f *File) SyncData() error {
	if injected.Load() == nil {
		return unix.Fdatasync(int(f.Fd()))
	}
	return step(Sync, f.Name(), func() error { return unix.Fdatasync(int(f.Fd())) })
}

// Empty cuts the file to nothing.
func (f *File) Empty() error { return step(Truncate, f.Name(), func() error { return f.Truncate(0) }) }

// SyncDirectory makes the names in a folder durable.
func SyncDirectory(dir string) error {
	return step(SyncDir, dir, func() error {
		d, err := os.Open(dir)
		if err != nil {
			return err
		}
		return errors.Join(d.Sync(), d.Close())
	})
}

// RenameFile gives a file another name, at one stroke.
func RenameFile(from, to string) error {
	return Do(Step{Kind: Rename, Path: from, To: to}, func(int) error { return os.Rename(from, to) })
}

// RenameFree is RenameFile to a name that must be free.
func RenameFree(from, to string) error {
	return Do(Step{Kind: Rename, Path: from, To: to}, func(int) error {
		return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	})
}

// LinkFile gives a file a further name, which must be free.
func LinkFile(from, to string) error {
	return Do(Step{Kind: Link, Path: from, To: to}, func(int) error { return os.Link(from, to) })
}

// RemoveFile removes a file or an empty folder. One that is not there is fs.ErrNotExist.
func RemoveFile(path string) error {
	return step(Remove, path, func() error { return os.Remove(path) })
}

// RemoveTree removes a file or folder and all in it, if it is there.
func RemoveTree(path string) error {
	return step(Remove, path, func() error { return os.RemoveAll(path) })
}

// MakeDir makes a folder with mode 0700. Its name is not durable yet.
func MakeDir(path string) error {
	return step(Mkdir, path, func() error { return os.Mkdir(path, 0o700) })
}

// MakeDirs makes a folder with mode 0700, and those above it that are missing, durably.
func MakeDirs(path string) error {
	return makeDirs(path, func(made string) error { return SyncDirectory(filepath.Dir(made)) })
}

// MakeDirsUnsynced is MakeDirs for a caller that syncs the folders above by itself, later.
func MakeDirsUnsynced(path string) error { return makeDirs(path, func(string) error { return nil }) }

func makeDirs(path string, then func(made string) error) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil
	}
	if up := filepath.Dir(path); up != path {
		if err := makeDirs(up, then); err != nil {
			return err
		}
	}
	err := MakeDir(path)
	if info, statErr := os.Stat(path); errors.Is(err, fs.ErrExist) && statErr == nil && info.IsDir() {
		return nil
	}
	if err != nil {
		return err
	}
	return then(path)
}

// Replace writes a file whole or not at all, whatever was there under its name. After an error it is the old one or the
// new one.
func Replace(path string, data []byte, mode os.FileMode) error {
	tmp := path + ".new"
	if err := RemoveFile(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a crash, maybe with another mode
		return err
	}
	if err := WriteNew(tmp, data, mode); err != nil {
		return errors.Join(err, ignoreMissing(RemoveFile(tmp))) // it may fill the disk
	}
	if err := RenameFile(tmp, path); err != nil {
		return errors.Join(err, ignoreMissing(RemoveFile(tmp)))
	}
	return SyncDirectory(filepath.Dir(path))
}

// Place writes a file whole or not at all, under a name that must be free: what is there is never replaced.
func Place(path string, data []byte, mode os.FileMode) error {
	tmp := path + ".new-" + rand.Text() // another process may do the same
	err := WriteNew(tmp, data, mode)
	if err == nil {
		err = LinkFile(tmp, path) // unlike a rename it never replaces what is there
	}
	if err = errors.Join(err, ignoreMissing(RemoveFile(tmp))); err != nil {
		return err
	}
	return SyncDirectory(filepath.Dir(path))
}

// WriteNew makes a file that must not exist, with a mode whatever the umask, and syncs its content. Its name is not durable yet.
func WriteNew(path string, data []byte, mode os.FileMode) error {
	f, err := OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode) // EXCL: never through a link that others put there
	if err != nil {
		return err
	}
	err = f.Chmod(mode) // roots are public also where the umask says that nothing is
	if err == nil {
		_, err = f.Write(data)
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
