package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/admission"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/trust"
)

// hanging returns an address that accepts connections, as a paused server's kernel does, and nothing more.
func hanging(t testing.TB) string {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	t.Cleanup(func() { l.Close() })
	return l.Addr().String()
}

// closed returns an address where nobody listens.
func closed() string {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	return l.Addr().String()
}

// ended counts connections to an address that ends each at once.
func ended(t testing.TB) (addr string, connections *atomic.Int32) {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	t.Cleanup(func() { l.Close() })
	connections = new(atomic.Int32)
	go func() {
		for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
			connections.Add(1)
			conn.Close()
		}
	}()
	return l.Addr().String(), connections
}

// silent serves Issue and never answers.
type silent struct {
	chanceryv1.UnimplementedIssuanceServer
	calls atomic.Int32
}

func (s *silent) Issue(ctx context.Context, _ *chanceryv1.IssueRequest) (*chanceryv1.IssueResponse, error) {
	s.calls.Add(1)
	<-ctx.Done()
	return nil, ctx.Err()
}

func (w *world) silent() (*silent, string) {
	s := new(silent)
	g := grpc.NewServer(grpc.Creds(credentials.NewTLS(trust.ServerTLS(w.own.Load))))
	chanceryv1.RegisterIssuanceServer(g, s)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	go g.Serve(l)
	w.t.Cleanup(g.Stop)
	return s, l.Addr().String()
}

// issueWithin asks with several clients at once, none of which knows anything yet.
func (w *world) issueWithin(limit time.Duration, clients int, servers ...string) []error {
	cfg := w.config()
	cfg.Servers = servers
	out := make([]error, clients)
	var wg sync.WaitGroup
	for i := range out {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(w.t.Context(), limit)
			defer cancel()
			_, _, out[i] = client.New(cfg).Issue(ctx, newKey())
		})
	}
	wg.Wait()
	return out
}

func (w *world) wantAll(errs []error) {
	w.t.Helper()
	for _, err := range errs {
		if err != nil {
			w.t.Error(err)
		}
	}
}

// A renewal outlives a server that is dead, one that is paused before or after the connection, one that is not ready, and one
// that is an impostor, wherever they stand; all in the time that a keeper gives it.
func TestIssueGoesToTheNextServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, quiet := w.silent()
	dead, _ := ended(t)
	notReady, _ := w.serve("127.0.0.1:0", func(c *csr.Config) {
		c.Issuer = func() (*ca.Issuer, error) { return nil, errors.New("the store is away") }
	})
	foreign := newWorld(t)
	for name, addr := range map[string]string{
		"refused": closed(), "ends connections": dead, "paused": hanging(t), "paused in the call": quiet, "not ready": notReady, "an impostor": foreign.addr,
		"no such name": "nobody.invalid:443",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w.wantAll(w.issueWithin(15*time.Second, 8, addr, w.addr))
		})
	}
	t.Run("all of them", func(t *testing.T) {
		w.wantAll(w.issueWithin(15*time.Second, 8, closed(), dead, notReady, foreign.addr, w.addr))
	})
}

func TestTheErrorNamesEachServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	notReady, _ := w.serve("127.0.0.1:0", func(c *csr.Config) {
		c.Issuer = func() (*ca.Issuer, error) { return nil, errors.New("the store is away") }
	})
	dead, paused := closed(), hanging(t)
	err := w.issueWithin(4*time.Second, 1, dead, paused, notReady, "nobody.invalid:443")[0]
	for _, want := range []string{"no server could be asked", dead + ": ", "connection refused", paused + ": ", notReady + ": ", csr.ReasonNotReady, "nobody.invalid:443: ", "no such host"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q: %v", want, err)
		}
	}
	if r, ok := errors.AsType[*client.Refused](err); !ok || r.RetryAfter() == 0 {
		t.Errorf("what the server said of waiting is lost: %+v", r)
	}
	if err := w.issueWithin(4*time.Second, 1, dead)[0]; err == nil || !strings.Contains(err.Error(), "server "+dead+": ") {
		t.Errorf("a single server: %v", err)
	}
}

// What a server refuses for a reason of policy, or because it is busy, the others are not asked.
func TestRefusalsAreNotTakenElsewhere(t *testing.T) {
	var calls atomic.Int32
	counted := func(c *csr.Config) {
		issuer := c.Issuer
		c.Issuer = func() (*ca.Issuer, error) { calls.Add(1); return issuer() }
	}
	w := newWorld(t)
	for _, tc := range []struct {
		name   string
		change func(*csr.Config)
		ask    func(*client.Config)
		reason string
	}{
		{"unknown cluster", func(*csr.Config) {}, func(c *client.Config) { c.Cluster = "west" }, csr.ReasonCluster},
		{"another's identity", func(*csr.Config) {}, func(c *client.Config) { c.ID = must(trust.WorkloadID(td, "foo", "db")) }, csr.ReasonTokenNoPod},
		{"busy", func(c *csr.Config) { c.Admission.Global = admission.Rate{PerSecond: 1e-9, Burst: 1} }, func(*client.Config) {}, csr.ReasonBusy},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, _ := w.serve("127.0.0.1:0", tc.change, counted)
			b, _ := w.serve("127.0.0.1:0", tc.change, counted)
			cfg := w.config()
			cfg.Servers = []string{a, b}
			tc.ask(&cfg)
			c := client.New(cfg)
			if tc.reason == csr.ReasonBusy { // each has one to give
				w.wantAll(append(w.issueWithin(20*time.Second, 1, a), w.issueWithin(20*time.Second, 1, b)...))
			}
			calls.Store(0)
			_, err := issue(t, c)
			if r, ok := errors.AsType[*client.Refused](err); !ok || r.Reason != tc.reason {
				t.Errorf("got %v, want %s", err, tc.reason)
			}
			if n := calls.Load(); n != 1 {
				t.Errorf("%d servers were asked", n)
			}
		})
	}
}

// A server that failed comes last for a while, so that its failure costs one call and not each.
func TestAFailedServerIsAvoided(t *testing.T) {
	w := newWorld(t)
	dead, connections := ended(t)
	cfg := w.config()
	cfg.Servers = []string{dead, w.addr}
	c := client.New(cfg)
	for connections.Load() == 0 { // until it was drawn
		wantIssued(t, c)
	}
	for range 50 {
		wantIssued(t, c)
	}
	if n := connections.Load(); n > 3 {
		t.Errorf("a dead server was tried %d times", n)
	}
}

// Calls spread over all servers.
func TestCallsSpread(t *testing.T) {
	w := newWorld(t)
	var addrs []string
	var calls [4]atomic.Int32
	for i := range calls {
		addr, _ := w.serve("127.0.0.1:0", func(c *csr.Config) {
			c.Checkpoints = func() []string { calls[i].Add(1); return nil } // once an answer
		})
		addrs = append(addrs, addr)
	}
	w.wantAll(w.issueWithin(20*time.Second, 200, addrs...))
	for i := range calls {
		if n := calls[i].Load(); n < 20 || n > 90 {
			t.Errorf("server %d was asked %d times of 200", i, n)
		}
	}
}

// nameServer answers for chancery.test with addresses, until it is told to be silent.
type nameServer struct {
	mu    sync.Mutex // guards all
	hosts []string
	mute  bool
}

func (n *nameServer) set(mute bool, hosts ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mute, n.hosts = mute, hosts
}

func (n *nameServer) answer(query []byte) []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	var m dnsmessage.Message
	if n.mute || m.Unpack(query) != nil || len(m.Questions) != 1 {
		return nil
	}
	q := m.Questions[0]
	m.Header.Response, m.Additionals = true, nil
	if q.Type == dnsmessage.TypeA {
		for _, h := range n.hosts {
			m.Answers = append(m.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 1}, Body: &dnsmessage.AResource{A: [4]byte(net.ParseIP(h).To4())},
			})
		}
	}
	return must(m.Pack())
}

// newNameServer starts a name server for a resolver of its own.
func newNameServer(t *testing.T) (*nameServer, *net.Resolver) {
	n := new(nameServer)
	l := must(net.ListenPacket("udp", "127.0.0.1:0"))
	t.Cleanup(func() { l.Close() })
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", l.LocalAddr().String())
	}}
	go func() {
		buf := make([]byte, 2048)
		for {
			size, from, err := l.ReadFrom(buf)
			if err != nil {
				return
			}
			if out := n.answer(buf[:size]); out != nil {
				l.WriteTo(out, from)
			}
		}
	}()
	return n, resolver
}

// TestMoreAddressesThanAreConsidered: a name may have a thousand; no call tries many of them, and none is left out for ever, whatever the
// order in which the name server has them.
func TestMoreAddressesThanAreConsidered(t *testing.T) {
	names, resolver := newNameServer(t)
	var hosts []string
	for i := range 70 { // what one answer over UDP holds
		hosts = append(hosts, fmt.Sprintf("127.0.1.%d", i+1))
	}
	names.set(false, hosts...)
	seen := map[string]bool{}
	for range 2000 { // each is left out of one with a chance of 9 in 10
		found := client.Find(t.Context(), resolver, "chancery.test.:1")
		if len(found) == 0 || len(found) > 8 {
			t.Fatalf("a call tries %d addresses", len(found))
		}
		for _, addr := range found {
			seen[addr] = true
		}
		if len(seen) == len(hosts) {
			return
		}
	}
	t.Errorf("only %d of %d addresses are ever tried", len(seen), len(hosts))
}

// A name is looked up for each call, and each of its addresses is a server.
func TestNamesWithSeveralAddresses(t *testing.T) {
	w := newWorld(t)
	names, resolver := newNameServer(t)
	w.resolver = resolver
	a, stopA := w.serve("127.0.0.1:0")
	_, port, err := net.SplitHostPort(a)
	if err != nil {
		t.Fatal(err)
	}
	_, stopB := w.serve("127.0.0.2:" + port)
	name := "chancery.test.:" + port
	names.set(false, "127.0.0.1", "127.0.0.2")
	w.wantAll(w.issueWithin(15*time.Second, 10, name))
	stopA()
	w.wantAll(w.issueWithin(15*time.Second, 10, name))
	names.set(false, "127.0.0.3") // moved
	w.serve("127.0.0.3:" + port)
	stopB()
	cfg := w.config()
	cfg.Servers = []string{name}
	c := client.New(cfg)
	wantIssued(t, c)
	names.set(false, "127.0.0.1")
	if _, err := issue(t, c); err == nil || !strings.Contains(err.Error(), name+" at 127.0.0.1:"+port+": ") {
		t.Errorf("the old address: %v", err)
	}
	names.set(false, "127.0.0.3")
	wantIssued(t, c)
	names.set(true)
	if err := w.issueWithin(20*time.Second, 1, name)[0]; err == nil || !strings.Contains(err.Error(), "chancery.test") {
		t.Errorf("a name server that does not answer: %v", err)
	}
	w.wantAll(w.issueWithin(15*time.Second, 4, name, w.addr)) // the lookup holds up nobody for long
}

// withHub gives a server a hub of its own, which has something to send.
func withHub(t testing.TB, w *world, hub *agents.Hub) func(*csr.Config) {
	t.Helper()
	if err := hub.Publish(w.update(1, 1)); err != nil {
		t.Fatal(err)
	}
	return func(c *csr.Config) { c.Agents = hub }
}

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

func connected(h *agents.Hub) int { n, _ := h.Counts(); return n }

// Agents spread over the servers; when one stops they move to the other without a word, and come back to the fleet when all
// have been down.
func TestSyncMovesOnDrainAndComesBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	hubs := [2]*agents.Hub{agents.New(agents.Config{}), agents.New(agents.Config{})}
	a, stopA := w.serve("127.0.0.1:0", withHub(t, w, hubs[0]))
	b, stopB := w.serve("127.0.0.1:0", withHub(t, w, hubs[1]))
	cfg := w.config()
	cfg.Servers = []string{a, b}
	const n = 30
	var all []*syncAgent
	for range n {
		all = append(all, w.startSync(cfg))
	}
	until(t, "all have a stream", func() bool { return connected(hubs[0])+connected(hubs[1]) == n })
	if x := connected(hubs[0]); x < 3 || x > n-3 {
		t.Errorf("%d of %d are on one of two servers", x, n)
	}
	stopA()
	until(t, "all are on the other", func() bool { return connected(hubs[1]) == n })
	for _, x := range all {
		if log := x.log.String(); strings.Contains(log, "level=WARN") {
			t.Errorf("a drain is trouble to an agent: %s", log)
		}
	}
	stopB()
	until(t, "each finds all servers away", func() bool {
		for _, x := range all {
			if log := x.log.String(); !strings.Contains(log, "not in touch with the server") || !strings.Contains(log, a) || !strings.Contains(log, b) {
				return false
			}
		}
		return true
	})
	back := agents.New(agents.Config{})
	w.serve(b, withHub(t, w, back))
	until(t, "all are back", func() bool { return connected(back) == n })
}

// Streams end before connections grow too old, each at a time of its own, and are opened again without a word.
func TestStreamsGrowOld(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var joined atomic.Int32
	hub := agents.New(agents.Config{Mark: func() *chanceryv1.DocumentMark { joined.Add(1); return nil }}) // with each update
	addr, _ := w.serve("127.0.0.1:0", withHub(t, w, hub), func(c *csr.Config) { c.MaxConnectionAge = time.Second })
	cfg := w.config()
	cfg.Servers = []string{addr}
	agent := w.startSync(cfg)
	until(t, "four streams, one after the other", func() bool { return joined.Load() >= 4 })
	if log := agent.log.String(); log != "" {
		t.Errorf("it says %s", log)
	}
}

// A GOAWAY that gRPC sends by itself, as balancers do, is no trouble either.
func TestGoAwayIsNoTrouble(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := &syncing{streams: make(chan *syncStream)}
	g := grpc.NewServer(grpc.Creds(credentials.NewTLS(trust.ServerTLS(w.own.Load))),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: 500 * time.Millisecond, MaxConnectionAgeGrace: 100 * time.Millisecond}))
	chanceryv1.RegisterIssuanceServer(g, s)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	go g.Serve(l)
	t.Cleanup(g.Stop)
	cfg := w.config()
	cfg.Servers = []string{l.Addr().String()}
	agent := w.startSync(cfg)
	for range 3 {
		st := s.next(t)
		st.request()
		st.push(w.update(1, 1))
		<-st.Context().Done()
	}
	if log := agent.log.String(); log != "" {
		t.Errorf("it says %s", log)
	}
}

// An agent carries the highest mark that any server sent to all the others, so that one whose store was rolled back learns of
// it, and one that lacks a taint (decision D4); also a mark that came from a server with a later version than those that it talks to now.
func TestD9AgentsCarryTheHighestMark(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	hub := func(version uint64, seen chan string) *agents.Hub {
		return agents.New(agents.Config{
			Mark: func() *chanceryv1.DocumentMark {
				return &chanceryv1.DocumentMark{Version: version, Tainted: version - 1, Mac: fmt.Append(nil, "mac of ", version)}
			},
			Seen: func(_ context.Context, m *chanceryv1.DocumentMark) {
				seen <- fmt.Sprint(m.GetVersion(), " ", m.GetTainted(), " ", string(m.GetMac()))
			},
		})
	}
	ahead, behind := make(chan string, 10), make(chan string, 10)
	first := hub(1<<32+7, ahead)
	a, stop := w.serve("127.0.0.1:0", withHub(t, w, first))
	cfg := w.config()
	cfg.Servers = []string{a}
	agent := w.startSync(cfg)
	until(t, "the first update is applied", func() bool { _, n := agent.last(); return n > 0 })
	stop()
	w.serve(a, withHub(t, w, hub(1<<32+3, behind)))
	select {
	case got := <-behind:
		if want := fmt.Sprint(uint64(1<<32+7), " ", uint64(1<<32+6), " mac of ", uint64(1<<32+7)); got != want {
			t.Errorf("the server that is behind is told %q, want %q", got, want)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the server that is behind is told nothing")
	}
	select {
	case got := <-ahead:
		t.Errorf("a server is told of its own mark: %s", got)
	case got := <-behind:
		t.Errorf("told twice: %s", got)
	default:
	}
}
