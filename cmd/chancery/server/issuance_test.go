package server

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/server/issuance"
)

// configIn reads the minimal config, and more lines, as if it lay in the folder.
func configIn(t *testing.T, dir, more string) *Settings {
	t.Helper()
	s, err := parseConfig([]byte(strings.Replace(minimal, "state/state.db", "state.db", 1)+more), filepath.Join(dir, "server.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// openAndClose does what a server does with its state.
func openAndClose(t *testing.T, s *Settings) error {
	t.Helper()
	server := &Server{settings: s, logger: discard, registry: prometheus.NewRegistry()}
	defer server.Close()
	return server.openState(t.Context())
}

func verifyClean(t *testing.T, dir string) *verify.Report {
	t.Helper()
	r, err := verify.Log(t.Context(), verify.Config{Dir: dir})
	if err != nil || len(r.Findings) > 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	return r
}

// TestIssuanceLogBeginsWithTheAuthorities: init makes log and authorities, whose certificates are its first.
func TestIssuanceLogBeginsWithTheAuthorities(t *testing.T) {
	dir := t.TempDir()
	s := configIn(t, dir, "issuanceLog: log\n")
	if _, err := issuance.Create(s.IssuanceLog, s.domain, 20_000_000); err != nil { // a crash after this step of an earlier init
		t.Fatal(err)
	}
	if err := Init(t.Context(), s, t.Output()); err != nil {
		t.Fatal(err)
	}
	if r := verifyClean(t, s.IssuanceLog); r.Certificates != 2 || r.Pending != 0 || !strings.HasSuffix(r.Origin, "/20000000") {
		t.Errorf("%+v", r)
	}
	if info, err := os.Stat(filepath.Join(s.IssuanceLog, "log.key")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("log.key: %v, %v", info, err)
	}
	listed, err := s.Listed(t.Context())
	if err != nil || len(listed) != 1 || !strings.HasPrefix(listed[0], "cluster.local/chancery/log/20000000+") {
		t.Errorf("listed: %v, %v", listed, err)
	}
	for range 2 { // and over a restart
		if err := openAndClose(t, s); err != nil {
			t.Fatal(err)
		}
	}
}

// TestListedIssuanceLogMustBeThere: a log that the document lists is not left out, lost or exchanged in silence (D13).
func TestListedIssuanceLogMustBeThere(t *testing.T) {
	dir := t.TempDir()
	s := configIn(t, dir, "issuanceLog: log\n")
	if err := Init(t.Context(), s, t.Output()); err != nil {
		t.Fatal(err)
	}
	if err := openAndClose(t, configIn(t, dir, "")); err == nil || !strings.Contains(err.Error(), "set issuanceLog") {
		t.Errorf("without issuanceLog: %v", err)
	}
	if err := os.Rename(s.IssuanceLog, s.IssuanceLog+".away"); err != nil {
		t.Fatal(err)
	}
	if err := openAndClose(t, s); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "restore it") {
		t.Errorf("with the log away: %v", err)
	}
	if _, err := issuance.Create(s.IssuanceLog, s.domain, 30_000_000); err != nil {
		t.Fatal(err)
	}
	if err := openAndClose(t, s); err == nil || !strings.Contains(err.Error(), "put the folder of that one back") {
		t.Errorf("with another log in its place: %v", err)
	}
}

// TestIssuanceLogForAnExistingAuthority: init makes the log that the config names since, and changes nothing else.
func TestIssuanceLogForAnExistingAuthority(t *testing.T) {
	dir := t.TempDir()
	if err := Init(t.Context(), configIn(t, dir, ""), t.Output()); err != nil {
		t.Fatal(err)
	}
	s := configIn(t, dir, "issuanceLog: log\n")
	if err := openAndClose(t, s); err == nil || !strings.Contains(err.Error(), "authority init") {
		t.Errorf("before init: %v", err)
	}
	if err := Init(t.Context(), s, t.Output()); !errors.Is(err, store.ErrConflict) || !strings.Contains(err.Error(), "has been made") {
		t.Errorf("init: %v", err)
	}
	if err := Init(t.Context(), s, t.Output()); !errors.Is(err, store.ErrConflict) || strings.Contains(err.Error(), "has been made") {
		t.Errorf("init once more: %v", err)
	}
	if err := openAndClose(t, s); err != nil {
		t.Fatal(err)
	}
	verifyClean(t, s.IssuanceLog)
}

// TestServed: a server that begins with what init made has served nobody, so that no rotation waits for those of whom nothing is known.
func TestServed(t *testing.T) {
	dir := t.TempDir()
	s := configIn(t, dir, "issuanceLog: log\n")
	if err := Init(t.Context(), s, t.Output()); err != nil {
		t.Fatal(err)
	}
	log, err := audit.Open(filepath.Join(dir, "other.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	l, _, err := issuance.Open(s.IssuanceLog, log, discard)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.Size() != 4 || issuance.Served(l, s.domain) {
		t.Errorf("a log of %d entries that init made counts as one of a server that served", l.Size())
	}
	if !issuance.Served(nil, s.domain) {
		t.Error("without a log nobody knows that nobody was served")
	}
	leaf := audit.Record{Event: audit.Intent, Time: time.Now(), Serial: "0102", SPIFFEID: "spiffe://cluster.local/ns/foo/sa/web", Profile: "issuer"}
	if err := l.Write([]audit.Record{leaf}); err != nil {
		t.Fatal(err)
	}
	if err := l.Sequence(); err != nil {
		t.Fatal(err)
	}
	if l.Size() != 5 || !issuance.Served(l, s.domain) {
		t.Errorf("a log of %d entries with a leaf counts as one of a server that served nobody", l.Size())
	}
}
