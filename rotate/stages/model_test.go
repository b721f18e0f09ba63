package stages

import (
	"fmt"
	"testing"
	"time"
)

var (
	onlyE    = [people]bool{0: true}
	onlyC    = [people]bool{2: true}
	eAndC    = [people]bool{0: true, 2: true}
	eAndF    = [people]bool{0: true, 1: true}
	orders   = []string{"abort", "rollback", "pause", "resume"}
	override = []string{"override replicas", "override consumers", "override readers", "override stragglers"}
)

func root() []string { return []string{"root"} }

// worlds are those that are explored to their ends. The first few are small.
func worlds() []*world {
	return []*world{
		{name: "a client, a reader", start: root(), consumer: onlyC, reader: true},
		{name: "an issuer, a client", start: []string{"issuer"}, consumer: onlyC},
		{name: "a compromised root, orders", start: []string{"root compromised"}, consumer: onlyC, commands: orders, orders: 2},
		{name: "a compromised issuer, orders", start: []string{"issuer compromised"}, consumer: onlyC, home: [people]uint8{2: 2}, commands: orders, orders: 2},
		{name: "an agent of one server, a death", start: root(), consumer: onlyE, home: [people]uint8{0: 2}, faults: 1, kinds: "die"},
		{name: "a client, a death", start: root(), consumer: onlyC, faults: 1, kinds: "die"},
		{name: "a client, a paused signer", start: root(), consumer: onlyC, faults: 1, kinds: "sleep"},
		{name: "an issuer, a death", start: []string{"issuer"}, consumer: onlyC, faults: 1, kinds: "die sleep"},
		{name: "orders", start: root(), consumer: onlyC, commands: orders, orders: 2},
		{name: "overrides", start: root(), consumer: onlyC, home: [people]uint8{2: 2}, commands: override, orders: 1},
		{name: "an agent, a client", start: root(), consumer: eAndC, home: [people]uint8{0: 2}},
		{name: "an agent loses its table", start: root(), consumer: onlyE, faults: 1, kinds: "forget"},
		{name: "a driver that sees old notes", start: root(), consumer: onlyC, home: [people]uint8{2: 2}, faults: 1, kinds: "die", board: true},
		{name: "a lags, too", start: root(), consumer: onlyC, lag: true},
		{name: "longer leaves", start: root(), consumer: onlyC, life: 2},
		{name: "two agents, a client", start: root(), consumer: [people]bool{true, true, true}, home: [people]uint8{2, 1, 2}},
	}
}

func TestSize(t *testing.T) {
	for _, w := range worlds() {
		start := time.Now()
		o := w.explore(150_000, true)
		fmt.Printf("%-30s %7d states all=%v %s %q\n    %s\n", w.name, o.states, o.all, time.Since(start).Round(time.Millisecond), o.bad, o.path)
	}
}
