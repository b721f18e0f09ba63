package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	securityv1alpha1 "istio.io/api/security/v1alpha1"
)

const serverConfig = `trustDomain: cluster.local
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
	process *process
	second  *process // where two servers share the load; else nil
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
	t.process.stop()
}

func (t *target) processes() []*process {
	if t.second == nil {
		return []*process{t.process}
	}
	return []*process{t.process, t.second}
}

// cpuTime is what all its processes have used so far.
func (t *target) cpuTime() (sum time.Duration, err error) {
	for _, p := range t.processes() {
		used, err := cpuTime(p.pid())
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
	p, err := startProcess(ctx, dir, self, floorArgument, dir)
	if err != nil {
		return nil, err
	}
	t := &target{name: "floor", process: p}
	return t, orStop(t, t.connect(ctx, dir, floorAddrFile, floorRootsFile, conns))
}

// startServer makes an authority in dir and runs the server under test on it until it says ready.
func startServer(ctx context.Context, binary, dir string, conns int, logged bool) (*target, error) {
	path := filepath.Join(dir, "server.yaml")
	text := fmt.Sprintf(serverConfig, "sqlite: state.db", filepath.Join(dir, "jwks.json"))
	if logged {
		text += "issuanceLog: log\n"
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return nil, fmt.Errorf("writing server config: %w", err)
	}
	if err := makeAuthority(ctx, binary, path); err != nil {
		return nil, err
	}
	return runServer(ctx, binary, dir, path, conns)
}

func makeAuthority(ctx context.Context, binary, config string) error {
	if out, err := exec.CommandContext(ctx, binary, "authority", "init", "-c", config).CombinedOutput(); err != nil {
		return fmt.Errorf("making authority: %w: %s", err, out)
	}
	return nil
}

// runServer starts a server whose authority is made, and connects to it.
func runServer(ctx context.Context, binary, dir, path string, conns int) (*target, error) {
	p, err := startProcess(ctx, dir, binary, "server", "-c", path)
	if err != nil {
		return nil, err
	}
	t := &target{name: "chancery", process: p}
	return t, orStop(t, func() error {
		addrs, err := p.addresses(ctx, filepath.Join(dir, "server.addr"))
		if err != nil {
			return err
		}
		t.metrics = "http://" + addrs["metrics"]
		if err := p.waitFor(ctx, "readiness", func() bool { return get(ctx, t.metrics+"/readyz") == nil }); err != nil {
			return err
		}
		return t.connect(ctx, dir, "server.addr", "roots.pem", conns)
	}())
}

// startAgent runs the agent for the identity of the token in dir and returns its process and the URL of its metrics
// once it says that it has its certificate.
func startAgent(ctx context.Context, binary, dir, server, id string) (*process, string, error) {
	path := filepath.Join(dir, "agent.yaml")
	if err := os.WriteFile(path, fmt.Appendf(nil, agentConfig, server, id), 0o600); err != nil {
		return nil, "", fmt.Errorf("writing agent config: %w", err)
	}
	p, err := startProcess(ctx, dir, binary, "agent", "-c", path)
	if err != nil {
		return nil, "", err
	}
	addrs, err := p.addresses(ctx, filepath.Join(dir, "agent.addr"))
	if err == nil {
		err = p.waitFor(ctx, "readiness", func() bool { return get(ctx, "http://"+addrs["metrics"]+"/readyz") == nil })
	}
	if err != nil {
		p.stop()
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
	addrs, err := t.process.addresses(ctx, filepath.Join(dir, addrFile))
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

// process is a child of this program; what it prints goes to a file.
type process struct {
	name  string
	cmd   *exec.Cmd
	stdin io.Closer // open as long as we live: the floor ends when it closes
	log   string
	done  chan struct{} // closed when the child has ended
}

func startProcess(ctx context.Context, dir, binary string, args ...string) (*process, error) {
	p := &process{name: args[0], log: filepath.Join(dir, args[0]+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening log of %s: %w", p.name, err)
	}
	defer log.Close()
	p.cmd = exec.CommandContext(ctx, binary, args...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = 10 * time.Second
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", p.name, err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", p.name, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in ProcessState
		close(p.done)
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// ended is nil as long as the child runs, then says how it ended and what it printed last.
func (p *process) ended() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended: %s: %s", p.name, p.cmd.ProcessState, p.tail())
	default:
		return nil
	}
}

// stop asks the child to end and kills it if it does not.
func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.stdin.Close()
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// addresses waits for the child's address file and returns its lines by key.
func (p *process) addresses(ctx context.Context, path string) (map[string]string, error) {
	addrs := make(map[string]string)
	err := p.waitFor(ctx, "address file "+filepath.Base(path), func() bool {
		text, err := os.ReadFile(path)
		for line := range strings.Lines(string(text)) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			addrs[key] = value
		}
		return err == nil
	})
	return addrs, err
}

// waitFor polls until the condition holds, and gives up when the child ends or half a minute has passed.
func (p *process) waitFor(ctx context.Context, what string, holds func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-p.done:
			return fmt.Errorf("waiting for %s: %w", what, p.ended())
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s of %s: %w: %s", what, p.name, ctx.Err(), p.tail())
		}
	}
	return nil
}

// tail is the end of what the child printed.
func (p *process) tail() []byte {
	text, _ := os.ReadFile(p.log)
	return bytes.TrimSpace(text[max(0, len(text)-2000):])
}

// get fetches the URL and drops the body; any status but 200 is an error.
func get(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	in, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return fmt.Errorf("getting %s: %w", url, err)
	}
	out, err := http.DefaultClient.Do(in)
	if err != nil {
		return err
	}
	defer out.Body.Close()
	if _, err := io.Copy(io.Discard, out.Body); err != nil {
		return fmt.Errorf("getting %s: %w", url, err)
	}
	if out.StatusCode != http.StatusOK {
		return fmt.Errorf("getting %s: %s", url, out.Status)
	}
	return nil
}
