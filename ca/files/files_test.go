package files

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/trust"
)

func newCA(t testing.TB) *ca.Created {
	t.Helper()
	td, err := trust.ParseDomain("td")
	if err != nil {
		t.Fatal(err)
	}
	log, err := audit.Open(filepath.Join(t.TempDir(), "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	made, err := ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func keyPEM(t testing.TB, key crypto.Signer) string {
	t.Helper()
	data, err := trust.EncodeKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func certPEM(certs ...*x509.Certificate) string { return string(trust.EncodeCertificates(certs...)) }

func write(t testing.TB, dir string, content map[string]string) {
	t.Helper()
	for name, text := range content {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func cacerts(t testing.TB, c *ca.Created) map[string]string {
	return map[string]string{
		"ca-cert.pem": certPEM(c.Issuer), "ca-key.pem": keyPEM(t, c.IssuerKey), "cert-chain.pem": certPEM(c.Issuer), "root-cert.pem": certPEM(c.Root),
	}
}

func TestReadLayouts(t *testing.T) {
	c := newCA(t)
	for name, tc := range map[string]struct {
		layout  Layout
		content map[string]string
	}{
		"cacerts":                    {CACerts, cacerts(t, c)},
		"cacerts with root in chain": {CACerts, with(cacerts(t, c), "cert-chain.pem", certPEM(c.Issuer, c.Root))},
		"cacerts without chain":      {CACerts, with(cacerts(t, c), "cert-chain.pem", "")},
		"tls":                        {TLS, map[string]string{"tls.crt": certPEM(c.Issuer), "tls.key": keyPEM(t, c.IssuerKey), "ca.crt": certPEM(c.Root)}},
		"tls with whole chain":       {TLS, map[string]string{"tls.crt": certPEM(c.Issuer, c.Root), "tls.key": keyPEM(t, c.IssuerKey), "ca.crt": certPEM(c.Root)}},
	} {
		dir := t.TempDir()
		write(t, dir, tc.content)
		s, err := Read(dir, tc.layout)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if len(s.Chain) != 1 || !s.Chain[0].Equal(c.Issuer) || len(s.Roots) != 1 || !s.Roots[0].Equal(c.Root) {
			t.Errorf("%s: chain of %d, %d roots; want the issuer alone under one root", name, len(s.Chain), len(s.Roots))
		}
	}
}

func with(m map[string]string, name, text string) map[string]string { m[name] = text; return m }

// Each error names the file and does not hold its content.
func TestReadRefuses(t *testing.T) {
	c, other := newCA(t), newCA(t)
	secret := keyPEM(t, c.IssuerKey)
	for name, tc := range map[string]struct{ file, text, want string }{
		"missing key":           {"ca-key.pem", "", "ca-key.pem"},
		"another CA's key":      {"ca-key.pem", keyPEM(t, other.IssuerKey), "does not belong"},
		"encrypted key":         {"ca-key.pem", "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n", "encrypted"},
		"key where a cert goes": {"ca-cert.pem", secret, "expected a CERTIFICATE"},
		"garbage root":          {"root-cert.pem", "hello", "root-cert.pem"},
		"cut-off chain":         {"cert-chain.pem", certPEM(c.Issuer) + certPEM(c.Root)[:200], "cut off"},
		"huge":                  {"root-cert.pem", strings.Repeat("#", trust.MaxPEMBytes+1), "larger than"},
	} {
		dir := t.TempDir()
		write(t, dir, with(cacerts(t, c), tc.file, tc.text))
		_, err := Read(dir, CACerts)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v; want something about %q with the path", name, err, tc.want)
		}
		if err != nil && strings.Contains(err.Error(), strings.Split(secret, "\n")[1]) {
			t.Errorf("%s: the error holds key bytes", name)
		}
	}
	dir := t.TempDir()
	write(t, dir, cacerts(t, c))
	os.Remove(filepath.Join(dir, "root-cert.pem"))
	if _, err := Read(dir, CACerts); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file gave %v", err)
	}
}

func TestWatcherAppliesNewContentAndKeepsTheLastGood(t *testing.T) {
	c, next := newCA(t), newCA(t)
	dir := t.TempDir()
	write(t, dir, cacerts(t, c))
	first, err := Read(dir, CACerts)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		var applied atomic.Int32
		var logged bytes.Buffer
		w := &Watcher{Dir: dir, Layout: CACerts, Last: first, Logger: slog.New(slog.NewTextHandler(&logged, nil)), Apply: func(*Set) error { applied.Add(1); return nil }}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); w.Run(ctx) }()
		step := func(want int32, what string) {
			t.Helper()
			time.Sleep(3 * pollEvery)
			synctest.Wait()
			if n := applied.Load(); n != want {
				t.Errorf("%s: applied %d times, want %d", what, n, want)
			}
		}
		step(0, "nothing changed")
		write(t, dir, map[string]string{"ca-key.pem": "half"})
		step(0, "half of a new set")
		if n := strings.Count(logged.String(), "not used"); n != 1 {
			t.Errorf("the same trouble was reported %d times in three polls", n)
		}
		write(t, dir, cacerts(t, next))
		step(1, "a whole new set")
		step(1, "nothing changed again")
		cancel()
		<-done
	})
}

func FuzzRead(f *testing.F) {
	c := newCA(f)
	f.Add(certPEM(c.Issuer), keyPEM(f, c.IssuerKey), certPEM(c.Issuer, c.Root), certPEM(c.Root))
	f.Add("", "", "", "")
	f.Fuzz(func(t *testing.T, cert, key, chain, root string) {
		s, err := CACerts.parse(map[string][]byte{
			"ca-cert.pem": []byte(cert), "ca-key.pem": []byte(key), "cert-chain.pem": []byte(chain), "root-cert.pem": []byte(root),
		}, "dir")
		if err == nil && (len(s.Chain) == 0 || len(s.Roots) == 0 || !trust.SameKey(s.Chain[0].PublicKey, s.Key.Public())) {
			t.Error("an incomplete set was accepted")
		}
	})
}
