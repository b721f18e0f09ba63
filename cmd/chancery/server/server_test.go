package server

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/store"
)

var discard = slog.New(slog.DiscardHandler)

// TestLostClusterDoesNotStopTheServer: only a cluster that has never been ready keeps a server from being ready.
func TestLostClusterDoesNotStopTheServer(t *testing.T) {
	var state error
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	c := &cluster{name: "east", ready: func() error { return state }}

	state = errors.New("pods: not listed yet")
	c.note(logger)
	if c.blocks() == nil || log.Len() > 0 {
		t.Error("a cluster that was never ready counts as ready, or as lost:", log.String())
	}
	state = nil
	c.note(logger)
	if err := c.blocks(); err != nil {
		t.Error(err)
	}
	state = errors.New("pods: the watch is broken")
	for range 3 {
		c.note(logger)
	}
	if err := c.blocks(); err != nil {
		t.Errorf("a cluster that is lost stops the server: %v", err)
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 1 || !strings.Contains(log.String(), "cluster=east") || !strings.Contains(log.String(), "the watch is broken") {
		t.Errorf("a lost cluster is logged %d times: %s", n, log.String())
	}
	state = nil
	c.note(logger)
	c.note(logger)
	if n := strings.Count(log.String(), "cluster is back"); n != 1 {
		t.Errorf("its return is logged %d times", n)
	}
}

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
