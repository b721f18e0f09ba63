package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func open(t testing.TB, path string) *Log {
	t.Helper()
	l, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func lines(t *testing.T, path string) []string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
}

// fill sets every field of a struct, so that a field that append forgets shows.
func fill(v reflect.Value, text string) {
	for i := range v.NumField() {
		f := v.Field(i)
		switch f.Interface().(type) {
		case time.Time:
			f.Set(reflect.ValueOf(time.Date(2026, 11, 30, 1, 2, 3, 4, time.UTC)))
		case *time.Time:
			f.Set(reflect.ValueOf(new(time.Date(2051, 1, 1, 0, 0, 0, 0, time.UTC))))
		case bool:
			f.SetBool(true)
		case Requester:
			fill(f, text)
		case []byte: // not part of the line
			f.SetBytes([]byte(text))
		default:
			f.SetString(text + v.Type().Field(i).Name)
		}
	}
}

func TestRecordIsWrittenAsEncodingJSONWould(t *testing.T) {
	for _, text := range []string{"plain", `quote" back\ slash`, "line\nbreak\ttab", "<&>", "é\u2028\xff\x00\x7f"} {
		var r Record
		fill(reflect.ValueOf(&r).Elem(), text)
		r.Event = Intent
		want, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var a, b any
		if err := json.Unmarshal(r.AppendJSON(nil), &a); err != nil {
			t.Fatalf("%q: %v in %s", text, err, r.AppendJSON(nil))
		}
		if err := json.Unmarshal(want, &b); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%q: got\n%s\nwant\n%s", text, r.AppendJSON(nil), want)
		}
		if strings.ContainsAny(string(r.AppendJSON(nil)), "\n\r") {
			t.Errorf("%q: more than one line", text)
		}
	}
	empty := Record{Event: Started}
	if got, want := string(empty.AppendJSON(nil)), `{"time":"0001-01-01T00:00:00Z","event":"started"}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestAppendIsInTheFileWhenItReturns(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	l := open(t, path)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			detail := fmt.Sprintf("record %d", i)
			if err := l.Append(Record{Event: Admin, Detail: detail}); err != nil {
				t.Error(err)
				return
			}
			if data, err := os.ReadFile(path); err != nil || !strings.Contains(string(data), `"`+detail+`"`) {
				t.Errorf("%q is not in the file after Append (%v)", detail, err)
			}
		})
	}
	wg.Wait()
	if n := len(lines(t, path)); n != 64 {
		t.Errorf("%d lines, want 64", n)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
}

func TestNoteIsWrittenWithoutAnAppend(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	l := open(t, path)
	if err := l.Note(Record{Event: Issued}); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := lines(t, path); len(got) != 1 || !strings.Contains(got[0], "issued") {
		t.Errorf("lines %q", got)
	}
	if err := l.Append(Record{}); err == nil {
		t.Error("a closed log took a record")
	}
}

// A line that a crash cut off does not swallow the next one.
func TestTornLineIsEnded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	if err := os.WriteFile(path, []byte("{\"event\":\"intent\"}\n{\"event\":\"iss"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := open(t, path)
	if err := l.Append(Record{Event: Started}); err != nil {
		t.Fatal(err)
	}
	good := 0
	for _, line := range lines(t, path) {
		if json.Valid([]byte(line)) {
			good++
		}
	}
	if good != 2 {
		t.Errorf("%d whole lines, want 2: %q", good, lines(t, path))
	}
}

// Each writer is told of a failure, and the log works again once the disk does.
// TestOtherFilesAreLeftAlone: a key or a database that is named by mistake is not appended to.
func TestOtherFilesAreLeftAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	for _, content := range []string{"SQLite format 3\x00", "-----BEGIN PRIVATE KEY-----\n", "q83vEjRWeJA="} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if l, err := Open(path); err == nil || !strings.Contains(err.Error(), "something else than an audit log") {
			t.Errorf("%q: %v", content, err)
			if err == nil {
				l.Close()
			}
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != content {
			t.Errorf("%q became %q, %v", content, got, err)
		}
	}
}

func TestFailureIsToldAndRecoveredFrom(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "audit.jsonl")
	if err := os.Symlink("/dev/full", path); err != nil {
		t.Fatal(err)
	}
	l := open(t, path)
	if err := l.Append(Record{Event: Intent}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("a full disk gave %v", err)
	}
	if l.Err() == nil {
		t.Error("Err says all is well")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := l.Append(Record{Event: Intent}); err != nil {
		t.Errorf("after the disk had room again: %v", err)
	}
	if l.Err() != nil {
		t.Errorf("Err still says %v", l.Err())
	}
}

func TestReopenFollowsARenamedFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "audit.jsonl")
	l := open(t, path)
	if err := errors.Join(l.Append(Record{Event: Admin, Detail: "one"}), os.Rename(path, path+".1")); err != nil {
		t.Fatal(err)
	}
	l.Reopen()
	if err := l.Append(Record{Event: Admin, Detail: "two"}); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{path + ".1": "one", path: "two"} {
		if got := lines(t, file); len(got) != 1 || !strings.Contains(got[0], want) {
			t.Errorf("%s has %q, want one line with %q", file, got, want)
		}
	}
}

// A disk that does not answer is told without waiting for it.
func TestErrDoesNotWaitForAHangingDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &Log{path: "audit.jsonl", pending: newBatch(), closing: make(chan struct{})}
		l.mu.Lock()
		l.begun = time.Now()
		l.mu.Unlock()
		l.io.Lock() // as the commit under way holds it
		defer l.io.Unlock()
		time.Sleep(hangs)
		if err := l.Err(); err != nil {
			t.Errorf("after %s: %v", hangs, err)
		}
		time.Sleep(time.Second)
		if err := l.Err(); err == nil || !strings.Contains(err.Error(), "has not answered") {
			t.Errorf("a commit that hangs gave %v", err)
		}
	})
}

func BenchmarkAppendParallel16(b *testing.B) {
	l := open(b, filepath.Join(b.TempDir(), "audit.jsonl"))
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := l.Append(Record{Event: Intent, Serial: "00", SPIFFEID: "spiffe://td/ns/a/sa/b"}); err != nil {
				b.Error(err)
			}
		}
	})
}

// What waits for a disk that does not answer is bounded.
func TestBoundOfWhatWaits(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "audit.jsonl"))
	l.io.Lock() // as a write that hangs holds it
	detail := strings.Repeat("x", 1<<20)
	n := 0
	for ; n < 100; n++ {
		if err := l.Note(Record{Event: Denied, Detail: detail}); err != nil {
			if !strings.Contains(err.Error(), "bytes wait for the disk already") {
				t.Error(err)
			}
			break
		}
	}
	l.io.Unlock()
	if n < 16 || n > 40 { // a part may be on its way to the disk
		t.Errorf("%d MiB were taken", n)
	}
}

func TestMovedIsNoticed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	l := open(t, path)
	if l.Moved() {
		t.Error("a log that lies where it should counts as moved")
	}
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	if !l.Moved() {
		t.Error("its file is away, and nobody notices")
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !l.Moved() {
		t.Error("another file lies in its place, and nobody notices")
	}
	l.Reopen()
	if err := l.Append(Record{Event: Admin}); err != nil {
		t.Fatal(err)
	}
	if l.Moved() {
		t.Error("it still counts as moved after it was reopened")
	}
}
