package kube

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/csr/jwt/jwttest"
)

func newCluster(t testing.TB, cfg Config) *Cluster {
	t.Helper()
	cfg.Name, cfg.Issuer, cfg.Audiences = "Kubernetes", jwttest.Issuer, []string{jwttest.Audience, "chancery"}
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

func TestNewRefuses(t *testing.T) {
	good := jwttest.File(t, jwttest.KeySet(t, "p256"))
	private, _ := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{KeyID: "p256", Key: jwttest.Keys()["p256"]}}})
	client := newAPIServer(t).client(t)
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"name":              {func(c *Config) { c.Name = "" }, "name is empty"},
		"name with a space": {func(c *Config) { c.Name = "a b" }, "printable"},
		"default audience":  {func(c *Config) { c.Audiences = []string{jwttest.Issuer} }, "API server's own audience"},
		"no source":         {func(c *Config) { c.JWKSFile = "" }, "neither jwksFile nor kubeconfig"},
		"fallback":          {func(c *Config) { c.TokenReview = Fallback }, "fallback needs kubeconfig"},
		"always":            {func(c *Config) { c.TokenReview = Always }, "always needs kubeconfig"},
		"always and a file": {func(c *Config) { c.TokenReview, c.Client = Always, client }, "leave one of them out"},
		"mode":              {func(c *Config) { c.TokenReview = 7 }, "tokenReview should be"},
		"node agent":        {func(c *Config) { c.NodeAgents = []string{"ztunnel"} }, `nodeAgents: "ztunnel"`},
		"missing file":      {func(c *Config) { c.JWKSFile = "/nonexistent/jwks" }, "jwksFile: open /nonexistent/jwks"},
		"private key":       {func(c *Config) { c.JWKSFile = jwttest.File(t, private) }, "private or symmetric key"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Name: "Kubernetes", Issuer: jwttest.Issuer, Audiences: []string{jwttest.Audience}, JWKSFile: good}
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

func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	c, err := New(Config{
		Name: "Kubernetes", Issuer: jwttest.Issuer, Audiences: []string{jwttest.Audience}, Metrics: reg,
		JWKSFile: jwttest.File(t, jwttest.KeySet(t, "p256")),
	})
	if err != nil {
		t.Fatal(err)
	}
	token := jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims())
	for range 3 {
		if _, err := c.Authenticate(t.Context(), token); err != nil {
			t.Fatal(err)
		}
	}
	c.Authenticate(t.Context(), "x")
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			got[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	for name, want := range map[string]float64{
		"chancery_kube_token_cache_total Kubernetes hit":        2,
		"chancery_kube_token_cache_total Kubernetes miss":       2,
		"chancery_kube_tokens_total Kubernetes OK":              3,
		"chancery_kube_tokens_total Kubernetes TOKEN_MALFORMED": 1,
		"chancery_kube_jwks_keys Kubernetes":                    1,
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v; all: %v", name, got[name], want, got)
		}
	}
}

// BenchmarkAuthenticate is the usual request: a token that was seen before, of a pod that is watched.
func BenchmarkAuthenticate(b *testing.B) {
	c := newCluster(b, Config{JWKSFile: jwttest.File(b, jwttest.KeySet(b, "rsa"))})
	c.pods = newPodWatch("Kubernetes", nil, c.log)
	c.pods.current = &openedWatch{}
	c.pods.Replace([]any{testPod()}, "1")
	c.pods.heard = time.Now().Add(time.Hour)
	token := jwttest.Sign(b, "rsa", "rsa", jose.RS256, jwttest.Claims())
	b.Run("alone", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := c.Authenticate(b.Context(), token); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				c.Authenticate(b.Context(), token)
			}
		})
	})
}
