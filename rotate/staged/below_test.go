package staged

import (
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/below"
	"github.com/chancery-project/chancery/rotate/stages"
)

// TestIssuersBelowHoldTheRoot: a root under which a server below has an issuer is neither followed nor retired before that has ended,
// unless an admin says so in each of the two phases; an issuer's rotation is none of its business.
func TestIssuersBelowHoldTheRoot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a", nil)
		a := w.drives("a")
		root := must(a.k.Document().Active(td, document.KindRoot)).ID
		begun, end := time.Now(), time.Now().Add(30*time.Hour)
		if err := a.k.Change(t.Context(), func(next *document.Document) error {
			next.State(td).Below = []below.Issuers{{To: "spiffe://cluster.local/ns/chancery/sa/east", Root: root, Until: end}, {To: "x", Root: root, Until: begun}}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		plan := must(a.m.Plan(Asked{Kind: document.KindRoot, Reason: document.ReasonAsked}))
		if notes := strings.Join(plan.Notes, "\n"); !strings.Contains(notes, "server below spiffe://cluster.local/ns/chancery/sa/east has an issuer") || strings.Contains(notes, "below x") {
			t.Errorf("the plan says %s", notes)
		}
		w.begin(t, "a", document.KindIssuer)
		w.until("a", "")
		w.begin(t, "a", document.KindRoot)
		w.until("a", document.PhaseDistribute)
		for range 10 {
			w.acknowledge("a")
			w.drives("a").m.look(t.Context(), time.Now())
			time.Sleep(time.Minute)
		}
		gates := a.m.Status().Gates
		last := gates[len(gates)-1]
		if w.phase() != document.PhaseDistribute || !allBut(gates, stages.GateIssuers) || last.Passed || len(last.Waiting) != 1 || !strings.Contains(last.Waiting[0], "east") {
			t.Fatalf("phase %s with gates %+v", w.phase(), gates)
		}
		if err := a.m.Change(t.Context(), "uid 0", Change{What: "override", Gate: stages.GateIssuers, Because: "it has both roots"}); err != nil {
			t.Fatal(err)
		}
		w.until("a", document.PhaseReissue)
		time.Sleep(time.Until(end) - time.Hour)
		w.until("a", document.PhaseRetire)
		if took := time.Since(begun); took < 30*time.Hour {
			t.Errorf("the root left after %s, before the issuer below had ended", took)
		}
	})
}

func (w *world) begin(t *testing.T, name string, kind document.AuthorityKind) {
	t.Helper()
	if err := w.drives(name).m.Start(t.Context(), "uid 0", Asked{Kind: kind, Reason: document.ReasonAsked}); err != nil {
		t.Fatal(err)
	}
}
