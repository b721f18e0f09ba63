package checkup

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

const day = 24 * time.Hour

// certificate makes one that lives from a time for a while.
func certificate(t *testing.T, name string, from time.Time, life time.Duration, isCA bool) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ski := sha256.Sum256([]byte(name))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: from, NotAfter: from.Add(life), IsCA: isCA,
		BasicConstraintsValid: true, SubjectKeyId: ski[:20],
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// life is a certificate of a CA in use.
type life struct {
	kind string
	age  time.Duration
	life time.Duration
}

// caWith is a healthy CA with the certificates given; without any, a root one year into ten, an issuer and a server.
func caWith(t *testing.T, renewedBy string, lives ...life) *State {
	t.Helper()
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	if len(lives) == 0 {
		lives = []life{{KindRoot, 365 * day, 3650 * day}, {KindIssuer, time.Hour, 7 * day}, {KindServer, time.Hour, day}}
	}
	started, checked, sequenced := now.Add(-time.Hour), now.Add(-30*time.Second), now.Add(-time.Second)
	s := &State{
		Time: now, Running: true, WasReady: true, Started: &started, TrustDomain: "cluster.local", RenewedBy: renewedBy, MaxTTL: day.Seconds(),
		Document: &Document{Version: 1, Generation: 1, Logs: []Log{{ID: 1 << 24}}, BundleKey: "ab"},
		Keys:     []Key{{Name: "issuer a", Store: StoreState, Checked: &checked}, {Name: "root b", Store: StoreState, Checked: &checked}},
		AuditLog: &AuditLog{Path: "/audit"}, IssuanceLog: &IssuanceLog{Dir: "/log", Size: 10, Covered: 8, Sequenced: &sequenced},
		Clusters: []Cluster{{Name: "east", WasReady: true}, {Name: "west", WasReady: true}},
		Requests: &Requests{Reasons: map[string]Count{"TOKEN_EXPIRED": {5, 5, 5}, "INTERNAL": {0, 0, 3}, "BUSY": {0, 7, 7}}},
	}
	for _, l := range lives {
		s.Certs = append(s.Certs, NewCertificate(l.kind, "active", true, certificate(t, l.kind, now.Add(-l.age), l.life, l.kind != KindServer), now))
	}
	return s
}

// judged gives the findings as "severity id".
func judged(t *testing.T, s *State) []string {
	t.Helper()
	out := []string{}
	for _, f := range Judge(s) {
		if e, _ := entry(f.ID); !slices.Contains(e.Severities, f.Severity) {
			t.Errorf("%s is %s, which the catalogue does not say", f.ID, f.Severity)
		}
		out = append(out, string(f.Severity)+" "+f.ID)
	}
	return out
}

// TestLives: a certificate's life against the thresholds, at real values: 10-year roots, 7-day issuers that renew at half,
// 24-hour certificates of servers, cert-manager's 90 days renewed at a third, an offline root's 90-day issuers.
func TestLives(t *testing.T) {
	root, issuer, own := life{KindRoot, 365 * day, 3650 * day}, life{KindIssuer, 0, 7 * day}, life{KindServer, 0, day}
	at := func(l life, age time.Duration) life { l.age = age; return l }
	for _, c := range []struct {
		name      string
		renewedBy string
		lives     []life
		want      []string
	}{
		{"fresh", RenewedByServer, []life{root, issuer, own}, nil},
		{"issuer at half, about to be renewed", RenewedByServer, []life{root, at(issuer, 84*time.Hour), own}, nil},
		{"issuer at half and a bit, renewal is tried again", RenewedByServer, []life{root, at(issuer, 92*time.Hour), own}, nil},
		{"issuer not renewed for 9 hours", RenewedByServer, []life{root, at(issuer, 93*time.Hour), own}, []string{"critical issuer.overdue"}},
		{"issuer with 9 %", RenewedByServer, []life{root, at(issuer, 153*time.Hour), own}, []string{"critical certificate.ending"}},
		{"issuer ended", RenewedByServer, []life{root, at(issuer, 7*day), own}, []string{"critical certificate.ended"}},
		{"issuer not begun", RenewedByServer, []life{root, at(issuer, -time.Minute), own}, []string{"critical certificate.not-begun"}},
		{"server's own at 60 %, the latest that it is renewed", RenewedByServer, []life{root, issuer, at(own, 864*time.Minute)}, nil},
		{"server's own with less than a third", RenewedByServer, []life{root, issuer, at(own, 961*time.Minute)}, []string{"warning certificate.ending"}},
		{"server's own with a tenth", RenewedByServer, []life{root, issuer, at(own, 1297*time.Minute)}, []string{"critical certificate.ending"}},
		{"root at half", RenewedByServer, []life{at(root, 1825*day), issuer, own}, nil},
		{"root with a little more than a third", RenewedByServer, []life{at(root, 2433*day), issuer, own}, nil},
		{"root with less than a third", RenewedByServer, []life{at(root, 2434*day), issuer, own}, []string{"warning certificate.ending"}},
		{"root with less than a tenth", RenewedByServer, []life{at(root, 3286*day), issuer, own}, []string{"critical certificate.ending"}},
		{"root too short for an issuer and a leaf", RenewedByServer, []life{at(life{KindRoot, 0, 10 * day}, 49*time.Hour), issuer, own}, []string{"critical root.too-short"}},
		{"short root that is enough", RenewedByServer, []life{at(life{KindRoot, 0, 10 * day}, 47*time.Hour), issuer, own}, nil},
		{"root of a ceremony, as long as its issuer", RenewedByImport, []life{root, {KindIssuer, 30 * day, 3285 * day}, own}, nil},
		{"imported issuer after half: an admin is at it", RenewedByImport, []life{root, {KindIssuer, 59 * day, 90 * day}, own}, nil},
		{"imported issuer with less than a third", RenewedByImport, []life{root, {KindIssuer, 61 * day, 90 * day}, own}, []string{"warning certificate.ending"}},
		{"imported issuer with a tenth", RenewedByImport, []life{root, {KindIssuer, 82 * day, 90 * day}, own}, []string{"critical certificate.ending"}},
		{"intermediate with less than a third", RenewedByImport, []life{root, {KindIntermediate, 300 * day, 365 * day}, issuer, own}, []string{"warning certificate.ending"}},
		{"issuer of a parent at the latest that it is renewed", RenewedByParent, []life{root, at(issuer, 102*time.Hour), own}, nil},
		{"issuer that a parent has not renewed with less than a third", RenewedByParent, []life{root, at(issuer, 113*time.Hour), own}, []string{"warning certificate.ending"}},
		{"issuer that a parent has not renewed with a tenth", RenewedByParent, []life{root, at(issuer, 153*time.Hour), own}, []string{"critical certificate.ending"}},
		{"issuer of a parent that ended", RenewedByParent, []life{root, at(issuer, 169*time.Hour), own}, []string{"critical certificate.ended"}},
		{"plugged-in issuer at a third, when cert-manager renews", RenewedByFiles, []life{root, {KindIssuer, 62 * day, 90 * day}, own}, nil},
		{"plugged-in issuer with less than a quarter", RenewedByFiles, []life{root, {KindIssuer, 68 * day, 90 * day}, own}, []string{"warning certificate.ending"}},
		{"root ended: worst first, all of them", RenewedByServer, []life{at(root, 3651*day), at(issuer, 8*day), at(own, 17*time.Hour)},
			[]string{"critical certificate.ended", "critical certificate.ended", "warning certificate.ending"}},
		{"an issuer of minutes gets five before it is overdue", RenewedByServer, []life{root, {KindIssuer, 14 * time.Minute, 20 * time.Minute}, own}, []string{"warning certificate.ending"}},
	} {
		if got := judged(t, caWith(t, c.renewedBy, c.lives...)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestNoFalseAlarmInNormalLife follows a CA that renews as it should, hour by hour over a year: never a finding.
func TestNoFalseAlarmInNormalLife(t *testing.T) {
	s := caWith(t, RenewedByServer)
	for hour := range 365 * 24 {
		age := time.Duration(hour) * time.Hour
		s.Certs = nil
		for _, l := range []struct {
			kind        string
			life, renew time.Duration
		}{{KindRoot, 3650 * day, 3650 * day}, {KindIssuer, 7 * day, 84*time.Hour + time.Minute}, {KindServer, day, 864 * time.Minute}} {
			born := s.Time.Add(-age % l.renew)
			s.Certs = append(s.Certs, Certificate{Kind: l.kind, State: "active", InUse: true, NotBefore: born.Add(-time.Minute), NotAfter: born.Add(l.life)})
		}
		if got := judged(t, s); len(got) > 0 {
			t.Fatalf("in hour %d: %v", hour, got)
		}
	}
}

// TestJudge changes one thing of a healthy CA.
func TestJudge(t *testing.T) {
	ago := func(s *State, d time.Duration) *time.Time { t := s.Time.Add(-d); return &t }
	for _, c := range []struct {
		name   string
		change func(*State)
		want   string // empty: nothing
	}{
		{"nothing", func(*State) {}, ""},
		{"not ready", func(s *State) { s.NotReady = "the disk is full" }, "critical server.not-ready"},
		{"not ready yet", func(s *State) {
			s.NotReady, s.Started, s.WasReady = "no certificate yet", ago(s, 10*time.Second), false
		}, "warning server.not-ready"},
		{"not ready any more", func(s *State) { s.NotReady, s.Started = "the disk is full", ago(s, 10*time.Second) }, "critical server.not-ready"},
		{"never ready", func(s *State) { s.NotReady, s.WasReady = "no certificate yet", false }, "critical server.not-ready"},
		{"no issuer", func(s *State) { s.Certs = s.Certs[:1]; s.Certs[0].InUse = false }, "critical issuer.missing"},
		{"the root issues", func(s *State) { s.Certs = s.Certs[:1] }, ""},
		{"retired issuer has ended", func(s *State) {
			s.Certs[1].InUse, s.Certs[1].NotAfter = false, s.Time.Add(-day)
			s.Certs[0].InUse = true
		}, ""},
		{"another trusted root has ended", func(s *State) {
			s.Certs = append(s.Certs, Certificate{Kind: KindRoot, State: "active", NotAfter: s.Time.Add(-day)})
		}, "warning root.ended"},
		{"a tainted root has ended", func(s *State) {
			s.Certs = append(s.Certs, Certificate{Kind: KindRoot, State: "retiring", Tainted: ago(s, time.Hour), NotAfter: s.Time.Add(-day)})
		}, "warning root.ended"},
		{"issuer ended while the server is down", func(s *State) { s.Running, s.Certs[1].NotAfter = false, s.Time.Add(-day) }, "warning certificate.ended"},
		{"issuer past half while the server is down", func(s *State) { s.Running, s.Certs[1].NotBefore = false, s.Time.Add(-8*day) }, ""},
		{"issuer past half as the server starts", func(s *State) { s.Started, s.Certs[1].NotBefore = ago(s, time.Second), s.Time.Add(-8*day) }, ""},
		{"issuer's key fails", func(s *State) { s.Keys[0].Error = "the token is gone" }, "critical key.failed"},
		{"root's key fails", func(s *State) { s.Keys[1].Error = "the token is gone" }, "warning key.failed"},
		{"key takes long", func(s *State) { s.Keys[0].SignSeconds = 1.5 }, "warning key.slow"},
		{"key takes its time", func(s *State) { s.Keys[0].SignSeconds = 0.9 }, ""},
		{"key does not answer", func(s *State) { s.Keys[0].Waiting = ago(s, 6*time.Second) }, "warning key.slow"},
		{"key is being checked", func(s *State) { s.Keys[0].Waiting = ago(s, 2*time.Second) }, ""},
		{"key not checked", func(s *State) { s.Keys[0].Checked = nil }, "warning key.unwatched"},
		{"key not checked yet", func(s *State) { s.Keys[0].Checked, s.Started = nil, ago(s, time.Second) }, ""},
		{"key not checked for long", func(s *State) { s.Keys[1].Checked = ago(s, 6*time.Minute) }, "warning key.unwatched"},
		{"key not known", func(s *State) { s.Keys[1].Unknown = "no right" }, "warning unchecked"},
		{"audit log fails", func(s *State) { s.AuditLog.Error = "no space left" }, "critical audit-log.failed"},
		{"audit log moved", func(s *State) { s.AuditLog.Moved = true }, "critical audit-log.moved"},
		{"issuance log fails", func(s *State) { s.IssuanceLog.Error = "no space left" }, "critical issuance-log.failed"},
		{"no checkpoint", func(s *State) { s.IssuanceLog.CheckpointError = "no space left" }, "warning issuance-log.late"},
		{"checkpoint late", func(s *State) { s.IssuanceLog.Sequenced = ago(s, 2*time.Minute) }, "warning issuance-log.late"},
		{"old checkpoint over all", func(s *State) { s.IssuanceLog.Sequenced, s.IssuanceLog.Covered = ago(s, time.Hour), 10 }, ""},
		{"no issuance log", func(s *State) { s.IssuanceLog = nil }, ""},
		{"tainted issuer that signs", func(s *State) { s.Certs[1].Tainted = ago(s, time.Hour) }, "critical authority.tainted"},
		{"tainted root", func(s *State) { s.Certs[0].Tainted = ago(s, time.Hour) }, "critical authority.tainted"},
		{"tainted, and not in use", func(s *State) {
			s.Certs = append(s.Certs, Certificate{Kind: KindRoot, State: "retiring", NotBefore: s.Time, NotAfter: s.Time.Add(day), Tainted: ago(s, time.Hour)},
				Certificate{Kind: KindIssuer, State: "retiring", NotBefore: s.Time, NotAfter: s.Time.Add(day), Tainted: ago(s, time.Hour)})
		}, "critical authority.tainted, critical authority.tainted"},
		{"no bundle key", func(s *State) { s.Document.BundleKey = "" }, "warning bundle-key.missing"},
		{"no bundle key yet", func(s *State) { s.Document.BundleKey, s.Started = "", ago(s, time.Second) }, ""},
		{"no bundle key in files", func(s *State) { s.Document.BundleKey, s.Running = "", false }, ""},
		{"bundle key does not open", func(s *State) { s.Document.BundleKeyError = "it was changed" }, "critical bundle-key.unusable"},
		{"cluster never ready", func(s *State) { s.Clusters[0] = Cluster{Name: "east", NotReady: "no keys"} }, "critical cluster.not-ready"},
		{"cluster not ready yet", func(s *State) {
			s.Clusters[0], s.Started, s.WasReady = Cluster{Name: "east", NotReady: "no keys"}, ago(s, time.Second), false
		}, "warning cluster.not-ready"},
		{"Kubernetes' requests wait", func(s *State) { s.Kubernetes.Signing = "forbidden" }, "critical signing.failing"},
		{"roots are not published", func(s *State) { s.Kubernetes.Publishing = "forbidden" }, "warning publishing.failing"},
		{"naming is behind", func(s *State) { s.Kubernetes.Naming = "forbidden" }, "warning naming.failing"},
		{"naming knows nothing", func(s *State) { s.Kubernetes.Naming, s.Kubernetes.Unread = "forbidden", true }, "critical naming.failing"},
		{"naming knows nothing yet", func(s *State) {
			s.Kubernetes.Naming, s.Kubernetes.Unread, s.Started = "not read yet", true, ago(s, time.Second)
		}, ""},
		{"cluster lost", func(s *State) { s.Clusters[0].NotReady = "no watch" }, "warning cluster.lost"},
		{"the only cluster lost", func(s *State) { s.Clusters = s.Clusters[:1]; s.Clusters[0].NotReady = "no watch" }, "critical cluster.lost"},
		{"internal errors", func(s *State) { s.Requests.Reasons["INTERNAL"] = Count{0, 1, 1} }, "warning requests.internal"},
		{"too many requests", func(s *State) { s.Requests.Reasons["BUSY"] = Count{1, 1, 1} }, "warning requests.busy"},
		{"refusals of strangers", func(s *State) { s.Requests.Reasons["TOKEN_SIGNATURE"] = Count{1e6, 1e6, 1e6} }, ""},
	} {
		s := caWith(t, RenewedByServer)
		c.change(s)
		if got := strings.Join(judged(t, s), ", "); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestFindingSaysEverything(t *testing.T) {
	s := caWith(t, RenewedByServer)
	s.Keys[0].Error = "the token is gone\nand its library"
	f := Judge(s)[0]
	for _, text := range []string{f.ID, f.Subject, f.Problem, f.Meaning, f.Remedy} {
		if text == "" {
			t.Errorf("a part is missing: %+v", f)
		}
	}
	if !strings.Contains(f.Problem, "the token is gone; and its library") || f.Subject != "key of issuer a" {
		t.Errorf("%+v", f)
	}
	if f := Unchecked("state.db", errors.New("permission denied")); f.Severity != Warning || !strings.Contains(f.Problem, "permission denied") {
		t.Errorf("%+v", f)
	}
}

func TestSeverities(t *testing.T) {
	all := []Finding{{ID: "a", Severity: Warning}, {ID: "b", Severity: Critical}, {ID: "c", Severity: Warning}, {ID: "d", Severity: Critical}}
	Sort(all)
	if got := all[0].ID + all[1].ID + all[2].ID + all[3].ID; got != "bdac" {
		t.Errorf("sorted as %s", got)
	}
	if Worst(nil) != OK || Worst(all) != Critical || Worst(all[2:]) != Warning || CountOf(all, Critical) != 2 {
		t.Error("the worst is not")
	}
	if OK.ExitCode() != 0 || Warning.ExitCode() != 2 || Critical.ExitCode() != 3 {
		t.Error("exit codes are 0, 2 and 3")
	}
}

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0 s", 59 * time.Second: "59 s", 61 * time.Second: "1 min 1 s", 90 * time.Minute: "1 h 30 min", 25 * time.Hour: "1 d 1 h",
		3650 * day: "3650 d", -time.Hour: "-1 h 0 min",
	} {
		if got := Span(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}

// TestCatalogue: each finding that the code makes is in the catalogue with that severity, each of the catalogue is made, and
// docs/operations.md has a row for each with these very words.
func TestCatalogue(t *testing.T) {
	docs, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	made := idsInCode(t, ".", "../../cmd/chancery/doctor", "../../cmd/chancery/status")
	seen := map[string]bool{}
	for _, e := range Catalogue {
		for s := range made[e.ID] {
			if s != "" && !slices.Contains(e.Severities, Severity(s)) {
				t.Errorf("%s is found as %s, which the catalogue does not say", e.ID, s)
			}
		}
		if seen[e.ID] {
			t.Errorf("%s is there twice", e.ID)
		}
		seen[e.ID] = true
		if made[e.ID] == nil {
			t.Errorf("%s is never found", e.ID)
		}
		var words []string
		for _, s := range e.Severities {
			words = append(words, string(s))
		}
		if row := fmt.Sprintf("| `%s` | %s | %s | %s |\n", e.ID, strings.Join(words, ", "), e.Meaning, e.Remedy); !strings.Contains(string(docs), row) {
			t.Errorf("docs/operations.md lacks the row:\n%s", row)
		}
	}
	for id := range made {
		if !seen[id] {
			t.Errorf("%s is found and is not in the catalogue", id)
		}
	}
	for line := range strings.Lines(string(docs)) {
		if id, rest, ok := strings.Cut(strings.TrimPrefix(line, "| `"), "` |"); ok && strings.HasPrefix(line, "| `") && strings.Count(rest, "|") == 3 && !seen[id] {
			t.Errorf("docs/operations.md has a row for %s, which is no finding", id)
		}
	}
}

// idsInCode returns the first argument of each call of Found, or of a method found, with the severities that are given as
// constants, in lower case; empty for one that is computed.
func idsInCode(t *testing.T, dirs ...string) map[string]map[string]bool {
	t.Helper()
	ids := map[string]map[string]bool{}
	for _, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", dir, err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(f, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || len(call.Args) < 4 {
					return true
				}
				name := nameOf(call.Fun)
				if lit, ok := call.Args[0].(*ast.BasicLit); ok && (name == "Found" || name == "found") {
					id, err := strconv.Unquote(lit.Value)
					if err != nil {
						t.Fatal(err)
					}
					if ids[id] == nil {
						ids[id] = map[string]bool{}
					}
					severity := ""
					if s := nameOf(call.Args[1]); s == "Warning" || s == "Critical" {
						severity = strings.ToLower(s)
					}
					ids[id][severity] = true
				}
				return true
			})
		}
	}
	return ids
}

// nameOf returns the last part of an identifier.
func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// TestShapeOfJSON holds what docs/operations.md promises: names of fields, and those that are always there.
func TestShapeOfJSON(t *testing.T) {
	s := caWith(t, RenewedByServer)
	s.Started = nil
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"time", "running", "trustDomain", "document", "issuerRenewedBy", "leafMaxSeconds", "certificates", "keys", "requests", "auditLog", "issuanceLog", "clusters"} {
		if _, ok := got[name]; !ok {
			t.Errorf("there is no %s in %s", name, data)
		}
	}
	if _, ok := got["started"]; ok {
		t.Error("a time that is not known is there")
	}
}

// An issuer that ended while no server ran is no more than a warning where a start brings the next one.
func TestIssuerThatEndedWhileNoServerRan(t *testing.T) {
	for renewedBy, want := range map[string]string{
		RenewedByServer: "warning certificate.ended", RenewedByParent: "warning certificate.ended", RenewedByImport: "critical certificate.ended",
	} {
		s := caWith(t, renewedBy, life{KindRoot, 365 * day, 3650 * day}, life{KindIssuer, 8 * day, 7 * day})
		s.Running, s.Started = false, nil
		if got := judged(t, s); !slices.Contains(got, want) {
			t.Errorf("renewed by %s: %v, want %s", renewedBy, got, want)
		}
	}
}
