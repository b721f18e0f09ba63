// Package turns owns the order in which requests are served when there are more than can be: keys take turns, and within a
// round the one that is due first comes first.
//
// There are two levels of keys: nodes, and identities on a node. In each round a node that has something waiting is served
// once; which of its identities it is spent on follows the same rule. So the rounds bound what anybody can take from others,
// however much he queues and whatever he claims to be due; due times only order those who stand in one round. Strict
// priority by due times would let a flood of urgent requests shut all others out; turns alone would let an SVID end for want
// of the one turn before which hours are left to others.
//
// It refuses nothing: how much may wait is its user's to say; it names who should give way.
package turns

import (
	"container/heap"
	"iter"
	"math/rand/v2"
	"slices"
	"time"
)

// maxServed bounds how many keys are remembered to have had their turn. Beyond it the round counts as over: with so many,
// nobody waits much longer because one of them is served twice.
const maxServed = 20_000

// asked is how many of those that wait are looked at to find one that gives way.
const asked = 16

// Queue is what waits. It is not safe for concurrent use.
type Queue[T any] struct {
	nodes level[T]
	all   []*Item[T] // in no order
	count uint64     // items so far: of two that are due at once the earlier is first
}

// Item is one request that waits.
type Item[T any] struct {
	Value          T
	node, identity string
	due            time.Time
	number         uint64
	index          int // in its identity's heap
	place          int // in all
}

// New returns an empty queue.
func New[T any]() *Queue[T] { return &Queue[T]{} }

// Nodes returns how many nodes have items.
func (q *Queue[T]) Nodes() int { return len(q.nodes.order) }

// Push adds an item of an identity on a node.
func (q *Queue[T]) Push(node, identity string, due time.Time, value T) *Item[T] {
	q.count++
	item := &Item[T]{Value: value, node: node, identity: identity, due: due, number: q.count}
	n := q.nodes.entry(node)
	if n.identities == nil {
		n.identities = new(level[T])
	}
	i := n.identities.entry(identity)
	heap.Push(&i.items, item)
	n.count++
	n.identities.place(i)
	q.nodes.place(n)
	item.place = len(q.all)
	q.all = append(q.all, item)
	return item
}

// Next takes out the item whose turn it is, nil if there is none.
func (q *Queue[T]) Next() *Item[T] {
	if len(q.nodes.order) == 0 {
		return nil
	}
	n := q.nodes.order[0]
	i := n.identities.order[0]
	item := i.items[0]
	n.identities.serve(i)
	q.nodes.serve(n)
	q.Remove(item)
	return item
}

// Remove takes out an item that is in the queue.
func (q *Queue[T]) Remove(item *Item[T]) {
	n := q.nodes.byKey[item.node]
	i := n.identities.byKey[item.identity]
	heap.Remove(&i.items, item.index)
	n.count--
	last := len(q.all) - 1
	q.all[item.place] = q.all[last]
	q.all[item.place].place = item.place
	q.all[last], q.all = nil, q.all[:last]
	if len(i.items) > 0 {
		n.identities.place(i)
	} else {
		n.identities.drop(i)
	}
	if len(n.identities.order) > 0 {
		q.nodes.place(n)
	} else {
		q.nodes.drop(n)
	}
	if len(q.nodes.order) == 0 { // nobody waits: rounds begin anew, and what never shrinks does
		q.nodes, q.all = level[T]{}, nil
	}
}

// GivesWay returns who should leave a full queue for somebody who comes from a node and is due then; nil if he should not stay
// himself. First it is a node that has many there that gives way to one that has few, so that nobody is shut out by who fills the
// queue; then who is due late to who is due soon. It asks a few, drawn at random: most of them are of the nodes that have many,
// and the worst of them is among the last of all.
func (q *Queue[T]) GivesWay(node string, due time.Time) *Item[T] {
	if len(q.all) == 0 {
		return nil
	}
	crowd := 1 // with him
	if n := q.nodes.byKey[node]; n != nil {
		crowd += n.count
	}
	var last *Item[T]
	for range asked {
		item := q.all[rand.N(len(q.all))]
		n := q.nodes.byKey[item.node].count
		if crowded(n, crowd) || !crowded(crowd, n) && item.due.After(due) {
			last, crowd, due = item, n, item.due
		}
	}
	return last
}

// crowded reports whether a node has many items, compared to another one.
func crowded(n, other int) bool { return n > 2*other+8 }

// All returns all items, in no order.
func (q *Queue[T]) All() iter.Seq[*Item[T]] { return slices.Values(q.all) }

// level is a set of keys that take turns.
type level[T any] struct {
	order  entries[T] // a heap
	byKey  map[string]*entry[T]
	round  uint64
	served map[string]struct{} // those whose turn of this round is over, also if they have nothing left that waits
}

// entry is a key that has items: of its own, or of the keys below it.
type entry[T any] struct {
	key        string
	round      uint64 // in which it is next served
	index      int    // in order; -1 until it is placed
	count      int    // of a node: items of all its identities
	identities *level[T]
	items      items[T]
}

// first returns the item for which the entry's turn would be used.
func (e *entry[T]) first() *Item[T] {
	if e.identities != nil {
		return e.identities.order[0].first()
	}
	return e.items[0]
}

// entry returns that of a key. Who comes after his turn of this round stands in the next one, or he who asks again at once
// would be served for ever before others that are due later.
func (l *level[T]) entry(key string) *entry[T] {
	if e := l.byKey[key]; e != nil {
		return e
	}
	if l.byKey == nil {
		l.byKey = map[string]*entry[T]{}
	}
	e := &entry[T]{key: key, round: l.round, index: -1}
	if _, over := l.served[key]; over {
		e.round++
	}
	l.byKey[key] = e
	return e
}

// place puts an entry where it belongs now.
func (l *level[T]) place(e *entry[T]) {
	if e.index < 0 {
		heap.Push(&l.order, e)
		return
	}
	heap.Fix(&l.order, e.index)
}

func (l *level[T]) drop(e *entry[T]) {
	heap.Remove(&l.order, e.index)
	delete(l.byKey, e.key)
}

// serve notes that the first entry has its turn. Its place is not up to date until the item has been removed.
func (l *level[T]) serve(e *entry[T]) {
	if e.round > l.round || len(l.served) >= maxServed { // all of the round before have had theirs
		l.round = e.round
		clear(l.served)
	}
	if l.served == nil {
		l.served = map[string]struct{}{}
	}
	l.served[e.key] = struct{}{}
	e.round = l.round + 1
}

// entries is a heap: by round, then by what is due first.
type entries[T any] []*entry[T]

func (h entries[T]) Len() int { return len(h) }
func (h entries[T]) Less(a, b int) bool {
	if h[a].round != h[b].round {
		return h[a].round < h[b].round
	}
	return h[a].first().before(h[b].first())
}
func (h entries[T]) Swap(a, b int) {
	h[a], h[b] = h[b], h[a]
	h[a].index, h[b].index = a, b
}
func (h *entries[T]) Push(x any) {
	e := x.(*entry[T])
	e.index = len(*h)
	*h = append(*h, e)
}
func (h *entries[T]) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last], *h = nil, (*h)[:last]
	return e
}

func (i *Item[T]) before(j *Item[T]) bool {
	if !i.due.Equal(j.due) {
		return i.due.Before(j.due)
	}
	return i.number < j.number
}

// items is a heap of one identity's items.
type items[T any] []*Item[T]

func (h items[T]) Len() int           { return len(h) }
func (h items[T]) Less(a, b int) bool { return h[a].before(h[b]) }
func (h items[T]) Swap(a, b int) {
	h[a], h[b] = h[b], h[a]
	h[a].index, h[b].index = a, b
}
func (h *items[T]) Push(x any) {
	i := x.(*Item[T])
	i.index = len(*h)
	*h = append(*h, i)
}
func (h *items[T]) Pop() any {
	last := len(*h) - 1
	i := (*h)[last]
	(*h)[last], *h = nil, (*h)[:last]
	return i
}
