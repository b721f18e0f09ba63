package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/chancery-project/chancery/ca/ceremony"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

const ceremonyDoc = "../../docs/ceremony.md"

// TestCeremonyReference: docs/ceremony.md has a row for every field, and no other; the comments begin with the field's name.
func TestCeremonyReference(t *testing.T) {
	data, err := os.ReadFile(ceremonyDoc)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	_, reference, _ := strings.Cut(text, "\n## Every field\n")
	reference, _, _ = strings.Cut(reference, "\n## ")
	known := map[string]bool{}
	for _, f := range configFields(t, "../../ca/ceremony/config.go") {
		known[f.name] = true
		if !strings.Contains(reference, "| `"+f.name+"` |") {
			t.Errorf("docs/ceremony.md has no row for `%s` (%s)", f.name, f.owner)
		}
		if name := f.owner[strings.LastIndex(f.owner, ".")+1:]; !strings.HasPrefix(f.doc, name+" ") {
			t.Errorf("%s has no comment that begins with its name", f.owner)
		}
	}
	for line := range strings.Lines(reference) {
		if name, _, ok := strings.Cut(strings.TrimPrefix(line, "| `"), "` |"); ok && strings.HasPrefix(line, "| `") && !known[name] {
			t.Errorf("docs/ceremony.md has a row for `%s`, which is no field", name)
		}
	}
}

// TestCeremonyWalkThrough runs the files and commands of docs/ceremony.md as they stand there.
func TestCeremonyWalkThrough(t *testing.T) {
	data, err := os.ReadFile(ceremonyDoc)
	if err != nil {
		t.Fatal(err)
	}
	var commands, files strings.Builder
	for i, block := range strings.Split(string(data), "```") {
		if i%2 == 0 {
			continue
		}
		if text, ok := strings.CutPrefix(block, "yaml\n# "); ok {
			name, content, _ := strings.Cut(text, "\n")
			fmt.Fprintf(&files, "-- %s --\n%s", name, content)
		} else if text, ok := strings.CutPrefix(block, "sh\n"); ok {
			commands.WriteString(text)
		} else {
			t.Errorf("a block of another kind: %.40q", block)
		}
	}
	script := "exec sh -eu walk.sh\n! stderr .\nexists made-2026/root-key.pem made-2027/issuer-2-classic.pem roots.pem\n" +
		"grep '<ID of root-key.pem>' review.txt\ngrep 'root +active' show.txt\n-- walk.sh --\n" +
		strings.ReplaceAll(commands.String(), "authority show -c server.yaml", "authority show -c server.yaml > show.txt") + files.String()
	path := filepath.Join(t.TempDir(), "walk.txtar")
	if err := os.WriteFile(path, []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{Files: []string{path}, RequireExplicitExec: true})
	// What the page shows of the dry run is what the dry run prints.
	shown := between(t, string(data), "    Step 1: root, a root", "\n\nThen sign.")
	golden, err := os.ReadFile("../../ca/ceremony/testdata/dry-run.txt")
	if err != nil {
		t.Fatal(err)
	}
	printed := between(t, string(golden), "Step 1: root, a root", "\n\nStep 2")
	for line := range strings.Lines(strings.ReplaceAll(shown, "\n    ", "\n")) {
		if !strings.Contains(line, "  valid ") && !strings.Contains(printed+"\n", strings.TrimPrefix(line, "    ")) {
			t.Errorf("docs/ceremony.md shows a line that a dry run does not print: %q", line)
		}
	}
}

func between(t *testing.T, text, from, to string) string {
	t.Helper()
	a := strings.Index(text, from)
	if a < 0 {
		t.Fatalf("there is no %q", from)
	}
	b := strings.Index(text[a:], to)
	if b < 0 {
		t.Fatalf("there is no %q", to)
	}
	return text[a : a+b]
}

// FuzzCeremony: no file makes the reader or its checks panic, and what they take names each thing once.
func FuzzCeremony(f *testing.F) {
	data, err := os.ReadFile(ceremonyDoc)
	if err != nil {
		f.Fatal(err)
	}
	for i, block := range strings.Split(string(data), "```") {
		if i%2 == 1 {
			f.Add(strings.TrimPrefix(block, "yaml\n"))
		}
	}
	f.Add("trustDomain: a.b\nauditLog: l\noutput: o\nsteps: [{name: c, kind: crl, by: r, number: 1, nextUpdate: 2030-01-01T00:00:00Z, revoked: [{serial: ff, time: 2000-01-01T00:00:00Z}]}]")
	f.Fuzz(func(t *testing.T, text string) {
		var c ceremony.Config
		if process.DecodeConfig([]byte(text), &c) != nil || ceremony.Check(&c) != nil {
			return
		}
		seen := map[string]bool{}
		for _, s := range c.Steps {
			if seen[s.Name] || s.Name == "" || strings.ContainsAny(s.Name, "/.\x00") {
				t.Errorf("the name %q was taken", s.Name)
			}
			seen[s.Name] = true
		}
	})
}
