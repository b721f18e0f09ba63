package csr_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/evidence"
)

// knows gives a world a ledger whose sets go to a board on a real store.
func knows(t *testing.T) (*evidence.Ledger, *board.Board, func(*world, *csr.Config)) {
	t.Helper()
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	b := board.Open(board.Config{Store: st, Sealer: must(keys.CreateSealer(filepath.Join(dir, "k"))), Domain: td, Replica: "a", Logger: slog.New(slog.DiscardHandler)})
	b.Own(func(n *board.Note) { n.LogID = ca.MinLogID + 1 })
	l := evidence.New(evidence.Config{Board: b, Life: ca.DefaultTTL, MaxLife: ca.DefaultMaxTTL})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = b.Run(ctx) })
	wg.Go(func() { _ = l.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait(); st.Close() })
	return l, b, func(_ *world, c *csr.Config) { c.Agents = agents.New(agents.Config{Ledger: l}) }
}

// TestD3EveryAnswerCounts: whatever the API, each success is in the ledger, with the generation and the issuer of the answer; refusals are not.
// Each pod counts apart, and each identity that a node agent asks for.
func TestD3EveryAnswerCounts(t *testing.T) {
	l, b, in := knows(t)
	w := newWorld(t, withPods, in)
	known := func(want int) {
		t.Helper()
		if _, n := l.Goal(); n != want {
			t.Errorf("%d consumers are known, want %d", n, want)
		}
	}
	web := bearer(token(claims{uid: "uid-web"}))
	for range 2 {
		must(w.istio(web, ask("")))
	}
	known(1)
	must(w.native(web, askNative(""))) // the same pod by the other API
	must(w.istio(shows(w.svid(webURI, freshPod("uid-web"))), ask("")))
	known(1)
	must(w.istio(bearer(ztunnel()), ask(webURI)))
	must(w.istio(bearer(ztunnel()), ask("")))
	known(3)
	if _, err := w.istio(web, ask(dbURI)); err == nil {
		t.Fatal("web got db's")
	}
	known(3)
	agent := []byte("sixteen bytes ID")
	two := &chanceryv1.IssueRequest{Agent: agent, Requests: []*chanceryv1.CertificateRequest{askNative(""), askNative(webURI)}}
	client := chanceryv1.NewIssuanceClient(w.dial(nil))
	must(client.Issue(w.context(bearer(ztunnel())), two))
	known(4)
	two.Agent = agent[1:]
	if _, err := client.Issue(w.context(bearer(ztunnel())), two); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "15 bytes") {
		t.Errorf("a short ID: %v", err)
	}
	expect := func(version uint64, goal document.Goal, behind int, words string) {
		t.Helper()
		if err := l.Acknowledge(t.Context(), version, version, goal); err != nil {
			t.Fatal(err)
		}
		n := b.Mine()
		if len(n.Evidence.Behind) != behind || n.Acknowledged != version {
			t.Errorf("version %d: %d are behind, want %d", n.Acknowledged, len(n.Evidence.Behind), behind)
		}
		for _, x := range n.Evidence.Sample {
			words = strings.ReplaceAll(words, x.Name, "")
		}
		if words != "" {
			t.Errorf("not named: %q of %+v", words, n.Evidence.Sample)
		}
	}
	expect(5, document.Goal{Generation: 1}, 1, "agent spiffe://cluster.local/ns/istio-system/sa/ztunnel") // of which bundle it has nobody knows
	expect(6, document.Goal{Generation: 2}, 4, "")
	expect(7, document.Goal{Leave: []string{w.issuer.Load().SKI()}}, 4, "")
	expect(8, document.Goal{Leave: []string{"00"}}, 0, "")

	// The agent's own word counts, and what is not as the API says ends the stream.
	s := must(client.Sync(w.context(bearer(ztunnel()))))
	say := func(m *chanceryv1.ConsumersState) {
		t.Helper()
		if err := s.Send(&chanceryv1.SyncRequest{Consumers: m}); err != nil {
			t.Fatal(err)
		}
	}
	say(&chanceryv1.ConsumersState{Agent: agent, Generation: 1, Until: timestamppb.New(time.Now().Add(time.Hour))})
	for deadline := time.Now().Add(20 * time.Second); len(b.Mine().Evidence.Behind) > 0 || b.Mine().Acknowledged < 9; time.Sleep(5 * time.Millisecond) {
		if err := l.Acknowledge(t.Context(), 9, 9, document.Goal{Generation: 1}); err != nil || time.Now().After(deadline) {
			t.Fatalf("what the agent says is not taken: %v, %+v", err, b.Mine())
		}
	}
	say(&chanceryv1.ConsumersState{Agent: agent[1:]})
	if _, err := s.Recv(); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "consumers: the agent's ID has 15 bytes") {
		t.Errorf("a short ID in a stream: %v", err)
	}
}

// TestD2NothingIsSignedAfterTheLastNote: a server that has told what it signed signs nothing more.
func TestD2NothingIsSignedAfterTheLastNote(t *testing.T) {
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	defer st.Close()
	b := board.Open(board.Config{Store: st, Sealer: must(keys.CreateSealer(filepath.Join(dir, "k"))), Domain: td, Replica: "a", Logger: slog.New(slog.DiscardHandler)})
	l := evidence.New(evidence.Config{Board: b, Life: ca.DefaultTTL, MaxLife: ca.DefaultMaxTTL})
	w := newWorld(t, func(_ *world, c *csr.Config) { c.Agents = agents.New(agents.Config{Ledger: l}) })
	ctx, cancel := context.WithCancel(t.Context())
	b.Own(func(n *board.Note) { n.LogID = ca.MinLogID + 1 })
	done := make(chan error)
	go func() { done <- b.Run(ctx) }()
	must(w.istio(bearer(token(claims{})), ask("")))
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	_, err := w.istio(bearer(token(claims{})), ask(""))
	if _, reason, _ := refusal(err); reason != csr.ReasonNotReady {
		t.Errorf("after the last note: %v", err)
	}
	if ahead := b.All()[0].Evidence.Ahead; ahead.After(time.Now().Add(ca.DefaultTTL + time.Second)) {
		t.Errorf("announced is %s", ahead)
	}
}

// TestD2NobodyToldNoLongLife: a server that is cut off from its store signs on, but nothing that outlives what it said: once it is declared
// dead, others wait that long and no longer.
func TestD2NobodyToldNoLongLife(t *testing.T) {
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	b := board.Open(board.Config{Store: st, Sealer: must(keys.CreateSealer(filepath.Join(dir, "k"))), Domain: td, Replica: "a", Logger: slog.New(slog.DiscardHandler)})
	l := evidence.New(evidence.Config{Board: b, Life: ca.DefaultTTL, MaxLife: ca.DefaultMaxTTL})
	w := newWorld(t, func(_ *world, c *csr.Config) { c.Agents = agents.New(agents.Config{Ledger: l}) })
	b.Own(func(n *board.Note) { n.LogID = ca.MinLogID + 1 })
	if err := b.Write(t.Context()); err != nil {
		t.Fatal(err)
	}
	st.Close()
	for range 2 { // the second one waits for nothing
		q := ask("")
		q.ValidityDuration = int64(ca.DefaultMaxTTL / time.Second)
		cert := leafOf(t, must(w.istio(bearer(token(claims{})), q)).GetCertChain(), webURI)
		if left := time.Until(cert.NotAfter); left > ca.DefaultTTL || left < ca.DefaultTTL-time.Minute {
			t.Errorf("it lives for %s", left)
		}
	}
}
