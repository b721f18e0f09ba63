package document

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// Import says that a document was restored from an export, and who did it.
type Import struct {
	Time     time.Time `json:"time"`
	Actor    string    `json:"actor"`
	Version  uint64    `json:"version"`  // that was restored
	Exported time.Time `json:"exported"` // when it was exported
}

// ReissueBy is Reissue for an export that somebody restores, who is noted. Replicas stay listed: who lost its log or its mark is to be
// forgotten by name.
func (d *Document) ReissueBy(seen uint64, by Import) (*Document, error) {
	if by.Actor == "" || len(by.Actor) > maxActor {
		return nil, fmt.Errorf("the actor's name has %d bytes; it should have 1 to %d", len(by.Actor), maxActor)
	}
	n, err := d.Reissue(seen)
	if err != nil {
		return nil, err
	}
	by.Version = d.Version
	n.Imported = &by
	return n, nil
}

// KeepFrom takes over from the document that is replaced what a restored one must not lose: that others may know an authority's key,
// which an older document would make active again (decision D6), and the key that agents have pinned. It returns what it kept, in
// words.
func (d *Document) KeepFrom(replaced *Document) (kept []string) {
	for _, name := range slices.Sorted(maps.Keys(d.Domains)) {
		state, old := d.Domains[name], replaced.Domains[name]
		if old == nil {
			continue
		}
		tainted := old.everTainted()
		for i := range state.Authorities {
			a := &state.Authorities[i]
			if since := tainted[string(a.Kind)+a.ID]; since != nil && a.Tainted == nil {
				a.Tainted, state.TaintedAt = since, d.Version
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

// everTainted is tainted, and those that have left after a rotation that a taint began.
func (s *DomainState) everTainted() map[string]*time.Time {
	all := s.tainted()
	for i := range s.Past {
		r := &s.Past[i]
		if r.Reason != ReasonCompromised || r.Back {
			continue
		}
		for _, key := range []string{string(KindRoot) + r.FromRoot, string(KindIssuer) + r.FromIssuer} {
			if all[key] == nil {
				all[key] = &r.Started
			}
		}
	}
	return all
}
