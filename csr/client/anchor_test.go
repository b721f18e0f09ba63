package client_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/trust"
)

// signing is a server whose bundles are signed, and what it was shown by whom.
type signing struct {
	syncing
	w      *world
	key    ed25519.PrivateKey
	bundle *chanceryv1.Bundle
	addr   string

	mu     sync.Mutex // guards all below
	agents [][]byte   // of calls of Issue
	tokens int        // that it was shown
	asked  []string   // of calls of GetBundle: what it was shown
}

func (w *world) newSigning(key ed25519.PrivateKey, generation uint64, roots ...*x509.Certificate) *signing {
	w.t.Helper()
	s := &signing{syncing: syncing{streams: make(chan *syncStream)}, w: w, key: key, bundle: &chanceryv1.Bundle{TrustDomain: td.String(), Generation: generation}}
	for _, r := range roots {
		s.bundle.Roots = append(s.bundle.Roots, r.Raw)
	}
	g := grpc.NewServer(grpc.Creds(credentials.NewTLS(trust.ServerTLS(w.own.Load))))
	chanceryv1.RegisterIssuanceServer(g, s)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	go g.Serve(l)
	w.t.Cleanup(g.Stop)
	s.addr = l.Addr().String()
	return s
}

func (s *signing) signed() *chanceryv1.SignedBundle {
	if s.key == nil {
		return nil
	}
	x := trust.SignBundle(s.key, must(proto.Marshal(s.bundle)))
	return &chanceryv1.SignedBundle{Bundle: x.Bundle, Signature: x.Signature, Key: x.Key}
}

func (s *signing) GetBundle(ctx context.Context, _ *chanceryv1.GetBundleRequest) (*chanceryv1.SignedBundle, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	md, _ := metadata.FromIncomingContext(ctx)
	p, _ := peer.FromContext(ctx)
	shown := strings.Join(append(md.Get("authorization"), md.Get("clusterid")...), "")
	if certs := p.AuthInfo.(credentials.TLSInfo).State.PeerCertificates; len(certs) > 0 {
		shown += "a certificate"
	}
	s.asked = append(s.asked, shown)
	return s.signed(), nil
}

func (s *signing) Issue(ctx context.Context, r *chanceryv1.IssueRequest) (*chanceryv1.IssueResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	md, _ := metadata.FromIncomingContext(ctx)
	s.tokens += len(md.Get("authorization"))
	s.agents = append(s.agents, r.GetAgent())
	i := s.w.issuer.Load()
	req, err := x509.ParseCertificateRequest(r.GetRequests()[0].GetCsr())
	if err != nil {
		return nil, err
	}
	prepared, err := i.Prepare(must(ca.NewProfile("workload", ca.ProfileConfig{})), ca.Request{
		ID: web, PublicKey: req.PublicKey, Attestation: &ca.Attestation{Cluster: "Kubernetes", Time: time.Now()},
	})
	if err != nil {
		return nil, err
	}
	cert, err := i.Issue(ctx, prepared)
	if err != nil {
		return nil, err
	}
	chain := [][]byte{cert.DER}
	for _, c := range i.Chain() {
		chain = append(chain, c.Raw)
	}
	return &chanceryv1.IssueResponse{Bundle: s.bundle, SignedBundle: s.signed(), Results: []*chanceryv1.Result{
		{Outcome: &chanceryv1.Result_Certificate{Certificate: &chanceryv1.Certificate{SpiffeId: web.String(), Chain: chain}}},
	}}, nil
}

func (s *signing) shown() (tokens int, asked []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tokens, s.asked
}

func bundleKey() ed25519.PrivateKey {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return must(key, err)
}

// TestD6RotationSleptThrough: an agent that was off while all roots were replaced meets a server that neither serverRoots nor what it
// kept vouches for. It asks for the bundle, shows nothing of itself, believes the pinned key alone, and goes on; what left the bundle
// vouches for nobody any more, though serverRoots have it still. Without a pinned key, or with another, it says what to do, and the
// server gets no token.
func TestD6RotationSleptThrough(t *testing.T) {
	before, after := newWorld(t), newWorld(t)
	key := bundleKey()
	file := filepath.Join(t.TempDir(), "bundle")
	var log safeLog
	agent := func(file string, s *signing, roots ...*x509.Certificate) *client.Client {
		c := before.config()
		c.Servers, c.Logger, c.RootsAt = []string{s.addr}, slog.New(slog.NewTextHandler(&log, nil)), "serverRoots, roots.pem"
		c.Anchor = must(anchor.Open(anchor.Config{File: file, Domain: td, Logger: c.Logger}))
		if len(roots) > 0 {
			c.Roots = func() ([]*x509.Certificate, error) { return roots, nil }
		}
		return client.New(c)
	}
	old := before.newSigning(key, 1, before.made.Root)
	wantIssued(t, agent(file, old))

	now := after.newSigning(key, 3, after.made.Root)
	c := agent(file, now) // a start later
	i := wantIssued(t, c)
	if i.Bundle.Generation() != 3 || !i.Bundle.Roots()[0].Equal(after.made.Root) {
		t.Errorf("the bundle is of generation %d", i.Bundle.Generation())
	}
	if tokens, asked := now.shown(); tokens != 1 || len(asked) != 1 || asked[0] != "" {
		t.Errorf("the server was shown %d tokens, and for the bundle %q", tokens, asked)
	}
	if !strings.Contains(log.String(), "roots that the pinned bundle key has signed came from a server that could not be verified before") {
		t.Errorf("it said %s", &log)
	}
	// serverRoots have the old root alone still. It has left.
	tokens, _ := old.shown()
	if _, err := issue(t, agent(file, old)); err == nil || !strings.Contains(err.Error(), "chancery authority show -o pem") {
		t.Errorf("a server under the root that left: %v", err)
	}
	if again, _ := old.shown(); again != tokens {
		t.Error("a server under the root that left was given a token")
	}

	for name, tc := range map[string]struct {
		file   string
		server *signing
		want   string
	}{
		"nothing was kept":    {filepath.Join(t.TempDir(), "none"), after.newSigning(key, 3, after.made.Root), "put what it prints into serverRoots, roots.pem"},
		"another bundle key":  {pinned(t, before, key), after.newSigning(bundleKey(), 3, after.made.Root), "chancery authority show -o pem"},
		"an older bundle":     {pinned(t, before, key), after.newSigning(key, 0, after.made.Root), "chancery authority show -o pem"},
		"another's own roots": {pinned(t, before, key), after.newSigning(key, 3, before.made.Root), "chancery authority show -o pem"},
		"no bundle key":       {pinned(t, before, key), after.newSigning(nil, 3, after.made.Root), "chancery authority show -o pem"},
	} {
		_, err := issue(t, agent(tc.file, tc.server))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
		if tokens, asked := tc.server.shown(); tokens != 0 || strings.Join(asked, "") != "" {
			t.Errorf("%s: the server was shown %d tokens, and %q", name, tokens, asked)
		}
		// The one command helps: where nothing is pinned, or the pinned key has signed the server's bundle.
		if name == "nothing was kept" {
			wantIssued(t, agent(tc.file, tc.server, after.made.Root))
		}
	}
}

// pinned returns a file of an agent that was in touch with a world once.
func pinned(t *testing.T, w *world, key ed25519.PrivateKey) string {
	file := filepath.Join(t.TempDir(), "bundle")
	c := w.config()
	c.Servers = []string{w.newSigning(key, 1, w.made.Root).addr}
	c.Anchor = must(anchor.Open(anchor.Config{File: file, Domain: td}))
	wantIssued(t, client.New(c))
	return file
}

// TestD6SyncGoesByThePinnedKey: over Sync as in answers, unsigned and otherwise signed roots are refused, and what is signed counts.
func TestD6SyncGoesByThePinnedKey(t *testing.T) {
	w := newWorld(t)
	key, other := bundleKey(), w.authority()
	s := w.newSigning(key, 2, w.made.Root)
	c := w.config()
	c.Servers = []string{s.addr}
	a := w.startSync(c)
	st := s.next(t)
	st.request()
	update := func(version, generation uint64, by ed25519.PrivateKey, roots ...*x509.Certificate) *chanceryv1.SyncUpdate {
		u := w.update(version, 1)
		b := &chanceryv1.Bundle{TrustDomain: td.String(), Generation: generation}
		for _, r := range roots {
			b.Roots = append(b.Roots, r.Raw)
		}
		if by != nil {
			x := trust.SignBundle(by, must(proto.Marshal(b)))
			u.SignedBundle = &chanceryv1.SignedBundle{Bundle: x.Bundle, Signature: x.Signature, Key: x.Key}
		}
		return u
	}
	if r := st.push(update(1, 2, key, w.made.Root)); r.GetAcknowledged() != 1 {
		t.Fatalf("it says %v", r)
	}
	if b, _ := a.last(); b.Generation() != 2 {
		t.Errorf("generation %d: the unsigned one beside it counted", b.Generation())
	}
	for i, tc := range []struct {
		u    *chanceryv1.SyncUpdate
		want string
	}{
		{update(10, 3, nil, w.made.Root), "is not signed"},
		{update(11, 3, bundleKey(), w.made.Root, other.Root), "pinned is"},
		{update(12, 1, key, w.made.Root), "generation 2 was there before"},
		{update(13, 2, key, w.made.Root, other.Root), "two bundles of generation 2"},
	} {
		if r := st.push(tc.u); !strings.Contains(r.GetRefused(), tc.want) || r.GetAcknowledged() != 1 {
			t.Errorf("update %d: it says %v", i, r)
		}
	}
	if r := st.push(update(14, 3, key, w.made.Root, other.Root)); r.GetAcknowledged() != 14 || r.GetRefused() != "" {
		t.Errorf("it says %v", r)
	}
}

// TestD1ConsumersAreReported: at once on a new stream and when the last consumer has the newest generation, else once a second; and
// the issue calls name the same table. Reissue is passed on, again and again while it stands.
func TestD1ConsumersAreReported(t *testing.T) {
	w := newWorld(t)
	key := bundleKey()
	s := w.newSigning(key, 7, w.made.Root)
	c := w.config()
	c.Servers, c.Agent = []string{s.addr}, bytes.Repeat([]byte{7}, 16)
	wantIssued(t, client.New(c))
	if !bytes.Equal(s.agents[0], c.Agent) {
		t.Errorf("the call named the table %x", s.agents[0])
	}
	var mu sync.Mutex // guards all below
	state := &chanceryv1.ConsumersState{Agent: c.Agent, Generation: 3, Consumers: 1, Until: timestamppb.Now()}
	changed := make(chan struct{})
	var urged []time.Duration
	set := func(generation uint64, consumers uint32) {
		mu.Lock()
		defer mu.Unlock()
		state = &chanceryv1.ConsumersState{Agent: c.Agent, Generation: generation, Consumers: consumers, Until: state.Until}
		close(changed)
		changed = make(chan struct{})
	}
	served := make(chan struct{})
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer func() { cancel(); <-done }()
	go func() {
		done <- client.New(c).Sync(ctx, client.SyncConfig{
			Served: func() ([]*trust.Identity, <-chan struct{}) { return nil, served }, Apply: func(*trust.Bundle) error { return nil },
			Consumers: func() (*chanceryv1.ConsumersState, <-chan struct{}) {
				mu.Lock()
				defer mu.Unlock()
				return state, changed
			},
			Reissue: func(issuers [][]byte, within time.Duration) {
				mu.Lock()
				defer mu.Unlock()
				urged = append(urged, within)
			},
		})
	}()
	st := s.next(t)
	if r := st.request(); !bytes.Equal(r.GetConsumers().GetAgent(), c.Agent) || r.GetConsumers().GetGeneration() != 3 || r.GetConsumers().GetConsumers() != 1 {
		t.Errorf("first it says %v", r)
	}
	u := w.update(1, 1)
	u.Bundle.Generation, u.Reissue = 7, &chanceryv1.Reissue{Issuers: [][]byte{w.made.Issuer.SubjectKeyId}, Within: durationpb.New(3 * time.Second)}
	if r := st.push(u); r.GetAcknowledged() != 1 {
		t.Errorf("it says %v", r)
	}
	for n := range uint32(50) { // more than anybody wants to hear
		set(3, 10+n)
	}
	set(7, 60)
	began := time.Now()
	said := 0
	for r := st.request(); r.GetConsumers().GetGeneration() != 7; r = st.request() {
		if said++; said > 3 {
			t.Fatalf("it goes on and on: %v", r)
		}
	}
	t.Logf("the newest generation was said after %s", time.Since(began))
	set(7, 61)
	if r := st.request(); r.GetConsumers().GetConsumers() != 61 {
		t.Errorf("it says %v", r)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(urged) == 0 || urged[0] != 3*time.Second {
		t.Errorf("urged to replace SVIDs within %v", urged)
	}
}

// TestD4AnswersOfAServerThatIsBehind: a server that has not heard of the newest bundle yet signs SVIDs that are as good as others, if
// the newest roots vouch for them. They come with those; its older bundle counts for nothing. Once the root above it has left, the same
// server's answers are refused, and others are asked.
func TestD4AnswersOfAServerThatIsBehind(t *testing.T) {
	w := newWorld(t)
	next, key := w.authority(), bundleKey()
	ahead, behind, other := w.newSigning(key, 2, w.made.Root, next.Root), w.newSigning(key, 1, w.made.Root), w.newSigning(key, 1, w.made.Root)
	kept := must(anchor.Open(anchor.Config{File: filepath.Join(t.TempDir(), "bundle"), Domain: td}))
	agent := func(all ...*signing) *client.Client {
		c := w.config()
		c.Anchor, c.Servers = kept, nil
		for _, s := range all {
			c.Servers = append(c.Servers, s.addr)
		}
		return client.New(c)
	}
	wantIssued(t, agent(ahead))
	i := wantIssued(t, agent(behind))
	if i.Bundle.Generation() != 2 || len(i.Bundle.Roots()) != 2 || kept.Bundle().Generation() != 2 {
		t.Errorf("an SVID of a server that is behind comes with generation %d and %d roots; kept is %d", i.Bundle.Generation(), len(i.Bundle.Roots()), kept.Bundle().Generation())
	}

	signs := w.issuer.Load()
	w.issuer.Store(w.newIssuer(next, 3, next.Root))
	w.own.Store(w.identity(trust.SystemID(td, "server"))) // that the server verifies does not help it
	if _, err := kept.Take(nil, w.newSigning(key, 3, next.Root).signed()); err != nil {
		t.Fatal(err)
	}
	wantIssued(t, agent(behind)) // under the new root
	w.issuer.Store(signs)
	before := len(behind.agents) + len(other.agents)
	if _, err := issue(t, agent(behind, other)); err == nil || !strings.Contains(err.Error(), "those do not vouch for the answer") {
		t.Errorf("an SVID under the root that left: %v", err)
	}
	if n := len(behind.agents) + len(other.agents) - before; n != 2 {
		t.Errorf("%d servers were asked, want both", n)
	}
}

// TestD13AgentLeavesAServerThatStaysBehind: one that is cut off from its store, say, has its streams and brings nothing new. An agent
// that knows of newer roots, by the answers of others, or of newer CRLs goes to another server after a while.
func TestD13AgentLeavesAServerThatStaysBehind(t *testing.T) {
	w := newWorld(t)
	key, next := bundleKey(), w.authority()
	a, b := w.newSigning(key, 1, w.made.Root), w.newSigning(key, 1, w.made.Root)
	c := w.config()
	c.Servers = []string{a.addr, b.addr}
	c.Anchor = must(anchor.Open(anchor.Config{Domain: td}))
	agent := w.startSync(client.Behind(c, 200*time.Millisecond))
	push := func(st *syncStream, s *signing, version uint64, number int64) *chanceryv1.SyncRequest {
		u := w.update(version, number)
		u.Bundle, u.SignedBundle = s.bundle, s.signed()
		return st.push(u)
	}
	st, at := nextOf(t, a, b)
	st.request()
	if r := push(st, at, 1, 7); r.GetAcknowledged() != 1 {
		t.Fatalf("it says %v", r)
	}
	ahead := w.newSigning(key, 2, w.made.Root, next.Root)
	if _, err := c.Anchor.Take(nil, ahead.signed()); err != nil { // an answer's
		t.Fatal(err)
	}
	agent.set(nil)
	again, to := nextOf(t, a, b)
	if to == at {
		t.Error("it goes back to the server that is behind")
	}
	again.request()
	to.bundle = ahead.bundle
	if r := push(again, to, 1, 7); r.GetAcknowledged() != 1 {
		t.Fatalf("it says %v", r)
	}
	if r := push(again, to, 2, 6); !strings.Contains(r.GetRefused(), "number 7 was there before") {
		t.Fatalf("it says %v", r)
	}
	if _, at = nextOf(t, a, b); at == to {
		t.Error("it goes back to the server that has older CRLs")
	}
	if !strings.Contains(agent.log.String(), "another server has had newer roots or CRLs for a while") {
		t.Errorf("it says %s", agent.log)
	}
}

// TestD6AStreamUnderARootThatLeft: whoever has the key of a root that was retired cannot pose as the server to agents that come anew; nor
// does it keep those that it has.
func TestD6AStreamUnderARootThatLeft(t *testing.T) {
	w := newWorld(t)
	key, next := bundleKey(), w.authority()
	s := w.newSigning(key, 1, w.made.Root)
	c := w.config()
	c.Servers = []string{s.addr}
	agent := w.startSync(client.Behind(c, 500*time.Millisecond))
	st := s.next(t)
	st.request()
	for i, roots := range [][]*x509.Certificate{{w.made.Root}, {w.made.Root, next.Root}} {
		s.bundle = w.newSigning(key, uint64(i+1), roots...).bundle
		u := w.update(uint64(i+1), 1)
		u.Bundle, u.SignedBundle = s.bundle, s.signed()
		if r := st.push(u); r.GetAcknowledged() != u.GetVersion() {
			t.Fatalf("it says %v", r)
		}
	}
	if strings.Contains(agent.log.String(), "nothing vouches any more") {
		t.Errorf("it says %s", agent.log)
	}
	w.issuer.Store(w.newIssuer(next, 3, next.Root))
	w.own.Store(w.identity(trust.SystemID(td, "server"))) // what the stream has shown stays what it is
	s.bundle = w.newSigning(key, 3, next.Root).bundle
	if r := st.push(&chanceryv1.SyncUpdate{Version: 3, Bundle: s.bundle, SignedBundle: s.signed()}); r.GetAcknowledged() != 3 {
		t.Fatalf("it says %v", r)
	}
	s.next(t).request()
	if log := agent.log.String(); !strings.Contains(log, "nothing vouches any more for the certificate") || strings.Contains(log, "level=WARN") {
		t.Errorf("it says %s", log)
	}
}

// nextOf waits for the next stream to either of two servers.
func nextOf(t *testing.T, a, b *signing) (*syncStream, *signing) {
	t.Helper()
	select {
	case st := <-a.streams:
		st.t = t
		return st, a
	case st := <-b.streams:
		st.t = t
		return st, b
	case <-time.After(30 * time.Second):
		t.Fatal("no stream")
		return nil, nil
	}
}
