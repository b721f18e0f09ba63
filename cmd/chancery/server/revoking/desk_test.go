package revoking

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

// server is what a desk stands on, of one replica.
type server struct {
	*Desk
	keeper *authority.Keeper
	log    *issuelog.Log
	stop   func()
}

// start opens a replica's real parts on a store, and runs them.
func start(t *testing.T, dir string, st *store.SQLite, sealer *keys.Sealer, name string, id uint32) *server {
	t.Helper()
	logger := slog.New(slog.NewTextHandler(t.Output(), nil)).With("replica", name)
	log := must(audit.Open(filepath.Join(dir, name+".jsonl")))
	folder := filepath.Join(dir, name)
	if !issuelog.Exists(folder) {
		must(issuelog.Create(folder, fmt.Sprintf("cluster.local/chancery/log/%d", id)))
	}
	issuance := must(issuelog.Open(issuelog.Config{Dir: folder, Logger: logger}))
	log.Mirror(issuance.Write)
	c := authority.Config{
		Domain: td, Store: st, Sealer: sealer, Log: log, Logger: logger, Replica: name, IssuanceLog: authority.LogState{ID: id, Key: issuance.PublicKey()},
	}
	if _, _, err := st.Load(t.Context()); err != nil {
		must(authority.Init(t.Context(), c, "test"))
	}
	s := &server{keeper: must(authority.Open(t.Context(), c)), log: issuance}
	b := board.Open(board.Config{Store: st, Sealer: sealer, Domain: td, Replica: name, Logger: logger})
	s.Desk = Open(Config{
		Domain: td, Authority: s.keeper, Sealer: sealer, Issuance: issuance, Board: b, Log: log, Logger: logger, Own: func() string { return "" }, Clusters: []string{"east"},
		ActorOf: func(context.Context) (string, error) { return "unix:test", nil },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, f := range []func(context.Context) error{s.keeper.Run, b.Run, s.Desk.Run, func(ctx context.Context) error {
		return st.Watch(ctx, func() { s.keeper.Wake(); b.Wake() })
	}} {
		wg.Go(func() {
			if err := f(ctx); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	s.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		log.Close()
		issuance.Close()
	})
	t.Cleanup(s.stop)
	return s
}

// TestD4DeskAnnouncesToAllReplicas: a desk says that an issuer may sign once each replica that lives has acknowledged it, and else who has not;
// answers name the replicas whose certificates they do not know; agents get the checkpoints of all logs.
func TestD4DeskAnnouncesToAllReplicas(t *testing.T) {
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	sealer := must(keys.CreateSealer(filepath.Join(dir, "k")))
	a := start(t, dir, st, sealer, "a", 20_000_000)
	b := start(t, dir, st, sealer, "b", 30_000_000)
	for deadline := time.Now().Add(time.Minute); len(a.Checkpoints()) < 2; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("known are %q", a.Checkpoints())
		}
	}
	if all := a.Checkpoints(); all[0] != a.log.Checkpoint() || !strings.HasPrefix(all[1], "cluster.local/chancery/log/30000000\n") {
		t.Errorf("got %q; the own one should be the first", all)
	}
	if err := a.announce(t.Context()); err != nil {
		t.Errorf("both are up: %v", err)
	}
	dry := must(a.Revoke(t.Context(), &chanceryv1.RevokeRequest{DryRun: true, Predicate: &chanceryv1.Predicate{SpiffeId: "spiffe://cluster.local/ns/foo/sa/web"}}))
	if len(dry.GetMissingLogs()) != 1 || !strings.Contains(dry.GetMissingLogs()[0], "of replica b: a dry run sees") {
		t.Errorf("a dry run says %v", dry.GetMissingLogs())
	}
	r := must(a.Revoke(t.Context(), &chanceryv1.RevokeRequest{Predicate: &chanceryv1.Predicate{SpiffeId: "spiffe://cluster.local/ns/foo/sa/web"}}))
	if len(r.GetMissingLogs()) > 0 || r.GetDelayed() != "" || len(a.Status().GetStale()) > 0 {
		t.Errorf("both are up: missing %v, delayed %q, stale %v", r.GetMissingLogs(), r.GetDelayed(), a.Status().GetStale())
	}
	b.stop()
	r = must(a.Revoke(t.Context(), &chanceryv1.RevokeRequest{Predicate: &chanceryv1.Predicate{Node: "n1"}}))
	if missing := strings.Join(r.GetMissingLogs(), "; "); !strings.Contains(missing, "of replica b, last heard of at ") || !strings.Contains(missing, "was not searched") || r.GetDelayed() != "" {
		t.Errorf("b is down: missing %q, delayed %q", missing, r.GetDelayed())
	}
	if stale := strings.Join(a.Status().GetStale(), "; "); !strings.Contains(stale, "replica b") {
		t.Errorf("the status says %q", stale)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := a.announce(ctx); err == nil || !strings.Contains(err.Error(), "replica b") || strings.Contains(err.Error(), "this replica") {
		t.Errorf("b is down: %v", err)
	}
	if err := a.keeper.Forget(t.Context(), "unix:test", "b"); err != nil {
		t.Fatal(err)
	}
	if err := a.announce(t.Context()); err != nil {
		t.Errorf("b is declared dead: %v", err)
	}
	list := must(a.ListRevocations(t.Context(), &chanceryv1.ListRevocationsRequest{}))
	if missing := strings.Join(list.GetMissingLogs(), "; "); len(list.GetRevocations()) != 2 || !strings.Contains(missing, "replica b") {
		t.Errorf("what it issued lives: %v", list)
	}
	b = start(t, dir, st, sealer, "b", 30_000_000)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if list = must(b.ListRevocations(t.Context(), &chanceryv1.ListRevocationsRequest{})); len(list.GetMissingLogs()) == 0 && len(a.manager.State().MissingLogs) == 0 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("b is back: %v, %v", list.GetMissingLogs(), a.manager.State().MissingLogs)
		}
	}
}

// counted counts lines of a log.
type counted struct {
	slog.Handler
	lines *atomic.Int64
}

func (c counted) Enabled(context.Context, slog.Level) bool { return true }

func (c counted) Handle(context.Context, slog.Record) error {
	c.lines.Add(1)
	return nil
}

// TestMarksThatAreNone: an agent that makes up marks fills no disk with what the log says of it.
func TestMarksThatAreNone(t *testing.T) {
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	a := start(t, dir, st, must(keys.CreateSealer(filepath.Join(dir, "k"))), "a", 20_000_000)
	a.stop()
	var lines atomic.Int64
	a.config.Logger = slog.New(counted{slog.DiscardHandler, &lines})
	for i := range uint64(1000) {
		a.seen(t.Context(), &chanceryv1.DocumentMark{Version: 1<<60 + i, Mac: make([]byte, 32)})
	}
	if n := lines.Load(); n != 1 || a.keeper.Err() != nil {
		t.Errorf("%d lines, and %v", n, a.keeper.Err())
	}
}
