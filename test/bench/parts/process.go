package parts

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Process is a child of this program; what it prints goes to a file.
type Process struct {
	Name  string
	cmd   *exec.Cmd
	stdin io.Closer // open as long as we live: the floor ends when it closes
	log   string
	done  chan struct{} // closed when the child has ended
}

// Start starts a program; what it prints goes to a file in dir that is named after its first argument.
func Start(ctx context.Context, dir, binary string, args ...string) (*Process, error) {
	p := &Process{Name: args[0], log: filepath.Join(dir, args[0]+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening log of %s: %w", p.Name, err)
	}
	defer log.Close()
	p.cmd = exec.CommandContext(ctx, binary, args...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = 10 * time.Second
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", p.Name, err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", p.Name, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in ProcessState
		close(p.done)
	}()
	return p, nil
}

// PID is its number.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Ended is nil as long as the child runs, then says how it ended and what it printed last.
func (p *Process) Ended() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended: %s: %s", p.Name, p.cmd.ProcessState, p.tail())
	default:
		return nil
	}
}

// Stop asks the child to end and kills it if it does not.
func (p *Process) Stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.stdin.Close()
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// Addresses waits for the child's address file and returns its lines by key.
func (p *Process) Addresses(ctx context.Context, path string) (map[string]string, error) {
	addrs := make(map[string]string)
	err := p.WaitFor(ctx, "address file "+filepath.Base(path), func() bool {
		text, err := os.ReadFile(path)
		for line := range strings.Lines(string(text)) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			addrs[key] = value
		}
		return err == nil
	})
	return addrs, err
}

// WaitFor polls until the condition holds, and gives up when the child ends or half a minute has passed.
func (p *Process) WaitFor(ctx context.Context, what string, holds func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-p.done:
			return fmt.Errorf("waiting for %s: %w", what, p.Ended())
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s of %s: %w: %s", what, p.Name, ctx.Err(), p.tail())
		}
	}
	return nil
}

// tail is the end of what the child printed.
func (p *Process) tail() []byte {
	text, _ := os.ReadFile(p.log)
	return bytes.TrimSpace(text[max(0, len(text)-2000):])
}

// Get fetches the URL and drops the body; any status but 200 is an error.
func Get(ctx context.Context, url string) error {
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
