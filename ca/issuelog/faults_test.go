package issuelog_test

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/issuelogtest"
)

// history is what somebody was told about a log.
type history struct {
	created    bool
	written    []string // serials that Write confirmed
	sequenced  int      // how many of them a checkpoint covers, says Sequence
	checkpoint []byte   // which that was
}

// work makes a log and writes to it, over more than one bundle. It calls told after each thing that was confirmed, and goes on
// after errors as a server does.
func work(c issuelog.Config, h *history, told func(history)) (*issuelog.Log, error) {
	if _, err := issuelog.Create(c.Dir, origin); err == nil || errors.Is(err, fs.ErrExist) {
		h.created = true
		told(*h)
	} else if !h.created {
		return nil, err
	}
	l, err := issuelog.Open(c)
	if err != nil {
		return nil, err
	}
	next := 0
	add := func(n int) {
		if l.Write(issuelogtest.Pairs(next, n)) == nil {
			for i := range n {
				h.written = append(h.written, issuelogtest.Serial(next+i))
			}
			told(*h)
		}
		next += n
	}
	sequence := func() {
		if l.Sequence() != nil {
			return
		}
		if data, err := os.ReadFile(filepath.Join(c.Dir, issuelog.CheckpointFile)); err == nil {
			h.sequenced, h.checkpoint = len(h.written), data
			told(*h)
		}
	}
	add(126)
	sequence()
	for range 2 {
		add(4)
		add(1)
		sequence()
		add(2)
	}
	sequence()
	return l, nil
}

// afterwards starts again on what is left and checks the whole state. After a failure of the machine, what was written
// since the last checkpoint may be missing.
func afterwards(t *testing.T, name, dir string, h history, machine bool) {
	t.Helper()
	c := issuelog.Config{Dir: filepath.Join(dir, "log"), Logger: slog.New(slog.DiscardHandler)}
	boot, expected := "first", h.written
	if machine {
		boot, expected = "second", h.written[:h.sequenced]
	}
	defer issuelog.SetBootID(boot)()
	l, err := issuelog.Open(c)
	if errors.Is(err, fs.ErrNotExist) && !h.created {
		if _, err := issuelog.Create(c.Dir, origin); err != nil {
			t.Fatalf("%s: making the log a second time: %v", name, err)
		}
		l, err = issuelog.Open(c)
	}
	if err != nil {
		t.Fatalf("%s: the next start fails: %v", name, err)
	}
	write(t, l, 90_000, 3)
	if err := l.Close(); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	report := check(t, c.Dir, h.checkpoint, append(expected[:len(expected):len(expected)], issuelogtest.Serial(90_000)))
	if report.Pending != 0 {
		t.Errorf("%s: %d entries are pending after a start", name, report.Pending)
	}
	if machine { // the start after it knows nothing of the failure
		if l, err = issuelog.Open(c); err != nil {
			t.Fatalf("%s: the start after the next one fails: %v", name, err)
		}
		l.Close()
	}
	if t.Failed() {
		t.Fatal(name)
	}
}

func faultConfig(dir string) issuelog.Config {
	return issuelog.Config{Dir: filepath.Join(dir, "log"), Logger: slog.New(slog.DiscardHandler)}
}

// TestInvariant10LogFaultsAtEachStep fails each step of making and writing a log, in each way. The log goes on by itself, or at
// the next start, and has all that was confirmed.
func TestInvariant10LogFaultsAtEachStep(t *testing.T) {
	defer issuelog.SetBootID("first")()
	total := oneFault(t, -1, "")
	if total < 80 {
		t.Errorf("only %d steps were seen", total)
	}
	stride := 1
	if testing.Short() {
		stride = 29
	}
	for n := 0; n < total; n += stride {
		for _, mode := range durabletest.Modes {
			t.Run(fmt.Sprint(n, " ", mode), func(t *testing.T) { oneFault(t, n, mode) })
		}
	}
}

func oneFault(t *testing.T, n int, mode durabletest.Mode) (steps int) {
	t.Helper()
	dir := t.TempDir()
	d := durabletest.Watch(t, dir)
	d.FailAt(n, mode)
	var h history
	l, err := work(faultConfig(dir), &h, func(history) {})
	if err != nil && !d.Dead() {
		l, err = work(faultConfig(dir), &h, func(history) {}) // as the next start does
	}
	steps, name := d.Steps(), d.Failed()
	switch {
	case d.Dead():
	case err != nil:
		t.Fatalf("%s: the second start fails, too: %v", name, err)
	default:
		if err := l.Sequence(); err != nil {
			t.Fatalf("%s: it does not recover by itself: %v", name, err)
		}
		if err := l.Err(); err != nil {
			t.Errorf("%s: after recovery: %v", name, err)
		}
	}
	d.FailAt(-1, "")
	if l != nil {
		l.Kill()
	}
	afterwards(t, name, d.Copy(), h, false)
	return steps
}

// TestInvariant10LogAfterACrash: whatever the moment at which the process ends, the next start has all entries that were
// confirmed; where the machine ends, all that a checkpoint covers. It needs nobody's help, and never makes a fork.
func TestInvariant10LogAfterACrash(t *testing.T) {
	defer issuelog.SetBootID("first")()
	dir := t.TempDir()
	d := durabletest.Watch(t, dir)
	l, err := work(faultConfig(dir), new(history), func(h history) { d.Mark(h) })
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	stride := 1
	if testing.Short() {
		stride = 19
	}
	d.Crashes(stride, func(machine bool, left *durabletest.Left) {
		var h history
		if n := len(left.Marks); n > 0 {
			h = left.Marks[n-1].(history)
		}
		afterwards(t, left.String(), left.Dir, h, machine)
	})
}

// TestLossInAJournal: what is missing from a journal is an error, unless the machine was restarted since: then what lies before
// it counts, and the journal is kept aside.
func TestLossInAJournal(t *testing.T) {
	for name, lose := range map[string]func(older []byte) []byte{
		"a hole in one":      func(older []byte) []byte { clear(older[len(older)/2+10 : len(older)/2+60]); return older },
		"the older one gone": func([]byte) []byte { return nil },
	} {
		for _, restarted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restarted=%v", name, restarted), func(t *testing.T) {
				c := create(t)
				defer issuelog.SetBootID("first")()
				l := open(t, c)
				d := durabletest.Watch(t, c.Dir)
				write(t, l, 0, 2)
				write(t, l, 2, 2)
				write(t, l, 4, 2)
				d.FailAt(d.Steps(), durabletest.Fail)
				if err := l.Sequence(); err == nil {
					t.Fatal("it did not fail")
				}
				write(t, l, 6, 2)
				l.Kill()
				older, newer := filepath.Join(c.Dir, issuelog.JournalFiles[0]), filepath.Join(c.Dir, issuelog.JournalFiles[1])
				if err := os.WriteFile(older, lose(read(t, older)), 0o600); err != nil {
					t.Fatal(err)
				}
				if restarted {
					defer issuelog.SetBootID("second")()
				}
				l, err := issuelog.Open(c)
				if !restarted {
					if !errors.Is(err, issuelog.ErrDamaged) || !strings.Contains(err.Error(), "journal.") {
						t.Errorf("a loss that nothing explains gave %v", err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				l.Close()
				var kept []string
				if !strings.Contains(name, "gone") {
					kept = []string{issuelogtest.Serial(0), issuelogtest.Serial(1)}
				}
				check(t, c.Dir, nil, kept)
				if info, err := os.Stat(newer + ".lost"); err != nil || info.Size() == 0 || info.Mode().Perm() != 0o600 {
					t.Errorf("the journal is not kept: %v, %v", info, err)
				}
			})
		}
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil || len(data) == 0 {
		t.Fatalf("%d bytes, %v", len(data), err)
	}
	return data
}

// TestLogOnAFullDisk fills a real file system: what cannot be written is told, and with room again the log goes on.
func TestLogOnAFullDisk(t *testing.T) {
	dir := durabletest.SmallDisk(t, 1<<20)
	c := faultConfig(dir)
	var h history
	l, err := work(c, &h, func(history) {})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { l.Close() }()
	for round := range 3 {
		remove := durabletest.Fill(t, dir)
		failures := 0
		for i := range 60 {
			n := 1000 + 100*round + i
			switch err := l.Write(issuelogtest.Pairs(n, 1)); {
			case err == nil:
				h.written = append(h.written, issuelogtest.Serial(n))
			case !errors.Is(err, unix.ENOSPC):
				t.Fatalf("a full disk gave %v", err)
			default:
				failures++
			}
			if i%20 == 19 {
				if err := l.Sequence(); err != nil && !errors.Is(err, unix.ENOSPC) {
					t.Fatalf("a full disk gave %v", err)
				}
			}
		}
		if failures == 0 {
			t.Fatal("the disk did not get full")
		}
		if round == 1 { // a start on the full disk may fail, and does no harm
			l.Kill()
			if l, err = issuelog.Open(c); err != nil && !errors.Is(err, unix.ENOSPC) {
				t.Fatal(err)
			}
		}
		remove()
		if l == nil {
			if l, err = issuelog.Open(c); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.Sequence(); err != nil {
			t.Fatalf("with room again: %v", err)
		}
		check(t, c.Dir, h.checkpoint, h.written)
	}
}
