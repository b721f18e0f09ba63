package jwt

import (
	"bytes"
	"context"
	"crypto/mldsa"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/jwt/jwttest"
)

// source is a key set that changes, fails and counts who reads it.
type source struct {
	mu    sync.Mutex // guards the rest
	data  []byte
	err   error
	opens int
}

func (s *source) open(context.Context) (io.ReadCloser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opens++
	return io.NopCloser(bytes.NewReader(s.data)), s.err
}

func (s *source) set(data []byte, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.data, s.err = data, err
}

func (s *source) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opens
}

func TestParseKeySet(t *testing.T) {
	jwk := func(k jose.JSONWebKey) string {
		b, err := json.Marshal(k)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	public := func(id string) jose.JSONWebKey { return jose.JSONWebKey{KeyID: id, Key: jwttest.Keys()[id].Public()} }
	with := func(k jose.JSONWebKey, f func(*jose.JSONWebKey)) string { f(&k); return jwk(k) }
	post, err := mldsa.GenerateKey(mldsa.MLDSA65())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GODEBUG", os.Getenv("GODEBUG")+",rsa1024min=0")
	small, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	good := jwk(public("p256"))
	for name, tc := range map[string]struct {
		keys    []string
		n       int
		skipped string // part of why one was left out
		err     string
	}{
		"all kinds":        {[]string{jwk(public("rsa")), good, jwk(public("p384")), jwk(public("p521")), jwk(public("ed"))}, 5, "", ""},
		"ML-DSA":           {[]string{good, jwk(jose.JSONWebKey{KeyID: "pq", Key: post.PublicKey()})}, 1, "kty", ""},
		"unknown kty":      {[]string{`{"kty":"LATTICE","kid":"x","z":[1]}`, good}, 1, `kty is "LATTICE"`, ""},
		"no object":        {[]string{`7`, good}, 1, "no JSON Web Key", ""},
		"broken point":     {[]string{`{"kty":"EC","crv":"P-256","x":"AQ","y":"AQ"}`, good}, 1, "key 0", ""},
		"small RSA":        {[]string{jwk(jose.JSONWebKey{KeyID: "s", Key: small.Public()}), good}, 1, "1024 bits", ""},
		"for encryption":   {[]string{with(public("rsa"), func(k *jose.JSONWebKey) { k.Use = "enc" }), good}, 1, "use", ""},
		"symmetric alg":    {[]string{with(public("rsa"), func(k *jose.JSONWebKey) { k.Algorithm = "HS256" }), good}, 1, "alg", ""},
		"alg of others":    {[]string{with(public("rsa"), func(k *jose.JSONWebKey) { k.Algorithm = "ES256" }), good}, 1, "does not fit", ""},
		"same ID twice":    {[]string{good, with(public("p256"), func(*jose.JSONWebKey) {})}, 1, "twice", ""},
		"same ID, 2 kinds": {[]string{good, with(public("rsa"), func(k *jose.JSONWebKey) { k.KeyID = "p256" })}, 2, "", ""},
		"private RSA":      {[]string{good, jwk(jose.JSONWebKey{KeyID: "rsa", Key: jwttest.Keys()["rsa"]})}, 0, "", "key 1 is a private or symmetric key"},
		"private EC":       {[]string{jwk(jose.JSONWebKey{KeyID: "x", Key: jwttest.Keys()["p384"]})}, 0, "", "private or symmetric"},
		"private Ed25519":  {[]string{jwk(jose.JSONWebKey{KeyID: "x", Key: jwttest.Keys()["ed"]})}, 0, "", "private or symmetric"},
		"private ML-DSA":   {[]string{jwk(jose.JSONWebKey{KeyID: "x", Key: post}), good}, 0, "", "private or symmetric"},
		"symmetric":        {[]string{good, `{"kty":"oct","k":"AAAA"}`}, 0, "", "private or symmetric"},
		"none usable":      {[]string{`{"kty":"LATTICE"}`}, 0, "kty", "no key that can be used"},
		"empty":            {nil, 0, "", "no key that can be used"},
		"too many":         {strings.Split(strings.Repeat(good+"\n", maxKeys)+good, "\n"), 0, "", "at most 100"},
	} {
		t.Run(name, func(t *testing.T) {
			set, skipped, err := parseKeySet([]byte(`{"keys":[` + strings.Join(tc.keys, ",") + `]}`))
			if len(set) != tc.n || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("got %d keys and %v, want %d and %q", len(set), err, tc.n, tc.err)
			}
			if (len(skipped) > 0) != (tc.skipped != "") || !strings.Contains(strings.Join(skipped, "\n"), tc.skipped) {
				t.Errorf("left out %q, want %q", skipped, tc.skipped)
			}
		})
	}
	for _, data := range []string{"", "[]", "{}", `{"keys":7}`, `{"keys":[]`, strings.Repeat(" ", maxKeySet+1)} {
		if _, _, err := parseKeySet([]byte(data)); err == nil {
			t.Errorf("%.20q was accepted", data)
		}
	}
}

func TestD18VerdictIsDroppedWithItsKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := jwttest.File(t, jwttest.KeySet(t, "p256", "rsa"))
		c := newVerifier(t, Config{Keys: opener(file)})
		es, rs := jwttest.Sign(t, "p256", "p256", jose.ES256, jwttest.Claims()), jwttest.Sign(t, "rsa", "rsa", jose.RS256, jwttest.Claims())
		both := func(reason string) {
			t.Helper()
			_, err := verify(t, c, es)
			jwttest.WantDenial(t, err, codes.Unauthenticated, reason)
			_, err = verify(t, c, rs)
			jwttest.WantDenial(t, err, codes.Unauthenticated, "")
		}
		both("")
		os.WriteFile(file, jwttest.KeySet(t, "rsa"), 0o600)
		if err := c.Load(t.Context()); err != nil {
			t.Fatal(err)
		}
		both(csr.ReasonTokenKey)
		if n := c.Stats().Hits; n != 1 {
			t.Errorf("%d hits; the key that stayed should have kept its verdict", n)
		}
		// The ID comes back with another key.
		k, _ := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{
			{KeyID: "p256", Key: jwttest.Keys()["p384"].Public()}, {KeyID: "rsa", Key: jwttest.Keys()["rsa"].Public()},
		}})
		os.WriteFile(file, k, 0o600)
		if err := c.Load(t.Context()); err != nil {
			t.Fatal(err)
		}
		both(csr.ReasonTokenKey)
	})
}

func TestUnknownKeyLoadsKeysOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{data: jwttest.KeySet(t, "rsa", "p256")}
		c := newVerifier(t, Config{Keys: s.open})
		if c.Ready() == nil {
			t.Error("ready without keys")
		}
		run(t, c)
		synctest.Wait()
		if err := c.Ready(); err != nil || s.count() != 1 {
			t.Fatalf("ready: %v; %d loads", err, s.count())
		}
		time.Sleep(minReload)
		s.set(jwttest.KeySet(t, "rsa", "ed"), nil)
		errs := make(chan error, 50)
		token := jwttest.Sign(t, "ed", "ed", jose.EdDSA, jwttest.Claims())
		for range 50 { // a new key, seen by many at once
			go func() {
				_, err := verify(t, c, token)
				errs <- err
			}()
		}
		for range 50 {
			jwttest.WantDenial(t, <-errs, 0, "")
		}
		if n := s.count(); n != 2 {
			t.Errorf("%d loads, want 2", n)
		}
		for i := range 100 { // and many made-up ones
			_, err := verify(t, c, jwttest.Sign(t, "p256", fmt.Sprint(i), jose.ES256, jwttest.Claims()))
			jwttest.WantDenial(t, err, codes.Unauthenticated, csr.ReasonTokenKey)
		}
		if n := s.count(); n != 2 {
			t.Errorf("%d loads, want 2: unknown keys may load only once in 10 s", n)
		}
		time.Sleep(minReload)
		s.set(nil, errors.New("down"))
		for range 2 { // the second time the answer is that of the first
			_, err := verify(t, c, jwttest.Sign(t, "p256", "new", jose.ES256, jwttest.Claims()))
			jwttest.WantDenial(t, err, codes.Unavailable, csr.ReasonNotReady)
		}
		if n := s.count(); n != 3 {
			t.Errorf("%d loads, want 3", n)
		}
	})
}

func TestKeySetIsBounded(t *testing.T) {
	endless := func(context.Context) (io.ReadCloser, error) { return io.NopCloser(zeros{}), nil }
	if err := newVerifier(t, Config{Keys: endless}).Load(t.Context()); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("got %v, want that it is too large", err)
	}
}

// zeros is a reader without an end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
