package agents

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/trust"
)

// Bounds of what an agent says of trust domains.
const (
	maxUnknown     = 20
	maxFormer      = 20
	maxFormerBytes = 300     // of one name
	maxAllFormer   = 4 << 20 // bytes of all streams
	maxShown       = 100     // agents that Former returns
)

// Former is an agent whose consumers ask for resources of a trust domain that is left.
type Former struct {
	Agent string
	Names []string
}

// Former returns the agents whose consumers ask for resources of a trust domain, in order, as far as there are not too many; and how many
// there are.
func (h *Hub) Former(d trust.Domain) (some []Former, all int) {
	h.mu.Lock()
	for s := range h.streams {
		var names []string
		for _, name := range s.former {
			if name == d.URI() || strings.HasPrefix(name, d.URI()+"/") {
				names = append(names, name)
			}
		}
		if len(names) > 0 {
			some = append(some, Former{"agent " + s.id + " at " + s.remote, names})
		}
	}
	h.mu.Unlock()
	slices.SortFunc(some, func(a, b Former) int { return strings.Compare(a.Agent, b.Agent) })
	return some[:min(len(some), maxShown)], len(some)
}

// keepFormer takes over which names of former domains are asked for. Caller holds mu.
func (h *Hub) keepFormer(s *stream, names []string) {
	if slices.Equal(s.former, names) {
		return
	}
	size := 0
	for _, name := range s.former {
		size -= len(name)
	}
	h.former += size
	size = 0
	for i, name := range names {
		if h.former+size+len(name) > maxAllFormer {
			names = names[:i]
			break
		}
		size += len(name)
	}
	h.former += size
	s.former = slices.Clone(names)
}

// checkDomains reports what is wrong with what an agent says of trust domains.
func checkDomains(m *chanceryv1.SyncRequest) error {
	if n := len(m.GetUnknownAuthorities()); n > maxUnknown {
		return status.Errorf(codes.InvalidArgument, "%d trust domains are said to have unknown authorities; at most %d are read", n, maxUnknown)
	}
	for _, d := range m.GetUnknownAuthorities() {
		if _, err := trust.ParseDomain(d); err != nil {
			return status.Errorf(codes.InvalidArgument, "unknown authorities: %v", err)
		}
	}
	if n := len(m.GetFormerNames()); n > maxFormer {
		return status.Errorf(codes.InvalidArgument, "%d names of former trust domains are reported; at most %d are read", n, maxFormer)
	}
	for _, name := range m.GetFormerNames() {
		if len(name) > maxFormerBytes {
			return status.Errorf(codes.InvalidArgument, "a name of a former trust domain has %d bytes; at most %d are read", len(name), maxFormerBytes)
		}
	}
	return nil
}

// OnUnknown has somebody told of each foreign trust domain of which an agent has met a certificate that no root vouches for. tell must not
// block.
func (h *Hub) OnUnknown(tell func(trust.Domain)) { h.told.Store(&tell) }

// unknown passes on of which trust domains an agent has met unknown authorities, that it has not said with its last message. It returns
// what it has said.
func (h *Hub) unknown(said, before []string) []string {
	tell := h.told.Load()
	if tell == nil {
		return nil
	}
	for _, name := range said {
		if slices.Contains(before, name) {
			continue
		}
		if d, err := trust.ParseDomain(name); err == nil {
			(*tell)(d)
		}
	}
	return said
}
