// Package parenttest owns the contract of parents: a suite that the tests of every kind run, against an authority that is
// real and another side that can break in all the ways that a server must stand. It is imported by tests only.
package parenttest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/parent/renewal"
	castore "github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// Lifetime is what parents in the suite are to ask for.
const Lifetime = 24 * time.Hour

// CA is a certificate authority of a test's, made by crypto/x509.
type CA struct {
	Cert *x509.Certificate
	Key  crypto.Signer
}

// NewCA makes a CA under another one, or, under none, a root. Change may change its template.
func NewCA(t testing.TB, name string, under *CA, change func(*x509.Certificate)) *CA {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := Template(name, 30*24*time.Hour)
	if change != nil {
		change(template)
	}
	made := &CA{Key: key}
	if under == nil {
		under = &CA{template, key}
	}
	if made.Cert, err = under.Sign(template, key.Public()); err != nil {
		t.Fatal(err)
	}
	return made
}

// Template returns that of a CA that may do all that an issuer or its parent should.
func Template(name string, life time.Duration) *x509.Certificate {
	serial := make([]byte, 16)
	rand.Read(serial)
	serial[0] = 1
	return &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Minute).UTC(),
		NotAfter: time.Now().Add(life).UTC(), IsCA: true, BasicConstraintsValid: true, MaxPathLen: -1,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
}

// Sign signs a template.
func (c *CA) Sign(template *x509.Certificate, pub crypto.PublicKey) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, c.Cert, pub, c.Key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// World is the authority of a server under a root that is kept elsewhere, and the root with a CA below it.
type World struct {
	Domain   trust.Domain
	Root     *CA // pinned
	Above    *CA // signs issuers
	Log      *audit.Log
	Keeper   *authority.Keeper
	Store    *castore.SQLite
	Registry *prometheus.Registry
	Logged   *Text // what the server logs

	config  authority.Config
	profile *ca.Profile
	stop    func() // the server's hold on the lease
}

// Text is a log in memory.
type Text struct {
	mu sync.Mutex // guards b
	b  strings.Builder
}

// Write implements io.Writer.
func (l *Text) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

// String returns all of it.
func (l *Text) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// NewWorld makes a world whose server has no issuer yet.
func NewWorld(t testing.TB) *World {
	t.Helper()
	return NewWorldWith(t, nil)
}

// NewWorldWith is NewWorld with keys in a store.
func NewWorldWith(t testing.TB, store keys.Store) *World {
	t.Helper()
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	w := &World{Domain: td, Registry: prometheus.NewRegistry(), Logged: new(Text), stop: func() {}}
	w.Root = NewCA(t, "root", nil, nil)
	w.Above = NewCA(t, "above", w.Root, nil)
	dir := t.TempDir()
	st, err := castore.CreateSQLite(t.Context(), filepath.Join(dir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	w.Store = st
	sealer, err := keys.CreateSealer(filepath.Join(dir, "state.key"))
	if err != nil {
		t.Fatal(err)
	}
	if w.Log, err = audit.Open(filepath.Join(dir, "audit.jsonl")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Log.Close() })
	if w.profile, err = ca.NewProfile("workload", ca.ProfileConfig{}); err != nil {
		t.Fatal(err)
	}
	w.config = authority.Config{
		Domain: td, Store: st, Sealer: sealer, Log: w.Log, Logger: slog.New(slog.NewTextHandler(w.Logged, nil)),
		Profiles: []*ca.Profile{w.profile, ca.ServerProfile()}, Roots: []*x509.Certificate{w.Root.Cert}, Parented: true, Keys: store,
	}
	if _, err := authority.Init(t.Context(), w.config, "test"); err != nil {
		t.Fatal(err)
	}
	w.Open(t)
	t.Cleanup(func() { w.stop() })
	return w
}

// Open opens the authority, as a start of the server does.
func (w *World) Open(t testing.TB) {
	t.Helper()
	k, err := authority.Open(t.Context(), w.config)
	if err != nil {
		t.Fatal(err)
	}
	w.Keeper = k
	if !k.TakeLease(t.Context()) {
		t.Fatal("the server does not drive")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { // a renewal may take longer than a lease
		for ctx.Err() == nil {
			k.TakeLease(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Second):
			}
		}
	})
	w.stop()
	w.stop = func() { cancel(); wg.Wait() }
}

// Renewer returns one for a parent, with fresh metrics.
func (w *World) Renewer(p renewal.Parent) *renewal.Renewer {
	w.Registry = prometheus.NewRegistry()
	return renewal.New(renewal.Config{
		Name: "test", Parent: p, Authority: w.Keeper, Domain: w.Domain, Asked: Lifetime, MinLife: time.Hour, Logger: w.config.Logger, Metrics: w.Registry,
	})
}

// Metric returns a sample; labels are "name=value". It fails the test if there is none.
func (w *World) Metric(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	families, err := w.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	next:
		for _, m := range f.GetMetric() {
			have := map[string]bool{}
			for _, l := range m.GetLabel() {
				have[l.GetName()+"="+l.GetValue()] = true
			}
			for _, l := range labels {
				if !have[l] {
					continue next
				}
			}
			return m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	t.Fatalf("there is no metric %s %v", name, labels)
	return 0
}

// Issue issues one workload's certificate, verifies it as a peer would, and returns it.
func (w *World) Issue(t testing.TB) *x509.Certificate {
	t.Helper()
	issuer, err := w.Keeper.Issuer()
	if err != nil {
		t.Fatal(err)
	}
	key, err := ca.GenerateKey(ca.P256)
	if err != nil {
		t.Fatal(err)
	}
	id, err := trust.ParseID("spiffe://cluster.local/ns/a/sa/b")
	if err != nil {
		t.Fatal(err)
	}
	token, err := issuer.Prepare(w.profile, ca.Request{ID: id, PublicKey: key.Public()})
	if err != nil {
		t.Fatal(err)
	}
	made, err := issuer.Issue(t.Context(), token)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(made.DER)
	if err != nil {
		t.Fatal(err)
	}
	roots, err := trust.NewBundle(w.Domain, 1, []*x509.Certificate{w.Root.Cert})
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := trust.Verify(append([]*x509.Certificate{leaf}, issuer.Chain()...), trust.Only(roots), time.Now()); err != nil || got != id {
		t.Fatalf("a certificate of the issuer verifies as %q: %v", got, err)
	}
	return leaf
}

// Fault is how the other side misbehaves below its protocol.
type Fault string

// The faults.
const (
	Garbage   Fault = "garbage"   // what it sends does not parse
	Oversized Fault = "oversized" // it sends without end
	Hanging   Fault = "hanging"   // it does not answer
)

// Peer is the other side of a parent: the server of its protocol, which a test provides, asks it what to do.
type Peer struct {
	World *World

	mu     sync.Mutex // guards all below
	sign   func(*x509.CertificateRequest) ([]*x509.Certificate, error)
	fault  Fault
	down   func()
	up     func()
	hung   chan struct{} // gets a value when a call begins to hang
	closed chan struct{}
}

// Sign answers a request for an issuer; an error is a refusal.
func (p *Peer) Sign(der []byte) ([]*x509.Certificate, error) {
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, err
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, err
	}
	p.mu.Lock()
	sign := p.sign
	p.mu.Unlock()
	return sign(csr)
}

// Fault returns how to misbehave now; empty: not at all.
func (p *Peer) Fault() Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fault == Hanging {
		select {
		case p.hung <- struct{}{}:
		default:
		}
	}
	return p.fault
}

// Closed is closed when the test ends: who hangs should end then.
func (p *Peer) Closed() <-chan struct{} { return p.closed }

// Switch says how the other side is taken down and up again.
func (p *Peer) Switch(down, up func()) { p.down, p.up = down, up }

// Handler lets a server over HTTP misbehave.
func (p *Peer) Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch p.Fault() {
		case Garbage:
			w.Write([]byte("<html>\x00\xff{"))
		case Oversized:
			for chunk := []byte(`{"data": "` + strings.Repeat("A", 1<<16)); ; {
				if _, err := w.Write(chunk); err != nil {
					return
				}
				chunk = chunk[10:]
			}
		case Hanging:
			select {
			case <-r.Context().Done():
			case <-p.closed:
			}
		default:
			h.ServeHTTP(w, r)
		}
	})
}

func (p *Peer) set(sign func(*x509.CertificateRequest) ([]*x509.Certificate, error), fault Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sign, p.fault = sign, fault
}

// issues returns what signs requests by a CA, after the template was changed; the chain is the CA's own.
func issues(by *CA, life time.Duration, change func(*x509.Certificate)) func(*x509.CertificateRequest) ([]*x509.Certificate, error) {
	return func(csr *x509.CertificateRequest) ([]*x509.Certificate, error) {
		template := Template("", life)
		template.RawSubject, template.MaxPathLen, template.MaxPathLenZero, template.URIs = csr.RawSubject, 0, true, []*url.URL{csr.URIs[0]}
		if change != nil {
			change(template)
		}
		cert, err := by.Sign(template, csr.PublicKey)
		return []*x509.Certificate{cert, by.Cert}, err
	}
}

var errRefused = errors.New("the policy says no")

// NewPeer returns a peer of a world that signs well, for tests beside the suite.
func NewPeer(w *World) *Peer {
	p := &Peer{World: w, closed: make(chan struct{}), hung: make(chan struct{}, 1)}
	p.set(issues(w.Above, Lifetime, nil), "")
	return p
}

// Listen opens an address again that was closed a moment ago.
func Listen(t testing.TB, addr string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	for try := 0; err != nil && try < 100; try++ {
		time.Sleep(20 * time.Millisecond)
		l, err = net.Listen("tcp", addr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}
