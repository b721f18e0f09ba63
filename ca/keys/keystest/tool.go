package keystest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// tool returns the path of a pinned tool in .tools (or in $CHANCERY_TOOLS). Where it is missing the test is skipped, or fails
// when CI=true.
func tool(t testing.TB, name string) string {
	t.Helper()
	tools := os.Getenv("CHANCERY_TOOLS")
	if _, file, _, ok := runtime.Caller(0); ok && tools == "" {
		tools = filepath.Join(filepath.Dir(file), "..", "..", "..", ".tools")
	}
	path := filepath.Join(tools, name)
	if _, err := os.Stat(path); err != nil {
		why := fmt.Sprintf("tool %s is not in %s; install it with test/tools/install.sh %[1]s", name, tools)
		if os.Getenv("CI") == "true" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	return path
}
