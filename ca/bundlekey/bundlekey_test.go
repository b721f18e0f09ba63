package bundlekey

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

// TestD6BundleKey: it is made once, lies sealed, and opens for its own trust domain and public key only.
func TestD6BundleKey(t *testing.T) {
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	d := document.New()
	if !must(Make(d, td, sealer)) || must(Make(d, td, sealer)) {
		t.Fatal("it was not made once")
	}
	key := d.State(td).BundleKey
	d = must(document.Decode(must(d.Encode(sealer)), d.Version, sealer))
	signer, err := Open(d.State(td).BundleKey, td, sealer)
	if err != nil {
		t.Fatal(err)
	}
	if err := signer.Sign([]byte("roots")).Verify(key.Public); err != nil || !bytes.Equal(signer.Public(), key.Public) {
		t.Error(err)
	}
	if raw := must(json.Marshal(d)); bytes.Contains(raw, []byte("PRIVATE KEY")) {
		t.Error("it lies in the clear")
	}
	other := must(trust.ParseDomain("other.local"))
	if _, err := Open(key, other, sealer); err == nil || !strings.Contains(err.Error(), "of other.local") {
		t.Errorf("in another trust domain: %v", err)
	}
	if _, err := Open(key, td, must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))); err == nil || !strings.Contains(err.Error(), "wrong sealing key") {
		t.Errorf("with another sealing key: %v", err)
	}
	second := document.New()
	if !must(Make(second, td, sealer)) {
		t.Fatal("not made")
	}
	mixed := *key
	mixed.Public = second.State(td).BundleKey.Public
	if _, err := Open(&mixed, td, sealer); err == nil {
		t.Error("a sealed key passes for that of another public key")
	}
	if again := must(d.Reissue(900)); !bytes.Equal(again.State(td).BundleKey.Public, key.Public) {
		t.Error("an import changes the key that agents have pinned")
	}
	d.State(td).BundleKey = &document.BundleKey{}
	if _, err := Open(d.State(td).BundleKey, td, sealer); err == nil {
		t.Error("an empty key opens")
	}
}
