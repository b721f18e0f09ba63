package server

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/audit"
	docs "github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// TestInitFaultsAtEachStep fails each step of Init, in more than one way. A second call completes it, the server's state opens, and each
// certificate in it has its intent in both logs.
func TestInitFaultsAtEachStep(t *testing.T) {
	one := func(t *testing.T, n int, mode durabletest.Mode) int {
		dir := t.TempDir()
		d := durabletest.Watch(t, dir)
		d.FailAt(n, mode)
		s := configIn(t, dir, "issuanceLog: log\n")
		err := Init(t.Context(), s, t.Output())
		name := fmt.Sprintf("%s (%v)", d.Failed(), err)
		steps := d.Steps()
		if d.Dead() {
			dir = d.Copy()
			s = configIn(t, dir, "issuanceLog: log\n")
		}
		d.FailAt(-1, "")
		if err != nil {
			if err := Init(t.Context(), s, t.Output()); err != nil && !errors.Is(err, store.ErrConflict) {
				t.Fatalf("%s: a second init: %v", name, err)
			}
		}
		checkMade(t, name, s)
		return steps
	}
	total := one(t, -1, "")
	if total < 60 {
		t.Errorf("only %d steps were seen", total)
	}
	stride := 1
	if testing.Short() {
		stride = 9
	}
	for n := 0; n < total; n += stride {
		others := []durabletest.Mode{durabletest.FailDone, durabletest.Fail, durabletest.Full}
		for _, mode := range []durabletest.Mode{durabletest.Crash, others[n%len(others)]} { // an init takes a tenth of a second
			t.Run(fmt.Sprint(n, " ", mode), func(t *testing.T) { one(t, n, mode) })
		}
	}
}

// checkMade is the full-state checker after an init.
func checkMade(t *testing.T, name string, s *Settings) {
	t.Helper()
	if err := openAndClose(t, s); err != nil {
		t.Fatalf("%s: the server does not start: %v", name, err)
	}
	roots, err := os.ReadFile(s.rootsFile())
	if err == nil {
		_, err = trust.ParseCertificates(roots)
	}
	if err != nil {
		t.Errorf("%s: %v", name, err)
	}
	r := verifyClean(t, s.IssuanceLog)
	if r.Intents < 2 || r.Pending != 0 {
		t.Errorf("%s: %+v", name, r)
	}
	if _, err := keys.LoadSealer(s.State.SealingKey); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	for _, path := range []string{s.State.SealingKey, s.AuditLog, s.State.SQLite} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %s: %v, %v", name, path, info.Mode(), err)
		}
	}
	intents := intentsOf(t, s.AuditLog)
	doc := storedDocument(t, s)
	for _, a := range doc.Domains[s.domain.String()].Authorities {
		cert, err := a.X509()
		if err != nil {
			t.Fatal(err)
		}
		if !intents[hex.EncodeToString(cert.SerialNumber.Bytes())] {
			t.Errorf("%s: the audit log lacks the intent of %s %s", name, a.Kind, a.ID)
		}
	}
}

// storedDocument reads the authority document as the server would.
func storedDocument(t *testing.T, s *Settings) *docs.Document {
	t.Helper()
	st, err := store.OpenSQLite(t.Context(), s.State.SQLite)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	data, version, err := st.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := docs.Decode(data, version, sealer)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func intentsOf(t *testing.T, path string) map[string]bool {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		var r audit.Record
		if json.Unmarshal([]byte(line), &r) == nil && r.Event == audit.Intent {
			all[r.Serial] = true
		}
	}
	return all
}

// TestInitOnAFullDisk: init on a full disk fails and names the file, leaves no garbage, and works once there is room.
func TestInitOnAFullDisk(t *testing.T) {
	dir := durabletest.SmallDisk(t, 1<<20)
	s := configIn(t, dir, "issuanceLog: log\n")
	remove := durabletest.Fill(t, dir)
	err := Init(t.Context(), s, t.Output())
	if err == nil {
		t.Fatal("init says that it is done on a full disk")
	}
	t.Log(err)
	if !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "space") && !strings.Contains(err.Error(), "full") {
		t.Errorf("the error does not say which file and why: %v", err)
	}
	remove()
	if err := Init(t.Context(), s, t.Output()); err != nil {
		t.Fatalf("with room again: %v", err)
	}
	checkMade(t, "full disk", s)
	if left, err := filepath.Glob(filepath.Join(dir, "*.new*")); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}
