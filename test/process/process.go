// Package process owns the programs that tests start: each in a process group that ends with its test, with its output in a file,
// and the tools among them, which test/tools installs.
//
// It refuses fixed waits: what is waited for is a condition.
package process

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// PollEvery is how often a condition is looked at: short next to any start-up, long next to a look.
const PollEvery = 20 * time.Millisecond

// Config says what to start.
type Config struct {
	Name string   // for messages and the log file's name
	Path string   // the executable
	Args []string // without the program's name
	Dir  string   // working directory; empty: the test's
	Env  []string // the whole environment; nil: the test's own
	Log  string   // file for both outputs; empty: NAME.log in a folder of the test

	As *syscall.Credential // whom it runs as; nil: the test's user
}

// Process is a running program. Its two outputs go to one file, its process group ends with the test, and the kernel kills it
// when the test process dies first.
type Process struct {
	Name    string
	LogFile string

	pid  int
	done chan struct{} // closed once the process was reaped
	err  error         // what Wait said; read after done only
}

// Start starts a program for one test. At the end of the test the group is killed; of a failed test the end of the log
// is shown.
func Start(t testing.TB, cfg Config) *Process {
	t.Helper()
	SkipShort(t)
	if cfg.Log == "" {
		cfg.Log = filepath.Join(t.TempDir(), cfg.Name+".log")
	}
	p, err := Launch(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("end of %s's log:\n%s", p.Name, p.LogTail(60))
		}
	})
	return p
}

// Launch is Start without a test, for the parts that all tests share.
func Launch(cfg Config) (*Process, error) {
	log, err := os.OpenFile(cfg.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the log of %s: %w", cfg.Name, err)
	}
	defer log.Close()
	cmd := exec.Command(cfg.Path, cfg.Args...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = cfg.Dir, cfg.Env, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL, Credential: cfg.As}

	p := &Process{Name: cfg.Name, LogFile: cfg.Log, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// PDEATHSIG means the death of the thread that forked, so that thread is kept until the child has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			started <- fmt.Errorf("starting %s: %w", cfg.Name, err)
			return
		}
		p.pid = cmd.Process.Pid
		started <- nil
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// PID returns the process id.
func (p *Process) PID() int { return p.pid }

// Done is closed once the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exited says whether the process has ended, and how.
func (p *Process) Exited() (bool, error) {
	select {
	case <-p.done:
		return true, p.err
	default:
		return false, nil
	}
}

// Signal sends a signal to the process alone.
func (p *Process) Signal(sig syscall.Signal) error {
	if exited, _ := p.Exited(); exited {
		return os.ErrProcessDone
	}
	return syscall.Kill(p.pid, sig)
}

// Kill kills the whole process group (kill -9) and returns when the process was reaped.
func (p *Process) Kill() {
	// The group may outlive its leader; there is nothing to do about an error, which means that nothing is left.
	_ = syscall.Kill(-p.pid, syscall.SIGKILL)
	<-p.done
}

// Stop asks the process to end (SIGTERM) and fails the test if it has not within the limit. It returns what Wait said: nil for
// exit status 0.
func (p *Process) Stop(t testing.TB, limit time.Duration) error {
	t.Helper()
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatalf("stopping %s: %v", p.Name, err)
	}
	select {
	case <-p.done:
		return p.err
	case <-time.After(limit):
		t.Fatalf("%s has not stopped within %v of SIGTERM", p.Name, limit)
		return nil
	}
}

// Log returns all that the process has printed.
func (p *Process) Log() string {
	data, err := os.ReadFile(p.LogFile)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// LogTail returns the last n lines of the log.
func (p *Process) LogTail(n int) string {
	lines := strings.Split(strings.TrimRight(p.Log(), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// WaitFor waits until the condition holds (returns nil) and fails the test at the limit, or at once when the process ends.
func (p *Process) WaitFor(t testing.TB, limit time.Duration, what string, cond func() error) {
	t.Helper()
	if err := p.Await(limit, what, cond); err != nil {
		t.Fatal(err)
	}
}

// Await is WaitFor without a test.
func (p *Process) Await(limit time.Duration, what string, cond func() error) error {
	err := Poll(limit, func() (bool, error) {
		if exited, err := p.Exited(); exited {
			return true, fmt.Errorf("it has ended (%v):\n%s", err, p.LogTail(20))
		}
		return false, cond()
	})
	if err != nil {
		return fmt.Errorf("waiting until %s %s: %w", p.Name, what, err)
	}
	return nil
}

// WaitLog waits until the process has printed the text.
func (p *Process) WaitLog(t testing.TB, limit time.Duration, text string) {
	t.Helper()
	p.WaitFor(t, limit, fmt.Sprintf("prints %q", text), func() error {
		if strings.Contains(p.Log(), text) {
			return nil
		}
		return errors.New("not printed")
	})
}

// WaitHTTP waits until a GET of the address answers 200.
func (p *Process) WaitHTTP(t testing.TB, limit time.Duration, url string) {
	t.Helper()
	p.WaitFor(t, limit, "answers 200 at "+url, func() error {
		_, err := HTTPGet(http.DefaultClient, url)
		return err
	})
}

// Eventually waits until the condition holds (returns nil), and fails the test at the limit with what it said last.
func Eventually(t testing.TB, limit time.Duration, what string, cond func() error) {
	t.Helper()
	if err := Poll(limit, func() (bool, error) { return false, cond() }); err != nil {
		t.Fatalf("waiting until %s: %v", what, err)
	}
}

// Poll calls cond until it returns nil or says that it is of no use to go on.
func Poll(limit time.Duration, cond func() (stop bool, err error)) error {
	deadline := time.Now().Add(limit)
	for {
		stop, err := cond()
		if err == nil || stop {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %v: %w", limit, err)
		}
		time.Sleep(PollEvery)
	}
}

// HTTPGet returns the body of an answer with status 200.
func HTTPGet(client *http.Client, url string) ([]byte, error) {
	resp, err := client.Get(url)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s: %s: %.200s", url, resp.Status, body)
	}
	return body, nil
}

// FreePort asks the system for a port on loopback, for programs that cannot take port 0 and say what they got. Another process
// may take it in between: who uses it must be ready to try again.
func FreePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("looking for a free port: %w", err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
