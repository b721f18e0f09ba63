package e2e

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
)

// layout is a way to lay an issuer's files into a folder.
type layout struct {
	name  string // in the server's config
	files func(issuer *testCA, between []*testCA, roots ...*testCA) map[string]string
}

// cacerts is Istio's: the chain in a file of its own, beside the issuing certificate. tlsSecret is cert-manager's.
var (
	cacerts = layout{"cacerts", func(issuer *testCA, between []*testCA, roots ...*testCA) map[string]string {
		return map[string]string{
			"ca-cert.pem": certsPEM(issuer), "ca-key.pem": keyPEM(issuer.key),
			"cert-chain.pem": certsPEM(append([]*testCA{issuer}, between...)...), "root-cert.pem": certsPEM(roots...),
		}
	}}
	tlsSecret = layout{"tls", func(issuer *testCA, between []*testCA, roots ...*testCA) map[string]string {
		return map[string]string{
			"tls.crt": certsPEM(append([]*testCA{issuer}, between...)...), "tls.key": keyPEM(issuer.key), "ca.crt": certsPEM(roots...),
		}
	}}
)

func certsPEM(cas ...*testCA) string {
	var b strings.Builder
	for _, ca := range cas {
		pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
	}
	return b.String()
}

func keyPEM(key crypto.Signer) string {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		panic(err) // of a key that this process has just made
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

// mountSecret replaces the files of a folder the way a kubelet updates a mounted Secret: by swapping the link ..data.
func mountSecret(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	version := "..v" + rand.Text()
	for name, text := range files {
		writeFile(t, filepath.Join(dir, version, name), text, 0o600)
		if link := filepath.Join(dir, name); !exists(link) {
			if err := os.Symlink(filepath.Join("..data", name), link); err != nil {
				t.Fatal(err)
			}
		}
	}
	old, _ := os.Readlink(filepath.Join(dir, "..data"))
	tmp := filepath.Join(dir, "..data_tmp")
	if err := errors.Join(os.Symlink(version, tmp), os.Rename(tmp, filepath.Join(dir, "..data"))); err != nil {
		t.Fatal(err)
	}
	if old != "" {
		if err := os.RemoveAll(filepath.Join(dir, old)); err != nil {
			t.Fatal(err)
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func p256(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func rsa2048(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func authority(t *testing.T, name string, key crypto.Signer, parent *testCA) *testCA {
	t.Helper()
	ca, err := newTestAuthority(name, key, parent)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// TestPluggedInIssuer: an issuer from files is adopted, its successor under the same root is taken up live, and whatever else the
// files become, the last good issuer goes on (decision D7).
func TestPluggedInIssuer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		layout layout
		newKey func(*testing.T) crypto.Signer
		depth  int // CAs between root and issuer
	}{
		"cacerts, P-256, two levels": {cacerts, p256, 1},
		"tls, RSA":                   {tlsSecret, rsa2048, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pluggedIn(t, c.layout, c.newKey, c.depth)
		})
	}
}

func pluggedIn(t *testing.T, l layout, newKey func(*testing.T) crypto.Signer, depth int) {
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "plugged"), "web", "web-1", "node-a")
	root := authority(t, "e2e root", newKey(t), nil)
	above := root
	var between []*testCA
	for range depth {
		above = authority(t, "e2e intermediate", newKey(t), above)
		between = append([]*testCA{above}, between...)
	}
	first, second := authority(t, "e2e issuer 1", newKey(t), above), authority(t, "e2e issuer 2", newKey(t), above)
	dir := t.TempDir()
	mountSecret(t, dir, l.files(first, between, root))

	server := NewServer(t, serverYAML{Clusters: []clusterYAML{k.StaticCluster(t)}, Issuer: map[string]string{l.name: dir}})
	server.Start(t)
	server.WaitReady(t)
	if roots, err := os.ReadFile(server.Roots); err != nil || string(roots) != certsPEM(root) {
		t.Errorf("roots.pem should be the plugged-in root: %v\n%s", err, roots)
	}
	conn := server.Dial(t)
	ask := Ask{Token: k.BoundToken(t, pod, time.Hour, audience)}
	issues := func(issuer *testCA) error {
		return issuesUnder(t, conn, ask, append([]*testCA{issuer}, between...), root)
	}
	if err := issues(first); err != nil {
		t.Fatal(err)
	}

	mountSecret(t, dir, l.files(second, between, root))
	Eventually(t, 20*time.Second, "the new issuer under the same root is in use", func() error { return issues(second) })

	foreign := authority(t, "foreign root", newKey(t), nil)
	refused := func(files map[string]string, why string) {
		t.Helper()
		mountSecret(t, dir, files)
		server.WaitLog(t, 20*time.Second, why)
		if err := issues(second); err != nil {
			t.Errorf("after refused files (%s): %v", why, err)
		}
	}
	refused(l.files(authority(t, "issuer of a foreign root", newKey(t), foreign), nil, foreign), "(1) add the new root to the root file")
	mismatched := l.files(first, between, root)
	for _, name := range []string{"ca-key.pem", "tls.key"} {
		if mismatched[name] != "" {
			mismatched[name] = keyPEM(newKey(t))
		}
	}
	refused(mismatched, "does not belong to the first certificate")
	refused(l.files(authority(t, "unrelated issuer", newKey(t), foreign), between, root), "unrelated issuer")

	mountSecret(t, dir, l.files(first, between, root))
	Eventually(t, 20*time.Second, "good files are taken up after refused ones", func() error { return issues(first) })
}

// issuesUnder makes a certificate and checks the shape of the answer: the leaf, each intermediate an element, and all roots in the
// last; and that it verifies.
func issuesUnder(t *testing.T, conn *grpc.ClientConn, ask Ask, intermediates []*testCA, root *testCA) error {
	t.Helper()
	chain, err := ask.Create(t.Context(), conn)
	if err != nil {
		return err
	}
	if len(chain) != len(intermediates)+2 {
		return fmt.Errorf("the answer has %d elements; want the leaf, %d intermediates, the roots", len(chain), len(intermediates))
	}
	for i, ca := range intermediates {
		if chain[i+1] != certsPEM(ca) {
			return fmt.Errorf("element %d is not the certificate of %q", i+1, ca.cert.Subject)
		}
	}
	if chain[len(chain)-1] != certsPEM(root) {
		return errors.New("the last element is not the root")
	}
	leaf, err := parseCerts([]byte(chain[0]))
	if err != nil || len(leaf) != 1 {
		return fmt.Errorf("the first element is not one certificate: %w", err)
	}
	roots, middle := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(root.cert)
	for _, ca := range intermediates {
		middle.AddCert(ca.cert)
	}
	_, err = leaf[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: middle, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err
}
