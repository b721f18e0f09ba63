package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/test/process"
)

// The programs of these tests are those of package process.
type (
	Process       = process.Process
	ProcessConfig = process.Config
)

const pollEvery = process.PollEvery

// StartProcess starts a program for one test.
func StartProcess(t testing.TB, cfg ProcessConfig) *Process {
	t.Helper()
	return process.Start(t, cfg)
}

// Eventually waits until the condition holds (returns nil), and fails the test at the limit with what it said last.
func Eventually(t testing.TB, limit time.Duration, what string, cond func() error) {
	t.Helper()
	process.Eventually(t, limit, what, cond)
}

func httpGet(client *http.Client, url string) ([]byte, error) { return process.HTTPGet(client, url) }

func freePort() (int, error) { return process.FreePort() }

// SocketDir returns a folder with a short name for Unix sockets, whose paths the kernel limits to 107 bytes. It is removed at
// the end of the test.
func SocketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(sharedDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// writeFile writes a file and the folders above it.
func writeFile(t testing.TB, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// sharedDir is the folder of what lasts as long as the test process (the binary, the API server) and of sockets. While the process
// lives it holds a lock in there.
var sharedDir = sync.OnceValue(func() string {
	dir, err := os.MkdirTemp("/tmp", "e2e-")
	if err != nil {
		panic(err)
	}
	lock, err := os.Create(filepath.Join(dir, "lock"))
	if err == nil {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		panic(err)
	}
	atExit(func() {
		os.RemoveAll(dir)
		lock.Close()
	})
	return dir
})

// sweep removes the folders of test processes that have died before their TestMain could, such as by a timeout.
func sweep() {
	locks, _ := filepath.Glob("/tmp/e2e-*/lock")
	for _, path := range locks {
		lock, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			continue
		}
		// One that is new may have been created and not locked yet.
		info, err := lock.Stat()
		if err == nil && time.Since(info.ModTime()) > time.Minute && unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			os.RemoveAll(filepath.Dir(path))
		}
		lock.Close()
	}
}

var exit struct {
	sync.Mutex // guards funcs
	funcs      []func()
}

// atExit registers what TestMain does after the last test, last registered first.
func atExit(f func()) {
	exit.Lock()
	defer exit.Unlock()
	exit.funcs = append(exit.funcs, f)
}

func TestMain(m *testing.M) {
	sweep()
	code := m.Run()
	exit.Lock()
	for i := len(exit.funcs) - 1; i >= 0; i-- {
		exit.funcs[i]()
	}
	exit.Unlock()
	os.Exit(code)
}
