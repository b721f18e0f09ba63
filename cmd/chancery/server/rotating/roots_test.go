package rotating

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/trust"
)

func bundleOf(t *testing.T, n int) *trust.Bundle {
	t.Helper()
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	var roots []*x509.Certificate
	for range n {
		key, err := ca.GenerateKey(ca.P256)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		root, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		roots = append(roots, root)
	}
	b, err := trust.NewBundle(td, uint64(n), roots)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestRootsFileFollows: it is made, written anew when the roots change, left alone when they do not, and tried again when that fails,
// with one word in the log.
func TestRootsFileFollows(t *testing.T) {
	one, two := bundleOf(t, 1), bundleOf(t, 2)
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "roots.pem")
		var log bytes.Buffer
		var now atomic.Pointer[trust.Bundle]
		var fails atomic.Bool
		var writes atomic.Int64
		now.Store(one)
		r := RootsFile{
			Path: path, Logger: slog.New(slog.NewTextHandler(&log, nil)), Bundle: func() (*trust.Bundle, error) { return now.Load(), nil },
			Write: func() error {
				writes.Add(1)
				if fails.Load() {
					return errors.New("no space left")
				}
				return os.WriteFile(path, now.Load().PEM(), 0o644)
			},
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		look := func(want *trust.Bundle, count int64) {
			t.Helper()
			synctest.Sleep(3 * lookEvery)
			if have, err := os.ReadFile(path); err != nil || !bytes.Equal(have, want.PEM()) || writes.Load() != count {
				t.Errorf("%d bytes, %d writes, %v; want %d bytes, %d writes", len(have), writes.Load(), err, len(want.PEM()), count)
			}
		}
		look(one, 1)
		now.Store(two)
		look(two, 2)
		fails.Store(true)
		now.Store(one)
		look(two, 5)
		fails.Store(false)
		look(one, 6)
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if n := strings.Count(log.String(), "no space left"); n != 1 {
			t.Errorf("it is said %d times:\n%s", n, log.String())
		}
	})
}
