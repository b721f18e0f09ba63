package files

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// pair returns a certificate and its key in PEM.
func pair(t *testing.T) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
	must(t, err)
	key, err = trust.EncodeKey(k)
	must(t, err)
	return trust.EncodeCertificates(&x509.Certificate{Raw: der}), key
}

type safeBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	must(t, os.WriteFile(path, data, 0o600))
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		ref := Ref{filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")}
		log := new(safeBuffer)
		w, err := New(Config{Dirs: []string{dir}, Logger: slog.New(slog.NewTextHandler(log, nil))})
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go w.Run(ctx)

		must(t, w.Hold(ref))
		must(t, w.Hold(ref))
		if w.Content(ref) != nil {
			t.Fatal("content of files that are not there")
		}
		firstCert, firstKey := pair(t)
		secondCert, secondKey := pair(t)
		steps := []struct {
			what      string
			cert, key []byte
			want      []byte // key served
			changed   bool
		}{
			{"first", firstCert, firstKey, firstKey, true},
			{"nothing new", firstCert, firstKey, firstKey, false},
			{"only one file of the next pair", secondCert, firstKey, firstKey, false},
			{"both files", secondCert, secondKey, secondKey, true},
			{"cut off", secondCert[:100], secondKey, secondKey, false},
			{"empty", nil, nil, secondKey, false},
			{"too big", bytes.Repeat([]byte("x"), trust.MaxPEMBytes+1), secondKey, secondKey, false},
			{"back", firstCert, firstKey, firstKey, true},
		}
		for _, s := range steps {
			changed := w.Changes()
			write(t, ref.Certificates, s.cert)
			write(t, ref.Key, s.key)
			time.Sleep(pollInterval)
			synctest.Wait()
			if got := w.Content(ref); got == nil || !bytes.Equal(got.Key, s.want) {
				t.Errorf("%s: another key is served", s.what)
			}
			select {
			case <-changed:
				if !s.changed {
					t.Errorf("%s: told of a change", s.what)
				}
			default:
				if s.changed {
					t.Errorf("%s: not told of the change", s.what)
				}
			}
		}
		before := strings.Count(log.String(), "last good content stays")
		must(t, os.Remove(ref.Key))
		time.Sleep(3 * pollInterval)
		synctest.Wait()
		if n := strings.Count(log.String(), "last good content stays") - before; n != 1 {
			t.Errorf("trouble that stays the same was logged %d times; want once", n)
		}
		if strings.Contains(log.String(), "PRIVATE") {
			t.Error("the log has key material")
		}
		w.Drop(ref)
		if w.Content(ref) == nil {
			t.Error("dropped while still held once")
		}
		w.Drop(ref)
		if w.Content(ref) != nil {
			t.Error("still there after the last drop")
		}
	})
}

func TestOutsideIsRefused(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	cert, _ := pair(t)
	for _, d := range []string{dir, outside} {
		write(t, filepath.Join(d, "ca.pem"), cert)
	}
	must(t, os.Symlink(filepath.Join(outside, "ca.pem"), filepath.Join(dir, "out.pem")))
	must(t, os.Symlink("ca.pem", filepath.Join(dir, "in.pem")))
	must(t, syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	w, err := New(Config{Dirs: []string{dir}, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	for path, served := range map[string]bool{
		dir + "/ca.pem":                true,
		dir + "/./x/../ca.pem":         true,
		dir + "/in.pem":                true,
		dir + "/out.pem":               false, // symlink to the outside
		dir + "/pipe":                  false, // must not hang
		dir:                            false,
		outside + "/ca.pem":            false,
		dir + "/../" + "ca.pem":        false,
		dir + "extra/ca.pem":           false,
		"ca.pem":                       false,
		"":                             false,
		dir + "/" + "absent/later.pem": false,
	} {
		ref := Ref{Certificates: path}
		err := w.Hold(ref)
		if got := w.Content(ref) != nil; got != served {
			t.Errorf("%s: served %v, want %v (%v)", path, got, served, err)
		}
	}
	if err := w.Hold(Ref{dir + "/ca.pem", outside + "/key.pem"}); err == nil {
		t.Error("a key outside was accepted")
	}
	none, err := New(Config{Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	if err := none.Hold(Ref{Certificates: dir + "/ca.pem"}); err == nil {
		t.Error("a file was accepted where no directory is allowed")
	}
	if _, err := New(Config{Dirs: []string{""}}); err == nil {
		t.Error("an empty directory name was accepted")
	}
}

func TestBoundOfWatchedFiles(t *testing.T) {
	dir := t.TempDir()
	w, err := New(Config{Dirs: []string{dir}, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	ref := func(i int) Ref { return Ref{Certificates: filepath.Join(dir, strconv.Itoa(i))} }
	for i := range maxRefs {
		must(t, w.Hold(ref(i)))
	}
	must(t, w.Hold(ref(0))) // one that is held already
	if err := w.Hold(ref(maxRefs)); err == nil || !strings.Contains(err.Error(), "1000 sets of files are watched") {
		t.Errorf("one more: %v", err)
	}
	w.Drop(ref(1))
	must(t, w.Hold(ref(maxRefs)))
}
