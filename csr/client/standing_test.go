package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/source"
	"github.com/chancery-project/chancery/trust"
)

// reissue is an update that asks for the SVIDs of issuers to be replaced.
func (w *world) reissue(version uint64, issuers ...[]byte) *chanceryv1.SyncUpdate {
	u := w.update(version, int64(version))
	if len(issuers) > 0 {
		u.Reissue = &chanceryv1.Reissue{Issuers: issuers} // at once
	}
	return u
}

// A renewal that the server asked for shares the connection of the stream; any other has one of its own, and so has one without a
// token: the certificate that it shows says who calls, and must be the newest.
func TestD19AReissueGoesOverTheStream(t *testing.T) {
	hub := agents.New(agents.Config{})
	w := newWorld(t, func(c *csr.Config) { c.Agents = hub })
	addr, n := counting(t, w.addr)
	var own atomic.Pointer[trust.Identity]
	own.Store(w.identity(web))
	cfg := w.config()
	cfg.Servers, cfg.Current = []string{addr}, own.Load
	a := w.startSync(cfg, own.Load())
	publish := func(u *chanceryv1.SyncUpdate) {
		t.Helper()
		if err := hub.Publish(u); err != nil {
			t.Fatal(err)
		}
		wait(t, "the agent has it", func() bool { agents, acknowledged := hub.Counts(); return agents == 1 && acknowledged == 1 })
	}
	connections := int32(1) // the stream's
	mine, other := own.Load().Leaf().AuthorityKeyId, []byte("another issuer")
	for i, tc := range []struct {
		name    string
		issuers [][]byte
		change  func()
		more    int32
	}{
		{"nothing asked", nil, nil, 1},
		{"asked", [][]byte{other, mine}, nil, 0},
		{"asked again", [][]byte{mine}, func() { own.Store(w.identity(web)) }, 0},
		{"another issuer's", [][]byte{other}, nil, 1},
		{"no SVID", [][]byte{mine}, func() { own.Store(nil) }, 1},
		{"no token", [][]byte{mine}, func() {
			own.Store(w.identity(web))
			if err := os.Remove(w.tokenFile); err != nil {
				t.Fatal(err)
			}
		}, 1},
	} {
		publish(w.reissue(uint64(i)+1, tc.issuers...))
		wait(t, "the agent is asked, which comes when it is its turn", func() bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			return len(tc.issuers) == 0 || slices.EqualFunc(a.reissued, tc.issuers, bytes.Equal)
		})
		if tc.change != nil {
			tc.change()
		}
		wantIssued(t, a.Client)
		if connections += tc.more; n.Load() != connections {
			t.Errorf("%s: %d connections so far, want %d", tc.name, n.Load(), connections)
		}
	}
	want := append(slices.Repeat([]string{"token JTI=one"}, 5), fmt.Sprintf("mtls serial=%x", own.Load().Leaf().SerialNumber.Bytes()))
	if got := w.askers(); !slices.Equal(got, want) {
		t.Errorf("those who asked: %q; want %q", got, want)
	}
}

func wait(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// fickle serves Sync as the test says, and Issue as the test says at first; later calls are passed on to a real server.
type fickle struct {
	syncing
	first func(context.Context) error
	to    chanceryv1.IssuanceClient
	calls atomic.Int32
	given chan time.Duration // that the first call may take
}

func (f *fickle) Issue(ctx context.Context, r *chanceryv1.IssueRequest) (*chanceryv1.IssueResponse, error) {
	if f.calls.Add(1) == 1 {
		end, _ := ctx.Deadline()
		f.given <- time.Until(end)
		if err := f.first(ctx); err != nil {
			return nil, err
		}
	}
	md, _ := metadata.FromIncomingContext(ctx)
	return f.to.Issue(metadata.NewOutgoingContext(ctx, metadata.MD{"authorization": md.Get("authorization")}), r)
}

// newFickle serves before the world's server, and returns where.
func (w *world) newFickle(first func(context.Context) error) (*fickle, string) {
	bundle := must(trust.NewBundle(td, 0, must(source.RootsFile(w.serverRoot)())))
	tls := trust.ClientTLS(trust.SystemID(td, "server"), trust.Only(bundle), func() *trust.Identity { return nil })
	conn := must(grpc.NewClient(w.addr, grpc.WithTransportCredentials(credentials.NewTLS(tls))))
	w.t.Cleanup(func() { conn.Close() })
	f := &fickle{syncing: syncing{streams: make(chan *syncStream)}, first: first, to: chanceryv1.NewIssuanceClient(conn), given: make(chan time.Duration, 1)}
	g := grpc.NewServer(grpc.Creds(credentials.NewTLS(trust.ServerTLS(w.own.Load))))
	chanceryv1.RegisterIssuanceServer(g, f)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	go g.Serve(l)
	w.t.Cleanup(g.Stop)
	return f, l.Addr().String()
}

// refusal is a server's word, or with no reason the transport's.
func refusal(code codes.Code, reason string) error {
	st := status.New(code, "no")
	if reason != "" {
		st = must(st.WithDetails(&errdetails.ErrorInfo{Reason: reason, Domain: "chancery"}))
	}
	return st.Err()
}

func hangs(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// What goes wrong on the connection of the stream is tried on another one, in the time that a call has; but no handshake is spent on
// hearing a second time that there is no room.
func TestAReissueFindsAnotherWay(t *testing.T) {
	for _, tc := range []struct {
		name        string
		first       func(context.Context) error
		connections int32
		want        codes.Code
	}{
		{"answers", func(context.Context) error { return nil }, 1, codes.OK},
		{"hangs", hangs, 2, codes.OK},
		{"refuses the token", func(context.Context) error { return refusal(codes.Unauthenticated, "TOKEN_EXPIRED") }, 2, codes.OK},
		{"is not ready", func(context.Context) error { return refusal(codes.Unavailable, "NOT_READY") }, 2, codes.OK},
		{"does not know Issue", func(context.Context) error { return refusal(codes.Unimplemented, "") }, 2, codes.OK},
		{"has no room", func(context.Context) error { return refusal(codes.ResourceExhausted, csr.ReasonBusy) }, 1, codes.ResourceExhausted},
		{"says no", func(context.Context) error { return refusal(codes.PermissionDenied, csr.ReasonRevoked) }, 1, codes.PermissionDenied},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			f, server := w.newFickle(tc.first)
			addr, n := counting(t, server)
			own := w.identity(web)
			cfg := w.config()
			cfg.Servers, cfg.Current = []string{addr}, func() *trust.Identity { return own }
			a := w.startSync(cfg, own)
			st := f.next(t)
			st.request()
			st.push(w.reissue(1, own.Leaf().AuthorityKeyId))
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, _, err := a.Issue(ctx, newKey())
			if r, ok := errors.AsType[*client.Refused](err); ok && r.Code != tc.want || !ok && (err != nil || tc.want != codes.OK) {
				t.Errorf("got %v, want %s", err, tc.want)
			}
			if n.Load() != tc.connections {
				t.Errorf("%d connections, want %d", n.Load(), tc.connections)
			}
			if given := <-f.given; given > 2500*time.Millisecond {
				t.Errorf("the first call had %s of 5 s", given)
			}
		})
	}
}

// The stream may end under a renewal, as it does before a server stops.
func TestAReissueOutlivesItsStream(t *testing.T) {
	w := newWorld(t)
	f, addr := w.newFickle(hangs)
	own := w.identity(web)
	cfg := w.config()
	cfg.Servers, cfg.Current = []string{addr}, func() *trust.Identity { return own }
	a := w.startSync(cfg, own)
	st := f.next(t)
	st.request()
	st.push(w.reissue(1, own.Leaf().AuthorityKeyId))
	go func() {
		<-f.given
		st.end <- refusal(codes.Unavailable, agents.ReasonMove)
	}()
	wantIssued(t, a.Client)
	wantIssued(t, a.Client)
	if n := f.calls.Load(); n != 3 {
		t.Errorf("%d calls, want 3", n)
	}
}

// Where there is another server, one that hangs holds a renewal up for no longer than one that takes no connection, and comes last
// for a while.
func TestAReissueGoesToTheNextServer(t *testing.T) {
	w := newWorld(t)
	f, addr := w.newFickle(hangs)
	own := w.identity(web)
	cfg := w.config()
	// The world's server has nothing to send, so that the stream is with the other one once this one is avoided.
	hub := agents.New(agents.Config{})
	hub.Close()
	next, _ := w.serve("127.0.0.1:0", func(c *csr.Config) { c.Agents = hub })
	cfg.Servers, cfg.Current = []string{addr, next}, func() *trust.Identity { return own }
	a := w.startSync(cfg, own)
	st := f.next(t)
	st.request()
	st.push(w.reissue(1, own.Leaf().AuthorityKeyId))
	wantIssued(t, a.Client)
	if given := <-f.given; given > 3*time.Second {
		t.Errorf("the server had %s to answer, want 3 s at most", given)
	}
	if n := f.calls.Load(); n != 1 {
		t.Errorf("%d calls of the server that hangs, want 1", n)
	}
	wantIssued(t, a.Client) // though the stream is still there
	if n := f.calls.Load(); n != 1 {
		t.Errorf("%d calls of the server that hangs after another renewal, want 1", n)
	}
}
