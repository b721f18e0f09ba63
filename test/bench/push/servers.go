package main

import (
	"context"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/chancery-project/chancery/test/bench/parts"
	"github.com/chancery-project/chancery/test/process"
)

const serverConfig = `trustDomain: cluster.local
listen: 127.0.0.1:0
metrics: 127.0.0.1:0
addrFile: server.addr
serverNames: [localhost, 127.0.0.1]
state: {sqlite: state.db}
auditLog: audit.jsonl
issuanceLog: log
clusters:
- name: Kubernetes
  issuer: https://kubernetes.default.svc
  audiences: [istio-ca]
  jwksFile: jwks.json
  tokenReview: never
`

// limit of what takes a moment.
const limit = 30 * time.Second

// target is a running server.
type target struct {
	name    string
	process *process.Process
	addr    string
	roots   *x509.CertPool
	metrics string // base URL; empty for the floor
	push    func(ctx context.Context, n int) error
	all     func(ctx context.Context, version uint64) error // returns once all that are connected have acknowledged what was pushed last
}

func (t *target) stop() { t.process.Kill() }

// startServer makes an authority in dir and runs the server under test on it until it says ready.
func startServer(ctx context.Context, dir, binary string) (*target, error) {
	config := filepath.Join(dir, "server.yaml")
	if err := os.WriteFile(config, []byte(serverConfig), 0o600); err != nil {
		return nil, fmt.Errorf("writing server config: %w", err)
	}
	if err := parts.MakeAuthority(ctx, binary, config); err != nil {
		return nil, err
	}
	t := &target{name: "chancery"}
	err := t.launch(dir, binary, "server", "-c", config)
	if err == nil {
		err = t.process.Await(limit, "readiness", func() error { _, err := process.HTTPGet(http.DefaultClient, t.metrics+"/readyz"); return err })
	}
	if err != nil {
		return nil, orStop(t, err)
	}
	t.push = func(ctx context.Context, n int) error {
		out, err := exec.CommandContext(ctx, binary, "revoke", fmt.Sprintf("77%038x", n+1), "--wait", "0s", "-c", config).CombinedOutput()
		if err != nil {
			return fmt.Errorf("revoking: %w: %s", err, out)
		}
		return nil
	}
	t.all = func(context.Context, uint64) error {
		return t.process.Await(limit, "all agents to be up to date", func() error {
			text, err := process.HTTPGet(http.DefaultClient, t.metrics+"/metrics")
			if err != nil {
				return err
			}
			if behind := behind.FindSubmatch(text); behind == nil || string(behind[1]) != "0" {
				return fmt.Errorf("%s agents are behind", behind)
			}
			return nil
		})
	}
	return t, nil
}

var behind = regexp.MustCompile(`(?m)^chancery_csr_agents_behind (\S+)$`)

// startFloor runs this very program again, as the bare server.
func startFloor(_ context.Context, dir, _ string) (*target, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding own executable: %w", err)
	}
	dir = filepath.Join(dir, "floor")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making a folder for the floor: %w", err)
	}
	t := &target{name: "floor"}
	if err := t.launch(dir, self, floorArgument, dir); err != nil {
		return nil, orStop(t, err)
	}
	t.push = func(context.Context, int) error { return t.process.Signal(floorPush) }
	t.all = func(_ context.Context, version uint64) error {
		return t.process.Await(limit, "all agents to be up to date", func() error {
			text, err := os.ReadFile(filepath.Join(dir, floorDone))
			if err != nil {
				return err
			}
			if done, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err != nil || done < version {
				return fmt.Errorf("all have version %d", done)
			}
			return nil
		})
	}
	return t, nil
}

func orStop(t *target, err error) error {
	if t.process != nil {
		err = fmt.Errorf("%w\n%s", err, t.process.LogTail(10))
		t.stop()
	}
	return err
}

// launch starts a program in a folder and reads where it listens, and its roots.
func (t *target) launch(dir, path string, args ...string) (err error) {
	t.process, err = process.Launch(process.Config{Name: t.name, Path: path, Args: args, Dir: dir, Log: filepath.Join(dir, t.name+".log")})
	if err != nil {
		return err
	}
	return t.process.Await(limit, "its address", func() error {
		text, err := os.ReadFile(filepath.Join(dir, "server.addr"))
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			switch key, value, _ := strings.Cut(strings.TrimSpace(line), "="); key {
			case "listen":
				t.addr = value
			case "metrics":
				t.metrics = "http://" + value
			}
		}
		if text, err = os.ReadFile(filepath.Join(dir, "roots.pem")); err != nil {
			return err
		}
		if t.roots = x509.NewCertPool(); !t.roots.AppendCertsFromPEM(text) {
			return fmt.Errorf("no certificate in %s", filepath.Join(dir, "roots.pem"))
		}
		return nil
	})
}

// settled returns the private memory of the server in bytes once it has held still (within 1 %) for three seconds, or after half a minute.
func (t *target) settled(ctx context.Context) (float64, error) {
	steady, begun := 0.0, time.Now()
	for since := begun; time.Since(since) < 3*time.Second && time.Since(begun) < limit; {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
		if t.metrics != "" { // its garbage has the server collect
			if _, err := process.HTTPGet(http.DefaultClient, t.metrics+"/metrics"); err != nil {
				return 0, err
			}
		} else if err := t.process.Signal(floorCollect); err != nil {
			return 0, err
		}
		now, err := private(t.process.PID())
		if err != nil {
			return 0, err
		}
		if now < steady*0.99 || now > steady*1.01 {
			steady, since = now, time.Now()
		}
	}
	return private(t.process.PID())
}

// private returns what a process holds that it shares with nobody and no file, in bytes.
func private(pid int) (float64, error) {
	m, err := parts.ReadMemory(pid)
	if err == nil && m.Private == 0 {
		err = fmt.Errorf("/proc/%d/status has no RssAnon", pid)
	}
	return m.Private * 1e6, err
}
