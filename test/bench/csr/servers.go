package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	securityv1alpha1 "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/test/bench/parts"
)

const agentConfig = `server: %s
serverRoots: roots.pem
trustDomain: cluster.local
cluster: Kubernetes
tokenFile: token
socket: agent.sock
identity: %s
metrics: 127.0.0.1:0
addrFile: agent.addr
`

// target is a running server with the connections to it and what was measured.
type target struct {
	name    string
	process *parts.Process
	second  *parts.Process // where two servers share the load; else nil
	addr    string
	metrics string // base URL; empty for the floor
	roots   *x509.CertPool
	conns   []*grpc.ClientConn
	clients []securityv1alpha1.IstioCertificateServiceClient // one on each connection

	succeeded int // calls, warm-up included
	elapsed   time.Duration
	cpu       time.Duration // of the server's process, in its own slices
	latencies []time.Duration
	rates     []float64 // calls per second, slice by slice
}

func (t *target) stop() {
	for _, conn := range t.conns {
		_ = conn.Close()
	}
	t.process.Stop()
}

func (t *target) processes() []*parts.Process {
	if t.second == nil {
		return []*parts.Process{t.process}
	}
	return []*parts.Process{t.process, t.second}
}

// cpuTime is what all its processes have used so far.
func (t *target) cpuTime() (sum time.Duration, err error) {
	for _, p := range t.processes() {
		used, err := parts.CPUTime(p.PID())
		if err != nil {
			return 0, err
		}
		sum += used
	}
	return sum, nil
}

// startFloor runs this very program again, as the bare server.
func startFloor(ctx context.Context, dir string, conns int) (*target, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding own executable: %w", err)
	}
	p, err := parts.Start(ctx, dir, self, floorArgument, dir)
	if err != nil {
		return nil, err
	}
	t := &target{name: "floor", process: p}
	return t, orStop(t, t.connect(ctx, dir, floorAddrFile, floorRootsFile, conns))
}

// startServer makes an authority in dir and runs the server under test on it until it says ready.
func startServer(ctx context.Context, binary, dir string, conns int, logged bool) (*target, error) {
	path := filepath.Join(dir, "server.yaml")
	text := fmt.Sprintf(parts.ServerConfig, "sqlite: state.db", filepath.Join(dir, "jwks.json"))
	if logged {
		text += "issuanceLog: log\n"
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return nil, fmt.Errorf("writing server config: %w", err)
	}
	if err := parts.MakeAuthority(ctx, binary, path); err != nil {
		return nil, err
	}
	return runServer(ctx, binary, dir, path, conns)
}

// runServer starts a server whose authority is made, and connects to it.
func runServer(ctx context.Context, binary, dir, path string, conns int) (*target, error) {
	p, err := parts.Start(ctx, dir, binary, "server", "-c", path)
	if err != nil {
		return nil, err
	}
	t := &target{name: "chancery", process: p}
	return t, orStop(t, func() error {
		addrs, err := p.Addresses(ctx, filepath.Join(dir, "server.addr"))
		if err != nil {
			return err
		}
		t.metrics = "http://" + addrs["metrics"]
		if err := p.WaitFor(ctx, "readiness", func() bool { return parts.Get(ctx, t.metrics+"/readyz") == nil }); err != nil {
			return err
		}
		return t.connect(ctx, dir, "server.addr", "roots.pem", conns)
	}())
}

// startAgent runs the agent for the identity of the token in dir and returns its process and the URL of its metrics
// once it says that it has its certificate.
func startAgent(ctx context.Context, binary, dir, server, id string) (*parts.Process, string, error) {
	path := filepath.Join(dir, "agent.yaml")
	if err := os.WriteFile(path, fmt.Appendf(nil, agentConfig, server, id), 0o600); err != nil {
		return nil, "", fmt.Errorf("writing agent config: %w", err)
	}
	p, err := parts.Start(ctx, dir, binary, "agent", "-c", path)
	if err != nil {
		return nil, "", err
	}
	addrs, err := p.Addresses(ctx, filepath.Join(dir, "agent.addr"))
	if err == nil {
		err = p.WaitFor(ctx, "readiness", func() bool { return parts.Get(ctx, "http://"+addrs["metrics"]+"/readyz") == nil })
	}
	if err != nil {
		p.Stop()
		return nil, "", err
	}
	return p, "http://" + addrs["metrics"], nil
}

func orStop(t *target, err error) error {
	if err != nil {
		t.stop()
	}
	return err
}

// connect opens the connections; the first calls, in warm-up, establish them.
func (t *target) connect(ctx context.Context, dir, addrFile, rootsFile string, conns int) error {
	addrs, err := t.process.Addresses(ctx, filepath.Join(dir, addrFile))
	if err != nil {
		return err
	}
	t.addr = addrs["listen"]
	text, err := os.ReadFile(filepath.Join(dir, rootsFile))
	if err != nil {
		return fmt.Errorf("reading roots: %w", err)
	}
	t.roots = x509.NewCertPool()
	if !t.roots.AppendCertsFromPEM(text) {
		return fmt.Errorf("reading roots: no certificate in %s", rootsFile)
	}
	for range conns {
		conn, err := grpc.NewClient(t.addr, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			RootCAs:    t.roots,
			ServerName: "localhost",
			MinVersion: tls.VersionTLS13,
		})))
		if err != nil {
			return fmt.Errorf("connecting to %s: %w", t.name, err)
		}
		t.conns = append(t.conns, conn)
		t.clients = append(t.clients, securityv1alpha1.NewIstioCertificateServiceClient(conn))
	}
	return nil
}
