package kube

import (
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-jose/go-jose/v4"

	"github.com/chancery-project/chancery/csr/jwt/jwttest"
)

func kubeconfig(t *testing.T, server, cluster string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: c, cluster: {server: %q%s}}], users: [{name: u, user: {token: t}}], contexts: [{name: c, context: {cluster: c, user: u}}]}`, server, cluster)
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// TestNewClient goes over a real connection with TLS, and with protobuf in our requests.
func TestNewClient(t *testing.T) {
	s := newAPIServer(t)
	s.put(testPod())
	s.review = approve
	srv := httptest.NewTLSServer(s)
	defer srv.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	client, err := NewClient(kubeconfig(t, srv.URL, ", certificate-authority-data: "+base64.StdEncoding.EncodeToString(ca)))
	if err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, Config{Client: client, TokenReview: Fallback})
	if _, err := c.Authenticate(t.Context(), jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims())); err != nil {
		t.Errorf("with keys: %v", err)
	}
	if _, err := c.Authenticate(t.Context(), jwttest.Sign(t, "ed", "ed", jose.EdDSA, jwttest.Claims())); err != nil {
		t.Errorf("with TokenReview: %v", err)
	}
	if s.count("jwks") != 1 || s.count("get") != 2 || s.count("review") != 1 {
		t.Errorf("calls: %v", s.calls)
	}
}

func TestNewClientRefuses(t *testing.T) {
	for name, tc := range map[string]struct{ file, want string }{
		"missing":       {"/nonexistent/kubeconfig", "/nonexistent/kubeconfig"},
		"insecure":      {kubeconfig(t, "https://api.example", ", insecure-skip-tls-verify: true"), "insecure-skip-tls-verify"},
		"without TLS":   {kubeconfig(t, "http://api.example", ""), "https"},
		"outside a pod": {"", "no kubeconfig is given"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := NewClient(tc.file)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
	if _, err := NewClient(kubeconfig(t, "http://127.0.0.1:8001", "")); err != nil {
		t.Errorf("a proxy on loopback: %v", err)
	}
}
