package document

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// TestD6BundleKey: it is made once, lies sealed, and opens for its own trust domain and public key only.
func TestD6BundleKey(t *testing.T) {
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	d := New()
	if !must(d.MakeBundleKey(td, sealer)) || must(d.MakeBundleKey(td, sealer)) {
		t.Fatal("it was not made once")
	}
	key := d.State(td).BundleKey
	d = must(Decode(must(d.Encode(sealer)), d.Version, sealer))
	signer, err := d.State(td).BundleKey.Open(td, sealer)
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
	if _, err := key.Open(other, sealer); err == nil || !strings.Contains(err.Error(), "of other.local") {
		t.Errorf("in another trust domain: %v", err)
	}
	if _, err := key.Open(td, must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))); err == nil || !strings.Contains(err.Error(), "wrong sealing key") {
		t.Errorf("with another sealing key: %v", err)
	}
	second := New()
	if !must(second.MakeBundleKey(td, sealer)) {
		t.Fatal("not made")
	}
	mixed := *key
	mixed.Public = second.State(td).BundleKey.Public
	if _, err := mixed.Open(td, sealer); err == nil {
		t.Error("a sealed key passes for that of another public key")
	}
	if again := must(d.Reissue(900)); !bytes.Equal(again.State(td).BundleKey.Public, key.Public) {
		t.Error("an import changes the key that agents have pinned")
	}
	d.State(td).BundleKey = &BundleKey{}
	if _, err := d.State(td).BundleKey.Open(td, sealer); err == nil {
		t.Error("an empty key opens")
	}
}

// TestD4TaintIsNoted in the version that brings it, whoever does it, and never again.
func TestD4TaintIsNoted(t *testing.T) {
	d := New()
	d.State(td).Authorities = []Authority{{ID: "aa", Kind: KindRoot}, {ID: "aa", Kind: KindIssuer}, {ID: "bb", Kind: KindIssuer}}
	now := time.Now()
	step := func(change func(s *DomainState)) *Document {
		t.Helper()
		n := must(d.Next([]byte("stored")))
		change(n.State(td))
		n.NoteTaints(d)
		d = n
		return n
	}
	if got := step(func(*DomainState) {}).TaintedAt(td); got != 0 {
		t.Errorf("untainted: %d", got)
	}
	if got := step(func(s *DomainState) { s.Authorities[0].Tainted = &now }).TaintedAt(td); got != 3 {
		t.Errorf("a tainted root: %d", got)
	}
	if got := step(func(s *DomainState) { s.Generation++ }).TaintedAt(td); got != 3 {
		t.Errorf("a change after it: %d", got)
	}
	if got := step(func(s *DomainState) { s.Authorities[1].Tainted = &now }).TaintedAt(td); got != 5 {
		t.Errorf("the issuer of the same ID: %d", got)
	}
	if got := step(func(s *DomainState) { s.Authorities = s.Authorities[2:] }).TaintedAt(td); got != 5 {
		t.Errorf("once they have left: %d", got)
	}
	if got := step(func(s *DomainState) {
		s.Authorities = append(s.Authorities, Authority{ID: "cc", Kind: KindRoot, Tainted: &now})
	}).TaintedAt(td); got != 7 {
		t.Errorf("one that comes tainted: %d", got)
	}
	if got := d.TaintedAt(must(trust.ParseDomain("other.local"))); got != 0 {
		t.Errorf("another trust domain: %d", got)
	}
	// Restored, it is above every document from before, also those of another line.
	if n := must(d.Reissue(900)); n.TaintedAt(td) != n.Version {
		t.Errorf("restored: %d in version %d", n.TaintedAt(td), n.Version)
	}
	if n := must(New().Reissue(900)); n.TaintedAt(td) != 0 {
		t.Errorf("restored without a taint: %d", n.TaintedAt(td))
	}
}
