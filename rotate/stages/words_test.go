package stages

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
)

// TestWordsAreThoseOfWhoIsConnected: of a consumer that several servers have as behind, the one to which it is connected knows why; the
// others only know that they gave it a certificate.
func TestWordsAreThoseOfWhoIsConnected(t *testing.T) {
	now := epoch
	d := document.New()
	d.Version = 5
	d.Logs = []document.LogState{{ID: 1, Replica: "a"}, {ID: 2, Replica: "b"}, {ID: 3, Replica: "c"}}
	d.Domains[td.String()] = &document.DomainState{Generation: 2, Rotation: &document.Rotation{
		ID: "r", Kind: document.KindRoot, Phase: document.PhaseRetire, Version: 5, Since: now, Generation: 2,
	}}
	until := now.Add(time.Hour)
	note := func(name, why string, here bool) board.Note {
		return board.Note{Replica: name, Acknowledged: 5, Evidence: board.Evidence{
			Goal: document.Goal{Generation: 2}, Total: 1, Behind: []board.Behind{{Consumer: 7, Until: until, Here: here}},
			Sample: []board.Laggard{{Consumer: 7, Name: "agent web", Why: why}},
		}}
	}
	guess := note("a", "it was given a certificate", false)
	own := note("b", "the proxy rejected the roots", true)
	for _, notes := range [][]board.Note{
		{guess, own, note("c", "it was given a certificate", false)},
		{own, guess, note("c", "it was given a certificate", false)},
	} {
		gates := Gates(d, td, Evidence{Notes: notes, LeafTTL: time.Hour}, now)
		at := slices.IndexFunc(gates, func(g Gate) bool { return g.Name == GateConsumers })
		if at < 0 || len(gates[at].Waiting) != 1 || !strings.Contains(gates[at].Waiting[0], "the proxy rejected the roots") {
			t.Errorf("gates %+v; want one consumer, with the words of who is connected to it", gates)
		}
	}
}
