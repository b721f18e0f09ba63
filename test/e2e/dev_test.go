package e2e

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fetched is the JSON of `svid fetch` and of each line of `svid watch`, as documented.
type fetched struct {
	SVIDs []struct {
		SPIFFEID  string    `json:"spiffeId"`
		Serial    string    `json:"serial"`
		NotBefore time.Time `json:"notBefore"`
		NotAfter  time.Time `json:"notAfter"`
		Issuer    string    `json:"issuer"`
		Hint      string    `json:"hint"`
	} `json:"svids"`
	Bundles map[string][]string `json:"bundles"`
	CRLs    []struct {
		Issuer     string    `json:"issuer"`
		Number     string    `json:"number"`
		ThisUpdate time.Time `json:"thisUpdate"`
		NextUpdate time.Time `json:"nextUpdate"`
		Revoked    []string  `json:"revoked"`
	} `json:"crls"`
}

func readFetched(text string) (f fetched, err error) {
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return f, fmt.Errorf("reading the JSON of svid: %w\n%s", err, text)
	}
	if len(f.SVIDs) != 1 || len(f.Bundles[trustDomain]) != 1 || len(f.Bundles) != 1 {
		return f, fmt.Errorf("want one SVID and one root of %s: %s", trustDomain, text)
	}
	return f, nil
}

// startDev runs `chancery dev` in dir, with ports that the system picks, and waits for its ready line.
func startDev(t *testing.T, dir string, args ...string) *Process {
	t.Helper()
	args = append([]string{"dev", "--dir", dir, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"}, args...)
	p := StartChancery(t, "dev", dir, args...)
	p.WaitLog(t, 60*time.Second, "Ready after ")
	return p
}

// TestDevAndCLI: what a newcomer does in the first ten minutes.
func TestDevAndCLI(t *testing.T) {
	t.Parallel()
	skipShort(t)
	dir := SocketDir(t)
	dev := startDev(t, dir, "--svid-ttl", "20s")
	socket, config := filepath.Join(dir, "agent.sock"), filepath.Join(dir, "server.yaml")
	for _, file := range []string{"agent.sock", "state.db", "audit.jsonl"} {
		if !exists(filepath.Join(dir, file)) {
			t.Errorf("dev should keep %s in its folder", file)
		}
	}
	fetchesAndWatches(t, socket)
	writesFiles(t, socket)

	root := MustRun(t, "authority", "show", "-c", config, "-o", "pem")
	showsAuthority(t, config, root)
	asked, _ := (&Server{Dir: dir, yaml: serverYAML{AuditLog: "audit.jsonl"}}).Audit(t, func(a auditLine) bool { return a.Event == "admin" && a.Detail == "authority show" })
	if len(asked) != 4 || !strings.HasPrefix(asked[0].Actor, "unix:") {
		t.Errorf("a running dev should be asked itself, and note who asks: %+v", asked)
	}
	if stdout, stderr, err := Run(t, "", "dev", "--dir", dir, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"); err == nil ||
		!strings.Contains(stderr, "in use") || !strings.Contains(stderr, fmt.Sprint(dev.PID())) {
		t.Errorf("a second dev in the same folder should be refused, naming the first one's pid %d: %v\n%s%s", dev.PID(), err, stdout, stderr)
	}

	dev.Kill()
	showsAuthority(t, config, root) // now from the store itself
	startDev(t, dir, "--svid-ttl", "20s")
	if again := MustRun(t, "authority", "show", "-c", config, "-o", "pem"); again != root {
		t.Errorf("after kill -9 dev has another root:\n%s\nwas\n%s", again, root)
	}
	if _, err := readFetched(MustRun(t, "svid", "fetch", "--socket", socket, "-o", "json")); err != nil {
		t.Error(err)
	}
}

// fetchesAndWatches checks that `svid watch` shows a new serial before the old one ends, and that `svid fetch` agrees.
func fetchesAndWatches(t *testing.T, socket string) {
	t.Helper()
	first, err := readFetched(MustRun(t, "svid", "fetch", "--socket", socket, "-o", "json"))
	if err != nil {
		t.Fatal(err)
	}
	svid := first.SVIDs[0]
	if left := time.Until(svid.NotAfter); !strings.HasPrefix(svid.SPIFFEID, "spiffe://cluster.local/ns/dev/sa/") || svid.Serial == "" ||
		svid.Issuer == "" || !svid.NotBefore.Before(time.Now()) || left <= 0 || left > 20*time.Second {
		t.Errorf("fetched %+v with %v left; want an SVID of this user with at most 20 s", svid, left)
	}
	if text := MustRun(t, "svid", "fetch", "--socket", socket); !strings.Contains(text, svid.SPIFFEID) {
		t.Errorf("svid fetch without -o should name %s:\n%s", svid.SPIFFEID, text)
	}
	for line := range watchLines(t, socket) {
		f, err := readFetched(line)
		if err != nil {
			t.Fatal(err)
		}
		switch next := f.SVIDs[0]; {
		case next.Serial == svid.Serial:
		case !time.Now().Before(svid.NotAfter):
			t.Fatalf("serial %s came after the end of %s at %v", next.Serial, svid.Serial, svid.NotAfter)
		default:
			return
		}
	}
	t.Fatal("svid watch has ended")
}

// watchLines runs `svid watch` and yields its lines until it ends or the loop does.
func watchLines(t *testing.T, socket string) func(func(string) bool) {
	t.Helper()
	return func(yield func(string) bool) {
		r, w := io.Pipe()
		cmd := exec.CommandContext(t.Context(), ChanceryBinary(t), "svid", "watch", "--socket", socket, "-o", "json")
		cmd.Stdout = w
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() {
			ended <- cmd.Wait()
			w.Close()
		}()
		lines := bufio.NewScanner(r)
		for lines.Scan() && yield(lines.Text()) {
		}
		cmd.Process.Signal(os.Interrupt)
		go io.Copy(io.Discard, r)
		if err := <-ended; err != nil {
			t.Errorf("svid watch, interrupted, should end with status 0: %v", err)
		}
	}
}

// revokes checks that a file has a CRL of an issuer, which revokes nothing.
func revokes(t *testing.T, file string, issuer []byte) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "X509 CRL" {
		t.Fatalf("%s has no CRL: %s", file, data)
	}
	list, err := x509.ParseRevocationList(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	by, err := x509.ParseCertificate(issuer)
	if err != nil {
		t.Fatal(err)
	}
	if err := list.CheckSignatureFrom(by); err != nil || len(list.RevokedCertificateEntries) != 0 {
		t.Errorf("%s revokes %d: %v", file, len(list.RevokedCertificateEntries), err)
	}
}

// writesFiles checks that the files of --write are 0600 and fit together.
func writesFiles(t *testing.T, socket string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "svid")
	MustRun(t, "svid", "fetch", "--socket", socket, "--write", dir)
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"svid.pem", "svid_key.pem", "bundle.pem", "crl.pem"} {
		if info, err := os.Stat(path(name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s should have mode 0600: %v, %v", name, info, err)
		}
	}
	pair, err := tls.LoadX509KeyPair(path("svid.pem"), path("svid_key.pem"))
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := os.ReadFile(path("bundle.pem"))
	if err != nil {
		t.Fatal(err)
	}
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	roots.AppendCertsFromPEM(bundle)
	for _, der := range pair.Certificate[1:] {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		between.AddCert(cert)
	}
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: between}); err != nil {
		t.Errorf("svid.pem does not verify against bundle.pem: %v", err)
	}
	revokes(t, path("crl.pem"), pair.Certificate[1])

	if out := MustRun(t, "inspect", path("svid.pem")); !strings.Contains(out, pair.Leaf.URIs[0].String()) || strings.Contains(out, "finding") {
		t.Errorf("inspect should name %s and find nothing wrong:\n%s", pair.Leaf.URIs[0], out)
	}
	key, err := os.ReadFile(path("svid_key.pem"))
	if err != nil {
		t.Fatal(err)
	}
	out, stderr, err := Run(t, string(bundle)+string(key), "inspect", "-")
	secret := strings.Split(string(key), "\n")[1]
	if err != nil || !strings.Contains(out, "CA") || strings.Contains(out, secret) {
		t.Errorf("inspect - should describe the root and not show the key: %v %s\n%s", err, stderr, out)
	}
}

// showsAuthority checks the three forms of `authority show`.
func showsAuthority(t *testing.T, config, root string) {
	t.Helper()
	var shown struct {
		Domains []struct {
			TrustDomain string `json:"trustDomain"`
			Authorities []struct{ Kind, State, Certificate string }
		} `json:"domains"`
	}
	if err := json.Unmarshal([]byte(MustRun(t, "authority", "show", "-c", config, "-o", "json")), &shown); err != nil {
		t.Fatal(err)
	}
	if len(shown.Domains) != 1 || shown.Domains[0].TrustDomain != trustDomain || len(shown.Domains[0].Authorities) != 2 ||
		shown.Domains[0].Authorities[0].Certificate != root || shown.Domains[0].Authorities[1].Kind != "issuer" {
		t.Errorf("authority show -o json: %+v; want root and issuer of %s", shown, trustDomain)
	}
	if pem := MustRun(t, "authority", "show", "-c", config, "-o", "pem"); pem != root {
		t.Errorf("authority show -o pem: %s; want the root", pem)
	}
	if text := MustRun(t, "authority", "show", "-c", config); !strings.Contains(text, "trust domain "+trustDomain) || !strings.Contains(text, "issuer") {
		t.Errorf("authority show: %s", text)
	}
}

// TestCLIBadInput: a mistake is answered by what is wrong and what would be right, and by status 1.
func TestCLIBadInput(t *testing.T) {
	t.Parallel()
	skipShort(t)
	dir := SocketDir(t)
	file := func(name, text string) string {
		writeFile(t, filepath.Join(dir, name), text, 0o600)
		return filepath.Join(dir, name)
	}
	config := func(from, to string) string {
		return file("server.yaml", strings.Replace(staticConfig, from, to, 1))
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"server"}, "-c FILE"},
		{[]string{"svid", "fetsh"}, "fetsh"},
		{[]string{"server", "-c", filepath.Join(dir, "none.yaml")}, "none.yaml: no such file"},
		{[]string{"server", "-c", file("agent.yaml", "tokenFil: x\n")}, `"tokenFil"`},
		{[]string{"agent", "-c", file("agent2.yaml", "server: 127.0.0.1:1\n")}, "is missing"},
		{[]string{"inspect", file("empty.pem", "hello")}, "no PEM block"},
		{[]string{"inspect", filepath.Join(dir, "none.pem")}, "none.pem: no such file"},
		{[]string{"dev", "--dir", filepath.Join(dir, "dev"), "--svid-ttl", "1s"}, "--svid-ttl 1s"},
		{[]string{"svid", "fetch", "--socket", filepath.Join(dir, "none.sock")}, "none.sock"},
		{[]string{"authority", "show", "-c", file("good.yaml", staticConfig)}, "run `chancery authority init -c"},
	} {
		badInput(t, c.want, c.args...)
	}
	for _, c := range []struct{ from, to, want string }{
		{"trustDomain: cluster.local", "trustDomain: Cluster.Local", "trustDomain"},
		{"trustDomain: cluster.local", "trustDomain: a\ntrustDomain: b", "trustDomain"},
		{"state: {sqlite: state.db}", "", "set one of sqlite, postgres and kubernetes"},
		{"auditLog: audit.jsonl", "", "auditLog is missing"},
		{"127.0.0.1:8443", "8443", "listen"},
		{"auditLog:", "issuer: {}\nauditLog:", "cacerts"},
		{"auditLog:", "profile: {defaultTTL: 1 h}\nauditLog:", "defaultTTL"},
	} {
		badInput(t, c.want, "authority", "init", "-c", config(c.from, c.to))
	}
	for _, name := range []string{"state.db", "state.key", "roots.pem", "audit.jsonl"} {
		if exists(filepath.Join(dir, name)) {
			t.Errorf("a refused command left %s", name)
		}
	}
}

func badInput(t *testing.T, want string, args ...string) {
	t.Helper()
	stdout, stderr, err := Run(t, "", args...)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(stderr, want) || !strings.HasPrefix(stderr, "chancery: ") {
		t.Errorf("chancery %s: %v, %q%s; want status 1 and %q", strings.Join(args, " "), err, stderr, stdout, want)
	}
}
