package document

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// This file is about what protects agents from who has a stolen key of an authority: the key that signs bundles (decision D6), and the
// note of when an authority was last tainted (D4).

// MakeBundleKey makes the key that signs a trust domain's bundles, if there is none yet, and reports whether it did. It lies sealed in
// the document, whatever key store those of authorities lie in: who gets into that should not be able to tell agents of other roots.
func (d *Document) MakeBundleKey(td trust.Domain, s *keys.Sealer) (bool, error) {
	state := d.State(td)
	if state.BundleKey != nil {
		return false, nil
	}
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return false, fmt.Errorf("making the bundle key: %w", err)
	}
	b := &BundleKey{Public: public, Created: time.Now().UTC().Truncate(time.Second)}
	if b.Key, err = seal(key, b.sealContext(td), s); err != nil {
		return false, err
	}
	state.BundleKey = b
	return true, nil
}

func (b *BundleKey) sealContext(td trust.Domain) string {
	return fmt.Sprintf("bundle key %s of %s", hex.EncodeToString(b.Public), td)
}

// Open returns what signs bundles with the key.
func (b *BundleKey) Open(td trust.Domain, s *keys.Sealer) (*trust.BundleSigner, error) {
	signer, err := unseal(b.Key, b.sealContext(td), s)
	if err != nil {
		return nil, err
	}
	key, ok := signer.(ed25519.PrivateKey)
	if !ok || !bytes.Equal(key.Public().(ed25519.PublicKey), b.Public) {
		return nil, fmt.Errorf("the bundle key of %s is another one than its public key %s", td, trust.KeyFingerprint(b.Public))
	}
	return trust.NewBundleSigner(key), nil
}

// PublicBundleKey returns the key that agents pin; nil if there is none yet.
func (s *DomainState) PublicBundleKey() []byte {
	if s.BundleKey == nil {
		return nil
	}
	return s.BundleKey.Public
}

// NoteTaints notes in a document that is about to be stored whether an authority is tainted in it that was not in the one before. It
// is done for every change, so that none can forget it.
func (d *Document) NoteTaints(before *Document) {
	for name, state := range d.Domains {
		var was map[string]*time.Time
		if old := before.Domains[name]; old != nil {
			was = old.tainted()
		}
		for i := range state.Authorities {
			if a := &state.Authorities[i]; a.Tainted != nil && was[string(a.Kind)+a.ID] == nil {
				state.TaintedAt = d.Version
			}
		}
	}
}

// tainted returns since when authorities are tainted, by kind and ID.
func (s *DomainState) tainted() map[string]*time.Time {
	all := map[string]*time.Time{}
	for i := range s.Authorities {
		if a := &s.Authorities[i]; a.Tainted != nil {
			all[string(a.Kind)+a.ID] = a.Tainted
		}
	}
	return all
}

// TaintedAt returns the version that last tainted an authority of a trust domain; 0 if none did.
func (d *Document) TaintedAt(td trust.Domain) uint64 {
	if state := d.Domains[td.String()]; state != nil {
		return state.TaintedAt
	}
	return 0
}
