package document

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"slices"
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

// TestD6RestoringForgetsNoTaint: an older document does not make an authority trustworthy again, whether the taint stands in the
// document that is replaced or the authority has left it already; and agents find the key that they have pinned.
func TestD6RestoringForgetsNoTaint(t *testing.T) {
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	old := New()
	old.State(td).Authorities = []Authority{{ID: "r1", Kind: KindRoot}, {ID: "i1", Kind: KindIssuer}, {ID: "r0", Kind: KindRoot}, {ID: "r2", Kind: KindIssuer}}
	now := New()
	now.Version = 70
	s := now.State(td)
	s.Authorities = []Authority{{ID: "r2", Kind: KindRoot}, {ID: "r0", Kind: KindRoot}}
	started := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	s.Past = []PastRotation{
		{Rotation: Rotation{Reason: ReasonCompromised, FromRoot: "r1", FromIssuer: "i1", ToRoot: "r2", Started: started}},
		{Rotation: Rotation{Reason: ReasonAsked, FromRoot: "r0"}},
	}
	if !must(now.MakeBundleKey(td, sealer)) {
		t.Fatal("not made")
	}
	n := must(old.ReissueBy(now.Version, Import{Actor: "Alice"}))
	kept := n.KeepFrom(now)
	if want := []string{"that root r1 is tainted since 2026-11-30T12:00:00Z: rotate it", "that issuer i1 is tainted since 2026-11-30T12:00:00Z: rotate it",
		"the bundle key " + trust.KeyFingerprint(s.BundleKey.Public)}; !slices.Equal(kept, want) {
		t.Errorf("kept %q", kept)
	}
	for _, a := range n.State(td).Authorities {
		if tainted := a.ID == "r1" || a.ID == "i1"; tainted != (a.Tainted != nil) {
			t.Errorf("%s %s: tainted %v", a.Kind, a.ID, a.Tainted)
		}
	}
	if n.TaintedAt(td) != n.Version || !bytes.Equal(n.State(td).PublicBundleKey(), s.BundleKey.Public) {
		t.Errorf("tainted at %d of %d", n.TaintedAt(td), n.Version)
	}
	if again := n.KeepFrom(now); len(again) > 0 {
		t.Errorf("a second time: %q", again)
	}
	// One that has a key keeps its own; and one that is tainted already its time.
	s.Authorities[0].Tainted = &started
	other := must(now.ReissueBy(now.Version, Import{Actor: "Alice"}))
	own := New()
	own.State(td).Authorities = s.Authorities
	if !must(own.MakeBundleKey(td, sealer)) {
		t.Fatal("not made")
	}
	if kept := own.KeepFrom(other); len(kept) > 0 || bytes.Equal(own.State(td).PublicBundleKey(), other.State(td).PublicBundleKey()) {
		t.Errorf("kept %q", kept)
	}
	if kept := New().KeepFrom(now); len(kept) > 0 {
		t.Errorf("a document of nothing keeps %q", kept)
	}
}
