package trust

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"strings"
	"testing"
)

// bundleKey returns a key that is the same for the same number.
func bundleKey(n byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{n}, ed25519.SeedSize))
}

// TestD6SignedBundle holds that only the pinned key's signature over these very bytes is taken.
func TestD6SignedBundle(t *testing.T) {
	key, other := bundleKey(1), bundleKey(2)
	pinned := key.Public().(ed25519.PublicKey)
	good := SignBundle(key, []byte("roots"))
	for _, p := range []ed25519.PublicKey{nil, pinned} {
		if err := good.Verify(p); err != nil {
			t.Error(err)
		}
	}
	for name, c := range map[string]struct {
		s      SignedBundle
		pinned ed25519.PublicKey
		want   string
	}{
		"nothing":           {SignedBundle{}, pinned, "it is empty"},
		"other bytes":       {SignedBundle{[]byte("rootz"), good.Signature, good.Key}, pinned, "does not verify"},
		"other bytes, nil":  {SignedBundle{[]byte("rootz"), good.Signature, good.Key}, nil, "does not verify"},
		"another key":       {SignBundle(other, []byte("roots")), pinned, "pinned is " + KeyFingerprint(pinned)},
		"key put in place":  {SignedBundle{good.Bundle, SignBundle(other, good.Bundle).Signature, good.Key}, pinned, "does not verify"},
		"signature of nil":  {SignedBundle{good.Bundle, nil, good.Key}, pinned, "its signature has 0 bytes"},
		"long signature":    {SignedBundle{good.Bundle, append(good.Signature[:64:64], 0), good.Key}, pinned, "its signature has 65 bytes"},
		"no key":            {SignedBundle{good.Bundle, good.Signature, nil}, nil, "its key has 0 bytes"},
		"a long key":        {SignedBundle{good.Bundle, good.Signature, append(good.Key[:32:32], 0)}, nil, "its key has 33 bytes"},
		"pinned is no key":  {good, ed25519.PublicKey{}, "the pinned key has 0 bytes"},
		"too large":         {SignBundle(key, make([]byte, MaxSignedBundle+1)), pinned, "at most"},
		"without separator": {SignedBundle{good.Bundle, ed25519.Sign(key, good.Bundle), good.Key}, pinned, "does not verify"},
	} {
		if err := c.s.Verify(c.pinned); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
}

// TestSignedBundleText pins what is signed: other implementations verify it, and agents outlive servers.
func TestSignedBundleText(t *testing.T) {
	key := bundleKey(1)
	public := key.Public().(ed25519.PublicKey)
	sum := sha256.Sum256(public)
	text := append(append([]byte("chancery bundle v1\n"), sum[:]...), "roots"...)
	if s := SignBundle(key, []byte("roots")); !ed25519.Verify(public, text, s.Signature) {
		t.Error("what is signed is not what chancery.proto says")
	}
}

func FuzzSignedBundle(f *testing.F) {
	key := bundleKey(1)
	pinned := key.Public().(ed25519.PublicKey)
	good := SignBundle(key, []byte("roots"))
	f.Add(good.Bundle, good.Signature, good.Key)
	f.Add([]byte("x"), good.Signature, good.Key)
	f.Add([]byte{}, []byte{}, []byte{})
	f.Fuzz(func(t *testing.T, bundle, signature, public []byte) {
		s := SignedBundle{bundle, signature, public}
		if s.Verify(pinned) == nil && (!bytes.Equal(bundle, good.Bundle) || !bytes.Equal(signature, good.Signature)) {
			t.Errorf("a bundle that was not signed is taken: %x", bundle)
		}
		if s.Verify(pinned) == nil && s.Verify(nil) != nil {
			t.Error("what the pinned key signed does not verify by itself")
		}
	})
}

// TestD6SignedFederation holds that what is said of foreign trust domains counts by the pinned key alone, and that no signature of one kind
// passes for the other.
func TestD6SignedFederation(t *testing.T) {
	key, other := bundleKey(1), bundleKey(2)
	pinned := key.Public().(ed25519.PublicKey)
	good, bundle := SignFederation(key, []byte("foreign")), SignBundle(key, []byte("foreign"))
	if err := good.Verify(pinned); err != nil {
		t.Error(err)
	}
	if s := NewBundleSigner(key).SignFederation([]byte("foreign")); !bytes.Equal(s.Signature, good.Signature) || !bytes.Equal(s.Key, good.Key) {
		t.Error("a signer signs something else")
	}
	for name, c := range map[string]struct {
		s      SignedFederation
		pinned ed25519.PublicKey
		want   string
	}{
		"nothing":      {SignedFederation{}, pinned, "it is empty"},
		"not pinned":   {good, nil, "no bundle key is pinned"},
		"another key":  {SignFederation(other, []byte("foreign")), pinned, "pinned is " + KeyFingerprint(pinned)},
		"other bytes":  {SignedFederation{[]byte("foreigm"), good.Signature, good.Key}, pinned, "does not verify"},
		"of a bundle":  {SignedFederation{bundle.Bundle, bundle.Signature, bundle.Key}, pinned, "does not verify"},
		"no signature": {SignedFederation{good.Federation, nil, good.Key}, pinned, "its signature has 0 bytes"},
		"too large":    {SignFederation(key, make([]byte, MaxSignedFederation+1)), pinned, "at most"},
	} {
		if err := c.s.Verify(c.pinned); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
	if err := (SignedBundle{good.Federation, good.Signature, good.Key}).Verify(pinned); err == nil {
		t.Error("what was signed of foreign trust domains passes for a bundle")
	}
	sum := sha256.Sum256(pinned)
	text := append(append([]byte("chancery federation v1\n"), sum[:]...), "foreign"...)
	if !ed25519.Verify(pinned, text, good.Signature) {
		t.Error("what is signed is not what chancery.proto says")
	}
}
