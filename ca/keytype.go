package ca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/mldsa"
	"crypto/rand"
	"crypto/rsa"
	"fmt"

	"github.com/chancery-project/chancery/ca/tbs"
)

// KeyType names a kind of key as profiles and configs do.
type KeyType string

// The key types. RSA stands for every size from 2,048 to 8,192 bits. MLDSA65 is post-quantum (FIPS 204, RFC 9881), and for
// roots and issuers only: Envoy 1.40 verifies them there, but does no handshake with such a leaf.
const (
	P256    KeyType = "p256"
	P384    KeyType = "p384"
	Ed25519 KeyType = "ed25519"
	RSA     KeyType = "rsa"
	MLDSA65 KeyType = "mldsa65"
)

const (
	minRSABits = 2048
	maxRSABits = 8192 // verifying larger keys costs every peer
)

// ParseKeyType reads the name of a key type.
func ParseKeyType(s string) (KeyType, error) {
	switch t := KeyType(s); t {
	case P256, P384, Ed25519, RSA, MLDSA65:
		return t, nil
	}
	return "", fmt.Errorf("key type %q is not known; use p256, p384, ed25519, rsa or, for a root or issuer, mldsa65", s)
}

// TypeOf returns the type of a public key, or an error that says why such a key is never certified. That an ECDSA key is
// a point of its curve is checked where keys are parsed, and again where Prepare encodes them.
func TypeOf(pub crypto.PublicKey) (KeyType, error) {
	switch k := pub.(type) {
	case *ecdsa.PublicKey:
		switch k.Curve {
		case elliptic.P256():
			return P256, nil
		case elliptic.P384():
			return P384, nil
		}
		return "", fmt.Errorf("ECDSA curve %s is not accepted; use P-256 or P-384", k.Curve.Params().Name)
	case ed25519.PublicKey:
		return Ed25519, nil
	case *rsa.PublicKey:
		if n := k.N.BitLen(); n < minRSABits || n > maxRSABits {
			return "", fmt.Errorf("RSA key has %d bits; use %d to %d", n, minRSABits, maxRSABits)
		}
		if k.E < 65537 || k.E%2 == 0 {
			return "", fmt.Errorf("RSA exponent %d is not accepted; use 65537", k.E)
		}
		return RSA, nil
	case *mldsa.PublicKey:
		if k.Parameters() != mldsa.MLDSA65() {
			return "", fmt.Errorf("%s keys are not accepted; use ML-DSA-65", k.Parameters())
		}
		return MLDSA65, nil
	}
	return "", fmt.Errorf("keys of type %T are not accepted; use ECDSA P-256 or P-384, Ed25519, or RSA", pub)
}

// GenerateKey makes a new private key; RSA keys have 2,048 bits.
func GenerateKey(t KeyType) (crypto.Signer, error) {
	switch t {
	case P256:
		return ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case P384:
		return ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	case Ed25519:
		_, key, err := ed25519.GenerateKey(rand.Reader)
		return key, err
	case RSA:
		return rsa.GenerateKey(rand.Reader, minRSABits)
	case MLDSA65:
		return mldsa.GenerateKey(mldsa.MLDSA65())
	}
	return nil, fmt.Errorf("key type %q is not known", t)
}

// algorithmOf returns how an issuing key signs.
func algorithmOf(pub crypto.PublicKey) (tbs.Algorithm, error) {
	if _, err := TypeOf(pub); err != nil {
		return tbs.Algorithm{}, fmt.Errorf("issuing key: %w", err)
	}
	return tbs.AlgorithmOf(pub)
}
