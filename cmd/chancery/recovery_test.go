package main

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
	"github.com/chancery-project/chancery/csr/jwt/jwttest"
	"github.com/chancery-project/chancery/test/process"
)

// The blocks of docs/recovery.md and docs/state.md that are marked `sh` begin with "# NAME" or "# NAME: when"; those of one name are
// run by the test of that name, as they stand there.

func allBlocks(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, file := range []string{"../../docs/recovery.md", "../../docs/state.md"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for i, block := range strings.Split(string(data), "```") {
			text, ok := strings.CutPrefix(block, "sh\n")
			if i%2 == 0 || !ok {
				continue
			}
			text = regexp.MustCompile(`(?m)^   `).ReplaceAllString(text, "") // in a list
			first, _, _ := strings.Cut(text, "\n")
			name, _, _ := strings.Cut(strings.TrimPrefix(first, "# "), ":")
			if !strings.HasPrefix(first, "# ") || name == "" {
				t.Fatalf("%s: a block without a name: %q", file, text)
			}
			all[name] = append(all[name], text)
		}
	}
	return all
}

// recoveries are the tests of blocks, by name.
var recoveries = map[string]func(t *testing.T, blocks []string){
	"keep": keepTest, "store-lost": storeLostTest, "store-lost-running": storeLostRunningTest, "rolled-back": rolledBackTest, "server-lost": serverLostTest,
	"servers-lost": serversLostTest, "log-lost": logLostTest, "key-lost-offline-root": keyLostTest, "new-root": newRootTest, "move": moveTest, "look": lookTest,
}

// TestRecovery runs the commands of docs/recovery.md and docs/state.md, each where it is meant for, and looks what they lead to.
func TestRecovery(t *testing.T) {
	if testing.Short() {
		t.Skip("it runs servers and agents")
	}
	all := allBlocks(t)
	for name := range all {
		if recoveries[name] == nil {
			t.Errorf("the blocks %q of the docs have no test", name)
		}
	}
	for name, test := range recoveries {
		t.Run(name, func(t *testing.T) {
			if len(all[name]) == 0 {
				t.Fatal("the docs have no such block any more")
			}
			test(t, all[name])
		})
	}
}

// site is a machine with a server and an agent.
type site struct {
	t       *testing.T
	dir     string
	listen  string
	metrics string
}

// newSite sets up a machine with the config of docs/recovery.md. State, if not empty, replaces its `state`.
func newSite(t *testing.T, state string) *site {
	t.Helper()
	dir, err := os.MkdirTemp("", "rec") // short: there will be sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &site{t: t, dir: dir}
	for _, addr := range []*string{&s.listen, &s.metrics} {
		port, err := process.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		*addr = fmt.Sprintf("127.0.0.1:%d", port)
	}
	data, err := os.ReadFile("../../docs/recovery.md")
	if err != nil {
		t.Fatal(err)
	}
	config := between(t, string(data), "trustDomain: ", "```")
	config = strings.NewReplacer("https://k8s.example", jwttest.Issuer, "[chancery]", "["+jwttest.Audience+"]").Replace(config)
	if state != "" {
		config = regexp.MustCompile(`(?m)^state: .*$`).ReplaceAllString(config, "state: "+state)
	}
	s.write("server.yaml", config+"listen: "+s.listen+"\nmetrics: "+s.metrics+"\nprofile: {defaultTTL: 1m}\n")
	s.write("agent.yaml", "server: "+s.listen+"\nserverRoots: trusted.pem\ntokenFile: token\nidentity: spiffe://cluster.local/ns/foo/sa/web\nmetrics: 127.0.0.1:0\nsocket: agent.sock\n")
	s.write("jwks.json", string(jwttest.KeySet(t, "p256")))
	s.write("token", jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims()))
	s.sh("mkdir -p store secret")
	return s
}

func (s *site) path(name string) string { return filepath.Join(s.dir, name) }

func (s *site) write(name, text string) {
	s.t.Helper()
	if err := os.WriteFile(s.path(name), []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// try runs commands on the machine.
func (s *site) try(script string) (string, error) {
	cmd := exec.Command("sh", "-eu", "-c", script)
	cmd.Dir = s.dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// sh runs commands that should work.
func (s *site) sh(script string) string {
	s.t.Helper()
	out, err := s.try(script)
	if err != nil {
		s.t.Fatalf("%s\n%v:\n%s", script, err, out)
	}
	return out
}

// program is something that runs in the background.
type program struct {
	t    *testing.T
	cmd  *exec.Cmd
	out  *syncBuffer
	done chan struct{}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func (s *site) start(args ...string) *program {
	s.t.Helper()
	p := &program{t: s.t, cmd: exec.Command("chancery", args...), out: new(syncBuffer), done: make(chan struct{})}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = s.dir, p.out, p.out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() {
		p.cmd.Wait()
		close(p.done)
	}()
	s.t.Cleanup(func() {
		p.kill()
		if s.t.Failed() {
			s.t.Logf("%v said:\n%s", args, p.out)
		}
	})
	return p
}

func (p *program) kill() {
	p.cmd.Process.Kill()
	<-p.done
}

func (p *program) stop() {
	p.t.Helper()
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(patience):
		p.t.Fatalf("it does not end:\n%s", p.out)
	}
}

// readiness returns what /readyz says; empty if ready.
func (s *site) readiness() string {
	resp, err := http.Get("http://" + s.metrics + "/readyz")
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if resp.StatusCode == http.StatusOK {
		return ""
	}
	return string(body) + " "
}

// until waits for a condition.
func (s *site) until(what string, ok func() bool, now func() string) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("not within %s: %s; it is: %s", patience, what, now())
		}
	}
}

// serve starts the server and waits until it is ready.
func (s *site) serve() *program {
	s.t.Helper()
	p := s.start("server", "-c", "server.yaml")
	s.until("the server is ready", func() bool {
		select {
		case <-p.done:
			s.t.Fatalf("the server ended:\n%s", p.out)
		default:
		}
		return s.readiness() == ""
	}, s.readiness)
	return p
}

// refuses starts the server, which should end at once, and returns what it says.
func (s *site) refuses() string {
	s.t.Helper()
	p := s.start("server", "-c", "server.yaml")
	select {
	case <-p.done:
	case <-time.After(patience):
		s.t.Fatalf("the server runs:\n%s", p.out)
	}
	if p.cmd.ProcessState.Success() {
		s.t.Fatalf("the server ended as if all were well:\n%s", p.out)
	}
	return p.out.String()
}

// agent starts an agent that trusts trusted.pem, and waits until it has an identity.
func (s *site) agent() *program {
	s.t.Helper()
	p := s.start("agent", "-c", "agent.yaml")
	s.until("the agent has an identity", func() bool { return s.svid() != "" }, p.out.String)
	return p
}

// svid is what the agent serves; empty if it serves nothing.
func (s *site) svid() string {
	out, err := s.try("chancery svid fetch --socket agent.sock")
	if err != nil {
		return ""
	}
	return out
}

// trusts looks whether an agent that knows trusted.pem alone, and nothing of what went before, gets an identity.
func (s *site) trusts() {
	s.t.Helper()
	s.agent().kill()
}

// refusesRoots looks that such an agent gets none.
func (s *site) refusesRoots() {
	s.t.Helper()
	p := s.start("agent", "-c", "agent.yaml")
	s.until("the agent says why", func() bool {
		return strings.Contains(p.out.String(), "unknown authority") || strings.Contains(p.out.String(), "does not verify") || strings.Contains(p.out.String(), "verif")
	}, p.out.String)
	if s.svid() != "" {
		s.t.Error("an agent got an identity though it does not trust the root")
	}
	p.kill()
}

// status returns `status -o json`.
func (s *site) status() (out struct {
	CA struct {
		Document struct{ Version uint64 }
		Store    struct {
			Error, Driver, ImportedBy string
			Replicas                  []struct {
				Name         string
				DeclaredDead *time.Time
			}
		}
	}
	Findings []struct{ ID string }
}) {
	s.t.Helper()
	text, _ := s.try("chancery status -c server.yaml -o json 2>/dev/null")
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		s.t.Fatalf("%v: %s", err, text)
	}
	return out
}

// initialized is a machine with an authority; trusted.pem has its roots.
func initialized(t *testing.T, state string) *site {
	t.Helper()
	s := newSite(t, state)
	s.sh("chancery authority init -c server.yaml && cp roots.pem trusted.pem")
	return s
}

const revoked = "spiffe://cluster.local/ns/foo/sa/"

func keepTest(t *testing.T, blocks []string) {
	s := initialized(t, "")
	s.serve()
	out := s.sh(blocks[0])
	for _, want := range []string{"Exported version ", "the sealing key, without which", "audit logs and issuance logs"} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q:\n%s", want, out)
		}
	}
	if info, err := os.Stat(s.path("backup.json")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if out, err := s.try(blocks[0]); err == nil || !strings.Contains(out, "backup.json exists already; name another file") {
		t.Errorf("over the last one: %v %s", err, out)
	}
	// On another machine, with config and sealing key.
	other := newSite(t, "")
	s.sh("cp backup.json " + other.dir + "; cp secret/state.key " + other.dir + "/secret/")
	out = other.sh(blocks[1])
	if !strings.Contains(out, "Export of cluster.local: version ") || !strings.Contains(out, "Nothing was changed (--dry-run).") {
		t.Error(out)
	}
	if left := other.sh("ls store"); left != "" {
		t.Errorf("a look left %s", left)
	}
}

func storeLostTest(t *testing.T, blocks []string) {
	s := initialized(t, "")
	server := s.serve()
	agent := s.agent()
	s.sh("chancery revoke " + revoked + "early -c server.yaml --wait 0s && chancery state export -c server.yaml -o backup.json && chancery revoke " + revoked + "late -c server.yaml --wait 0s")
	version := s.status().CA.Document.Version
	server.kill()
	s.sh("rm -r store && mkdir store && rm roots.pem")
	if out := s.refuses(); !strings.Contains(out, "there is no document") {
		t.Errorf("without a store: %s", out)
	}

	out := s.sh(blocks[0])
	if !strings.Contains(out, "1 revocations") || !strings.Contains(out, "Revocations made after the export are not in it") || !strings.Contains(out, "Restored as version 4294967296, by Alice Admin (unix:") {
		t.Error(out)
	}
	s.serve()
	s.sh("cmp roots.pem trusted.pem")
	st := s.status()
	if st.CA.Document.Version <= version || !strings.HasPrefix(st.CA.Store.ImportedBy, "Alice Admin (unix:") {
		t.Errorf("%+v", st)
	}
	list := s.sh("chancery revoke list -c server.yaml")
	if !strings.Contains(list, revoked+"early") || strings.Contains(list, revoked+"late") {
		t.Error(list)
	}
	told := s.sh(blocks[1])
	for _, want := range []string{"revoke " + revoked + "late", "state import of version"} {
		if !strings.Contains(told, want) {
			t.Errorf("the audit log does not say %q:\n%s", want, told)
		}
	}
	// The agent that was there all the time follows: to CRLs whose numbers went on.
	s.until("the agent has the new CRLs", func() bool { return regexp.MustCompile(`(?m)^CRL 42949\d{5} `).MatchString(s.svid()) }, func() string { return s.svid() + agent.out.String() })
	agent.kill()
	s.trusts()
}

// database is a schema of a PostgreSQL database for servers that are set up with state.
func database(t *testing.T) (c *pgtest.Cluster, name string, state func(replica string) string) {
	t.Helper()
	c = pgtest.Shared(t)
	name = c.Database(t)
	return c, name, func(replica string) string {
		return fmt.Sprintf("{postgres: {url: %q}, sealingKey: secret/state.key, replica: %s, dir: .}", c.URL(name, pgtest.Admin), replica)
	}
}

func storeLostRunningTest(t *testing.T, blocks []string) {
	c, name, state := database(t)
	s := initialized(t, state("ca-1"))
	s.serve()
	agent := s.agent()
	s.sh("chancery revoke " + revoked + "late -c server.yaml --wait 0s")
	c.Exec(t, name, "DROP SCHEMA chancery CASCADE")
	s.until("status says that the store is down", func() bool {
		return slices.ContainsFunc(s.status().Findings, func(f struct{ ID string }) bool { return f.ID == "store.down" })
	}, func() string { return fmt.Sprint(s.status()) })
	s.trustsBeside(agent)

	if out := s.sh(blocks[0]); !strings.Contains(out, "this is the one that the server works by") {
		t.Error(out)
	}
	if out := s.sh(blocks[1]); !strings.Contains(out, "Restored as version 4294967296") {
		t.Error(out)
	}
	s.until("the server works by what was restored", func() bool {
		st := s.status().CA
		return st.Document.Version >= 1<<32 && st.Store.Error == "" && s.readiness() == ""
	}, func() string { return fmt.Sprint(s.status()) + s.readiness() })
	if list := s.sh("chancery revoke list -c server.yaml"); !strings.Contains(list, revoked+"late") {
		t.Error(list)
	}
	s.sh("chancery revoke " + revoked + "later -c server.yaml --wait 0s")
	agent.kill()
	s.trusts()
}

// trustsBeside looks whether certificates are issued though an agent runs already.
func (s *site) trustsBeside(agent *program) {
	s.t.Helper()
	agent.kill()
	s.trusts()
}

func rolledBackTest(t *testing.T, blocks []string) {
	c, name, state := database(t)
	s := initialized(t, state("ca-1"))
	server := s.serve()
	c.Exec(t, name, "CREATE TABLE old AS SELECT * FROM chancery.document")
	s.sh("chancery revoke " + revoked + "late -c server.yaml --wait 0s")
	version := s.status().CA.Document.Version
	c.Exec(t, name, "DELETE FROM chancery.document", "INSERT INTO chancery.document SELECT * FROM old")
	s.until("the server says so", func() bool { return strings.Contains(s.readiness(), "not the one that was seen before") }, s.readiness)

	if out := s.sh(blocks[0]); !strings.Contains(out, fmt.Sprintf("Exported version %d ", version)) {
		t.Errorf("not version %d: %s", version, out)
	}
	if out, err := s.try(blocks[1]); err == nil || !strings.Contains(out, "a server answers on") {
		t.Errorf("while the server runs: %v %s", err, out)
	}
	server.stop()
	if out := s.refuses(); !strings.Contains(out, "not the one that was seen before") {
		t.Error(out)
	}
	if out, err := s.try(strings.Replace(blocks[1], "--stopped ca-1", "", 1)); err == nil || !strings.Contains(out, "replica ca-1 wrote into the store") || !strings.Contains(out, "--stopped ca-1") {
		t.Errorf("a moment later: %v %s", err, out)
	}
	if out := s.sh(blocks[1]); !strings.Contains(out, "which is replaced by version 4294967296") {
		t.Error(out)
	}
	s.serve()
	if list := s.sh("chancery revoke list -c server.yaml"); !strings.Contains(list, revoked+"late") {
		t.Error(list)
	}
	s.trusts()
}

// second is another machine on the same store.
func (s *site) second(state string) *site {
	s.t.Helper()
	other := newSite(s.t, state)
	s.sh("cp trusted.pem " + other.dir + "; cp secret/state.key " + other.dir + "/secret/")
	return other
}

func serverLostTest(t *testing.T, blocks []string) {
	_, _, state := database(t)
	s := initialized(t, state("ca-1"))
	s.serve()
	other := s.second(state("ca-2"))
	gone := other.serve()
	other.trusts()
	s.until("both are known", func() bool {
		return strings.Contains(s.sh("chancery replica list -c server.yaml"), "replica ca-2, log")
	}, func() string { return s.sh("chancery replica list -c server.yaml") })
	gone.kill()
	os.RemoveAll(other.dir)

	if out := s.sh(blocks[0]); !strings.Contains(out, "Replica ca-2 is declared dead") {
		t.Error(out)
	}
	st := s.status()
	if len(st.CA.Store.Replicas) != 2 || st.CA.Store.Replicas[0].DeclaredDead != nil || st.CA.Store.Replicas[1].DeclaredDead == nil {
		t.Errorf("%+v", st.CA.Store)
	}
	s.trusts()
	again := s.second(state("ca-2")) // in its place, under the same name
	again.serve()
	again.trusts()
	if out := again.sh("chancery replica list -c server.yaml -o json"); strings.Count(out, `"name": "ca-2"`) != 2 || strings.Count(out, "declaredDead") != 1 {
		t.Error(out)
	}
}

func serversLostTest(t *testing.T, blocks []string) {
	s := initialized(t, "")
	s.serve().kill()
	s.sh("rm -r log audit.jsonl state.mark roots.pem")
	if out := s.refuses(); !strings.Contains(out, "replica forget server") && !strings.Contains(out, "issuance log") {
		t.Error(out)
	}
	s.sh(blocks[0])
	s.serve()
	s.trusts()
	s.sh("cmp roots.pem trusted.pem")
	for _, out := range []string{s.sh("chancery log verify log")} {
		if !strings.Contains(out, "clean") {
			t.Error(out)
		}
	}
}

func logLostTest(t *testing.T, blocks []string) {
	s := initialized(t, "")
	s.serve().stop()
	s.sh("mv log log.broken")
	if out := s.refuses(); !strings.Contains(out, "issuance log") {
		t.Error(out)
	}
	s.sh(blocks[0])
	server := s.serve()
	s.trusts()
	// What the lost log had cannot be found: that is said.
	if out, err := s.try("chancery revoke --issued-before 0s --dry-run -c server.yaml"); err == nil || !strings.Contains(out, "INCOMPLETE") {
		t.Errorf("%v %s", err, out)
	}
	server.stop()
	s.sh("rm state.mark")
	if out := s.refuses(); !strings.Contains(out, "the mark") || !strings.Contains(out, "chancery replica forget server") {
		t.Error(out)
	}
	s.sh(blocks[0])
	s.sh("mv log log.second") // its entry is declared dead, and comes back with it
	s.serve()
	s.trusts()
}

// keyLostTest has a root whose key is kept elsewhere.
func keyLostTest(t *testing.T, blocks []string) {
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Skip("there is no openssl")
	}
	s := newSite(t, "")
	s.write("root.cnf", "[req]\ndistinguished_name = dn\n[dn]\n[v3_root]\nbasicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign, cRLSign\nsubjectKeyIdentifier = hash\n")
	s.sh("openssl ecparam -name prime256v1 -genkey -noout -out root.key && openssl req -x509 -new -key root.key -subj '/O=Example/CN=Example root' -days 3650 -out root.pem -config root.cnf -extensions v3_root")
	s.write("ski.ext", "subjectKeyIdentifier = hash\nauthorityKeyIdentifier = keyid\n")
	const sign = "openssl x509 -req -in issuer.csr -CA root.pem -CAkey root.key -days 30 -copy_extensions copyall -extfile ski.ext -out issuer.pem"
	s.sh("chancery authority init -c server.yaml --root root.pem && cp roots.pem trusted.pem && chancery authority csr -c server.yaml > issuer.csr && " + sign + " && chancery authority import -c server.yaml issuer.pem")
	server := s.serve()
	agent := s.agent()
	s.sh("chancery state export -c server.yaml -o backup.json && rm secret/state.key issuer.csr issuer.pem")
	s.trustsBeside(agent) // the server has it in memory
	server.stop()
	if out, err := s.try("chancery state import -c server.yaml backup.json --dry-run"); err == nil || !strings.Contains(out, "an export can be restored with the sealing key that it was made with only") {
		t.Errorf("without the sealing key: %v %s", err, out)
	}
	s.sh(blocks[0])
	s.sh(sign)
	s.sh(blocks[1])
	s.serve()
	s.sh("rm agent.sock.bundle") // a new authority has another bundle key
	s.trusts()
	if out, err := s.try("chancery state import -c server.yaml backup.json --dry-run"); err == nil || !strings.Contains(out, "it was made with the sealing key of ID") {
		t.Errorf("with another sealing key: %v %s", err, out)
	}
}

// newRootTest: the old root has ended; here it is one that ends within seconds.
func newRootTest(t *testing.T, blocks []string) {
	s := newSite(t, "")
	root, key, end := shortRoot(t, 25*time.Second)
	s.write("root.pem", root)
	s.sh("chancery authority init -c server.yaml --root root.pem && cp roots.pem trusted.pem && chancery authority csr -c server.yaml > issuer.csr")
	s.write("issuer.pem", key(s.sh("cat issuer.csr")))
	s.sh("chancery authority import -c server.yaml issuer.pem")
	server := s.serve()
	s.trusts()
	time.Sleep(time.Until(end)) // nothing else tells that a certificate has ended
	s.until("nothing is issued", func() bool { return s.readiness() != "" }, s.readiness)
	server.stop()

	s.sh(blocks[0])
	s.serve()
	s.refusesRoots()
	s.sh("cp both.pem trusted.pem && rm agent.sock.bundle") // a new authority has another bundle key
	s.trusts()
	s.sh("cp roots.pem trusted.pem")
	s.trusts()
}

func moveTest(t *testing.T, blocks []string) {
	s := initialized(t, "")
	server := s.serve()
	s.sh("chancery revoke " + revoked + "early -c server.yaml --wait 0s")
	s.sh(blocks[0])
	server.stop()
	_, _, state := database(t)
	text := s.sh("cat server.yaml")
	s.write("server.yaml", regexp.MustCompile(`(?m)^state: .*$`).ReplaceAllString(text, "state: "+state("server")))
	s.sh(blocks[1])
	s.serve()
	if list := s.sh("chancery revoke list -c server.yaml"); !strings.Contains(list, revoked+"early") {
		t.Error(list)
	}
	s.trusts()
	other := s.second(state("ca-2"))
	other.serve()
	other.trusts()
}

func lookTest(t *testing.T, blocks []string) {
	s := initialized(t, "")
	s.serve()
	if out := s.sh(blocks[0]); !strings.Contains(out, "replica server, log ") || !strings.Contains(out, "store sqlite, ") {
		t.Error(out)
	}
}

// shortRoot makes a root that ends soon, and what signs requests under it.
func shortRoot(t *testing.T, life time.Duration) (root string, sign func(csr string) string, end time.Time) {
	t.Helper()
	key := jwttest.Keys()["p384"]
	now := time.Now()
	end = now.Add(life).Truncate(time.Second)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: now.Add(-time.Minute), NotAfter: end, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, SubjectKeyId: []byte{1, 2, 3, 4}}
	template.Subject.CommonName = "short root"
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	made, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	encode := func(der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	}
	return encode(der), func(csr string) string {
		block, _ := pem.Decode([]byte(csr))
		if block == nil {
			t.Fatalf("no request: %s", csr)
		}
		req, err := x509.ParseCertificateRequest(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		ski, err := x509.MarshalPKIXPublicKey(req.PublicKey)
		if err != nil {
			t.Fatal(err)
		}
		issuer := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: req.Subject, NotBefore: now.Add(-time.Minute), NotAfter: end, IsCA: true, BasicConstraintsValid: true,
			MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, SubjectKeyId: ski[len(ski)-20:], URIs: req.URIs}
		der, err := x509.CreateCertificate(rand.Reader, issuer, made, req.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		return encode(der)
	}, end
}
