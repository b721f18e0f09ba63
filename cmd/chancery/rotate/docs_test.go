package rotate

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/rotate/stages"
)

func page(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile("../../../docs/rotation.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestD3GatesAreDocumented: docs/rotation.md has a row for each gate, and says what an override risks in the very words of
// rotate/stages, whose floor for readers (decision D3) is a gate of its own.
func TestD3GatesAreDocumented(t *testing.T) {
	text := page(t)
	gates := []string{stages.GateSuccessor, stages.GateReplicas, stages.GateConsumers, stages.GateReaders, stages.GateStragglers, stages.GateWait, stages.GateFiles, stages.GateIssuers}
	overridable := 0
	for _, g := range gates {
		if !strings.Contains(text, "\n| `"+g+"` | ") {
			t.Errorf("there is no row for gate %s", g)
		}
		for _, p := range []document.Phase{document.PhasePrepare, document.PhaseDistribute, document.PhaseActivate, document.PhaseReissue, document.PhaseRetire} {
			if !strings.Contains(text, "\n| "+string(p)+" | ") {
				t.Errorf("there is no row for phase %s", p)
			}
			risk := stages.Risk(p, g)
			if risk == "" {
				continue
			}
			overridable++
			row := regexp.MustCompile(fmt.Sprintf("\n\\| %s \\| [^|]*`%s`[^|]* \\| %s \\|\n", p, g, regexp.QuoteMeta(risk)))
			if !row.MatchString(text) {
				t.Errorf("no row says of an override of %s in %s: %s", g, p, risk)
			}
		}
	}
	if overridable < 8 {
		t.Errorf("only %d overrides were seen", overridable)
	}
}

// TestFieldsAreDocumented: docs/rotation.md knows every field of -o json.
func TestFieldsAreDocumented(t *testing.T) {
	_, section, _ := strings.Cut(page(t), "\n## JSON\n")
	for _, v := range []any{statusJSON{}, rotationJSON{}, gateJSON{}, overrideJSON{}, planJSON{}, phaseJSON{}} {
		for f := range reflect.TypeOf(v).Fields() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if !strings.Contains(section, "`"+name+"`") && !strings.Contains(section, "."+name+"`") {
				t.Errorf("field %s of %T is not there", name, v)
			}
		}
	}
}

// TestCommandsOfTheDocs: each `chancery rotate ...` that docs/rotation.md shows is one that there is, with flags that it has.
func TestCommandsOfTheDocs(t *testing.T) {
	seen := map[string]bool{}
	for _, line := range regexp.MustCompile("chancery (rotate [^`#\n]*)").FindAllStringSubmatch(page(t), -1) {
		words := regexp.MustCompile(`"[^"]*"|\S+`).FindAllString(line[1], -1)[1:]
		if len(words) == 0 {
			continue // a name
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
			t.Errorf("docs/rotation.md does not show `chancery rotate %s`", cmd.Name())
		}
		checkHelp(t, cmd)
	}
}

// checkHelp: the usage names no flag that there is not.
func checkHelp(t *testing.T, cmd *cobra.Command) {
	for _, flag := range regexp.MustCompile(`--([a-z-]+)`).FindAllStringSubmatch(cmd.Use, -1) {
		if cmd.Flags().Lookup(flag[1]) == nil {
			t.Errorf("usage of %s names --%s, which is no flag", cmd.Name(), flag[1])
		}
	}
}
