package csr_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/json"
	"encoding/pem"
	"errors"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"
	istio "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/kube"
	"github.com/chancery-project/chancery/trust"
)

const (
	tokenIssuer = "https://kubernetes.default.svc"
	webURI      = "spiffe://cluster.local/ns/foo/sa/web"
	dbURI       = "spiffe://cluster.local/ns/foo/sa/db"
)

var td = must(trust.ParseDomain("cluster.local"))

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newKey() crypto.Signer { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }

// tokenKeys sign the tokens of the test's clusters, by key ID.
var tokenKeys = map[string]crypto.Signer{"good": newKey(), "wrong": newKey()}

// world is a real server on loopback with all that belongs to it.
type world struct {
	t       testing.TB
	made    *ca.Created
	issuer  atomic.Pointer[ca.Issuer] // nil: not ready
	own     *trust.Identity           // the server's
	logPath string
	log     *audit.Log
	output  *output // of the server's slog
	pods    *podCluster
	service *csr.Service
	server  *csr.Server
	metrics *prometheus.Registry
	addr    string
	stop    func() error // ends the server and returns what Run did
}

// output is a log's text, safe for concurrent use.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

var errNotReady = errors.New("opening /var/lib/chancery/secret.db: permission denied")

// newWorld starts a server with one cluster, Kubernetes, whose tokens are verified with a key file and whose pods are
// not watched. Changes are applied to the service's config.
func newWorld(t testing.TB, changes ...func(*world, *csr.Config)) *world {
	t.Helper()
	w := &world{t: t, output: &output{}, metrics: prometheus.NewRegistry(), logPath: filepath.Join(t.TempDir(), "audit.jsonl")}
	w.log = must(audit.Open(w.logPath))
	t.Cleanup(func() { w.log.Close() })
	w.made = must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID + 1, Log: w.log}))
	w.issuer.Store(w.newIssuer(w.log, 1, w.made.Root))
	w.own = w.serverIdentity()
	w.pods = newPodCluster(t, "Kubernetes")
	c := csr.Config{
		Domain: td,
		Issuer: func() (*ca.Issuer, error) {
			if i := w.issuer.Load(); i != nil {
				return i, nil
			}
			return nil, errNotReady
		},
		Profile:  must(ca.NewProfile("workload", ca.ProfileConfig{})),
		Clusters: map[string]csr.ClusterConfig{"Kubernetes": {Cluster: newKubeCluster(t, "Kubernetes")}},
		Log:      w.log, Sampler: &ca.Sampler{}, Logger: slog.New(slog.NewTextHandler(w.output, nil)), Metrics: csr.NewMetrics(w.metrics),
	}
	for _, f := range changes {
		f(w, &c)
	}
	w.service = must(csr.NewService(c))
	w.server = csr.NewServer(w.service, func() *trust.Identity { return w.own })
	w.serve()
	return w
}

// withPods lets the cluster Kubernetes know its pods.
func withPods(w *world, c *csr.Config) {
	c.Clusters = map[string]csr.ClusterConfig{"Kubernetes": {Cluster: w.pods}}
}

func (w *world) serve() {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	w.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	server := w.server
	go func() { done <- server.Run(ctx, l) }()
	stop := sync.OnceValue(func() error { cancel(); return <-done })
	w.stop = stop
	w.t.Cleanup(func() {
		if err := stop(); err != nil {
			w.t.Errorf("server: %v", err)
		}
		if !w.service.Idle() {
			w.t.Error("admission still holds slots")
		}
	})
}

// newIssuer returns an issuer of the world's key, whose bundle has the given roots.
func (w *world) newIssuer(log *audit.Log, generation uint64, roots ...*x509.Certificate) *ca.Issuer {
	w.t.Helper()
	bundle := must(trust.NewBundle(td, generation, roots))
	return must(ca.NewIssuer(ca.IssuerConfig{
		Domain: td, Key: w.made.IssuerKey, Chain: []*x509.Certificate{w.made.Issuer}, Bundle: bundle, LogID: ca.MinLogID + 1, Log: log,
	}))
}

func (w *world) serverIdentity() *trust.Identity {
	key, i := newKey(), w.issuer.Load()
	cert := w.certify(ca.ServerProfile(), ca.Request{ID: trust.SystemID(td, "server"), PublicKey: key.Public(), DNSNames: []string{"localhost"}})
	return must(trust.NewIdentity(trust.SystemID(td, "server"), append([]*x509.Certificate{cert}, i.Chain()...), key, i.Bundle(), time.Now()))
}

func (w *world) certify(p *ca.Profile, r ca.Request) *x509.Certificate {
	i := w.issuer.Load()
	return must(x509.ParseCertificate(must(i.Issue(w.t.Context(), must(i.Prepare(p, r)))).DER))
}

// svid returns an SVID with the given attestation, nil for none.
func (w *world) svid(id string, att *ca.Attestation) *trust.Identity {
	key := newKey()
	p := must(ca.NewProfile("test", ca.ProfileConfig{IDPaths: []string{"/ns/*/sa/*", "/vm/*"}}))
	cert := w.certify(p, ca.Request{ID: must(trust.ParseID(id)), PublicKey: key.Public(), Attestation: att})
	return &trust.Identity{Chain: append([]*x509.Certificate{cert}, w.issuer.Load().Chain()...), Key: key}
}

// resign returns the identity with its leaf changed and signed again by key, which need not be the issuer's.
func (w *world) resign(i *trust.Identity, key crypto.Signer, change func(*x509.Certificate)) *trust.Identity {
	leaf := *i.Leaf()
	leaf.ExtraExtensions = leaf.Extensions
	change(&leaf)
	parent := *w.made.Issuer
	parent.PublicKey = key.Public()
	der := must(x509.CreateCertificate(rand.Reader, &leaf, &parent, i.Key.Public(), key))
	return &trust.Identity{Chain: append([]*x509.Certificate{must(x509.ParseCertificate(der))}, i.Chain[1:]...), Key: i.Key}
}

// fresh is the attestation of a token of the cluster just seen.
func fresh(cluster string) *ca.Attestation {
	return &ca.Attestation{Cluster: cluster, Node: "node-1", Time: time.Now()}
}

func newKubeCluster(t testing.TB, name string) *kube.Cluster {
	t.Helper()
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{KeyID: name, Key: tokenKeys["good"].Public(), Use: "sig"}}}
	file := filepath.Join(t.TempDir(), "jwks.json")
	if err := os.WriteFile(file, must(json.Marshal(set)), 0o600); err != nil {
		t.Fatal(err)
	}
	return must(kube.New(kube.Config{Name: name, Issuer: tokenIssuer, Audiences: []string{"istio-ca"}, JWKSFile: file}))
}

// pod is a pod that runs.
type pod struct{ uid, namespace, account, node string }

// podCluster knows the pods of its cluster, in memory: tokens are verified as everywhere, and count only while their
// pod is there.
type podCluster struct {
	*kube.Cluster
	name   string
	agents []string // "namespace/account"

	mu   sync.Mutex // guards pods
	pods map[string]pod
}

func newPodCluster(t testing.TB, name string) *podCluster {
	p := &podCluster{Cluster: newKubeCluster(t, name), name: name, agents: []string{"istio-system/ztunnel"}, pods: map[string]pod{}}
	for _, x := range []pod{
		{"uid-web", "foo", "web", "node-1"}, {"uid-db", "foo", "db", "node-1"}, {"uid-far", "foo", "far", "node-2"},
		{"uid-zt", "istio-system", "ztunnel", "node-1"},
	} {
		p.pods[x.uid] = x
	}
	return p
}

func (p *podCluster) remove(uid string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pods, uid)
}

func (p *podCluster) find(match func(pod) bool) (pod, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.pods {
		if match(x) {
			return x, true
		}
	}
	return pod{}, false
}

func (p *podCluster) Authenticate(ctx context.Context, token string) (csr.Caller, error) {
	c, err := p.Cluster.Authenticate(ctx, token)
	if err != nil || c.PodUID == "" {
		return c, err
	}
	x, ok := p.find(func(x pod) bool { return x.uid == c.PodUID })
	if !ok {
		return csr.Caller{}, &csr.Denial{Code: codes.Unauthenticated, Reason: csr.ReasonPodGone, Detail: "the token's pod is gone"}
	}
	c.Node = x.node
	return c, nil
}

func (p *podCluster) Alive(_ context.Context, namespace, account, node string, hash []byte) error {
	x, ok := p.find(func(x pod) bool { return bytes.Equal(csr.PodHash(p.name, x.uid), hash) })
	switch {
	case !ok:
		return &csr.Denial{Code: codes.Unauthenticated, Reason: csr.ReasonPodGone, Detail: "the SVID's pod is gone"}
	case x.namespace != namespace || x.account != account || x.node != node:
		return &csr.Denial{Code: codes.Unauthenticated, Reason: csr.ReasonPodMismatch, Detail: "the SVID's pod is another's"}
	}
	return nil
}

func (p *podCluster) OnNode(_ context.Context, c csr.Caller, namespace, account string) error {
	if !slices.Contains(p.agents, c.Namespace+"/"+c.ServiceAccount) {
		return &csr.Denial{Code: codes.PermissionDenied, Reason: csr.ReasonNotNodeAgent, Detail: c.ServiceAccount + " is no node agent"}
	}
	if _, ok := p.find(func(x pod) bool { return x.namespace == namespace && x.account == account && x.node == c.Node }); !ok {
		return &csr.Denial{Code: codes.PermissionDenied, Reason: csr.ReasonNotOnNode, Detail: "no such pod on " + c.Node}
	}
	return nil
}

// broken is a cluster whose calls all end as fail does.
type broken struct{ fail func() error }

func (b broken) Authenticate(context.Context, string) (csr.Caller, error) {
	return csr.Caller{}, b.fail()
}
func (b broken) Alive(context.Context, string, string, string, []byte) error { return b.fail() }
func (b broken) OnNode(context.Context, csr.Caller, string, string) error    { return b.fail() }
func withBroken(name string, fail func() error) func(*world, *csr.Config) {
	return func(_ *world, c *csr.Config) { c.Clusters[name] = csr.ClusterConfig{Cluster: broken{fail}} }
}

// claims describes a token; the zero value is that of pod web-0 of foo/web on node-1, not bound to a pod.
type claims struct {
	namespace, account string
	uid                string // of the pod; empty: not bound
	audience           string
	key, kid           string
	expires            time.Duration
}

// token makes a real token.
func token(c claims) string {
	or := func(s *string, def string) {
		if *s == "" {
			*s = def
		}
	}
	or(&c.namespace, "foo")
	or(&c.account, "web")
	or(&c.audience, "istio-ca")
	or(&c.key, "good")
	or(&c.kid, "Kubernetes")
	if c.expires == 0 {
		c.expires = time.Hour
	}
	now := time.Now()
	k := map[string]any{"namespace": c.namespace, "serviceaccount": map[string]string{"name": c.account, "uid": "sa-uid"}}
	if c.uid != "" {
		k["pod"] = map[string]string{"name": c.account + "-0", "uid": c.uid}
	}
	payload := must(json.Marshal(map[string]any{
		"iss": tokenIssuer, "sub": "system:serviceaccount:" + c.namespace + ":" + c.account, "aud": []string{c.audience},
		"iat": now.Unix(), "exp": now.Add(c.expires).Unix(), "jti": "jti-" + c.account, "kubernetes.io": k,
	}))
	s := must(jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: tokenKeys[c.key], KeyID: c.kid}}, nil))
	return must(must(s.Sign(payload)).CompactSerialize())
}

// ztunnel is the token of the node agent on node-1.
func ztunnel() string {
	return token(claims{namespace: "istio-system", account: "ztunnel", uid: "uid-zt"})
}

// newCSR returns a CSR in DER; an empty uri asks for no name.
func newCSR(key crypto.Signer, uri string) []byte {
	var r x509.CertificateRequest
	if uri != "" {
		r.URIs = []*url.URL{must(url.Parse(uri))}
	}
	return must(x509.CreateCertificateRequest(rand.Reader, &r, key))
}

func toPEM(der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
}

// call is what a client brings along.
type call struct {
	headers []string // name, value, ...
	show    *trust.Identity
}

func bearer(token string, more ...string) call {
	return call{headers: append([]string{"authorization", "Bearer " + token}, more...)}
}

func shows(i *trust.Identity, headers ...string) call { return call{headers, i} }

// dial connects as a client that shows the identity, if any, and verifies the server.
func (w *world) dial(show *trust.Identity) *grpc.ClientConn {
	w.t.Helper()
	bundle := must(trust.NewBundle(td, 0, []*x509.Certificate{w.made.Root}))
	tls := trust.ClientTLS(trust.SystemID(td, "server"), trust.Only(bundle), func() *trust.Identity { return show })
	conn := must(grpc.NewClient(w.addr, grpc.WithTransportCredentials(credentials.NewTLS(tls))))
	w.t.Cleanup(func() { conn.Close() })
	return conn
}

func (w *world) context(c call) context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), 30*time.Second)
	w.t.Cleanup(cancel)
	return metadata.AppendToOutgoingContext(ctx, c.headers...)
}

// istio calls Istio's API.
func (w *world) istio(c call, r *istio.IstioCertificateRequest) (*istio.IstioCertificateResponse, error) {
	w.t.Helper()
	return istio.NewIstioCertificateServiceClient(w.dial(c.show)).CreateCertificate(w.context(c), r)
}

// native calls our own API.
func (w *world) native(c call, r ...*chanceryv1.CertificateRequest) (*chanceryv1.IssueResponse, error) {
	w.t.Helper()
	return chanceryv1.NewIssuanceClient(w.dial(c.show)).Issue(w.context(c), &chanceryv1.IssueRequest{Requests: r})
}

// ask makes Istio's request for an identity, "" for the caller's own.
func ask(identity string) *istio.IstioCertificateRequest {
	r := &istio.IstioCertificateRequest{Csr: toPEM(newCSR(newKey(), identity))}
	if identity != "" {
		r.Metadata = must(structpb.NewStruct(map[string]any{"ImpersonatedIdentity": identity}))
	}
	return r
}

func askNative(identity string) *chanceryv1.CertificateRequest {
	return &chanceryv1.CertificateRequest{Csr: newCSR(newKey(), ""), SpiffeId: identity}
}

// refusal takes a status apart.
func refusal(err error) (st *status.Status, reason string, retry time.Duration) {
	st = status.Convert(err)
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == "chancery" {
				reason = d.GetReason()
			}
		case *errdetails.RetryInfo:
			retry = d.GetRetryDelay().AsDuration()
		}
	}
	return st, reason, retry
}

func wantStatus(t testing.TB, err error, code codes.Code, reason, message string) {
	t.Helper()
	st, got, _ := refusal(err)
	if st.Code() != code || got != reason || !strings.Contains(st.Message(), message) {
		t.Errorf("got %s %s %q, want %s %s %q", st.Code(), got, st.Message(), code, reason, message)
	}
}

// leafOf verifies a chain in Istio's form as its clients do, and returns the leaf: the first element is the leaf, the
// last one holds all roots, and what is between are intermediates.
func leafOf(t testing.TB, chain []string, want string) *x509.Certificate {
	t.Helper()
	if len(chain) < 2 {
		t.Fatalf("the chain has %d elements; Istio's agent wants two", len(chain))
	}
	var certs []*x509.Certificate
	for i, s := range chain[:len(chain)-1] {
		in, err := trust.ParseCertificates([]byte(s))
		if err != nil || len(in) != 1 || !strings.HasSuffix(s, "-----\n") {
			t.Fatalf("element %d has %d certificates, error %v, text %q", i, len(in), err, s)
		}
		certs = append(certs, in[0])
	}
	roots := must(trust.ParseCertificates([]byte(chain[len(chain)-1])))
	id, _, err := trust.Verify(certs, trust.Only(must(trust.NewBundle(td, 0, roots))), time.Now())
	if err != nil || id.String() != want {
		t.Fatalf("verified as %q, error %v; want %s", id, err, want)
	}
	return certs[0]
}

// records reads the audit log after all of it has been written.
func (w *world) records(event audit.Event) []audit.Record {
	w.t.Helper()
	if err := w.log.Close(); err != nil {
		w.t.Fatal(err)
	}
	var out []audit.Record
	for line := range strings.Lines(string(must(os.ReadFile(w.logPath)))) {
		var r audit.Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			w.t.Fatalf("line %q: %v", line, err)
		}
		if r.Event == event {
			out = append(out, r)
		}
	}
	return out
}

// metric returns the sum of a metric's samples, counts of histograms, whose labels have the values.
func (w *world) metric(name string, labels ...string) (sum float64) {
	w.t.Helper()
	for _, f := range must(w.metrics.Gather()) {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var have []string
			for _, l := range m.GetLabel() {
				have = append(have, l.GetValue())
			}
			if !slices.ContainsFunc(labels, func(s string) bool { return !slices.Contains(have, s) }) {
				sum += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// withoutSAN leaves the subject alternative names out, so that CreateCertificate makes them anew.
func withoutSAN(in []pkix.Extension) []pkix.Extension {
	return slices.DeleteFunc(slices.Clone(in), func(e pkix.Extension) bool { return e.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 17}) })
}
