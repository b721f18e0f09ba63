package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chancery-project/chancery/test/process"
)

// Tool returns the path of a pinned tool.
func Tool(t testing.TB, name string) string {
	t.Helper()
	return process.Tool(t, name)
}

func skipShort(t testing.TB) {
	t.Helper()
	process.SkipShort(t)
}

func repoRoot(t testing.TB) string {
	t.Helper()
	return process.Root(t)
}

// buildChancery builds the binary at most once in a test process; the folder is removed by TestMain.
var buildChancery = sync.OnceValues(func() (string, error) {
	bin := filepath.Join(sharedDir(), "chancery")
	// By import path: the working directory of a test lies in the module.
	cmd := exec.Command("go", "build", "-o", bin, "github.com/chancery-project/chancery/cmd/chancery")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building cmd/chancery: %w\n%s", err, out)
	}
	return bin, nil
})

// ChanceryBinary returns the program under test: $CHANCERY_BIN, or cmd/chancery built from this tree.
func ChanceryBinary(t testing.TB) string {
	t.Helper()
	skipShort(t)
	if bin := os.Getenv("CHANCERY_BIN"); bin != "" {
		return bin
	}
	bin, err := buildChancery()
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// StartChancery starts `chancery ARGS...` in dir under the given name for its log.
func StartChancery(t testing.TB, name, dir string, args ...string) *Process {
	t.Helper()
	return StartProcess(t, ProcessConfig{Name: name, Path: ChanceryBinary(t), Args: args, Dir: dir})
}

// WaitAddrs waits for the addrFile of a server or agent (lines "listen=HOST:PORT", "metrics=HOST:PORT") and returns its
// values by name.
func WaitAddrs(t testing.TB, p *Process, file string) map[string]string {
	t.Helper()
	var addrs map[string]string
	p.WaitFor(t, 30*time.Second, "writes its addresses to "+file, func() (err error) {
		addrs, err = readAddrs(file)
		return err
	})
	return addrs
}

func readAddrs(file string) (map[string]string, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	addrs := map[string]string{}
	for line := range strings.Lines(string(data)) {
		if name, addr, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			addrs[name] = addr
		}
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("%s holds no address yet", file)
	}
	return addrs, nil
}
