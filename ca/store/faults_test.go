package store

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/durable/durabletest"
)

// documentOf returns a document that says which version it is, in each part, so that a mix shows. It spans many pages.
func documentOf(version uint64) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "version %08d;", version), 500+int(version%7)*400)
}

// writeForever is the process that is killed: it says which version it is about to store, and which was confirmed.
func writeForever(path string) error {
	ctx := context.Background()
	s, err := CreateSQLite(ctx, path)
	if err != nil {
		return err
	}
	_, v, err := s.Load(ctx)
	if errors.Is(err, ErrMissing) {
		v, err = 1, s.Create(ctx, 1, documentOf(1))
	}
	for ; err == nil; v++ {
		fmt.Println("have", v)
		err = s.Replace(ctx, v, v+1, documentOf(v+1))
	}
	return err
}

// TestKillWhileReplacing kills a process at any moment while it changes the document: what is left is the version that it
// had told of, or the next one, whole, and the next process opens it without help.
func TestKillWhileReplacing(t *testing.T) {
	if path := os.Getenv("STORE_TEST_PATH"); path != "" { // we are the one to be killed
		fmt.Println(writeForever(path))
		return
	}
	kills := 30
	if testing.Short() {
		kills = 5
	}
	path := filepath.Join(t.TempDir(), "state.db")
	var last uint64
	for kill := range kills {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKillWhileReplacing$")
		cmd.Env = append(os.Environ(), "STORE_TEST_PATH="+path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		told, begun := last, false
		for lines.Scan() {
			if _, err := fmt.Sscanf(lines.Text(), "have %d", &told); err != nil {
				t.Fatalf("the process says %q", lines.Text())
			}
			if !begun && (kill%2 == 0 || told > last) { // each second one has written something, however slow the machine is
				begun = true
				go func() {
					<-time.After(rand.N(20 * time.Millisecond)) // not a wait for anything: the moment of the crash
					_ = cmd.Process.Kill()
				}()
			}
		}
		_ = cmd.Wait() // it was killed
		s, err := OpenSQLite(t.Context(), path)
		if err != nil {
			t.Fatalf("after kill %d: %v", kill, err)
		}
		data, version, err := s.Load(t.Context())
		if err != nil {
			t.Fatalf("after kill %d: %v", kill, err)
		}
		if version != told && version != told+1 || !bytes.Equal(data, documentOf(version)) {
			t.Errorf("after kill %d: version %d, %d bytes (%.20q); version %d had been confirmed", kill, version, len(data), data, told)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		last = version
	}
	t.Logf("%d versions over %d kills", last, kills)
	if last < uint64(kills/2) {
		t.Errorf("only %d versions were written", last)
	}
}

// TestStoreOnAFullDisk: a change that finds no room fails, the document stays the old one or is the new one, and with room
// again it can be changed.
func TestStoreOnAFullDisk(t *testing.T) {
	dir := durabletest.SmallDisk(t, 512<<10)
	path := filepath.Join(dir, "state.db")
	s := create(t, path)
	if err := s.Create(t.Context(), 1, documentOf(1)); err != nil {
		t.Fatal(err)
	}
	remove := durabletest.Fill(t, dir)
	version, failures := uint64(1), 0
	for range 40 {
		switch err := s.Replace(t.Context(), version, version+1, documentOf(version+1)); {
		case err == nil:
			version++
		case errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), path):
			t.Fatalf("a full disk gave %v", err)
		default:
			failures++
		}
		if data, v, err := s.Load(t.Context()); err != nil || v != version || !bytes.Equal(data, documentOf(v)) {
			t.Fatalf("version %d, %d bytes, %v; want version %d", v, len(data), err, version)
		}
	}
	if failures == 0 {
		t.Fatal("the disk did not get full")
	}
	if err := s.Close(); err != nil {
		t.Log("closing on the full disk:", err) // it may not be able to empty its log
	}
	again, err := OpenSQLite(t.Context(), path)
	if err == nil { // on the full disk it opens, or says why not
		if data, v, err := again.Load(t.Context()); err != nil || v != version || !bytes.Equal(data, documentOf(v)) {
			t.Errorf("opened on the full disk: version %d, %v", v, err)
		}
		again.Close()
	}
	remove()
	if again, err = OpenSQLite(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if data, v, err := again.Load(t.Context()); err != nil || v != version || !bytes.Equal(data, documentOf(v)) {
		t.Fatalf("version %d, %d bytes, %v; want version %d", v, len(data), err, version)
	}
	if err := again.Replace(t.Context(), version, version+1, documentOf(version+1)); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

// TestReplaceThatFailsOrNot: an error says nothing about whether the change happened, and Load tells.
func TestReplaceThatFailsOrNot(t *testing.T) {
	for mode, want := range map[durabletest.Mode]uint64{durabletest.Fail: 1, durabletest.FailDone: 2} {
		dir := t.TempDir()
		s := create(t, filepath.Join(dir, "state.db"))
		if err := s.Create(t.Context(), 1, documentOf(1)); err != nil {
			t.Fatal(err)
		}
		d := durabletest.Watch(t, dir)
		d.FailAt(0, mode)
		if err := s.Replace(t.Context(), 1, 2, documentOf(2)); !errors.Is(err, durabletest.ErrInjected) {
			t.Errorf("%s: got %v", mode, err)
		}
		if data, v, err := s.Load(t.Context()); err != nil || v != want || !bytes.Equal(data, documentOf(v)) {
			t.Errorf("%s: version %d, %v; want %d", mode, v, err, want)
		}
	}
}

// TestDocumentThatIsTooLarge: who can write the database cannot make the server read more than it should.
func TestDocumentThatIsTooLarge(t *testing.T) {
	s := create(t, filepath.Join(t.TempDir(), "state.db"))
	for _, tc := range []struct {
		size int
		ok   bool
	}{{MaxDocument, true}, {MaxDocument + 1, false}} {
		if _, err := s.db.ExecContext(t.Context(), `REPLACE INTO document (id, version, data) VALUES (1, 1, zeroblob(?))`, tc.size); err != nil {
			t.Fatal(err)
		}
		data, _, err := s.Load(t.Context())
		if tc.ok && (err != nil || len(data) != tc.size) || !tc.ok && (err == nil || !strings.Contains(err.Error(), "at most 16777216 are read")) {
			t.Errorf("%d bytes: %d were loaded, %v", tc.size, len(data), err)
		}
	}
}
