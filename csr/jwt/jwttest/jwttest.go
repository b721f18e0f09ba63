// Package jwttest owns the tokens that tests of csr/jwt and csr/kube present: keys, key sets, claims and signatures, as
// an API server would make them, and as an attacker would. It refuses to be more: nothing but tests imports it.
package jwttest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
)

// What Claims says of issuer and audience.
const (
	Issuer   = "https://kubernetes.default.svc"
	Audience = "istio-ca"
)

// Keys are made once: RSA keys are dear. The others are the same in each process, so that the seeds of a fuzz test
// mean the same to its workers.
var Keys = sync.OnceValue(func() map[string]crypto.Signer {
	keys := map[string]crypto.Signer{}
	for _, id := range []string{"rsa", "rsa2"} {
		keys[id], _ = rsa.GenerateKey(rand.Reader, 2048)
	}
	for id, curve := range map[string]elliptic.Curve{"p256": elliptic.P256(), "p384": elliptic.P384(), "p521": elliptic.P521()} {
		size := (curve.Params().BitSize + 7) / 8
		keys[id], _ = ecdsa.ParseRawPrivateKey(curve, append(make([]byte, size-1), 7))
	}
	keys["ed"] = ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	return keys
})

// KeySet returns a key set of the public halves.
func KeySet(t testing.TB, ids ...string) []byte {
	t.Helper()
	var set jose.JSONWebKeySet
	for _, id := range ids {
		set.Keys = append(set.Keys, jose.JSONWebKey{KeyID: id, Key: Keys()[id].Public(), Use: "sig"})
	}
	b, err := json.Marshal(set)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// File writes data to a file that lives as long as the test.
func File(t testing.TB, data []byte) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "jwks.json")
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// Object is a JSON object.
type Object = map[string]any

// Claims returns the claims that an API server would put into a token for pod web-0 of foo/web on node-1. Each change
// is applied to them.
func Claims(changes ...func(Object)) Object {
	now := time.Now().Unix()
	c := Object{
		"iss": Issuer, "sub": "system:serviceaccount:foo:web", "aud": []string{Audience},
		"iat": now, "nbf": now, "exp": now + 3600, "jti": "6c3b4d7e-0000-4000-8000-000000000001",
		"kubernetes.io": Object{
			"namespace":      "foo",
			"serviceaccount": Object{"name": "web", "uid": "sa-uid"},
			"pod":            Object{"name": "web-0", "uid": "uid-0"},
			"node":           Object{"name": "node-1", "uid": "node-uid"},
			"warnafter":      now + 3607,
		},
	}
	for _, f := range changes {
		f(c)
	}
	return c
}

// Set sets a claim.
func Set(name string, value any) func(Object) { return func(c Object) { c[name] = value } }

// SetKube sets a member of the claim kubernetes.io.
func SetKube(name string, value any) func(Object) {
	return func(c Object) { c["kubernetes.io"].(Object)[name] = value }
}

// Unset leaves a claim out.
func Unset(name string) func(Object) { return func(c Object) { delete(c, name) } }

// Sign makes a token. An empty kid leaves the header's key ID out.
func Sign(t testing.TB, key, kid string, alg jose.SignatureAlgorithm, claims any) string {
	t.Helper()
	payload, ok := claims.([]byte)
	if !ok {
		var err error
		if payload, err = json.Marshal(claims); err != nil {
			t.Fatal(err)
		}
	}
	return SignWith(t, jose.JSONWebKey{Key: Keys()[key], KeyID: kid}, alg, payload)
}

// SignWith is Sign with any key and payload.
func SignWith(t testing.TB, key any, alg jose.SignatureAlgorithm, payload []byte) string {
	t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: key}, nil)
	if err != nil {
		t.Fatal(err)
	}
	jws, err := signer.Sign(payload)
	if err != nil {
		t.Fatal(err)
	}
	token, err := jws.CompactSerialize()
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// WantDenial checks code and reason; an empty reason wants success.
func WantDenial(t testing.TB, err error, code codes.Code, reason string) {
	t.Helper()
	if reason == "" {
		if err != nil {
			t.Fatalf("got %v, want success", err)
		}
		return
	}
	var d *csr.Denial
	if !errors.As(err, &d) {
		t.Fatalf("got %v, want a denial with %s", err, reason)
	}
	if d.Code != code || d.Reason != reason {
		t.Fatalf("got %s %v, want %s %s", d.Code, d, code, reason)
	}
}
