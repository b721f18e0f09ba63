package client_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
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
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/admission"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/source"
	"github.com/chancery-project/chancery/csr/kube"
	"github.com/chancery-project/chancery/trust"
)

var (
	td       = must(trust.ParseDomain("cluster.local"))
	web      = must(trust.WorkloadID(td, "foo", "web"))
	tokenKey = newKey()
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newKey() crypto.Signer { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }

// world is a real server on loopback, and the files that an agent has.
type world struct {
	t                     testing.TB
	made                  *ca.Created
	issuer                atomic.Pointer[ca.Issuer]
	own                   atomic.Pointer[trust.Identity] // the server's
	log                   *audit.Log
	logPath               string
	addr                  string
	tokenFile, serverRoot string
	base                  csr.Config // of the server
	resolver              *net.Resolver
}

func newWorld(t testing.TB, changes ...func(*csr.Config)) *world {
	t.Helper()
	dir := t.TempDir()
	w := &world{t: t, logPath: filepath.Join(dir, "audit.jsonl"), tokenFile: filepath.Join(dir, "token"), serverRoot: filepath.Join(dir, "roots.pem")}
	w.log = must(audit.Open(w.logPath))
	t.Cleanup(func() { w.log.Close() })
	w.made = w.authority()
	w.issuer.Store(w.newIssuer(w.made, 1, w.made.Root))
	w.own.Store(w.identity(trust.SystemID(td, "server")))
	w.write(w.serverRoot, trust.EncodeCertificates(w.made.Root))
	w.write(w.tokenFile, []byte(token("one", time.Hour)))

	jwks := filepath.Join(dir, "jwks.json")
	w.write(jwks, must(json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{KeyID: "k", Key: tokenKey.Public(), Use: "sig"}}})))
	cluster := must(kube.New(kube.Config{Name: "Kubernetes", Issuer: "https://k8s.test", Audiences: []string{"chancery"}, JWKSFile: jwks}))
	c := csr.Config{
		Domain: td, Issuer: func() (*ca.Issuer, error) { return w.issuer.Load(), nil }, Profile: must(ca.NewProfile("workload", ca.ProfileConfig{})),
		Clusters: map[string]csr.ClusterConfig{"Kubernetes": {Cluster: cluster}},
		Log:      w.log, Sampler: &ca.Sampler{}, Logger: slog.New(slog.DiscardHandler), Metrics: csr.NewMetrics(prometheus.NewRegistry()),
	}
	for _, f := range changes {
		f(&c)
	}
	w.base = c
	w.addr, _ = w.serve("127.0.0.1:0")
	return w
}

// serve starts one more server of the same authority, and returns where it is and what stops it.
func (w *world) serve(listen string, changes ...func(*csr.Config)) (addr string, stop func()) {
	w.t.Helper()
	c := w.base
	c.Metrics = csr.NewMetrics(prometheus.NewRegistry())
	for _, f := range changes {
		f(&c)
	}
	s := csr.NewServer(must(csr.NewService(c)), w.own.Load)
	l := must(net.Listen("tcp", listen))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Run(ctx, l) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(stop)
	return l.Addr().String(), stop
}

func (w *world) authority() *ca.Created {
	return must(ca.Create(w.t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID + 1, Log: w.log}))
}

func (w *world) newIssuer(made *ca.Created, generation uint64, roots ...*x509.Certificate) *ca.Issuer {
	return must(ca.NewIssuer(ca.IssuerConfig{
		Domain: td, Key: made.IssuerKey, Chain: []*x509.Certificate{made.Issuer}, LogID: ca.MinLogID + 1, Log: w.log,
		Bundle: must(trust.NewBundle(td, generation, roots)),
	}))
}

// identity issues an identity past the server, as the server does for itself.
func (w *world) identity(id trust.ID) *trust.Identity {
	p, key, i := ca.ServerProfile(), newKey(), w.issuer.Load()
	r := ca.Request{ID: id, PublicKey: key.Public()}
	if !id.Reserved() {
		p = must(ca.NewProfile("workload", ca.ProfileConfig{}))
		r.Attestation = &ca.Attestation{Cluster: "Kubernetes", Time: time.Now()}
	}
	cert := must(x509.ParseCertificate(must(i.Issue(w.t.Context(), must(i.Prepare(p, r)))).DER))
	return must(trust.NewIdentity(id, append([]*x509.Certificate{cert}, i.Chain()...), key, i.Bundle(), time.Now()))
}

func (w *world) write(path string, data []byte) {
	if err := os.WriteFile(path, data, 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) config() client.Config {
	return client.Config{Servers: []string{w.addr}, Domain: td, ID: web, Roots: source.RootsFile(w.serverRoot), Token: source.TokenFile(w.tokenFile), Resolver: w.resolver}
}

// token makes a real token of foo/web.
func token(jti string, life time.Duration) string {
	now := time.Now()
	payload := must(json.Marshal(map[string]any{
		"iss": "https://k8s.test", "sub": "system:serviceaccount:foo:web", "aud": "chancery", "jti": jti,
		"iat": now.Add(-time.Hour).Unix(), "exp": now.Add(life).Unix(),
		"kubernetes.io": map[string]any{"namespace": "foo", "serviceaccount": map[string]string{"name": "web"}},
	}))
	s := must(jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: tokenKey, KeyID: "k"}}, nil))
	return must(must(s.Sign(payload)).CompactSerialize())
}

// issue asks once, and verifies the answer as an agent does.
func issue(t testing.TB, c *client.Client) (*trust.Identity, error) {
	t.Helper()
	key := newKey()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	chain, bundle, err := c.Issue(ctx, key)
	if err != nil {
		return nil, err
	}
	i, err := trust.NewIdentity(web, chain, key, bundle, time.Now())
	if err != nil {
		t.Fatalf("the answer does not verify: %v", err)
	}
	return i, nil
}

func wantIssued(t testing.TB, c *client.Client) *trust.Identity {
	t.Helper()
	i, err := issue(t, c)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// askers returns method and credential of each issuance to a workload, from the audit log.
func (w *world) askers() []string {
	w.t.Helper()
	w.log.Close()
	var out []string
	for line := range strings.Lines(string(must(os.ReadFile(w.logPath)))) {
		var r audit.Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			w.t.Fatal(err)
		}
		if r.Event == audit.Intent && r.Requester.Method != "" {
			out = append(out, r.Requester.Method+" "+r.Requester.CredentialID)
		}
	}
	return out
}

func TestIssue(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	cfg.TTL, cfg.Cluster = 2*time.Hour, "Kubernetes"
	i := wantIssued(t, client.New(cfg))
	if left := time.Until(i.NotAfter()); left > 2*time.Hour || left < 119*time.Minute {
		t.Errorf("it ends in %s, want 2 h", left)
	}
	if i.Bundle.Generation() != 1 || len(i.Chain) != 2 {
		t.Errorf("bundle %d, chain of %d", i.Bundle.Generation(), len(i.Chain))
	}
	cfg.Cluster = "west"
	_, err := issue(t, client.New(cfg))
	wantRefused(t, err, codes.Unauthenticated, csr.ReasonCluster, false)
}

func wantRefused(t testing.TB, err error, code codes.Code, reason string, after bool) {
	t.Helper()
	r, ok := errors.AsType[*client.Refused](err)
	if !ok || r.Code != code || r.Reason != reason || r.Message == "" || (r.RetryAfter() > 0) != after {
		t.Errorf("got %v (%+v), want a refusal with %s %s", err, r, code, reason)
	}
}

func TestTokenFileIsReadEachTime(t *testing.T) {
	w := newWorld(t)
	c := client.New(w.config())
	for _, jti := range []string{"one", "two", "three"} {
		w.write(w.tokenFile, []byte("\n"+token(jti, time.Hour)+" \n"))
		wantIssued(t, c)
	}
	if got, want := w.askers(), []string{"token JTI=one", "token JTI=two", "token JTI=three"}; !slices.Equal(got, want) {
		t.Errorf("the server saw %q, want %q", got, want)
	}
}

func TestTokenFiles(t *testing.T) {
	w := newWorld(t)
	secret := strings.Repeat("c2VjcmV0", 10)
	for _, tc := range []struct {
		name, content, want string
	}{
		{"empty", " \n", "is empty"},
		{"too large", strings.Repeat("x", 17<<10), "larger than expected"},
		{"expired", token("old", -time.Minute), "the token ended at"},
		{"two lines", secret + "\n" + secret, "non-printable"},
		{"not ASCII", secret + "ü", "non-printable"},
		{"not a token", secret, csr.ReasonTokenMalformed},
		{"an expiry that is no number", secret + "." + base64.RawURLEncoding.EncodeToString([]byte(`{"exp":"never"}`)) + ".x", csr.ReasonTokenMalformed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w.write(w.tokenFile, []byte(tc.content))
			_, err := issue(t, client.New(w.config()))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
			if err != nil && (strings.Contains(err.Error(), secret) || strings.Contains(err.Error(), tc.content)) {
				t.Errorf("the error quotes the token: %v", err)
			}
		})
	}
	if err := os.Remove(w.tokenFile); err != nil {
		t.Fatal(err)
	}
	if _, err := issue(t, client.New(w.config())); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the file: %v", err)
	}
}

// With an SVID to show, a token that cannot be had or has ended is not sent: the call goes by certificate.
func TestD16RenewalWithoutAGoodToken(t *testing.T) {
	for _, tc := range []struct {
		name  string
		token func(context.Context) (string, error)
		want  string
	}{
		{"expired", func(context.Context) (string, error) { return token("old", -time.Minute), nil }, "mtls"},
		{"missing", source.TokenFile("/nonexistent/token"), "mtls"},
		{"no source", nil, "mtls"},
		{"none", func(context.Context) (string, error) { return "", nil }, "mtls"},
		{"good", func(context.Context) (string, error) { return token("new", time.Hour), nil }, "token JTI=new"},
		{"refused", func(context.Context) (string, error) { return "x.y.z", nil }, "mtls"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			own := w.identity(web)
			cfg := w.config()
			cfg.Token, cfg.Current = tc.token, func() *trust.Identity { return own }
			var log strings.Builder
			cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
			wantIssued(t, client.New(cfg))
			if warned := strings.Contains(log.String(), "no token to send"); warned != (tc.name == "expired" || tc.name == "missing") {
				t.Errorf("it logged %q", log.String())
			}
			if got := w.askers(); len(got) != 1 || !strings.HasPrefix(got[0], tc.want) {
				t.Errorf("the server saw %q, want %q", got, tc.want)
			}
		})
	}
}

// An SVID that has ended is not shown: without a good token there is an error here, and nothing is sent.
func TestAnSVIDThatHasEndedIsNotShown(t *testing.T) {
	w := newWorld(t)
	own := *w.identity(web)
	leaf := *own.Leaf()
	leaf.NotAfter = time.Now().Add(-time.Second)
	own.Chain = []*x509.Certificate{&leaf, own.Chain[1]}
	cfg := w.config()
	cfg.Current = func() *trust.Identity { return &own }
	w.write(w.tokenFile, []byte(token("old", -time.Minute)))
	if _, err := issue(t, client.New(cfg)); err == nil || !strings.Contains(err.Error(), "the token ended at") {
		t.Errorf("got %v", err)
	}
	w.write(w.tokenFile, []byte(token("new", time.Hour)))
	wantIssued(t, client.New(cfg))
	cfg.Current, cfg.Token = func() *trust.Identity { return nil }, nil
	_, err := issue(t, client.New(cfg))
	wantRefused(t, err, codes.Unauthenticated, csr.ReasonNoCredential, false)
}

func TestD15ServerMustHaveItsID(t *testing.T) {
	w := newWorld(t)
	c := client.New(w.config())
	wantIssued(t, c)
	for _, id := range []trust.ID{web, trust.SystemID(td, "server2")} {
		w.own.Store(w.impostor(id))
		_, err := issue(t, c)
		if err == nil || !strings.Contains(err.Error(), "server is "+id.String()+"; expected spiffe://cluster.local/chancery/server") {
			t.Errorf("%s as the server: %v", id, err)
		}
	}
	other := newWorld(t)
	w.own.Store(other.own.Load())
	if _, err := issue(t, c); err == nil || !strings.Contains(err.Error(), "verifying server") {
		t.Errorf("a server of another root: %v", err)
	}
	if got := w.askers(); len(got) != 1 {
		t.Errorf("the server saw %q", got)
	}
}

// impostor has a certificate of the right CA for an ID that the CA's profiles need not allow.
func (w *world) impostor(id trust.ID) *trust.Identity {
	key := newKey()
	leaf := *w.own.Load().Leaf()
	leaf.URIs = append(leaf.URIs[:0:0], id.URL())
	der := must(x509.CreateCertificate(rand.Reader, &leaf, w.made.Issuer, key.Public(), w.made.IssuerKey))
	return &trust.Identity{Chain: []*x509.Certificate{must(x509.ParseCertificate(der)), w.made.Issuer}, Key: key}
}

func TestRootsFileIsReadEachTime(t *testing.T) {
	w := newWorld(t)
	c := client.New(w.config())
	for _, tc := range []struct{ name, content, want string }{
		{"empty", "", "no PEM block"},
		{"a key", string(must(trust.EncodeKey(newKey()))), "expected a CERTIFICATE"},
		{"a leaf", string(trust.EncodeCertificates(w.own.Load().Leaf())), "not a CA certificate"},
		{"of another authority", string(trust.EncodeCertificates(w.authority().Root)), "unknown authority"},
		{"right again", string(trust.EncodeCertificates(w.made.Root)), ""},
	} {
		w.write(w.serverRoot, []byte(tc.content))
		if _, err := issue(t, c); (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.name, err, tc.want)
		}
	}
}

// The roots of the last answer count, too: the file may lag behind a rotation, and be gone.
func TestRootsOfTheLastAnswerCount(t *testing.T) {
	w := newWorld(t)
	next := w.authority()
	w.issuer.Store(w.newIssuer(w.made, 2, w.made.Root, next.Root))
	c, late := client.New(w.config()), client.New(w.config())
	if i := wantIssued(t, c); i.Bundle.Generation() != 2 || len(i.Bundle.Roots()) != 2 {
		t.Errorf("bundle %d with %d roots", i.Bundle.Generation(), len(i.Bundle.Roots()))
	}
	w.issuer.Store(w.newIssuer(next, 3, next.Root))
	w.own.Store(w.identity(trust.SystemID(td, "server"))) // under the new root alone
	wantIssued(t, c)
	if _, err := issue(t, late); err == nil {
		t.Error("a client that never heard of the new root accepted it")
	}
	w.write(w.serverRoot, trust.EncodeCertificates(next.Root))
	wantIssued(t, late)
	if err := os.Remove(w.serverRoot); err != nil {
		t.Fatal(err)
	}
	wantIssued(t, c)
	if _, err := issue(t, client.New(w.config())); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a new client without the file: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t, func(c *csr.Config) {
		c.Admission = admission.Config{PerIdentity: admission.Rate{PerSecond: 0.01, Burst: 1}}
	})
	other := w.config()
	other.ID = must(trust.WorkloadID(td, "foo", "db"))
	_, err := issue(t, client.New(other))
	wantRefused(t, err, codes.PermissionDenied, csr.ReasonTokenNoPod, false)

	_, err = issue(t, client.New(w.config()))
	wantRefused(t, err, codes.ResourceExhausted, csr.ReasonBusy, true)
	if r, _ := errors.AsType[*client.Refused](err); r != nil && (r.After < 90*time.Second || r.After > 100*time.Second) {
		t.Errorf("try again after %s, want nearly 100 s", r.After)
	}
	if s := fmt.Sprint(err); !strings.Contains(s, "refused by the server") || !strings.Contains(s, csr.ReasonBusy) {
		t.Errorf("the error says %q", s)
	}
}

func TestRefusalOfTheWholeCallSaysWhenToTryAgain(t *testing.T) {
	w := newWorld(t, func(c *csr.Config) {
		c.Issuer = func() (*ca.Issuer, error) { return nil, errors.New("rotating") }
	})
	_, err := issue(t, client.New(w.config()))
	wantRefused(t, err, codes.Unavailable, csr.ReasonNotReady, true)
}

func TestServerThatIsNotThere(t *testing.T) {
	w := newWorld(t)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	cfg := w.config()
	cfg.Servers = []string{l.Addr().String()}
	l.Close()
	_, err := issue(t, client.New(cfg))
	if _, refused := errors.AsType[*client.Refused](err); err == nil || refused || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := client.New(w.config()).Issue(ctx, newKey()); err == nil {
		t.Error("a call with an ended context succeeded")
	}
}

func TestClientIsSafeForConcurrentUse(t *testing.T) {
	w := newWorld(t)
	roots := append(make([]*x509.Certificate, 0, 8), w.made.Root) // with room that nobody may write into
	cfg := w.config()
	cfg.Roots = func() ([]*x509.Certificate, error) { return roots, nil }
	next := w.authority()
	w.issuer.Store(w.newIssuer(w.made, 2, w.made.Root, next.Root))
	c := client.New(cfg)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 5 {
				if _, err := issue(t, c); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := roots[:2]; got[1] != nil {
		t.Error("the client wrote into the configured roots")
	}
}

// lying answers as it is told, with the right certificate.
type lying struct {
	chanceryv1.UnimplementedIssuanceServer
	answer *chanceryv1.IssueResponse
	seen   *metadata.MD
}

func (l lying) Issue(ctx context.Context, _ *chanceryv1.IssueRequest) (*chanceryv1.IssueResponse, error) {
	*l.seen, _ = metadata.FromIncomingContext(ctx)
	return l.answer, nil
}

func TestAnswersThatAreWrong(t *testing.T) {
	w := newWorld(t)
	own := w.own.Load()
	certificate := func(chain ...[]byte) *chanceryv1.Result {
		return &chanceryv1.Result{Outcome: &chanceryv1.Result_Certificate{Certificate: &chanceryv1.Certificate{Chain: chain}}}
	}
	good := certificate(own.Leaf().Raw)
	bundle := func(domain string, roots ...[]byte) *chanceryv1.Bundle {
		return &chanceryv1.Bundle{TrustDomain: domain, Roots: roots}
	}
	root := w.made.Root.Raw
	type results = []*chanceryv1.Result
	for _, tc := range []struct {
		name    string
		results results
		bundle  *chanceryv1.Bundle
		want    string
	}{
		{"nothing", nil, nil, "0 results"},
		{"two results", results{good, good}, bundle("cluster.local", root), "2 results"},
		{"an empty result", results{{}}, bundle("cluster.local", root), "reading certificate: 0 certificates"},
		{"a certificate that is none", results{certificate([]byte("x"))}, bundle("cluster.local", root), "reading certificate"},
		{"a chain without end", results{certificate(slices.Repeat([][]byte{root}, 101)...)}, bundle("cluster.local", root), "101 certificates"},
		{"no bundle", results{good}, nil, "reading bundle: 0 certificates"},
		{"a root that is none", results{good}, bundle("cluster.local", []byte("x")), "reading bundle"},
		{"a root that is a leaf", results{good}, bundle("cluster.local", own.Leaf().Raw), "not a CA certificate"},
		{"roots without end", results{good}, bundle("cluster.local", slices.Repeat([][]byte{root}, 101)...), "101 certificates"},
		{"another domain's bundle", results{good}, bundle("other.test", root), `bundle of "other.test"`},
		{"a refusal without a reason", results{{Outcome: &chanceryv1.Result_Refusal{Refusal: &chanceryv1.Refusal{Code: 8, RetryAfter: durationpb.New(-time.Second)}}}}, nil, "refused by the server"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var seen metadata.MD
			s := grpc.NewServer(grpc.Creds(credentials.NewTLS(trust.ServerTLS(w.own.Load))))
			chanceryv1.RegisterIssuanceServer(s, lying{answer: &chanceryv1.IssueResponse{Results: tc.results, Bundle: tc.bundle}, seen: &seen})
			l := must(net.Listen("tcp", "127.0.0.1:0"))
			go s.Serve(l)
			defer s.Stop()
			cfg := w.config()
			cfg.Servers, cfg.Cluster = []string{l.Addr().String()}, "west"
			c := client.New(cfg)
			_, err := issue(t, c)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
			s.GracefulStop()
			if got := seen.Get("clusterid"); !slices.Equal(got, []string{"west"}) || len(seen.Get("authorization")) != 1 {
				t.Errorf("the server saw %v", got)
			}
			if err := os.Remove(w.serverRoot); err != nil {
				t.Fatal(err)
			}
			_, err = issue(t, c)
			if err != nil && !errors.Is(err, os.ErrNotExist) { // the connection that is kept of a busy server may not know yet that the server has gone
				_, err = issue(t, c)
			}
			if !errors.Is(err, os.ErrNotExist) {
				t.Errorf("roots of a wrong answer count: %v", err)
			}
			w.write(w.serverRoot, trust.EncodeCertificates(w.made.Root))
		})
	}
}
