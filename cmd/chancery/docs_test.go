package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/cmd/chancery/agent"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server"
)

// configFiles are the files whose structs make up the config files.
var configFiles = []string{
	"server/config.go",
	"server/stores/config.go",
	"../../ca/store/kube/kube.go",
	"../../ca/store/postgres/config.go",
	"server/clusters/config.go",
	"server/keystore/keystore.go",
	"server/lifetimes/lifetimes.go",
	"server/parents/config.go",
	"server/rotating/config.go",
	"server/admission/admission.go",
	"server/connections/connections.go",
	"server/federating/config.go",
	"agent/config.go",
	"../../ca/profile.go",
	"server/naming/config.go",
	"server/signing/config.go",
	"server/publishing/config.go",
}

// yamlField is one field of a config struct.
type yamlField struct{ owner, name, doc string }

// yamlFields returns the fields of all config files of commands.
func yamlFields(t *testing.T) []yamlField {
	t.Helper()
	all := configFields(t, configFiles...)
	if len(all) < 40 {
		t.Fatalf("only %d fields found", len(all))
	}
	return all
}

// configFields returns the fields of every struct named *Config in source files.
func configFields(t *testing.T, files ...string) []yamlField {
	t.Helper()
	var all []yamlField
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || !strings.HasSuffix(spec.Name.Name, "Config") {
				return true
			}
			s, ok := spec.Type.(*ast.StructType)
			if !ok {
				return true
			}
			for _, field := range s.Fields.List {
				if field.Tag == nil {
					t.Errorf("%s: %s.%s has no json tag", file, spec.Name.Name, field.Names)
					continue
				}
				tag, err := strconv.Unquote(field.Tag.Value)
				if err != nil {
					t.Fatal(err)
				}
				name, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
				all = append(all, yamlField{file + ": " + spec.Name.Name + "." + field.Names[0].Name, name, field.Doc.Text()})
			}
			return true
		})
	}
	return all
}

// TestConfigFieldsAreDocumented: the comments are the reference.
func TestConfigFieldsAreDocumented(t *testing.T) {
	for _, f := range yamlFields(t) {
		_, name, _ := strings.Cut(f.owner, ".go: ")
		_, name, _ = strings.Cut(name, ".")
		if !strings.HasPrefix(f.doc, name+" ") && !strings.HasPrefix(f.doc, name+",") {
			t.Errorf("%s has no comment that begins with its name", f.owner)
		}
	}
}

// TestConfigReference: docs/config.md knows every field, and no field that there is not.
func TestConfigReference(t *testing.T) {
	data, err := os.ReadFile("../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, f := range yamlFields(t) {
		known[f.name] = true
		if !strings.Contains(string(data), "| `"+f.name+"` |") {
			t.Errorf("docs/config.md has no row for `%s` (%s)", f.name, f.owner)
		}
	}
	for line := range strings.Lines(string(data)) {
		if name, _, ok := strings.Cut(strings.TrimPrefix(line, "| `"), "` |"); ok && strings.HasPrefix(line, "| `") && !known[name] {
			t.Errorf("docs/config.md has a row for `%s`, which is no field", name)
		}
	}
}

// TestConfigExamples: what docs/config.md shows as YAML is read without an error.
func TestConfigExamples(t *testing.T) {
	data, err := os.ReadFile("../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	var n int
	for i, block := range strings.Split(string(data), "```") {
		text, ok := strings.CutPrefix(block, "yaml\n")
		if i%2 == 0 || !ok {
			continue
		}
		n++
		var into any = new(server.Config)
		if strings.HasPrefix(text, "# agent") {
			into = new(agent.Config)
		}
		if err := process.DecodeConfig([]byte(text), into); err != nil {
			t.Errorf("example %d: %v\n%s", n, err, text)
		}
	}
	if n < 4 {
		t.Errorf("only %d examples found", n)
	}
}

// TestUnknownFieldsAreNamed puts an unknown field into every struct of both configs.
func TestUnknownFieldsAreNamed(t *testing.T) {
	for _, c := range []struct {
		into       any
		yaml, path string
	}{
		{new(server.Config), "%: 1", "%"},
		{new(server.Config), "state: {%: 1}", "state.%"},
		{new(server.Config), "state: {postgres: {%: 1}}", "state.postgres.%"},
		{new(server.Config), "state: {kubernetes: {%: 1}}", "state.kubernetes.%"},
		{new(server.Config), "issuer: {%: 1}", "issuer.%"},
		{new(server.Config), "parent: {%: 1}", "parent.%"},
		{new(server.Config), "parent: {vault: {%: 1}}", "parent.vault.%"},
		{new(server.Config), "issuers: [{%: 1}]", "issuers[0].%"},
		{new(server.Config), "lifetimes: {%: 1}", "lifetimes.%"},
		{new(server.Config), "rotation: {%: 1}", "rotation.%"},
		{new(server.Config), "naming: {%: 1}", "naming.%"},
		{new(server.Config), "naming: {rules: [{%: 1}]}", "naming.rules[0].%"},
		{new(server.Config), "naming: {clusters: [{%: 1}]}", "naming.clusters[0].%"},
		{new(server.Config), "profile: {%: 1}", "profile.%"},
		{new(server.Config), "keys: {%: 1}", "keys.%"},
		{new(server.Config), "keys: {secrets: {%: 1}}", "keys.secrets.%"},
		{new(server.Config), "clusters: [{name: a}, {%: 1}]", "clusters[1].%"},
		{new(server.Config), "admission: {%: 1}", "admission.%"},
		{new(server.Config), "admission: {perNode: {%: 1}}", "admission.perNode.%"},
		{new(server.Config), "connections: {%: 1}", "connections.%"},
		{new(server.Config), "federation: [{%: 1}]", "federation[0].%"},
		{new(server.Config), "bundleEndpoint: {%: 1}", "bundleEndpoint.%"},
		{new(agent.Config), "%: 1", "%"},
		{new(agent.Config), "naming: [{%: 1}]", "naming[0].%"},
	} {
		const name = "colour"
		err := process.DecodeConfig([]byte(strings.ReplaceAll(c.yaml, "%", name)), c.into)
		if want := `"` + strings.ReplaceAll(c.path, "%", name) + `"`; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", c.yaml, err, want)
		}
	}
}
