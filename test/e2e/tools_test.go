package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// versionArgs says how each tool is asked for its version.
var versionArgs = map[string][]string{
	"kube-apiserver": {"--version"},
	"etcd":           {"--version"},
	"envoy":          {"--version"},
	"pilot-agent":    {"version", "--short"},
	"cfssl":          {"version"},
	"bao":            {"version"},
}

var versions struct {
	sync.Mutex // guards logged
	logged     map[string]bool
}

// Tool returns the path of a pinned tool in .tools (or in $CHANCERY_TOOLS). Where it is missing the test is skipped, or fails
// when CI=true. Under -short the test is skipped. The first use of a tool logs its version.
func Tool(t testing.TB, name string) string {
	t.Helper()
	skipShort(t)
	path := filepath.Join(toolsDir(t), name)
	if _, err := os.Stat(path); err != nil {
		why := fmt.Sprintf("tool %s is not in %s; install it with test/tools/install.sh %s", name, filepath.Dir(path), name)
		if os.Getenv("CI") == "true" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	if args := versionArgs[name]; args != nil {
		logVersion(t, name, path)
	}
	return path
}

func skipShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts real processes: not under -short")
	}
}

func toolsDir(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("CHANCERY_TOOLS"); dir != "" {
		return dir
	}
	return filepath.Join(repoRoot(t), ".tools")
}

// repoRoot is found from this source file, so that it does not depend on the working directory. Under -trimpath the file's
// name says nothing; then the working directory of `go test`, which is the package's, does.
func repoRoot(t testing.TB) string {
	t.Helper()
	if _, file, _, ok := runtime.Caller(0); ok && filepath.IsAbs(file) {
		return filepath.Join(filepath.Dir(file), "..", "..")
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(wd, "..", "..")
}

func logVersion(t testing.TB, name, path string) {
	t.Helper()
	versions.Lock()
	defer versions.Unlock()
	if versions.logged[name] {
		return
	}
	// Standard output only: pilot-agent writes notes to standard error first.
	out, err := exec.CommandContext(t.Context(), path, versionArgs[name]...).Output()
	if err != nil {
		t.Fatalf("asking %s for its version: %v", path, err)
	}
	version, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	t.Logf("tool %s: %s", name, strings.TrimSpace(version))
	if versions.logged == nil {
		versions.logged = map[string]bool{}
	}
	versions.logged[name] = true
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
