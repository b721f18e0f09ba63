// Package bundlekey owns the key that signs a trust domain's bundles (decision D6) as it lies in the authority document: sealed, whatever
// key store the keys of authorities lie in. Who gets into that should not be able to tell agents of other roots.
//
// It refuses to make a second one, which agents that have pinned the first would refuse.
package bundlekey

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// Make makes the key, if a document has none yet, and reports whether it did.
func Make(d *document.Document, td trust.Domain, s *keys.Sealer) (bool, error) {
	state := d.State(td)
	if state.BundleKey != nil {
		return false, nil
	}
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return false, fmt.Errorf("making the bundle key: %w", err)
	}
	pem, err := trust.EncodeKey(key)
	if err != nil {
		return false, err
	}
	state.BundleKey = &document.BundleKey{Public: public, Key: s.Seal(pem, context(td, public)), Created: time.Now().UTC().Truncate(time.Second)}
	return true, nil
}

// context is what the sealed key is bound to.
func context(td trust.Domain, public []byte) string {
	return fmt.Sprintf("bundle key %s of %s", hex.EncodeToString(public), td)
}

// Open returns what signs bundles with the key.
func Open(b *document.BundleKey, td trust.Domain, s *keys.Sealer) (*trust.BundleSigner, error) {
	pem, err := s.Open(b.Key, context(td, b.Public))
	if err != nil {
		return nil, err
	}
	signer, err := trust.ParseKey(pem)
	if err != nil {
		return nil, err
	}
	key, ok := signer.(ed25519.PrivateKey)
	if !ok || !bytes.Equal(key.Public().(ed25519.PublicKey), b.Public) {
		return nil, fmt.Errorf("the bundle key of %s is another one than its public key %s", td, trust.KeyFingerprint(b.Public))
	}
	return trust.NewBundleSigner(key), nil
}
