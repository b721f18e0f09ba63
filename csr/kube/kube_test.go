package kube

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
)

const (
	testIssuer   = "https://kubernetes.default.svc"
	testAudience = "istio-ca"
)

// testKeys are made once: RSA keys are dear. The others are the same in each process, so that the seeds of a fuzz test
// mean the same to its workers.
var testKeys = sync.OnceValue(func() map[string]crypto.Signer {
	keys := map[string]crypto.Signer{}
	for _, id := range []string{"rsa", "rsa2"} {
		keys[id], _ = rsa.GenerateKey(rand.Reader, 2048)
	}
	for id, curve := range map[string]elliptic.Curve{"p256": elliptic.P256(), "p384": elliptic.P384(), "p521": elliptic.P521()} {
		size := (curve.Params().BitSize + 7) / 8
		keys[id], _ = ecdsa.ParseRawPrivateKey(curve, append(make([]byte, size-1), 7))
	}
	keys["ed"] = ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	return keys
})

// jwks returns a key set of the public halves.
func jwks(t testing.TB, ids ...string) []byte {
	t.Helper()
	var set jose.JSONWebKeySet
	for _, id := range ids {
		set.Keys = append(set.Keys, jose.JSONWebKey{KeyID: id, Key: testKeys()[id].Public(), Use: "sig"})
	}
	b, err := json.Marshal(set)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func writeFile(t testing.TB, data []byte) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "jwks.json")
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

type object = map[string]any

// claims returns the claims that an API server would put into a token for pod web-0 of foo/web on node-1. Each change
// is applied to them.
func claims(changes ...func(object)) object {
	now := time.Now().Unix()
	c := object{
		"iss": testIssuer, "sub": "system:serviceaccount:foo:web", "aud": []string{testAudience},
		"iat": now, "nbf": now, "exp": now + 3600, "jti": "6c3b4d7e-0000-4000-8000-000000000001",
		"kubernetes.io": object{
			"namespace":      "foo",
			"serviceaccount": object{"name": "web", "uid": "sa-uid"},
			"pod":            object{"name": "web-0", "uid": "uid-0"},
			"node":           object{"name": "node-1", "uid": "node-uid"},
			"warnafter":      now + 3607,
		},
	}
	for _, f := range changes {
		f(c)
	}
	return c
}

func set(name string, value any) func(object) { return func(c object) { c[name] = value } }

func setKube(name string, value any) func(object) {
	return func(c object) { c["kubernetes.io"].(object)[name] = value }
}

func unset(name string) func(object) { return func(c object) { delete(c, name) } }

// sign makes a token. An empty kid leaves the header's key ID out.
func sign(t testing.TB, key, kid string, alg jose.SignatureAlgorithm, claims any) string {
	t.Helper()
	payload, ok := claims.([]byte)
	if !ok {
		var err error
		if payload, err = json.Marshal(claims); err != nil {
			t.Fatal(err)
		}
	}
	return signWith(t, jose.JSONWebKey{Key: testKeys()[key], KeyID: kid}, alg, payload)
}

func signWith(t testing.TB, key any, alg jose.SignatureAlgorithm, payload []byte) string {
	t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: key}, nil)
	if err != nil {
		t.Fatal(err)
	}
	jws, err := signer.Sign(payload)
	if err != nil {
		t.Fatal(err)
	}
	token, err := jws.CompactSerialize()
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// fileCluster verifies with a file of the given keys and watches nothing.
func fileCluster(t testing.TB, ids ...string) *Cluster {
	t.Helper()
	return newCluster(t, Config{JWKSFile: writeFile(t, jwks(t, ids...))})
}

func newCluster(t testing.TB, cfg Config) *Cluster {
	t.Helper()
	cfg.Name, cfg.Issuer, cfg.Audiences = "Kubernetes", testIssuer, []string{testAudience, "chancery"}
	cfg.Metrics = prometheus.NewRegistry()
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// run runs the cluster until the test ends. For synctest bubbles.
func run(t testing.TB, c *Cluster) {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() { cancel(); settle() })
	go c.Run(ctx)
}

// settle lets what goes on without its caller come to its end: loads of keys, the reflector's backoff.
func settle() { time.Sleep(time.Minute) }

// wantDenial checks code and reason; an empty reason wants success.
func wantDenial(t testing.TB, err error, code codes.Code, reason string) {
	t.Helper()
	if reason == "" {
		if err != nil {
			t.Fatalf("got %v, want success", err)
		}
		return
	}
	var d *csr.Denial
	if !errors.As(err, &d) {
		t.Fatalf("got %v, want a denial with %s", err, reason)
	}
	if d.Code != code || d.Reason != reason {
		t.Fatalf("got %s %v, want %s %s", d.Code, d, code, reason)
	}
}

// value returns what a counter stands at.
func value(t testing.TB, c prometheus.Counter) float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(c)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return families[0].GetMetric()[0].GetCounter().GetValue()
}

func TestNewRefuses(t *testing.T) {
	good := writeFile(t, jwks(t, "p256"))
	private, _ := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{KeyID: "p256", Key: testKeys()["p256"]}}})
	client := newAPIServer(t).client(t)
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"name":              {func(c *Config) { c.Name = "" }, "name is empty"},
		"name with a space": {func(c *Config) { c.Name = "a b" }, "printable"},
		"issuer":            {func(c *Config) { c.Issuer = "" }, "issuer is empty"},
		"audiences":         {func(c *Config) { c.Audiences = nil }, "audiences is empty"},
		"empty audience":    {func(c *Config) { c.Audiences = []string{"a", ""} }, "empty entry"},
		"default audience":  {func(c *Config) { c.Audiences = []string{testIssuer} }, "API server's own audience"},
		"no source":         {func(c *Config) { c.JWKSFile = "" }, "neither jwksFile nor kubeconfig"},
		"fallback":          {func(c *Config) { c.TokenReview = Fallback }, "fallback needs kubeconfig"},
		"always":            {func(c *Config) { c.TokenReview = Always }, "always needs kubeconfig"},
		"always and a file": {func(c *Config) { c.TokenReview, c.Client = Always, client }, "leave one of them out"},
		"mode":              {func(c *Config) { c.TokenReview = 7 }, "tokenReview should be"},
		"node agent":        {func(c *Config) { c.NodeAgents = []string{"ztunnel"} }, `nodeAgents: "ztunnel"`},
		"missing file":      {func(c *Config) { c.JWKSFile = "/nonexistent/jwks" }, "jwksFile: open /nonexistent/jwks"},
		"private key":       {func(c *Config) { c.JWKSFile = writeFile(t, private) }, "private or symmetric key"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Name: "Kubernetes", Issuer: testIssuer, Audiences: []string{testAudience}, JWKSFile: good}
			tc.change(&cfg)
			_, err := New(cfg)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
}

func TestParseMode(t *testing.T) {
	for _, m := range []Mode{Never, Fallback, Always} {
		if got, err := ParseMode(m.String()); got != m || err != nil {
			t.Errorf("ParseMode(%q) = %v, %v", m, got, err)
		}
	}
	if m, err := ParseMode(""); m != Never || err != nil {
		t.Errorf("an empty mode is %v, %v; it should be never", m, err)
	}
	if _, err := ParseMode("Always"); err == nil {
		t.Error("Always was accepted; it should be always")
	}
}
