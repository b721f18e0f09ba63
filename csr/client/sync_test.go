package client_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/mod/sumdb/note"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/trust"
)

// syncing is a gRPC server whose side of Sync is the test.
type syncing struct {
	chanceryv1.UnimplementedIssuanceServer
	streams chan *syncStream
}

type syncStream struct {
	grpc.BidiStreamingServer[chanceryv1.SyncRequest, chanceryv1.SyncUpdate]
	t   testing.TB
	end chan error
}

func (s *syncing) Sync(stream chanceryv1.Issuance_SyncServer) error {
	st := &syncStream{stream, nil, make(chan error, 1)}
	select {
	case s.streams <- st:
	case <-stream.Context().Done():
		return nil
	}
	select {
	case err := <-st.end:
		return err
	case <-stream.Context().Done():
		return nil
	}
}

// newSyncing serves with the world's certificate and returns where.
func (w *world) newSyncing() (*syncing, string) {
	w.t.Helper()
	s := &syncing{streams: make(chan *syncStream)}
	g := grpc.NewServer(grpc.Creds(credentials.NewTLS(trust.ServerTLS(w.own.Load))))
	chanceryv1.RegisterIssuanceServer(g, s)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	go g.Serve(l)
	w.t.Cleanup(g.Stop)
	return s, l.Addr().String()
}

// next waits for the agent's next stream.
func (s *syncing) next(t testing.TB) *syncStream {
	t.Helper()
	select {
	case st := <-s.streams:
		st.t = t
		return st
	case <-time.After(20 * time.Second):
		t.Fatal("the agent opens no stream")
		return nil
	}
}

// request waits for the agent's next word.
func (s *syncStream) request() *chanceryv1.SyncRequest {
	s.t.Helper()
	r, err := s.Recv()
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// push sends an update and returns the agent's answer.
func (s *syncStream) push(u *chanceryv1.SyncUpdate) *chanceryv1.SyncRequest {
	s.t.Helper()
	if err := s.Send(u); err != nil {
		s.t.Fatal(err)
	}
	return s.request()
}

// syncAgent is a client that follows Sync, and what it was told to apply.
type syncAgent struct {
	*client.Client
	log     *safeLog
	metrics *prometheus.Registry

	mu      sync.Mutex // guards all below
	served  []*trust.Identity
	changed chan struct{}
	applied []*trust.Bundle
	refuse  error

	reissued [][]byte // that were named last
}

type safeLog struct {
	mu sync.Mutex // guards text
	b  bytes.Buffer
}

func (l *safeLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *safeLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (w *world) startSync(c client.Config, own ...*trust.Identity) *syncAgent {
	w.t.Helper()
	a := &syncAgent{log: new(safeLog), metrics: prometheus.NewRegistry(), served: own, changed: make(chan struct{})}
	c.Logger, c.Metrics = slog.New(slog.NewTextHandler(a.log, nil)), client.NewMetrics(a.metrics)
	a.Client = client.New(c)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- a.Sync(ctx, client.SyncConfig{
			Served: func() ([]*trust.Identity, <-chan struct{}) {
				a.mu.Lock()
				defer a.mu.Unlock()
				return a.served, a.changed
			},
			Apply:        a.apply,
			NotEnforcing: func() []string { return []string{strings.Repeat("ü", 150)} },
			Reissue: func(issuers [][]byte, _ time.Duration) {
				a.mu.Lock()
				defer a.mu.Unlock()
				a.reissued = issuers
			},
		})
	}()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	return a
}

func (a *syncAgent) apply(b *trust.Bundle) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.refuse == nil {
		a.applied = append(a.applied, b)
	}
	return a.refuse
}

func (a *syncAgent) set(refuse error, served ...*trust.Identity) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refuse, a.served = refuse, served
	close(a.changed)
	a.changed = make(chan struct{})
}

// last returns what was applied last, and how often anything was.
func (a *syncAgent) last() (*trust.Bundle, int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.applied) == 0 {
		return nil, 0
	}
	return a.applied[len(a.applied)-1], len(a.applied)
}

// update returns an update with a CRL of the world's issuer that lists serials.
func (w *world) update(version uint64, number int64, serials ...*big.Int) *chanceryv1.SyncUpdate {
	w.t.Helper()
	l := &x509.RevocationList{Number: big.NewInt(number), ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour)}
	for _, s := range serials {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: s, RevocationTime: l.ThisUpdate})
	}
	return &chanceryv1.SyncUpdate{
		Version: version, Crls: [][]byte{must(x509.CreateRevocationList(rand.Reader, l, w.made.Issuer, w.made.IssuerKey))},
		Issuers: [][]byte{w.made.Issuer.Raw},
		Bundle:  &chanceryv1.Bundle{TrustDomain: "cluster.local", Generation: version, Roots: [][]byte{w.made.Root.Raw}},
	}
}

func TestSync(t *testing.T) {
	w := newWorld(t)
	s, addr := w.newSyncing()
	c := w.config()
	c.Servers, c.Cluster = []string{addr}, "west"
	a := w.startSync(c)
	st := s.next(t)
	md, _ := metadata.FromIncomingContext(st.Context())
	if got := md.Get("authorization"); len(got) != 1 || !strings.HasPrefix(got[0], "Bearer ") || strings.Join(md.Get("clusterid"), "") != "west" {
		t.Errorf("the server saw %v", md)
	}
	r := st.request()
	if r.GetAcknowledged() != 0 || r.GetRefused() != "" || len(r.GetServed()) != 0 {
		t.Errorf("first it says %v", r)
	}
	if got := r.GetNotEnforcing(); len(got) != 1 || got[0] != strings.Repeat("ü", 100) {
		t.Errorf("not enforcing: %q", got)
	}
	own := w.identity(web)
	if r := st.push(w.update(7, 1)); r.GetAcknowledged() != 7 || r.GetRefused() != "" {
		t.Errorf("to a good update it says %v", r)
	}
	if b, n := a.last(); n != 1 || b.Generation() != 7 || len(b.CRLs().DER()) != 1 || !b.Roots()[0].Equal(w.made.Root) {
		t.Errorf("applied %d times, last %v", n, b)
	}
	a.set(nil, own)
	r = st.request()
	hash := sha256.Sum256(own.Leaf().Raw)
	if len(r.GetServed()) != 1 || r.GetAcknowledged() != 7 {
		t.Fatalf("with an SVID it says %v", r)
	}
	if sv := r.GetServed()[0]; sv.GetSpiffeId() != web.String() || !bytes.Equal(sv.GetSerial(), own.Leaf().SerialNumber.Bytes()) ||
		!bytes.Equal(sv.GetCertificateHash(), hash[:]) || !sv.GetNotAfter().AsTime().Equal(own.NotAfter()) {
		t.Errorf("it serves %v", sv)
	}
	if n := a.metric("chancery_agent_sync_connected"); n != 1 {
		t.Errorf("%v streams are connected", n)
	}

	// An update with nothing new is acknowledged, too; one without CRLs takes them away.
	if r := st.push(w.update(8, 1)); r.GetAcknowledged() != 8 {
		t.Errorf("it says %v", r)
	}
	none := w.update(9, 1)
	none.Crls, none.Issuers = nil, nil
	if r := st.push(none); r.GetAcknowledged() != 9 {
		t.Errorf("it says %v", r)
	}
	if b, _ := a.last(); b.CRLs() != nil {
		t.Error("CRLs that the server sends no more are still there")
	}
}

// metric sums a metric over its labels.
func (a *syncAgent) metric(name string) (sum float64) {
	for _, f := range must(a.metrics.Gather()) {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// Any fault refuses the whole update, says why, and leaves what there was; the next good one is taken.
func TestSyncRefusesAsAWhole(t *testing.T) {
	w := newWorld(t)
	other := w.authority()
	s, addr := w.newSyncing()
	c := w.config()
	c.Servers = []string{addr}
	a := w.startSync(c)
	st := s.next(t)
	st.request()
	st.push(w.update(1, 5))
	for i, tc := range []struct {
		name   string
		change func(*chanceryv1.SyncUpdate)
		refuse error
		want   string
	}{
		{"no bundle", func(u *chanceryv1.SyncUpdate) { u.Bundle = nil }, nil, "reading bundle: 0 certificates"},
		{"another domain", func(u *chanceryv1.SyncUpdate) { u.Bundle.TrustDomain = "other.test" }, nil, `bundle of "other.test"`},
		{"a root that is none", func(u *chanceryv1.SyncUpdate) { u.Bundle.Roots = [][]byte{[]byte("x")} }, nil, "reading bundle: x509: "},
		{"an issuer that is none", func(u *chanceryv1.SyncUpdate) { u.Issuers = [][]byte{[]byte("x")} }, nil, "reading issuer 0: x509: "},
		{"too many issuers", func(u *chanceryv1.SyncUpdate) { u.Issuers = make([][]byte, 101) }, nil, "at most 100"},
		{"a CRL that is none", func(u *chanceryv1.SyncUpdate) { u.Crls = append(u.Crls, []byte("x")) }, nil, "CRL 1: x509: "},
		{"no issuers", func(u *chanceryv1.SyncUpdate) { u.Issuers = nil }, nil, "is not among the certificates"},
		{"another authority's CRL", func(u *chanceryv1.SyncUpdate) {
			l := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour)}
			u.Crls = append(u.Crls, must(x509.CreateRevocationList(rand.Reader, l, other.Issuer, other.IssuerKey)))
			u.Issuers = append(u.Issuers, other.Issuer.Raw)
		}, nil, "unknown authority"},
		{"a number that goes back", func(u *chanceryv1.SyncUpdate) { u.Crls = w.update(0, 4).Crls }, nil, "has number 4; number 5 was there before"},
		{"what the keeper refuses", func(*chanceryv1.SyncUpdate) {}, errors.New("the SVID does not verify"), "the SVID does not verify"},
		{"a long story", func(*chanceryv1.SyncUpdate) {}, errors.New("the SVID " + strings.Repeat("does not verify ", 200)), "the SVID "},
	} {
		u := w.update(uint64(i)+2, 5)
		tc.change(u)
		a.mu.Lock()
		a.refuse = tc.refuse
		a.mu.Unlock()
		r := st.push(u)
		if r.GetAcknowledged() != 1 || !strings.Contains(r.GetRefused(), tc.want) || len(r.GetRefused()) > 1024 {
			t.Errorf("%s: it says %v; want a refusal with %q", tc.name, r, tc.want)
		}
	}
	if _, n := a.last(); n != 1 {
		t.Errorf("%d updates were applied, want 1", n)
	}
	if !strings.Contains(a.log.String(), "level=ERROR") {
		t.Errorf("the log says %s", a.log)
	}
	a.mu.Lock()
	a.refuse = nil
	a.mu.Unlock()
	if r := st.push(w.update(99, 6)); r.GetAcknowledged() != 99 || r.GetRefused() != "" {
		t.Errorf("to a good update it says %v", r)
	}
}

// A stream that ends is opened again with the credentials of that moment, and starts from nothing.
func TestSyncComesBack(t *testing.T) {
	w := newWorld(t)
	s, addr := w.newSyncing()
	own := w.identity(web)
	c := w.config()
	c.Servers, c.Current = []string{addr}, func() *trust.Identity { return own }
	w.startSync(c, own)
	st := s.next(t)
	st.request()
	if r := st.push(w.update(5, 1)); r.GetAcknowledged() != 5 {
		t.Errorf("it says %v", r)
	}
	if err := os.Remove(w.tokenFile); err != nil { // from now on the SVID alone
		t.Fatal(err)
	}
	st.end <- status.Error(codes.Unavailable, "stopping")
	st = s.next(t)
	if r := st.request(); r.GetAcknowledged() != 0 || len(r.GetServed()) != 1 {
		t.Errorf("on a new stream it says %v", r)
	}
	p, _ := peer.FromContext(st.Context())
	shown := p.AuthInfo.(credentials.TLSInfo).State.PeerCertificates
	if md, _ := metadata.FromIncomingContext(st.Context()); len(shown) != 2 || !shown[0].Equal(own.Leaf()) || len(md.Get("authorization")) != 0 {
		t.Errorf("it shows %d certificates and %v", len(shown), md)
	}
	st.end <- nil
	st = s.next(t)
	st.request()
	if r := st.push(w.update(2, 2)); r.GetAcknowledged() != 2 { // another process of the server counts anew
		t.Errorf("it says %v", r)
	}
}

// An agent that moves to a server which has not heard yet of the last CRLs waits for it to; it neither takes CRLs back nor complains. The
// same CRLs with another server's signature are no news.
func TestD13AgentMovesToAServerThatIsBehind(t *testing.T) {
	w := newWorld(t)
	s, addr := w.newSyncing()
	c := w.config()
	c.Servers = []string{addr}
	a := w.startSync(c)
	st := s.next(t)
	st.request()
	st.push(w.update(1, 5))
	had, _ := a.last()
	st.end <- nil
	st = s.next(t)
	st.request()
	if err := st.Send(w.update(7, 4)); err != nil {
		t.Fatal(err)
	}
	five := w.update(8, 5)
	crl := must(x509.ParseRevocationList(five.Crls[0]))
	crl.ThisUpdate = must(x509.ParseRevocationList(had.CRLs().DER()[0])).ThisUpdate
	crl.NextUpdate = must(x509.ParseRevocationList(had.CRLs().DER()[0])).NextUpdate
	five.Crls[0] = must(x509.CreateRevocationList(rand.Reader, crl, w.made.Issuer, w.made.IssuerKey))
	if r := st.push(five); r.GetAcknowledged() != 8 || r.GetRefused() != "" {
		t.Errorf("it says %v", r)
	}
	if now, n := a.last(); n != 2 || now.CRLs() != had.CRLs() {
		t.Errorf("%d updates were applied; the CRLs are others: %v", n, now.CRLs() != had.CRLs())
	}
	if n := a.metric("chancery_agent_sync_updates_total"); n != 3 || strings.Contains(a.log.String(), "level=ERROR") || !strings.Contains(a.log.String(), "older CRLs") {
		t.Errorf("%v updates; the log says %s", n, a.log)
	}
	if r := st.push(w.update(9, 4)); !strings.Contains(r.GetRefused(), "number 5 was there before") { // now it goes back
		t.Errorf("it says %v", r)
	}
}

// The server's own certificate can be revoked: then it is a server no more.
func TestSyncRefusesARevokedServer(t *testing.T) {
	w := newWorld(t)
	s, addr := w.newSyncing()
	c := w.config()
	c.Servers = []string{addr}
	a := w.startSync(c)
	st := s.next(t)
	st.request()
	stolen := w.own.Load()
	st.push(w.update(1, 1, stolen.Leaf().SerialNumber))
	if _, _, err := a.Issue(t.Context(), newKey()); err == nil || !strings.Contains(err.Error(), "was revoked") {
		t.Errorf("a server with a revoked certificate: %v", err)
	}
	w.own.Store(w.identity(trust.SystemID(td, "server")))
	st.end <- nil
	s.next(t).request()
}

func TestServerWithoutSync(t *testing.T) {
	w := newWorld(t)
	g := grpc.NewServer(grpc.Creds(credentials.NewTLS(trust.ServerTLS(w.own.Load))))
	chanceryv1.RegisterIssuanceServer(g, chanceryv1.UnimplementedIssuanceServer{})
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	go g.Serve(l)
	t.Cleanup(g.Stop)
	c := w.config()
	c.Servers = []string{l.Addr().String()}
	a := w.startSync(c)
	for start := time.Now(); !strings.Contains(a.log.String(), "does not know Sync"); time.Sleep(5 * time.Millisecond) {
		if time.Since(start) > 20*time.Second {
			t.Fatalf("the log says %s", a.log)
		}
	}
	if n := strings.Count(a.log.String(), "\n"); n != 1 {
		t.Errorf("the log has %d lines: %s", n, a.log)
	}
}

// issueLog signs checkpoints as an issuance log does.
type issueLog struct {
	origin string
	signer note.Signer
}

func newIssueLog(origin string) issueLog {
	secret, _, err := note.GenerateKey(rand.Reader, origin)
	if err != nil {
		panic(err)
	}
	return issueLog{origin, must(note.NewSigner(secret))}
}

func (l issueLog) checkpoint(size int, root string) string {
	sum := sha256.Sum256([]byte(root))
	text := fmt.Sprintf("%s\n%d\n%s\n", l.origin, size, base64.StdEncoding.EncodeToString(sum[:]))
	return string(must(note.Sign(&note.Note{Text: text}, l.signer)))
}

// D21: the last checkpoint of each log is kept, and one that contradicts it raises an alarm and does not replace it.
func TestD21CheckpointsAreHeldAgainstTheLast(t *testing.T) {
	w := newWorld(t)
	s, addr := w.newSyncing()
	c := w.config()
	c.Servers = []string{addr}
	a := w.startSync(c)
	st := s.next(t)
	st.request()
	one, two := newIssueLog("log.test/one"), newIssueLog("log.test/two")
	rekeyed := newIssueLog("log.test/one")
	twice := must(note.Sign(&note.Note{Text: "log.test/one\n12\n" + base64.StdEncoding.EncodeToString(make([]byte, 32)) + "\n"}, rekeyed.signer, one.signer))
	kept := map[string]string{}
	version := uint64(0)
	for _, tc := range []struct {
		name   string
		text   string
		kind   string // of the alarm; "" = none
		origin string // whose checkpoint it becomes; "" = none
	}{
		{"first", one.checkpoint(10, "a"), "", "one"},
		{"the same again", one.checkpoint(10, "a"), "", "one"},
		{"another log", two.checkpoint(3, "x"), "", "two"},
		{"grown", one.checkpoint(11, "b"), "", "one"},
		{"shrunk", one.checkpoint(10, "a"), "shrunk", ""},
		{"rewritten", one.checkpoint(11, "c"), "changed", ""},
		{"another key", rekeyed.checkpoint(12, "d"), "key", ""},
		{"both keys", string(twice), "", "one"},
		{"signed by another", string(must(note.Sign(&note.Note{Text: "log.test/one\n13\n" + base64.StdEncoding.EncodeToString(make([]byte, 32)) + "\n"}, two.signer))), "malformed", ""},
		{"nonsense", "x", "malformed", ""},
		{"no size", string(must(note.Sign(&note.Note{Text: "log.test/two\n-1\n" + base64.StdEncoding.EncodeToString(make([]byte, 32)) + "\n"}, two.signer))), "malformed", ""},
		{"short hash", string(must(note.Sign(&note.Note{Text: "log.test/two\n4\nAAAA\n"}, two.signer))), "malformed", ""},
		{"too few lines", string(must(note.Sign(&note.Note{Text: "log.test/two\n4\n"}, two.signer))), "malformed", ""},
		{"too long", one.checkpoint(14, "e") + strings.Repeat("x", 5000), "malformed", ""},
	} {
		before := a.metric("chancery_agent_log_inconsistencies_total")
		version++
		u := w.update(version, 1)
		u.Checkpoints = []string{tc.text}
		if r := st.push(u); r.GetAcknowledged() != version { // roots and CRLs do not wait for a log
			t.Errorf("%s: it says %v", tc.name, r)
		}
		if n := a.metric("chancery_agent_log_inconsistencies_total") - before; (n == 1) != (tc.kind != "") || n > 1 {
			t.Errorf("%s: %v alarms, want kind %q", tc.name, n, tc.kind)
		}
		if tc.origin != "" {
			kept[tc.origin] = tc.text
		}
		want := kept["one"]
		if kept["two"] != "" {
			want += "|" + kept["two"]
		}
		if got := strings.Join(a.Checkpoints(), "|"); got != want {
			t.Errorf("%s: kept are %q, want %q", tc.name, got, want)
		}
	}
	for _, text := range []string{"it has 10 entries; 11 were there before", "root hash at size 11", "signed with key"} {
		if !strings.Contains(a.log.String(), text) {
			t.Errorf("the log does not say %q: %s", text, a.log)
		}
	}
	var many []string
	for i := range 105 {
		many = append(many, newIssueLog(fmt.Sprintf("log.test/%d", i)).checkpoint(1, "x"))
	}
	u := w.update(version+1, 1)
	u.Checkpoints = many
	st.push(u)
	if n := len(a.Checkpoints()); n != 100 {
		t.Errorf("%d checkpoints are kept, want 100", n)
	}
}

// The answer to Issue carries checkpoints, too.
func TestD21CheckpointsOfIssue(t *testing.T) {
	w := newWorld(t)
	own := w.own.Load()
	log := newIssueLog("log.test/one")
	var seen metadata.MD
	answer := &chanceryv1.IssueResponse{
		Results:     []*chanceryv1.Result{{Outcome: &chanceryv1.Result_Certificate{Certificate: &chanceryv1.Certificate{Chain: [][]byte{own.Leaf().Raw}}}}},
		Bundle:      &chanceryv1.Bundle{TrustDomain: "cluster.local", Roots: [][]byte{w.made.Root.Raw}},
		Checkpoints: []string{log.checkpoint(4, "x")},
	}
	g := grpc.NewServer(grpc.Creds(credentials.NewTLS(trust.ServerTLS(w.own.Load))))
	chanceryv1.RegisterIssuanceServer(g, lying{answer: answer, seen: &seen})
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	go g.Serve(l)
	t.Cleanup(g.Stop)
	c := w.config()
	c.Servers = []string{l.Addr().String()}
	asking := client.New(c)
	if _, _, err := asking.Issue(t.Context(), newKey()); err != nil {
		t.Fatal(err)
	}
	if got := asking.Checkpoints(); len(got) != 1 || got[0] != answer.GetCheckpoints()[0] {
		t.Errorf("kept are %q", got)
	}
}
