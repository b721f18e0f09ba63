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

	api := m.member(ns, "api", "node-a")
	inbound := StartServerEnvoy(t, EnvoyConfig{Name: "inbound", SDSSocket: api.agent.Socket, Resume: true, Upstream: StartEcho(t)})
	inbound.WaitReady(t, 20*time.Second)
	old, bad := m.client(ns, "old", api, inbound), m.client(ns, "bad", api, inbound)
	first := old.issuer()

	m.importIssuer("second")
	young := m.client(ns, "young", api, inbound)
	if young.issuer() == first || old.issuer() != first {
		t.Fatalf("the old client is under %s, the young one under %s; want two issuers, %s first", old.issuer(), young.issuer(), first)
	}
	loads := []*Load{StartLoad(t, LoadConfig{Addr: old.envoy.Listen, Rate: 50}), StartLoad(t, LoadConfig{Addr: young.envoy.Listen, Rate: 50})}
	kept := bad.keep() // a connection that stands from before
	for range 3 {
		if _, err := Request(bad.envoy.Listen, true); err != nil {
			t.Fatalf("before the revocation: %v", err)
		}
	}

	// By identity: refused at the next handshake, and no new certificate.
	dry := m.revoke(bad.id, "--dry-run")
	if !strings.Contains(dry, bad.serial()) {
		t.Errorf("a dry run does not name serial %s: %s", bad.serial(), dry)
	}
	if _, err := Request(bad.envoy.Listen, true); err != nil {
		t.Errorf("a dry run revoked: %v", err)
	}
	said := m.revoke(bad.id)
	t.Log(said)
	bad.waitRefused(inbound)
	if err := kept(); err != nil {
		t.Errorf("a connection that stands should go on until its next handshake: %v", err)
	}
	_, err := Ask{Token: bad.token}.Certificate(t.Context(), m.server.Dial(t))
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("a revoked identity asks for a certificate: %v; want PermissionDenied", err)
	}
	for i, l := range loads {
		noneLost(t, l, fmt.Sprintf("of client %d over a revocation", i))
	}

	// Without the server the last CRLs stay in use, by proxies that start only now, too.
	m.server.Kill()
	late := StartServerEnvoy(t, EnvoyConfig{Name: "late", SDSSocket: api.agent.Socket, Upstream: StartEcho(t)})
	late.WaitReady(t, 20*time.Second)
	for _, c := range []*revokeClient{old, young} {
		if _, err := Request(c.towards(late).Listen, true); err != nil {
			t.Errorf("%s, with the server down: %v", c.id, err)
		}
	}
	if _, err := Request(bad.towards(late).Listen, true); err == nil {
		t.Error("with the server down, a proxy that has just started lets the revoked client in")
	}
	m.server.Start(t)
	m.server.WaitReady(t)

	// Restored, it gets another certificate; the revoked one stays so.
	revoked := bad.serial()
	MustRun(t, "restore", bad.id, "-c", m.server.Config)
	bad.waitServed(revoked)

	// By serial: the identity is not touched, so that its agent gets another certificate by itself.
	revoked = bad.serial()
	m.revoke(revoked, "--reason", "keyCompromise")
	bad.waitServed(revoked)
	for i, l := range loads {
		report := l.Stop()
		t.Log(report)
		noneLost(t, l, fmt.Sprintf("of client %d", i))
		if len(report.ClientSerials) != 1 {
			t.Errorf("client %d was seen under %d certificates, want its first only", i, len(report.ClientSerials))
		}
	}

	// What agents keep of the issuance log holds against the log itself (D21), and nothing on the way was refused or withheld.
	checkpoints := filepath.Join(t.TempDir(), "checkpoint")
	writeFile(t, checkpoints, old.agent.page(t, "/checkpoints"), 0o600)
	MustRun(t, "log", "verify", filepath.Join(m.server.Dir, "log"), "--checkpoint", checkpoints)
	for _, c := range []*revokeMember{api, old.revokeMember, bad.revokeMember, young.revokeMember} {
		metrics := c.agent.page(t, "/metrics")
		for _, want := range []string{
			"chancery_agent_sync_connected 1", "chancery_agent_crls_withheld 0", "chancery_agent_crl_expiry_seconds{certificate=\"" + first + "\"} ",
			"chancery_agent_crl_expiry_seconds{certificate=\"" + young.issuer() + "\"} ",
		} {
			if !strings.Contains(metrics, want) {
				t.Errorf("the metrics of %s lack %s", c.id, want)
			}
		}
		for _, bad := range []string{`updates_total{result="refused"}`, "chancery_agent_log_inconsistencies_total{"} {
			if strings.Contains(metrics, bad) {
				t.Errorf("the metrics of %s have %s", c.id, bad)
			}
		}
		if log := c.agent.Log(); strings.Contains(log, "CRLs are not served") {
			t.Errorf("CRLs were withheld on the way: %s", log)
		}
	}

	// The other way round: clients refuse a server that is revoked.
	m.revoke(api.id)
	Eventually(t, 20*time.Second, "the old client refuses the revoked server", func() error {
		if _, err := Request(old.envoy.Listen, true); err == nil {
			return errors.New("it still takes it")
		}
		if n := old.envoy.Stats(t, "ssl.fail_verify_error")["cluster.fresh.ssl.fail_verify_error"]; n == 0 {
			return errors.New("it counts no certificate that does not verify")
		}
		return nil
	})
}

// revokeMesh is a server whose root's key only the test has.
type revokeMesh struct {
	t      *testing.T
	k      *Kube
	root   *testCA
	server *Server
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
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		m.t.Fatal(err)
	}
	cert, err := sign(&x509.Certificate{
		SerialNumber: randomSerial(), RawSubject: csr.RawSubject, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(12 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, URIs: csr.URIs,
	}, m.root.cert, csr.PublicKey, m.root.key)
	if err != nil {
		m.t.Fatal(err)
	}
	file := filepath.Join(m.t.TempDir(), name+".pem")
	writeFile(m.t, file, certsPEM(&testCA{cert: cert}), 0o600)
	MustRun(m.t, "authority", "import", "-c", m.server.Config, file)
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

// revokeClient is a member whose Envoy calls a server's.
type revokeClient struct {
	*revokeMember
	server *revokeMember
	envoy  *Envoy
}

func (m *revokeMesh) client(ns, account string, server *revokeMember, inbound *Envoy) *revokeClient {
	m.t.Helper()
	c := &revokeClient{revokeMember: m.member(ns, account, "node-b"), server: server}
	c.envoy = c.towards(inbound)
	return c
}

// towards starts an Envoy of the client that calls the server's.
func (c *revokeClient) towards(inbound *Envoy) *Envoy {
	c.t.Helper()
	e := StartClientEnvoy(c.t, EnvoyConfig{Name: c.name + "-to-" + inbound.Name, SDSSocket: c.agent.Socket, PeerURI: c.server.id, Resume: true, Upstream: inbound.Listen})
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
func (c *revokeClient) waitRefused(inbound *Envoy) {
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
	before := inbound.Stats(c.t, stat)[stat]
	for range 5 {
		if p, err := Request(c.envoy.Listen, true); err == nil || !strings.Contains(err.Error(), "503") {
			c.t.Errorf("the revoked client: %+v, %v; want 503", p, err)
		}
	}
	if after := inbound.Stats(c.t, stat)[stat]; after < before+5 {
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
