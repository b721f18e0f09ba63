package agent

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/chancery-project/chancery/csr/client/naming"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
)

// SourceOf shows one keeper's identity to whoever is let in, with what is known of foreign trust domains and of who may serve a service. What
// naming says of a service counts, whatever a server says. A view is made once for each change.
func SourceOf(k *Keeper, naming map[string][]trust.ID) sds.Source {
	v := &views{keeper: k, naming: naming, view: &sds.View{Naming: naming, Asks: k.naming != nil}, said: map[string]string{}}
	return v.current
}

// views makes a view for each change.
type views struct {
	keeper *Keeper
	naming map[string][]trust.ID // of the config

	mu      sync.Mutex // guards all below
	of      inputs
	view    *sds.View     // of these
	changed chan struct{} // closed when one of them has changed; nil before the first
	said    map[string]string
}

// inputs are what a view is made of. The channels, which are others after each change, stand for what came with them.
type inputs struct {
	id               *trust.Identity
	foreign          []*trust.Bundle
	known            map[string][]trust.ID
	federated, named <-chan struct{}
}

func (i *inputs) same(o *inputs) bool {
	return i.id == o.id && i.federated == o.federated && i.named == o.named
}

// current returns the view of this moment, and a channel that is closed when there may be another one.
func (v *views) current() (*sds.View, <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	k := v.keeper
	var in inputs
	var renewed <-chan struct{}
	in.id, renewed = k.Current() // under the lock, so that generations follow the order of identities
	if k.foreign == nil && k.naming == nil {
		return v.make(in), renewed
	}
	if k.foreign != nil {
		in.foreign, in.federated = k.foreign.Bundles()
	}
	if k.naming != nil {
		in.known, in.named = k.naming.Known()
	}
	select {
	case <-v.changed:
		v.changed = nil
	default:
	}
	if v.changed == nil {
		v.changed = make(chan struct{})
		go func(changed chan struct{}) { // as long as the agent, or until the next change
			defer close(changed)
			select {
			case <-renewed:
			case <-in.federated:
			case <-in.named:
			}
		}(v.changed)
	}
	return v.make(in), v.changed
}

// make returns the view of what there is. mu is held.
func (v *views) make(in inputs) *sds.View {
	if in.same(&v.of) {
		return v.view
	}
	next := &sds.View{Naming: v.naming, Asks: v.view.Asks, Generation: v.view.Generation + 1}
	if len(in.known) > 0 {
		next.Naming = maps.Clone(in.known)
		maps.Copy(next.Naming, v.naming)
	}
	if id := in.id; id != nil {
		next.Identities, next.Bundles = []*trust.Identity{id}, []*trust.Bundle{id.Bundle}
		for _, b := range in.foreign {
			if id.Bundle.Of(b.Domain()) == nil { // else it is one of the own by now, and only the own roots count (decision D24)
				next.Bundles = append(next.Bundles, b)
			}
		}
	}
	v.of, v.view = in, next
	v.warn(next)
	return next
}

// warn says which identities the contexts of services do not take, once. mu is held.
func (v *views) warn(next *sds.View) {
	for service := range next.Naming {
		left := strings.Join(next.LeftOut(service), " ")
		if v.said[service] == left {
			continue
		}
		if v.said[service] = left; left != "" {
			v.keeper.logger.Warn("identities of foreign trust domains are left out of a service's context: their domain is not known, or the service has own ones, too, whose roots must not vouch for them",
				"service", service, "left_out", left)
		}
	}
	maps.DeleteFunc(v.said, func(service, left string) bool { return left == "" || next.Naming[service] == nil })
}

// services passes on which services are asked for, but for those that the config has.
type services struct {
	table  *naming.Table
	config map[string][]trust.ID
}

// Hold implements holds.Services.
func (s services) Hold(service string) error {
	if _, own := s.config[service]; own {
		return nil
	}
	return s.table.Hold(service)
}

// Drop implements holds.Services.
func (s services) Drop(service string) {
	if _, own := s.config[service]; !own {
		s.table.Drop(service)
	}
}

// Bounds of what a server is told of names.
const (
	maxNames     = 20
	maxNameBytes = 300
)

// namesOf returns the foreign trust domains whose roots are asked for in vain; and the names that are asked for of trust domains that
// the own one was before or, during a migration, may be leaving.
func namesOf(streams []sds.StreamStatus, own *trust.Bundle) (unknown, former []string) {
	if own == nil {
		return nil, nil
	}
	migrating := slices.ContainsFunc(own.Kin(), func(b *trust.Bundle) bool { return len(b.Roots()) > 0 })
	rank := func(d trust.Domain) int { // those that have no roots any more come first
		switch b := own.Of(d); {
		case len(b.Roots()) == 0:
			return 0
		case !migrating:
			return -1
		case d == own.Domain():
			return 1
		}
		return 2
	}
	ranked := map[string]int{}
	for _, st := range streams {
		for _, r := range st.Resources {
			rest, is := strings.CutPrefix(r.Name, "spiffe://")
			host, _, isID := strings.Cut(rest, "/")
			d, err := trust.ParseDomain(host)
			switch {
			case !is || err != nil:
			case own.Of(d) == nil:
				if r.Unknown && !isID {
					unknown = append(unknown, host)
				}
			case rank(d) >= 0:
				ranked[strings.ToValidUTF8(r.Name[:min(len(r.Name), maxNameBytes)], "")] = rank(d) // what is cut in a letter could not be sent
			}
		}
	}
	slices.Sort(unknown)
	unknown = slices.Compact(unknown)
	former = slices.SortedFunc(maps.Keys(ranked), func(a, b string) int {
		if ranked[a] != ranked[b] {
			return ranked[a] - ranked[b]
		}
		return strings.Compare(a, b)
	})
	return unknown[:min(len(unknown), maxNames)], former[:min(len(former), maxNames)]
}

// names is what the server is told of names.
func (k *Keeper) names() (unknown, former []string) {
	id, _ := k.Current()
	if id == nil || k.streams == nil {
		return nil, nil
	}
	return namesOf(k.streams(), id.Bundle)
}
