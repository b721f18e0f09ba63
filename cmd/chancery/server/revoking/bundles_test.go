package revoking

import (
	"bytes"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/trust"
)

// connect opens a Sync stream to a desk, over gRPC.
func (s *server) connect(t *testing.T) chanceryv1.Issuance_SyncClient {
	t.Helper()
	g := grpc.NewServer(grpc.ForceServerCodecV2(agents.NewCodec()))
	g.RegisterService(&grpc.ServiceDesc{ServiceName: chanceryv1.Issuance_ServiceDesc.ServiceName, HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{{
		StreamName: "Sync", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			return s.Agents().Serve(agents.Caller{ID: "spiffe://cluster.local/ns/foo/sa/web"}, stream)
		},
	}}}, nil)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	conn := must(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))
	t.Cleanup(func() { conn.Close() })
	return must(chanceryv1.NewIssuanceClient(conn).Sync(t.Context()))
}

// TestD6AgentsAreSentSignedBundles: signed by the key of the document, anew for each generation, and as soon as there is another key, as
// where an older version has made the authority.
func TestD6AgentsAreSentSignedBundles(t *testing.T) {
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	a := start(t, dir, st, must(keys.CreateSealer(filepath.Join(dir, "k"))), "a", 20_000_000)
	stream := a.connect(t)
	update := func(want string, ok func(u *chanceryv1.SyncUpdate, signed *chanceryv1.Bundle) bool) *chanceryv1.SyncUpdate {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
			u := must(stream.Recv())
			m, b := u.GetSignedBundle(), new(chanceryv1.Bundle)
			if m == nil {
				continue
			}
			if err := (trust.SignedBundle{Bundle: m.GetBundle(), Signature: m.GetSignature(), Key: m.GetKey()}).Verify(nil); err != nil {
				t.Fatal(err)
			}
			if err := proto.Unmarshal(m.GetBundle(), b); err != nil || !proto.Equal(b, u.GetBundle()) {
				t.Fatalf("signed is %v beside %v, %v", b, u.GetBundle(), err)
			}
			if ok(u, b) {
				return u
			}
		}
		t.Fatalf("no update comes with %s", want)
		return nil
	}
	change := func(f func(*authority.Document)) {
		t.Helper()
		if err := a.keeper.Change(t.Context(), func(next *authority.Document) error { f(next); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	pinned := a.keeper.Document().State(td).BundleKey.Public
	update("the key that init made", func(u *chanceryv1.SyncUpdate, _ *chanceryv1.Bundle) bool {
		return bytes.Equal(u.GetSignedBundle().GetKey(), pinned) && u.GetDocumentMark().GetTainted() == 0
	})
	change(func(next *authority.Document) {
		now := time.Now().UTC()
		must(next.Active(td, authority.KindRoot)).Tainted = &now
	})
	tainted := a.keeper.Document().Version
	change(func(next *authority.Document) { next.State(td).Generation++ })
	update("another generation", func(u *chanceryv1.SyncUpdate, b *chanceryv1.Bundle) bool {
		return b.GetGeneration() == 2 && bytes.Equal(u.GetSignedBundle().GetKey(), pinned) && u.GetDocumentMark().GetTainted() == tainted
	})
	if root := must(a.source.Bundle()).Roots()[0]; !a.Tainted(root) {
		t.Error("the root is not tainted")
	}
	change(func(next *authority.Document) { next.State(td).BundleKey = nil })
	update("a key that was made since", func(u *chanceryv1.SyncUpdate, b *chanceryv1.Bundle) bool {
		return b.GetGeneration() == 2 && !bytes.Equal(u.GetSignedBundle().GetKey(), pinned)
	})
	for tries := 0; ; tries++ { // what is signed already is not sent again; CRLs may be, for a moment
		sent := a.Agents().Published()
		for range 10 {
			a.signAnew()
		}
		if a.Agents().Published().Equal(sent) {
			break
		} else if tries == 20 {
			t.Fatal("the same is sent again and again")
		}
		time.Sleep(100 * time.Millisecond)
	}
}
