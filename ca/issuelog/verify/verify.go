// Package verify owns the reading of issuance logs: verifying all of one, proving that a serial is in it, searching it.
//
// Log recomputes everything from the entries and names what does not fit. Prove makes a proof that an entry is in
// the tree, which Proof.Check verifies without the log. They need only the folder, or the proof, and the public key.
//
// It refuses to write: a log that does not fit is shown, never mended.
package verify

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/tiles"
)

// Config says what Log holds a log to.
type Config struct {
	Dir       string
	PublicKey string // empty: the one in the folder
	// Earlier, if set, is a checkpoint of the same log that somebody kept: the log should still begin with its entries.
	Earlier     []byte
	EarlierName string // of its file, for messages
}

// Report is what Log found.
type Report struct {
	Origin       string    `json:"origin"`
	Size         int64     `json:"size"` // entries in the tree
	Root         tlog.Hash `json:"root"`
	Intents      int64     `json:"intents"`
	Certificates int64     `json:"certificates"`
	Failed       int64     `json:"failed"`  // intents after which signing failed
	Open         int64     `json:"open"`    // intents without a result: their certificates may exist
	Pending      int64     `json:"pending"` // entries in the journals, which enter the tree within a second, or at the next start
	Findings     []Finding `json:"findings"`
	More         int       `json:"moreFindings,omitempty"` // that were left out
}

// Finding is something that does not fit.
type Finding struct {
	File    string `json:"file"`
	Index   int64  `json:"index"` // of the entry, -1 for none
	Serial  string `json:"serial,omitempty"`
	Problem string `json:"problem"`
}

// String names the file, the entry and what is wrong.
func (f Finding) String() string {
	if f.Index < 0 {
		return fmt.Sprintf("%s: %s", f.File, f.Problem)
	}
	serial := f.Serial
	if serial == "" {
		serial = "that cannot be read"
	}
	return fmt.Sprintf("%s: entry %d, serial %s: %s", f.File, f.Index, serial, f.Problem)
}

// maxFindings bounds a report.
const maxFindings = 100

// verifier is one run of Log.
type verifier struct {
	r       *Reader
	report  *Report
	earlier *issuelog.Checkpoint

	// Two trees are built: of the entries, and of the hashes in tiles of level 0. Where they differ, the one whose root is
	// the checkpoint's says which file was changed.
	entries, hashes tiles.Tree
	differing       []difference
	earlierRoot     tlog.Hash
	ledger          ledger
}

// difference is an entry whose hash is not the one in its tile.
type difference struct {
	index        int64
	serial       string
	bundle, tile string
	problem      string // of the entry by itself
	unread       bool   // it is not known: the tree of entries went on with the hash in the tile
}

// Log reads all of a log and recomputes everything: the signature of the checkpoint, its root from the entries, each
// tile, consistency with an earlier checkpoint, and what entries say of each other. An error says that it could not; what is
// wrong with the log is in the report.
func Log(ctx context.Context, c Config) (*Report, error) {
	r, err := OpenReader(c.Dir, c.PublicKey)
	if err != nil {
		return nil, err
	}
	v := &verifier{r: r, report: &Report{
		Origin: r.Checkpoint.Origin, Size: r.Checkpoint.Size, Root: r.Checkpoint.Root, Findings: []Finding{},
	}, ledger: ledger{}}
	if c.Earlier != nil {
		if v.earlier, err = issuelog.ParseCheckpoint(c.Earlier, r.PublicKey); err != nil {
			return nil, fmt.Errorf("%s: %w", c.EarlierName, err)
		}
	}
	v.noteEarlier()
	err = inOrder(r.bundles(), r.readBundle, func(n int64, b bundle) error {
		v.take(n, b)
		return ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	v.checkEdge()
	v.checkRoot()
	v.checkEarlier(c.EarlierName)
	v.checkJournals()
	for _, s := range v.ledger {
		if s.state == intended {
			v.report.Open++
		}
	}
	return v.report, nil
}

func (v *verifier) find(f Finding) {
	if len(v.report.Findings) == maxFindings {
		v.report.More++
		return
	}
	f.File = filepath.Join(v.r.Dir, f.File)
	v.report.Findings = append(v.report.Findings, f)
}

// bundle is what was read of 256 entries.
type bundle struct {
	file, tile string
	facts      []fact
	hashes     []tlog.Hash // in the tile; nil if it cannot be read
	problem    string      // of the bundle as a whole, after its facts
	tileErr    error
}

// readBundle reads a bundle and its tile of level 0. It is called from many goroutines.
func (r *Reader) readBundle(n int64) bundle {
	width := r.width(n)
	b := bundle{file: tiles.BundlePath(n, width), tile: tiles.Path(0, n, width)}
	tile, err := r.read(b.tile)
	if err == nil {
		b.hashes, err = tiles.DecodeHashes(tile, width)
	}
	b.tileErr = err
	data, err := r.read(b.file)
	if err != nil {
		b.problem = err.Error()
		return b
	}
	for range width {
		entry, rest, ok := tiles.CutEntry(data)
		if !ok {
			b.facts = append(b.facts, fact{serial: guessSerial(data), problem: "its length goes beyond the end of the file"})
			return b
		}
		b.facts = append(b.facts, factOf(entry))
		data = rest
	}
	if len(data) > 0 {
		b.problem = fmt.Sprintf("%d bytes after its last entry", len(data))
	}
	return b
}

// take adds a bundle to both trees and the ledger.
func (v *verifier) take(n int64, b bundle) {
	if b.tileErr != nil {
		v.find(Finding{File: b.tile, Index: -1, Problem: b.tileErr.Error()})
	}
	if b.problem != "" {
		v.find(Finding{File: b.file, Index: -1, Problem: b.problem})
	}
	var upperE, upperH []upper
	for i := range v.r.width(n) {
		index := n*tiles.Width + int64(i)
		var f fact
		known := i < len(b.facts) && b.facts[i].hashed
		if i < len(b.facts) {
			f = b.facts[i]
		}
		var h tlog.Hash
		switch {
		case b.hashes != nil:
			h = b.hashes[i]
		case known:
			h = f.hash
		}
		if !known {
			f.hash = h // go on with what the tile says
		}
		if i < len(b.facts) && (!known || f.hash != h) {
			v.differing = append(v.differing, difference{index, f.serial, b.file, b.tile, f.problem, !known})
		}
		if known {
			v.judge(index, b.file, &f)
		}
		v.entries.Add(f.hash, collect(&upperE))
		v.hashes.Add(h, collect(&upperH))
		v.noteEarlier()
	}
	v.checkUpper(upperE, upperH)
}

// judge holds an entry to those before it.
func (v *verifier) judge(index int64, file string, f *fact) {
	problem := f.problem
	if problem == "" {
		problem = v.ledger.enter(f, v.report)
	}
	if problem != "" {
		v.find(Finding{File: file, Index: index, Serial: f.serial, Problem: problem})
	}
}

// upper is a tile above level 0.
type upper struct {
	level  int
	n      int64
	hashes []tlog.Hash
}

func collect(into *[]upper) tiles.Full {
	return func(level int, n int64, hashes []tlog.Hash) error {
		if level > 0 {
			*into = append(*into, upper{level, n, hashes})
		}
		return nil
	}
}

// checkUpper compares tiles above level 0 with what both trees say that they hold.
func (v *verifier) checkUpper(entries, hashes []upper) {
	for i, e := range entries {
		name := tiles.Path(e.level, e.n, len(e.hashes))
		data, err := v.r.read(name)
		var have []tlog.Hash
		if err == nil {
			have, err = tiles.DecodeHashes(data, len(e.hashes))
		}
		if err != nil {
			v.find(Finding{File: name, Index: -1, Problem: err.Error()})
			continue
		}
		for k, h := range have {
			if h != e.hashes[k] && h != hashes[i].hashes[k] {
				span := int64(1) << (8 * e.level)
				first := (e.n*tiles.Width + int64(k)) * span
				v.find(Finding{File: name, Index: -1, Problem: fmt.Sprintf("hash %d is not that of entries %d to %d", k, first, first+span-1)})
			}
		}
	}
}

// checkEdge compares the tiles above level 0 that are not full.
func (v *verifier) checkEdge() {
	var e, h []upper
	for level := 1; level < len(v.entries.Levels); level++ {
		if len(v.entries.Levels[level]) > 0 {
			e = append(e, upper{level, v.entries.Tile(level), v.entries.Levels[level]})
			h = append(h, upper{level, v.hashes.Tile(level), v.hashes.Levels[level]})
		}
	}
	v.checkUpper(e, h)
}

// checkRoot compares both trees with the checkpoint, and says of each difference whose fault it is.
func (v *verifier) checkRoot() {
	want := v.r.Checkpoint.Root
	entriesRight, hashesRight := v.entries.Root() == want, v.hashes.Root() == want
	others := v.report.Findings // may follow from these
	v.report.Findings = []Finding{}
	for _, d := range v.differing {
		f := Finding{Index: d.index, Serial: d.serial}
		switch {
		case d.unread:
			f.File, f.Problem = d.bundle, "it cannot be read"
		case entriesRight:
			f.File, f.Problem = d.tile, "its hash in the tile was changed; the entry is as signed"
		case hashesRight:
			f.File, f.Problem = d.bundle, "it is not the entry that was signed"
		default:
			f.File, f.Problem = d.bundle, "it does not have the hash in "+filepath.Join(v.r.Dir, d.tile)+"; one of the two was changed"
		}
		if d.problem != "" {
			f.Problem += " (" + d.problem + ")"
		}
		v.find(f)
	}
	v.report.Findings = append(v.report.Findings, others...)
	if n := len(v.report.Findings); n > maxFindings {
		v.report.Findings, v.report.More = v.report.Findings[:maxFindings], v.report.More+n-maxFindings
	}
	if !entriesRight && !hashesRight {
		got := v.entries.Root()
		v.find(Finding{File: issuelog.CheckpointFile, Index: -1, Problem: fmt.Sprintf("its root is %v, the entries give %v: the entries are not those that were signed", want, got)})
	}
}

// noteEarlier keeps the root that the log had at the size of the earlier checkpoint.
func (v *verifier) noteEarlier() {
	if v.earlier != nil && v.entries.Size == v.earlier.Size {
		v.earlierRoot = v.entries.Root()
	}
}

// checkEarlier names a fork: two checkpoints under one key, neither of which continues the other (decision D21).
func (v *verifier) checkEarlier(name string) {
	e := v.earlier
	switch {
	case e == nil:
	case e.Size > v.r.Checkpoint.Size:
		v.find(Finding{File: issuelog.CheckpointFile, Index: -1, Problem: fmt.Sprintf(
			"FORK: %s is signed by the same key for %d entries; the log has %d: entries were removed, or an old copy was put back", name, e.Size, v.r.Checkpoint.Size)})
	case e.Root != v.earlierRoot:
		v.find(Finding{File: issuelog.CheckpointFile, Index: -1, Problem: fmt.Sprintf(
			"FORK: %s is signed by the same key for the first %d entries with root %v; those of the log give %v: an entry before index %[2]d was removed, added or changed, and the log rebuilt",
			name, e.Size, e.Root, v.earlierRoot)})
	}
}

// checkJournals counts the entries that are not in the tree yet.
func (v *verifier) checkJournals() {
	for _, name := range issuelog.JournalFiles {
		var err error
		for range 3 { // a server may empty it at this very moment
			var pending int64
			if pending, err = v.pending(filepath.Join(v.r.Dir, name)); err == nil {
				v.report.Pending += pending
				break
			}
		}
		if err != nil {
			v.find(Finding{File: name, Index: -1, Problem: err.Error()})
		}
	}
}

func (v *verifier) pending(path string) (pending int64, err error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	defer f.Close()
	err = issuelog.ReadJournal(f, func(index int64, _ []byte) error {
		if index >= v.r.Checkpoint.Size {
			pending++
		}
		return nil
	})
	if errors.Is(err, issuelog.ErrTorn) { // the next start cuts it
		err = nil
	}
	return pending, err
}
