package turns

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// model is the rule in the plainest form: sets of keys with rounds, and a search through all for the least.
type model struct {
	round  uint64
	served map[string]bool
	keys   map[string]*modelKey
}

type modelKey struct {
	round uint64
	below *model // nil for an identity
	items []*Item[int]
}

func newModel() *model { return &model{served: map[string]bool{}, keys: map[string]*modelKey{}} }

func (m *model) key(name string) *modelKey {
	k := m.keys[name]
	if k == nil {
		k = &modelKey{round: m.round}
		if m.served[name] {
			k.round++
		}
		m.keys[name] = k
	}
	return k
}

// next returns the key whose turn it is, and the item.
func (m *model) next() (name string, item *Item[int]) {
	for n, k := range m.keys {
		var first *Item[int]
		if k.below != nil {
			_, first = k.below.next()
		} else {
			first = slices.MinFunc(k.items, func(a, b *Item[int]) int {
				if a.before(b) {
					return -1
				}
				return 1
			})
		}
		if best := m.keys[name]; item == nil || k.round < best.round || k.round == best.round && first.before(item) {
			name, item = n, first
		}
	}
	return name, item
}

func (m *model) serve(name string) {
	k := m.keys[name]
	if k.round > m.round {
		m.round = k.round
		clear(m.served)
	}
	m.served[name] = true
	k.round = m.round + 1
}

func (m *model) remove(item *Item[int]) {
	n := m.keys[item.node]
	i := n.below.keys[item.identity]
	i.items = slices.DeleteFunc(i.items, func(x *Item[int]) bool { return x == item })
	if len(i.items) == 0 {
		delete(n.below.keys, item.identity)
	}
	if len(n.below.keys) == 0 {
		delete(m.keys, item.node)
	}
	if len(m.keys) == 0 {
		*m = *newModel()
	}
}

// A queue behaves as the plain rule does, whatever the order of calls.
func TestQueueAgainstModel(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		q, m := New[int](), newModel()
		var in []*Item[int]
		for step := range 300 {
			switch rnd.IntN(5) {
			case 0, 1:
				node, identity := fmt.Sprint(rnd.IntN(5)), fmt.Sprint(rnd.IntN(3))
				item := q.Push(node, identity, start.Add(time.Duration(rnd.IntN(20))*time.Second), step)
				n := m.key(node)
				if n.below == nil {
					n.below = newModel()
				}
				i := n.below.key(identity)
				i.items = append(i.items, item)
				in = append(in, item)
			case 2, 3:
				node, want := m.next()
				if want != nil {
					identity, _ := m.keys[node].below.next()
					m.keys[node].below.serve(identity)
					m.serve(node)
					m.remove(want)
				}
				got := q.Next()
				if got != want {
					t.Fatalf("seed %d step %d: next is %+v, want %+v", seed, step, got, want)
				}
				in = slices.DeleteFunc(in, func(x *Item[int]) bool { return x == got })
			case 4:
				if len(in) > 0 {
					i := rnd.IntN(len(in))
					m.remove(in[i])
					q.Remove(in[i])
					in = slices.Delete(in, i, i+1)
				}
			}
			if n := len(slices.Collect(q.All())); n != len(in) || q.Nodes() != len(m.keys) {
				t.Fatalf("seed %d step %d: %d items of %d nodes, want %d of %d", seed, step, n, q.Nodes(), len(in), len(m.keys))
			}
		}
	}
}

// drain returns the values in the order in which they are served.
func drain(q *Queue[string]) string {
	var out []string
	for item := q.Next(); item != nil; item = q.Next() {
		out = append(out, item.Value)
	}
	return strings.Join(out, " ")
}

func TestWhatIsDueFirstComesFirstWithinARound(t *testing.T) {
	for _, tc := range []struct{ name, in, want string }{ // NODE/IDENTITY@DUE
		{"one of each node: by due", "a/x@9 b/x@3 c/x@5 d/x@1", "d/x@1 b/x@3 c/x@5 a/x@9"},
		{"a node's most urgent decides", "a/x@9 b/x@3 a/y@1 c/x@2", "a/y@1 c/x@2 b/x@3 a/x@9"},
		{"urgency does not give a second turn", "a/x@1 a/y@1 a/z@1 b/x@9", "a/x@1 b/x@9 a/y@1 a/z@1"},
		{"nor within a node", "a/x@1 a/x@1 a/x@2 a/y@9", "a/x@1 a/y@9 a/x@1 a/x@2"},
	} {
		q := New[string]()
		for _, s := range strings.Fields(tc.in) {
			var node, identity string
			var due int
			if _, err := fmt.Sscanf(strings.NewReplacer("/", " ", "@", " ").Replace(s), "%s %s %d", &node, &identity, &due); err != nil {
				t.Fatal(err)
			}
			q.Push(node, identity, start.Add(time.Duration(due)*time.Second), s)
		}
		if got := drain(q); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

// A node that asks again as soon as it is served, always for what is due at once, takes every second turn from one other, not
// all; and the many that do so take one each before whoever waits is served.
func TestWhoAsksAgainAtOnceDoesNotShutOutOthers(t *testing.T) {
	for _, greedy := range []int{1, 10, 100} {
		q := New[string]()
		for i := range greedy {
			q.Push(fmt.Sprint("greedy-", i), "x", start, "greedy")
		}
		q.Push("patient", "x", start.Add(time.Hour), "patient")
		for turn := 0; ; turn++ {
			item := q.Next()
			if item.Value == "patient" {
				break
			}
			if turn > greedy {
				t.Fatalf("%d greedy nodes had %d turns before another had one", greedy, turn)
			}
			q.Push(item.node, item.identity, start, "greedy")
		}
	}
}

func TestServedKeysAreBounded(t *testing.T) {
	q := New[string]()
	q.Push("patient", "x", start.Add(time.Hour), "patient")
	for i := range 3 * maxServed {
		q.Push(fmt.Sprint(i), "x", start, "")
		q.Next()
		if n := len(q.nodes.served); n > maxServed {
			t.Fatalf("%d keys are remembered", n)
		}
	}
	for q.Next() != nil {
	}
	if q.nodes.served != nil || q.nodes.byKey != nil {
		t.Error("an empty queue holds memory")
	}
}

// Who leaves a full queue is of a node that has far more there than the one who comes, however soon that is due; else he is one
// of those due last. Nobody leaves for who is due later.
func TestD19WhoGivesWay(t *testing.T) {
	q := New[int]()
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	if item := q.GivesWay("a", at(0)); item != nil {
		t.Errorf("%+v leaves an empty queue", item)
	}
	for i := range 1000 {
		q.Push(fmt.Sprint("node-", i%100), fmt.Sprint(i), at(1000+i), i) // ten each
	}
	for range 200 {
		if item := q.GivesWay("node-1", at(0)); item == nil || item.Value < 500 { // the worst of 16: 500 once in 2^16
			t.Errorf("%+v leaves", item)
		}
		if item := q.GivesWay("node-1", at(3000)); item != nil {
			t.Errorf("%+v leaves for one that is due later", item)
		}
	}
	for i := range 1000 {
		q.Push("crowd", fmt.Sprint("c", i), at(0), -1)
	}
	crowd := 0
	for range 200 {
		if item := q.GivesWay("new", at(9000)); item != nil && item.node == "crowd" {
			crowd++
		}
	}
	if crowd < 199 {
		t.Errorf("only %d of 200 times one of the crowd leaves for the first of a node", crowd)
	}
	for range 200 {
		if item := q.GivesWay("crowd", at(-1)); item != nil && item.node != "crowd" {
			t.Errorf("%+v leaves for one more of the crowd", item)
		}
	}
	for q.Next() != nil {
	}
	if len(q.all) != 0 || q.Nodes() != 0 {
		t.Errorf("%d items and %d nodes are left", len(q.all), q.Nodes())
	}
}
