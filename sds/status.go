package sds

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// StreamStatus is what one open stream was sent and has confirmed.
type StreamStatus struct {
	API       string // APIStateOfTheWorld and so on
	Peer      Peer
	Node      string // node id that a proxy gave for itself; not proven
	Since     time.Time
	Resources []ResourceStatus // by name
	LastNACK  *NACK            // nil if the proxy rejected nothing
}

// ResourceStatus is one name of a stream.
type ResourceStatus struct {
	Name    string
	Unknown bool      // the name does not exist for this caller
	Sent    Confirmed // zero if nothing was sent; streams of the Workload API have no confirmation beyond this
	Acked   Confirmed // zero until the proxy has acknowledged
}

// Confirmed is a version of a resource's content, and the newest view generation in which this was the content: a
// proxy that acknowledged the content once has thereby what every later generation with the same content asks for.
type Confirmed struct {
	Version    string
	Generation uint64
}

// NACK is a rejection of a response in the proxy's own words.
type NACK struct {
	Time    time.Time
	Names   []string // all that was in the response
	Message string
}

// Streams returns the state of all open streams, oldest first.
func (s *Server) Streams() []StreamStatus {
	s.mu.Lock()
	subs := slices.Collect(maps.Keys(s.streams))
	s.mu.Unlock()
	slices.SortFunc(subs, func(a, b *subscription) int { return a.since.Compare(b.since) })
	out := make([]StreamStatus, len(subs))
	for i, sub := range subs {
		out[i] = sub.status()
	}
	return out
}

func (sub *subscription) status() StreamStatus {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	st := StreamStatus{API: sub.api, Peer: sub.peer, Node: sub.node, Since: sub.since, LastNACK: sub.nack}
	for name, e := range sub.names {
		r := ResourceStatus{Name: name, Unknown: e.told && e.sent == nil, Acked: e.acked}
		if e.sent != nil {
			r.Sent = Confirmed{e.sent.Version, e.current}
		}
		st.Resources = append(st.Resources, r)
	}
	slices.SortFunc(st.Resources, func(a, b ResourceStatus) int { return cmp.Compare(a.Name, b.Name) })
	return st
}
