package migrate

import (
	"io"
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestCommandsOfTheDocs: each `chancery trust migrate ...` of docs/migration.md is one that there is, with flags that it has; and each is there.
func TestCommandsOfTheDocs(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/migration.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, line := range regexp.MustCompile("chancery trust migrate ([^`#\n]*)").FindAllStringSubmatch(string(page), -1) {
		words := strings.Fields(line[1])
		if len(words) == 0 {
			continue
		}
		cmd, rest, err := Command("").Find(words)
		if err != nil || cmd.Name() != words[0] {
			t.Errorf("%s: %v", line[0], err)
			continue
		}
		seen[cmd.Name()] = true
		if err := cmd.ParseFlags(rest); err != nil {
			t.Errorf("%s: %v", line[0], err)
		}
	}
	for _, cmd := range Command("").Commands() {
		if !seen[cmd.Name()] {
			t.Errorf("docs/migration.md does not show `chancery trust migrate %s`", cmd.Name())
		}
		for _, flag := range regexp.MustCompile(`--([a-z-]+)`).FindAllStringSubmatch(cmd.Use, -1) {
			if cmd.Flags().Lookup(flag[1]) == nil {
				t.Errorf("usage of %s names --%s, which is no flag", cmd.Name(), flag[1])
			}
		}
	}
}

// TestWhatIsAskedFor is checked before a server is asked.
func TestWhatIsAskedFor(t *testing.T) {
	for line, want := range map[string]string{
		"plan":                              "trust migrate plan: where to? Use --to",
		"start --to New":                    "trust migrate start: --to: ",
		"start --to new --share 101":        "--share 101 is not between 0 and 100",
		"issue":                             "trust migrate issue: to whom?",
		"issue --share -1":                  "--share -1 is not between",
		"override consumers --because":      "flag needs an argument",
		"override consumers":                "trust migrate override: why?",
		"status -o yaml --admin x":          "yaml",
		"start --to new --admin nowhere":    "trust migrate start: ",
		"issue --namespace a --admin none":  "trust migrate issue: ",
		"rollback --admin none":             "trust migrate rollback: ",
		"pause --rotation 1 --admin none":   "trust migrate pause: ",
		"plan --to new --share 1 --admin n": "trust migrate plan: ",
	} {
		cmd := Command("")
		cmd.SetArgs(strings.Fields(line))
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", line, err, want)
		}
	}
}
