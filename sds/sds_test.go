package sds

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"github.com/prometheus/client_golang/prometheus"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/chancery-project/chancery/sds/secret"
	"github.com/chancery-project/chancery/sds/socket"
	"github.com/chancery-project/chancery/trust"
)

// viewBox is a Source whose view a test replaces.
type viewBox struct {
	mu      sync.Mutex // guards both
	view    *View
	changed chan struct{}
}

func newBox(v *View) *viewBox { return &viewBox{view: v, changed: make(chan struct{})} }

func (b *viewBox) source() (*View, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.view, b.changed
}

// set replaces the view; the generation counts up by itself.
func (b *viewBox) set(v View) {
	b.mu.Lock()
	defer b.mu.Unlock()
	v.Generation = b.view.Generation + 1
	b.view = &v
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *viewBox) attest(context.Context, Peer) (Source, error) { return b.source, nil }

// agent is a server under test with a client connection to it.
type agent struct {
	t      *testing.T
	server *Server
	socket string // empty over bufconn
	conn   *grpc.ClientConn
	log    *safeBuffer
	reg    *prometheus.Registry
	stop   func() error // ends Run and returns its error; called at the end of the test if not before
}

type safeBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// start runs a server on a real Unix socket.
func start(t *testing.T, cfg Config) *agent {
	t.Helper()
	path := filepath.Join(t.TempDir(), "run", "agent.sock")
	ln, err := Listen(path)
	must(t, err)
	a := newAgent(t, cfg, ln, socket.Credentials{})
	a.socket = "unix://" + path
	a.dial(a.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	return a
}

// startInBubble runs a server over bufconn, for tests of time in a synctest bubble.
func startInBubble(t *testing.T, cfg Config) *agent {
	t.Helper()
	ln := bufconn.Listen(1 << 16)
	a := newAgent(t, cfg, ln, knownPeer{})
	a.dial("passthrough:bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return ln.DialContext(ctx) }))
	return a
}

// knownPeer stands in for socket.Credentials where there is no socket.
type knownPeer struct{ socket.Credentials }

func (knownPeer) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return c, socket.Info{Peer: Peer{UID: 1000}}, nil
}

func (k knownPeer) Clone() credentials.TransportCredentials { return k }

func newAgent(t *testing.T, cfg Config, ln net.Listener, creds credentials.TransportCredentials) *agent {
	t.Helper()
	a := &agent{t: t, log: new(safeBuffer), reg: prometheus.NewRegistry()}
	cfg.Logger = slog.New(slog.NewTextHandler(a.log, nil))
	cfg.Metrics = NewMetrics(a.reg)
	server, err := NewServer(cfg)
	must(t, err)
	a.server = server
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.serve(ctx, ln, creds) }()
	a.stop = sync.OnceValue(func() error { cancel(); return <-ended })
	t.Cleanup(func() { must(t, a.stop()) })
	return a
}

func (a *agent) dial(target string, opts ...grpc.DialOption) {
	a.t.Helper()
	conn, err := grpc.NewClient(target, opts...)
	must(a.t, err)
	a.conn = conn
	a.t.Cleanup(func() { conn.Close() })
}

func (a *agent) context() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	a.t.Cleanup(cancel)
	return ctx
}

// metric returns the value of a counter or gauge with one label.
func (a *agent) metric(name, label string) float64 {
	a.t.Helper()
	families, err := a.reg.Gather()
	must(a.t, err)
	for _, f := range families {
		if f.GetName() != "chancery_agent_"+name {
			continue
		}
		for _, m := range f.GetMetric() {
			if m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

// sotw is a state-of-the-world client.
type sotw struct {
	t      *testing.T
	stream secretv3.SecretDiscoveryService_StreamSecretsClient
	names  []string
	last   *discoveryv3.DiscoveryResponse
}

func (a *agent) sotw(names ...string) *sotw {
	a.t.Helper()
	stream, err := secretv3.NewSecretDiscoveryServiceClient(a.conn).StreamSecrets(a.context())
	must(a.t, err)
	c := &sotw{t: a.t, stream: stream, names: names}
	c.send(&discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResourceNames: names, Node: &corev3.Node{Id: "proxy-1"}})
	return c
}

func (c *sotw) send(r *discoveryv3.DiscoveryRequest) {
	c.t.Helper()
	if err := c.stream.Send(r); err != io.EOF { // the server has ended the stream; Recv says why
		must(c.t, err)
	}
}

// next receives a response and returns its secrets by name.
func (c *sotw) next() map[string]*tlsv3.Secret {
	c.t.Helper()
	r, err := c.stream.Recv()
	must(c.t, err)
	if r.GetTypeUrl() != typeURL || r.GetNonce() == "" || c.last != nil && r.GetNonce() == c.last.GetNonce() {
		c.t.Fatalf("type %q, nonce %q after %q", r.GetTypeUrl(), r.GetNonce(), c.last.GetNonce())
	}
	c.last = r
	return unpack(c.t, r.GetResources())
}

// ack answers the last response, and from now on asks for names, if any are given.
func (c *sotw) ack(names ...string) {
	c.t.Helper()
	if len(names) > 0 {
		c.names = names
	}
	c.send(&discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResourceNames: c.names, VersionInfo: c.last.GetVersionInfo(), ResponseNonce: c.last.GetNonce()})
}

func (c *sotw) nackWith(message string) {
	c.t.Helper()
	c.send(&discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResourceNames: c.names, ResponseNonce: c.last.GetNonce(),
		ErrorDetail: &rpcstatus.Status{Code: int32(codes.InvalidArgument), Message: message}})
}

func unpack(t *testing.T, packed []*anypb.Any) map[string]*tlsv3.Secret {
	t.Helper()
	out := make(map[string]*tlsv3.Secret)
	for _, p := range packed {
		s := new(tlsv3.Secret)
		must(t, p.UnmarshalTo(s))
		out[s.GetName()] = s
	}
	return out
}

func namesOf(m map[string]*tlsv3.Secret) string {
	var names []string
	for n := range m {
		names = append(names, n)
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

func want[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}

func wantCode(t *testing.T, err error, code codes.Code, text string) {
	t.Helper()
	if status.Code(err) != code || !strings.Contains(err.Error(), text) {
		t.Fatalf("got %v, want %v with %q", err, code, text)
	}
}

// wantIdentity checks that a secret is the chain and key of id.
func wantIdentity(t *testing.T, s *tlsv3.Secret, id *trust.Identity) {
	t.Helper()
	chain, err := trust.ParseCertificates(s.GetTlsCertificate().GetCertificateChain().GetInlineBytes())
	must(t, err)
	key, err := trust.ParseKey(s.GetTlsCertificate().GetPrivateKey().GetInlineBytes())
	must(t, err)
	if len(chain) != len(id.Chain) || !chain[0].Equal(id.Leaf()) || !trust.SameKey(key.Public(), id.Key.Public()) {
		t.Fatalf("secret %s is not the chain and key of %s %s", s.GetName(), id.ID, id.Serial())
	}
	for _, c := range chain {
		if bytes.Equal(c.RawSubject, c.RawIssuer) {
			t.Fatalf("secret %s has the root in its chain", s.GetName())
		}
	}
}

// trustedCA returns the roots of a context, in the SPIFFE validator those of all its domains.
func trustedCA(s *tlsv3.Secret) string {
	if typed := s.GetValidationContext().GetCustomValidatorConfig().GetTypedConfig(); typed != nil {
		cfg, all := new(tlsv3.SPIFFECertValidatorConfig), ""
		if err := typed.UnmarshalTo(cfg); err != nil {
			return err.Error()
		}
		for _, d := range cfg.GetTrustDomains() {
			all += string(d.GetTrustBundle().GetInlineBytes())
		}
		return all
	}
	return string(s.GetValidationContext().GetTrustedCa().GetInlineBytes())
}

// waitFor waits until the server's only stream has come to a state that the client is not told of, such as an ACK.
func (a *agent) waitFor(what string, cond func(StreamStatus) bool) StreamStatus {
	a.t.Helper()
	return a.waitForAll(what, 1, cond)[0]
}

// waitForAll waits until the server has n streams, all of them in that state.
func (a *agent) waitForAll(what string, n int, cond func(StreamStatus) bool) []StreamStatus {
	a.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		all := a.server.Streams()
		if len(all) == n && !slices.ContainsFunc(all, func(st StreamStatus) bool { return !cond(st) }) {
			return all
		}
		if time.Now().After(end) {
			a.t.Fatalf("never came to be: %s; streams: %+v", what, all)
		}
	}
}

func anyState(StreamStatus) bool { return true }

func TestNames(t *testing.T) {
	ca, other := newCA(t, "cluster.local"), newCA(t, "other.test")
	web, api := ca.identity("/ns/foo/sa/web"), ca.identity("/ns/foo/sa/api")
	v := &View{
		Identities: []*trust.Identity{web, api},
		Bundles:    []*trust.Bundle{ca.bundle(), other.bundle()},
		Naming:     map[string][]trust.ID{"foo/api": {web.ID, api.ID, web.ID}, "foo/none": {}},
		Generation: 1,
	}
	a := start(t, Config{Attest: newBox(v).attest})
	all := []string{"default", "ROOTCA", "ALL", "spiffe://cluster.local", "spiffe://other.test", web.ID.String(), api.ID.String(), "service:foo/api"}
	c := a.sotw(all...)
	got := c.next()
	want(t, "resources", len(got), len(all))
	wantIdentity(t, got["default"], web)
	wantIdentity(t, got[web.ID.String()], web)
	wantIdentity(t, got[api.ID.String()], api)
	for name, roots := range map[string]*trust.Bundle{"ROOTCA": v.Bundles[0], "spiffe://cluster.local": v.Bundles[0],
		"spiffe://other.test": v.Bundles[1], "service:foo/api": v.Bundles[0]} {
		want(t, name, trustedCA(got[name]), string(roots.PEM()))
		if n := len(got[name].GetValidationContext().GetMatchTypedSubjectAltNames()); n > 0 != strings.HasPrefix(name, "service:") {
			t.Errorf("%s has %d SAN matchers", name, n)
		}
	}
	var sans []string
	for _, m := range got["service:foo/api"].GetValidationContext().GetMatchTypedSubjectAltNames() {
		want(t, "SAN type", m.GetSanType(), tlsv3.SubjectAltNameMatcher_URI)
		sans = append(sans, m.GetMatcher().GetExact())
	}
	want(t, "SANs", strings.Join(sans, " "), api.ID.String()+" "+web.ID.String())

	validator := got["ALL"].GetValidationContext().GetCustomValidatorConfig()
	want(t, "validator", validator.GetName(), "envoy.tls.cert_validator.spiffe")
	spiffe := new(tlsv3.SPIFFECertValidatorConfig)
	must(t, validator.GetTypedConfig().UnmarshalTo(spiffe))
	for i, b := range v.Bundles {
		want(t, "domain", spiffe.GetTrustDomains()[i].GetName(), b.Domain().String())
		want(t, "roots", string(spiffe.GetTrustDomains()[i].GetTrustBundle().GetInlineBytes()), string(b.PEM()))
	}
	for name, s := range got { // what Envoy itself would check on receipt
		if err := s.ValidateAll(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUnknownNamesAreAnsweredOneByOne(t *testing.T) {
	ca := newCA(t, "cluster.local")
	web := ca.identity("/ns/foo/sa/web")
	base := View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{ca.bundle()}, Naming: map[string][]trust.ID{"foo/web": {web.ID}}}
	box := newBox(&base)
	a := start(t, Config{Attest: box.attest})
	foreign := "spiffe://cluster.local/ns/foo/sa/other"
	bad := []string{foreign, "spiffe://nowhere.test", "service:foo", "service:foo/none", "file-cert:/etc/c~/etc/k",
		"file-root:/etc/passwd", "kubernetes://secret", "", "spiffe://"}

	c := a.sotw(append([]string{"default"}, bad...)...)
	want(t, "known names", namesOf(c.next()), "default")
	c.ack(bad...)
	want(t, "known names", namesOf(c.next()), "")
	c.ack()
	want(t, "counted", a.metric("unknown_names_total", "service"), 2)
	want(t, "counted", a.metric("unknown_names_total", "other"), 2)

	// One of them becomes known.
	other := ca.identity("/ns/foo/sa/other")
	v := base
	v.Identities = []*trust.Identity{web, other}
	box.set(v)
	got := c.next()
	want(t, "known names", namesOf(got), foreign)
	wantIdentity(t, got[foreign], other)
}

func TestStateOfTheWorldSendsOnlyChanges(t *testing.T) {
	ca, other := newCA(t, "cluster.local"), newCA(t, "other.test")
	old, renewed := ca.identity("/ns/foo/sa/web"), ca.identity("/ns/foo/sa/web")
	bundle := ca.bundle()
	box := newBox(&View{Identities: []*trust.Identity{old}, Bundles: []*trust.Bundle{bundle}, Generation: 1})
	a := start(t, Config{Attest: box.attest})
	c := a.sotw("default")
	wantIdentity(t, c.next()["default"], old)
	first := c.last
	c.ack()
	st := a.waitFor("ACK", func(st StreamStatus) bool { return st.Resources[0].Acked.Generation == 1 })
	want(t, "node", st.Node, "proxy-1")
	want(t, "api", st.API, APIStateOfTheWorld)
	want(t, "uid", st.Peer.UID, uint32(os.Getuid()))
	want(t, "pid", st.Peer.PID, int32(os.Getpid()))
	want(t, "acked", st.Resources[0].Acked.Version, first.GetVersionInfo())

	// A new bundle does not concern this stream, but it is confirmed with it: the content is the same.
	box.set(View{Identities: []*trust.Identity{old}, Bundles: []*trust.Bundle{bundle, other.bundle()}})
	a.waitFor("confirmed generation", func(st StreamStatus) bool { return st.Resources[0].Acked.Generation == 2 })
	box.set(View{Identities: []*trust.Identity{renewed}, Bundles: []*trust.Bundle{bundle}})
	wantIdentity(t, c.next()["default"], renewed) // and nothing came in between
	want(t, "pushes", a.metric("pushes_total", APIStateOfTheWorld), 2)

	// A stale answer is ignored, even if it asks for other names.
	c.send(&discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResourceNames: []string{"ROOTCA"}, ResponseNonce: first.GetNonce()})
	// A NACK is recorded and not answered by sending the same again.
	c.nackWith("key does not match")
	st = a.waitFor("NACK", func(st StreamStatus) bool { return st.LastNACK != nil })
	want(t, "NACK", st.LastNACK.Message, "key does not match")
	want(t, "NACK of", strings.Join(st.LastNACK.Names, " "), "default")
	want(t, "still acknowledged", st.Resources[0].Acked.Version, first.GetVersionInfo())
	want(t, "counted", a.metric("nacks_total", "default"), 1)
	if !strings.Contains(a.log.String(), "key does not match") {
		t.Error("the log does not have Envoy's message")
	}
	c.ack("default", "ROOTCA") // a new name is answered at once
	want(t, "names", namesOf(c.next()), "ROOTCA default")
	want(t, "pushes", a.metric("pushes_total", APIStateOfTheWorld), 3)
}

func TestWildcard(t *testing.T) {
	ca := newCA(t, "cluster.local")
	web, api := ca.identity("/ns/foo/sa/web"), ca.identity("/ns/foo/sa/api")
	box := newBox(&View{Identities: []*trust.Identity{web, api}, Bundles: []*trust.Bundle{ca.bundle()}})
	a := start(t, Config{Attest: box.attest})
	all := strings.Join([]string{"ROOTCA", "default", api.ID.String(), web.ID.String()}, " ")
	less := strings.Join([]string{"ROOTCA", "default", web.ID.String()}, " ")

	c := a.sotw()
	want(t, "names", namesOf(c.next()), all)
	c.ack("ROOTCA")
	want(t, "names", namesOf(c.next()), "ROOTCA")
	c.names = nil // once names were given, none means none
	c.ack()
	c.ack("default")
	want(t, "names", namesOf(c.next()), "default")

	d := a.delta(nil)
	want(t, "names", namesOf(d.next()), all)
	box.set(View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{ca.bundle()}})
	want(t, "names", namesOf(d.next()), "")
	want(t, "removed", strings.Join(d.last.GetRemovedResources(), " "), api.ID.String())

	explicit := a.sotw("*")
	want(t, "names", namesOf(explicit.next()), less)
}

func TestPendingNamesWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := newCA(t, "cluster.local")
		box := newBox(new(View))
		a := startInBubble(t, Config{Attest: box.attest})
		c, d := a.sotw("default", "ROOTCA"), a.delta(map[string]string{"default": "kept from before"}, "default")
		_, err := a.fetch("default")
		wantCode(t, err, codes.Unavailable, "nothing has been issued")
		synctest.Wait()
		want(t, "pushes", a.metric("pushes_total", APIStateOfTheWorld)+a.metric("pushes_total", APIDelta), 0)
		want(t, "unknown", a.metric("unknown_names_total", "default"), 0)
		web := ca.identity("/ns/foo/sa/web")
		box.set(View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{ca.bundle()}})
		want(t, "names", namesOf(c.next()), "ROOTCA default")
		wantIdentity(t, d.next()["default"], web)
	})
}

func TestRefusals(t *testing.T) {
	ca := newCA(t, "cluster.local")
	box := newBox(&View{Identities: []*trust.Identity{ca.identity("/a")}, Bundles: []*trust.Bundle{ca.bundle()}})
	a := start(t, Config{Attest: box.attest})
	wrong := "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	many := make([]string, maxNames+1)
	for i := range many {
		many[i] = strings.Repeat("n", i)
	}
	for name, r := range map[string]*discoveryv3.DiscoveryRequest{
		typeURL:        {TypeUrl: wrong, ResourceNames: []string{"default"}},
		"1001":         {TypeUrl: typeURL, ResourceNames: many},
		"at most 4096": {TypeUrl: typeURL, ResourceNames: []string{strings.Repeat("x", 5000)}},
	} {
		c := a.sotw()
		c.next()
		r.ResponseNonce = c.last.GetNonce()
		c.send(r)
		_, err := c.stream.Recv()
		wantCode(t, err, codes.InvalidArgument, name)

		_, err = secretv3.NewSecretDiscoveryServiceClient(a.conn).FetchSecrets(a.context(), r)
		wantCode(t, err, codes.InvalidArgument, name)

		d := a.delta(nil, "default")
		d.next()
		d.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResourceNamesSubscribe: r.GetResourceNames()})
		_, err = d.stream.Recv()
		wantCode(t, err, codes.InvalidArgument, strings.Replace(name, "1001", "1000", 1))
	}
	a.waitForAll("no stream left", 0, anyState)
}

func TestAttestRefuses(t *testing.T) {
	a := start(t, Config{Attest: func(_ context.Context, p Peer) (Source, error) {
		if p.UID != uint32(os.Getuid()) {
			return nil, errors.New("wrong peer")
		}
		return nil, &Refused{Reason: "uid_not_allowed", Err: errors.New("uid 0 is in no list")}
	}})
	c := a.sotw("default")
	_, err := c.stream.Recv()
	wantCode(t, err, codes.PermissionDenied, "no identity issued: uid_not_allowed")
	if strings.Contains(err.Error(), "no list") {
		t.Error("the caller was told the details")
	}
	if !strings.Contains(a.log.String(), "no list") {
		t.Error("the log lacks the details")
	}
	_, err = a.fetch("default")
	wantCode(t, err, codes.PermissionDenied, "no identity issued")
	want(t, "counted", a.metric("attestation_failures_total", "uid_not_allowed"), 2)
	want(t, "streams", len(a.server.Streams()), 0)
}

func (a *agent) fetch(names ...string) (*discoveryv3.DiscoveryResponse, error) {
	return secretv3.NewSecretDiscoveryServiceClient(a.conn).FetchSecrets(a.context(), &discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResourceNames: names})
}

func TestFetch(t *testing.T) {
	ca := newCA(t, "cluster.local")
	web := ca.identity("/ns/foo/sa/web")
	a := start(t, Config{Attest: newBox(&View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{ca.bundle()}}).attest})
	r, err := a.fetch("default", "ROOTCA", "nonsense")
	must(t, err)
	got := unpack(t, r.GetResources())
	want(t, "names", namesOf(got), "ROOTCA default")
	wantIdentity(t, got["default"], web)
	r, err = a.fetch("nonsense")
	must(t, err)
	want(t, "resources", len(r.GetResources()), 0)
}

// delta is a delta client.
type delta struct {
	t      *testing.T
	stream secretv3.SecretDiscoveryService_DeltaSecretsClient
	last   *discoveryv3.DeltaDiscoveryResponse
}

func (a *agent) delta(initial map[string]string, names ...string) *delta {
	a.t.Helper()
	stream, err := secretv3.NewSecretDiscoveryServiceClient(a.conn).DeltaSecrets(a.context())
	must(a.t, err)
	d := &delta{t: a.t, stream: stream}
	d.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesSubscribe: names, InitialResourceVersions: initial, Node: &corev3.Node{Id: "proxy-2"}})
	return d
}

func (d *delta) send(r *discoveryv3.DeltaDiscoveryRequest) {
	d.t.Helper()
	if err := d.stream.Send(r); err != io.EOF {
		must(d.t, err)
	}
}

func (d *delta) next() map[string]*tlsv3.Secret {
	d.t.Helper()
	r, err := d.stream.Recv()
	must(d.t, err)
	d.last = r
	var packed []*anypb.Any
	for _, res := range r.GetResources() {
		packed = append(packed, res.GetResource())
	}
	return unpack(d.t, packed)
}

func (d *delta) ack() {
	d.t.Helper()
	d.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResponseNonce: d.last.GetNonce()})
}

func (d *delta) removed() string { return strings.Join(d.last.GetRemovedResources(), " ") }

func TestDelta(t *testing.T) {
	ca, other := newCA(t, "cluster.local"), newCA(t, "other.test")
	old, renewed := ca.identity("/ns/foo/sa/web"), ca.identity("/ns/foo/sa/web")
	ownBundle, otherBundle := ca.bundle(), other.bundle()
	both := []*trust.Bundle{ownBundle, otherBundle}
	box := newBox(&View{Identities: []*trust.Identity{old}, Bundles: both, Generation: 1})
	a := start(t, Config{Attest: box.attest})

	d := a.delta(nil, "default", "spiffe://other.test", "nonsense")
	want(t, "names", namesOf(d.next()), "default spiffe://other.test")
	want(t, "removed", d.removed(), "nonsense")
	d.ack()
	a.waitFor("ACK", func(st StreamStatus) bool { return st.Resources[0].Acked.Generation == 1 })
	versions := make(map[string]string)
	for _, r := range d.last.GetResources() {
		versions[r.GetName()] = r.GetVersion()
	}

	// Only what changed is sent.
	box.set(View{Identities: []*trust.Identity{renewed}, Bundles: both})
	got := d.next()
	want(t, "names", namesOf(got), "default")
	wantIdentity(t, got["default"], renewed)
	d.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResponseNonce: d.last.GetNonce(), ErrorDetail: &rpcstatus.Status{Message: "no"}})
	st := a.waitFor("NACK", func(st StreamStatus) bool { return st.LastNACK != nil })
	want(t, "acked", st.Resources[0].Acked.Version, versions["default"])

	// Subscribing again sends again; unsubscribing ends it.
	d.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesSubscribe: []string{"default"}})
	want(t, "names", namesOf(d.next()), "default")
	d.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesUnsubscribe: []string{"default"}})
	a.waitFor("unsubscribed", func(st StreamStatus) bool { return len(st.Resources) == 2 })

	// A federated domain goes. Envoy ignores a removal, so the roots are first replaced by a CA that nobody has.
	box.set(View{Identities: []*trust.Identity{renewed}, Bundles: []*trust.Bundle{ownBundle}})
	roots, err := trust.ParseCertificates([]byte(trustedCA(d.next()["spiffe://other.test"])))
	must(t, err)
	want(t, "root", roots[0].Subject.CommonName, "nobody is trusted")
	want(t, "removed", d.removed(), "")
	d.next()
	want(t, "removed", d.removed(), "spiffe://other.test")
	box.set(View{Identities: []*trust.Identity{renewed}, Bundles: both})
	want(t, "roots", trustedCA(d.next()["spiffe://other.test"]), string(otherBundle.PEM()))
}

func TestDeltaReconnect(t *testing.T) {
	ca := newCA(t, "cluster.local")
	web := ca.identity("/ns/foo/sa/web")
	box := newBox(&View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{ca.bundle()}, Generation: 7})
	a := start(t, Config{Attest: box.attest})
	d := a.delta(nil, "default", "ROOTCA")
	d.next()
	versions := map[string]string{"spiffe://gone.test": "x"}
	for _, r := range d.last.GetResources() {
		versions[r.GetName()] = r.GetVersion()
	}
	versions["ROOTCA"] = "another"
	must(t, d.stream.CloseSend())
	a.waitForAll("no stream left", 0, anyState)

	d = a.delta(versions, "default", "ROOTCA", "spiffe://gone.test")
	want(t, "names", namesOf(d.next()), "ROOTCA") // what the client still has is not sent again
	want(t, "removed", d.removed(), "spiffe://gone.test")
	st := a.waitFor("stream", anyState)
	i := slices.IndexFunc(st.Resources, func(r ResourceStatus) bool { return r.Name == "default" })
	want(t, "confirmed", st.Resources[i].Acked, Confirmed{versions["default"], 7})
}

func TestContextsThatTrustNobody(t *testing.T) {
	ca, other := newCA(t, "cluster.local"), newCA(t, "other.test")
	web := ca.identity("/ns/foo/sa/web")
	ids := []*trust.Identity{web}
	naming := map[string][]trust.ID{"foo/web": {web.ID}}
	box := newBox(&View{Identities: ids, Bundles: []*trust.Bundle{ca.bundle(), other.bundle()}, Naming: naming})
	a := start(t, Config{Attest: box.attest})
	c := a.sotw("ROOTCA", "spiffe://other.test", "service:foo/web", "ALL")
	c.next()
	c.ack()
	// The own bundle is emptied (trust nothing), the other domain and the service's identities go.
	box.set(View{Identities: ids, Bundles: []*trust.Bundle{ca.emptyBundle()}})
	got := c.next()
	want(t, "names", namesOf(got), "ALL ROOTCA service:foo/web spiffe://other.test")
	for _, name := range []string{"ROOTCA", "spiffe://other.test", "service:foo/web"} {
		roots, err := trust.ParseCertificates([]byte(trustedCA(got[name])))
		must(t, err)
		if _, err := web.Leaf().Verify(x509Roots(roots)); err == nil || len(roots) != 1 {
			t.Errorf("%s still trusts %s", name, web.ID)
		}
	}
	if strings.Contains(got["ALL"].String(), "other.test") {
		t.Error("ALL still has the domain that went")
	}
	// The state stays as it is until something changes.
	box.set(View{Identities: ids, Bundles: []*trust.Bundle{ca.emptyBundle()}})
	box.set(View{Identities: ids, Bundles: []*trust.Bundle{ca.bundle(), other.bundle()}, Naming: naming})
	want(t, "roots", trustedCA(c.next()["ROOTCA"]), string(ca.bundle().PEM()))
}

func TestSharedMarshalling(t *testing.T) {
	ca := newCA(t, "cluster.local")
	box := newBox(&View{Identities: []*trust.Identity{ca.identity("/a")}, Bundles: []*trust.Bundle{ca.bundle()}})
	s, err := NewServer(Config{Attest: box.attest})
	must(t, err)
	var made []*secret.Resource
	for range 2 {
		sub := &subscription{api: APIDelta, names: make(map[string]*entry)}
		_, err := sub.replace(s, []string{"default", "ALL"})
		must(t, err)
		made = append(made, s.compare(sub, box.view).full...)
	}
	if made[0] != made[2] || made[1] != made[3] {
		t.Error("two streams were given resources of their own")
	}
}

func TestFilesByName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, outside := t.TempDir(), t.TempDir()
		ca := newCA(t, "cluster.local")
		write := func(dir, name string, data []byte) {
			t.Helper()
			must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
		}
		pair := func(dir string, id *trust.Identity) {
			t.Helper()
			key, err := trust.EncodeKey(id.Key)
			must(t, err)
			write(dir, "cert.pem", trust.EncodeCertificates(id.Chain...))
			write(dir, "key.pem", key)
		}
		first, second := ca.identity("/files/one"), ca.identity("/files/two")
		pair(dir, first)
		pair(outside, first)
		must(t, os.Symlink(filepath.Join(outside, "cert.pem"), filepath.Join(dir, "link.pem")))
		nameIn := func(dir string) string { return "file-cert:" + dir + "/cert.pem~" + dir + "/key.pem" }
		name, roots, later := nameIn(dir), "file-root:"+dir+"/cert.pem", "file-root:"+dir+"/later.pem"
		box := newBox(&View{Bundles: []*trust.Bundle{ca.bundle()}})
		a := startInBubble(t, Config{Attest: box.attest, Files: []string{dir}})

		c := a.sotw(name, roots, later, nameIn(outside), nameIn(dir+"/../"+filepath.Base(outside)), "file-root:"+dir+"/link.pem",
			"file-root:cert.pem", "file-root:"+dir, "file-cert:"+dir+"/cert.pem")
		got := c.next()
		want(t, "names", namesOf(got), name+" "+roots)
		wantIdentity(t, got[name], first)
		want(t, "roots", trustedCA(got[roots]), string(trust.EncodeCertificates(first.Chain...)))
		c.ack()

		write(dir, "later.pem", trust.EncodeCertificates(ca.root))
		want(t, "roots", trustedCA(c.next()[later]), string(trust.EncodeCertificates(ca.root)))
		c.ack()
		pair(dir, second)
		wantIdentity(t, c.next()[name], second)
		c.ack()
		must(t, c.stream.CloseSend())
		if _, err := c.stream.Recv(); err != io.EOF {
			t.Fatal(err)
		}
		want(t, "refused", strings.Count(a.log.String(), "file name refused"), 4)
	})
}

// Changes come faster than clients read; every stream still ends up with the last view.
func TestEveryStreamEndsUpWithTheLastView(t *testing.T) {
	const streams, changes = 40, 50
	ca := newCA(t, "cluster.local")
	ids := []*trust.Identity{ca.identity("/a"), ca.identity("/a"), ca.identity("/a")}
	bundles := []*trust.Bundle{ca.bundle()}
	box := newBox(&View{Identities: ids[:1], Bundles: bundles})
	a := start(t, Config{Attest: box.attest})
	last := trust.EncodeCertificates(ids[2].Chain...)
	isLast := func(s *tlsv3.Secret) bool {
		return bytes.Equal(s.GetTlsCertificate().GetCertificateChain().GetInlineBytes(), last)
	}
	var clients sync.WaitGroup
	for range streams {
		clients.Go(func() {
			for c := a.sotw("default", "ROOTCA"); !isLast(c.next()["default"]); c.ack() {
			}
		})
		clients.Go(func() {
			for d := a.delta(nil, "default", "ROOTCA"); !isLast(d.next()["default"]); d.ack() {
			}
		})
	}
	for i := range changes {
		box.set(View{Identities: ids[i%2 : i%2+1], Bundles: bundles})
	}
	box.set(View{Identities: ids[2:], Bundles: bundles})
	clients.Wait()
}

func TestDrain(t *testing.T) {
	ca := newCA(t, "cluster.local")
	box := newBox(&View{Identities: []*trust.Identity{ca.identity("/a")}, Bundles: []*trust.Bundle{ca.bundle()}})
	a := start(t, Config{Attest: box.attest})
	c := a.sotw("default")
	c.next()
	begin := time.Now()
	must(t, a.stop())
	_, err := c.stream.Recv()
	wantCode(t, err, codes.Unavailable, "")
	if took := time.Since(begin); took > 4*time.Second {
		t.Errorf("took %v: the drain ran into its timeout", took)
	}
	want(t, "streams", a.metric("streams", APIStateOfTheWorld), 0)
	if _, err := os.Stat(strings.TrimPrefix(a.socket, "unix://")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket left behind: %v", err)
	}
}

func TestHealthAndReflection(t *testing.T) {
	a := start(t, Config{Attest: newBox(new(View)).attest})
	h := healthv1.NewHealthClient(a.conn)
	for _, service := range []string{"", "SpiffeWorkloadAPI", "envoy.service.secret.v3.SecretDiscoveryService"} {
		r, err := h.Check(a.context(), &healthv1.HealthCheckRequest{Service: service})
		must(t, err)
		want(t, "health of "+service, r.GetStatus(), healthv1.HealthCheckResponse_SERVING)
	}
	stream, err := reflectionv1.NewServerReflectionClient(a.conn).ServerReflectionInfo(a.context())
	must(t, err)
	must(t, stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}))
	r, err := stream.Recv()
	must(t, err)
	if !strings.Contains(r.String(), "SpiffeWorkloadAPI") {
		t.Errorf("reflection does not list the Workload API: %v", r)
	}
}

// What a proxy says of itself is kept in part only, and so is what it has not answered.
func TestBoundsOfWhatAStreamLeaves(t *testing.T) {
	ca := newCA(t, "cluster.local")
	box := newBox(&View{Identities: []*trust.Identity{ca.identity("/a")}, Bundles: []*trust.Bundle{ca.bundle()}})
	a := start(t, Config{Attest: box.attest})
	stream, err := secretv3.NewSecretDiscoveryServiceClient(a.conn).StreamSecrets(a.context())
	must(t, err)
	c := &sotw{t: t, stream: stream, names: []string{"default"}}
	c.send(&discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResourceNames: c.names, Node: &corev3.Node{Id: strings.Repeat("n", 300)}})
	c.next()
	c.nackWith(strings.Repeat("w", 5000))
	st := a.waitFor("NACK", func(st StreamStatus) bool { return st.LastNACK != nil })
	want(t, "node", len(st.Node), maxNodeID)
	want(t, "message", len(st.LastNACK.Message), maxNACKBytes)

	sub := new(subscription)
	for range maxInflight + 10 {
		sub.launch(nil, new(View))
	}
	want(t, "responses without an answer", len(sub.inflight), maxInflight)
}
