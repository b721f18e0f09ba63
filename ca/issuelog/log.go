package issuelog

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/ca/issuelog/tiles"
)

// sequenceEvery is the time from one checkpoint to the next while entries come in.
const sequenceEvery = time.Second

// maxJournal bounds what may wait to get into the tree, in bytes; beyond it Write refuses.
const maxJournal = 64 << 20

// Log is an open log. All methods are safe for concurrent use.
type Log struct {
	disk   *disk
	signer note.Signer
	public string
	lock   *durable.File // held as long as the log is open
	logger *slog.Logger
	last   atomic.Pointer[string] // checkpoint on disk

	mu           sync.Mutex       // guards all up to progress; held while writing to a journal
	journals     [2]*durable.File // the first takes entries, those of the second go into the tree
	bytes        [2]int64         // in each
	next         int64            // index of the next entry
	broken       error            // why nothing can be written until recover has run; nil if it can
	closed       bool
	spare        []byte
	sequenceFail error // of the last sequence
	progress     Progress

	sequencing sync.Mutex  // guards tree; held while entries go into it. Taken before mu.
	tree       *tiles.Tree // as of the checkpoint on disk
	restarted  bool        // while Open runs: the machine was restarted since the log was last opened
}

// Config says where a log is.
type Config struct {
	Dir    string
	Logger *slog.Logger
}

// Open opens the log in a folder and puts into the tree what a crash left in the journals. A folder without a log is
// fs.ErrNotExist: see Create.
func Open(c Config) (_ *Log, err error) {
	l := &Log{disk: &disk{dir: c.Dir}, logger: c.Logger, broken: errors.New("not open yet")}
	defer func() {
		if err != nil {
			l.closeFiles()
			err = fmt.Errorf("opening issuance log %s: %w", c.Dir, err)
		}
	}()
	path := filepath.Join(c.Dir, keyFile)
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s has mode %04o; it should be 0600", keyFile, info.Mode().Perm())
	}
	secret, err := ReadSmall(path)
	if err != nil {
		return nil, err
	}
	if l.signer, l.public, err = parseSecret(string(secret)); err != nil {
		return nil, fmt.Errorf("%s: %w", keyFile, err)
	}
	if l.lock, err = durable.OpenFile(filepath.Join(c.Dir, lockFile), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600); err != nil {
		return nil, err
	}
	if err := unix.Flock(int(l.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("another process writes to it (%w)", err)
	}
	here, there := bootID(), l.bootOfLock()
	l.restarted = here != "" && there != "" && here != there
	if err := l.Sequence(); err != nil {
		return nil, err
	}
	l.restarted = false
	if info, err := os.Stat(l.disk.path(CheckpointFile)); err == nil {
		l.progress.Checkpoint = info.ModTime() // it may be one of before the start
	}
	return l, l.noteBoot(here, there)
}

// bootID names the time from one start of the machine to its end; "" where that is not known. Tests set it.
var bootID = func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// bootOfLock returns what noteBoot wrote.
func (l *Log) bootOfLock() string {
	b := make([]byte, 64)
	n, _ := l.lock.ReadAt(b, 0)
	return strings.TrimSpace(string(b[:n]))
}

// noteBoot writes durably on which boot entries are written from now on. Journals are not synced, so that a hole in one is
// explained by a restart of the machine, and by nothing else.
func (l *Log) noteBoot(here, there string) error {
	if here == "" || here == there {
		return nil
	}
	err := l.lock.Empty()
	if err == nil {
		_, err = l.lock.Write([]byte(here + "\n"))
	}
	if err == nil {
		err = l.lock.Sync()
	}
	return err
}

func publicOf(seed []byte) ed25519.PublicKey {
	return ed25519.NewKeyFromSeed(seed).Public().(ed25519.PublicKey)
}

// PublicKey returns the key that verifies the log's checkpoints; its name is the log's origin.
func (l *Log) PublicKey() string { return l.public }

func (l *Log) noteCheckpoint(signed []byte) {
	text := string(signed)
	l.last.Store(&text)
}

// Checkpoint returns the last checkpoint that was signed, without waiting for anything.
func (l *Log) Checkpoint() string { return *l.last.Load() }

// Dir returns the folder of the log.
func (l *Log) Dir() string { return l.disk.dir }

// Size returns the number of entries that are in the tree or on their way into it.
func (l *Log) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

// Err returns why entries cannot be written at the moment, nil if they can.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.refuses()
}

// refuses returns why Write would refuse. Caller holds mu.
func (l *Log) refuses() error {
	switch {
	case l.closed:
		return errors.New("the issuance log is closed")
	case l.broken != nil:
		return fmt.Errorf("issuance log %s: %w", l.disk.dir, l.broken)
	case l.bytes[0] > maxJournal:
		return fmt.Errorf("issuance log %s: %d bytes wait to get into the tree: %w", l.disk.dir, l.bytes[0], l.sequenceFail)
	}
	return nil
}

// Write writes the intents and results among some records, and returns once the kernel has them: from then on they are in
// the tree, at the latest after the next start. Only if the machine itself fails can those since the last checkpoint be lost;
// the audit log has synced their intents. After an error they may or may not be; nothing may be done that
// they announce.
func (l *Log) Write(records []audit.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := newFrame(l.spare)
	for _, r := range records {
		data, ok, err := appendEntry(f.data, r)
		if err != nil {
			return fmt.Errorf("issuance log %s: %w", l.disk.dir, err)
		}
		if ok {
			f.data = data
			f.count++
		}
	}
	if f.count == 0 {
		return nil
	}
	if err := l.refuses(); err != nil {
		return err
	}
	if len(f.data) > maxFrame {
		return fmt.Errorf("issuance log %s: %d bytes at once; at most %d are taken", l.disk.dir, len(f.data), maxFrame)
	}
	f.finish(l.next)
	if cap(f.data) <= 1<<20 {
		l.spare = f.data
	}
	// A crash in here leaves a frame that is cut off, or a whole one whose writers were not told so. Both are right:
	// nothing was signed on their account. After an error we do not know which, and ask the disk: see recover.
	if err := l.disk.append(l.journals[0], f.data); err != nil {
		l.broken = fmt.Errorf("writing journal: %w", err)
		return fmt.Errorf("issuance log %s: %w", l.disk.dir, l.broken)
	}
	l.next += int64(f.count)
	l.bytes[0] += int64(len(f.data))
	return nil
}

// Run puts entries into the tree every second until ctx ends.
func (l *Log) Run(ctx context.Context) error {
	ticker := time.NewTicker(sequenceEvery)
	defer ticker.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		err := l.Sequence()
		switch {
		case err != nil && !failing:
			l.logger.Error("issuance log: no new checkpoint; entries wait in the journal", "reason", err.Error())
		case err == nil && failing:
			l.logger.Info("issuance log: checkpoints are made again")
		}
		failing = err != nil
	}
}

// Sequence puts what the journals hold into the tree and signs a checkpoint. If an earlier write failed it recovers.
func (l *Log) Sequence() error {
	l.sequencing.Lock()
	defer l.sequencing.Unlock()
	err := l.sequence()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sequenceFail = err
	if err == nil && !l.closed {
		l.progress.note(l.tree.Size, time.Now())
	}
	return err
}

// sequence does the work. Caller holds sequencing.
func (l *Log) sequence() error {
	l.mu.Lock()
	if l.closed || l.broken != nil {
		defer l.mu.Unlock()
		if l.closed {
			return nil
		}
		return l.recover()
	}
	l.mu.Unlock()
	for { // twice if an earlier sequence failed on the second journal: its entries come first
		l.mu.Lock()
		left := l.bytes[1] > 0
		if !left {
			l.journals[0], l.journals[1] = l.journals[1], l.journals[0]
			l.bytes[0], l.bytes[1] = 0, l.bytes[0]
		}
		drained, size := l.journals[1], l.bytes[1]
		l.mu.Unlock()
		if size == 0 {
			return nil
		}
		if err := l.drain(drained); err != nil {
			return err
		}
		l.mu.Lock()
		l.bytes[1] = 0
		l.mu.Unlock()
		if !left {
			return nil
		}
	}
}

// recover finds out what is on disk, after a crash or a failed write, and puts it into the tree; then both journals
// are empty. Caller holds sequencing and mu.
func (l *Log) recover() error {
	for i, name := range JournalFiles {
		if l.journals[i] != nil {
			l.journals[i].Close() // what the page cache of a failed sync holds is not known
		}
		var err error
		if l.journals[i], err = durable.OpenFile(l.disk.path(name), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600); err != nil {
			return err
		}
	}
	if err := durable.SyncDirectory(l.disk.dir); err != nil {
		return err
	}
	var err error
	if l.tree, err = l.load(); err != nil {
		return err
	}
	order := l.journals
	if a, b := firstIndex(order[0]), firstIndex(order[1]); b >= 0 && (a < 0 || b < a) {
		order[0], order[1] = order[1], order[0]
	}
	for _, f := range order {
		if err := l.drain(f); err != nil {
			return err
		}
	}
	l.bytes, l.next, l.broken = [2]int64{}, l.tree.Size, nil
	return nil
}

// load reads the right edge of the tree that the checkpoint on disk names.
func (l *Log) load() (*tiles.Tree, error) {
	data, err := ReadSmall(l.disk.path(CheckpointFile))
	if err != nil {
		return nil, err
	}
	c, err := ParseCheckpoint(data, l.public)
	if err != nil {
		return nil, err
	}
	t, err := loadTree(l.disk.dir, c.Size)
	if err != nil {
		return nil, err
	}
	if t.Root() != c.Root {
		return nil, fmt.Errorf("its last tiles do not give the root of its checkpoint (size %d); see `chancery log verify %s`", c.Size, l.disk.dir)
	}
	l.noteCheckpoint(data)
	return t, nil
}

// loadTree reads the right edge of a tree of a size.
func loadTree(dir string, size int64) (*tiles.Tree, error) {
	t := &tiles.Tree{Size: size}
	for level := 0; size>>(8*level) > 0; level++ {
		width := int(size >> (8 * level) % tiles.Width)
		t.Levels = append(t.Levels, nil)
		if width == 0 {
			continue
		}
		name := tiles.Path(level, t.Tile(level), width)
		data, err := readBounded(filepath.Join(dir, name), tiles.Width*tlog.HashSize)
		if err != nil {
			return nil, err
		}
		if t.Levels[level], err = tiles.DecodeHashes(data, width); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	if size%tiles.Width == 0 {
		return t, nil
	}
	name := tiles.BundlePath(t.Tile(0), int(size%tiles.Width))
	var err error
	if t.Bundle, err = readBounded(filepath.Join(dir, name), MaxBundle); err != nil {
		return nil, err
	}
	rest := t.Bundle
	for i, h := range t.Levels[0] {
		entry, r, ok := tiles.CutEntry(rest)
		if !ok || tlog.RecordHash(entry) != h {
			return nil, fmt.Errorf("%s: entry %d is not the one that the tree has", name, t.Tile(0)*tiles.Width+int64(i))
		}
		rest = r
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("%s: %d bytes too many", name, len(rest))
	}
	return t, nil
}

// drain puts the entries of a journal into the tree. Each step can be the last one before a crash or an error; the next
// call, or the next start, does all of it again:
//
//   - tiles and bundles beyond the checkpoint are not part of any tree yet. They are written again, with more in them.
//   - the checkpoint appears whole or not at all, after all that it covers is durable.
//   - a journal that is not emptied holds entries that the tree has, which are left out by their index.
//   - partial tiles that are not removed are garbage, which the next drain removes.
func (l *Log) drain(journal *durable.File) error {
	t := l.tree.Clone()
	w := &writer{disk: l.disk, dirs: map[string]bool{}}
	defer w.abandon()
	err := ReadJournal(journal, func(index int64, entry []byte) error {
		switch {
		case index < t.Size:
			return nil
		case index > t.Size:
			return fmt.Errorf("%w: entry %d follows after %d entries", errDamaged, index, t.Size)
		}
		return w.append(t, entry)
	})
	if errors.Is(err, ErrTorn) {
		l.logger.Info("issuance log: the end of a journal was cut off, by a crash or a full disk; what was cut had not been confirmed", "size", t.Size)
	} else if errors.Is(err, errDamaged) && l.restarted {
		if err := l.setAside(journal, err, t.Size); err != nil {
			return err
		}
	} else if err != nil {
		return fmt.Errorf("journal %s: %w", journal.Name(), err)
	}
	if t.Size > l.tree.Size {
		if err := w.writeEdge(t); err != nil {
			return err
		}
		if err := w.sync(); err != nil {
			return err
		}
		signed, err := writeCheckpoint(l.disk, l.signer, t)
		if err != nil {
			return err
		}
		l.noteCheckpoint(signed)
		old := l.tree.Size
		l.tree = t
		l.prune(old)
	}
	if err := l.disk.truncate(journal); err != nil {
		return fmt.Errorf("emptying journal: %w", err)
	}
	return nil
}

// setAside keeps a journal that lost a part when the machine failed, which is not an error: entries that are not synced can be
// lost then. Those before the loss are in the tree; those after it would lack what they follow from, and stay outside.
func (l *Log) setAside(journal *durable.File, damage error, size int64) error {
	data, err := io.ReadAll(io.NewSectionReader(journal, 0, maxJournal+maxFrame))
	if err != nil {
		return fmt.Errorf("journal %s: %w", journal.Name(), err)
	}
	name := filepath.Base(journal.Name()) + ".lost"
	l.logger.Error("issuance log: the machine failed before the last entries were on disk; the audit log has the intents among them",
		"size", size, "journal", l.disk.path(name), "reason", damage.Error())
	return l.disk.replace(name, data)
}

// append adds an entry, and writes each bundle and tile that it fills.
func (w *writer) append(t *tiles.Tree, entry []byte) error {
	t.Bundle = append(t.Bundle, byte(len(entry)>>8), byte(len(entry)))
	t.Bundle = append(t.Bundle, entry...)
	return t.Add(tlog.RecordHash(entry), func(level int, n int64, hashes []tlog.Hash) error {
		if level == 0 {
			if err := w.write(tiles.BundlePath(n, tiles.Width), t.Bundle); err != nil {
				return err
			}
			t.Bundle = t.Bundle[:0]
		}
		return w.write(tiles.Path(level, n, tiles.Width), tiles.EncodeHashes(hashes))
	})
}

// writeEdge writes the tiles and the bundle that are not full.
func (w *writer) writeEdge(t *tiles.Tree) error {
	for level, hashes := range t.Levels {
		if len(hashes) > 0 {
			if err := w.write(tiles.Path(level, t.Tile(level), len(hashes)), tiles.EncodeHashes(hashes)); err != nil {
				return err
			}
		}
	}
	if n := t.Size % tiles.Width; n > 0 {
		return w.write(tiles.BundlePath(t.Tile(0), int(n)), t.Bundle)
	}
	return nil
}

// prune removes partial tiles that the checkpoint does not need any more, from the tree of an older size on.
func (l *Log) prune(old int64) {
	for level := 0; l.tree.Size>>(8*level) > 0; level++ {
		l.pruneFrom(func(n int64) string { return tiles.Path(level, n, tiles.Width) }, old>>(8*(level+1)), l.tree.Tile(level), int(l.tree.Size>>(8*level)%tiles.Width))
	}
	l.pruneFrom(func(n int64) string { return tiles.BundlePath(n, tiles.Width) }, old/tiles.Width, l.tree.Tile(0), int(l.tree.Size%tiles.Width))
}

// pruneFrom removes the partial forms of the tiles from number first on, up to last, but for one of the given width.
func (l *Log) pruneFrom(path func(int64) string, first, last int64, width int) {
	for n := first; n <= last; n++ {
		dir := l.disk.path(path(n)) + ".p"
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, e := range entries {
			if n < last || e.Name() != strconv.Itoa(width) {
				_ = durable.RemoveFile(filepath.Join(dir, e.Name())) // what stays is garbage for the next time
			}
		}
		if n < last {
			_ = durable.RemoveFile(dir)
		}
	}
}

// Close puts what is left into the tree and closes the log.
func (l *Log) Close() error {
	err := l.Sequence()
	l.sequencing.Lock()
	defer l.sequencing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	return errors.Join(err, l.closeFiles())
}

func (l *Log) closeFiles() error {
	var errs []error
	for _, f := range l.journals {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if l.lock != nil {
		errs = append(errs, l.lock.Close())
	}
	return errors.Join(errs...)
}

// IDOf returns the log ID in a public key whose name ends in it, as those that authority init makes do.
func IDOf(publicKey string) (uint32, error) {
	name, _, _ := strings.Cut(publicKey, "+")
	id, err := strconv.ParseUint(name[strings.LastIndexByte(name, '/')+1:], 10, 31)
	if err != nil {
		return 0, fmt.Errorf("the log's name %q does not end in a log ID", name)
	}
	return uint32(id), nil
}

// Exists reports whether a folder holds a log, or what is left of one.
func Exists(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, keyFile))
	return !errors.Is(err, fs.ErrNotExist)
}
