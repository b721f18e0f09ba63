package stages

import (
	"fmt"
	"runtime/debug"
	"testing"
)

var (
	onlyE     = [people]bool{0: true}
	onlyC     = [people]bool{2: true}
	eAndC     = [people]bool{0: true, 2: true}
	eAndF     = [people]bool{0: true, 1: true}
	orders    = []string{"abort", "rollback", "pause", "resume"}
	overrides = []string{"override replicas", "override consumers", "override readers", "override stragglers"}
)

func root() []string { return []string{"root"} }

// worlds are those that are explored to their ends; those that short tests leave out come last.
func worlds() (small, large []*world) {
	only2 := [people]uint8{2, 2, 2} // everybody knows b only
	small = []*world{
		{name: "an issuer, a client", start: []string{"issuer"}, consumer: onlyC},
		{name: "an agent of two servers", start: root(), consumer: onlyE},
		{name: "a compromised issuer, orders", start: []string{"issuer compromised"}, consumer: onlyC, home: only2, commands: orders, orders: 2},
		{name: "an agent, a death", start: root(), consumer: onlyE, home: only2, faults: 1, kinds: "die"},
		{name: "overrides", start: root(), consumer: onlyC, home: only2, commands: overrides, orders: 2},
		{name: "a migration, an agent", start: []string{"migrate 0"}, consumer: onlyE, home: only2, commands: []string{"issue e", "issue 100"}, orders: 1},
		{name: "a migration, an agent that reads no kin", start: []string{"migrate 100"}, consumer: onlyE, home: only2, blind: onlyE},
		{name: "a migration that is taken back", start: []string{"migrate 0"}, consumer: onlyC, home: only2, commands: []string{"issue c", "issue 100", "rollback", "abort"}, orders: 2},
	}
	return small, []*world{
		{name: "a client, a reader", start: root(), consumer: onlyC, reader: true},
		{name: "a compromised root, orders", start: []string{"root compromised"}, consumer: onlyC, commands: orders, orders: 2},
		{name: "orders", start: root(), consumer: onlyC, commands: orders, orders: 2},
		{name: "orders for an issuer, a death", start: []string{"issuer"}, consumer: onlyC, home: only2, commands: orders, orders: 2, faults: 1, kinds: "die"},
		{name: "a client, a paused signer", start: root(), consumer: onlyC, faults: 1, kinds: "sleep"},
		{name: "a client, two faults", start: root(), consumer: onlyC, home: only2, faults: 2, kinds: "die sleep"},
		{name: "an issuer, a death", start: []string{"issuer"}, consumer: onlyC, faults: 1, kinds: "die sleep"},
		{name: "an agent, a client", start: root(), consumer: eAndC, home: [people]uint8{0: 2}},
		{name: "an agent loses its table", start: root(), consumer: onlyE, home: only2, faults: 1, kinds: "forget"},
		{name: "a driver that sees old notes, a death", start: root(), consumer: onlyC, home: only2, faults: 1, kinds: "die", board: true},
		{name: "both servers lag", start: root(), consumer: onlyC, lag: true},
		{name: "longer leaves", start: root(), consumer: onlyC, life: 2},
		{name: "a migration, an agent, a client", start: []string{"migrate c"}, consumer: eAndC, home: only2, commands: []string{"issue 100"}},
		{name: "a migration, a reader", start: []string{"migrate 0"}, consumer: onlyC, home: only2, reader: true, commands: []string{"issue 100"}},
		{name: "a migration, orders", start: []string{"migrate 0"}, consumer: onlyC, home: only2, commands: []string{"issue c", "issue 100", "rollback", "pause", "resume"}, orders: 2},
		{name: "a migration, a death", start: []string{"migrate 100"}, consumer: onlyC, home: only2, commands: []string{"rollback"}, orders: 1, faults: 1, kinds: "die"},
		{name: "a migration, a paused signer", start: []string{"migrate 100"}, consumer: onlyC, home: only2, commands: []string{"rollback"}, orders: 1, faults: 1, kinds: "sleep"},
		{name: "two agents, one of each server", start: root(), consumer: eAndF, home: [people]uint8{2, 1}},
	}
}

// TestD2D4Exploration: in no state that can be reached is a certificate in use that somebody does not accept (invariants 4 to 7), or does a
// tainted authority sign again (D6); and from each the rotation comes to its end once faults stop.
func TestD2D4Exploration(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	all, large := worlds()
	if !testing.Short() {
		all = append(all, large...)
	}
	sum := 0
	for _, w := range all {
		o := w.explore(maxStates, true)
		sum += o.states
		fmt.Printf("%-40s %7d states\n", w.name, o.states)
		if o.bad != "" {
			t.Errorf("%s: %s\n%s", w.name, o.bad, o.path)
		} else if !o.all {
			t.Errorf("%s: more than %d states", w.name, maxStates)
		}
	}
	fmt.Printf("explored %d states\n", sum)
}

const maxStates = 250_000
