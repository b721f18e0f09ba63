package doctor

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"os"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/agent"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/trust"
)

// TestAgentOfAFormerDomain: an agent whose config has the trust domain of before a migration works on, and its server is no stranger: the bundle
// that it keeps says so. Without that the file of roots alone counts.
func TestAgentOfAFormerDomain(t *testing.T) {
	p := newPlace(t, config) // for roots of cluster.local
	uri := func(s string) []*url.URL {
		u, err := url.Parse(s)
		p.must(err)
		return []*url.URL{u}
	}
	rootKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	p.must(err)
	now := time.Now()
	root := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, URIs: uri("spiffe://mesh.example")}
	rootDER, err := x509.CreateCertificate(rand.Reader, root, root, rootKey.Public(), rootKey)
	p.must(err)
	if root, err = x509.ParseCertificate(rootDER); err != nil {
		t.Fatal(err)
	}
	leafDER, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs: uri("spiffe://mesh.example/chancery/server")}, root, rootKey.Public(), rootKey)
	p.must(err)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{leafDER}, PrivateKey: rootKey}}})
	p.must(err)
	defer l.Close()
	go func() {
		for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
			_ = conn.(*tls.Conn).HandshakeContext(t.Context())
			conn.Close()
		}
	}()
	p.must(os.Mkdir(p.path("socket"), 0o700))
	p.write("token", jwt(`{"sub":"system:serviceaccount:foo:web","exp":99999999999}`)+"\n", 0o600)
	p.write("agent.yaml", "server: "+l.Addr().String()+`
serverRoots: state/roots.pem
tokenFile: token
identity: spiffe://cluster.local/ns/foo/sa/web
socket: socket/agent.sock
`, 0o600)
	look := func() []string {
		s, err := agent.Load(p.path("agent.yaml"))
		p.must(err)
		return ids(examineAgent(t.Context(), s, true).Findings)
	}
	if got := look(); !slices.Equal(got, []string{"critical server.unverified"}) {
		t.Errorf("roots of the file alone: %v", got)
	}
	data, err := proto.Marshal(&chanceryv1.Bundle{TrustDomain: "mesh.example", Generation: 3, Roots: [][]byte{rootDER}, Kin: []*chanceryv1.DomainRoots{{TrustDomain: "cluster.local"}}})
	p.must(err)
	_, key, err := ed25519.GenerateKey(rand.Reader)
	p.must(err)
	signed := trust.SignBundle(key, data)
	domain, err := trust.ParseDomain("cluster.local")
	p.must(err)
	kept, err := anchor.Open(anchor.Config{File: p.path("socket/agent.sock.bundle"), Domain: domain})
	p.must(err)
	if _, err := kept.Take(nil, &chanceryv1.SignedBundle{Bundle: signed.Bundle, Signature: signed.Signature, Key: signed.Key}); err != nil {
		t.Fatal(err)
	}
	if got := look(); !slices.Equal(got, []string{"warning roots.outdated"}) {
		t.Errorf("with the bundle that it keeps: %v", got)
	}
	p.write("state/roots.pem", string(trust.EncodeCertificates(root)), 0o644)
	if got := look(); len(got) > 0 {
		t.Errorf("with the new domain's root in the file, too: %v", got)
	}
}
