package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/store"
)

var discard = slog.New(slog.DiscardHandler)

// keySet is a cluster's keys, in jwks.json.
const keySet = `{"keys": [{"kty": "EC", "crv": "P-256", "use": "sig", "kid": "a", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU", "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}`

// TestInitCompletesAfterCrash: each step of Init may be the last one before a crash; the next call makes up for it.
func TestInitCompletesAfterCrash(t *testing.T) {
	dir := t.TempDir()
	s, err := parseConfig([]byte(strings.Replace(minimal, "state/state.db", "state.db", 1)), filepath.Join(dir, "server.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	st, err := store.CreateSQLite(t.Context(), s.State.SQLite) // a crash before the document: an empty state
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := Init(t.Context(), s, &out); !errors.Is(err, store.ErrLocked) || !strings.Contains(err.Error(), "stop it") {
		t.Errorf("with the state in use: %v", err)
	}
	st.Close()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Init(canceled, s, &out); err == nil {
		t.Error("an interrupted init says that it is done")
	}
	if err := Init(t.Context(), s, &out); err != nil {
		t.Fatal(err)
	}
	roots, err := os.ReadFile(s.rootsFile())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(s.rootsFile()); err != nil { // a crash before roots.pem
		t.Fatal(err)
	}
	if err := Init(t.Context(), s, &out); !errors.Is(err, store.ErrConflict) || !strings.Contains(err.Error(), "has been written") {
		t.Errorf("without roots.pem: %v", err)
	}
	if again, err := os.ReadFile(s.rootsFile()); err != nil || !bytes.Equal(again, roots) {
		t.Errorf("roots.pem is not what it was: %v", err)
	}
	if err := Init(t.Context(), s, &out); !errors.Is(err, store.ErrConflict) || strings.Contains(err.Error(), "has been written") {
		t.Errorf("a second time: %v", err)
	}
}

// TestD9InitWhereADocumentWasSeen: a store that lost its document is not an invitation to make another root (decisions D9, D11), neither
// by what a server that starts advises nor by `authority init`. What tells of the document stays as it is.
func TestD9InitWhereADocumentWasSeen(t *testing.T) {
	for name, more := range map[string]func(t *testing.T, s *Settings){
		"store lost":                 func(*testing.T, *Settings) {},
		"store and sealing key lost": func(t *testing.T, s *Settings) { os.Remove(s.State.SealingKey) },
		"mark damaged":               func(t *testing.T, s *Settings) { os.WriteFile(s.place.Mark(), []byte("{}"), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			s := configIn(t, t.TempDir(), "issuanceLog: log\n")
			if err := Init(t.Context(), s, t.Output()); err != nil {
				t.Fatal(err)
			}
			if err := openAndClose(t, s); err != nil { // it has seen the document
				t.Fatal(err)
			}
			roots, err := os.ReadFile(s.rootsFile())
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range []string{"", "-wal", "-shm", ".lock"} {
				os.Remove(s.State.SQLite + file)
			}
			more(t, s)
			mark, err := os.ReadFile(s.place.Mark())
			if err != nil {
				t.Fatal(err)
			}
			for what, err := range map[string]error{"a server": openAndClose(t, s), "authority init": Init(t.Context(), s, t.Output())} {
				if err == nil || !strings.Contains(err.Error(), "was seen here") || !strings.Contains(err.Error(), "chancery state import") || strings.Contains(err.Error(), "authority init") {
					t.Errorf("%s: %v", what, err)
				}
			}
			if now, err := os.ReadFile(s.place.Mark()); err != nil || !bytes.Equal(now, mark) {
				t.Errorf("the mark is %s, %v", now, err)
			}
			if now, err := os.ReadFile(s.rootsFile()); err != nil || !bytes.Equal(now, roots) {
				t.Error("there are other roots")
			}
			if _, err := os.Stat(s.State.SealingKey); name == "store and sealing key lost" && err == nil {
				t.Error("a sealing key was made")
			}
			if err := os.Rename(s.place.Mark(), s.place.Mark()+".old"); err != nil { // it is meant
				t.Fatal(err)
			}
			if err := Init(t.Context(), s, t.Output()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestAnotherSealingKey: on a server with another key than the others have, or none, each command names the file, and none says that
// the server would start.
func TestAnotherSealingKey(t *testing.T) {
	dir := t.TempDir()
	s, err := parseConfig([]byte(strings.Replace(minimal, "state/state.db", "state.db", 1)), filepath.Join(dir, "server.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := Init(t.Context(), s, io.Discard); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(s.rootsFile()); err != nil { // as on a new server
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "jwks.json"), []byte(keySet), 0o600); err != nil {
		t.Fatal(err)
	}
	key := s.State.SealingKey
	if err := os.Rename(key, key+".moved"); err != nil {
		t.Fatal(err)
	}
	if err := Init(t.Context(), s, io.Discard); !errors.Is(err, store.ErrConflict) || !strings.Contains(err.Error(), "this config cannot use them: reading sealing key: open "+key) {
		t.Errorf("init without a key: %v", err)
	}
	if err := os.WriteFile(key, []byte("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	wrong := "it was not written with the sealing key " + key
	if err := Init(t.Context(), s, io.Discard); !errors.Is(err, store.ErrConflict) || !strings.Contains(err.Error(), wrong) || strings.Contains(err.Error(), "starts with them") {
		t.Errorf("init: %v", err)
	}
	if _, err := Open(t.Context(), s, discard); err == nil || !strings.Contains(err.Error(), wrong) {
		t.Errorf("server: %v", err)
	}
}

// The log says why a server is not ready: not while it starts, then each reason once, and never one after the other without
// a pause.
func TestReasonsInTheLog(t *testing.T) {
	begin := time.Unix(0, 0)
	why := reasons{next: begin.Add(tellAfter)}
	for _, step := range []struct {
		after  time.Duration
		reason string
		said   bool
	}{
		{0, "no keys", false}, {9 * time.Second, "no keys", false}, {10 * time.Second, "no keys", true}, {11 * time.Second, "no keys", false},
		{12 * time.Second, "no pods", false}, {20 * time.Second, "no pods", true}, {time.Hour, "no pods", false}, {time.Hour, "no keys", true},
	} {
		err, now := errors.New(step.reason), begin.Add(step.after)
		if got := why.due(err, now); got != step.said {
			t.Errorf("%s after %s: said %t", step.reason, step.after, got)
		} else if got {
			why.told(err, now)
		}
	}
}
