package svid

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/workloadapi"
	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/trust"
)

const (
	current   = "..data" // link to the set in use
	setPrefix = "..set-" // of the folders that hold sets
)

// writeSVID writes the default SVID as files, with CRLs.
func writeSVID(dir string, c *workloadapi.X509Context, crl []byte) error {
	s := c.DefaultSVID()
	key, err := trust.EncodeKey(s.PrivateKey)
	if err != nil {
		return err
	}
	roots, err := ownRoots(c)
	if err != nil {
		return err
	}
	return writeSet(dir, map[string][]byte{
		"svid.pem": trust.EncodeCertificates(s.Certificates...), "svid_key.pem": key, "bundle.pem": roots, "crl.pem": crl,
	})
}

// writeSet replaces a set of files at one stroke, as kubelet does: the files lie in a folder of their own, to which the
// symbolic link ..data points; what readers open are links through it. A crash before the link is swapped leaves the
// old set, and the new folder to be swept up by the next call. Whatever the umask, files have mode 0600 and folders
// that are made 0700.
func writeSet(dir string, files map[string][]byte) error {
	if err := makeDir(dir); err != nil {
		return explainAccess(err)
	}
	lock, err := lockDir(dir)
	if err != nil {
		return explainAccess(err)
	}
	defer lock.Close()
	names := slices.Sorted(maps.Keys(files))
	if err := checkForeign(dir, names); err != nil {
		return err
	}
	name, err := newSet(dir, files)
	if err != nil {
		return explainAccess(err)
	}
	if err := swapLink(name, filepath.Join(dir, current)); err != nil {
		return explainAccess(err)
	}
	for _, file := range names {
		if err := linkOnce(filepath.Join(current, file), filepath.Join(dir, file)); err != nil {
			return explainAccess(err)
		}
	}
	if err := lock.Sync(); err != nil {
		return err
	}
	return sweep(dir, name)
}

// explainAccess adds to an error what to do about it.
func explainAccess(err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w; the folder should be writable by this user (uid %d)", err, os.Getuid())
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w; choose a folder that can be written", err)
	case errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("%w; name a folder, or one that can be made", err)
	}
	return err
}

// makeDir makes a folder if it is missing. One that exists keeps its mode: files in it are 0600 anyway.
func makeDir(dir string) error {
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return os.Chmod(dir, 0o700)
}

// lockDir holds off other writers of the folder, whose sets this one would sweep up, until the file is closed.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", dir, err)
	}
	return f, nil
}

// checkForeign refuses, before anything is written, a folder in which something else lies under our names.
func checkForeign(dir string, files []string) error {
	inTheWay := func(path string) error {
		return fmt.Errorf("%s is in the way and was not made by this command; remove it or choose another folder", path)
	}
	path := filepath.Join(dir, current)
	if target, err := os.Readlink(path); err == nil && !strings.HasPrefix(target, setPrefix) || err != nil && !errors.Is(err, fs.ErrNotExist) {
		return inTheWay(path)
	}
	for _, file := range files {
		path := filepath.Join(dir, file)
		if target, err := os.Readlink(path); err == nil && target != filepath.Join(current, file) || err != nil && !errors.Is(err, fs.ErrNotExist) {
			return inTheWay(path)
		}
	}
	return nil
}

// newSet writes the files into a folder of their own, durably, and returns its name. Where it fails, such as on a full
// disk, nothing of it stays.
func newSet(dir string, files map[string][]byte) (name string, err error) {
	name = setPrefix + time.Now().UTC().Format("20060102T150405.000000000")
	path := filepath.Join(dir, name)
	if err := os.Mkdir(path, 0o700); err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(path)
		}
	}()
	if err := os.Chmod(path, 0o700); err != nil {
		return "", err
	}
	for file, data := range files {
		if err := writeSynced(filepath.Join(path, file), data); err != nil {
			return "", err
		}
	}
	d, err := os.Open(path)
	if err != nil {
		return "", err
	}
	return name, errors.Join(d.Sync(), d.Close())
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = f.Chmod(0o600)
	if err == nil {
		_, err = f.Write(data)
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func swapLink(target, link string) error {
	tmp := link + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, tmp); err != nil {
		return err
	}
	return os.Rename(tmp, link)
}

// linkOnce makes a link that does not exist yet; checkForeign has seen to it that one that does is ours.
func linkOnce(target, link string) error {
	if have, err := os.Readlink(link); err == nil && have == target {
		return nil
	}
	return os.Symlink(target, link)
}

// sweep removes the sets of former calls.
func sweep(dir, keep string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), setPrefix) && e.Name() != keep {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}
