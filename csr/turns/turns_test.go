package turns

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// A queue behaves as a plain list of keys and queues does, whatever the order of calls.
func TestQueueAgainstModel(t *testing.T) {
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		f := New[int]()
		var order []string
		items := map[string][]int{}
		forget := func(key string) {
			if len(items[key]) == 0 {
				order = slices.DeleteFunc(order, func(k string) bool { return k == key })
			}
		}
		for step := 1; step <= 200; step++ {
			key := fmt.Sprint(rnd.IntN(5))
			switch rnd.IntN(5) {
			case 0, 1:
				f.Push(key, step)
				if items[key] = append(items[key], step); len(items[key]) == 1 {
					order = append(order, key)
				}
			case 2:
				turn, got, ok := f.Next()
				if ok != (len(order) > 0) {
					t.Fatalf("seed %d: next said %v with %d keys", seed, ok, len(order))
				}
				if !ok {
					continue
				}
				if turn != order[0] || got != items[turn][0] {
					t.Fatalf("seed %d: next was %d of %s, want %d of %s", seed, got, turn, items[order[0]][0], order[0])
				}
				order = append(order[1:], turn)
				f.Drop(turn, got)
				items[turn] = items[turn][1:]
				forget(turn)
			case 3:
				if n := len(items[key]); n > 0 {
					i := rnd.IntN(n)
					f.Drop(key, items[key][i])
					items[key] = slices.Delete(slices.Clone(items[key]), i, i+1)
					forget(key)
				}
			case 4:
				want := 0
				if n := items[key]; len(n) > 0 {
					want = n[0]
				}
				if got := slices.Collect(f.All()); len(got) < len(items[key]) {
					t.Fatalf("seed %d: %d items in all, %d of one key", seed, len(got), len(items[key]))
				}
				if got := f.First(key); got != want {
					t.Fatalf("seed %d: first is %d, want %d", seed, got, want)
				}
			}
			if (f.Keys() == 0) != (len(order) == 0) || len(f.byKey) != len(order) || f.order.Len() != len(order) {
				t.Fatalf("seed %d step %d: %d keys, want %d", seed, step, f.order.Len(), len(order))
			}
		}
	}
}
