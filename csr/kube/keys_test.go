package kube

import (
	"context"
	"crypto/mldsa"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
)

func TestParseKeySet(t *testing.T) {
	jwk := func(k jose.JSONWebKey) string {
		b, err := json.Marshal(k)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	public := func(id string) jose.JSONWebKey { return jose.JSONWebKey{KeyID: id, Key: testKeys()[id].Public()} }
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
		"private RSA":      {[]string{good, jwk(jose.JSONWebKey{KeyID: "rsa", Key: testKeys()["rsa"]})}, 0, "", "key 1 is a private or symmetric key"},
		"private EC":       {[]string{jwk(jose.JSONWebKey{KeyID: "x", Key: testKeys()["p384"]})}, 0, "", "private or symmetric"},
		"private Ed25519":  {[]string{jwk(jose.JSONWebKey{KeyID: "x", Key: testKeys()["ed"]})}, 0, "", "private or symmetric"},
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

func TestKeyFileIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := writeFile(t, jwks(t, "p256"))
		c := newCluster(t, Config{JWKSFile: file})
		run(t, c)
		try := func(key string, alg jose.SignatureAlgorithm, code codes.Code, reason string) {
			t.Helper()
			time.Sleep(minReload) // so that each step could load anew
			_, err := c.Authenticate(t.Context(), sign(t, key, key, alg, claims()))
			wantDenial(t, err, code, reason)
		}
		write := func(data []byte) {
			t.Helper()
			if err := os.WriteFile(file, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		try("p256", jose.ES256, 0, "")
		try("rsa", jose.RS256, codes.Unauthenticated, csr.ReasonTokenKey)
		write(jwks(t, "rsa"))
		try("rsa", jose.RS256, 0, "")
		try("p256", jose.ES256, codes.Unauthenticated, csr.ReasonTokenKey)
		write([]byte(`{"keys":[`)) // half written
		try("rsa", jose.RS256, 0, "")
		try("p256", jose.ES256, codes.Unavailable, csr.ReasonNotReady) // it may be in what we cannot read
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		try("rsa", jose.RS256, 0, "")
		if err := c.Ready(); err != nil {
			t.Errorf("the last good keys are in force, but: %v", err)
		}
	})
}

func TestD18VerdictIsDroppedWithItsKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := writeFile(t, jwks(t, "p256", "rsa"))
		c := newCluster(t, Config{JWKSFile: file})
		es, rs := sign(t, "p256", "p256", jose.ES256, claims()), sign(t, "rsa", "rsa", jose.RS256, claims())
		both := func(reason string) {
			t.Helper()
			_, err := c.Authenticate(t.Context(), es)
			wantDenial(t, err, codes.Unauthenticated, reason)
			_, err = c.Authenticate(t.Context(), rs)
			wantDenial(t, err, codes.Unauthenticated, "")
		}
		both("")
		os.WriteFile(file, jwks(t, "rsa"), 0o600)
		if err := c.keys.reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		both(csr.ReasonTokenKey)
		if n := value(t, c.metrics.hits); n != 1 {
			t.Errorf("%v hits; the key that stayed should have kept its verdict", n)
		}
		// The ID comes back with another key.
		k, _ := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{
			{KeyID: "p256", Key: testKeys()["p384"].Public()}, {KeyID: "rsa", Key: testKeys()["rsa"].Public()},
		}})
		os.WriteFile(file, k, 0o600)
		if err := c.keys.reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		both(csr.ReasonTokenKey)
	})
}

func TestUnknownKeyLoadsKeysOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.put(testPod())
		c := newCluster(t, Config{Client: s.client(t)})
		if c.Ready() == nil {
			t.Error("ready without keys")
		}
		run(t, c)
		synctest.Wait()
		if err := c.Ready(); err != nil || s.count("jwks") != 1 {
			t.Fatalf("ready: %v; %d loads", err, s.count("jwks"))
		}
		time.Sleep(minReload)
		s.with(func() { s.jwks = jwks(t, "rsa", "ed") })
		errs := make(chan error, 50)
		token := sign(t, "ed", "ed", jose.EdDSA, claims())
		for range 50 { // a new key, seen by many at once
			go func() {
				_, err := c.Authenticate(t.Context(), token)
				errs <- err
			}()
		}
		for range 50 {
			wantDenial(t, <-errs, 0, "")
		}
		if n := s.count("jwks"); n != 2 {
			t.Errorf("%d loads, want 2", n)
		}
		for i := range 100 { // and many made-up ones
			_, err := c.Authenticate(t.Context(), sign(t, "p256", fmt.Sprint(i), jose.ES256, claims()))
			wantDenial(t, err, codes.Unauthenticated, csr.ReasonTokenKey)
		}
		if n := s.count("jwks"); n != 2 {
			t.Errorf("%d loads, want 2: unknown keys may load only once in 10 s", n)
		}
		time.Sleep(minReload)
		s.with(func() { s.down = true })
		for range 2 { // the second time the answer is that of the first
			_, err := c.Authenticate(t.Context(), sign(t, "p256", "new", jose.ES256, claims()))
			wantDenial(t, err, codes.Unavailable, csr.ReasonNotReady)
		}
		if n := s.count("jwks"); n != 3 {
			t.Errorf("%d loads, want 3", n)
		}
	})
}

func TestKeysAreRefreshed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.down = true
		c := newCluster(t, Config{Client: s.client(t)})
		run(t, c)
		time.Sleep(time.Minute)
		if n := s.count("jwks"); n < 6 || n > 8 {
			t.Errorf("%d attempts in the first minute without an API server, want one each 8 to 10 s", n)
		}
		s.with(func() { s.down = false })
		time.Sleep(minReload)
		before := s.count("jwks")
		time.Sleep(time.Hour)
		if n := s.count("jwks") - before; n < 12 || n > 15 {
			t.Errorf("%d loads in an hour, want one each 4 to 5 min", n)
		}
	})
}

func TestHungAPIServerDoesNotHoldCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.hang = true
		c := newCluster(t, Config{Client: s.client(t)})
		t.Cleanup(settle)
		start := time.Now()
		_, err := c.Authenticate(t.Context(), sign(t, "p256", "p256", jose.ES256, claims()))
		wantDenial(t, err, codes.Unavailable, csr.ReasonNotReady)
		if took := time.Since(start); took > reloadTimeout {
			t.Errorf("it took %v", took)
		}
		time.Sleep(minReload)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start = time.Now()
		_, err = c.Authenticate(ctx, sign(t, "p256", "p256", jose.ES256, claims()))
		wantDenial(t, err, codes.Unavailable, csr.ReasonNotReady)
		if took := time.Since(start); took > time.Second || !errors.Is(ctx.Err(), context.DeadlineExceeded) {
			t.Errorf("it took %v, beyond the caller's deadline", took)
		}
	})
}
