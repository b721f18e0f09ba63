package parts

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// ServerConfig is the config of a server with one cluster: what it says of its state, and its JWKS file, are to be filled in.
const ServerConfig = `trustDomain: cluster.local
listen: 127.0.0.1:0
metrics: 127.0.0.1:0
addrFile: server.addr
serverNames: [localhost, 127.0.0.1]
state: {%s}
auditLog: audit.jsonl
clusters:
- name: Kubernetes
  issuer: https://kubernetes.default.svc
  audiences: [istio-ca]
  jwksFile: %s
  tokenReview: never
`

// Binary is the program under test: CHANCERY_BIN if set, else built from this module.
func Binary(ctx context.Context, dir string) (string, error) {
	if binary := os.Getenv("CHANCERY_BIN"); binary != "" {
		return filepath.Abs(binary)
	}
	binary := filepath.Join(dir, "chancery")
	build := exec.CommandContext(ctx, "go", "build", "-o", binary, "github.com/chancery-project/chancery/cmd/chancery")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return "", fmt.Errorf("building chancery: %w", err)
	}
	return binary, nil
}

// MakeAuthority makes the authority that a config asks for.
func MakeAuthority(ctx context.Context, binary, config string) error {
	if out, err := exec.CommandContext(ctx, binary, "authority", "init", "-c", config).CombinedOutput(); err != nil {
		return fmt.Errorf("making authority: %w: %s", err, out)
	}
	return nil
}
