package issuelog_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/issuelogtest"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
)

// TestBoundsOfWrites: an entry, a group of them, and what waits for the tree are bounded; what is refused leaves no trace.
func TestBoundsOfWrites(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 200 MB: not under -short")
	}
	c := create(t)
	l := open(t, c)
	big := func(bytes int) audit.Record {
		_, r := issuelogtest.Pair(1)
		r.Certificate = make([]byte, bytes)
		return r
	}
	if err := l.Write([]audit.Record{big(50_000)}); err == nil || !strings.Contains(err.Error(), "at most 65535 fit") {
		t.Errorf("an entry that is too large: %v", err)
	}
	if err := l.Write(slices.Repeat([]audit.Record{big(45_000)}, 600)); err == nil || !strings.Contains(err.Error(), "at most 33554432 are taken") {
		t.Errorf("a group that is too large: %v", err)
	}
	if l.Size() != 0 || l.Err() != nil {
		t.Fatalf("after refusals: size %d, %v", l.Size(), l.Err())
	}
	var err error
	n := 0
	for ; err == nil && n < 10; n++ {
		err = l.Write(slices.Repeat([]audit.Record{big(45_000)}, 400))
	}
	if err == nil || !strings.Contains(err.Error(), "wait to get into the tree") || n != 4 {
		t.Errorf("group %d of 24 MB: %v", n, err)
	}
	if err := l.Sequence(); err != nil {
		t.Fatal(err)
	}
	if err := l.Write([]audit.Record{big(100)}); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

// TestBoundsOfFiles: what somebody puts in place of a log's files is not read beyond what they can have.
func TestBoundsOfFiles(t *testing.T) {
	large := func(t *testing.T, path string, size int64) {
		t.Helper()
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
	}
	for name, size := range map[string]int64{
		issuelog.CheckpointFile: 64<<10 + 1, "log.pub": 64<<10 + 1, "log.key": 64<<10 + 1, "tile/0/000.p/6": 256*32 + 1, "tile/entries/000.p/6": issuelog.MaxBundle + 1,
	} {
		c := create(t)
		l := open(t, c)
		write(t, l, 0, 3)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		large(t, filepath.Join(c.Dir, name), size)
		want := fmt.Sprintf("has more than %d bytes", size-1)
		if name != "log.pub" { // the server has its own
			if _, err := issuelog.Open(c); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("the server, %s: %v", name, err)
			}
		}
		if name == "log.key" {
			continue
		}
		report, err := verify.Log(t.Context(), verify.Config{Dir: c.Dir})
		if err == nil && len(report.Findings) == 0 {
			t.Errorf("verify finds nothing wrong with %s", name)
		}
		if err == nil && strings.Contains(name, "entries") && !strings.Contains(report.Findings[0].Problem, "at most 16777472 are read") && !strings.Contains(fmt.Sprint(report.Findings), "are read") {
			t.Errorf("%s: %v", name, report.Findings)
		}
	}
}

// TestBoundsOfReports: a proof and a report have ends.
func TestBoundsOfReports(t *testing.T) {
	if _, err := verify.DecodeProof(make([]byte, 1<<20+1)); err == nil || !strings.Contains(err.Error(), "at most 1048576 are read") {
		t.Errorf("got %v", err)
	}
	c := create(t)
	l := open(t, c)
	for range 150 { // the same serial again and again
		write(t, l, 0, 1)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	report, err := verify.Log(t.Context(), verify.Config{Dir: c.Dir})
	if err != nil || len(report.Findings) != 100 || report.More != 198 {
		t.Errorf("%d findings and %d more, %v", len(report.Findings), report.More, err)
	}
}
