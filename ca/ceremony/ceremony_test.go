package ceremony

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/trust"
)

var update = flag.Bool("update", false, "write the golden files anew")

// In synctest it is the year 2000.
const full = `trustDomain: example.org
auditLog: audit.jsonl
output: made
existing:
- {name: old-root, certificate: old/old-root.pem, key: old/old-root-key.pem}
steps:
- name: root
  kind: root
  key: {generate: mldsa65}
  notBefore: 1999-12-31T23:00:00Z
  notAfter: 2020-01-01T00:00:00Z
- name: issuer
  kind: issuer
  by: root
  key: {generate: p256}
  notAfter: 2001-01-01T00:00:00Z
- name: issuer-under-old
  kind: cross
  by: old-root
  of: issuer
  notAfter: 2000-06-01T00:00:00Z
- name: root-crl
  kind: crl
  by: old-root
  number: 4
  nextUpdate: 2000-03-01T00:00:00Z
  revoked:
  - {serial: 0a0b, time: 1999-12-30T00:00:00Z, reason: superseded}
  - {serial: 7f00000000000000000000000000000000000001, time: 1999-12-30T00:00:00Z}
- name: issuer-crl
  kind: crl
  by: issuer
  number: 1
  thisUpdate: 1999-12-31T23:59:00Z
  nextUpdate: 2000-03-01T00:00:00Z
`

const old = `trustDomain: example.org
auditLog: audit.jsonl
output: old
steps:
- {name: old-root, kind: root, key: {generate: p256}, notAfter: 2010-01-01T00:00:00Z}
`

func config(t testing.TB, text string) Config {
	t.Helper()
	var c Config
	if err := yaml.UnmarshalStrict([]byte(text), &c); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return c
}

// hold holds a ceremony in dir and returns what it printed.
func hold(t testing.TB, dir, text string, sign bool) (string, error) {
	t.Helper()
	o := Options{Dir: dir, Digest: "(digest)", Actor: "unix:tester"}
	c := config(t, text)
	if sign {
		log, err := audit.Open(filepath.Join(dir, c.AuditLog))
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		o.Log = log
	}
	p, err := NewPlan(c, o)
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	if err := p.Print(&out); err != nil {
		t.Fatal(err)
	}
	if sign {
		err = p.Sign(t.Context())
	}
	return out.String(), err
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it anew); got:\n%s", path, got)
	}
}

// The text of a ceremony, before and when it is signed, word for word.
func TestText(t *testing.T) {
	cryptotest.SetGlobalRandom(t, 1)
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		if _, err := hold(t, dir, old, true); err != nil {
			t.Fatal(err)
		}
		dry, err := hold(t, dir, full, false)
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "dry-run.txt", dry)
		if again, err := hold(t, dir, full, false); err != nil || again != dry {
			t.Errorf("a second dry run prints something else: %v\n%s", err, again)
		}
		if _, err := os.Stat(filepath.Join(dir, "made")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a dry run wrote: %v", err)
		}
		signed, err := hold(t, dir, full, true)
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "signed.txt", signed)
		checkMade(t, dir)
	})
}

// checkMade checks the results of full against what a stranger would, and against the log.
func checkMade(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "made"))
	if err != nil {
		t.Fatal(err)
	}
	modes := map[string]fs.FileMode{}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		modes[e.Name()] = info.Mode()
	}
	want := map[string]fs.FileMode{
		"root.pem": 0o644, "root-key.pem": 0o600, "issuer.pem": 0o644, "issuer-key.pem": 0o600, "issuer-under-old.pem": 0o644,
		"root-crl.pem": 0o644, "issuer-crl.pem": 0o644,
	}
	if fmt.Sprint(modes) != fmt.Sprint(want) {
		t.Errorf("files and modes %v, want %v", modes, want)
	}
	read := func(name string) *x509.Certificate {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		certs, err := trust.ParseCertificates(data)
		if err != nil {
			t.Fatal(err)
		}
		return certs[0]
	}
	root, issuer, cross, oldRoot := read("made/root.pem"), read("made/issuer.pem"), read("made/issuer-under-old.pem"), read("old/old-root.pem")
	if err := errors.Join(issuer.CheckSignatureFrom(root), cross.CheckSignatureFrom(oldRoot), root.CheckSignatureFrom(root)); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(cross.RawSubject, issuer.RawSubject) || !bytes.Equal(cross.RawSubjectPublicKeyInfo, issuer.RawSubjectPublicKeyInfo) {
		t.Error("the cross-certificate is not of the same subject and key")
	}
	data, err := os.ReadFile(filepath.Join(dir, "made/root-crl.pem"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(data)
	crl, err := x509.ParseRevocationList(block.Bytes)
	if err != nil || crl.CheckSignatureFrom(oldRoot) != nil || len(crl.RevokedCertificateEntries) != 2 || crl.Number.Int64() != 4 {
		t.Errorf("CRL %+v, %v", crl, err)
	}
	intents, results := 0, 0
	for _, r := range auditLines(t, filepath.Join(dir, "audit.jsonl")) {
		switch r.Event {
		case audit.Intent:
			intents++
		case audit.Issued:
			if results++; results > intents {
				t.Error("a result stands before its intent")
			}
		}
	}
	if intents != 6 || results != 6 { // 5 here, 1 of the old root
		t.Errorf("%d intents and %d results in the log", intents, results)
	}
}

func auditLines(t *testing.T, path string) (out []audit.Record) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		var r audit.Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

// What a lint or a check refuses is not even drafted, and leaves no trace.
func TestRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		if _, err := hold(t, dir, old, true); err != nil {
			t.Fatal(err)
		}
		if _, err := hold(t, dir, strings.NewReplacer("example.org", "other.org", "output: old", "output: foreign").Replace(old), true); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "open-key.pem"), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		for _, tc := range refusals {
			text := strings.Replace(full, tc.old, tc.new, 1)
			if text == full {
				t.Fatalf("%q is not in the ceremony", tc.old)
			}
			if _, err := hold(t, dir, text, false); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%q: %v; want %q", tc.new, err, tc.want)
			}
		}
		if _, err := os.Stat(filepath.Join(dir, "made")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("something was written: %v", err)
		}
	})
}

var refusals = []struct{ old, new, want string }{
	{"trustDomain: example.org", "trustDomain: other.org", "all of a ceremony is for one trust domain, here other.org (D10)"},
	{"trustDomain: example.org", "trustDomain: \"example.org,other.org\"", "exactly one (D10)"},
	{"old/old-root.pem, key: old/old-root-key.pem", "foreign/old-root.pem", "is of spiffe://other.org"},
	{"old/old-root.pem, key: old/old-root-key.pem", "old/old-root.pem", `"old-root" cannot sign; give its key`},
	{"old/old-root-key.pem", "foreign/old-root-key.pem", "does not belong to the issuing certificate"},
	{"output: made", "output: old", "nothing is ever overwritten"},
	{"output: made", "output: none/made", "none is no folder, so made cannot be made in it"},
	{"output: made", "output: open-key.pem/made", "output: "},
	{"auditLog: audit.jsonl\n", "", "auditLog is missing"},
	{"notAfter: 2020-01-01", "notAfter: 2040-01-01", "lint validity (invariant 3)"},
	{"notAfter: 2001-01-01", "notAfter: 2020-01-02", "after its issuer's chain at 2020-01-01"},
	{"notBefore: 1999-12-31T23:00:00Z", "notBefore: 2000-01-01T01:00:00Z", "lint validity (invariant 3): begins at"},
	{"notAfter: 2001-01-01T00:00:00Z", "notAfter: 2001-01-01", "in UTC, to the second"},
	{"kind: root\n", "kind: root\n  pathLen: 0\n", "lint path_length (RFC 5280 4.2.1.9): the issuer's path length is 0"},
	{"key: {generate: mldsa65}", "key: {generate: dsa}", `key type "dsa" is not known`},
	{"key: {generate: mldsa65}", "key: {file: old/old-root-key.pem}", "has the same"},
	{"key: {generate: mldsa65}", "key: {file: open-key.pem}", "has mode 0644; a private key should have 0600"},
	{"key: {generate: mldsa65}", "key: {}", "set one of generate and file"},
	{"kind: root\n", "kind: roots\n", `"roots" is not known; use root, issuer, cross or crl`},
	{"kind: root\n", "kind: root\n  by: old-root\n", "by is not for a root"},
	{"of: issuer\n", "of: nobody\n", `there is no authority "nobody"`},
	{"of: issuer\n", "of: old-root\n", "lint cross_certificate"},
	{"of: issuer\n", "of: issuer\n  pathLen: 1\n", "should not widen"},
	{"name: issuer\n", "name: root\n", "is taken already"},
	{"name: issuer\n", "name: Issuer\n", "lower-case letters"},
	{"name: issuer-under-old\n", "name: issuer-key\n", "is taken already"},
	{"  number: 4\n", "", "number is missing; a crl needs by, number, nextUpdate"},
	{"nextUpdate: 2000-03-01", "nextUpdate: 2011-03-01", "lint crl_validity (invariant 3)"},
	{"thisUpdate: 1999-12-31T23:59:00Z", "thisUpdate: 2000-01-02T00:00:00Z", "lint crl_validity"},
	{"serial: 0a0b", "serial: xyz", "revoked[0].serial"},
	{"serial: 0a0b", "serial: 7f00000000000000000000000000000000000001", "listed twice"},
	{"reason: superseded", "reason: certificateHold", "revoked[0].reason"},
}

// A ceremony whose log cannot be written signs nothing and leaves nothing (invariant 10).
func TestInvariant10NoLogNoSignature(t *testing.T) {
	dir := t.TempDir()
	text := soon(`trustDomain: example.org
auditLog: /dev/full
output: made
steps: [{name: root, kind: root, key: {generate: p256}, notAfter: NOTAFTER}]
`)
	c := config(t, text)
	log, err := audit.Open("/dev/full") // each write fails: no space left on device
	if err != nil {
		t.Skip(err)
	}
	defer log.Close()
	p, err := NewPlan(c, Options{Dir: dir, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Sign(t.Context()); err == nil {
		t.Error("signed without a log")
	}
	for _, s := range p.steps {
		if s.made.der != nil {
			t.Errorf("%s was signed", s.Name)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// A step that fails after others were signed takes them with it; the log tells of all.
func TestFailureLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	log, err := audit.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	p, err := NewPlan(config(t, soon(crashing)), Options{Dir: dir, Log: log, Actor: "unix:tester"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.steps[1].made.draft.Prepare(); err != nil { // as if somebody had used it already
		t.Fatal(err)
	}
	if err := p.Sign(t.Context()); err == nil || !strings.Contains(err.Error(), "the draft was used before") {
		t.Errorf("got %v", err)
	}
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(names) != 1 {
		t.Errorf("left behind: %v, %v", names, err)
	}
	lines := auditLines(t, filepath.Join(dir, "audit.jsonl"))
	if last := lines[len(lines)-1]; last.Reason != "CEREMONY_FAILED" || last.Event != audit.Admin {
		t.Errorf("the log ends with %+v", last)
	}
	if !slices.ContainsFunc(lines, func(r audit.Record) bool { return r.Event == audit.Issued && r.Profile == "" }) {
		t.Error("the log lacks the certificate that was signed and is lost")
	}
}

func TestNothingIsOverwritten(t *testing.T) {
	dir := t.TempDir()
	log, err := audit.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	plan := func() *Plan {
		p, err := NewPlan(config(t, soon(crashing)), Options{Dir: dir, Log: log})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	// Left from a crash.
	left := filepath.Join(dir, "made.incomplete")
	if err := os.Mkdir(left, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := plan().Sign(t.Context()); err == nil || !strings.Contains(err.Error(), "nothing in it counts: remove it first") {
		t.Errorf("got %v", err)
	}
	if err := os.Remove(left); err != nil {
		t.Fatal(err)
	}
	// Made by somebody else between plan and end, and empty, which rename would replace.
	p := plan()
	if err := os.Mkdir(filepath.Join(dir, "made"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := p.Sign(t.Context()); err == nil || !strings.Contains(err.Error(), "naming output folder") {
		t.Errorf("got %v", err)
	}
	if entries, err := os.ReadDir(filepath.Join(dir, "made")); err != nil || len(entries) > 0 {
		t.Errorf("written into a folder of somebody else: %v, %v", entries, err)
	}
}

const crashing = `trustDomain: example.org
auditLog: audit.jsonl
output: made
steps:
- {name: root, kind: root, key: {generate: p256}, notAfter: NOTAFTER}
- {name: issuer, kind: issuer, by: root, key: {generate: p256}, notAfter: NOTAFTER}
- {name: crl, kind: crl, by: root, number: 1, nextUpdate: NOTAFTER}
`

// soon puts a date a month away into a ceremony.
func soon(text string) string {
	return strings.ReplaceAll(text, "NOTAFTER", time.Now().Add(30*24*time.Hour).UTC().Format("2006-01-02T15:04:05Z"))
}

// TestCrashLeavesAllOrNothing kills ceremonies at any moment: the folder of results is there complete, or not at all.
func TestCrashLeavesAllOrNothing(t *testing.T) {
	if dir := os.Getenv("CEREMONY_TEST_DIR"); dir != "" { // we are the one to be killed
		fmt.Println("begun")
		_, err := hold(t, dir, soon(crashing), true)
		fmt.Println("ended", err)
		return
	}
	if testing.Short() {
		t.Skip("starts processes: not under -short")
	}
	complete := 0
	for range 20 {
		dir := t.TempDir()
		cmd := exec.Command(os.Args[0], "-test.run=^TestCrashLeavesAllOrNothing$", "-test.v")
		cmd.Env = append(os.Environ(), "CEREMONY_TEST_DIR="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var line [64]byte
		for seen := ""; !strings.Contains(seen, "begun"); {
			n, err := out.Read(line[:])
			if seen += string(line[:n]); err != nil {
				t.Fatalf("%v after %q", err, seen)
			}
		}
		<-time.After(rand.N(25 * time.Millisecond)) // not a wait for anything: the moment of the crash
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed, or had ended
		entries, err := os.ReadDir(filepath.Join(dir, "made"))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			t.Fatal(err)
		case len(entries) != 5:
			t.Errorf("%d of 5 results: %v", len(entries), entries)
		default:
			complete++
			for _, e := range entries {
				if data, err := os.ReadFile(filepath.Join(dir, "made", e.Name())); err != nil || !strings.HasSuffix(string(data), "-----\n") {
					t.Errorf("%s: %q, %v", e.Name(), data, err)
				}
			}
		}
	}
	t.Logf("%d of 20 ended before they were killed", complete)
}

func TestBoundsOfACeremony(t *testing.T) {
	c := config(t, soon(crashing))
	for len(c.Steps) < maxSteps {
		s := c.Steps[2]
		s.Name = fmt.Sprintf("crl-%d", len(c.Steps))
		c.Steps = append(c.Steps, s)
	}
	if err := Check(&c); err != nil {
		t.Errorf("%d steps: %v", len(c.Steps), err)
	}
	last := &c.Steps[len(c.Steps)-1]
	for i := range maxRevoked + 1 {
		last.Revoked = append(last.Revoked, RevokedConfig{Serial: fmt.Sprintf("%x", i+1), Time: "2026-01-01T00:00:00Z"})
	}
	if err := Check(&c); err == nil || !strings.Contains(err.Error(), "10000") {
		t.Errorf("%d revoked: %v", len(last.Revoked), err)
	}
	last.Revoked = nil
	c.Existing = append(c.Existing, ExistingConfig{Name: "more", Certificate: "x"})
	if err := Check(&c); err == nil || !strings.Contains(err.Error(), "at most 64 steps") {
		t.Errorf("one too many: %v", err)
	}
}
