// Package wake lets many waiters wait for the same channel to be closed without a goroutine for each: a node agent
// has thousands of streams that are silent nearly always, and a goroutine with its stack is the dearest part of one.
package wake

import "sync"

// Hub wakes waiters. The zero value is ready. Its methods are safe for concurrent use.
type Hub struct {
	mu sync.Mutex // guards groups, their members, and the waiters' group
	// groups has one goroutine for each channel that somebody waits for.
	groups map[<-chan struct{}]*group
}

type group struct {
	members map[*Waiter]struct{}
	empty   chan struct{} // closed when the last member has left
}

// Waiter is called, in a goroutine of its own, each time the channel that it waits for is closed.
type Waiter struct {
	Wake func()

	channel <-chan struct{}
	group   *group
}

// Wait makes w wait for c, and no longer for what it waited for before. It is woken at once if c is closed already,
// and once only for the same c.
func (h *Hub) Wait(w *Waiter, c <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w.channel == c && w.group != nil {
		return
	}
	h.leave(w)
	g := h.groups[c]
	if g == nil {
		if h.groups == nil {
			h.groups = make(map[<-chan struct{}]*group)
		}
		g = &group{make(map[*Waiter]struct{}), make(chan struct{})}
		h.groups[c] = g
		go h.watch(c, g)
	}
	g.members[w] = struct{}{}
	w.channel, w.group = c, g
}

// Leave ends the wait. A call of Wake that has begun may still be running.
func (h *Hub) Leave(w *Waiter) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.leave(w)
}

func (h *Hub) leave(w *Waiter) {
	g := w.group
	if g == nil {
		return
	}
	delete(g.members, w)
	if len(g.members) == 0 && h.groups[w.channel] == g {
		delete(h.groups, w.channel)
		close(g.empty)
	}
	w.group = nil
}

func (h *Hub) watch(c <-chan struct{}, g *group) {
	select {
	case <-c:
	case <-g.empty:
		return
	}
	h.mu.Lock()
	members := g.members
	g.members = nil
	if h.groups[c] == g {
		delete(h.groups, c)
	}
	h.mu.Unlock()
	for w := range members {
		go w.Wake()
	}
}
