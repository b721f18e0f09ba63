package trust

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
)

// MaxSignedBundle bounds the bytes of a bundle that are signed, and verified.
const MaxSignedBundle = 1 << 20

// signedPrefix keeps a bundle's signature from passing for one of anything else.
const signedPrefix = "chancery bundle v1\n"

// SignedBundle is a bundle, serialized, whose truth does not depend on the connection that it came by (decision D6): it is signed by
// a key that readers have pinned, and that has nothing to do with the keys of roots. What the bytes mean is for who reads them, after
// Verify.
type SignedBundle struct {
	Bundle    []byte
	Signature []byte // Ed25519
	Key       []byte // public, 32 bytes
}

// SignBundle signs a serialized bundle.
func SignBundle(key ed25519.PrivateKey, bundle []byte) SignedBundle {
	public := key.Public().(ed25519.PublicKey)
	return SignedBundle{Bundle: bundle, Signature: ed25519.Sign(key, signedText(public, bundle)), Key: public}
}

func signedText(key ed25519.PublicKey, bundle []byte) []byte {
	sum := sha256.Sum256(key)
	text := make([]byte, 0, len(signedPrefix)+len(sum)+len(bundle))
	text = append(text, signedPrefix...)
	text = append(text, sum[:]...)
	return append(text, bundle...)
}

// Verify checks the signature by the pinned key. Nil stands for the key that came along: for who pins it now, at enrolment, and
// trusts the connection for that.
func (s SignedBundle) Verify(pinned ed25519.PublicKey) error {
	switch {
	case len(s.Bundle) == 0:
		return errors.New("signed bundle: it is empty")
	case len(s.Bundle) > MaxSignedBundle:
		return fmt.Errorf("signed bundle: it has %d bytes; at most %d are read", len(s.Bundle), MaxSignedBundle)
	case len(s.Key) != ed25519.PublicKeySize:
		return fmt.Errorf("signed bundle: its key has %d bytes; an Ed25519 key has %d", len(s.Key), ed25519.PublicKeySize)
	case len(s.Signature) != ed25519.SignatureSize:
		return fmt.Errorf("signed bundle: its signature has %d bytes; one by Ed25519 has %d", len(s.Signature), ed25519.SignatureSize)
	case pinned != nil && len(pinned) != ed25519.PublicKeySize:
		return fmt.Errorf("signed bundle: the pinned key has %d bytes; an Ed25519 key has %d", len(pinned), ed25519.PublicKeySize)
	case pinned != nil && !bytes.Equal(pinned, s.Key):
		return fmt.Errorf("signed bundle: it is signed by the key %s; pinned is %s", KeyFingerprint(s.Key), KeyFingerprint(pinned))
	case !ed25519.Verify(s.Key, signedText(s.Key, s.Bundle), s.Signature):
		return fmt.Errorf("signed bundle: the signature by the key %s does not verify: it was changed on its way", KeyFingerprint(s.Key))
	}
	return nil
}

// KeyFingerprint is how people are shown a bundle key, and compare two: the beginning of its SHA-256 in hex.
func KeyFingerprint(key []byte) string {
	sum := sha256.Sum256(key)
	return hex.EncodeToString(sum[:16])
}

// BundleSigner signs bundles by one key.
type BundleSigner struct{ key ed25519.PrivateKey }

// NewBundleSigner returns a signer by a key.
func NewBundleSigner(key ed25519.PrivateKey) *BundleSigner { return &BundleSigner{key} }

// Sign signs a serialized bundle.
func (s *BundleSigner) Sign(bundle []byte) SignedBundle { return SignBundle(s.key, bundle) }

// Public returns the public key, which agents pin.
func (s *BundleSigner) Public() ed25519.PublicKey { return s.key.Public().(ed25519.PublicKey) }
