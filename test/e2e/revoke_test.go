package e2e

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestD22RevokeAgainstLiveEnvoys: a client that is revoked is refused within seconds by an Envoy that was there all along;
// clients under the former and the present issuer lose no request meanwhile, while the root is offline and the server comes
// and goes. Connections that stand go on. A restored client gets another certificate, which works. Sessions may be resumed,
// as is Envoy's default.
func TestD22RevokeAgainstLiveEnvoys(t *testing.T) {
	t.Parallel()
	Tool(t, "envoy")
	k := SharedKube(t)
	ns := k.Namespace(t, "revoke")
	m := &revokeMesh{t: t, k: k, root: authority(t, "offline root", p256(t), nil)}
	m.server = m.offlineServer()
	m.importIssuer("first")
	m.server.Start(t)
	m.server.WaitReady(t)

	m.api = m.member(ns, "api", "node-a")
	m.inbound = StartServerEnvoy(t, EnvoyConfig{Name: "inbound", SDSSocket: m.api.agent.Socket, Resume: true, Upstream: StartEcho(t)})
	m.inbound.WaitReady(t, 20*time.Second)
	m.old, m.bad = m.client(ns, "old"), m.client(ns, "bad")
	m.importIssuer("second")
	m.young = m.client(ns, "young")
	if m.young.issuer() == m.old.issuer() {
		t.Fatalf("both clients are under issuer %s; want the young one under the second", m.old.issuer())
	}
	m.loads = []*Load{StartLoad(t, LoadConfig{Addr: m.old.envoy.Listen, Rate: 50}), StartLoad(t, LoadConfig{Addr: m.young.envoy.Listen, Rate: 50})}

	m.revokesAnIdentity()
	m.saysWhoDoesNotEnforce()
	m.goesOnWithoutTheServer()

	// Restored, it gets another certificate; the revoked one stays so.
	revoked := m.bad.serial()
	MustRun(t, "restore", m.bad.id, "-c", m.server.Config)
	m.bad.waitServed(revoked)
	// By serial: the identity is not touched, so that its agent gets another certificate by itself.
	revoked = m.bad.serial()
	m.revoke(revoked, "--reason", "keyCompromise")
	m.bad.waitServed(revoked)

	for i, l := range m.loads {
		report := l.Stop()
		t.Log(report)
		noneLost(t, l, fmt.Sprintf("of client %d", i))
		if len(report.ClientSerials) != 1 {
			t.Errorf("client %d was seen under %d certificates, want its first only", i, len(report.ClientSerials))
		}
	}
	m.agentsAgree()
	m.revokesAServer()
}

// revokesAnIdentity: refused at the next handshake, and no new certificate.
func (m *revokeMesh) revokesAnIdentity() {
	m.t.Helper()
	kept := m.bad.keep() // a connection that stands from before
	for range 3 {
		if _, err := Request(m.bad.envoy.Listen, true); err != nil {
			m.t.Fatalf("before the revocation: %v", err)
		}
	}
	if dry := m.revoke(m.bad.id, "--dry-run"); !strings.Contains(dry, m.bad.serial()) {
		m.t.Errorf("a dry run does not name serial %s: %s", m.bad.serial(), dry)
	}
	if _, err := Request(m.bad.envoy.Listen, true); err != nil {
		m.t.Errorf("a dry run revoked: %v", err)
	}
	m.t.Log(m.revoke(m.bad.id))
	m.bad.waitRefused()
	if err := kept(); err != nil {
		m.t.Errorf("a connection that stands should go on until its next handshake: %v", err)
	}
	_, err := Ask{Token: m.bad.token}.Certificate(m.t.Context(), m.server.Dial(m.t))
	if status.Code(err) != codes.PermissionDenied {
		m.t.Errorf("a revoked identity asks for a certificate: %v; want PermissionDenied", err)
	}
	for i, l := range m.loads {
		noneLost(m.t, l, fmt.Sprintf("of client %d over a revocation", i))
	}
}

// saysWhoDoesNotEnforce: Envoy's SPIFFE validator takes no notice of CRLs, which is said (D23).
func (m *revokeMesh) saysWhoDoesNotEnforce() {
	m.t.Helper()
	lenient := StartServerEnvoy(m.t, EnvoyConfig{Name: "lenient", SDSSocket: m.api.agent.Socket, RootName: "ALL", Upstream: StartEcho(m.t)})
	lenient.WaitReady(m.t, 20*time.Second)
	if _, err := Request(m.bad.towards(lenient).Listen, true); err != nil {
		m.t.Errorf("an Envoy with the context ALL refuses a revoked client, against the docs: %v", err)
	}
	Eventually(m.t, 30*time.Second, "`chancery revoke list` names the proxy that enforces nothing", func() error {
		if list := MustRun(m.t, "revoke", "list", "-c", m.server.Config); !strings.Contains(list, "1 subscriptions of ALL") || !strings.Contains(list, m.api.id) {
			return errors.New(list)
		}
		return nil
	})
}

// goesOnWithoutTheServer: the last CRLs stay in use, by proxies that start only now, too.
func (m *revokeMesh) goesOnWithoutTheServer() {
	m.t.Helper()
	m.server.Kill()
	late := StartServerEnvoy(m.t, EnvoyConfig{Name: "late", SDSSocket: m.api.agent.Socket, Upstream: StartEcho(m.t)})
	late.WaitReady(m.t, 20*time.Second)
	for _, c := range []*revokeClient{m.old, m.young} {
		if _, err := Request(c.towards(late).Listen, true); err != nil {
			m.t.Errorf("%s, with the server down: %v", c.id, err)
		}
	}
	if _, err := Request(m.bad.towards(late).Listen, true); err == nil {
		m.t.Error("with the server down, a proxy that has just started lets the revoked client in")
	}
	m.server.Start(m.t)
	m.server.WaitReady(m.t)
}

// agentsAgree: what agents keep of the issuance log holds against the log itself (D21), and on the way nothing was refused
// or withheld.
func (m *revokeMesh) agentsAgree() {
	m.t.Helper()
	checkpoints := filepath.Join(m.t.TempDir(), "checkpoint")
	writeFile(m.t, checkpoints, m.old.agent.page(m.t, "/checkpoints"), 0o600)
	MustRun(m.t, "log", "verify", filepath.Join(m.server.Dir, "log"), "--checkpoint", checkpoints)
	for _, c := range []*revokeMember{m.api, m.old.revokeMember, m.bad.revokeMember, m.young.revokeMember} {
		c.agent.WaitFor(m.t, 2*time.Minute, "is in touch with the server, with CRLs of both issuers", func() error {
			metrics := c.agent.page(m.t, "/metrics")
			for _, want := range []string{
				"chancery_agent_sync_connected 1", "chancery_agent_crls_withheld 0",
				fmt.Sprintf("chancery_agent_crl_expiry_seconds{certificate=%q} ", m.old.issuer()),
				fmt.Sprintf("chancery_agent_crl_expiry_seconds{certificate=%q} ", m.young.issuer()),
			} {
				if !strings.Contains(metrics, want) {
					return fmt.Errorf("its metrics lack %s", want)
				}
			}
			return nil
		})
		for _, wrong := range []string{`updates_total{result="refused"}`, "chancery_agent_log_inconsistencies_total{"} {
			if strings.Contains(c.agent.page(m.t, "/metrics"), wrong) {
				m.t.Errorf("the metrics of %s have %s", c.id, wrong)
			}
		}
		if log := c.agent.Log(); strings.Contains(log, "CRLs are not served") {
			m.t.Errorf("CRLs were withheld on the way: %s", log)
		}
	}
}

// revokesAServer: clients refuse a server that is revoked.
func (m *revokeMesh) revokesAServer() {
	m.t.Helper()
	m.revoke(m.api.id)
	Eventually(m.t, 20*time.Second, "the old client refuses the revoked server", func() error {
		if _, err := Request(m.old.envoy.Listen, true); err == nil {
			return errors.New("it still takes it")
		}
		if n := m.old.envoy.Stats(m.t, "ssl.fail_verify_error")["cluster.fresh.ssl.fail_verify_error"]; n == 0 {
			return errors.New("it counts no certificate that does not verify")
		}
		return nil
	})
}

// revokeMesh is a server whose root's key only the test has, and its agents and Envoys.
type revokeMesh struct {
	t      *testing.T
	k      *Kube
	root   *testCA
	server *Server

	api             *revokeMember
	inbound         *Envoy        // of api
	old, young, bad *revokeClient // of inbound; old and bad under the first issuer
	loads           []*Load       // by old and young
}

func (m *revokeMesh) offlineServer() *Server {
	m.t.Helper()
	dir := m.t.TempDir()
	root, passphrase := filepath.Join(dir, "root.pem"), filepath.Join(dir, "passphrase")
	writeFile(m.t, root, certsPEM(m.root), 0o600)
	writeFile(m.t, passphrase, "correct horse battery staple\n", 0o600)
	return NewServer(m.t, serverYAML{
		Clusters: []clusterYAML{m.k.Cluster(m.k.ServerKubeconfig(m.t))}, IssuanceLog: "log", Keys: map[string]string{"dir": "keys", "passphraseFile": passphrase},
	}, "--root", root)
}

// importIssuer has the server ask for its next issuer, and signs it as the offline CA does.
func (m *revokeMesh) importIssuer(name string) {
	m.t.Helper()
	block, _ := pem.Decode([]byte(MustRun(m.t, "authority", "csr", "-c", m.server.Config)))
	if block == nil {
		m.t.Fatal("authority csr prints no PEM")
	}
	cert := signIssuer(m.t, m.root, block.Bytes)
	file := filepath.Join(m.t.TempDir(), name+".pem")
	writeFile(m.t, file, certsPEM(&testCA{cert: cert}), 0o600)
	MustRun(m.t, "authority", "import", "-c", m.server.Config, file)
}

// signIssuer signs a server's request for an issuer, as an offline CA does.
func signIssuer(t *testing.T, root *testCA, der []byte) *x509.Certificate {
	t.Helper()
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := sign(&x509.Certificate{
		SerialNumber: randomSerial(), RawSubject: csr.RawSubject, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(12 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, URIs: csr.URIs,
	}, root.cert, csr.PublicKey, root.key)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// revoke revokes what is given and returns what the command says.
func (m *revokeMesh) revoke(args ...string) string {
	m.t.Helper()
	return MustRun(m.t, append([]string{"revoke", "-c", m.server.Config}, args...)...)
}

// revokeMember is a pod with an agent.
type revokeMember struct {
	*revokeMesh
	name, id, token string
	agent           *Agent
}

func (m *revokeMesh) member(ns, account, node string) *revokeMember {
	m.t.Helper()
	pod := m.k.RunPod(m.t, ns, account, account+"-1", node)
	c := &revokeMember{revokeMesh: m, name: account, id: pod.SPIFFEID(trustDomain), token: m.k.BoundToken(m.t, pod, time.Hour, audience)}
	c.agent = StartAgent(m.t, m.server, AgentConfig{Pod: pod, Token: c.token, TTL: time.Hour})
	c.leaf()
	return c
}

func (m *revokeMember) leaf() *x509.Certificate {
	m.t.Helper()
	return m.agent.WaitRenewal(m.t, 20*time.Second, nil)
}

func (m *revokeMember) serial() string { return serialOf(m.leaf()) }

func (m *revokeMember) issuer() string { return fmt.Sprintf("%x", m.leaf().AuthorityKeyId) }

// revokeClient is a member whose Envoy calls api's.
type revokeClient struct {
	*revokeMember
	envoy *Envoy
}

func (m *revokeMesh) client(ns, account string) *revokeClient {
	m.t.Helper()
	c := &revokeClient{revokeMember: m.member(ns, account, "node-b")}
	c.envoy = c.towards(m.inbound)
	return c
}

// towards starts an Envoy of the client that calls another of api's.
func (c *revokeClient) towards(inbound *Envoy) *Envoy {
	c.t.Helper()
	e := StartClientEnvoy(c.t, EnvoyConfig{Name: c.name + "-to-" + inbound.Name, SDSSocket: c.agent.Socket, PeerURI: c.api.id, Resume: true, Upstream: inbound.Listen})
	e.WaitReady(c.t, 20*time.Second)
	return e
}

// keep opens a connection that is kept, and returns a function that sends another request on it.
func (c *revokeClient) keep() func() error {
	c.t.Helper()
	const stat = "cluster.kept.upstream_cx_total"
	if _, err := Request(c.envoy.Listen, false); err != nil {
		c.t.Fatal(err)
	}
	before := c.envoy.Stats(c.t, stat)[stat]
	return func() error {
		if _, err := Request(c.envoy.Listen, false); err != nil {
			return err
		}
		if n := c.envoy.Stats(c.t, stat)[stat]; n != before {
			return fmt.Errorf("%d connections were made, %d of them before", n, before)
		}
		return nil
	}
}

// waitRefused waits until new connections of the client fail in the server's handshake, and looks that they go on to.
func (c *revokeClient) waitRefused() {
	c.t.Helper()
	const stat = "listener.127.0.0.1_0.ssl.fail_verify_error"
	began := time.Now()
	Eventually(c.t, 20*time.Second, "the revoked client is refused", func() error {
		if _, err := Request(c.envoy.Listen, true); err == nil {
			return errors.New("it is let in")
		}
		return nil
	})
	c.t.Logf("refused %v after `chancery revoke` had returned", time.Since(began).Round(time.Millisecond))
	before := c.inbound.Stats(c.t, stat)[stat]
	for range 5 {
		if p, err := Request(c.envoy.Listen, true); err == nil || !strings.Contains(err.Error(), "503") {
			c.t.Errorf("the revoked client: %+v, %v; want 503", p, err)
		}
	}
	if after := c.inbound.Stats(c.t, stat)[stat]; after < before+5 {
		c.t.Errorf("the server's Envoy counts %d certificates that do not verify, %d of them before; want 5 more", after, before)
	}
}

// waitServed waits until the client has another certificate than the one with this serial, and is let in with it.
func (c *revokeClient) waitServed(old string) {
	c.t.Helper()
	began := time.Now()
	Eventually(c.t, 3*time.Minute, "the client works again, with another certificate", func() error {
		p, err := Request(c.envoy.Listen, true)
		if err == nil && p.ClientSerial == strings.TrimLeft(old, "0") {
			err = errors.New("with the revoked one")
		}
		return err
	})
	c.t.Logf("works again after %v, with serial %s instead of %s", time.Since(began).Round(time.Millisecond), c.serial(), old)
}
