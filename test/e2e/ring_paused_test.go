package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/document"
)

// TestD4PausedReplica: a server is paused before a root rotation, declared dead by name so that the rotation goes on, and woken after
// the old root was retired. Whatever it answers before it finds out is refused by our agents, and by Envoy.
func TestD4PausedReplica(t *testing.T) {
	t.Parallel()
	r := startRing(t, ringConfig{Seed: ringSeed(t), Nodes: 2})
	p := slices.IndexFunc(r.servers, func(s *Server) bool { return s.yaml.State["replica"] != r.store.holder() })
	paused, name := r.servers[p], r.servers[p].yaml.State["replica"].(string)
	r.admin = (p + 1) % len(r.servers)

	w := newWaker(r, p)
	before := r.authorities()
	r.signal(paused.Process, syscall.SIGSTOP)
	defer func() { _ = paused.Signal(syscall.SIGCONT) }() // it may have ended

	id := r.begin("--root")
	r.reaches(id, document.PhaseDistribute, rotationLimit)
	Eventually(t, time.Minute, "the rotation waits for the replica that sleeps, by name, and for nobody else", func() error {
		s, err := r.status()
		if err != nil || s.Rotation == nil {
			return fmt.Errorf("%+v, %w", s, err)
		}
		replicas := s.Rotation.gate("replicas")
		if s.Rotation.Phase != string(document.PhaseDistribute) {
			t.Fatalf("phase %s is reached though %s sleeps", s.Rotation.Phase, name)
		}
		if replicas.Passed || !strings.Contains(strings.Join(replicas.Waiting, "\n"), name) {
			return fmt.Errorf("gates %+v", s.Rotation.Gates)
		}
		return nil
	})
	MustRun(t, "replica", "forget", "-c", r.servers[r.admin].Config, name)
	r.ends(id, "done", rotationLimit)
	after := r.authorities()
	r.holds(after.root)

	w.wake(before.issuer, after.issuer)
	r.under(after.issuer)
	r.noneLost()
}

// waker asks one server all that there is, by connections that were opened before it was paused and by new ones, from before it
// wakes until it signs with the issuer of the day. Its answers are for the identity of a node, so that a real Envoy can judge them.
type waker struct {
	r      *ring
	server *Server
	as, to *ringNode
	token  string
	conns  []*grpc.ClientConn
	relay  *relay
	agent  *Agent // that can only be answered through the relay

	mu      sync.Mutex // guards what follows
	old     []tls.Certificate
	current []tls.Certificate
	errs    map[string]int
}

func newWaker(r *ring, p int) *waker {
	r.t.Helper()
	w := &waker{r: r, server: r.servers[p], as: r.nodes[0], to: r.nodes[1], errs: map[string]int{}}
	w.token = r.k.BoundToken(r.t, w.as.pod, time.Hour, audience)
	for range 8 {
		conn := w.server.Dial(r.t)
		if _, err := (Ask{Token: w.token}).Certificate(r.t.Context(), conn); err != nil {
			r.t.Fatal(err)
		}
		w.conns = append(w.conns, conn)
	}
	// An agent that knows one address, behind which first another server is.
	w.relay = startRelay(r.t, r.servers[r.admin].Listen)
	pod := r.k.RunPod(r.t, w.as.pod.Namespace, "relayed", "relayed", "node-relayed")
	w.agent = StartAgent(r.t, w.server, AgentConfig{
		Pod: pod, Token: r.k.BoundToken(r.t, pod, time.Hour, audience), TTL: r.cfg.TTL, Servers: []string{w.relay.addr},
	})
	w.agent.WaitLog(r.t, 20*time.Second, "identity renewed")
	return w
}

// wake has everybody ask, wakes the server, and judges what comes.
func (w *waker) wake(old, current string) {
	t := w.r.t
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var begun atomic.Int32
	var wg sync.WaitGroup
	calls := make([]func(context.Context) (*tls.Certificate, error), 0, 2*len(w.conns))
	for i, conn := range w.conns {
		if i%2 == 1 {
			conn = w.server.Dial(t) // by the roots of its roots.pem, which has not changed while it slept
		}
		calls = append(calls, func(ctx context.Context) (*tls.Certificate, error) { return w.istio(ctx, conn) },
			func(ctx context.Context) (*tls.Certificate, error) { return w.native(ctx, conn) })
	}
	for _, call := range calls {
		wg.Go(func() {
			for begun.Add(1); ctx.Err() == nil; wait(ctx, 5*time.Millisecond) {
				cert, err := call(ctx)
				if ctx.Err() == nil {
					w.note(cert, err, old, current)
				}
			}
		})
	}
	Eventually(t, 10*time.Second, "all callers have begun", func() error {
		if n := int(begun.Load()); n < len(calls) {
			return fmt.Errorf("%d of %d", n, len(calls))
		}
		return nil
	})
	// The agent starts anew, with what it keeps: it asks at once.
	w.agent.Kill()
	w.relay.to(w.server.Listen)
	since := len(w.agent.Log())
	w.agent.Start(t)
	Eventually(t, 20*time.Second, "the agent has begun to ask", func() error {
		if w.relay.passing() == 0 {
			return errors.New("no connection")
		}
		return nil
	})
	w.r.signal(w.server.Process, syscall.SIGCONT)
	Eventually(t, time.Minute, "the server that woke signs with the issuer of the day", func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.current) < 50 {
			return fmt.Errorf("%d by it, %d by the old one; errors: %v", len(w.current), len(w.old), w.errs)
		}
		return nil
	})
	cancel()
	wg.Wait()
	w.judge(current)
	w.judgeAgent(current, since)
}

func (w *waker) note(cert *tls.Certificate, err error, old, current string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case err != nil:
		w.errs[fmt.Sprintf("%.200v", err)]++
	case issuerOf(cert.Leaf) == old:
		w.old = append(w.old, *cert)
	case issuerOf(cert.Leaf) == current:
		w.current = append(w.current, *cert)
	default:
		w.errs["issuer "+issuerOf(cert.Leaf)]++
	}
}

// judge: what the server gave before it found out is refused by Envoy and by who has the roots of the day; what it gave after is taken.
func (w *waker) judge(current string) {
	t := w.r.t
	t.Helper()
	stat := func() uint64 {
		return w.to.Stats(t, "inbound.ssl.fail_verify_error")["listener.inbound.ssl.fail_verify_error"]
	}
	refused := 0
	for _, cert := range w.old {
		before := stat()
		err := w.to.call(cert)
		trusted := w.r.probe.trusts(t, w.as.id, []*x509.Certificate{cert.Leaf})
		if err == nil || stat() == before {
			t.Errorf("Envoy takes serial %s, by which a server that had slept answered after its root was retired: %v", serialOf(cert.Leaf), err)
		} else if trusted == nil {
			t.Errorf("go-spiffe takes serial %s, by which a server that had slept answered after its root was retired", serialOf(cert.Leaf))
		} else {
			refused++
		}
	}
	if err := w.to.call(w.current[len(w.current)-1]); err != nil {
		t.Errorf("Envoy refuses what the server signs with the issuer of the day: %v", err)
	} else {
		w.to.seen.own(w.as.id)
	}
	t.Logf("the server that woke answered %d times by the issuer of the day, %d times by the old one, of which Envoy and go-spiffe refused %d; errors: %v",
		len(w.current), len(w.old), refused, w.errs)
}

// judgeAgent: our agent, whose every call went there, never showed what it would have to take back.
func (w *waker) judgeAgent(current string, since int) {
	t := w.r.t
	t.Helper()
	w.agent.WaitFor(t, 2*w.r.cfg.TTL, "serves an SVID", func() error {
		leaf, err := w.agent.Leaf(t)
		if err == nil && issuerOf(leaf) != current {
			t.Errorf("the agent serves an SVID of %s, which a server that had slept gave it", issuerOf(leaf))
		}
		return err
	})
	for line := range strings.Lines(w.agent.Log()[since:]) {
		t.Logf("the agent that asked it only: %.600s", strings.TrimSpace(line))
	}
}

// istio asks by the Istio API.
func (w *waker) istio(ctx context.Context, conn *grpc.ClientConn) (*tls.Certificate, error) {
	key, request, err := newRequest()
	if err != nil {
		return nil, err
	}
	chain, err := Ask{Token: w.token, CSR: csrPEM(request)}.Create(ctx, conn)
	if err != nil {
		return nil, err
	}
	var der [][]byte
	for _, text := range chain[:len(chain)-1] { // the last one holds the roots
		certs, err := parseCerts([]byte(text))
		if err != nil {
			return nil, err
		}
		der = append(der, certs[0].Raw)
	}
	return pairOf(key, der)
}

// native asks by our own API.
func (w *waker) native(ctx context.Context, conn *grpc.ClientConn) (*tls.Certificate, error) {
	key, request, err := newRequest()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+w.token), 10*time.Second)
	defer cancel()
	resp, err := chanceryv1.NewIssuanceClient(conn).Issue(ctx, &chanceryv1.IssueRequest{Requests: []*chanceryv1.CertificateRequest{{Csr: request}}}, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	if refusal := resp.Results[0].GetRefusal(); refusal != nil {
		return nil, fmt.Errorf("refused: %s: %s", refusal.Reason, refusal.Message)
	}
	return pairOf(key, resp.Results[0].GetCertificate().GetChain())
}

func newRequest() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, new(x509.CertificateRequest), key)
	return key, der, err
}

func pairOf(key *ecdsa.PrivateKey, chain [][]byte) (*tls.Certificate, error) {
	if len(chain) == 0 {
		return nil, errors.New("an answer without a chain")
	}
	leaf, err := x509.ParseCertificate(chain[0])
	return &tls.Certificate{Certificate: chain, PrivateKey: key, Leaf: leaf}, err
}

// relay passes connections on to an address that can be changed. Those that stand are then cut.
type relay struct {
	addr string

	mu     sync.Mutex // guards what follows
	target string
	conns  []net.Conn
}

func startRelay(t testing.TB, target string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{addr: l.Addr().String(), target: target}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { r.pass(c) })
		}
	})
	t.Cleanup(func() { l.Close(); r.to(""); wg.Wait() })
	return r
}

// to changes the target.
func (r *relay) to(target string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.target = target
	for _, c := range r.conns {
		c.Close()
	}
	r.conns = nil
}

// passing is how many connections stand.
func (r *relay) passing() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.conns) / 2
}

func (r *relay) pass(c net.Conn) {
	defer c.Close()
	r.mu.Lock()
	target := r.target
	r.mu.Unlock()
	s, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer s.Close()
	r.mu.Lock()
	if r.target != target {
		r.mu.Unlock()
		return
	}
	r.conns = append(r.conns, c, s)
	r.mu.Unlock()
	go func() {
		io.Copy(s, c)
		s.Close()
	}()
	io.Copy(c, s)
}
