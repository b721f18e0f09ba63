package issuelog_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/issuelogtest"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
)

const origin = "cluster.local/chancery/log/16909060"

func create(t testing.TB) issuelog.Config {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "log")
	if _, err := issuelog.Create(dir, origin); err != nil {
		t.Fatal(err)
	}
	return issuelog.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)}
}

func open(t testing.TB, c issuelog.Config) *issuelog.Log {
	t.Helper()
	l, err := issuelog.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func write(t testing.TB, l *issuelog.Log, first, n int) {
	t.Helper()
	if err := l.Write(issuelogtest.Pairs(first, n)); err != nil {
		t.Fatal(err)
	}
}

// check is the full-state checker: the log verifies, continues an earlier checkpoint, and has an intent of every serial given.
func check(t testing.TB, dir string, earlier []byte, serials []string) *verify.Report {
	t.Helper()
	report, err := verify.Log(t.Context(), verify.Config{Dir: dir, Earlier: earlier, EarlierName: "earlier"})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range report.Findings {
		t.Error(f)
	}
	r, err := verify.OpenReader(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	if err := r.Search(t.Context(), verify.Query{}, func(f verify.Found) error {
		have[f.Entry.Serial] = true
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, s := range serials {
		if !have[s] {
			t.Errorf("serial %s was confirmed and is not in the log", s)
		}
	}
	return report
}

func checkpoint(t testing.TB, dir string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, issuelog.CheckpointFile))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestLogGrowsOverRestarts(t *testing.T) {
	c := create(t)
	var serials []string
	next := 0
	for round, n := range []int{1, 0, 126, 1, 128, 129, 300, 1} {
		earlier := checkpoint(t, c.Dir)
		l := open(t, c)
		for range n {
			write(t, l, next, 1)
			serials = append(serials, issuelogtest.Serial(next))
			next++
			if next%50 == 0 {
				if err := l.Sequence(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if report := check(t, c.Dir, earlier, serials); report.Size != int64(2*next) || report.Certificates != int64(next) || report.Pending != 0 {
			t.Fatalf("round %d: %+v", round, report)
		}
	}
	// Of partial tiles only those of the last checkpoint are left.
	var partial []string
	if err := filepath.WalkDir(filepath.Join(c.Dir, "tile"), func(path string, d fs.DirEntry, err error) error {
		if strings.HasSuffix(filepath.Dir(path), ".p") {
			partial = append(partial, strings.TrimPrefix(path, c.Dir))
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if want := []string{"/tile/0/005.p/92", "/tile/1/000.p/5", "/tile/entries/005.p/92"}; !slices.Equal(partial, want) {
		t.Errorf("partial tiles %v, want %v", partial, want)
	}
}

func TestWriteOutlivesTheProcess(t *testing.T) {
	c := create(t)
	l := open(t, c)
	write(t, l, 0, 200)
	l.Kill()
	if report := check(t, c.Dir, nil, nil); report.Size != 0 || report.Pending != 400 {
		t.Errorf("before a restart: %+v", report)
	}
	open(t, c)
	if report := check(t, c.Dir, nil, nil); report.Size != 400 || report.Pending != 0 {
		t.Errorf("after it: %+v", report)
	}
}

// TestJournalCutOffAnywhere: whatever a crash leaves of the last write, the log opens with all writes before it.
func TestJournalCutOffAnywhere(t *testing.T) {
	c := create(t)
	l := open(t, c)
	write(t, l, 0, 2)
	path := filepath.Join(c.Dir, issuelog.JournalFiles[1]) // Open has swapped none
	if info, err := os.Stat(path); err != nil || info.Size() == 0 {
		path = filepath.Join(c.Dir, issuelog.JournalFiles[0])
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	write(t, l, 2, 1)
	l.Kill()
	all, err := os.ReadFile(path)
	if err != nil || len(all) <= len(whole) {
		t.Fatal(len(all), err)
	}
	empty := checkpoint(t, c.Dir)
	rng := rand.New(rand.NewPCG(1, 2))
	for cut := len(whole); cut < len(all); cut += 1 + rng.IntN(25) {
		dir := c.Dir
		if err := errors.Join(os.RemoveAll(filepath.Join(dir, "tile")), os.WriteFile(filepath.Join(dir, issuelog.CheckpointFile), empty, 0o600),
			os.WriteFile(path, all[:cut], 0o600)); err != nil {
			t.Fatal(err)
		}
		l, err := issuelog.Open(c)
		if err != nil {
			t.Fatalf("cut to %d bytes: %v", cut, err)
		}
		if n := l.Size(); n != 4 {
			t.Fatalf("cut to %d bytes: %d entries, want 4", cut, n)
		}
		write(t, l, 9, 1)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		check(t, dir, nil, []string{issuelogtest.Serial(0), issuelogtest.Serial(1), issuelogtest.Serial(9)})
	}
}

func TestDamageInAJournalIsNotCutOff(t *testing.T) {
	c := create(t)
	l := open(t, c)
	write(t, l, 0, 2)
	write(t, l, 2, 2)
	l.Kill()
	for _, name := range issuelog.JournalFiles {
		path := filepath.Join(c.Dir, name)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if len(data) == 0 {
			continue
		}
		for _, at := range []int{0, 9, 15, 21, 25, 40, len(data)/2 - 10} {
			data[at] ^= 1
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := issuelog.Open(c); !errors.Is(err, issuelog.ErrDamaged) || !strings.Contains(err.Error(), name) {
				t.Errorf("byte %d of %s flipped: %v", at, name, err)
			}
			if report, err := verify.Log(t.Context(), verify.Config{Dir: c.Dir}); err != nil || len(report.Findings) != 1 || !strings.Contains(report.Findings[0].File, name) {
				t.Errorf("byte %d of %s flipped: %+v, %v", at, name, report, err)
			}
			data[at] ^= 1
		}
	}
}

func TestOneProcessWrites(t *testing.T) {
	c := create(t)
	l := open(t, c)
	if _, err := issuelog.Open(c); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a second one opened it: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.Write(issuelogtest.Pairs(0, 1)); err == nil {
		t.Error("a closed log took an entry")
	}
	open(t, c)
}

func TestInvariant11NoLogIsMadeByItself(t *testing.T) {
	dir := t.TempDir()
	if _, err := issuelog.Open(issuelog.Config{Dir: dir}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("opening a folder without a log gave %v", err)
	}
	c := create(t)
	if _, err := issuelog.Create(c.Dir, origin); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second log in one folder: %v", err)
	}
	open(t, c).Close()
	if err := os.Remove(filepath.Join(c.Dir, issuelog.CheckpointFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := issuelog.Open(c); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a checkpoint: %v", err)
	}
	// Where there are no tiles it may be a Create that a crash cut short; with tiles it was a log.
	public, err := issuelog.Create(c.Dir, "another name")
	if want, _ := issuelog.PublicKey(c.Dir); err != nil || public != want || !strings.HasPrefix(public, origin) {
		t.Errorf("completing gave %q, %v", public, err)
	}
	l := open(t, c)
	write(t, l, 0, 1)
	l.Close()
	if err := os.Remove(filepath.Join(c.Dir, issuelog.CheckpointFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := issuelog.Create(c.Dir, origin); err == nil || !strings.Contains(err.Error(), "restore") {
		t.Errorf("with tiles and no checkpoint: %v", err)
	}
}

func TestKeyThatOthersCanReadIsRefused(t *testing.T) {
	c := create(t)
	if err := os.Chmod(filepath.Join(c.Dir, "log.key"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := issuelog.Open(c); err == nil || !strings.Contains(err.Error(), "0600") {
		t.Error(err)
	}
}

// TestMirrorOfTheAuditLog: through the audit log, what Append confirmed is in the log after a crash.
func TestMirrorOfTheAuditLog(t *testing.T) {
	c := create(t)
	l := open(t, c)
	a, err := audit.Open(filepath.Join(t.TempDir(), "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	a.Mirror(l.Write)
	var mu sync.Mutex
	var serials []string
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 50 {
				intent, issued := issuelogtest.Pair(1000*w + i)
				if err := a.Append(intent); err != nil {
					t.Error(err)
					return
				}
				if err := a.Note(issued); err != nil {
					t.Error(err)
				}
				mu.Lock()
				serials = append(serials, intent.Serial)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if err := a.Append(audit.Record{Event: audit.Admin}); err != nil {
		t.Error(err)
	}
	l.Kill()
	l2 := open(t, c)
	report := check(t, c.Dir, nil, serials)
	if report.Intents != 400 {
		t.Errorf("%+v", report)
	}
	_ = l2
	if err := a.Append(audit.Record{Event: audit.Intent, Serial: "01"}); err == nil {
		t.Error("an intent that the issuance log could not take was confirmed")
	}
	if a.Err() == nil {
		t.Error("the audit log says that all is well")
	}
}

func TestRunMakesACheckpointASecond(t *testing.T) {
	c := create(t)
	l := open(t, c)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- l.Run(ctx) }()
		write(t, l, 0, 10)
		before := checkpoint(t, c.Dir)
		time.Sleep(1100 * time.Millisecond)
		synctest.Wait()
		if slices.Equal(before, checkpoint(t, c.Dir)) {
			t.Error("no new checkpoint after a second")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestLongClaimsFitAnEntry(t *testing.T) {
	long := strings.Repeat("<\x01", 6000)
	r, _ := issuelogtest.Pair(1)
	r.Requester = audit.Requester{
		Remote: long, Method: long, User: long, SPIFFEID: "spiffe://td/" + strings.Repeat("a", 2000), Cluster: long, Namespace: long,
		ServiceAccount: long, Pod: long, PodUID: long, Node: long, CredentialID: long,
	}
	r.Detail = long
	data, ok, err := issuelog.AppendEntry(nil, r)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	if _, err := issuelog.DecodeEntry(data[2:]); err != nil {
		t.Error(err)
	}
}

func FuzzDecodeEntry(f *testing.F) {
	for _, r := range issuelogtest.Pairs(1, 1) {
		data, _, err := issuelog.AppendEntry(nil, r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data[2:])
	}
	f.Add([]byte(`{"time":"2026-11-30T08:00:00Z","event":"failed","serial":"01","reason":"X"}`))
	f.Add([]byte(`{"serial":"01","serial":"02","event":"intent"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := issuelog.DecodeEntry(data)
		if err != nil {
			return
		}
		e.Record.Certificate = e.Certificate
		again, ok, err := issuelog.AppendEntry(nil, e.Record)
		if err != nil || !ok {
			t.Skip() // too long once escaped
		}
		b, err := issuelog.DecodeEntry(again[2:])
		if err != nil {
			t.Fatalf("%q decodes, but not after encoding: %v", data, err)
		}
		if b.Serial != e.Serial || b.Event != e.Event || string(b.Certificate) != string(e.Certificate) || b.TBSHash != e.TBSHash {
			t.Errorf("%q changed to %q", data, again)
		}
	})
}
