package jwt

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"math/big"
	"strings"
	"testing"

	"github.com/go-jose/go-jose/v4"

	"github.com/chancery-project/chancery/csr/jwt/jwttest"
	"github.com/chancery-project/chancery/trust"
)

// FuzzToken: no token makes us panic, and one that is accepted has a signature that the standard library verifies
// over its very bytes, made by the key that its header names, and names an account that makes a SPIFFE ID.
func FuzzToken(f *testing.F) {
	c := fileVerifier(f, "p256", "ed")
	forever := jwttest.Set("exp", 4e9)
	for _, t := range []string{
		jwttest.Sign(f, "p256", "p256", jose.ES256, jwttest.Claims(forever)), jwttest.Sign(f, "p256", "", jose.ES256, jwttest.Claims(forever)),
		jwttest.Sign(f, "ed", "ed", jose.EdDSA, jwttest.Claims(forever)), jwttest.Sign(f, "ed", "ed", jose.EdDSA, jwttest.Claims(forever, jwttest.SetKube("pod", nil))),
		jwttest.Sign(f, "ed", "ed", jose.EdDSA, jwttest.Claims(jwttest.Set("exp", 1e18))),
		"", "..", "e30.e30.", "eyJhbGciOiJub25lIn0.e30.",
	} {
		f.Add(t)
	}
	domain, _ := trust.ParseDomain("cluster.local")
	f.Fuzz(func(t *testing.T, token string) {
		caller, err := verify(t, c, token)
		if err != nil {
			return
		}
		if !stdVerify(t, token) {
			t.Errorf("accepted a token whose signature does not verify: %s", token)
		}
		if _, err := trust.WorkloadID(domain, caller.Namespace, caller.ServiceAccount); err != nil {
			t.Errorf("accepted a token whose account makes no SPIFFE ID: %v", err)
		}
	})
}

// FuzzClaims: no payload, however signed, makes us panic or take on names that make no SPIFFE ID.
func FuzzClaims(f *testing.F) {
	c := fileVerifier(f, "ed")
	domain, _ := trust.ParseDomain("cluster.local")
	for _, o := range []jwttest.Object{jwttest.Claims(), jwttest.Claims(jwttest.SetKube("pod", nil)), jwttest.Claims(jwttest.Set("aud", "istio-ca")), jwttest.Claims(jwttest.Unset("exp")), {}} {
		b, _ := json.Marshal(o)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		v, err := c.readClaims(payload)
		if err != nil {
			return
		}
		if _, err := trust.WorkloadID(domain, v.caller.Namespace, v.caller.ServiceAccount); err != nil {
			t.Errorf("%q: %v", payload, err)
		}
		if v.expires.IsZero() || !printable(v.caller.CredentialID) || (v.caller.PodName == "") != (v.caller.PodUID == "") {
			t.Errorf("%q: %+v", payload, v)
		}
	})
}

// FuzzKeySet: keys that are taken are public, strong, of a kind that fits an algorithm, and each can be told from the others.
func FuzzKeySet(f *testing.F) {
	f.Add(jwttest.KeySet(f, "p256"))
	f.Add(jwttest.KeySet(f, "ed", "p256"))
	for _, s := range []string{
		`{"keys":[]}`, `{"keys":[{"kty":"oct","k":"AAAA"}]}`, `{"keys":[{"kty":"RSA","n":"AQAB","e":"AQAB","kid":"a"}]}`,
		`{"keys":[{"kty":"EC","crv":"P-256","x":"AA","y":"AA","use":"enc"}]}`, `{"keys":[{"kty":"OKP","crv":"Ed25519","x":"","d":""}]}`, `{"keys":{}}`, `[]`, ``,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		set, _, err := parseKeySet(data)
		if err != nil {
			return
		}
		if len(set) == 0 || len(set) > maxKeys {
			t.Fatalf("%d keys", len(set))
		}
		for i, k := range set {
			if p, ok := k.public.(*rsa.PublicKey); ok && p.N.BitLen() < minRSABits {
				t.Errorf("an RSA key of %d bits", p.N.BitLen())
			}
			if _, secret := k.public.(crypto.Signer); secret {
				t.Error("a private key")
			}
			for _, o := range set[:i] {
				if k.id == o.id && k.alg == o.alg && sameKind(k, o) {
					t.Errorf("two keys have the ID %q", k.id)
				}
			}
		}
	})
}

// stdVerify verifies the algorithms of FuzzToken's seeds without go-jose.
func stdVerify(t *testing.T, token string) bool {
	parts := strings.Split(token, ".")
	rawHeader, _ := base64.RawURLEncoding.DecodeString(parts[0])
	sig, _ := base64.RawURLEncoding.DecodeString(parts[2])
	var h struct{ Alg string }
	if err := json.Unmarshal(rawHeader, &h); err != nil {
		t.Fatalf("accepted a token with the header %q", rawHeader)
	}
	input := []byte(parts[0] + "." + parts[1])
	sum := sha256.Sum256(input)
	switch h.Alg {
	case "ES256":
		r, s := new(big.Int).SetBytes(sig[:32]), new(big.Int).SetBytes(sig[32:])
		return ecdsa.Verify(jwttest.Keys()["p256"].Public().(*ecdsa.PublicKey), sum[:], r, s)
	case "EdDSA":
		return ed25519.Verify(jwttest.Keys()["ed"].Public().(ed25519.PublicKey), input, sig)
	}
	t.Errorf("accepted a token with the algorithm %q", h.Alg)
	return false
}
