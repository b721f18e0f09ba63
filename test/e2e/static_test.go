package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// staticConfig is the smallest config of a server.
const staticConfig = `trustDomain: cluster.local
listen: 127.0.0.1:8443
metrics: 127.0.0.1:9443
state: {sqlite: state.db}
auditLog: audit.jsonl
clusters:
- name: Kubernetes
  issuer: https://kubernetes.default.svc
  audiences: [istio-ca, chancery]
  jwksFile: jwks.json        # or kubeconfig: FILE; with only a jwksFile, pods are not watched
  tokenReview: never         # never | fallback | always
`

// TestStaticJWKS: the smallest config, with ports that the system picks and keys from a file, serves any client of the Istio API, such as grpc with roots.pem as its
// TLS roots and localhost as the server's name.
func TestStaticJWKS(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "static"), "web", "web-1", "node-a")
	dir := SocketDir(t)
	text := strings.NewReplacer("8443", "0", "9443", "0\naddrFile: addrs").Replace(staticConfig)
	writeFile(t, filepath.Join(dir, "server.yaml"), text, 0o600)
	writeFile(t, filepath.Join(dir, "jwks.json"), string(k.JWKS(t)), 0o600)
	s := &Server{Dir: dir, Config: filepath.Join(dir, "server.yaml"), Roots: filepath.Join(dir, "roots.pem")}
	s.yaml.AuditLog = "audit.jsonl"

	// Nothing makes a root but the command that is for it (invariant 11).
	if _, stderr, err := Run(t, "", "server", "-c", s.Config); err == nil || !strings.Contains(stderr, "chancery authority init -c") {
		t.Errorf("a server without state should name the command to run: %v, %s", err, stderr)
	}
	MustRun(t, "authority", "init", "-c", s.Config)
	roots, err := os.ReadFile(s.Roots)
	if err != nil {
		t.Fatal(err)
	}
	if _, stderr, err := Run(t, "", "authority", "init", "-c", s.Config); err == nil || !strings.Contains(stderr, "exist already") {
		t.Errorf("a second init should be refused: %v, %s", err, stderr)
	}
	if again, err := os.ReadFile(s.Roots); err != nil || string(again) != string(roots) {
		t.Errorf("a second init changed roots.pem: %v", err)
	}

	s.Process = StartChancery(t, "server", dir, "server", "-c", s.Config)
	addrs := WaitAddrs(t, s.Process, filepath.Join(dir, "addrs"))
	s.Listen, s.Metrics = addrs["listen"], addrs["metrics"]
	s.WaitReady(t)
	conn := s.Dial(t)
	token := k.BoundToken(t, pod, time.Hour, audience)
	for _, ask := range []Ask{{Token: token}, {Token: token, Cluster: "Kubernetes"}, {Token: k.BoundToken(t, pod, time.Hour, "chancery"), Seconds: 600}} {
		cert, err := ask.Certificate(t.Context(), conn)
		if err != nil {
			t.Fatal(err)
		}
		want := time.Hour
		if ask.Seconds > 0 {
			want = time.Duration(ask.Seconds) * time.Second
		}
		if left := time.Until(cert.NotAfter); cert.URIs[0].String() != pod.SPIFFEID(trustDomain) || left > want || left < want-time.Minute {
			t.Errorf("certificate of %v with %v left; want %s, %v", cert.URIs, left, pod.SPIFFEID(trustDomain), want)
		}
	}
	if err := s.Stop(t, 15*time.Second); err != nil {
		t.Errorf("SIGTERM should end the server with status 0: %v", err)
	}
}
