package e2e

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/spiffe/go-spiffe/v2/workloadapi"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/mtls"
	own "github.com/chancery-project/chancery/trust/spiffebundle"
)

// spireDomain is the trust domain of SPIRE servers here.
const spireDomain = "spire.example"

// spire is a real spire-server, with a bundle endpoint.
type spire struct {
	*Process
	t        testing.TB
	dir      string
	endpoint string // HOST:PORT
}

// startSPIRE starts a SPIRE server. With web its bundle endpoint has that certificate, else its SVID; webRoots are those by which it verifies others'
// certificates with https_web.
func startSPIRE(t testing.TB, web *certFiles, webRoots string) *spire {
	t.Helper()
	path := Tool(t, "spire-server")
	s := &spire{t: t, dir: SocketDir(t)}
	profile := `profile "https_spiffe" {}`
	if web != nil {
		profile = fmt.Sprintf(`profile "https_web" { serving_cert_file { cert_file_path = %q, key_file_path = %q, file_sync_interval = "1h" } }`, web.Cert, web.Key)
	}
	for try := 0; ; try++ {
		port, err := freePort()
		if err != nil {
			t.Fatal(err)
		}
		api, err := freePort()
		if err != nil {
			t.Fatal(err)
		}
		s.endpoint = fmt.Sprintf("127.0.0.1:%d", port)
		writeFile(t, filepath.Join(s.dir, "server.conf"), fmt.Sprintf(`
server {
  bind_address = "127.0.0.1"
  bind_port = "%d"
  socket_path = %q
  trust_domain = %q
  data_dir = %q
  log_level = "DEBUG"
  ca_ttl = "24h"
  federation {
    bundle_endpoint {
      address = "127.0.0.1"
      port = %d
      refresh_hint = "1m"
      %s
    }
  }
}
plugins {
  DataStore "sql" { plugin_data { database_type = "sqlite3", connection_string = "%s/data.sqlite3" } }
  KeyManager "disk" { plugin_data { keys_path = "%s/keys.json" } }
  NodeAttestor "join_token" { plugin_data {} }
}
`, api, s.socket(), spireDomain, s.dir, port, profile, s.dir, s.dir), 0o600)
		s.Process = StartProcess(t, ProcessConfig{
			Name: "spire-server", Path: path, Args: []string{"run", "-config", filepath.Join(s.dir, "server.conf")}, Dir: s.dir, Env: []string{"SSL_CERT_FILE=" + webRoots},
		})
		err = s.Await(30*time.Second, "is healthy", func() error {
			_, err := s.try("healthcheck")
			return err
		})
		if err == nil {
			return s
		}
		if try == 20 || !strings.Contains(s.Log(), "address already in use") {
			t.Fatal(err)
		}
	}
}

func (s *spire) socket() string { return filepath.Join(s.dir, "api.sock") }

func (s *spire) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	var out, errs strings.Builder
	cmd := exec.CommandContext(ctx, Tool(s.t, "spire-server"), append(args, "-socketPath", s.socket())...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("spire-server %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errs.String()+out.String()))
	}
	return out.String(), nil
}

func (s *spire) run(args ...string) string {
	s.t.Helper()
	out, err := s.try(args...)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// mint issues an SVID.
func (s *spire) mint(path string) *x509svid.SVID {
	s.t.Helper()
	dir := s.t.TempDir()
	s.run("x509", "mint", "-spiffeID", "spiffe://"+spireDomain+path, "-ttl", "1h", "-write", dir)
	svid, err := x509svid.Load(filepath.Join(dir, "svid.pem"), filepath.Join(dir, "key.pem"))
	if err != nil {
		s.t.Fatal(err)
	}
	return svid
}

// authority returns the ID of an X.509 authority, by its state.
func (s *spire) authority(state string) string {
	s.t.Helper()
	var all map[string]struct {
		ID string `json:"authority_id"`
	}
	if err := json.Unmarshal([]byte(s.run("localauthority", "x509", "show", "-output", "json")), &all); err != nil {
		s.t.Fatal(err)
	}
	if all[state].ID == "" {
		s.t.Fatalf("SPIRE has no %s authority: %v", state, all)
	}
	return all[state].ID
}

// forge signs an SVID of our trust domain with SPIRE's own key: what SPIRE would not do, and who has its key can.
func (s *spire) forge(id string) tls.Certificate {
	s.t.Helper()
	data, err := os.ReadFile(filepath.Join(s.dir, "keys.json"))
	if err != nil {
		s.t.Fatal(err)
	}
	var keys struct {
		Keys map[string][]byte `json:"keys"`
	}
	if err := json.Unmarshal(data, &keys); err != nil {
		s.t.Fatal(err)
	}
	td := mustDomain(s.t, spireDomain)
	bundle, err := own.Parse(td, []byte(s.run("bundle", "show", "-format", "spiffe")))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, der := range keys.Keys {
		parsed, err := x509.ParsePKCS8PrivateKey(der)
		if err != nil {
			s.t.Fatal(err)
		}
		key := parsed.(crypto.Signer)
		for _, root := range bundle.Roots {
			if !trust.SameKey(root.PublicKey, key.Public()) {
				continue
			}
			dir := s.t.TempDir()
			files, err := (&testCA{cert: root, key: key}).issue(dir, "forged", pkix.Name{}, id)
			if err != nil {
				s.t.Fatal(err)
			}
			pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
			if err != nil {
				s.t.Fatal(err)
			}
			return pair
		}
	}
	s.t.Fatalf("none of SPIRE's %d keys is that of a root", len(keys.Keys))
	return tls.Certificate{}
}

func mustDomain(t testing.TB, name string) trust.Domain {
	t.Helper()
	td, err := trust.ParseDomain(name)
	if err != nil {
		t.Fatal(err)
	}
	return td
}

// federated are two authorities with a workload each: ours serves, by trust/mtls with what its agent's Workload API brings; SPIRE's calls, by go-spiffe with what
// SPIRE has of us. So each trusts the other by what its own authority fetched.
type federated struct {
	t      *testing.T
	server *Server
	spire  *spire
	pod    Pod
	token  string

	webRoots, webCA string // with https_web: the file of those that vouch for SPIRE's endpoint, at first another CA's; and who does

	api    *mtls.Endpoint
	listen string

	mu      sync.Mutex // guards both
	svid    *trust.Identity
	bundles map[trust.Domain]*trust.Bundle
}

func (f *federated) bundleOf(d trust.Domain) *trust.Bundle {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bundles[d]
}

func (f *federated) own() *trust.Identity {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.svid
}

// OnX509ContextUpdate is what our workload is told by its agent.
func (f *federated) OnX509ContextUpdate(c *workloadapi.X509Context) {
	bundles := map[trust.Domain]*trust.Bundle{}
	for _, b := range c.Bundles.Bundles() {
		td, err := trust.ParseDomain(b.TrustDomain().Name())
		if err == nil {
			bundles[td], err = trust.NewBundle(td, 0, b.X509Authorities())
		}
		if err != nil {
			f.t.Errorf("the agent's bundles: %v", err)
			return
		}
	}
	svid := c.DefaultSVID()
	id, err := trust.LeafID(svid.Certificates[0])
	if err != nil {
		f.t.Errorf("the agent's SVID: %v", err)
		return
	}
	identity, err := trust.NewIdentity(id, svid.Certificates, svid.PrivateKey, bundles[id.Domain()], time.Now())
	if err != nil {
		f.t.Errorf("the agent's SVID: %v", err)
		return
	}
	f.mu.Lock()
	f.svid, f.bundles = identity, bundles
	f.mu.Unlock()
	f.api.Recheck()
}

// OnX509ContextWatchError is told when the agent has nothing yet.
func (f *federated) OnX509ContextWatchError(error) {}

// startWorkload starts an agent, and follows it.
func (f *federated) startWorkload() {
	f.t.Helper()
	a := StartAgent(f.t, f.server, AgentConfig{Pod: f.pod, Token: f.token, TTL: 30 * time.Second}) // renews each 15 s or so, also from one root to the next
	client, err := workloadapi.New(f.t.Context(), workloadapi.WithAddr("unix://"+a.Socket))
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(f.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		client.WatchX509Context(ctx, f)
	}()
	f.t.Cleanup(func() {
		cancel()
		<-ended
		client.Close()
	})
	f.knows(trustDomain, 1)
}

// knows waits until our workload has so many roots of a trust domain.
func (f *federated) knows(name string, roots int) {
	f.t.Helper()
	Eventually(f.t, time.Minute, fmt.Sprintf("our workload has %d roots of %s", roots, name), func() error {
		n := 0
		if b := f.bundleOf(mustDomain(f.t, name)); b != nil {
			n = len(b.Roots())
		}
		if n != roots {
			return fmt.Errorf("it has %d", n)
		}
		return nil
	})
}

// root returns the root of our workload's SVID.
func (f *federated) root() *x509.Certificate {
	f.t.Helper()
	_, paths, err := trust.Verify(f.own().Chain, f.bundleOf, time.Now())
	if err != nil {
		f.t.Fatal(err)
	}
	return paths[0][len(paths[0])-1]
}

// serve answers each byte of a caller whom trust/mtls lets in.
func (f *federated) serve() {
	f.t.Helper()
	var err error
	f.api, err = mtls.New(mtls.Config{Own: f.own, Bundles: f.bundleOf, Authorize: mtls.Anyone()})
	if err != nil {
		f.t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.t.Fatal(err)
	}
	f.listen = l.Addr().String()
	f.t.Cleanup(func() { l.Close() })
	secured := tls.NewListener(f.api.Listener(l), f.api.ServerTLS())
	go func() {
		for {
			c, err := secured.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c)
			}()
		}
	}()
}

// call connects with an SVID of SPIRE's, verifying our workload by what SPIRE has of our trust domain.
func (f *federated) call(svid *x509svid.SVID) (*tls.Conn, error) {
	f.t.Helper()
	out, err := f.spire.try("bundle", "list", "-id", "spiffe://"+trustDomain, "-format", "spiffe")
	if err != nil {
		return nil, err
	}
	theirs, err := spiffebundle.Parse(spiffeid.RequireTrustDomainFromString(trustDomain), []byte(out))
	if err != nil {
		return nil, fmt.Errorf("SPIRE's bundle of %s: %w", trustDomain, err)
	}
	return f.dial(tlsconfig.MTLSClientConfig(svid, theirs, tlsconfig.AuthorizeID(spiffeid.RequireFromString(f.own().ID.String()))))
}

func (f *federated) dial(config *tls.Config) (*tls.Conn, error) {
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", f.listen, config)
	if err != nil {
		return nil, err
	}
	f.t.Cleanup(func() { c.Close() })
	if err := echoes(c); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// echoes fails where the other side has closed; in TLS 1.3 a client hears with the first answer that it was refused.
func echoes(c net.Conn) error {
	c.SetDeadline(time.Now().Add(10 * time.Second))
	_, unsent := c.Write([]byte("x"))
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return err
	}
	return unsent
}

// accepted says that the handshake of both workloads goes through.
func (f *federated) accepted(when string, svid *x509svid.SVID) *tls.Conn {
	f.t.Helper()
	c, err := f.call(svid)
	if err != nil {
		f.t.Fatalf("%s: %v", when, err)
	}
	return c
}

// refused says that our workload refuses a caller.
func (f *federated) refused(when string, err error) {
	f.t.Helper()
	var alert tls.AlertError
	var op *net.OpError
	if err == nil {
		f.t.Fatalf("%s: it was let in", when)
	}
	if !errors.As(err, &alert) && !(errors.As(err, &op) && op.Op == "remote error") {
		f.t.Fatalf("%s: %v; want an alert of the server", when, err)
	}
}

func (f *federated) chancery(args ...string) string {
	f.t.Helper()
	return MustRun(f.t, append(args, "-c", f.server.Config)...)
}

// spireRefreshes lets SPIRE fetch our bundle, and waits until it has as many of our roots.
func (f *federated) spireRefreshes(roots int) {
	f.t.Helper()
	f.spire.run("federation", "refresh", "-id", trustDomain)
	Eventually(f.t, 20*time.Second, fmt.Sprintf("SPIRE has %d roots of ours", roots), func() error {
		out, err := f.spire.try("bundle", "list", "-id", "spiffe://"+trustDomain, "-format", "spiffe")
		if err != nil {
			return err
		}
		b, err := own.Parse(mustDomain(f.t, trustDomain), []byte(out))
		if err == nil && len(b.Roots) != roots {
			err = fmt.Errorf("it has %d", len(b.Roots))
		}
		return err
	})
}

// TestFederationWithSPIRE is the whole life of a federation with a real SPIRE server, under each profile: nothing before it, mTLS between workloads of both
// sides, through a rotation of SPIRE's authority and of ours, and the end of what SPIRE takes back.
func TestFederationWithSPIRE(t *testing.T) {
	t.Parallel()
	Tool(t, "spire-server")
	for _, profile := range []string{"https_spiffe", "https_web"} {
		t.Run(profile, func(t *testing.T) {
			f := newFederated(t, profile)
			f.begins(profile)
			f.spireRotates()
			f.weRotate()
		})
	}
}

// newFederated starts both servers, and our workload.
func newFederated(t *testing.T, profile string) *federated {
	t.Helper()
	f := &federated{t: t}
	relation := map[string]any{"trustDomain": spireDomain, "profile": profile}
	cfg := serverYAML{BundleEndpoint: map[string]string{"listen": "127.0.0.1:0", "profile": profile, "refreshHint": "1m"}}
	if profile == "https_web" {
		ca, err := newTestCA("web CA")
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		var files [2]certFiles
		for i, name := range []string{"spire", "chancery"} {
			if files[i], err = ca.issue(dir, name, pkix.Name{}, "127.0.0.1"); err != nil {
				t.Fatal(err)
			}
		}
		f.spire = startSPIRE(t, &files[0], files[0].Root)
		f.webRoots, f.webCA = filepath.Join(dir, "web-roots.pem"), certsPEM(ca)
		other, err := newTestCA("another web CA")
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, f.webRoots, certsPEM(other), 0o600)
		relation["roots"] = f.webRoots
		cfg.BundleEndpoint["certificate"], cfg.BundleEndpoint["key"] = files[1].Cert, files[1].Key
	} else {
		f.spire = startSPIRE(t, nil, "")
		relation["endpointID"] = "spiffe://" + spireDomain + "/spire/server"
	}
	relation["url"] = "https://" + f.spire.endpoint + "/"
	cfg.Federation = []map[string]any{relation}

	k := SharedKube(t)
	f.pod = k.RunPod(t, k.Namespace(t, "federation"), "api", "api-1", "node-a")
	f.token = k.BoundToken(t, f.pod, time.Hour, audience)
	cfg.Clusters = []clusterYAML{k.StaticCluster(t)}
	f.server = NewServer(t, cfg)
	f.serve()
	return f
}

// begins federates both sides. Before, neither lets the other in.
func (f *federated) begins(profile string) {
	t := f.t
	web := f.spire.mint("/web")
	f.server.Start(t)
	f.server.WaitReady(t)
	f.startWorkload()
	if f.bundleOf(mustDomain(t, spireDomain)) != nil {
		t.Fatal("there is a bundle of SPIRE's before anybody federated")
	}
	f.refused("before it is federated", f.anyway(web))
	if profile == "https_spiffe" {
		file := filepath.Join(t.TempDir(), "spire.json")
		writeFile(t, file, f.spire.run("bundle", "show", "-format", "spiffe"), 0o600)
		f.chancery("trust", "import", spireDomain, file)
	} else {
		if _, _, err := Run(t, "", "trust", "refresh", spireDomain, "-c", f.server.Config); err == nil {
			t.Fatal("a certificate of a CA that is not named was taken")
		}
		writeFile(t, f.webRoots, f.webCA, 0o600) // read for each fetch
	}
	f.chancery("trust", "refresh", spireDomain)
	f.knows(spireDomain, 1)

	if _, err := f.call(web); err == nil {
		t.Fatal("SPIRE's workload trusts ours, before SPIRE federates")
	}
	addrs, err := readAddrs(filepath.Join(f.server.Dir, f.server.yaml.AddrFile))
	if err != nil {
		t.Fatal(err)
	}
	create := []string{"federation", "create", "-trustDomain", trustDomain, "-bundleEndpointURL", "https://" + addrs["bundleEndpoint"] + "/", "-bundleEndpointProfile", profile}
	if profile == "https_spiffe" {
		file := filepath.Join(t.TempDir(), "ours.json")
		writeFile(t, file, f.chancery("trust", "export"), 0o600)
		create = append(create, "-endpointSpiffeID", "spiffe://"+trustDomain+"/chancery/server", "-trustDomainBundlePath", file, "-trustDomainBundleFormat", "spiffe")
	}
	f.spire.run(create...)
	f.spireRefreshes(1)
	f.accepted("federated", web)

	// Federation is no aliasing: SPIRE's root vouches for SPIRE's IDs alone.
	forged := f.spire.forge("spiffe://" + trustDomain + "/ns/foo/sa/web")
	_, err = f.dial(&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{forged}})
	f.refused("SPIRE's root for an ID of ours", err)
	good := f.spire.forge("spiffe://" + spireDomain + "/ns/foo/sa/web")
	if _, err = f.dial(&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{good}}); err != nil {
		t.Errorf("the forger's certificate is refused for another reason: %v", err)
	}
}

// anyway connects with an SVID of SPIRE's to whoever serves, and returns what became of it.
func (f *federated) anyway(svid *x509svid.SVID) error {
	cert := tls.Certificate{PrivateKey: svid.PrivateKey}
	for _, c := range svid.Certificates {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	_, err := f.dial(&tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{cert}})
	return err
}

// spireRotates rotates SPIRE's authority: SVIDs under the new one are let in, and those under the old one no more once SPIRE has revoked it; what was open ends.
func (f *federated) spireRotates() {
	t := f.t
	old := f.spire.mint("/web")
	open := f.accepted("before SPIRE rotates", old)
	before := f.spire.authority("active")
	f.spire.run("localauthority", "x509", "prepare")
	next := f.spire.authority("prepared")
	f.chancery("trust", "refresh", spireDomain)
	f.knows(spireDomain, 2)
	f.spire.run("localauthority", "x509", "activate", "-authorityID", next)
	renewed := f.spire.mint("/web")
	f.accepted("SPIRE's new authority", renewed)
	f.accepted("SPIRE's old authority", old)

	f.spire.run("localauthority", "x509", "taint", "-authorityID", before)
	f.spire.run("localauthority", "x509", "revoke", "-authorityID", before)
	// Its endpoint shows an SVID of the new authority by now, which the bundle of before verifies.
	Eventually(t, 30*time.Second, "our server fetches SPIRE's bundle", func() error {
		_, stderr, err := Run(t, "", "trust", "refresh", spireDomain, "-c", f.server.Config)
		if err != nil {
			return errors.New(stderr)
		}
		return nil
	})
	f.knows(spireDomain, 1)
	Eventually(t, 10*time.Second, "the connection under the revoked authority ends", func() error {
		if echoes(open) == nil {
			return errors.New("it is open")
		}
		return nil
	})
	f.refused("SPIRE's revoked authority", f.anyway(old))
	f.accepted("after SPIRE's rotation", renewed)
}

// weRotate rotates our root: SPIRE has the new one before anything is signed under it.
func (f *federated) weRotate() {
	t := f.t
	web := f.spire.mint("/web")
	before := f.root()
	f.chancery("rotate", "start", "--root")
	Eventually(t, time.Minute, "the rotation waits for those who federate", func() error {
		if out := f.chancery("rotate", "status"); !strings.Contains(out, "readers") { // for five times the refresh hint
			return errors.New(out)
		}
		return nil
	})
	f.spireRefreshes(2)
	f.knows(trustDomain, 2)
	f.chancery("rotate", "override", "readers", "--because", "the one who federates has it")
	Eventually(t, time.Minute, "our workload has an SVID under the new root", func() error {
		if f.root().Equal(before) {
			return errors.New(f.chancery("rotate", "status"))
		}
		return nil
	})
	f.accepted("our new root", web)
	if !f.bundleOf(mustDomain(t, trustDomain)).HasRoot(before) {
		t.Error("the old root has left before its SVIDs have")
	}
	f.spireRefreshes(2) // the endpoint shows an SVID under the new root
	f.accepted("after our rotation", web)
}
