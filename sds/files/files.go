// Package files watches certificate and key files that proxies may be given by name, and keeps the last good content
// of each.
//
// It reads only files under the directories it was given, whatever symlinks say. Files are read again every few
// seconds rather than watched through the kernel: Kubernetes swaps whole directories behind symlinks, and a poll sees
// every way to change a file. It refuses to take over content that does not parse, or a chain whose key is not there
// yet: a set of files changes as a set or not at all.
package files

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/chancery-project/chancery/trust"
)

const (
	pollInterval = 5 * time.Second
	maxRefs      = 1000 // watched at once
)

// Config is what a watcher needs.
type Config struct {
	Dirs   []string // nothing outside these is read; none: every Ref is refused
	Logger *slog.Logger
}

// Ref names a set of files by absolute paths: certificates, and the private key of the first of them. Without a key
// the certificates are roots.
type Ref struct{ Certificates, Key string }

// Content is what a Ref's files hold, in PEM, re-encoded. It is immutable.
type Content struct {
	Certificates []byte
	Key          []byte // PKCS#8; nil for roots
}

// Watcher watches the files of the refs that are held. Its methods are safe for concurrent use.
type Watcher struct {
	dirs []string // absolute
	log  *slog.Logger

	mu      sync.Mutex // guards what follows; not held while reading files
	watched map[Ref]*watch
	changed chan struct{} // closed, and replaced, when the content of any ref changes
}

type watch struct {
	holders int
	good    *Content
	sum     [sha256.Size]byte // of good
	trouble string            // last error, so that it is logged once
}

// New returns a watcher that reads nothing until a ref is held. The directories need not exist yet.
func New(cfg Config) (*Watcher, error) {
	w := &Watcher{log: cfg.Logger, watched: make(map[Ref]*watch), changed: make(chan struct{})}
	for _, d := range cfg.Dirs {
		if d == "" {
			return nil, errors.New("files for proxies: a directory is empty; it should be a path such as /etc/certs")
		}
		abs, err := filepath.Abs(d)
		if err != nil {
			return nil, fmt.Errorf("files for proxies: directory %s: %w", d, err)
		}
		w.dirs = append(w.dirs, abs)
	}
	return w, nil
}

// Run reads the held files again every 5 s until ctx ends.
func (w *Watcher) Run(ctx context.Context) {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		w.mu.Lock()
		refs := slices.Collect(maps.Keys(w.watched))
		w.mu.Unlock()
		changed := false
		for _, r := range refs {
			changed = w.load(r) || changed
		}
		if changed {
			w.announce()
		}
	}
}

// announce wakes all who wait for changes.
func (w *Watcher) announce() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.changed)
	w.changed = make(chan struct{})
}

// Hold reads a ref and watches it until Drop has been called as often as Hold. Files that are not there yet are
// waited for. A ref outside the allowed directories is refused.
func (w *Watcher) Hold(r Ref) error {
	for _, p := range r.paths() {
		if _, _, err := w.allow(p); err != nil {
			return err
		}
	}
	w.mu.Lock()
	held := w.watched[r]
	switch {
	case held != nil:
		held.holders++
	case len(w.watched) >= maxRefs:
		w.mu.Unlock()
		return fmt.Errorf("%d sets of files are watched already, which is the limit", maxRefs)
	default:
		w.watched[r] = &watch{holders: 1}
	}
	w.mu.Unlock()
	if held == nil && w.load(r) {
		w.announce() // to others who came to hold it meanwhile
	}
	return nil
}

// Drop takes back one Hold that succeeded.
func (w *Watcher) Drop(r Ref) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if held := w.watched[r]; held != nil {
		if held.holders--; held.holders == 0 {
			delete(w.watched, r)
		}
	}
}

// Content returns the last good content of a held ref; nil if there was none yet.
func (w *Watcher) Content(r Ref) *Content {
	w.mu.Lock()
	defer w.mu.Unlock()
	if held := w.watched[r]; held != nil {
		return held.good
	}
	return nil
}

// Changes returns a channel that is closed when the content of any ref changes next.
func (w *Watcher) Changes() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.changed
}

// load reads a ref's files and takes over what they hold, unless it is in error or nobody holds the ref any more. It
// reports whether that is something new.
func (w *Watcher) load(r Ref) (changed bool) {
	c, err := w.read(r)
	w.mu.Lock()
	defer w.mu.Unlock()
	held := w.watched[r]
	if held == nil {
		return false
	}
	if err != nil {
		if text := err.Error(); text != held.trouble {
			held.trouble = text
			w.log.Warn("files for proxies not read; the last good content stays", "certificates", r.Certificates, "key", r.Key, "reason", text)
		}
		return false
	}
	held.trouble = ""
	sum := sha256.Sum256(append(slices.Clone(c.Certificates), c.Key...))
	if held.good != nil && sum == held.sum {
		return false
	}
	held.good, held.sum = c, sum
	return true
}

func (r Ref) paths() []string {
	if r.Key == "" {
		return []string{r.Certificates}
	}
	return []string{r.Certificates, r.Key}
}

// allow splits a path into the directory that allows it and the rest.
func (w *Watcher) allow(path string) (dir, rest string, err error) {
	if !filepath.IsAbs(path) {
		return "", "", fmt.Errorf("path %q is not absolute", path)
	}
	for _, d := range w.dirs {
		if rest, err := filepath.Rel(d, filepath.Clean(path)); err == nil && rest != "." && filepath.IsLocal(rest) {
			return d, rest, nil
		}
	}
	return "", "", fmt.Errorf("path %q is not under a directory that may be read for proxies", path)
}

// read returns the present content, checked. That a chain must go with its key also catches a pair of which only one
// file has been replaced so far.
func (w *Watcher) read(r Ref) (*Content, error) {
	data, err := w.readFile(r.Certificates)
	if err != nil {
		return nil, err
	}
	certs, err := trust.ParseCertificates(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", r.Certificates, err)
	}
	c := &Content{Certificates: trust.EncodeCertificates(certs...)}
	if r.Key == "" {
		return c, nil
	}
	if data, err = w.readFile(r.Key); err != nil {
		return nil, err
	}
	key, err := trust.ParseKey(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", r.Key, err)
	}
	if !trust.SameKey(certs[0].PublicKey, key.Public()) {
		return nil, fmt.Errorf("%s is not the key of the first certificate in %s", r.Key, r.Certificates)
	}
	c.Key, err = trust.EncodeKey(key)
	return c, err
}

// readFile reads one file. os.Root keeps every step, symlinks included, under the allowed directory; it is opened
// anew each time because a mount may have replaced the directory.
func (w *Watcher) readFile(path string) ([]byte, error) {
	dir, rest, err := w.allow(path)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	// O_NONBLOCK: opening a pipe that somebody put there must not hang the poll.
	file, err := root.OpenFile(rest, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	var buf bytes.Buffer
	if _, err := io.Copy(&buf, io.LimitReader(file, trust.MaxPEMBytes+1)); err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return buf.Bytes(), nil // a longer file fails in the parser, which says so
}
