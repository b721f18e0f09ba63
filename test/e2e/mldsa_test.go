package e2e

import (
	"bytes"
	"crypto"
	"crypto/mldsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// mldsaCeremony makes an ML-DSA-65 root, a P-256 issuer under it, and a second certificate of the same issuer under a
// P-256 root, for verifiers that do not know ML-DSA.
const mldsaCeremony = `trustDomain: cluster.local
auditLog: audit.jsonl
output: made
steps:
- {name: root, kind: root, key: {generate: mldsa65}, notAfter: NOTAFTER}
- {name: issuer, kind: issuer, by: root, key: {generate: p256}, notAfter: NOTAFTER}
- {name: pq-issuer, kind: issuer, by: root, key: {generate: mldsa65}, notAfter: NOTAFTER}
- {name: other, kind: root, key: {generate: mldsa65}, notAfter: NOTAFTER}
- {name: bridge, kind: root, key: {generate: p256}, notAfter: NOTAFTER}
- {name: issuer-bridge, kind: cross, by: bridge, of: issuer, notAfter: NOTAFTER}
`

// TestMLDSAEnvoy holds what docs/ceremony.md says of Envoy 1.40 and ML-DSA-65, as found by trying.
func TestMLDSAEnvoy(t *testing.T) {
	t.Parallel()
	Tool(t, "envoy")
	dir := t.TempDir()
	notAfter := time.Now().Add(30 * 24 * time.Hour).UTC().Format(time.RFC3339)
	writeFile(t, filepath.Join(dir, "ceremony.yaml"), strings.ReplaceAll(mldsaCeremony, "NOTAFTER", notAfter), 0o600)
	MustRun(t, "authority", "ceremony", "-c", filepath.Join(dir, "ceremony.yaml"), "--sign")
	made := func(name string) []byte {
		data, err := os.ReadFile(filepath.Join(dir, "made", name+".pem"))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	issuer := &testCA{cert: parsePEMCert(t, made("issuer")), key: parsePEMKey(t, made("issuer-key"))}
	pqIssuer := &testCA{cert: parsePEMCert(t, made("pq-issuer")), key: parsePEMKey(t, made("pq-issuer-key"))}
	flipped := bytes.Clone(issuer.cert.Raw)
	flipped[len(flipped)-100] ^= 1 // in the ML-DSA signature
	tampered := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: flipped})
	postQuantum, err := mldsa.GenerateKey(mldsa.MLDSA65())
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		chain [][]byte      // behind the leaf
		roots [][]byte      // that both sides trust
		leaf  crypto.Signer // nil: P-256
		from  *testCA       // nil: the P-256 issuer
		works bool
	}{
		{"root", [][]byte{made("issuer")}, [][]byte{made("root")}, nil, nil, true},
		{"issuer", [][]byte{made("pq-issuer")}, [][]byte{made("root")}, nil, pqIssuer, true},
		{"wrong-root", [][]byte{made("issuer")}, [][]byte{made("other")}, nil, nil, false},
		{"tampered", [][]byte{tampered}, [][]byte{made("root")}, nil, nil, false},
		{"leaf", [][]byte{made("issuer")}, [][]byte{made("root")}, postQuantum, nil, false},
		{"bridge", [][]byte{made("issuer-bridge")}, [][]byte{made("bridge")}, nil, nil, true},
		{"bridge-two-roots", [][]byte{made("issuer-bridge")}, [][]byte{made("root"), made("bridge")}, nil, nil, true},
		// Envoy follows the first issuer certificate that fits, and does not go back to try the second.
		{"bridge-behind-issuer", [][]byte{made("issuer"), made("issuer-bridge")}, [][]byte{made("bridge")}, nil, nil, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			from := issuer
			if tc.from != nil {
				from = tc.from
			}
			err := envoyHandshake(t, from, tc.leaf, bytes.Join(tc.chain, nil), bytes.Join(tc.roots, nil))
			if (err == nil) != tc.works {
				t.Errorf("request through two Envoys: %v; want it to work: %v", err, tc.works)
			}
			if err != nil && !strings.Contains(err.Error(), "503") {
				t.Errorf("it failed by something else than the handshake: %v", err)
			}
		})
	}
}

// envoyHandshake starts two Envoys with leaves of an issuer, the given certificates behind them and the given roots, and
// returns how a request from one to the other fails. Both load their certificates in any case.
func envoyHandshake(t *testing.T, issuer *testCA, key crypto.Signer, chain, roots []byte) error {
	t.Helper()
	const web, api = "spiffe://cluster.local/ns/foo/sa/web", "spiffe://cluster.local/ns/foo/sa/api"
	files := map[string]*certFiles{}
	for name, id := range map[string]string{"web": web, "api": api} {
		f, err := issuer.issueFor(t.TempDir(), name, key, pkix.Name{}, id)
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := os.ReadFile(f.Cert)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, f.Cert, string(leaf)+string(chain), 0o600)
		writeFile(t, f.Root, string(roots), 0o600)
		files[name] = &f
	}
	server := StartServerEnvoy(t, EnvoyConfig{Name: "server", Files: files["api"], PeerURI: web, Upstream: StartEcho(t)})
	server.WaitReady(t, 20*time.Second)
	client := StartClientEnvoy(t, EnvoyConfig{Name: "client", Files: files["web"], PeerURI: api, Upstream: server.Listen})
	client.WaitReady(t, 20*time.Second)
	passage, err := Request(client.Listen, true)
	if err == nil && !strings.Contains(passage.XFCC, "URI="+web) {
		t.Errorf("the server saw %q, want URI=%s", passage.XFCC, web)
	}
	return err
}

// TestMLDSAStory is the whole way under a root with an ML-DSA-65 key: agents trust the server by it, and their Envoys each
// other.
func TestMLDSAStory(t *testing.T) {
	t.Parallel()
	Tool(t, "envoy")
	k := SharedKube(t)
	ns := k.Namespace(t, "mldsa")
	web, api := k.RunPod(t, ns, "web", "web-1", "node-a"), k.RunPod(t, ns, "api", "api-1", "node-b")
	server := NewServer(t, serverYAML{Keys: map[string]string{"type": "mldsa65"}, Clusters: []clusterYAML{k.Cluster(k.ServerKubeconfig(t))}})
	server.Start(t)
	server.WaitReady(t)
	agentOf := func(pod Pod) *Agent {
		return StartAgent(t, server, AgentConfig{Pod: pod, Token: k.BoundToken(t, pod, time.Hour, audience), TTL: time.Hour})
	}
	inbound := StartServerEnvoy(t, EnvoyConfig{
		Name: "inbound", SDSSocket: agentOf(api).Socket, PeerURI: web.SPIFFEID(trustDomain), Upstream: StartEcho(t),
	})
	inbound.WaitReady(t, 20*time.Second)
	webAgent := agentOf(web)
	outbound := StartClientEnvoy(t, EnvoyConfig{
		Name: "outbound", SDSSocket: webAgent.Socket, PeerURI: api.SPIFFEID(trustDomain), Upstream: inbound.Listen,
	})
	outbound.WaitReady(t, 20*time.Second)
	if passage, err := Request(outbound.Listen, true); err != nil || !strings.Contains(passage.XFCC, "URI="+web.SPIFFEID(trustDomain)) {
		t.Errorf("the server saw %q, %v", passage.XFCC, err)
	}
	secrets, err := FetchSDS(t.Context(), webAgent.Socket, "ROOTCA")
	if err != nil {
		t.Fatal(err)
	}
	roots, err := SecretRoots(secrets["ROOTCA"])
	if err != nil || len(roots) != 1 || roots[0].PublicKeyAlgorithm != x509.MLDSA {
		t.Errorf("the agent serves roots %v, %v", roots, err)
	}
}

func parsePEMCert(t *testing.T, data []byte) *x509.Certificate {
	t.Helper()
	certs, err := parseCerts(data)
	if err != nil {
		t.Fatal(err)
	}
	return certs[0]
}

func parsePEMKey(t *testing.T, data []byte) crypto.Signer {
	t.Helper()
	block, _ := pem.Decode(data)
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return key.(crypto.Signer)
}
