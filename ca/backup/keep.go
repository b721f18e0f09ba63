package backup

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// Keep takes over into a restored document what it must not lose of the one that it replaces: that others may know an authority's key,
// which an older document would make active again (decision D6), and the key that agents have pinned. It returns what it kept, in
// words.
func Keep(restored, replaced *document.Document) (kept []string) {
	for _, name := range slices.Sorted(maps.Keys(restored.Domains)) {
		state, old := restored.Domains[name], replaced.Domains[name]
		if old == nil {
			continue
		}
		tainted := everTainted(old)
		for i := range state.Authorities {
			a := &state.Authorities[i]
			if since := tainted[string(a.Kind)+a.ID]; since != nil && a.Tainted == nil {
				a.Tainted, state.TaintedAt = since, restored.Version
				kept = append(kept, fmt.Sprintf("that %s %s is tainted since %s: rotate it", a.Kind, a.ID, since.UTC().Format(time.RFC3339)))
			}
		}
		if state.BundleKey == nil && old.BundleKey != nil {
			state.BundleKey = old.BundleKey
			kept = append(kept, "the bundle key "+trust.KeyFingerprint(old.BundleKey.Public))
		}
	}
	return kept
}

// everTainted returns since when authorities are tainted, by kind and ID; also those that have left after a rotation that a taint began.
func everTainted(s *document.DomainState) map[string]*time.Time {
	all := s.Tainted()
	for i := range s.Past {
		r := &s.Past[i]
		if r.Reason != document.ReasonCompromised || r.Back {
			continue
		}
		for _, key := range []string{string(document.KindRoot) + r.FromRoot, string(document.KindIssuer) + r.FromIssuer} {
			if all[key] == nil {
				all[key] = &r.Started
			}
		}
	}
	return all
}
