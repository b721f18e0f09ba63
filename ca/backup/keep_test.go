package backup

import (
	"bytes"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/bundlekey"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// TestD6RestoringForgetsNoTaint: an older document does not make an authority trustworthy again, whether the taint stands in the
// document that is replaced or the authority has left it already; and agents find the key that they have pinned.
func TestD6RestoringForgetsNoTaint(t *testing.T) {
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	old := document.New()
	old.State(td).Authorities = []document.Authority{{ID: "r1", Kind: document.KindRoot}, {ID: "i1", Kind: document.KindIssuer}, {ID: "r0", Kind: document.KindRoot}, {ID: "r2", Kind: document.KindIssuer}}
	now := document.New()
	now.Version = 70
	s := now.State(td)
	s.Authorities = []document.Authority{{ID: "r2", Kind: document.KindRoot}, {ID: "r0", Kind: document.KindRoot}}
	started := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	s.Past = []document.PastRotation{
		{Rotation: document.Rotation{Reason: document.ReasonCompromised, FromRoot: "r1", FromIssuer: "i1", ToRoot: "r2", Started: started}},
		{Rotation: document.Rotation{Reason: document.ReasonAsked, FromRoot: "r0"}},
	}
	if !must(bundlekey.Make(now, td, sealer)) {
		t.Fatal("not made")
	}
	n := must(old.ReissueBy(now.Version, document.Import{Actor: "Alice"}))
	kept := Keep(n, now)
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
	if again := Keep(n, now); len(again) > 0 {
		t.Errorf("a second time: %q", again)
	}
	// One that has a key keeps its own; and one that is tainted already its time.
	s.Authorities[0].Tainted = &started
	other := must(now.ReissueBy(now.Version, document.Import{Actor: "Alice"}))
	own := document.New()
	own.State(td).Authorities = s.Authorities
	if !must(bundlekey.Make(own, td, sealer)) {
		t.Fatal("not made")
	}
	if kept := Keep(own, other); len(kept) > 0 || bytes.Equal(own.State(td).PublicBundleKey(), other.State(td).PublicBundleKey()) {
		t.Errorf("kept %q", kept)
	}
	if kept := Keep(document.New(), now); len(kept) > 0 {
		t.Errorf("a document of nothing keeps %q", kept)
	}
}
