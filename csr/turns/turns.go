// Package turns owns a queue in which keys take turns: whoever queues much waits behind itself.
//
// It refuses nothing: how much may wait is its user's to say.
package turns

import (
	"container/list"
	"iter"
	"slices"
)

// Queue is a queue in which keys take turns. It is not safe for concurrent use.
type Queue[T comparable] struct {
	order *list.List               // of *entry[T], the next one to serve in front
	byKey map[string]*list.Element // of order
}

type entry[T comparable] struct {
	key   string
	items []T
}

// New returns an empty queue.
func New[T comparable]() *Queue[T] { return &Queue[T]{list.New(), map[string]*list.Element{}} }

// Keys returns how many keys have items.
func (q *Queue[T]) Keys() int { return q.order.Len() }

// All returns all items, those of one key together.
func (q *Queue[T]) All() iter.Seq[T] {
	return func(yield func(T) bool) {
		for e := q.order.Front(); e != nil; e = e.Next() {
			for _, item := range e.Value.(*entry[T]).items {
				if !yield(item) {
					return
				}
			}
		}
	}
}

// Push adds an item behind those of the same key.
func (q *Queue[T]) Push(key string, item T) {
	e := q.byKey[key]
	if e == nil {
		e = q.order.PushBack(&entry[T]{key: key})
		q.byKey[key] = e
	}
	x := e.Value.(*entry[T])
	x.items = append(x.items, item)
}

// First returns the first item of a key, the zero value if there is none.
func (q *Queue[T]) First(key string) (item T) {
	if e := q.byKey[key]; e != nil {
		return e.Value.(*entry[T]).items[0]
	}
	return item
}

// Next returns the key whose turn it is, with its first item, and moves the key to the end.
func (q *Queue[T]) Next() (key string, item T, ok bool) {
	e := q.order.Front()
	if e == nil {
		return "", item, false
	}
	q.order.MoveToBack(e)
	x := e.Value.(*entry[T])
	return x.key, x.items[0], true
}

// Drop removes an item of a key, wherever it stands.
func (q *Queue[T]) Drop(key string, item T) {
	x := q.byKey[key].Value.(*entry[T])
	if i := slices.Index(x.items, item); i == 0 {
		x.items = x.items[1:]
	} else {
		x.items = slices.Delete(x.items, i, i+1)
	}
	if len(x.items) == 0 {
		q.Remove(key)
	}
}

// Remove removes a key with all its items.
func (q *Queue[T]) Remove(key string) {
	q.order.Remove(q.byKey[key])
	delete(q.byKey, key)
}
