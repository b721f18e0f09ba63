package process

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
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
	SkipShort(t)
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

// SkipShort skips a test that starts processes under -short.
func SkipShort(t testing.TB) {
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
	return filepath.Join(Root(t), ".tools")
}

// Root is the folder of the module, above the working directory of `go test`.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("no go.mod above the working directory")
	return ""
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
