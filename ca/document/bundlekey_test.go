package document

import (
	"testing"
	"time"

	"github.com/chancery-project/chancery/trust"
)

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
