package federating

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/federation"
	"github.com/chancery-project/chancery/trust/federation/endpoint"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

var (
	own     = must(trust.ParseDomain("cluster.local"))
	partner = must(trust.ParseDomain("b.example"))
)

// world is servers on one store, and a foreign trust domain with an endpoint.
type world struct {
	t      *testing.T
	store  store.Store
	sealer *keys.Sealer
	web    string // of the endpoint,
	pool   string // and the file of the root that vouches for it
	asked  atomic.Int32

	mu    sync.Mutex
	shown *trust.Bundle
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, sealer: must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))}
	w.store = must(store.CreateSQLite(t.Context(), filepath.Join(t.TempDir(), "state.db")))
	t.Cleanup(func() { w.store.Close() })
	must(authority.Init(t.Context(), w.config("a"), "test"))
	w.show(7, root("first"))
	return w
}

// serve starts the endpoint. Not in synctest, which knows no network.
func (w *world) serve() *world {
	h := endpoint.New(endpoint.Config{RefreshHint: time.Minute, Logger: slog.New(slog.DiscardHandler), Bundle: func() (*trust.Bundle, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.asked.Add(1)
		return w.shown, nil
	}})
	s := httptest.NewTLSServer(h)
	w.t.Cleanup(s.Close)
	w.web, w.pool = s.URL, filepath.Join(w.t.TempDir(), "web.pem")
	if err := os.WriteFile(w.pool, trust.EncodeCertificates(s.Certificate()), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return w
}

// show has the endpoint show roots under a number.
func (w *world) show(n uint64, roots ...*x509.Certificate) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shown = must(trust.NewBundle(partner, n, roots))
}

// json is what it shows, as an admin gets it in a file.
func (w *world) json() []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	return must(spiffebundle.FromTrust(w.shown, 0).Marshal())
}

func signed(name string, parent *x509.Certificate, by crypto.Signer, lives time.Duration) (*x509.Certificate, *ecdsa.PrivateKey) {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lives), BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.ParseIP("127.0.0.1")},
	}
	if parent == nil {
		template.IsCA, template.KeyUsage, parent, by = true, x509.KeyUsageCertSign, template, key
	}
	return must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, template, parent, key.Public(), by)))), key
}

func root(name string) *x509.Certificate {
	c, _ := signed(name, nil, nil, 24*time.Hour)
	return c
}

func (w *world) config(name string) authority.Config {
	log := must(audit.Open(filepath.Join(w.t.TempDir(), "audit.jsonl")))
	w.t.Cleanup(func() { log.Close() })
	return authority.Config{
		Domain: own, Store: w.store, Sealer: w.sealer, Log: log, Logger: slog.New(slog.DiscardHandler), Replica: name,
		Profiles: []*ca.Profile{must(ca.NewProfile("workload", ca.ProfileConfig{})), ca.ServerProfile()},
	}
}

// server is one of them.
type server struct {
	*Desk
	k     *authority.Keeper
	log   *audit.Log
	audit string
	reg   *prometheus.Registry
	err   error // of Open
}

// federated is a config with the endpoint of the world.
func (w *world) federated() []RelationshipConfig {
	return []RelationshipConfig{{TrustDomain: "b.example", URL: w.web, Profile: "https_web", Roots: w.pool}}
}

// TestReplicasThatReadNone: the first foreign bundle waits until each server reads documents that have one, since those of the version before
// could not go on; the next one waits for nobody.
func TestReplicasThatReadNone(t *testing.T) {
	w := newWorld(t).serve()
	a := w.server("a", w.federated())
	w.server("b", nil)
	must(0, a.k.Change(t.Context(), func(*document.Document) error { return nil }))
	var mu sync.Mutex
	notes := []board.Note{{Replica: "b", Format: 3}}
	a.config.Notes = func() []board.Note { mu.Lock(); defer mu.Unlock(); return notes }
	const why = "replica b does not say that it reads documents with foreign trust domains (format 4)"
	for what, err := range map[string]error{
		"a fetch": a.poller.Refresh(t.Context(), partner),
		"an import": func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond) // an admin need not wait
			defer cancel()
			_, err := a.ImportTrust(ctx, &chanceryv1.ImportTrustRequest{TrustDomain: "b.example", Bundle: w.json()})
			return err
		}(),
	} {
		if doc := a.k.Document(); err == nil || !strings.Contains(err.Error(), why) || doc.Format != 3 || len(doc.Foreign) > 0 {
			t.Errorf("%s: %v; the document has format %d", what, err, doc.Format)
		}
	}
	go func() { // its word comes while an admin waits
		time.Sleep(200 * time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		notes = []board.Note{{Replica: "b", Format: 4}}
	}()
	if err := a.poller.Refresh(t.Context(), partner); err != nil || a.k.Document().Format != 4 {
		t.Fatalf("%v; the document has format %d", err, a.k.Document().Format)
	}
	notes = nil
	w.show(8, root("second"))
	if err := a.poller.Refresh(t.Context(), partner); err != nil || a.stored().Sequence != 8 {
		t.Errorf("the next one: %v", err)
	}
}

func (w *world) server(name string, all []RelationshipConfig, aliases ...trust.Domain) *server {
	w.t.Helper()
	s := &server{audit: filepath.Join(w.t.TempDir(), "audit.jsonl"), reg: prometheus.NewRegistry()}
	c := w.config(name)
	s.log = must(audit.Open(s.audit))
	c.Log = s.log
	w.t.Cleanup(func() { s.log.Close() })
	s.k = must(authority.Open(w.t.Context(), c))
	s.Desk, s.err = Open(Config{
		Place: must(Parse(all, nil, own, nil)), Domain: own, Aliases: aliases, Authority: s.k, Log: c.Log, Own: func() *trust.Identity { return nil },
		ActorOf: func(context.Context) (string, error) { return "unix:test", nil }, Note: func(string, string) {}, Logger: slog.New(slog.DiscardHandler), Metrics: s.reg,
	})
	return s
}

// run runs the desk until the test ends.
func (s *server) run(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// until waits for a condition.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

func (s *server) stored() *spiffebundle.Bundle {
	if f := s.known().foreign[partner]; f != nil {
		return f.bundle
	}
	return nil
}

func (s *server) lines(t *testing.T, text string) int {
	t.Helper()
	data, err := os.ReadFile(s.audit)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(data), text)
}

// TestDriverPolls: it alone; all have what it stored; an admin is answered by any of them.
func TestDriverPolls(t *testing.T) {
	w := newWorld(t).serve()
	a, b := w.server("a", w.federated()), w.server("b", w.federated())
	if !a.k.TakeLease(t.Context()) {
		t.Fatal("a does not drive")
	}
	a.run(t)
	b.run(t)
	until(t, "a stores the bundle", func() bool { return a.stored() != nil && !a.poller.Status()[0].LastSuccess.IsZero() })
	if n := w.asked.Load(); n != 1 || a.stored().Sequence != 7 {
		t.Errorf("asked %d times, %+v", n, a.stored())
	}
	if a.lines(t, `"actor":"server a","detail":"federation: bundle of b.example, sequence 7, roots 1, from `+w.web) != 1 {
		t.Error("that is not in the audit log")
	}
	b.k.Follow(t.Context())
	if b.stored() == nil {
		t.Fatal("b lacks it")
	}
	one := func(s *server) *chanceryv1.TrustedDomain {
		all := must(s.ListTrust(t.Context(), &chanceryv1.ListTrustRequest{TrustDomain: "b.example"})).GetDomains()
		if len(all) != 1 {
			t.Fatalf("%v", all)
		}
		return all[0]
	}
	if x := one(a); x.GetStanding() != Federated || x.GetSequence() != 7 || x.GetActor() != w.web || x.GetRelationship().GetNextTry() == nil || x.GetRelationship().GetLastSuccess() == nil || x.GetRelationship().GetRefreshHint().AsDuration() != time.Minute {
		t.Errorf("of a: %v", x)
	}
	if x := one(b); x.GetSequence() != 7 || x.GetRelationship().GetUrl() != w.web || x.GetRelationship().GetNextTry() != nil || x.GetRelationship().GetLastTry() != nil {
		t.Errorf("of b: %v", x)
	}
	second := root("second")
	w.show(8, second)
	resp := must(b.RefreshTrust(t.Context(), new(chanceryv1.RefreshTrustRequest)))
	if len(resp.GetDomains()) != 1 || resp.GetDomains()[0].GetSequence() != 8 || b.stored().Sequence != 8 || len(resp.GetDomains()[0].GetPrevious()) == 0 {
		t.Errorf("b refreshes: %v", resp)
	}
	w.show(9, second)
	b.Unknown(partner) // within a minute of that: not at once
	a.k.Follow(t.Context())
	if a.stored().Sequence != 8 {
		t.Errorf("a has %d", a.stored().Sequence)
	}
	for name, want := range map[string]string{"x.example": "there is no relationship with trust domain x.example", "X": "trust domain"} {
		if _, err := b.RefreshTrust(t.Context(), &chanceryv1.RefreshTrustRequest{TrustDomain: name}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := b.ListTrust(t.Context(), &chanceryv1.ListTrustRequest{TrustDomain: "x.example"}); status.Code(err) != codes.FailedPrecondition {
		t.Error(err)
	}
}

// TestUnknownAuthority: any server fetches then, and stores.
func TestUnknownAuthority(t *testing.T) {
	w := newWorld(t).serve()
	b := w.server("b", w.federated())
	b.run(t)
	b.Unknown(own)
	b.Unknown(partner)
	until(t, "b stores the bundle", func() bool { return b.stored() != nil })
	if b.k.Drives() {
		t.Error("b drives")
	}
}

// TestInvariant10AuditBeforeTrust: what the audit log cannot take is not trusted, whoever wants it, nor forgotten.
func TestInvariant10AuditBeforeTrust(t *testing.T) {
	w := newWorld(t).serve()
	a := w.server("a", w.federated())
	if !a.k.TakeLease(t.Context()) {
		t.Fatal("a does not drive")
	}
	if _, err := a.ImportTrust(t.Context(), &chanceryv1.ImportTrustRequest{TrustDomain: "c.example", Bundle: w.json()}); err != nil {
		t.Fatal(err)
	}
	version := a.k.Document().Version
	a.log.Close()
	if err := a.poller.Refresh(t.Context(), partner); err == nil {
		t.Error("a bundle is taken over without a line")
	}
	for _, q := range []*chanceryv1.ImportTrustRequest{{TrustDomain: "d.example", Bundle: w.json()}, {TrustDomain: "c.example", Forget: true}} {
		if _, err := a.ImportTrust(t.Context(), q); err == nil {
			t.Errorf("%v is done without a line", q)
		}
	}
	if a.k.Document().Version != version {
		t.Error("the document changed")
	}
}

// TestImport: by hand, with each thing that may be wrong about it.
func TestImport(t *testing.T) {
	w := newWorld(t).serve()
	a := w.server("a", w.federated())
	do := func(q *chanceryv1.ImportTrustRequest) (bool, error) {
		resp, err := a.ImportTrust(t.Context(), q)
		return resp.GetChanged(), err
	}
	good := w.json()
	w.show(6, root("older"))
	older := w.json()
	for i, c := range []struct {
		q       *chanceryv1.ImportTrustRequest
		changed bool
		code    codes.Code
		want    string
	}{
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "c.example", Bundle: good}, changed: true},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "c.example", Bundle: good}},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "c.example", Bundle: older}, code: codes.FailedPrecondition, want: "its sequence goes back, from 7 to 6"},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "c.example", Bundle: older, Older: true}, changed: true},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "b.example", Bundle: good}, changed: true}, // such as to begin with
		{q: &chanceryv1.ImportTrustRequest{Bundle: good}, code: codes.InvalidArgument, want: "trust domain is empty"},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "c.example"}, code: codes.InvalidArgument, want: "SPIFFE bundle of c.example"},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "c.example", Bundle: []byte("{}")}, code: codes.InvalidArgument, want: "no array of keys"},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "cluster.local", Bundle: good}, code: codes.FailedPrecondition, want: "is our own"},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "c.example", Bundle: good, Forget: true}, code: codes.InvalidArgument, want: "no bundle is given"},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "b.example", Forget: true}, code: codes.FailedPrecondition, want: "so its bundle would be fetched again"},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "c.example", Forget: true}, changed: true},
		{q: &chanceryv1.ImportTrustRequest{TrustDomain: "c.example", Forget: true}, code: codes.FailedPrecondition, want: "there is no bundle of a foreign trust domain c.example"},
	} {
		changed, err := do(c.q)
		if changed != c.changed || status.Code(err) != c.code || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%d: changed %v, %v, want %q", i, changed, err, c.want)
		}
	}
	if n := a.lines(t, `"actor":"unix:test","detail":"trust import: bundle of c.example, sequence 6, roots 1, though it may be older than the one before"`); n != 1 {
		t.Errorf("%d lines", n)
	}
}

// TestD24OursIsNotForeign: own domains, former ones and aliases are not federated, by whichever way.
func TestD24OursIsNotForeign(t *testing.T) {
	w := newWorld(t).serve()
	alias := must(trust.ParseDomain("alias.example"))
	a := w.server("a", w.federated(), alias)
	must(0, a.k.Change(t.Context(), func(next *document.Document) error {
		next.State(own).Former = []string{"old.example"}
		return nil
	}))
	for name, want := range map[string]string{"alias.example": "is in trustDomainAliases", "old.example": "is one of our own, of a migration", "cluster.local": "is our own"} {
		if _, err := a.ImportTrust(t.Context(), &chanceryv1.ImportTrustRequest{TrustDomain: name, Bundle: w.json()}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("import of %s: %v", name, err)
		}
		if s := w.server("b", []RelationshipConfig{{TrustDomain: "b.example", URL: w.web, Profile: "https_web"}}, partner); s.err == nil || !strings.Contains(s.err.Error(), "is in trustDomainAliases") {
			t.Errorf("a config with both: %v", s.err)
		}
	}
	// The other end of a migration, while the relationship is there: nothing is taken over any more.
	must(0, a.k.Change(t.Context(), func(next *document.Document) error {
		next.State(own).Rotation = &document.Rotation{ID: "m", Kind: document.KindRoot, Phase: document.PhaseDistribute, Migration: &document.Migration{From: "cluster.local", To: "b.example"}}
		return nil
	}))
	if err := a.poller.Refresh(t.Context(), partner); err == nil || !strings.Contains(err.Error(), "of a migration") || a.stored() != nil {
		t.Errorf("a migration to it: %v", err)
	}
	if s := w.server("c", w.federated()); s.err == nil || !strings.Contains(s.err.Error(), "federation[0].trustDomain: trust domain b.example is one of our own") {
		t.Errorf("a start then: %v", s.err)
	}
	must(0, a.k.Change(t.Context(), func(next *document.Document) error { next.State(own).Rotation = nil; return nil }))
	if _, err := a.ImportTrust(t.Context(), &chanceryv1.ImportTrustRequest{TrustDomain: "b.example", Bundle: w.json()}); err != nil {
		t.Fatal(err)
	}
	if s := w.server("d", nil, partner); s.err == nil || !strings.Contains(s.err.Error(), "trustDomainAliases[0]: b.example is federated") {
		t.Errorf("an alias of what is federated: %v", s.err)
	}
}

// TestBootstrap: a file counts until there is a bundle, and never after; what was stored is there after a restart.
func TestBootstrap(t *testing.T) {
	w := newWorld(t)
	file := filepath.Join(t.TempDir(), "bootstrap.json")
	if err := os.WriteFile(file, w.json(), 0o600); err != nil {
		t.Fatal(err)
	}
	c := []RelationshipConfig{{TrustDomain: "b.example", URL: "https://b.example/", Profile: "https_spiffe", EndpointID: "spiffe://b.example/server", Bootstrap: file}}
	a := w.server("a", c)
	if b := must(a.verifier(a.relation[partner], partner)); !b.SameRoots(w.shown) {
		t.Errorf("%v", b)
	}
	if b := must(a.verifier(a.relation[partner], own)); b == nil || b.Domain() != own {
		t.Errorf("of our own: %v", b)
	}
	if b, err := a.verifier(a.relation[partner], must(trust.ParseDomain("c.example"))); b != nil || err != nil {
		t.Errorf("of a third one: %v, %v", b, err)
	}
	w.show(8, root("second"))
	if _, err := a.ImportTrust(t.Context(), &chanceryv1.ImportTrustRequest{TrustDomain: "b.example", Bundle: w.json()}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	again := w.server("a", c)
	if b := must(again.verifier(again.relation[partner], partner)); !b.SameRoots(w.shown) {
		t.Errorf("after a restart: %v", b)
	}
	other := w.server("b", c)
	if _, err := other.ImportTrust(t.Context(), &chanceryv1.ImportTrustRequest{TrustDomain: "b.example", Forget: true}); err == nil {
		t.Error("forgets what is configured")
	}
	plain := w.server("c", nil)
	if _, err := plain.ImportTrust(t.Context(), &chanceryv1.ImportTrustRequest{TrustDomain: "b.example", Forget: true}); err != nil {
		t.Fatal(err)
	}
	other.k.Follow(t.Context())
	if _, err := other.verifier(other.relation[partner], partner); err == nil || !strings.Contains(err.Error(), "bootstrap "+file+": SPIFFE bundle of b.example") {
		t.Errorf("a broken bootstrap: %v", err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if _, err := other.verifier(other.relation[partner], partner); err == nil || !strings.Contains(err.Error(), "`chancery trust import b.example FILE`") {
		t.Errorf("no bootstrap: %v", err)
	}
}

// TestRelationshipThatLeft: what came from an endpoint goes once who drives has driven for a while without the relationship; what an admin
// imported stays.
func TestRelationshipThatLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a := w.server("a", nil)
		must(0, a.k.Change(t.Context(), func(next *document.Document) error {
			next.Foreign = map[string]*foreign.Domain{
				"b.example": {Bundle: w.json(), Actor: "https://b.example/"}, "c.example": {Bundle: w.json(), Actor: "unix:root"},
			}
			return nil
		}))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		names := func() int { return len(a.k.Document().Foreign) }
		drive := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) {
				a.k.TakeLease(t.Context())
			}
		}
		time.Sleep(time.Hour) // another one drives
		if names() != 2 {
			t.Error("dropped by one that does not drive")
		}
		drive(leaveAfter - time.Minute)
		if names() != 2 {
			t.Error("dropped too soon")
		}
		time.Sleep(time.Minute) // the lease is lost meanwhile
		drive(leaveAfter - time.Minute)
		if names() != 2 {
			t.Error("dropped though it does not drive for long")
		}
		drive(2 * time.Minute)
		if names() != 1 || a.k.Document().Foreign["c.example"] == nil {
			t.Errorf("%d are there", names())
		}
		if a.lines(t, "federation: forget b.example, with which the config does not federate any more") != 1 {
			t.Error("that is not in the audit log")
		}
		cancel()
		<-done
		a.log.Close()
		w.store.Close()
	})
}

// TestMetrics: what monitoring needs to tell a relationship that fails.
func TestMetrics(t *testing.T) {
	w := newWorld(t).serve()
	a := w.server("a", w.federated())
	if err := a.poller.Refresh(t.Context(), partner); err != nil {
		t.Fatal(err)
	}
	w.show(6, root("older"))
	if err := a.poller.Refresh(t.Context(), partner); err == nil || !strings.Contains(err.Error(), "its sequence goes back") {
		t.Errorf("%v", err)
	}
	err := testutil.GatherAndCompare(a.reg, strings.NewReader(`
# HELP chancery_federation_failing 1 if this server's last try to fetch the bundle of a foreign trust domain failed, else 0.
# TYPE chancery_federation_failing gauge
chancery_federation_failing{trust_domain="b.example"} 1
# HELP chancery_federation_failures_total Fetches of the bundle of a foreign trust domain that failed.
# TYPE chancery_federation_failures_total counter
chancery_federation_failures_total{trust_domain="b.example"} 1
# HELP chancery_trust_bundle_roots Roots in the bundle of a trust domain. 0: nothing of it is trusted.
# TYPE chancery_trust_bundle_roots gauge
chancery_trust_bundle_roots{trust_domain="b.example"} 1
chancery_trust_bundle_roots{trust_domain="cluster.local"} 1
# HELP chancery_trust_bundle_sequence Number of the bundle of a trust domain: the generation of an own one, spiffe_sequence of a foreign one.
# TYPE chancery_trust_bundle_sequence gauge
chancery_trust_bundle_sequence{trust_domain="b.example"} 7
chancery_trust_bundle_sequence{trust_domain="cluster.local"} 1
`), "chancery_federation_failing", "chancery_federation_failures_total", "chancery_trust_bundle_roots", "chancery_trust_bundle_sequence")
	if err != nil {
		t.Error(err)
	}
	all, e := a.Report()
	if len(all) != 1 || all[0].GetRoots() != 1 || all[0].GetSince() == nil || !strings.Contains(all[0].GetRelationship().GetError(), "goes back") || e != nil {
		t.Errorf("%v, %v", all, e)
	}
}

// TestCertificateOfTheEndpoint: files that others renew are taken over as they are whole, and only then.
func TestCertificateOfTheEndpoint(t *testing.T) {
	ca, by := signed("ca", nil, nil, 100*24*time.Hour)
	dir := t.TempDir()
	k := &keyPair{certificate: filepath.Join(dir, "c.pem"), key: filepath.Join(dir, "k.pem"), logger: slog.New(slog.DiscardHandler)}
	write := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pair := func(lives time.Duration) (cert, key []byte) {
		c, k := signed("web", ca, by, lives)
		return trust.EncodeCertificates(c), must(trust.EncodeKey(k))
	}
	if err := k.read(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without files: %v", err)
	}
	c1, k1 := pair(48 * time.Hour)
	write("c.pem", c1)
	write("k.pem", k1)
	if err := k.read(); err != nil {
		t.Fatal(err)
	}
	first := k.current.Load()
	c2, k2 := pair(72 * time.Hour)
	write("c.pem", c2) // between two writes of a tool
	if err := k.read(); err == nil || !strings.Contains(err.Error(), "c.pem") || strings.Contains(err.Error(), "PRIVATE") || k.current.Load() != first {
		t.Errorf("half of a renewal: %v", err)
	}
	write("k.pem", k2)
	if err := k.read(); err != nil || k.current.Load() == first {
		t.Errorf("the other half: %v", err)
	}
	ended, ke := pair(-time.Minute)
	write("c.pem", ended)
	write("k.pem", ke)
	if err := k.read(); err == nil || !strings.Contains(err.Error(), "ended at 20") {
		t.Errorf("one that has ended: %v", err)
	}
	write("c.pem", make([]byte, trust.MaxPEMBytes+1))
	if err := k.read(); err == nil || !strings.Contains(err.Error(), "more than 1048576 bytes") {
		t.Errorf("a large one: %v", err)
	}
}

// TestCertificateThatHasEnded does not keep a server from starting; it is replaced as soon as there is another one.
func TestCertificateThatHasEnded(t *testing.T) {
	dir := t.TempDir()
	k := &keyPair{certificate: filepath.Join(dir, "c.pem"), key: filepath.Join(dir, "k.pem"), logger: slog.New(slog.DiscardHandler)}
	for i, lives := range []time.Duration{-time.Minute, time.Hour} {
		cert, key := signed("endpoint", nil, nil, lives)
		for file, data := range map[string][]byte{k.certificate: trust.EncodeCertificates(cert), k.key: must(trust.EncodeKey(key))} {
			if err := os.WriteFile(file, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := k.read(); err != nil || !k.current.Load().Leaf.Equal(cert) {
			t.Errorf("certificate %d: %v", i, err)
		}
	}
}

// TestEndpointOfAServer: the server shows its own roots where its config says, also while it has no issuer's certificate of its own to show.
func TestEndpointOfAServer(t *testing.T) {
	w := newWorld(t)
	webCA, by := signed("ca", nil, nil, 24*time.Hour)
	cert, key := signed("web", webCA, by, 24*time.Hour)
	dir := t.TempDir()
	must(0, errors.Join(os.WriteFile(filepath.Join(dir, "c.pem"), trust.EncodeCertificates(cert), 0o600), os.WriteFile(filepath.Join(dir, "k.pem"), must(trust.EncodeKey(key)), 0o600)))
	a := w.server("a", nil)
	d := must(Open(Config{
		Place:  must(Parse(nil, &EndpointConfig{Listen: "127.0.0.1:0", Profile: "https_web", Certificate: filepath.Join(dir, "c.pem"), Key: filepath.Join(dir, "k.pem")}, own, nil)),
		Domain: own, Authority: a.k, Log: a.log, Own: func() *trust.Identity { return nil }, Logger: slog.New(slog.DiscardHandler),
	}))
	must(0, d.Listen())
	t.Cleanup(d.Close)
	(&server{Desk: d}).run(t)
	pool := x509.NewCertPool()
	pool.AddCert(webCA)
	c := must(federation.NewClient(federation.ClientConfig{
		Relationship: federation.Relationship{Domain: own, URL: "https://" + d.listener.Addr().String(), Profile: federation.Web}, Roots: func() (*x509.CertPool, error) { return pool, nil },
	}))
	b, err := c.Fetch(t.Context())
	if err != nil || !must(b.Trust()).SameRoots(must(a.k.Document().Bundle(own))) || b.Sequence != 1 || b.RefreshHint != 5*time.Minute {
		t.Errorf("%+v, %v", b, err)
	}
	if line := d.AddrLine(); line != "bundleEndpoint="+d.listener.Addr().String()+"\n" {
		t.Errorf("%q", line)
	}
	if _, e := d.Report(); e.GetListen() != d.listener.Addr().String() || e.GetNotAfter() == nil || e.GetError() != "" {
		t.Errorf("%v", e)
	}
	svid := must(Open(Config{
		Place: must(Parse(nil, &EndpointConfig{Listen: "127.0.0.1:0", Profile: "https_spiffe"}, own, nil)), Domain: own, Authority: a.k, Log: a.log,
		Own: func() *trust.Identity { return nil }, Logger: slog.New(slog.DiscardHandler),
	}))
	must(0, svid.Listen())
	t.Cleanup(svid.Close)
	(&server{Desk: svid}).run(t)
	_, err = (&http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}).Get("https://" + svid.listener.Addr().String())
	if err == nil {
		t.Error("a server without a certificate shows one")
	}
}
