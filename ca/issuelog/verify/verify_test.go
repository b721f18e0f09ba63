package verify_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/issuelogtest"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
)

// build makes a log of the records, with the key of another log if one is given.
func build(t testing.TB, records []audit.Record, keyFrom string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "log")
	if keyFrom != "" {
		key, err := os.ReadFile(filepath.Join(keyFrom, "log.key"))
		if err := errors.Join(err, os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "log.key"), key, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := issuelog.Create(dir, "cluster.local/chancery/log/16909060"); err != nil {
		t.Fatal(err)
	}
	l, err := issuelog.Open(issuelog.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(l.Write(records), l.Close()); err != nil {
		t.Fatal(err)
	}
	return dir
}

func report(t testing.TB, c verify.Config) *verify.Report {
	t.Helper()
	r, err := verify.Log(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestEveryFlippedByteIsNamed flips one byte of one file at a time: all of the small files, a sample of the others.
func TestEveryFlippedByteIsNamed(t *testing.T) {
	dir := build(t, issuelogtest.Pairs(0, 400), "")
	if r := report(t, verify.Config{Dir: dir}); len(r.Findings) > 0 || r.Size != 800 || r.Certificates != 400 || r.Open != 0 {
		t.Fatalf("untouched: %+v", r)
	}
	sample := 150
	if testing.Short() {
		sample = 20
	}
	rng := rand.New(rand.NewPCG(5, 6))
	files := 0
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || slices.Contains([]string{"log.key", "log.lock"}, d.Name()) {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if len(data) > 0 {
			files++
		}
		at := rng.Perm(len(data))
		if len(at) > 300 || testing.Short() {
			at = at[:min(sample, len(at))]
		}
		for _, i := range at {
			flipped := bytes.Clone(data)
			flipped[i] ^= byte(1 + rng.IntN(255))
			if err := os.WriteFile(path, flipped, 0o600); err != nil {
				return err
			}
			isNamed(t, dir, path, i)
		}
		return os.WriteFile(path, data, 0o600)
	}); err != nil {
		t.Fatal(err)
	}
	if files != 11 { // checkpoint, log.pub, 4 bundles, 4 tiles of level 0, 1 of level 1
		t.Errorf("%d files flipped, want 11", files)
	}
	if r := report(t, verify.Config{Dir: dir}); len(r.Findings) > 0 {
		t.Errorf("put back: %+v", r)
	}
}

var entryNumber = regexp.MustCompile(`entry (\d+), serial`)

// isNamed holds that verify fails and its first words are about the file, and the entry in it.
func isNamed(t *testing.T, dir, path string, at int) {
	t.Helper()
	r, err := verify.Log(t.Context(), verify.Config{Dir: dir})
	if err != nil {
		if !strings.Contains(err.Error(), path) {
			t.Errorf("%s, byte %d: %v", path, at, err)
		}
		return
	}
	if len(r.Findings) == 0 {
		t.Errorf("%s, byte %d: not found", path, at)
		return
	}
	f := r.Findings[0]
	if f.File != path {
		t.Errorf("%s, byte %d: %v", path, at, r.Findings)
	}
	inTile := strings.Contains(path, "/tile/0/")
	if !inTile && !strings.Contains(path, "/entries/") {
		return
	}
	index := -1
	if inTile {
		var n int
		if _, err := fmt.Sscanf(strings.TrimPrefix(path, dir+"/tile/0/"), "%03d", &n); err != nil {
			t.Fatal(err)
		}
		index = n*256 + at/32
	}
	if !entryNumber.MatchString(f.String()) || inTile && f.Index != int64(index) {
		t.Errorf("%s, byte %d: does not name its entry (%d): %v", path, at, index, f)
	}
}

func TestMissingAndCutFilesAreNamed(t *testing.T) {
	for _, name := range []string{"tile/entries/000", "tile/entries/001.p/144", "tile/0/000", "tile/0/001.p/144", "tile/1/000.p/1"} {
		dir := build(t, issuelogtest.Pairs(0, 200), "")
		path := filepath.Join(dir, name)
		if err := os.Truncate(path, 31); err != nil {
			t.Fatal(err)
		}
		if r := report(t, verify.Config{Dir: dir}); len(r.Findings) == 0 || r.Findings[0].File != path {
			t.Errorf("%s cut: %v", name, r.Findings)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if r := report(t, verify.Config{Dir: dir}); len(r.Findings) == 0 || r.Findings[0].File != path || !strings.Contains(r.Findings[0].Problem, "missing") {
			t.Errorf("%s removed: %v", name, r.Findings)
		}
	}
}

// TestD21RebuiltLogIsAFork: the log's key cannot make a history disappear that a checkpoint outside has seen.
func TestD21RebuiltLogIsAFork(t *testing.T) {
	records := issuelogtest.Pairs(0, 300)
	dir := build(t, records, "")
	old, err := os.ReadFile(filepath.Join(dir, issuelog.CheckpointFile))
	if err != nil {
		t.Fatal(err)
	}
	more := append(slices.Clone(records), issuelogtest.Pairs(1000, 50)...)
	for name, tc := range map[string]struct {
		records []audit.Record
		fork    bool
	}{
		"the same":                       {records, false},
		"grown":                          {more, false},
		"one entry removed":              {slices.Delete(slices.Clone(records), 11, 12), true},
		"a pair removed":                 {slices.Delete(slices.Clone(records), 10, 12), true},
		"a pair removed, and grown":      {slices.Delete(slices.Clone(more), 10, 12), true},
		"the last removed":               {records[:598], true},
		"the first pair put at the end":  {append(slices.Clone(records[2:]), records[:2]...), true},
		"all removed":                    {nil, true},
		"another pair in place of a one": {append(issuelogtest.Pairs(2000, 1), records[2:]...), true},
	} {
		again := build(t, tc.records, dir)
		if r := report(t, verify.Config{Dir: again}); len(r.Findings) > 0 {
			t.Errorf("%s: without a checkpoint it should look clean: %v", name, r.Findings)
		}
		r := report(t, verify.Config{Dir: again, Earlier: old, EarlierName: "OLD"})
		if tc.fork != (len(r.Findings) == 1 && strings.Contains(r.Findings[0].Problem, "FORK: OLD")) || !tc.fork && len(r.Findings) > 0 {
			t.Errorf("%s: %v", name, r.Findings)
		}
	}
	other := build(t, records, "")
	if _, err := verify.Log(t.Context(), verify.Config{Dir: other, Earlier: old, EarlierName: "OLD"}); err == nil || !strings.Contains(err.Error(), "OLD") {
		t.Errorf("a checkpoint of another log: %v", err)
	}
	public, err := issuelog.PublicKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := verify.Log(t.Context(), verify.Config{Dir: other, PublicKey: public}); err == nil {
		t.Error("a log under another key than the one given")
	}
}

func TestEntriesAreHeldToEachOther(t *testing.T) {
	pair := func(i int) []audit.Record { return issuelogtest.Pairs(i, 1) }
	swapped := pair(3)
	swapped[1].Certificate, swapped[1].CertHash = pair(4)[1].Certificate, pair(4)[1].CertHash
	lying := pair(5)
	lying[1].CertHash = strings.Repeat("0", 64)
	other := pair(6)
	other[0].TBSHash = pair(7)[0].TBSHash
	renamed := pair(12)
	renamed[0].SPIFFEID = issuelogtest.ID(13)
	misnamed := pair(14)
	misnamed[1].SPIFFEID = misnamed[1].SPIFFEID[:len(misnamed[1].SPIFFEID)-1]
	failed := pair(8)
	failed[1].Event, failed[1].Certificate, failed[1].CertHash = audit.Failed, nil, ""
	for want, records := range map[string][]audit.Record{
		"no intent for it comes before": pair(1)[1:],
		"has an intent already":         {pair(1)[0], pair(1)[1], pair(1)[0]},
		"has a result already":          {pair(1)[0], pair(1)[1], pair(1)[1]},
		"its certificate has serial":    swapped,
		"its cert_sha256 is not":        lying,
		"not the one of its intent":     other,
		"another SPIFFE ID":             renamed,
		"does not name":                 misnamed,
		"":                              append(failed, pair(9)[0]), // signing failed, or is under way: nothing wrong
	} {
		dir := build(t, append(issuelogtest.Pairs(100, 10), records...), "")
		r := report(t, verify.Config{Dir: dir})
		if want == "" {
			if len(r.Findings) > 0 || r.Failed != 1 || r.Open != 1 {
				t.Errorf("%+v", r)
			}
			continue
		}
		serial := records[len(records)-1].Serial
		if len(r.Findings) != 1 || !strings.Contains(r.Findings[0].Problem, want) || r.Findings[0].Serial != serial || r.Findings[0].Index != int64(20+len(records)-1) {
			t.Errorf("%s: %v", want, r.Findings)
		}
	}
}

func TestProofs(t *testing.T) {
	for _, n := range []int{1, 100, 129, 300} {
		dir := build(t, issuelogtest.Pairs(0, n), "")
		r, err := verify.OpenReader(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < n; i += 1 + n/7 {
			p, err := r.Prove(t.Context(), issuelogtest.Serial(i))
			if err != nil {
				t.Fatal(err)
			}
			data, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			if p, err = verify.DecodeProof(data); err != nil {
				t.Fatal(err)
			}
			_, issued := issuelogtest.Pair(i)
			c, found, err := p.Check(r.PublicKey, issued.Certificate)
			if err != nil || c.Size != int64(2*n) || len(found) != 2 || found[0].Index != int64(2*i) || found[0].Entry.Requester.PodUID == "" {
				t.Fatalf("size %d, pair %d: %v, %v, %v", n, i, c, found, err)
			}
			_, other := issuelogtest.Pair(i + 1)
			if _, _, err := p.Check(r.PublicKey, other.Certificate); err == nil {
				t.Error("it proves another certificate too")
			}
		}
		if _, err := r.Prove(t.Context(), issuelogtest.Serial(n)); !errors.Is(err, verify.ErrNotLogged) {
			t.Errorf("a serial that is not there: %v", err)
		}
	}
}

func TestChangedProofsAreRefused(t *testing.T) {
	dir := build(t, issuelogtest.Pairs(0, 200), "")
	r, err := verify.OpenReader(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*verify.Proof){
		"entry":      func(p *verify.Proof) { p.Entries[0].Entry = strings.Replace(p.Entries[0].Entry, "node-a", "node-b", 1) },
		"index":      func(p *verify.Proof) { p.Entries[0].Index++ },
		"no index":   func(p *verify.Proof) { p.Entries[0].Index = 400 },
		"hash":       func(p *verify.Proof) { p.Entries[1].Proof[3][0] ^= 1 },
		"short":      func(p *verify.Proof) { p.Entries[1].Proof = p.Entries[1].Proof[1:] },
		"checkpoint": func(p *verify.Proof) { p.Checkpoint = strings.Replace(p.Checkpoint, "\n400\n", "\n401\n", 1) },
		"none":       func(p *verify.Proof) { p.Entries = nil },
		"no intent":  func(p *verify.Proof) { p.Entries = p.Entries[1:] },
		"mixed": func(p *verify.Proof) {
			q, err := r.Prove(t.Context(), issuelogtest.Serial(5))
			if err != nil {
				t.Fatal(err)
			}
			p.Entries[1] = q.Entries[1]
		},
	} {
		p, err := r.Prove(t.Context(), issuelogtest.Serial(77))
		if err != nil {
			t.Fatal(err)
		}
		change(p)
		if _, _, err := p.Check(r.PublicKey, nil); err == nil {
			t.Errorf("%s changed: accepted", name)
		}
	}
}

func TestSearch(t *testing.T) {
	dir := build(t, issuelogtest.Pairs(0, 500), "")
	r, err := verify.OpenReader(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		query verify.Query
		want  int
	}{
		"all":              {verify.Query{}, 1000},
		"serial":           {verify.Query{Serial: issuelogtest.Serial(321)}, 2},
		"ID":               {verify.Query{SPIFFEID: issuelogtest.ID(42)}, 10},
		"since":            {verify.Query{Since: issuelogtest.Start.Add(400 * time.Second)}, 200},
		"ID and since":     {verify.Query{SPIFFEID: issuelogtest.ID(42), Since: issuelogtest.Start.Add(400 * time.Second)}, 2},
		"nobody":           {verify.Query{SPIFFEID: "spiffe://cluster.local/ns/foo/sa/web-4"}, 0},
		"half of a serial": {verify.Query{Serial: issuelogtest.Serial(321)[:20]}, 0},
	} {
		n, last := 0, int64(-1)
		if err := r.Search(t.Context(), tc.query, func(f verify.Found) error {
			if f.Index <= last {
				t.Errorf("%s: entry %d after %d", name, f.Index, last)
			}
			n, last = n+1, f.Index
			return nil
		}); err != nil {
			t.Error(err)
		}
		if n != tc.want {
			t.Errorf("%s: %d found, want %d", name, n, tc.want)
		}
	}
}

// TestVerifyWhileTheLogGrows: a reader sees one checkpoint whole, whatever the server does meanwhile.
func TestVerifyWhileTheLogGrows(t *testing.T) {
	dir := build(t, issuelogtest.Pairs(0, 10), "")
	l, err := issuelog.Open(issuelog.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for i := 10; ; i += 7 {
			select {
			case <-stop:
				stopped <- l.Close()
				return
			default:
			}
			if err := errors.Join(l.Write(issuelogtest.Pairs(i, 7)), l.Sequence()); err != nil {
				stopped <- err
				return
			}
		}
	}()
	var last int64
	for range 60 {
		r, err := verify.Log(t.Context(), verify.Config{Dir: dir})
		if err != nil || len(r.Findings) > 0 || r.Size < last {
			t.Fatalf("%+v, %v", r, err)
		}
		last = r.Size
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

func FuzzProof(f *testing.F) {
	f.Add([]byte(`{"checkpoint":"a\n1\nb\n","entries":[{"index":0,"entry":"{}","proof":["` + base64.StdEncoding.EncodeToString(make([]byte, 32)) + `"]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if p, err := verify.DecodeProof(data); err == nil {
			if _, _, err := p.Check("a+12345678+AAAA", nil); err == nil {
				t.Error("a proof under no key")
			}
		}
	})
}
