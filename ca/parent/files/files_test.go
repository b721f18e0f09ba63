package files

import (
	"context"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/parent/parenttest"
	"github.com/chancery-project/chancery/trust"
)

// lay writes a CA into a folder, in both layouts.
func lay(t *testing.T, dir string, ca *parenttest.CA, root *x509.Certificate) {
	t.Helper()
	key, err := trust.EncodeKey(ca.Key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	cert, roots := trust.EncodeCertificates(ca.Cert), trust.EncodeCertificates(root)
	for name, data := range map[string][]byte{
		"ca-cert.pem": cert, "ca-key.pem": key, "cert-chain.pem": cert, "root-cert.pem": roots, "tls.crt": cert, "tls.key": key, "ca.crt": roots,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func parentIn(w *parenttest.World, dir string, l files.Layout, ttl time.Duration) *Parent {
	return New(Config{Dir: dir, Layout: l, Domain: w.Domain, TTL: ttl, Log: w.Log, LogID: func() uint32 { return w.Keeper.LogID() }})
}

// The contract, as far as files can break it: a CA that is below the root or the root itself signs, is swapped for another
// one under the same root, and whatever else the folder becomes, the issuer in use stays.
func TestContract(t *testing.T) {
	for name, l := range map[string]files.Layout{"cacerts": files.CACerts, "tls": files.TLS} {
		t.Run(name, func(t *testing.T) {
			w := parenttest.NewWorld(t)
			dir := filepath.Join(t.TempDir(), "parent")
			r := w.Renewer(parentIn(w, dir, l, parenttest.Lifetime))
			lay(t, dir, w.Above, w.Root.Cert)
			if err := r.Renew(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.Issue(t)
			in, err := w.Keeper.Issuer()
			if err != nil {
				t.Fatal(err)
			}
			cert := in.Chain()[0]
			if len(in.Chain()) != 2 || cert.MaxPathLen != 0 || !cert.MaxPathLenZero || len(cert.SerialNumber.Bytes()) != 20 || cert.URIs[0].String() != "spiffe://cluster.local" {
				t.Errorf("the issuer is %+v", cert)
			}
			foreignRoot := parenttest.NewCA(t, "root", nil, nil)
			for _, c := range []struct {
				name, want string
				make       func()
			}{
				{"gone", "no such file", func() { os.RemoveAll(dir) }},
				{"unknown root", "does not lead to a root", func() { lay(t, dir, parenttest.NewCA(t, "above", foreignRoot, nil), foreignRoot.Cert) }},
				{"root swapped", "does not verify against the roots", func() { lay(t, dir, w.Above, foreignRoot.Cert) }},
				{"no room in the path", "path length", func() {
					lay(t, dir, parenttest.NewCA(t, "narrow", w.Root, func(c *x509.Certificate) { c.MaxPathLen, c.MaxPathLenZero = 0, true }), w.Root.Cert)
				}},
				{"not a CA", "not a CA", func() {
					lay(t, dir, parenttest.NewCA(t, "leaf", w.Root, func(c *x509.Certificate) {
						c.IsCA, c.MaxPathLen, c.KeyUsage, c.SubjectKeyId = false, 0, x509.KeyUsageDigitalSignature, []byte("12345678901234567890")
					}), w.Root.Cert)
				}},
				{"ended", "expired", func() {
					lay(t, dir, parenttest.NewCA(t, "ended", w.Root, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) }), w.Root.Cert)
				}},
				{"too short", "nothing would be gained", func() {
					lay(t, dir, parenttest.NewCA(t, "short", w.Root, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(time.Minute) }), w.Root.Cert)
				}},
				{"key of another", "does not belong", func() {
					key, err := trust.EncodeKey(foreignRoot.Key)
					if err != nil {
						t.Fatal(err)
					}
					lay(t, dir, w.Above, w.Root.Cert)
					overwrite(t, dir, key, "ca-key.pem", "tls.key")
				}},
				{"garbage", "no PEM block", func() {
					lay(t, dir, w.Above, w.Root.Cert)
					overwrite(t, dir, []byte("garbage"), "ca-cert.pem", "tls.crt")
				}},
				{"oversized", "larger than", func() {
					lay(t, dir, w.Above, w.Root.Cert)
					overwrite(t, dir, make([]byte, trust.MaxPEMBytes+1), "root-cert.pem", "ca.crt")
				}},
			} {
				c.make()
				if err := r.Renew(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%s: %v", c.name, err)
				}
				if now, err := w.Keeper.Issuer(); err != nil || now.SKI() != in.SKI() {
					t.Fatalf("%s: the issuer in use is another one: %v", c.name, err)
				}
				w.Issue(t)
			}
			lay(t, dir, w.Root, w.Root.Cert) // the root itself
			if err := w.Renewer(parentIn(w, dir, l, 2*parenttest.Lifetime)).Renew(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.Issue(t)
			if now, err := w.Keeper.Issuer(); err != nil || len(now.Chain()) != 1 {
				t.Errorf("below the root itself: %v", err)
			}
		})
	}
}

func overwrite(t *testing.T, dir string, data []byte, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// Invariant 10: the parent's key signs nothing that the audit log does not have first.
func TestInvariant10ParentInFilesSignsNothingWithoutALog(t *testing.T) {
	w := parenttest.NewWorld(t)
	dir := filepath.Join(t.TempDir(), "parent")
	lay(t, dir, w.Above, w.Root.Cert)
	der, err := w.Keeper.Request(context.Background(), "test", false)
	if err != nil {
		t.Fatal(err)
	}
	w.Log.Close()
	if _, err := parentIn(w, dir, files.CACerts, time.Hour).Sign(t.Context(), der); err == nil {
		t.Error("signed without an audit log")
	}
}
