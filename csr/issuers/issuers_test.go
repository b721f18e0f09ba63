package issuers_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
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
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/parent"
	"github.com/chancery-project/chancery/ca/revocation"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/issuers"
	"github.com/chancery-project/chancery/csr/kube"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var (
	td       = must(trust.ParseDomain("cluster.local"))
	east     = must(trust.WorkloadID(td, "chancery", "east"))
	deep     = must(trust.WorkloadID(td, "chancery", "deep"))
	web      = must(trust.WorkloadID(td, "foo", "web"))
	tokenKey = must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
)

// world is a real server that signs issuers of two others.
type world struct {
	t       *testing.T
	made    *ca.Created
	root    *ca.Issuer
	issuer  *ca.Issuer
	roots   *trust.Bundle
	log     *audit.Log
	logPath string
	addr    string
	fails   error // what signing says, if not nil
	revoked atomic.Pointer[revocation.Set]
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := t.TempDir()
	w := &world{t: t, logPath: filepath.Join(dir, "audit.jsonl")}
	w.log = must(audit.Open(w.logPath))
	t.Cleanup(func() { w.log.Close() })
	w.made = must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID + 1, Log: w.log}))
	w.roots = must(trust.NewBundle(td, 1, []*x509.Certificate{w.made.Root}))
	newIssuer := func(key crypto.Signer, cert *x509.Certificate) *ca.Issuer {
		return must(ca.NewIssuer(ca.IssuerConfig{Domain: td, Key: key, Chain: []*x509.Certificate{cert}, Bundle: w.roots, LogID: ca.MinLogID + 1, Log: w.log}))
	}
	w.root, w.issuer = newIssuer(w.made.RootKey, w.made.Root), newIssuer(w.made.IssuerKey, w.made.Issuer)
	jwks := filepath.Join(dir, "jwks.json")
	data := must(json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{KeyID: "k", Key: tokenKey.Public(), Use: "sig"}}}))
	if err := os.WriteFile(jwks, data, 0o600); err != nil {
		t.Fatal(err)
	}
	cluster := must(kube.New(kube.Config{Name: "Kubernetes", Issuer: "https://k8s.test", Audiences: []string{"chancery"}, JWKSFile: jwks}))
	service := must(csr.NewService(csr.Config{
		Revocations: w.revoked.Load,
		Domain:      td, Issuer: func() (*ca.Issuer, error) { return w.issuer, nil }, Profile: must(ca.NewProfile("workload", ca.ProfileConfig{})),
		Clusters: map[string]csr.ClusterConfig{"Kubernetes": {Cluster: cluster}},
		Log:      w.log, Sampler: &ca.Sampler{}, Logger: slog.New(slog.DiscardHandler), Metrics: csr.NewMetrics(prometheus.NewRegistry()),
	}))
	own := w.identity(trust.SystemID(td, "server"), ca.ServerProfile())
	desc := issuers.Describe(service, issuers.Config{Domain: td, Sign: w.sign, Grants: map[trust.ID]issuers.Grant{
		east: {MaxLifetime: 24 * time.Hour}, deep: {MaxLifetime: time.Hour, PathLen: 2},
	}})
	s := csr.NewServer(service, func() *trust.Identity { return own }, desc)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	w.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Run(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) sign(ctx context.Context, pub crypto.PublicKey, terms ca.IssuerTerms, who audit.Requester) ([]*x509.Certificate, error) {
	if w.fails != nil {
		return nil, w.fails
	}
	cert, err := w.root.SignSubordinate(ctx, pub, terms, who)
	return []*x509.Certificate{cert}, err
}

func (w *world) identity(id trust.ID, p *ca.Profile) *trust.Identity {
	key := must(ca.GenerateKey(ca.P256))
	r := ca.Request{ID: id, PublicKey: key.Public()}
	if !id.Reserved() {
		r.Attestation = &ca.Attestation{Cluster: "Kubernetes", Time: time.Now()}
	}
	made := must(w.issuer.Issue(w.t.Context(), must(w.issuer.Prepare(p, r))))
	return must(trust.NewIdentity(id, []*x509.Certificate{must(x509.ParseCertificate(made.DER)), w.made.Issuer}, key, w.roots, time.Now()))
}

func token(id trust.ID) string {
	ns, sa, _ := id.Workload()
	signer := must(jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: tokenKey, KeyID: "k"}}, nil))
	now := time.Now()
	claims := must(json.Marshal(map[string]any{
		"iss": "https://k8s.test", "aud": []string{"chancery"}, "sub": fmt.Sprintf("system:serviceaccount:%s:%s", ns, sa), "iat": now.Unix(), "nbf": now.Unix(),
		"exp": now.Add(time.Hour).Unix(), "jti": "j-" + sa,
		"kubernetes.io": map[string]any{"namespace": ns, "serviceaccount": map[string]string{"name": sa, "uid": "u"}},
	}))
	return must(must(signer.Sign(claims)).CompactSerialize())
}

// call asks as whoever the token says, showing own, if that is not nil.
func (w *world) call(token string, own *trust.Identity, r *chanceryv1.SignIssuerRequest) ([]*x509.Certificate, error) {
	tls := trust.ClientTLS(trust.SystemID(td, "server"), trust.Only(w.roots), func() *trust.Identity { return own })
	conn := must(grpc.NewClient(w.addr, grpc.WithTransportCredentials(credentials.NewTLS(tls))))
	defer conn.Close()
	ctx := w.t.Context()
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	resp, err := chanceryv1.NewIssuersClient(conn).SignIssuer(ctx, r)
	if err != nil {
		return nil, err
	}
	var chain []*x509.Certificate
	for _, der := range resp.GetChain() {
		chain = append(chain, must(x509.ParseCertificate(der)))
	}
	return chain, nil
}

func newCSR(key crypto.Signer) []byte { return must(parent.Request(td, key)) }

func reasonOf(err error) string {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

// Who is listed gets an issuer that passes every check on their side, with what the config allows, whatever they ask for.
func TestD20ListedCallersGetWhatTheirGrantSays(t *testing.T) {
	w := newWorld(t)
	key := must(ca.GenerateKey(ca.P256))
	for _, c := range []struct {
		who     trust.ID
		asked   time.Duration
		life    time.Duration
		pathLen int
	}{
		{east, 0, 24 * time.Hour, 0}, {east, 2 * time.Hour, 2 * time.Hour, 0}, {east, 1000 * time.Hour, 24 * time.Hour, 0},
		{east, -time.Hour, 24 * time.Hour, 0}, {east, time.Nanosecond, ca.MinTTL, 0}, {deep, 5 * time.Hour, time.Hour, 2},
	} {
		begun := time.Now()
		chain, err := w.call(token(c.who), nil, &chanceryv1.SignIssuerRequest{Csr: newCSR(key), Lifetime: durationpb.New(c.asked)})
		if err != nil {
			t.Fatalf("%s, %s: %v", c.who, c.asked, err)
		}
		if _, err := parent.Check(td, key.Public(), chain, w.roots, time.Now()); err != nil {
			t.Error(err)
		}
		if life := chain[0].NotAfter.Sub(begun); life > c.life+time.Minute || life < c.life-2*time.Second || chain[0].MaxPathLen != c.pathLen {
			t.Errorf("%s, %s: lives %s, path length %d", c.who, c.asked, life, chain[0].MaxPathLen)
		}
	}
	log := string(must(os.ReadFile(w.logPath)))
	if !strings.Contains(log, `"spiffe_id":"spiffe://cluster.local/ns/chancery/sa/east"`) || !strings.Contains(log, "JTI=j-east") {
		t.Errorf("the audit log does not tell who asked:\n%s", log)
	}
}

// Nobody gets an issuer by default: not a workload, not by a certificate, not without anything. Nothing is signed then.
func TestNobodyElseGetsAnIssuer(t *testing.T) {
	w := newWorld(t)
	profile := must(ca.NewProfile("workload", ca.ProfileConfig{}))
	request := newCSR(must(ca.GenerateKey(ca.P256)))
	svid := w.identity(east, profile)
	good, bad := token(east), token(web) // the claims of one under the signature of the other
	forged := good[:strings.LastIndex(good, ".")] + bad[strings.LastIndex(bad, "."):]
	intents := func() int { return strings.Count(string(must(os.ReadFile(w.logPath))), `"event":"intent"`) }
	before := intents()
	for name, c := range map[string]struct {
		token  string
		own    *trust.Identity
		code   codes.Code
		reason string
	}{
		"a workload":                     {token(web), nil, codes.PermissionDenied, csr.ReasonIdentity},
		"the listed one's certificate":   {"", svid, codes.PermissionDenied, csr.ReasonNoCredential},
		"nobody":                         {"", nil, codes.Unauthenticated, csr.ReasonNoCredential},
		"a bad token":                    {forged, nil, codes.Unauthenticated, csr.ReasonTokenSignature},
		"a bad token beside an SVID":     {forged, svid, codes.PermissionDenied, csr.ReasonNoCredential},
		"another account":                {token(must(trust.WorkloadID(td, "chancery", "east2"))), nil, codes.PermissionDenied, csr.ReasonIdentity},
		"the server's own identity":      {"", w.identity(trust.SystemID(td, "server"), ca.ServerProfile()), codes.Unauthenticated, csr.ReasonSVID},
		"a workload, beside listed SVID": {token(web), svid, codes.PermissionDenied, csr.ReasonIdentity},
	} {
		if name == "the server's own identity" {
			before++ // made for this test
		}
		_, err := w.call(c.token, c.own, &chanceryv1.SignIssuerRequest{Csr: request})
		if status.Code(err) != c.code || reasonOf(err) != c.reason {
			t.Errorf("%s: %v (%s); want %s (%s)", name, err, reasonOf(err), c.code, c.reason)
		}
	}
	if after := intents(); after != before {
		t.Errorf("%d certificates were signed", after-before)
	}
	w.log.Close() // which writes what waits
	if log := string(must(os.ReadFile(w.logPath))); strings.Count(log, `"event":"denied"`) < 8 {
		t.Error("not every refusal is in the audit log")
	}
}

// A listed identity that is revoked gets no issuer until it is restored, though its token is good.
func TestRevokedServerGetsNoIssuer(t *testing.T) {
	w := newWorld(t)
	r := &chanceryv1.SignIssuerRequest{Csr: newCSR(must(ca.GenerateKey(ca.P256)))}
	w.revoked.Store(revocation.NewSet([]string{east.String()}, nil, true))
	if _, err := w.call(token(east), nil, r); status.Code(err) != codes.PermissionDenied || reasonOf(err) != csr.ReasonRevoked {
		t.Errorf("got %v", err)
	}
	w.revoked.Store(nil)
	if _, err := w.call(token(east), nil, r); err != nil {
		t.Errorf("restored: %v", err)
	}
}

// Of a CSR only the key counts, and it must be possessed; names other than the trust domain's URI are refused (invariant 2).
func TestInvariant2OfACSROnlyTheKeyCounts(t *testing.T) {
	w := newWorld(t)
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	request := func(template x509.CertificateRequest) []byte {
		return must(x509.CreateCertificateRequest(rand.Reader, &template, key))
	}
	uri := func(s string) []*url.URL { return []*url.URL{must(url.Parse(s))} }
	broken := newCSR(key)
	broken[len(broken)-1] ^= 1
	for name, c := range map[string]struct {
		der    []byte
		life   *durationpb.Duration
		reason string
	}{
		"nothing":         {nil, nil, csr.ReasonCSR},
		"garbage":         {[]byte("garbage"), nil, csr.ReasonCSR},
		"too large":       {make([]byte, 17<<10), nil, csr.ReasonCSR},
		"not possessed":   {broken, nil, csr.ReasonCSR},
		"a workload's ID": {request(x509.CertificateRequest{URIs: uri("spiffe://cluster.local/ns/a/sa/b")}), nil, csr.ReasonCSR},
		"another domain":  {request(x509.CertificateRequest{URIs: uri("spiffe://other")}), nil, csr.ReasonCSR},
		"a DNS name":      {request(x509.CertificateRequest{DNSNames: []string{"a.example"}}), nil, csr.ReasonCSR},
		"a small key":     {smallKeyCSR, nil, csr.ReasonCSR},
		"D20: overflow":   {newCSR(key), &durationpb.Duration{Seconds: 1 << 61}, csr.ReasonLifetime},
	} {
		_, err := w.call(token(east), nil, &chanceryv1.SignIssuerRequest{Csr: c.der, Lifetime: c.life})
		if status.Code(err) != codes.InvalidArgument || reasonOf(err) != c.reason {
			t.Errorf("%s: %v (%s)", name, err, reasonOf(err))
		}
	}
	chain, err := w.call(token(east), nil, &chanceryv1.SignIssuerRequest{Csr: request(x509.CertificateRequest{})})
	if err != nil || len(chain[0].URIs) != 1 || chain[0].URIs[0].String() != "spiffe://cluster.local" || !chain[0].IsCA {
		t.Errorf("a CSR without names: %v", err)
	}
}

// smallKeyCSR asks for a P-224 key's certificate.
var smallKeyCSR = must(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, must(ecdsa.GenerateKey(elliptic.P224(), rand.Reader))))

// Faults of the signing server are told as such, without details.
func TestFaultsOfTheSigner(t *testing.T) {
	w := newWorld(t)
	r := &chanceryv1.SignIssuerRequest{Csr: newCSR(must(ca.GenerateKey(ca.P256)))}
	for _, c := range []struct {
		err  error
		code codes.Code
	}{
		{fmt.Errorf("%w: disk full at /secret/path", ca.ErrNotReady), codes.Unavailable}, {errors.New("token at /secret/path lost"), codes.Internal},
		{fmt.Errorf("%w: of no kind", ca.ErrKey), codes.InvalidArgument},
	} {
		w.fails = c.err
		_, err := w.call(token(east), nil, r)
		if status.Code(err) != c.code || strings.Contains(err.Error(), "/secret/path") {
			t.Errorf("%v became %v", c.err, err)
		}
	}
	w.fails = nil
	w.log.Close() // invariant 10
	if _, err := w.call(token(east), nil, r); status.Code(err) != codes.Unavailable {
		t.Errorf("without an audit log: %v", err)
	}
}
