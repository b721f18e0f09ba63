package house

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const module = "github.com/chancery-project/chancery"

// limits of DESIGN.md and the house style, in lines.
const (
	maxPackage  = 1500
	maxFunction = 80
)

// pkg is what `go list -json` says of a package.
type pkg struct {
	ImportPath, Dir  string
	Imports, GoFiles []string
}

func (p pkg) room() string { return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/") }

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Imports,GoFiles", module+"/...")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var all []pkg
	for dec := json.NewDecoder(out); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if len(all) < 10 {
		t.Fatalf("only %d packages found", len(all))
	}
	return all
}

// arrows says which rooms a room may import, besides those within itself. What is not listed may import nothing of ours.
var arrows = map[string][]string{
	"api":    {},
	"trust":  {},
	"ca":     {"trust"},
	"policy": {"trust"},
	"rotate": {"ca", "policy", "trust", "api"},
	"csr":    {"ca", "policy", "trust", "api"},
	"sds":    {"ca", "policy", "trust", "api"},
	"proxy":  {"ca", "policy", "trust", "api"},
	"cmd":    {"csr", "sds", "rotate", "proxy", "ca", "policy", "trust", "api"},
	"test":   {"cmd", "csr", "sds", "rotate", "proxy", "ca", "policy", "trust", "api"},
}

func allowed(from, to string) bool {
	a, _, _ := strings.Cut(from, "/")
	b, _, _ := strings.Cut(to, "/")
	if a == b {
		return true
	}
	for _, r := range arrows[a] {
		if r == b {
			return true
		}
	}
	return false
}

func TestArrows(t *testing.T) {
	for _, p := range packages(t) {
		for _, imp := range p.Imports {
			if to, ok := strings.CutPrefix(imp, module+"/"); ok && !allowed(p.room(), to) {
				t.Errorf("%s imports %s, against the arrows of DESIGN.md: cmd -> {csr, sds, rotate, proxy} -> {ca, policy} -> trust", p.room(), to)
			}
		}
	}
}

// Some libraries may be known in a few rooms only.
func TestLibrariesKeepToTheirRooms(t *testing.T) {
	rules := []struct {
		library string
		may     func(room string) bool
		why     string
	}{
		{"k8s.io/client-go", func(r string) bool { return path.Base(r) == "kube" }, "only packages named kube talk to Kubernetes"},
		{"k8s.io/api/", func(r string) bool { return path.Base(r) == "kube" }, "only packages named kube know its objects"},
		{"github.com/envoyproxy/go-control-plane", func(r string) bool {
			return r == "sds" || strings.HasPrefix(r, "sds/") || r == "proxy" || r == "policy/envoy"
		}, "Envoy's API is known in sds, proxy and policy/envoy only"},
		{"github.com/jackc/", func(r string) bool { return r == "ca/store/postgres" || r == "ca/store/postgres/pgtest" }, "only the store knows its engine"},
		{"modernc.org/sqlite", func(r string) bool { return r == "ca/store" }, "only the store knows its engine"},
		{"github.com/zmap/", func(r string) bool { return r == "ca/zlint" }, "only ca/zlint lints"},
		{"github.com/spf13/cobra", func(r string) bool { return strings.HasPrefix(r, "cmd/") }, "only commands have flags"},
	}
	for _, p := range packages(t) {
		if strings.HasPrefix(p.room(), "test/") {
			continue
		}
		for _, imp := range p.Imports {
			for _, r := range rules {
				if strings.HasPrefix(imp, r.library) && !r.may(p.room()) {
					t.Errorf("%s imports %s: %s", p.room(), imp, r.why)
				}
			}
		}
	}
}

func TestTestsAreImportedByNobody(t *testing.T) {
	for _, p := range packages(t) {
		for _, imp := range p.Imports {
			if strings.HasPrefix(imp, module+"/test/") && !strings.HasPrefix(p.room(), "test/") {
				t.Errorf("%s imports %s", p.room(), imp)
			}
		}
	}
}

func TestEachPackageSaysWhatItOwnsAndIsSmall(t *testing.T) {
	for _, p := range packages(t) {
		docs, lines := 0, 0
		fset := token.NewFileSet()
		for _, name := range p.GoFiles {
			if strings.HasSuffix(name, ".pb.go") {
				continue
			}
			file := filepath.Join(p.Dir, name)
			f, err := parser.ParseFile(fset, file, nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if f.Doc != nil {
				docs++
			}
			lines += fset.File(f.Pos()).LineCount()
			checkFunctions(t, fset, p.room()+"/"+name, f)
		}
		if docs != 1 {
			t.Errorf("%s has %d package comments; one should say what it owns and what it refuses", p.room(), docs)
		}
		if lines > maxPackage {
			t.Errorf("%s has %d lines; above %d it should be split", p.room(), lines, maxPackage)
		}
		for _, bad := range []string{"util", "utils", "common", "pkg", "helpers", "internal"} {
			if path.Base(p.room()) == bad {
				t.Errorf("%s: the name does not say what it owns", p.room())
			}
		}
	}
}

func checkFunctions(t *testing.T, fset *token.FileSet, name string, f *ast.File) {
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		if n := fset.Position(fn.End()).Line - fset.Position(fn.Pos()).Line; n > maxFunction {
			t.Errorf("%s: %s has %d lines; above %d one cannot see it whole", name, fn.Name.Name, n, maxFunction)
		}
		if fn.Name.IsExported() && fn.Doc == nil && (fn.Recv == nil || ast.IsExported(receiver(fn))) && !strings.Contains(name, "test/") {
			t.Errorf("%s: %s is exported and has no comment", name, fn.Name.Name)
		}
	}
}

func receiver(fn *ast.FuncDecl) string {
	e := fn.Recv.List[0].Type
	if s, ok := e.(*ast.StarExpr); ok {
		e = s.X
	}
	if i, ok := e.(*ast.IndexExpr); ok {
		e = i.X
	}
	if id, ok := e.(*ast.Ident); ok {
		return id.Name
	}
	return ""
}

// TestPagesNameRealTests: each test that a page names as `folder: TestName` is there.
func TestPagesNameRealTests(t *testing.T) {
	for page, least := range map[string]int{"security.md": 100, "spiffe.md": 40} {
		namesRealTests(t, page, least)
	}
}

func namesRealTests(t *testing.T, name string, least int) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join("../../docs", name))
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`([a-z][a-z0-9/]*): ((?:Test|Fuzz)[A-Za-z0-9_]+)`").FindAllStringSubmatch(string(page), -1)
	if len(named) < least {
		t.Fatalf("docs/%s names only %d tests", name, len(named))
	}
	if n := len(regexp.MustCompile(`\b(Test|Fuzz)[A-Z]\w*`).FindAllString(string(page), -1)); n != len(named) {
		t.Errorf("docs/%s names %d tests as `folder: TestName`, and %d in all; a name that is not found this way is not checked", name, len(named), n)
	}
	functions := map[string]string{} // of the tests in a folder
	for _, n := range named {
		dir, test := n[1], n[2]
		if _, read := functions[dir]; !read {
			files, err := filepath.Glob(filepath.Join("../..", dir, "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range files {
				data, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				functions[dir] += string(data)
			}
		}
		if !strings.Contains(functions[dir], "\nfunc "+test+"(") {
			t.Errorf("docs/%s names %s in %s, which is not there", name, test, dir)
		}
	}
}

// TestFaultsAreForTests: no program comes between its own writes.
func TestFaultsAreForTests(t *testing.T) {
	for _, p := range packages(t) {
		if p.room() == "ca/durable" || p.room() == "ca/durable/durabletest" {
			continue
		}
		for _, imp := range p.Imports {
			if imp == module+"/ca/durable/durabletest" {
				t.Errorf("%s imports durabletest", p.room())
			}
		}
		for _, name := range p.GoFiles {
			data, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(data), "durable.Inject(") {
				t.Errorf("%s/%s calls durable.Inject", p.room(), name)
			}
		}
	}
}
