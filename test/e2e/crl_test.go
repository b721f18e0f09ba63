package e2e

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
)

// Issuing distribution points, critical: onlyContainsUserCerts, and a distributionPoint http://crl.test/a.crl.
var (
	userCertsOnly     = pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 28}, Critical: true, Value: []byte{0x30, 0x03, 0x81, 0x01, 0xff}}
	distributionPoint = pkix.Extension{Id: userCertsOnly.Id, Critical: true, Value: append([]byte{0x30, 0x1b, 0xa0, 0x19, 0xa0, 0x17, 0x86, 0x15}, "http://crl.test/a.crl"...)}
)

// TestD22CRLsInEnvoy holds what docs/envoy.md says of Envoy 1.40 and CRLs, as found by trying. It is why agents check CRLs
// before they pass them on: one that is wrong shuts out all peers of its issuer.
func TestD22CRLsInEnvoy(t *testing.T) {
	t.Parallel()
	Tool(t, "envoy")
	w := newCRLWorld(t)
	a := func(more ...any) []byte { return w.a.crl(t, append(more, w.revoked, userCertsOnly)...) }
	b := w.b.crl(t, userCertsOnly)
	for _, tc := range []struct {
		name string
		crls [][]byte
		all  bool   // look up each certificate of the chain, not the leaf only
		want string // who is let in: a and A, which a's CRLs list, are under issuer a; b under issuer b
	}{
		{"no CRLs", nil, false, "aAb"},
		{"without an IDP", [][]byte{w.a.crl(t, w.revoked), w.b.crl(t)}, false, "ab"},
		{"with onlyContainsUserCerts", [][]byte{a(), b}, false, "ab"},
		{"nothing revoked", [][]byte{w.a.crl(t, userCertsOnly), b}, false, "aAb"},
		{"an issuer without one", [][]byte{a()}, false, "a"},
		{"ended", [][]byte{a(validity{-time.Hour, -time.Minute}), b}, false, "b"},
		{"not begun", [][]byte{a(validity{time.Hour, 2 * time.Hour}), b}, false, "b"},
		{"damaged", [][]byte{damaged(t, a()), b}, false, "b"},
		{"with a distribution point", [][]byte{w.a.crl(t, w.revoked, distributionPoint), b}, false, "b"},
		{"one more, of a stranger", [][]byte{a(), b, w.stranger.crl(t, userCertsOnly)}, false, "ab"},
		{"one of an issuer with the name first", [][]byte{w.namesake.crl(t, userCertsOnly), a(), b}, false, "ab"},
		{"only one of an issuer with the name", [][]byte{w.namesake.crl(t, userCertsOnly), b}, false, "b"},
		{"two of one issuer, the empty one first", [][]byte{w.a.crl(t, userCertsOnly), a(), b}, false, "aAb"},
		{"two of one issuer, the empty one last", [][]byte{a(), w.a.crl(t, userCertsOnly), b}, false, "ab"},
		{"whole chain, none of the root", [][]byte{w.a.crl(t, w.revoked), w.b.crl(t)}, true, ""},
		{"whole chain", [][]byte{w.a.crl(t, w.revoked), w.b.crl(t), w.root.crl(t)}, true, "ab"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			validation := ""
			if len(tc.crls) > 0 {
				path := filepath.Join(t.TempDir(), "crl.pem")
				writeFile(t, path, string(bytes.Join(tc.crls, nil)), 0o600)
				validation = fmt.Sprintf("crl: {filename: %q}\n              only_verify_leaf_cert_crl: %v", path, !tc.all)
			}
			server := StartServerEnvoy(t, EnvoyConfig{Name: "server", Files: &w.server, Validation: validation, Upstream: StartEcho(t)})
			server.WaitReady(t, 20*time.Second)
			got := ""
			for _, name := range []string{"a", "A", "b"} {
				if _, err := w.call(t, server.Listen, name, nil); err == nil {
					got += name
				} else if !strings.Contains(err.Error(), "tls: ") && !strings.Contains(err.Error(), "broken pipe") && !strings.Contains(err.Error(), "reset by peer") {
					t.Errorf("%s failed by something else than the handshake: %v", name, err)
				}
			}
			if got != tc.want {
				t.Errorf("let in are %q, want %q", got, tc.want)
			}
		})
	}
}

// crlWorld has two issuers under a root, and clients of theirs.
type crlWorld struct {
	root, a, b, stranger, namesake *crlIssuer

	server  certFiles // under a
	clients map[string]certFiles
	revoked *big.Int // serial of client A
}

type crlIssuer struct {
	*testCA
	number int64 // of the last CRL
}

// validity is when a CRL begins and ends, from now.
type validity struct{ from, to time.Duration }

// crl signs the issuer's next CRL, in PEM, from serials that are revoked, extensions, and a validity.
func (c *crlIssuer) crl(t testing.TB, parts ...any) []byte {
	t.Helper()
	c.number++
	v := validity{-time.Hour, time.Hour}
	l := &x509.RevocationList{Number: big.NewInt(c.number)}
	for _, p := range parts {
		switch p := p.(type) {
		case *big.Int:
			l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: p, RevocationTime: time.Now().Add(-2 * time.Hour)})
		case pkix.Extension:
			l.ExtraExtensions = append(l.ExtraExtensions, p)
		case validity:
			v = p
		}
	}
	l.ThisUpdate, l.NextUpdate = time.Now().Add(v.from), time.Now().Add(v.to)
	der, err := x509.CreateRevocationList(rand.Reader, l, c.cert, c.key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})
}

// damaged returns a CRL with a wrong signature.
func damaged(t testing.TB, crl []byte) []byte {
	t.Helper()
	block, _ := pem.Decode(crl)
	block.Bytes[len(block.Bytes)-5] ^= 1
	return pem.EncodeToMemory(block)
}

func newCRLWorld(t *testing.T) *crlWorld {
	t.Helper()
	root := authority(t, "root", p256(t), nil)
	issuer := func(name string, parent *testCA) *crlIssuer {
		return &crlIssuer{testCA: authority(t, name, p256(t), parent)}
	}
	w := &crlWorld{
		root: &crlIssuer{testCA: root}, a: issuer("issuer a", root), b: issuer("issuer b", root), namesake: issuer("issuer a", root),
		stranger: issuer("stranger", authority(t, "other root", p256(t), nil)), clients: map[string]certFiles{},
	}
	for name, by := range map[string]*crlIssuer{"server": w.a, "a": w.a, "A": w.a, "b": w.b} {
		files, err := by.issue(t.TempDir(), name, pkix.Name{}, "spiffe://cluster.local/ns/foo/sa/"+name)
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := os.ReadFile(files.Cert)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, files.Cert, string(leaf)+certsPEM(by.testCA), 0o600)
		writeFile(t, files.Root, certsPEM(root), 0o600)
		w.clients[name] = files
		if name == "A" {
			w.revoked = parsePEMCert(t, leaf).SerialNumber
		}
	}
	w.server = w.clients["server"]
	return w
}

// call makes a request on a connection of its own as one of the clients, and says whether the session was resumed.
func (w *crlWorld) call(t testing.TB, addr, name string, sessions tls.ClientSessionCache) (resumed bool, err error) {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(w.clients[name].Cert, w.clients[name].Key)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
		InsecureSkipVerify: true, Certificates: []tls.Certificate{cert}, ClientSessionCache: sessions, // the server's side is what is tried
	}}}
	resp, err := client.Get("https://" + addr + "/")
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return false, err
	}
	if resp.StatusCode != http.StatusOK {
		return false, fmt.Errorf("status %s", resp.Status)
	}
	return resp.TLS.DidResume, nil
}

// TestD22NewCRLsEndSessions: with a new CRL Envoy resumes no session that began before it, so that revocation does not wait
// for the end of a session ticket; not even where ticket keys are configured.
func TestD22NewCRLsEndSessions(t *testing.T) {
	t.Parallel()
	Tool(t, "envoy")
	w := newCRLWorld(t)
	for name, key := range map[string]string{"own key": "", "configured key": strings.Repeat("k", 80)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sds := filepath.Join(t.TempDir(), "roots.yaml")
			serve := func(revoked ...any) {
				t.Helper()
				crls := append(w.a.crl(t, append(revoked, userCertsOnly)...), w.b.crl(t, userCertsOnly)...)
				writeFile(t, sds+".new", fmt.Sprintf(`resources:
- "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret
  name: ROOTCA
  validation_context: {trusted_ca: {inline_string: %q}, crl: {inline_string: %q}, only_verify_leaf_cert_crl: true}
`, certsPEM(w.root.testCA), crls), 0o600)
				if err := os.Rename(sds+".new", sds); err != nil {
					t.Fatal(err)
				}
			}
			serve()
			server := StartServerEnvoy(t, EnvoyConfig{Name: "server", Files: &w.server, RootFile: sds, Resume: true, TicketKey: key, Upstream: StartEcho(t)})
			server.WaitReady(t, 20*time.Second)
			sessions := map[string]tls.ClientSessionCache{}
			for _, name := range []string{"a", "A"} {
				sessions[name] = tls.NewLRUClientSessionCache(10)
				for _, want := range []bool{false, true} {
					if resumed, err := w.call(t, server.Listen, name, sessions[name]); err != nil || resumed != want {
						t.Errorf("%s before the revocation: resumed %v, %v; want %v", name, resumed, err, want)
					}
				}
			}
			serve(w.revoked)
			server.WaitFor(t, 20*time.Second, "has the new CRL", func() error {
				if n := server.Stats(t, "ssl_context_update_by_sds")["listener.127.0.0.1_0.server_ssl_socket_factory.ssl_context_update_by_sds"]; n < 2 {
					return fmt.Errorf("%d contexts so far", n)
				}
				return nil
			})
			for range 2 {
				if resumed, err := w.call(t, server.Listen, "A", sessions["A"]); err == nil {
					t.Errorf("the revoked client was let in, resumed %v", resumed)
				}
			}
			for _, want := range []bool{false, true} {
				if resumed, err := w.call(t, server.Listen, "a", sessions["a"]); err != nil || resumed != want {
					t.Errorf("the other client: resumed %v, %v; want %v", resumed, err, want)
				}
			}
		})
	}
}

// TestD22LargeCRL: the largest CRL that a server makes (50,000 entries) goes through an agent's socket into an Envoy, which
// finds the one client in it.
func TestD22LargeCRL(t *testing.T) {
	t.Parallel()
	Tool(t, "envoy")
	w := newCRLWorld(t)
	parts := []any{userCertsOnly, w.revoked}
	for i := range 50_000 - 1 {
		parts = append(parts, new(big.Int).Add(new(big.Int).Lsh(big.NewInt(1), 157), big.NewInt(int64(i))))
	}
	var ders [][]byte
	for _, crl := range [][]byte{w.a.crl(t, parts...), w.b.crl(t, userCertsOnly)} {
		block, _ := pem.Decode(crl)
		ders = append(ders, block.Bytes)
	}
	domain, err := trust.ParseDomain(trustDomain)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := trust.NewBundle(domain, 1, []*x509.Certificate{w.root.cert})
	if err != nil {
		t.Fatal(err)
	}
	crls, err := trust.NewCRLs(bundle, ders, []*x509.Certificate{w.a.cert, w.b.cert}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	id, err := trust.ParseID("spiffe://cluster.local/ns/foo/sa/server")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(w.server.Cert, w.server.Key)
	if err != nil {
		t.Fatal(err)
	}
	own, err := trust.NewIdentity(id, []*x509.Certificate{pair.Leaf, w.a.cert}, pair.PrivateKey.(crypto.Signer), bundle, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	view := &sds.View{Identities: []*trust.Identity{own}, Bundles: []*trust.Bundle{bundle.WithCRLs(crls)}}
	server := StartServerEnvoy(t, EnvoyConfig{Name: "server", SDSSocket: serveView(t, view), Upstream: StartEcho(t)})
	server.WaitReady(t, 60*time.Second)
	for name, want := range map[string]bool{"a": true, "A": false, "b": true} {
		if _, err := w.call(t, server.Listen, name, nil); (err == nil) != want {
			t.Errorf("client %s: %v; want it to be let in: %v", name, err, want)
		}
	}
}

// serveView serves a view as an agent does, to anybody, and returns the socket.
func serveView(t *testing.T, view *sds.View) string {
	t.Helper()
	never := make(chan struct{})
	agent, err := sds.NewServer(sds.Config{Attest: func(context.Context, sds.Peer) (sds.Source, error) {
		return func() (*sds.View, <-chan struct{}) { return view, never }, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(SocketDir(t), "agent.sock")
	l, err := sds.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return socket
}
