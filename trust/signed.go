package trust

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
)

// MaxSignedBundle and MaxSignedFederation bound the bytes that are signed, and verified.
const (
	MaxSignedBundle     = 1 << 20
	MaxSignedFederation = 1 << 20
)

// What is signed begins with what it is, so that no signature passes for one of anything else.
const (
	bundlePrefix     = "chancery bundle v1\n"
	federationPrefix = "chancery federation v1\n"
)

// SignedBundle is a bundle, serialized, whose truth does not depend on the connection that it came by (decision D6): it is signed by
// a key that readers have pinned, and that has nothing to do with the keys of roots. What the bytes mean is for who reads them, after
// Verify.
type SignedBundle struct {
	Bundle    []byte
	Signature []byte // Ed25519
	Key       []byte // public, 32 bytes
}

// SignedFederation is what a server knows of foreign trust domains, serialized, signed by the same key as a SignedBundle.
type SignedFederation struct {
	Federation []byte
	Signature  []byte // Ed25519
	Key        []byte // public, 32 bytes
}

// SignBundle signs a serialized bundle.
func SignBundle(key ed25519.PrivateKey, bundle []byte) SignedBundle {
	public := key.Public().(ed25519.PublicKey)
	return SignedBundle{Bundle: bundle, Signature: ed25519.Sign(key, signedText(bundlePrefix, public, bundle)), Key: public}
}

// SignFederation signs what is known of foreign trust domains, serialized.
func SignFederation(key ed25519.PrivateKey, federation []byte) SignedFederation {
	public := key.Public().(ed25519.PublicKey)
	return SignedFederation{Federation: federation, Signature: ed25519.Sign(key, signedText(federationPrefix, public, federation)), Key: public}
}

func signedText(prefix string, key ed25519.PublicKey, content []byte) []byte {
	sum := sha256.Sum256(key)
	text := make([]byte, 0, len(prefix)+len(sum)+len(content))
	text = append(text, prefix...)
	text = append(text, sum[:]...)
	return append(text, content...)
}

// Verify checks the signature by the pinned key. Nil stands for the key that came along: for who pins it now, at enrolment, and
// trusts the connection for that.
func (s SignedBundle) Verify(pinned ed25519.PublicKey) error {
	return verifySigned("signed bundle", bundlePrefix, MaxSignedBundle, s.Bundle, s.Signature, s.Key, pinned)
}

// Verify checks the signature by the pinned key; without one nothing is right.
func (s SignedFederation) Verify(pinned ed25519.PublicKey) error {
	if pinned == nil {
		return errors.New("signed federation: no bundle key is pinned that could vouch for it")
	}
	return verifySigned("signed federation", federationPrefix, MaxSignedFederation, s.Federation, s.Signature, s.Key, pinned)
}

func verifySigned(what, prefix string, most int, content, signature, key []byte, pinned ed25519.PublicKey) error {
	switch {
	case len(content) == 0:
		return fmt.Errorf("%s: it is empty", what)
	case len(content) > most:
		return fmt.Errorf("%s: it has %d bytes; at most %d are read", what, len(content), most)
	case len(key) != ed25519.PublicKeySize:
		return fmt.Errorf("%s: its key has %d bytes; an Ed25519 key has %d", what, len(key), ed25519.PublicKeySize)
	case len(signature) != ed25519.SignatureSize:
		return fmt.Errorf("%s: its signature has %d bytes; one by Ed25519 has %d", what, len(signature), ed25519.SignatureSize)
	case pinned != nil && len(pinned) != ed25519.PublicKeySize:
		return fmt.Errorf("%s: the pinned key has %d bytes; an Ed25519 key has %d", what, len(pinned), ed25519.PublicKeySize)
	case pinned != nil && !bytes.Equal(pinned, key):
		return fmt.Errorf("%s: it is signed by the key %s; pinned is %s", what, KeyFingerprint(key), KeyFingerprint(pinned))
	case !ed25519.Verify(key, signedText(prefix, key, content), signature):
		return fmt.Errorf("%s: the signature by the key %s does not verify: it was changed on its way", what, KeyFingerprint(key))
	}
	return nil
}

// KeyFingerprint is how people are shown a bundle key, and compare two: the beginning of its SHA-256 in hex.
func KeyFingerprint(key []byte) string {
	sum := sha256.Sum256(key)
	return hex.EncodeToString(sum[:16])
}

// BundleSigner signs bundles, and what is known of foreign ones, by one key.
type BundleSigner struct{ key ed25519.PrivateKey }

// NewBundleSigner returns a signer by a key.
func NewBundleSigner(key ed25519.PrivateKey) *BundleSigner { return &BundleSigner{key} }

// Sign signs a serialized bundle.
func (s *BundleSigner) Sign(bundle []byte) SignedBundle { return SignBundle(s.key, bundle) }

// SignFederation signs what is known of foreign trust domains, serialized.
func (s *BundleSigner) SignFederation(federation []byte) SignedFederation {
	return SignFederation(s.key, federation)
}

// Public returns the public key, which agents pin.
func (s *BundleSigner) Public() ed25519.PublicKey { return s.key.Public().(ed25519.PublicKey) }
