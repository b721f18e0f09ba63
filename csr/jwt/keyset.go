package jwt

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/json"
)

const (
	maxKeySet  = 1 << 20
	maxKeys    = 100
	minRSABits = 2048
)

// key is one public key. A key that stays in the set over a reload stays the same object, so that verdicts can point
// at it and end with it.
type key struct {
	id      string
	alg     string // if the set says so, the only algorithm
	public  crypto.PublicKey
	retired atomic.Bool // it has left the set
}

// fits reports whether the key can verify the algorithm's signatures.
func (k *key) fits(alg jose.SignatureAlgorithm) bool {
	if k.alg != "" && k.alg != string(alg) {
		return false
	}
	p, _ := k.public.(*ecdsa.PublicKey)
	switch alg {
	case jose.RS256, jose.RS384, jose.RS512, jose.PS256, jose.PS384, jose.PS512:
		_, ok := k.public.(*rsa.PublicKey)
		return ok
	case jose.ES256:
		return p != nil && p.Curve == elliptic.P256()
	case jose.ES384:
		return p != nil && p.Curve == elliptic.P384()
	case jose.ES512:
		return p != nil && p.Curve == elliptic.P521()
	case jose.EdDSA:
		_, ok := k.public.(ed25519.PublicKey)
		return ok
	}
	return false
}

func (k *key) same(o *key) bool {
	p, ok := k.public.(interface{ Equal(crypto.PublicKey) bool })
	return ok && k.id == o.id && k.alg == o.alg && p.Equal(o.public)
}

// keySet is an immutable set of keys.
type keySet []*key

// find returns the key of the ID that fits the algorithm. A token without a key ID gets the only key that fits.
func (s keySet) find(kid string, alg jose.SignatureAlgorithm) *key {
	var found *key
	for _, k := range s {
		switch {
		case !k.fits(alg) || kid != "" && k.id != kid:
		case kid != "":
			return k
		case found != nil:
			return nil
		default:
			found = k
		}
	}
	return found
}

// parseKeySet reads a JSON Web Key Set. A key of a kind that we do not know is left out, as RFC 7517 section 5 wants:
// newer API servers publish post-quantum keys. skipped says which and why. A private or symmetric key spoils the set.
func parseKeySet(data []byte) (set keySet, skipped []string, err error) {
	if len(data) > maxKeySet {
		return nil, nil, fmt.Errorf("the key set is larger than %d bytes", maxKeySet)
	}
	var raw struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(data, &raw); err != nil {
		return nil, nil, errors.New("it is no JSON Web Key Set; it should be like {\"keys\": [...]}")
	}
	if len(raw.Keys) > maxKeys {
		return nil, nil, fmt.Errorf("the key set has %d keys; at most %d are allowed", len(raw.Keys), maxKeys)
	}
	for i, r := range raw.Keys {
		if hasSecret(r) {
			return nil, nil, fmt.Errorf("key %d is a private or symmetric key; the set should hold public keys only, and this one should be replaced, as it may have been read", i)
		}
		k, err := parseKey(r)
		if err == nil && slices.ContainsFunc(set, func(o *key) bool { return o.id == k.id && o.alg == k.alg && sameKind(o, k) }) {
			err = fmt.Errorf("key ID %.80q occurs twice", k.id)
		}
		if err != nil {
			skipped = append(skipped, fmt.Sprintf("key %d: %v", i, err))
			continue
		}
		set = append(set, k)
	}
	if len(set) == 0 {
		return nil, skipped, fmt.Errorf("the key set has no key that can be used; left out: %q", skipped)
	}
	return set, skipped, nil
}

// hasSecret reports whether a JWK has a member that only private and symmetric keys have (RFC 7518 section 6, RFC 9964).
func hasSecret(jwk []byte) bool {
	var members map[string]json.RawMessage
	if json.Unmarshal(jwk, &members) != nil {
		return false
	}
	for _, m := range []string{"d", "p", "q", "dp", "dq", "qi", "oth", "k", "priv"} {
		if _, ok := members[m]; ok {
			return true
		}
	}
	return false
}

func parseKey(raw []byte) (*key, error) {
	var kind struct {
		Type string `json:"kty"`
		Use  string `json:"use"`
		Alg  string `json:"alg"`
	}
	if err := json.Unmarshal(raw, &kind); err != nil {
		return nil, errors.New("it is no JSON Web Key")
	}
	if !slices.Contains([]string{"RSA", "EC", "OKP"}, kind.Type) {
		return nil, fmt.Errorf("its kty is %.40q", kind.Type)
	}
	if kind.Use != "" && kind.Use != "sig" {
		return nil, fmt.Errorf("its use is %.40q, not sig", kind.Use)
	}
	if kind.Alg != "" && !slices.Contains(algorithms, jose.SignatureAlgorithm(kind.Alg)) {
		return nil, fmt.Errorf("its alg is %.40q", kind.Alg)
	}
	var jwk jose.JSONWebKey
	if err := jwk.UnmarshalJSON(raw); err != nil {
		return nil, err
	}
	k := &key{id: jwk.KeyID, alg: jwk.Algorithm, public: jwk.Key}
	if p, ok := jwk.Key.(*rsa.PublicKey); ok && p.N.BitLen() < minRSABits {
		return nil, fmt.Errorf("it has %d bits; at least %d are needed", p.N.BitLen(), minRSABits)
	}
	if !slices.ContainsFunc(algorithms, k.fits) {
		return nil, errors.New("its alg does not fit its type")
	}
	return k, nil
}

func sameKind(a, b *key) bool {
	return slices.ContainsFunc(algorithms, func(alg jose.SignatureAlgorithm) bool { return a.fits(alg) && b.fits(alg) })
}
