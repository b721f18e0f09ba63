package audit_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
)

// work appends records one after the other, with a Note and a Reopen between, and calls told for each that was confirmed.
func work(l *audit.Log, told func(detail string)) {
	n := 0
	add := func() {
		n++
		detail := fmt.Sprintf("record %d.", n)
		if err := l.Append(audit.Record{Event: audit.Admin, Detail: detail}); err == nil {
			told(detail)
		}
	}
	add()
	add()
	_ = l.Note(audit.Record{Event: audit.Issued, Detail: "noted"}) // confirmed by nobody
	add()
	l.Reopen()
	add()
	add()
}

// checkFile is the full-state checker: each confirmed record is a line of its own, once; at most torn lines do not parse.
func checkFile(t *testing.T, name, path string, confirmed []string, torn int) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	have := map[string]int{}
	for line := range strings.Lines(string(data)) {
		var r audit.Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			torn--
			continue
		}
		if !strings.HasSuffix(line, "\n") {
			t.Errorf("%s: the last line is not ended", name)
		}
		have[r.Detail]++
	}
	if torn < 0 {
		t.Errorf("%s: %d lines too many do not parse:\n%s", name, -torn, data)
	}
	for _, c := range confirmed {
		if have[c] != 1 {
			t.Errorf("%s: %q was confirmed and is in the file %d times", name, c, have[c])
		}
	}
}

// TestInvariant10AuditFaultsAtEachStep fails each step of the log's work, in each way. What was confirmed is in the file, what
// failed was told, and the log goes on by itself.
func TestInvariant10AuditFaultsAtEachStep(t *testing.T) {
	total := oneFault(t, -1, "")
	if total < 12 {
		t.Errorf("only %d steps were seen", total)
	}
	for n := range total {
		for _, mode := range durabletest.Modes {
			t.Run(fmt.Sprint(n, " ", mode), func(t *testing.T) { oneFault(t, n, mode) })
		}
	}
}

func oneFault(t *testing.T, n int, mode durabletest.Mode) (steps int) {
	dir := t.TempDir()
	path := filepath.Join(dir, "audit.jsonl")
	d := durabletest.Watch(t, dir)
	d.FailAt(n, mode)
	var confirmed []string
	l, err := audit.Open(path)
	if err != nil && !d.Dead() {
		l, err = audit.Open(path) // as the next start does
	}
	if err == nil {
		work(l, func(s string) { confirmed = append(confirmed, s) })
		l.Close()
	}
	switch {
	case d.Dead():
	case err != nil:
		t.Fatalf("%s: the next start fails: %v", d.Failed(), err)
	case len(confirmed) < 4 || n < 0 && len(confirmed) < 5:
		t.Errorf("%s: after one fault only %d of 5 records could be written", d.Failed(), len(confirmed))
	}
	steps, name := d.Steps(), d.Failed()
	d.FailAt(-1, "")
	next(t, name, filepath.Join(d.Copy(), "audit.jsonl"), confirmed)
	return steps
}

// next starts again and checks all of the file.
func next(t *testing.T, name, path string, confirmed []string) {
	t.Helper()
	l, err := audit.Open(path)
	if err != nil {
		t.Fatalf("%s: the next start fails: %v", name, err)
	}
	if err := l.Append(audit.Record{Event: audit.Started, Detail: "after"}); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if err := l.Close(); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	checkFile(t, name, path, append(confirmed, "after"), 1)
}

// TestInvariant10AuditAfterACrash: whatever the moment at which the process or the machine ends, the next start has each
// record that was confirmed, and at most one line is cut off.
func TestInvariant10AuditAfterACrash(t *testing.T) {
	dir := t.TempDir()
	d := durabletest.Watch(t, dir)
	l, err := audit.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	work(l, func(s string) { d.Mark(s) })
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	crashes := 0
	d.Crashes(1, func(_ bool, left *durabletest.Left) {
		crashes++
		var confirmed []string
		for _, m := range left.Marks {
			confirmed = append(confirmed, m.(string))
		}
		next(t, left.String(), filepath.Join(left.Dir, "audit.jsonl"), confirmed)
	})
	if crashes < 30 {
		t.Errorf("only %d crashes", crashes)
	}
}

// TestCloseTellsWhatWasNotWritten: a record that nobody waited for is not lost in silence.
func TestCloseTellsWhatWasNotWritten(t *testing.T) {
	dir := t.TempDir()
	d := durabletest.Watch(t, dir)
	l, err := audit.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	d.FailAt(d.Steps(), durabletest.Full)
	if err := l.Note(audit.Record{Event: audit.Issued}); err != nil {
		t.Fatal(err)
	}
	if rand.N(2) == 0 { // it waits for company, is being written, or has failed
		time.Sleep(rand.N(8 * time.Millisecond))
	}
	if err := l.Close(); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v", err)
	}
}

// TestAuditLogOnAFullDisk fills a real file system: nothing is confirmed on it, and with room again the log goes on.
func TestAuditLogOnAFullDisk(t *testing.T) {
	dir := durabletest.SmallDisk(t, 256<<10)
	path := filepath.Join(dir, "audit.jsonl")
	l, err := audit.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	remove := durabletest.Fill(t, dir)
	var confirmed []string
	failures := 0
	for i := range 200 {
		detail := fmt.Sprintf("%d.%s", i, strings.Repeat("x", 500))
		err := l.Append(audit.Record{Event: audit.Admin, Detail: detail})
		switch {
		case err == nil:
			confirmed = append(confirmed, detail)
		case !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), path):
			t.Fatalf("a full disk gave %v", err)
		default:
			failures++
		}
	}
	if failures == 0 || l.Err() == nil {
		t.Fatal("the disk did not get full")
	}
	remove()
	if err := l.Append(audit.Record{Event: audit.Admin, Detail: "room"}); err != nil {
		t.Fatalf("with room again: %v", err)
	}
	if err := l.Err(); err != nil {
		t.Errorf("Err still says %v", err)
	}
	checkFile(t, "full disk", path, append(confirmed, "room"), failures)
}
