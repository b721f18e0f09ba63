package trust

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// NamingStanding is what is known of a service.
type NamingStanding int

const (
	// NamingUnread: the objects that say who may serve what have not all been read yet, so nothing can be said of any service.
	NamingUnread NamingStanding = iota
	// NamingUnknown: nothing says that there is such a service.
	NamingUnknown
	// NamingKnown: the list is what counts. An empty one means that nobody may serve it, and never that anybody may.
	NamingKnown
)

// Naming says which identities may serve a service: secure naming. It is live, and safe for concurrent use; trust/naming keeps it up
// to date. Services are named "NAMESPACE/NAME"; see naming.CheckService.
type Naming struct {
	mu       sync.RWMutex // guards the rest; the lists themselves never change
	read     bool
	services map[string][]ID
}

// NewNaming returns an index that has read nothing yet.
func NewNaming() *Naming { return &Naming{services: map[string][]ID{}} }

// Allowed returns who may serve a service, in order; nobody if it is not known. Callers must not change the list.
func (n *Naming) Allowed(service string) []ID {
	ids, _ := n.Lookup(service)
	return ids
}

// Lookup is Allowed, and says what an empty list means.
func (n *Naming) Lookup(service string) ([]ID, NamingStanding) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if !n.read {
		return nil, NamingUnread
	}
	ids, known := n.services[service]
	if !known {
		return nil, NamingUnknown
	}
	return slices.Clip(ids), NamingKnown
}

// Permits returns nil if an identity may serve a service, else why not: for clients in Go, which have verified that the peer is this
// identity (Verify) and ask whether it is the one that was meant.
func (n *Naming) Permits(service string, id ID) error {
	ids, standing := n.Lookup(service)
	switch standing {
	case NamingUnread:
		return fmt.Errorf("%s may not serve %.300s: who may is not known yet", id, service)
	case NamingUnknown:
		return fmt.Errorf("%s may not serve %.300s: there is no such service", id, service)
	}
	if _, found := slices.BinarySearchFunc(ids, id, CompareIDs); !found {
		return fmt.Errorf("%s may not serve %s: it is none of the %d identities that may", id, service, len(ids))
	}
	return nil
}

// Services returns the services that are known, in order.
func (n *Naming) Services() []string {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if !n.read {
		return nil
	}
	names := make([]string, 0, len(n.services))
	for name := range n.services {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// NamingChange is the new list of a service.
type NamingChange struct {
	Service string
	IDs     []ID // sorted, each once; not changed any more
	Gone    bool // the service is not known any more
}

// Update makes changes at one stroke. From the first one on the index counts as read.
func (n *Naming) Update(changes ...NamingChange) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.read = true
	for _, c := range changes {
		if c.Gone {
			delete(n.services, c.Service)
			continue
		}
		n.services[c.Service] = c.IDs
	}
}

// CompareIDs orders IDs as their URIs.
func CompareIDs(a, b ID) int { return strings.Compare(a.uri, b.uri) }
