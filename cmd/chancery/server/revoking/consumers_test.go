package revoking

import (
	"encoding/hex"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/evidence"
)

// syncing serves a desk's streams on loopback.
type syncing struct {
	chanceryv1.UnimplementedIssuanceServer
	hub *agents.Hub
}

func (s syncing) Sync(g grpc.BidiStreamingServer[chanceryv1.SyncRequest, chanceryv1.SyncUpdate]) error {
	return s.hub.Serve(agents.Caller{ID: "spiffe://cluster.local/ns/foo/sa/web", Remote: "192.0.2.1:1", Place: "node"}, g)
}

// agent opens a stream to a server.
func agent(t *testing.T, s *server) chanceryv1.Issuance_SyncClient {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	g := grpc.NewServer(grpc.ForceServerCodecV2(agents.NewCodec()))
	chanceryv1.RegisterIssuanceServer(g, syncing{hub: s.hub})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := g.Serve(l); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { g.Stop(); wg.Wait() })
	conn := must(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))
	t.Cleanup(func() { conn.Close() })
	return must(chanceryv1.NewIssuanceClient(conn).Sync(t.Context()))
}

// rotate puts a rotation into the document, as its driver would.
func rotate(t *testing.T, s *server, phase document.Phase, reason document.Reason) (issuer string) {
	t.Helper()
	err := s.keeper.Change(t.Context(), func(d *authority.Document) error {
		state := d.Domains[td.String()]
		active, err := d.Active(td, document.KindIssuer)
		if err != nil {
			return err
		}
		issuer = active.ID
		if phase == document.PhaseDistribute {
			state.Generation++
		}
		state.Rotation = &document.Rotation{
			ID: "0102030405060708", Kind: document.KindRoot, Reason: reason, Actor: "test", FromIssuer: active.ID, FromRoot: active.RootID(),
			Started: time.Now(), Since: time.Now(), Phase: phase, Version: d.Version, Generation: state.Generation,
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return issuer
}

// TestD4EvidenceIsOfTheVersionThatIsAcknowledged: the note in which a replica acknowledges a document has what it knows of its consumers
// for just what that document asks, and what it learns later follows.
func TestD4EvidenceIsOfTheVersionThatIsAcknowledged(t *testing.T) {
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	a := start(t, dir, st, must(keys.CreateSealer(filepath.Join(dir, "k"))), "a", 20_000_000)
	note := func(what string, ok func(board.Note) bool) board.Note {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			all := a.config.Board.All()
			for _, n := range all { // of each version that is written it has to hold
				if doc := a.keeper.Document(); n.Acknowledged == doc.Version && !n.Evidence.Goal.Equal(doc.Domains[td.String()].Goal()) {
					t.Fatalf("version %d is acknowledged with evidence for %+v", n.Acknowledged, n.Evidence.Goal)
				}
				if ok(n) {
					return n
				}
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: %+v", what, all)
			}
		}
	}
	id := []byte("sixteen bytes ID")
	consumer := evidence.Agent("spiffe://cluster.local/ns/foo/sa/web", id)
	a.Consumers().ToAgent("spiffe://cluster.local/ns/foo/sa/web", id, evidence.Leaf{Issuer: "aa", NotAfter: time.Now().Add(time.Hour)})
	note("the first note", func(n board.Note) bool { return n.Acknowledged > 0 })
	rotate(t, a, document.PhaseDistribute, document.ReasonAsked)
	version := a.keeper.Document().Version
	generation := a.keeper.Document().Domains[td.String()].Generation
	n := note("the phase is acknowledged", func(n board.Note) bool { return n.Acknowledged >= version })
	if n.Evidence.Goal.Generation != generation || len(n.Evidence.Behind) != 1 || n.Evidence.Behind[0].Consumer != consumer || n.Evidence.Ahead.Before(time.Now().Add(time.Hour)) {
		t.Errorf("acknowledged with %+v", n.Evidence)
	}
	s := agent(t, a)
	for {
		u, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if u.GetReissue() != nil {
			t.Errorf("an update has %v", u.GetReissue())
		}
		if u.GetBundle().GetGeneration() == generation {
			break // a change of the generation alone is published, too
		}
	}
	m := &chanceryv1.ConsumersState{Agent: id, Generation: generation, Until: timestamppb.New(time.Now().Add(time.Hour))}
	if err := s.Send(&chanceryv1.SyncRequest{Consumers: m}); err != nil {
		t.Fatal(err)
	}
	note("the agent has it", func(n board.Note) bool {
		return n.Evidence.Goal.Generation == generation && len(n.Evidence.Behind) == 0
	})
}

// TestD6AgentsHearWhichIssuersToLeave: only once there is another one, and only if a key may be known to others.
func TestD6AgentsHearWhichIssuersToLeave(t *testing.T) {
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	a := start(t, dir, st, must(keys.CreateSealer(filepath.Join(dir, "k"))), "a", 20_000_000)
	s := agent(t, a)
	next := func() *chanceryv1.SyncUpdate {
		t.Helper()
		u, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	next()
	rotate(t, a, document.PhaseReissue, document.ReasonAsked)
	issuer := rotate(t, a, document.PhaseReissue, document.ReasonCompromised)
	for {
		r := next().GetReissue()
		if r == nil {
			continue
		}
		if len(r.GetIssuers()) != 1 || hex.EncodeToString(r.GetIssuers()[0]) != issuer || r.GetWithin().AsDuration() != time.Second {
			t.Errorf("got %v; the issuer is %s", r, issuer)
		}
		break
	}
	if err := a.keeper.Change(t.Context(), func(d *authority.Document) error { d.Domains[td.String()].Rotation = nil; return nil }); err != nil {
		t.Fatal(err)
	}
	for next().GetReissue() != nil {
	}
}
