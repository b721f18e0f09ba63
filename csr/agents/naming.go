package agents

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// Bounds of what agents ask for of naming, and of what they are told.
const (
	maxServices   = 2000 // of one stream
	maxService    = 320  // bytes of a name
	maxAsked      = 1_000_000
	maxPlaceAsked = 8 * maxServices // services that all streams of one identity and place ask for
	maxNaming     = 4 << 20         // bytes of one message
	maxIdentities = 1000            // of one service
	// namingPause is how long after what a stream was told of naming it is told more: a rollout is many changes.
	namingPause = 50 * time.Millisecond
)

// naming is who asks for which service, and what there is to say of it. Each answer is encoded once, for all who ask. Its lock comes
// before the hub's.
type naming struct {
	of      func(service string) (ids []string, known bool)
	warn    func(message string, args ...any)
	seldom  rate.Sometimes
	mu      sync.Mutex // guards all below
	ready   bool       // the source knows
	all     map[string]*service
	asked   int            // services of all streams,
	byPlace map[string]int // and of those of one place
}

// service is one that somebody asks for. Its fields belong to naming's lock.
type service struct {
	name    string
	encoded []byte     // as a part of an update; nil while nothing is known, or where it is too much
	part    mem.Buffer // that, as it is sent
	streams map[*stream]struct{}
}

// NamingChanged is told for which services Config.Naming may say something else than before; without names: for all, as once the source
// has read everything for the first time. Before that agents are told nothing. It must not be called with a lock that Config.Naming
// takes.
func (h *Hub) NamingChanged(services ...string) {
	n := &h.naming
	n.mu.Lock()
	defer n.mu.Unlock()
	told := map[*stream]struct{}{}
	news := func(s *service) {
		if s == nil || !n.look(s) {
			return
		}
		for to := range s.streams {
			to.await(s)
			told[to] = struct{}{}
		}
	}
	if len(services) == 0 || !n.ready {
		n.ready = true
		for _, s := range n.all {
			news(s)
		}
	}
	for _, name := range services {
		news(n.all[name])
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range told {
		s.newNames()
	}
}

// look brings what is said of a service up to date, and reports whether it is something else than before. Caller holds mu.
func (n *naming) look(s *service) bool {
	if !n.ready {
		return false
	}
	m := &chanceryv1.ServiceIdentities{Service: s.name, Unknown: true}
	if n.of != nil {
		ids, known := n.of(s.name)
		m.Unknown = !known
		m.SpiffeIds = slices.Compact(slices.Sorted(slices.Values(ids)))
	}
	next, err := encodeService(m)
	if err != nil { // the agents keep what they have: a list of which a part is missing would be a lie
		n.seldom.Do(func() {
			n.warn("agents are not told who may serve a service", "service", s.name, "reason", err.Error())
		})
		next = nil
	}
	if bytes.Equal(next, s.encoded) {
		return false
	}
	s.encoded, s.part = next, mem.SliceBuffer(next)
	return next != nil
}

// encodeService returns an answer as a field of an update.
func encodeService(m *chanceryv1.ServiceIdentities) ([]byte, error) {
	if k := len(m.GetSpiffeIds()); k > maxIdentities {
		return nil, fmt.Errorf("%d identities; at most %d can be", k, maxIdentities)
	}
	const field = 10 // SyncUpdate.naming
	b, err := proto.Marshal(m)
	if err != nil {
		return nil, err
	}
	return protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), b), nil
}

// ask takes over which services a stream asks for.
func (h *Hub) ask(s *stream, names []string) {
	n := &h.naming
	n.mu.Lock()
	defer n.mu.Unlock()
	if s.left || slices.EqualFunc(s.services, names, func(x *service, name string) bool { return x.name == name }) {
		return
	}
	room := min(maxAsked-n.asked, maxPlaceAsked-n.byPlace[s.place]) + len(s.services)
	if len(names) > room {
		n.seldom.Do(func() {
			n.warn("agents ask for more services than there is room for; they are not told of the rest", "agent", s.id, "asked", len(names), "room", room)
		})
		names = names[:room]
	}
	next := make([]*service, 0, len(names))
	for _, name := range names {
		x := n.all[name]
		if x == nil {
			x = &service{name: strings.Clone(name), streams: map[*stream]struct{}{}} // not with the message around it
			n.look(x)
			n.all[x.name] = x
		}
		x.streams[s] = struct{}{}
		next = append(next, x)
	}
	kept := make(map[*service]bool, len(next))
	for _, x := range next {
		kept[x] = true
	}
	for _, x := range s.services {
		delete(kept, x)
	}
	for x := range kept { // those that it asks for anew
		s.await(x)
	}
	for _, x := range next {
		kept[x] = true
	}
	n.release(s, kept)
	s.services = next
	n.count(s, len(next))
	if len(s.untold) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	s.newNames()
}

// await notes that there is something to say of a service. Caller holds naming's lock.
func (s *stream) await(x *service) {
	if s.untold == nil {
		s.untold = map[*service]struct{}{}
	}
	s.untold[x] = struct{}{}
}

// release forgets the services of a stream, but for some. Caller holds mu.
func (n *naming) release(s *stream, kept map[*service]bool) {
	for _, x := range s.services {
		if kept[x] {
			continue
		}
		delete(s.untold, x)
		if delete(x.streams, s); len(x.streams) == 0 {
			delete(n.all, x.name)
		}
	}
	n.count(s, -len(s.services))
	s.services = nil
}

func (n *naming) count(s *stream, more int) {
	n.asked += more
	if n.byPlace[s.place] += more; n.byPlace[s.place] == 0 {
		delete(n.byPlace, s.place)
	}
}

// leave forgets a stream.
func (n *naming) leave(s *stream) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s.left = true
	n.release(s, nil)
}

// parts returns what a stream has not been told yet of the services that it asks for. What does not fit into one message comes with the next.
func (h *Hub) parts(s *stream) mem.BufferSlice {
	n := &h.naming
	n.mu.Lock()
	defer n.mu.Unlock()
	out, size := make(mem.BufferSlice, 0, len(s.untold)), 0
	for _, x := range s.services {
		if _, is := s.untold[x]; !is {
			continue
		}
		if size += len(x.encoded); size > maxNaming {
			h.mu.Lock()
			defer h.mu.Unlock()
			s.newNames()
			return out
		}
		delete(s.untold, x)
		if x.encoded != nil {
			out = append(out, x.part)
		}
	}
	s.untold = nil
	return out
}

// newNames has a stream told of its services. Caller holds the hub's lock.
func (s *stream) newNames() {
	if !s.named {
		s.named = true
		s.look.Reset(max(0, time.Until(s.paused)))
	}
}

// checkServices reports what is wrong with the services that an agent asks for.
func checkServices(names []string) error {
	if n := len(names); n > maxServices {
		return status.Errorf(codes.InvalidArgument, "%d services are asked for; at most %d can be", n, maxServices)
	}
	for i, name := range names {
		if !isService(name) {
			return status.Errorf(codes.InvalidArgument, "service %.80q is asked for; a name is NAMESPACE/NAME, of at most %d bytes", name, maxService)
		}
		if i > 0 && name <= names[i-1] {
			return status.Errorf(codes.InvalidArgument, "service %q is asked for after %q; expected in order, and each once", name, names[i-1])
		}
	}
	return nil
}

// isService reports whether a text can be the name of a service.
func isService(name string) bool {
	ns, rest, ok := strings.Cut(name, "/")
	plain := func(r rune) bool { return r > ' ' && r < 0x7f && r != '/' }
	return ok && len(name) <= maxService && ns != "" && rest != "" && strings.IndexFunc(ns+rest, func(r rune) bool { return !plain(r) }) < 0
}
