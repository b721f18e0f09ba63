package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/spiffe/go-spiffe/v2/workloadapi"

	"github.com/chancery-project/chancery/trust"
)

type svidOf = x509svid.SVID

// writeSVID writes the default SVID as files.
func writeSVID(dir string, c *workloadapi.X509Context) error {
	s := c.DefaultSVID()
	key, err := trust.EncodeKey(s.PrivateKey)
	if err != nil {
		return err
	}
	return writeSet(dir, map[string][]byte{
		"svid.pem": trust.EncodeCertificates(s.Certificates...), "svid_key.pem": key, "bundle.pem": bundlePEM(c),
	})
}

// writeSet replaces a set of files at one stroke, as kubelet does: the files lie in a folder of their own, to which the
// symbolic link ..data points; what readers open are links through it. A crash before the link is swapped leaves the
// old set, and the new folder to be swept up by the next call.
func writeSet(dir string, files map[string][]byte) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("writing files: %w", err)
	}
	name := "..set-" + time.Now().UTC().Format("20060102T150405.000000000")
	if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
		return fmt.Errorf("writing files: %w", err)
	}
	for file, data := range files {
		if err := writeSynced(filepath.Join(dir, name, file), data); err != nil {
			return fmt.Errorf("writing files: %w", err)
		}
	}
	if err := swapLink(name, filepath.Join(dir, "..data")); err != nil {
		return fmt.Errorf("writing files: %w", err)
	}
	for file := range files {
		if err := linkOnce(filepath.Join("..data", file), filepath.Join(dir, file)); err != nil {
			return fmt.Errorf("writing files: %w", err)
		}
	}
	return sweep(dir, name)
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
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

// linkOnce makes a link; a file of the user's that is in the way is not touched.
func linkOnce(target, link string) error {
	if have, err := os.Readlink(link); err == nil && have == target {
		return nil
	} else if _, err := os.Lstat(link); err == nil {
		return fmt.Errorf("%s is in the way; remove it or choose another folder", link)
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
		if strings.HasPrefix(e.Name(), "..set-") && e.Name() != keep {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}
