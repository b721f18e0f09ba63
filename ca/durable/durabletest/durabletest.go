// Package durabletest owns faults for tests of what is written: it fails any one step of package durable, in each way in which
// a disk does, and rebuilds what a crash of the process or of the machine leaves after any step.
//
// It refuses to be used outside tests. Its model of a disk is as unkind as POSIX allows: what was not synced is
// there, or not, or in part, or as zeros, each file and each name by itself.
package durabletest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/ca/durable"
)

// Mode is a way to fail.
type Mode string

// The ways to fail. After all but Crash the process goes on, and later steps succeed.
const (
	Fail     Mode = "fail"                // nothing was done
	FailDone Mode = "fail, but persisted" // it was done, though an error came back
	Torn     Mode = "torn"                // half of a write was done
	Full     Mode = "disk full"           // half of a write was done, and the error is ENOSPC
	Crash    Mode = "crash"               // the process ends before the step; no later step is done
)

// Modes are all of them.
var Modes = []Mode{Fail, FailDone, Torn, Full, Crash}

// ErrInjected is in every error that is made up here, but for Full.
var ErrInjected = errors.New("made up by a test")

// Disk records the steps below a folder and fails one of them.
type Disk struct {
	dir string
	t   testing.TB

	mu     sync.Mutex // guards all below; held while a step is done
	n      int        // steps so far
	at     int        // which one fails; below 0: none
	mode   Mode
	dead   bool
	failed durable.Step
	base   map[string][]byte // files at the beginning; nil content for folders
	trace  []event
}

// event is a step that was done, or a mark.
type event struct {
	step durable.Step
	mark any
}

// Watch begins to record the steps below a folder. What lies there counts as durable.
func Watch(t testing.TB, dir string) *Disk {
	t.Helper()
	d := &Disk{dir: dir, t: t, at: -1}
	var err error
	if d.base, err = read(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(durable.Inject(dir, d.around))
	return d
}

// FailAt fails the step with a number, counted from 0 at the beginning.
func (d *Disk) FailAt(n int, mode Mode) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at, d.mode = n, mode
}

// Steps returns the number of steps so far.
func (d *Disk) Steps() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.n
}

// Failed says which step failed, for messages.
func (d *Disk) Failed() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return fmt.Sprintf("%s: %s %s", d.mode, d.failed.Kind, d.failed.Path)
}

// Dead reports whether the process has ended by a Crash.
func (d *Disk) Dead() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dead
}

// Mark notes something that is true from here on, such as that a caller was told of a success; see Left.Marks.
func (d *Disk) Mark(x any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.trace = append(d.trace, event{mark: x})
}

func (d *Disk) around(s durable.Step, do func(n int) error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return fmt.Errorf("%w: the process has ended", ErrInjected)
	}
	n, err, most := d.n, error(nil), -1
	d.n++
	if n == d.at && len(s.Data) == 0 && (d.mode == Torn || d.mode == Full) {
		d.at = -1 // the same as Fail
	}
	if n == d.at {
		d.failed = s
		err, most = fmt.Errorf("%s %s: %w", s.Kind, s.Path, ErrInjected), 0
		switch d.mode {
		case Crash:
			d.dead = true
			return err
		case FailDone:
			most = -1
		case Full:
			err = fmt.Errorf("%s %s: %w", s.Kind, s.Path, unix.ENOSPC)
			most = len(s.Data) / 2
		case Torn:
			most = len(s.Data) / 2
		}
		if most == 0 {
			return err
		}
	}
	s.Data = slices.Clone(s.Data)
	if most >= 0 {
		s.Data = s.Data[:most]
	}
	// A real sync would only take time: what counts as durable is decided here.
	if s.Kind != durable.Sync && s.Kind != durable.SyncDir {
		if err := do(most); err != nil {
			return err
		}
	}
	d.trace = append(d.trace, event{step: s})
	return err
}

// Copy copies what is in the folder now, as the kernel has it, for a start beside a process that counts as dead.
func (d *Disk) Copy() string {
	d.t.Helper()
	files, err := read(d.dir)
	if err != nil {
		d.t.Fatal(err)
	}
	to := d.t.TempDir()
	left := &Disk{dir: d.dir, base: files}
	left.replay(nil, kindness{bytes: kept, names: all}).write(d.t, to)
	d.t.Cleanup(WithoutSyncs(to))
	return to
}

// WithoutSyncs makes the steps below a folder faster.
func WithoutSyncs(dir string) (remove func()) {
	return durable.Inject(dir, func(s durable.Step, do func(n int) error) error {
		if s.Kind == durable.Sync || s.Kind == durable.SyncDir {
			return nil
		}
		return do(-1)
	})
}

// read returns the files below a folder, by their path; folders have nil content.
func read(dir string) (map[string][]byte, error) {
	files := map[string][]byte{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			files[path] = nil
			return err
		}
		data, err := os.ReadFile(path)
		files[path] = append([]byte{}, data...)
		return err
	})
	return files, err
}

// Left is what is left on the disk after a crash.
type Left struct {
	Dir   string // a copy
	Marks []any  // that came before the crash
	name  string
}

// String says which crash it was.
func (l *Left) String() string { return l.name }

// Crashes gives what is left of the steps so far by a crash after each of them: of the process, when the kernel has all that was
// written, and of the machine, in several ways, of which some are drawn at random. Every stride-th step is taken.
func (d *Disk) Crashes(stride int, each func(machine bool, l *Left)) {
	d.mu.Lock()
	trace := slices.Clone(d.trace)
	d.mu.Unlock()
	base, seen := d.t.TempDir(), map[string]bool{} // many crashes leave the same
	for at := 0; at <= len(trace); at += stride {
		if stride == 1 && at > 0 && trace[at-1].mark != nil {
			continue // as before the mark
		}
		end := at
		for end < len(trace) && trace[end].mark != nil { // true by now, too
			end++
		}
		var after durable.Step
		var marks []any
		for _, e := range trace[:end] {
			if e.mark != nil {
				marks = append(marks, e.mark)
			} else {
				after = e.step
			}
		}
		for _, k := range kindnesses(uint64(at)) {
			steps := slices.Clone(trace[:at])
			if k.midway {
				if at == 0 || steps[at-1].step.Kind != durable.Write {
					continue
				}
				steps[at-1].step.Data = after.Data[:len(after.Data)/2]
				marks = nil // none but those before the write
				for _, e := range trace[:at] {
					if e.mark != nil {
						marks = append(marks, e.mark)
					}
				}
			}
			disk := d.replay(steps, k)
			state := fmt.Sprint(k.machine, len(marks), disk.sum())
			if seen[state] {
				continue
			}
			seen[state] = true
			dir := filepath.Join(base, "left")
			disk.write(d.t, dir)
			remove := WithoutSyncs(dir)
			each(k.machine, &Left{Dir: dir, Marks: marks, name: fmt.Sprintf("crash %d, after %s %s: %s", at, after.Kind, after.Path, k.name)})
			remove()
			if err := os.RemoveAll(dir); err != nil {
				d.t.Error(err)
			}
		}
	}
}

// kindness says what becomes of what was not synced.
type kindness struct {
	name    string
	machine bool
	midway  bool                                     // in the middle of the last write
	bytes   func(pending int) (kept int, zeros bool) // of a file's bytes
	names   func(pending int) (kept int)             // of a folder's changes
}

func kept(n int) (int, bool) { return n, false }
func lost(int) (int, bool)   { return 0, false }
func all(n int) int          { return n }
func none(int) int           { return 0 }

func kindnesses(seed uint64) []kindness {
	out := []kindness{
		{"the process ends", false, false, kept, all},
		{"the machine keeps what was synced", true, false, lost, none},
		{"the machine keeps names without content", true, false, lost, all},
		{"the process ends in the middle of it", false, true, kept, all}, // last: it has fewer marks
	}
	for i := range uint64(3) {
		rng := rand.New(rand.NewPCG(seed, i))
		out = append(out, kindness{fmt.Sprintf("the machine keeps by chance (%d)", i), true, false,
			func(n int) (int, bool) {
				switch rng.IntN(3) {
				case 0:
					return n, false
				case 1:
					return n, true
				}
				return rng.IntN(n + 1), false
			},
			func(n int) int { return rng.IntN(n + 1) },
		})
	}
	return out
}

// inode is a file or a folder.
type inode struct {
	folder  bool
	synced  []byte
	pending []durable.Step    // of a file, since its last sync
	names   map[string]*inode // of a folder, by base name
	durable map[string]*inode // likewise, as of its last sync
	changes []change          // since then
}

// change is a change of a folder's names, made at one stroke.
type change struct {
	remove string
	add    string
	node   *inode
}

func folder() *inode {
	return &inode{folder: true, names: map[string]*inode{}, durable: map[string]*inode{}}
}

// tree is a disk.
type tree struct {
	dir  string
	root *inode
}

func (f *tree) at(path string) *inode {
	node := f.root
	rel, err := filepath.Rel(f.dir, path)
	if err != nil || rel == "." {
		return node
	}
	for name := range strings.SplitSeq(rel, string(filepath.Separator)) {
		if node == nil || !node.folder {
			return nil
		}
		node = node.names[name]
	}
	return node
}

func (f *tree) change(path string, c change) {
	up := f.at(filepath.Dir(path))
	if c.remove != "" {
		delete(up.names, c.remove)
	}
	if c.add != "" {
		up.names[c.add] = c.node
	}
	up.changes = append(up.changes, c)
}

// replay returns the disk after some steps and a crash.
func (d *Disk) replay(trace []event, k kindness) *tree {
	f := &tree{d.dir, folder()}
	for _, path := range slices.Sorted(maps.Keys(d.base)) {
		if path == d.dir {
			continue
		}
		node := &inode{synced: d.base[path]}
		if d.base[path] == nil {
			node = folder()
		}
		up := f.at(filepath.Dir(path))
		up.names[filepath.Base(path)], up.durable[filepath.Base(path)] = node, node
	}
	for _, e := range trace {
		if e.mark == nil {
			f.do(e.step)
		}
	}
	f.root.crash(k)
	return f
}

func (f *tree) do(s durable.Step) {
	node := f.at(s.Path)
	base := filepath.Base(s.Path)
	switch s.Kind {
	case durable.Create:
		if node == nil {
			f.change(s.Path, change{add: base, node: &inode{}})
		}
	case durable.Mkdir:
		f.change(s.Path, change{add: base, node: folder()})
	case durable.Write, durable.Truncate:
		node.pending = append(node.pending, s)
	case durable.Sync:
		node.synced, node.pending = node.content(math.MaxInt, false), nil
	case durable.SyncDir:
		node.durable, node.changes = maps.Clone(node.names), nil
	case durable.Rename: // our renames stay in one folder
		f.change(s.To, change{remove: base, add: filepath.Base(s.To), node: node})
	case durable.Link:
		f.change(s.To, change{add: filepath.Base(s.To), node: node})
	case durable.Remove:
		f.change(s.Path, change{remove: base})
	}
}

// weight of a step in what is pending: the bytes of a write; a truncation is one.
func weight(s durable.Step) int {
	if s.Kind == durable.Truncate {
		return 1
	}
	return len(s.Data)
}

// content returns the file after the first of what is pending, up to a weight. Instead of the bytes it may have zeros.
func (n *inode) content(most int, zeros bool) []byte {
	data := slices.Clone(n.synced)
	for _, s := range n.pending {
		w := weight(s)
		switch {
		case most <= 0:
			return data
		case s.Kind == durable.Truncate:
			data = data[:0]
		case zeros:
			data = append(data, make([]byte, min(most, w))...)
		default:
			data = append(data, s.Data[:min(most, w)]...)
		}
		most -= w
	}
	return data
}

func (n *inode) crash(k kindness) {
	if !n.folder {
		pending := 0
		for _, s := range n.pending {
			pending += weight(s)
		}
		n.synced = n.content(k.bytes(pending))
		return
	}
	names := n.durable
	kept := k.names(len(n.changes))
	for _, c := range n.changes[:kept] {
		delete(names, c.remove)
		if c.add != "" {
			names[c.add] = c.node
		}
	}
	n.names = names
	seen := map[*inode]bool{}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if !seen[names[name]] {
			seen[names[name]] = true
			names[name].crash(k)
		}
	}
}

// sum returns a hash over all names and contents.
func (f *tree) sum() [sha256.Size]byte {
	h := sha256.New()
	var add func(n *inode, path string)
	add = func(n *inode, path string) {
		fmt.Fprintf(h, "%q %v %d ", path, n.folder, len(n.synced))
		h.Write(n.synced)
		for _, name := range slices.Sorted(maps.Keys(n.names)) {
			add(n.names[name], filepath.Join(path, name))
		}
	}
	add(f.root, "")
	return [sha256.Size]byte(h.Sum(nil))
}

// write writes the disk into a folder.
func (f *tree) write(t testing.TB, to string) {
	t.Helper()
	var put func(n *inode, path string) error
	put = func(n *inode, path string) error {
		if !n.folder {
			return os.WriteFile(path, n.synced, 0o600)
		}
		err := os.MkdirAll(path, 0o700)
		for name, x := range n.names {
			err = errors.Join(err, put(x, filepath.Join(path, name)))
		}
		return err
	}
	if err := put(f.root, to); err != nil {
		t.Fatal(err)
	}
}
