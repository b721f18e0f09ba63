// Package keystest owns the contract of key stores: a suite that the tests of every implementation run. It is imported
// by tests only.
package keystest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// Store is a key store that its opener closes.
type Store interface {
	keys.Store
	io.Closer
}

// Config says what the suite may expect.
type Config struct {
	// Open opens the same store each time; what was made in it before is still there.
	Open func(*testing.T) Store
	// Types are the key types that the store can make.
	Types []ca.KeyType
	// Forgets is set for a store whose keys end with it.
	Forgets bool
}

// Run runs the suite.
func Run(t *testing.T, c Config) {
	t.Run("generate, sign and verify", func(t *testing.T) { generate(t, c) })
	t.Run("reopen", func(t *testing.T) { reopen(t, c) })
	t.Run("unknown reference", func(t *testing.T) { unknown(t, c) })
	t.Run("delete", func(t *testing.T) { remove(t, c) })
	t.Run("the key never leaves", func(t *testing.T) { neverLeaves(t, c) })
	t.Run("concurrent", func(t *testing.T) { concurrent(t, c) })
	t.Run("closed", func(t *testing.T) { closed(t, c) })
}

func open(t *testing.T, c Config) Store {
	t.Helper()
	s := c.Open(t)
	t.Cleanup(func() { s.Close() })
	return s
}

// New makes a key and returns its reference and signer.
func New(t *testing.T, s keys.Store, kt ca.KeyType) (string, crypto.Signer) {
	t.Helper()
	ref, err := s.Generate(t.Context(), kt)
	if err != nil {
		t.Fatalf("making a %s key: %v", kt, err)
	}
	key, err := s.Open(t.Context(), ref)
	if err != nil {
		t.Fatalf("opening %s: %v", ref, err)
	}
	return ref, key
}

func generate(t *testing.T, c Config) {
	s := open(t, c)
	seen := map[string]bool{}
	for _, kt := range c.Types {
		ref, key := New(t, s, kt)
		if seen[ref] {
			t.Errorf("two keys are called %s", ref)
		}
		seen[ref] = true
		if got, err := ca.TypeOf(key.Public()); err != nil || got != kt {
			t.Errorf("asked for %s, got %s: %v", kt, got, err)
		}
		if err := keys.Check(key); err != nil {
			t.Errorf("%s: %v", kt, err)
		}
		// As ca uses it: the same type signs a certificate request that crypto/x509 verifies.
		der, err := x509.CreateCertificateRequest(nil, &x509.CertificateRequest{}, key)
		if err != nil {
			t.Errorf("%s: %v", kt, err)
			continue
		}
		csr, err := x509.ParseCertificateRequest(der)
		if err == nil {
			err = csr.CheckSignature()
		}
		if err != nil {
			t.Errorf("%s: %v", kt, err)
		}
	}
	if _, err := s.Generate(t.Context(), "dsa"); err == nil {
		t.Error("a key of type dsa was made")
	}
}

func reopen(t *testing.T, c Config) {
	if c.Forgets {
		t.Skip("the keys of this store end with it")
	}
	for _, kt := range c.Types {
		first := open(t, c)
		ref, key := New(t, first, kt)
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		again, err := open(t, c).Open(t.Context(), ref)
		if err != nil {
			t.Fatalf("%s: %v", kt, err)
		}
		if !trust.SameKey(key.Public(), again.Public()) {
			t.Errorf("%s: after opening the store again %s is another key", kt, ref)
		}
		if err := keys.Check(again); err != nil {
			t.Errorf("%s: %v", kt, err)
		}
	}
}

func unknown(t *testing.T, c Config) {
	s := open(t, c)
	ref, _ := New(t, s, c.Types[0])
	if err := s.Delete(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"", "nonsense", ref, ref + "00", "file:../../etc/passwd", "file:", "pkcs11:id=00", "memory:", strings.Repeat("a", 1<<16), "\x00"} {
		if _, err := s.Open(t.Context(), bad); !errors.Is(err, keys.ErrNotFound) {
			t.Errorf("opening %.40q: %v", bad, err)
		}
	}
}

func remove(t *testing.T, c Config) {
	s := open(t, c)
	gone, _ := New(t, s, c.Types[0])
	kept, key := New(t, s, c.Types[0])
	for range 2 { // also where it is not there any more
		if err := s.Delete(t.Context(), gone); err != nil {
			t.Errorf("deleting %s: %v", gone, err)
		}
	}
	if _, err := s.Open(t.Context(), gone); !errors.Is(err, keys.ErrNotFound) {
		t.Errorf("a deleted key: %v", err)
	}
	if again, err := s.Open(t.Context(), kept); err != nil || !trust.SameKey(again.Public(), key.Public()) {
		t.Errorf("the other key: %v", err)
	}
}

// neverLeaves looks for a way to get at the private key through what Open returns.
func neverLeaves(t *testing.T, c Config) {
	_, key := New(t, open(t, c), c.Types[0])
	switch key.(type) {
	case *ecdsa.PrivateKey, *rsa.PrivateKey, ed25519.PrivateKey:
		t.Errorf("a %T is handed out", key)
	}
	if der, err := x509.MarshalPKCS8PrivateKey(key); err == nil {
		t.Errorf("the key can be encoded, in %d bytes", len(der))
	}
	if data, err := json.Marshal(key); err == nil && len(data) > 2 {
		t.Errorf("the key encodes as JSON: %s", data)
	}
	v := reflect.ValueOf(key)
	for v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	for i := range v.NumField() {
		if f := v.Type().Field(i); f.IsExported() {
			t.Errorf("field %s is exported", f.Name)
		}
	}
	for i := range reflect.TypeOf(key).NumMethod() {
		switch m := reflect.TypeOf(key).Method(i).Name; m {
		case "Public", "Sign", "InProcess", "Format":
		default:
			t.Errorf("method %s gives more than a signer needs", m)
		}
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x"} {
		if text := fmt.Sprintf(verb, key); len(text) > 60 {
			t.Errorf("%s prints %d bytes of it: %.200s", verb, len(text), text)
		}
	}
}

func concurrent(t *testing.T, c Config) {
	s := open(t, c)
	ref, shared := New(t, s, c.Types[0])
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			own, err := s.Open(context.WithoutCancel(t.Context()), ref)
			if err != nil {
				t.Error(err)
				return
			}
			for range 10 {
				if err := errors.Join(keys.Check(shared), keys.Check(own)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 2 {
		wg.Go(func() {
			if _, err := s.Generate(context.WithoutCancel(t.Context()), c.Types[0]); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func closed(t *testing.T, c Config) {
	s := open(t, c)
	ref, key := New(t, s, c.Types[0])
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	}
	_, generated := s.Generate(t.Context(), c.Types[0])
	_, opened := s.Open(t.Context(), ref)
	for what, err := range map[string]error{
		"Generate": generated, "Open": opened, "Delete": s.Delete(t.Context(), ref), "a signer": keys.Check(key),
	} {
		if !errors.Is(err, keys.ErrClosed) {
			t.Errorf("%s after Close: %v", what, err)
		}
	}
}

// Benchmark measures what a signature with a P-256 key costs, one after the other.
func Benchmark(b *testing.B, name string, s keys.Store) {
	ref, err := s.Generate(b.Context(), ca.P256)
	if err != nil {
		b.Fatal(err)
	}
	key, err := s.Open(b.Context(), ref)
	if err != nil {
		b.Fatal(err)
	}
	digest := sha256.Sum256([]byte(name))
	b.Run(name, func(b *testing.B) {
		for b.Loop() {
			if _, err := key.Sign(rand.Reader, digest[:], crypto.SHA256); err != nil {
				b.Fatal(err)
			}
		}
	})
}
