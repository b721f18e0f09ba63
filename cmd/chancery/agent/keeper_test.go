package agent

import (
	"testing"

	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
)

// TestInvariant6ViewOfOneIdentity: a view is made once for each identity, and shows none where there is none, also
// after there was one.
func TestInvariant6ViewOfOneIdentity(t *testing.T) {
	bundle := new(trust.Bundle)
	a, b := &trust.Identity{Bundle: bundle}, &trust.Identity{Bundle: new(trust.Bundle)}
	v := &views{view: new(sds.View)}
	var last uint64
	for i, step := range []struct {
		id  *trust.Identity
		new bool
	}{{nil, false}, {a, true}, {a, false}, {b, true}, {nil, true}, {nil, false}, {a, true}} {
		view := v.make(inputs{id: step.id})
		if (view.Generation > last) != step.new {
			t.Errorf("step %d: generation %d after %d", i, view.Generation, last)
		}
		last = view.Generation
		if step.id == nil {
			if len(view.Identities)+len(view.Bundles) != 0 {
				t.Errorf("step %d: a view of nothing shows %+v", i, view)
			}
			continue
		}
		if len(view.Identities) != 1 || view.Identities[0] != step.id || len(view.Bundles) != 1 || view.Bundles[0] != step.id.Bundle {
			t.Errorf("step %d: the view shows %+v", i, view)
		}
	}
}
