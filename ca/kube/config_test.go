package kube

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
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

func TestConfigRefuses(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(empty, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ file, want string }{
		"missing":       {"/nonexistent/kubeconfig", "/nonexistent/kubeconfig"},
		"no cluster":    {empty, "it holds no cluster"},
		"insecure":      {kubeconfig(t, "https://api.example", ", insecure-skip-tls-verify: true"), "insecure-skip-tls-verify"},
		"without TLS":   {kubeconfig(t, "http://api.example", ""), "https"},
		"outside a pod": {"", "no kubeconfig is given"},
	} {
		if _, err := Config(tc.file); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want an error with %q", name, err, tc.want)
		}
	}
	if _, err := Config(kubeconfig(t, "http://127.0.0.1:8001", "")); err != nil {
		t.Errorf("a proxy on loopback: %v", err)
	}
}
