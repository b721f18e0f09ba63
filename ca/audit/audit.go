// Package audit owns the audit log: one JSON object a line, appended to a file, durable before the effect that it
// announces (invariant 10).
//
// Append returns only after its line has been written and synced to disk. Callers share syncs (group commit): those
// that arrive while one is under way, and under load those of a whole millisecond, wait for the next one together, so
// the price of durability is paid once for many, and a lone caller waits for nobody. Note queues a line for the next
// commit without waiting, for records of what has already happened.
//
// Once a write or sync has failed, nothing counts as written any more: Append fails for everybody waiting, and the
// next call reopens the file and tries again. It refuses to lose a line in silence, and to hold secrets: tokens and
// keys are never part of a Record.
package audit

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/chancery-project/chancery/ca/durable"
)

// Log is an open audit log. All methods are safe for concurrent use.
type Log struct {
	path   string
	mirror func([]Record) error // nil for none; set before the first record

	mu       sync.Mutex // guards all up to closed
	pending  *batch
	writing  *batch // taken from pending by flush; nil before the first
	flushing bool
	closed   bool
	closing  chan struct{} // closed with closed, to end waits
	spare    []byte        // of the last batch, to be filled again
	copies   []Record      // likewise
	begun    time.Time     // of the commit under way; zero if there is none
	failed   error         // of the last commit

	io   sync.Mutex    // guards file; held while writing
	file *durable.File // nil after a failure
}

// batch is a group of lines that are committed together.
type batch struct {
	lines  []byte
	copies []Record      // of the lines, for the mirror; empty without one
	urgent chan struct{} // closed once somebody waits for the commit
	waited bool          // urgent is closed
	done   chan struct{} // closed after the commit
	err    error         // set before done is closed
}

const (
	// commitSpacing is the least time from one sync to the next: at thousands of records a second it makes one sync out
	// of several, whose cost for processor and disk is the same.
	commitSpacing = time.Millisecond
	// noteDelay is how long a record that nobody waits for may wait for company.
	noteDelay = 5 * time.Millisecond
	// hangs is how long a commit may take before the log counts as failed.
	hangs = 5 * time.Second
)

// maxSpare bounds the memory that an idle log holds on to.
const maxSpare = 64 << 10

// maxPending bounds the memory of lines that wait for a slow disk.
const maxPending = 16 << 20

// Open opens or creates the log at path with mode 0600. A line that a crash cut off is ended, so that the next line
// stands on its own; readers find the torn one by its failing to parse.
func Open(path string) (*Log, error) {
	l := &Log{path: path, pending: newBatch(), closing: make(chan struct{})}
	if err := l.open(); err != nil {
		return nil, err
	}
	return l, nil
}

func newBatch() *batch { return &batch{done: make(chan struct{}), urgent: make(chan struct{})} }

// Mirror has every later record also written by a second log, in the same groups, one group after the other: Append
// returns once both have it, and fails if one of them failed. It is called before the first record.
func (l *Log) Mirror(write func([]Record) error) { l.mirror = write }

// Append writes a record and returns once it is durable. After an error nothing may be done that the record
// announces: the line may or may not be in the file.
func (l *Log) Append(r Record) error {
	b, err := l.add(r, true)
	if err != nil {
		return err
	}
	<-b.done
	return b.err
}

// Note queues a record for the next commit and does not wait. A crash of the process before that commit loses it, so
// it is for results only, whose intent is durable.
func (l *Log) Note(r Record) error {
	_, err := l.add(r, false)
	return err
}

func (l *Log) add(r Record, urgent bool) (*batch, error) {
	if r.Time.IsZero() {
		r.Time = time.Now()
	}
	r.Time = r.Time.UTC()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errors.New("audit log is closed")
	}
	if len(l.pending.lines) > maxPending {
		return nil, fmt.Errorf("audit log %s: %d bytes wait for the disk already", l.path, len(l.pending.lines))
	}
	b := l.pending
	b.lines = append(r.AppendJSON(b.lines), '\n')
	if l.mirror != nil {
		b.copies = append(b.copies, r)
	}
	if urgent && !b.waited {
		b.waited = true
		close(b.urgent)
	}
	if !l.flushing {
		l.flushing = true
		go l.flush() // ends as soon as nothing is pending
	}
	return b, nil
}

// flush commits batch after batch until none is pending.
func (l *Log) flush() {
	for {
		l.mu.Lock()
		b := l.pending
		l.mu.Unlock()
		l.await(b)
		l.mu.Lock()
		l.writing, l.pending = b, newBatch()
		l.pending.lines, l.spare = l.spare, nil
		l.pending.copies, l.copies = l.copies, nil
		l.mu.Unlock()
		begun := time.Now()
		b.err = l.commit(b)
		close(b.done)
		if l.rest(begun, b) {
			return
		}
	}
}

// await returns when a batch should be committed: at once if somebody waits for it.
func (l *Log) await(b *batch) {
	timer := time.NewTimer(noteDelay)
	defer timer.Stop()
	select {
	case <-b.urgent:
	case <-timer.C:
	case <-l.closing:
	}
}

// rest keeps the spacing between commits, and reports whether nothing is pending after it; then flush must return.
// written is the last batch, whose memory is used again.
func (l *Log) rest(begun time.Time, written *batch) (idle bool) {
	timer := time.NewTimer(commitSpacing - time.Since(begun))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.closing:
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if cap(written.lines) <= maxSpare {
		l.spare = written.lines[:0]
		clear(written.copies)
		l.copies = written.copies[:0]
	}
	if len(l.pending.lines) == 0 {
		l.flushing = false
	}
	return !l.flushing
}

// commit writes and syncs the lines of a batch and gives them to the mirror, side by side. A crash before the sync
// returns leaves any prefix of the lines in the file: their callers
// were not told that they are durable, so nothing was signed on their account.
func (l *Log) commit(b *batch) error {
	l.mu.Lock()
	l.begun = time.Now()
	l.mu.Unlock()
	mirrored := make(chan error, 1)
	if len(b.copies) == 0 {
		mirrored <- nil
	} else {
		go func() { mirrored <- l.mirror(b.copies) }()
	}
	err := errors.Join(l.write(b.lines), <-mirrored)
	l.mu.Lock()
	l.begun, l.failed = time.Time{}, err
	l.mu.Unlock()
	return err
}

// write does the work of commit.
func (l *Log) write(lines []byte) error {
	l.io.Lock()
	defer l.io.Unlock()
	if l.file == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	_, err := l.file.Write(lines)
	if err == nil {
		err = l.file.SyncData()
	}
	if err != nil {
		// The state of the page cache after a failed sync is not known: go on only through a fresh descriptor.
		l.file.Close()
		l.file = nil
		return fmt.Errorf("writing audit log %s: %w", l.path, err)
	}
	return nil
}

// open opens the file and ends a torn last line. Caller holds io, or is the only user.
func (l *Log) open() error {
	f, err := durable.OpenFile(l.path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("opening audit log: %w", err)
	}
	torn, err := endsTorn(f)
	if err == nil && torn {
		_, err = f.Write([]byte{'\n'})
	}
	if err == nil {
		err = durable.SyncDirectory(filepath.Dir(l.path)) // the file's name must survive a crash as its lines do
	}
	if err != nil {
		f.Close()
		return fmt.Errorf("opening audit log %s: %w", l.path, err)
	}
	l.file = f
	return nil
}

// endsTorn reports whether the last line is not whole. A file that is no audit log, such as one with a key, is an error.
func endsTorn(f *durable.File) (bool, error) {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		return false, err
	}
	var first, last [1]byte
	if _, err := f.ReadAt(first[:], 0); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	if !strings.ContainsRune("{\n\x00", rune(first[0])) { // zeros are what a failing machine leaves
		return false, errors.New("the file holds something else than an audit log, which appending to it would destroy; name another one")
	}
	if _, err := f.ReadAt(last[:], info.Size()-1); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	return last[0] != '\n', nil
}

// Err returns why records cannot be written: the last commit failed, or the one under way hangs. A server whose log
// fails is not ready. Err does not wait for the disk.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed == nil && !l.begun.IsZero() && time.Since(l.begun) > hangs {
		return fmt.Errorf("writing audit log %s: the disk has not answered for %s", l.path, time.Since(l.begun).Round(time.Second))
	}
	return l.failed
}

// Moved reports whether the file at the log's path is not the one that lines are written to, as after a tool has moved
// it away and did not have it reopened. While a write is under way it is not known, and the answer is no.
func (l *Log) Moved() bool {
	if !l.io.TryLock() {
		return false
	}
	defer l.io.Unlock()
	if l.file == nil {
		return false // the next commit opens the path
	}
	ours, err := l.file.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(l.path)
	return errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(ours, there)
}

// Reopen makes the next commit open the path again, after a tool like logrotate has moved the file away.
func (l *Log) Reopen() {
	l.io.Lock()
	defer l.io.Unlock()
	if l.file != nil {
		l.file.Close()
		l.file = nil
	}
}

// Close commits what is pending and closes the file; later calls of Append and Note fail. If the last commit failed
// it says so: nobody may have waited for those records.
func (l *Log) Close() error {
	l.mu.Lock()
	if !l.closed {
		l.closed = true
		close(l.closing)
	}
	var left []*batch
	if l.flushing && l.writing != nil {
		left = append(left, l.writing)
	}
	if l.flushing && len(l.pending.lines) > 0 {
		left = append(left, l.pending)
	}
	l.mu.Unlock()
	for _, b := range left {
		<-b.done
	}
	err := l.Err()
	l.io.Lock()
	defer l.io.Unlock()
	if l.file == nil {
		return err
	}
	err = errors.Join(err, l.file.Close())
	l.file = nil
	return err
}
