package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
)

// parentsDoc returns that code block of docs/parents.md in a language which has the word in it.
func parentsDoc(t *testing.T, language, word string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(repoRoot(t), "docs", "parents.md"))
	if err != nil {
		t.Fatal(err)
	}
	for i, block := range strings.Split(string(data), "```") {
		if text, ok := strings.CutPrefix(block, language+"\n"); ok && i%2 == 1 && strings.Contains(text, word) {
			return text
		}
	}
	t.Fatalf("docs/parents.md has no block of %s with %q", language, word)
	return ""
}

// startParented starts a server whose issuer is signed by a parent, under a root that is pinned.
func startParented(t *testing.T, cfg serverYAML, roots ...*testCA) *Server {
	t.Helper()
	file := filepath.Join(t.TempDir(), "root.pem")
	writeFile(t, file, certsPEM(roots...), 0o600)
	return startParentedFile(t, cfg, file)
}

func startParentedFile(t *testing.T, cfg serverYAML, rootFile string) *Server {
	t.Helper()
	s := NewServer(t, cfg, "--root", rootFile)
	s.Start(t)
	return s
}

// issuersSoFar counts the issuers that a server has had in use since it was made. (cfssl rounds to minutes: an answer may end with
// the issuer in use, which is refused in words that have "issuer in use" too, and asked for again.)
func (s *Server) issuersSoFar() int { return strings.Count(s.Log(), `msg="issuer in use"`) }

func (s *Server) waitIssuers(t *testing.T, n int) {
	t.Helper()
	s.WaitFor(t, 90*time.Second, fmt.Sprintf("has had %d issuers", n), func() error {
		if have := s.issuersSoFar(); have < n {
			return fmt.Errorf("it has had %d", have)
		}
		return nil
	})
}

// parentUp returns chancery_ca_parent_up of a server: "0", "1", or "" before the first request.
func (s *Server) parentUp(t *testing.T) string {
	t.Helper()
	for _, line := range s.Metric(t, "chancery_ca_parent_up{") {
		_, value, _ := strings.Cut(line, "} ")
		return value
	}
	return ""
}

// staysReady asks /readyz all the time; what it returns ends that and fails the test if the server was not ready once.
func (s *Server) staysReady(t *testing.T) (done func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var n int
	var failed error
	url := "http://" + s.Metrics + "/readyz"
	wg.Go(func() {
		for ctx.Err() == nil {
			if _, err := httpGet(http.DefaultClient, url); err != nil && failed == nil {
				failed = err
			}
			n++
			time.Sleep(pollEvery)
		}
	})
	return func() {
		t.Helper()
		cancel()
		wg.Wait()
		if failed != nil {
			t.Errorf("asked %d times, the server was not ready once: %v", n, failed)
		}
	}
}

// outage takes a parent away right after it signed an issuer, until the server has tried in vain, and brings it back: certificates
// are issued all the time, the server stays ready, and says what is wrong.
func outage(t *testing.T, s *Server, ask Ask, away, back func()) {
	t.Helper()
	ready := s.staysReady(t)
	conn := s.Dial(t)
	have := s.issuersSoFar()
	away()
	before := strings.Count(s.Log(), "issuer not renewed by its parent")
	s.WaitFor(t, 90*time.Second, "has tried to renew its issuer", func() error {
		mustIssue(t, conn, "while the parent is away", ask)
		if n := strings.Count(s.Log(), "issuer not renewed by its parent"); n == before {
			return errors.New("not yet")
		}
		return nil
	})
	if up := s.parentUp(t); up != "0" {
		t.Errorf("chancery_ca_parent_up is %q", up)
	}
	back()
	s.waitIssuers(t, have+1)
	mustIssue(t, conn, "after the parent is back", ask)
	s.WaitFor(t, 10*time.Second, "says that its parent is up", func() error {
		if up := s.parentUp(t); up != "1" {
			return fmt.Errorf("chancery_ca_parent_up is %q", up)
		}
		return nil
	})
	ready()
}

// verifiesUnder checks that what a server gives verifies under roots from a file.
func verifiesUnder(t *testing.T, s *Server, ask Ask, rootsFile string) {
	t.Helper()
	chain, err := ask.Create(t.Context(), s.Dial(t))
	if err != nil {
		t.Fatal(err)
	}
	roots, middle := x509.NewCertPool(), x509.NewCertPool()
	data, err := os.ReadFile(rootsFile)
	if err != nil || !roots.AppendCertsFromPEM(data) {
		t.Fatalf("reading %s: %v", rootsFile, err)
	}
	middle.AppendCertsFromPEM([]byte(strings.Join(chain[1:len(chain)-1], "\n")))
	leaf := parsePEMCert(t, []byte(chain[0]))
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: middle, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Error(err)
	}
}

// TestParentChancery: a server below another one. Its issuer is renewed while load runs, and its parent is killed with -9 as the next
// renewal comes: no request fails. Who is not listed gets no issuer.
func TestParentChancery(t *testing.T) {
	k := SharedKube(t)
	ns := k.Namespace(t, "parent")
	east, stranger, web := k.RunPod(t, ns, "east", "east-1", "node-a"), k.RunPod(t, ns, "stranger", "stranger-1", "node-a"), k.RunPod(t, ns, "web", "web-1", "node-a")
	cluster := k.StaticCluster(t)
	above := NewServer(t, serverYAML{Clusters: []clusterYAML{cluster}, Issuers: []map[string]any{{"identity": east.SPIFFEID(trustDomain), "maxLifetime": "24s"}}})
	above.Start(t)
	above.WaitReady(t)
	below := func(pod Pod) *Server {
		token := filepath.Join(t.TempDir(), "token")
		WriteToken(t, token, k.BoundToken(t, pod, time.Hour, audience))
		return startParentedFile(t, serverYAML{Clusters: []clusterYAML{cluster}, Parent: map[string]any{"lifetime": "24s", "chancery": map[string]any{
			"server": above.Listen, "serverRoots": above.Roots, "cluster": "Kubernetes", "tokenFile": token,
		}}}, above.Roots)
	}
	refused := below(stranger)
	refused.WaitLog(t, 30*time.Second, "it is not listed in issuers")
	if _, err := httpGet(http.DefaultClient, "http://"+refused.Metrics+"/readyz"); err == nil {
		t.Error("a server without an issuer says that it is ready")
	}
	refused.Kill()

	server := below(east)
	server.WaitReady(t)
	ask := Ask{Token: k.BoundToken(t, web, time.Hour, audience)}
	got := issueContinuously(t, server, ask)
	ready := server.staysReady(t)
	have := server.issuersSoFar()
	server.waitIssuers(t, have+1)
	above.Kill()
	server.WaitLog(t, 60*time.Second, "issuer not renewed by its parent; the old one stays in use")
	before, _ := got.soFar()
	Eventually(t, 20*time.Second, "certificates are issued while the parent is away", func() error {
		if now, _ := got.soFar(); len(now) < len(before)+50 {
			return fmt.Errorf("%d", len(now)-len(before))
		}
		return nil
	})
	above.Start(t)
	server.waitIssuers(t, have+2)
	ready()
	serials, err := got.soFar()
	t.Logf("%d certificates, %d issuers", len(serials), server.issuersSoFar())
	if err != nil {
		t.Errorf("a request failed: %v", err)
	}
	verifiesUnder(t, server, ask, above.Roots)
	lines, _ := above.Audit(t, func(a auditLine) bool {
		return a.Event == "intent" && a.Requester.SPIFFEID == east.SPIFFEID(trustDomain)
	})
	if len(lines) < 3 {
		t.Errorf("the parent's audit log tells of %d issuers", len(lines))
	}
}

// TestParentFiles: a CA in files signs short-lived issuers. When it is taken away for longer than an issuer lives, the server is not
// ready, says why, and recovers by itself.
func TestParentFiles(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "parent"), "web", "web-1", "node-a")
	root := authority(t, "e2e root", rsa2048(t), nil)
	above := authority(t, "e2e parent", p256(t), root)
	dir := t.TempDir()
	mountSecret(t, dir, tlsSecret.files(above, nil, root))
	server := startParented(t, serverYAML{
		Clusters: []clusterYAML{k.StaticCluster(t)}, Parent: map[string]any{"lifetime": "12s", "files": map[string]any{"tls": dir}},
	}, root)
	server.WaitReady(t)
	ask := Ask{Token: k.BoundToken(t, pod, time.Hour, audience)}
	verifiesUnder(t, server, ask, server.Roots)
	server.waitIssuers(t, 3)
	// Lives of seconds are judged as near their end, most of them being backdated: the exit code says so.
	if out, _, _ := Run(t, "", "status", "-c", server.Config); !strings.Contains(out, "renewed by: parent") {
		t.Errorf("status does not tell who renews the issuer:\n%s", out)
	}

	foreign := authority(t, "foreign root", p256(t), nil)
	mountSecret(t, dir, tlsSecret.files(authority(t, "foreign parent", p256(t), foreign), nil, foreign))
	server.WaitLog(t, 30*time.Second, "does not lead to a root of the trust domain")
	server.WaitLog(t, 60*time.Second, "nothing can be issued")
	if _, err := httpGet(http.DefaultClient, "http://"+server.Metrics+"/readyz"); err == nil || !strings.Contains(err.Error(), "parent files") {
		t.Errorf("without an issuer /readyz says: %v", err)
	}
	other := authority(t, "another parent", p256(t), root) // under the same root
	mountSecret(t, dir, tlsSecret.files(other, nil, root))
	server.WaitReady(t)
	Eventually(t, 20*time.Second, "certificates are issued again", func() error {
		_, err := ask.Create(t.Context(), server.Dial(t))
		return err
	})
	verifiesUnder(t, server, ask, server.Roots)
	server.Kill() // until its issuer has ended: the next start asks for another one
	have := server.issuersSoFar()
	Eventually(t, 30*time.Second, "the issuer has ended", func() error {
		var shown struct {
			Domains []struct {
				Authorities []struct {
					Kind, State string
					NotAfter    time.Time
				}
			}
		}
		if err := json.Unmarshal([]byte(MustRun(t, "authority", "show", "-c", server.Config, "-o", "json")), &shown); err != nil {
			t.Fatal(err)
		}
		for _, a := range shown.Domains[0].Authorities {
			if a.Kind == "issuer" && a.State == "active" && time.Now().Before(a.NotAfter) {
				return fmt.Errorf("not before %s", a.NotAfter)
			}
		}
		return nil
	})
	server.Start(t)
	server.WaitReady(t)
	if server.issuersSoFar() <= have {
		t.Error("the server started with an issuer that has ended")
	}
}

// TestParentCFSSL: a real multirootca 1.7.1 signs, over TLS and authenticated. It counts an expiry from the backdated begin, in whole
// minutes: the issuers here live for one to two.
func TestParentCFSSL(t *testing.T) {
	t.Parallel()
	path := Tool(t, "multirootca")
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "parent"), "web", "web-1", "node-a")
	root := authority(t, "e2e root", p256(t), nil)
	above := authority(t, "e2e cfssl", p256(t), root)
	dir := t.TempDir()
	const key, wrong = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100"
	for name, text := range map[string]string{
		"ca.pem": certsPEM(above), "ca.key": keyPEM(above.key), "chain.pem": certsPEM(above),
		"roots.ini":   fmt.Sprintf("[mesh]\nprivate = file://%s/ca.key\ncertificate = %[1]s/ca.pem\nconfig = %[1]s/config.json\n", dir),
		"config.json": strings.NewReplacer("/etc/cfssl/auth.key", filepath.Join(dir, "there.key"), "168h", "150s").Replace(parentsDoc(t, "json", "auth_keys")),
		"there.key":   key + "\n", "auth.key": wrong,
	} {
		writeFile(t, filepath.Join(dir, name), text, 0o600)
	}
	tlsCA := authority(t, "e2e TLS", p256(t), nil)
	serving, err := tlsCA.issue(dir, "serving", pkix.Name{CommonName: "multirootca"}, "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", port)
	var remote *Process
	start := func() {
		remote = StartProcess(t, ProcessConfig{Name: "multirootca", Path: path, Dir: dir, Log: filepath.Join(dir, "multirootca.log"),
			Args: []string{"-a", address, "-roots", "roots.ini", "-tls-cert", serving.Cert, "-tls-key", serving.Key}})
	}
	start()
	server := startParented(t, serverYAML{
		Clusters: []clusterYAML{k.StaticCluster(t)}, Profile: map[string]string{"defaultTTL": "10s"},
		Parent: map[string]any{"cfssl": map[string]any{
			"address": "https://" + address, "roots": serving.Root, "label": "mesh", "profile": "issuer",
			"authKeyFile": filepath.Join(dir, "auth.key"), "chainFile": filepath.Join(dir, "chain.pem"),
		}},
	}, root)
	server.WaitLog(t, 30*time.Second, "invalid token")
	writeFile(t, filepath.Join(dir, "auth.key"), key+"\n", 0o600)
	server.WaitReady(t)
	ask := Ask{Token: k.BoundToken(t, pod, time.Hour, audience)}
	verifiesUnder(t, server, ask, server.Roots)
	outage(t, server, ask, func() { remote.Kill() }, start)
	if log := server.Log(); strings.Contains(log, key) || strings.Contains(log, wrong) {
		t.Error("the log shows the auth key")
	}
}

// openbao is a real OpenBao with a PKI engine that holds a CA of the test's.
type openbao struct {
	*Process
	address string
	roots   string // file
	client  *http.Client
	token   string // root's
	unseal  string
	config  ProcessConfig
}

func startOpenBao(t *testing.T, above, root *testCA) *openbao {
	t.Helper()
	path, dir := Tool(t, "bao"), t.TempDir()
	tlsCA := authority(t, "e2e TLS", p256(t), nil)
	serving, err := tlsCA.issue(dir, "serving", pkix.Name{CommonName: "openbao"}, "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	clusterPort, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	b := &openbao{address: fmt.Sprintf("https://127.0.0.1:%d", port), roots: serving.Root}
	pool := x509.NewCertPool()
	pool.AddCert(tlsCA.cert)
	b.client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true}, Timeout: 20 * time.Second}
	data := filepath.Join(dir, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "bao.hcl"), fmt.Sprintf(`storage "raft" {
  path = %q
  node_id = "one"
}
listener "tcp" {
  address = "127.0.0.1:%d"
  cluster_address = "127.0.0.1:%d"
  tls_cert_file = %q
  tls_key_file = %q
}
api_addr = %q
cluster_addr = "https://127.0.0.1:%[3]d"
`, data, port, clusterPort, serving.Cert, serving.Key, b.address), 0o600)
	b.config = ProcessConfig{Name: "openbao", Path: path, Args: []string{"server", "-config", filepath.Join(dir, "bao.hcl")}, Dir: dir, Log: filepath.Join(dir, "bao.log")}
	b.Process = StartProcess(t, b.config)
	var made struct {
		Keys  []string `json:"keys_base64"`
		Token string   `json:"root_token"`
	}
	b.WaitFor(t, 60*time.Second, "is initialised", func() error {
		return b.call("PUT", "sys/init", map[string]any{"secret_shares": 1, "secret_threshold": 1}, &made)
	})
	b.token, b.unseal = made.Token, made.Keys[0]
	b.open(t)
	b.must(t, "sys/mounts/pki", map[string]any{"type": "pki", "config": map[string]any{"max_lease_ttl": "87600h"}}, nil)
	b.must(t, "pki/config/ca", map[string]any{"pem_bundle": keyPEM(above.key) + certsPEM(above, root)}, nil)
	b.must(t, "sys/policies/acl/chancery", map[string]any{"policy": parentsDoc(t, "hcl", "sign-intermediate")}, nil)
	return b
}

// open unseals it, also after a kill.
func (b *openbao) open(t *testing.T) {
	t.Helper()
	b.WaitFor(t, 60*time.Second, "is unsealed", func() error {
		var state struct {
			Sealed bool `json:"sealed"`
		}
		if err := b.call("PUT", "sys/unseal", map[string]any{"key": b.unseal}, &state); err != nil || state.Sealed {
			return fmt.Errorf("sealed: %v, %w", state.Sealed, err)
		}
		return b.call("GET", "sys/health", nil, nil) // it has become active
	})
}

func (b *openbao) call(method, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequest(method, b.address+"/v1/"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("X-Vault-Token", b.token)
	resp, err := b.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, data)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(data, out)
}

func (b *openbao) must(t *testing.T, path string, in, out any) {
	t.Helper()
	if err := b.call("POST", path, in, out); err != nil {
		t.Fatal(err)
	}
}

// tokenFile makes a token that may have issuers signed and nothing else.
func (b *openbao) tokenFile(t *testing.T) string {
	t.Helper()
	var made struct {
		Auth struct {
			Token string `json:"client_token"`
		} `json:"auth"`
	}
	b.must(t, "auth/token/create", map[string]any{"policies": []string{"chancery"}, "ttl": "1h", "no_default_policy": true}, &made)
	file := filepath.Join(t.TempDir(), "token")
	writeFile(t, file, made.Auth.Token, 0o600)
	return file
}

// TestParentOpenBao: a real OpenBao signs; it is killed, comes back sealed, and is unsealed; and it hangs.
func TestParentOpenBao(t *testing.T) {
	t.Parallel()
	Tool(t, "bao")
	k := SharedKube(t)
	ns := k.Namespace(t, "parent")
	pod := k.RunPod(t, ns, "web", "web-1", "node-a")
	root := authority(t, "e2e root", p256(t), nil)
	bao := startOpenBao(t, authority(t, "e2e openbao", p256(t), root), root)
	tokenFile := bao.tokenFile(t)
	config := func(lifetime string, vault map[string]any) serverYAML {
		vault["address"], vault["roots"] = bao.address, bao.roots
		return serverYAML{Clusters: []clusterYAML{k.StaticCluster(t)}, Parent: map[string]any{"lifetime": lifetime, "vault": vault}}
	}
	server := startParented(t, config("40s", map[string]any{"tokenFile": tokenFile}), root)
	server.WaitReady(t)
	ask := Ask{Token: k.BoundToken(t, pod, time.Hour, audience)}
	verifiesUnder(t, server, ask, server.Roots)

	// By a service account of the real cluster, whose token OpenBao has reviewed there; the issuer in the engine is named.
	k.KubeconfigFor(t, ns, "reviewer", reviewTokens)
	reviewer, err := k.RequestToken(t.Context(), ns, "reviewer", authenticationv1.TokenRequestSpec{})
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(k.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	bao.must(t, "sys/auth/kubernetes", map[string]any{"type": "kubernetes"}, nil)
	bao.must(t, "auth/kubernetes/config", map[string]any{
		"kubernetes_host": k.URL, "kubernetes_ca_cert": string(ca), "token_reviewer_jwt": reviewer, "disable_local_ca_jwt": true,
	}, nil)
	bao.must(t, "auth/kubernetes/role/chancery", map[string]any{
		"bound_service_account_names": "web", "bound_service_account_namespaces": ns, "policies": "chancery", "ttl": "10m", "audience": "bao",
	}, nil)
	jwt := filepath.Join(t.TempDir(), "jwt")
	WriteToken(t, jwt, k.BoundToken(t, pod, time.Hour, "bao"))
	byAccount := startParented(t, config("1h", map[string]any{"issuer": "default", "kubernetes": map[string]any{"role": "chancery", "tokenFile": jwt}}), root)
	byAccount.WaitReady(t)
	verifiesUnder(t, byAccount, ask, byAccount.Roots)
	foreign := startParented(t, config("1h", map[string]any{"tokenFile": tokenFile}), authority(t, "another root", p256(t), nil))
	foreign.WaitLog(t, 30*time.Second, "does not lead to a root of the trust domain")
	foreign.Kill()

	outage(t, server, ask, func() { bao.Kill() }, func() {
		bao.Process = StartProcess(t, bao.config)
		bao.open(t)
	})
	outage(t, server, ask, func() { bao.Signal(syscall.SIGSTOP) }, func() { bao.Signal(syscall.SIGCONT) })
	token, err := os.ReadFile(tokenFile)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(server.Log(), string(token)) {
		t.Error("the log shows the token")
	}
}
