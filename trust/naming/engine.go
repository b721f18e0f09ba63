package naming

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// Grace is how long an identity may still serve what nothing names it for any more (decision D25).
const Grace = 2 * time.Minute

// RuleConfig names identities of a service, whatever objects say.
type RuleConfig struct {
	Service string
	IDs     []trust.ID
}

// ClusterConfig is a cluster whose objects are read.
type ClusterConfig struct {
	Name   string
	Domain trust.Domain // of its service accounts
}

// Config is what an Engine is made of.
type Config struct {
	Naming        *trust.Naming // which it fills
	Clusters      []ClusterConfig
	Rules         []RuleConfig
	RootNamespace string // its objects may speak of services of every namespace; empty: none does
	ClusterDomain string // the DNS suffix of Services behind ".svc.", such as cluster.local
	// Aliases returns all identities that count as the same one, itself included; nil: it alone. See Refresh.
	Aliases func(trust.ID) []trust.ID
	// Revoked reports whether an identity has no grace: it, or the authority that vouches for it, is not to be trusted any more. Nil: none. It is asked
	// when the grace begins, and by Refresh.
	Revoked func(trust.ID) bool
	// Changed is told whose lists have changed, after they have; without names, that all is known from now on. Nil: nobody is.
	Changed func(services []string)
}

// Engine computes who may serve what. It is safe for concurrent use.
type Engine struct {
	config   Config
	clusters map[string]*Cluster
	wake     chan struct{} // someone leaves sooner than Run thinks

	mu       sync.Mutex // guards the rest, and all that hangs off it
	services map[string]*named
	dirty    []*named
	unread   int      // kinds of clusters that have not been read; below zero: and Changed knows that all have
	leaving  []depart // in order of time, since each has the same grace
}

// depart is an identity whose grace ends.
type depart struct {
	until time.Time
	from  *named
	id    trust.ID
}

// New makes an engine. Without clusters it knows what the rules say at once.
func New(c Config) (*Engine, error) {
	if c.Naming == nil {
		c.Naming = trust.NewNaming()
	}
	if c.Aliases == nil {
		c.Aliases = func(id trust.ID) []trust.ID { return []trust.ID{id} }
	}
	if c.Revoked == nil {
		c.Revoked = func(trust.ID) bool { return false }
	}
	if c.Changed == nil {
		c.Changed = func([]string) {}
	}
	e := &Engine{config: c, clusters: map[string]*Cluster{}, services: map[string]*named{}, wake: make(chan struct{}, 1)}
	for _, cc := range c.Clusters {
		if cc.Domain.IsZero() {
			return nil, fmt.Errorf("cluster %s has no trust domain", cc.Name)
		}
		if e.clusters[cc.Name] != nil {
			return nil, fmt.Errorf("cluster %s occurs twice", cc.Name)
		}
		e.clusters[cc.Name] = &Cluster{engine: e, name: cc.Name, domain: cc.Domain, spaces: map[string]*space{}, read: map[Kind]bool{}}
	}
	e.unread = len(e.clusters) * len(Kinds)
	for i, r := range c.Rules {
		if err := CheckService(r.Service); err != nil {
			return nil, fmt.Errorf("rules[%d]: %w", i, err)
		}
		s := &source{kind: kindRule, name: fmt.Sprintf("rules[%d]", i), live: true, fixed: r.IDs, words: r.IDs}
		s.targets = []*named{e.named(r.Service)}
		s.appear()
	}
	if e.settle(); e.unread == 0 {
		e.unread = -1 // who asks finds all that there is
	}
	return e, nil
}

// Cluster returns one of the config's clusters, to be told of its objects; nil for any other.
func (e *Engine) Cluster(name string) *Cluster { return e.clusters[name] }

// Naming returns the index that the engine fills.
func (e *Engine) Naming() *trust.Naming { return e.config.Naming }

// Size returns how many services are known, and how many identities leave.
func (e *Engine) Size() (services, leaving int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.services {
		if s.known() {
			services++
		}
		leaving += len(s.leaving)
	}
	return services, leaving
}

// Refresh is called when what Aliases or Revoked say has changed: lists are made anew, and who was revoked loses the grace.
func (e *Engine) Refresh() {
	e.change(func() {
		for _, s := range e.services {
			s.leaving = slices.DeleteFunc(s.leaving, func(l leaver) bool { return e.config.Revoked(l.id) })
			e.touch(s)
		}
	})
}

// Run ends the grace of identities until ctx ends.
func (e *Engine) Run(ctx context.Context) error {
	for {
		next := e.expire(time.Now())
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-e.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// expire ends what is due, and returns when to look again.
func (e *Engine) expire(now time.Time) (next time.Duration) {
	next = time.Hour // someone who leaves wakes us
	e.change(func() {
		n := 0
		for ; n < len(e.leaving) && !now.Before(e.leaving[n].until); n++ {
			d := e.leaving[n]
			if had := len(d.from.leaving); had > 0 {
				d.from.leaving = slices.DeleteFunc(d.from.leaving, func(l leaver) bool { return l.id == d.id && !l.until.After(d.until) })
				if len(d.from.leaving) < had {
					e.touch(d.from)
				}
			}
		}
		e.leaving = slices.Delete(e.leaving, 0, n)
		if len(e.leaving) > 0 {
			next = e.leaving[0].until.Sub(now)
		}
	})
	return next
}

// change makes a change, then the lists that it touches, then tells.
func (e *Engine) change(f func()) {
	e.mu.Lock()
	f()
	changed, first := e.settle(), e.unread == 0
	if first {
		changed, e.unread = nil, -1
	}
	e.mu.Unlock()
	if len(changed) > 0 || first {
		e.config.Changed(changed)
	}
}

// named returns a service's record, which is made if there is none.
func (e *Engine) named(name string) *named {
	s := e.services[name]
	if s == nil {
		s = &named{engine: e, name: name}
		e.services[name] = s
	}
	return s
}

// touch notes that a service's list is to be looked at.
func (e *Engine) touch(s *named) {
	if !s.dirty {
		s.dirty = true
		e.dirty = append(e.dirty, s)
	}
}

// settle publishes the lists that have changed, and returns of which services. Nothing is published before each cluster has been read.
func (e *Engine) settle() (changed []string) {
	if e.unread > 0 {
		return nil
	}
	var changes []trust.NamingChange
	now := time.Now()
	for _, s := range e.dirty {
		s.dirty = false
		e.depart(s, now)
		if c, differs := s.publish(); differs {
			changes, changed = append(changes, c), append(changed, s.name)
		}
		if s.empty() {
			delete(e.services, s.name)
		}
	}
	if cap(e.dirty) > 1000 {
		e.dirty = nil
	}
	e.dirty = e.dirty[:0]
	if _, standing := e.config.Naming.Lookup(""); len(changes) > 0 || standing == trust.NamingUnread {
		e.config.Naming.Update(changes...)
	}
	return changed
}

// depart lets identities of a service begin their grace, that nothing names any more; and those stay that something names again.
func (e *Engine) depart(s *named, now time.Time) {
	s.tallies = slices.DeleteFunc(s.tallies, func(t tally) bool {
		if t.n > 0 {
			return false
		}
		if t.held && !e.config.Revoked(t.id) {
			until := now.Add(Grace)
			s.leaving = append(s.leaving, leaver{t.id, until})
			if e.leaving = append(e.leaving, depart{until, s, t.id}); len(e.leaving) == 1 {
				select {
				case e.wake <- struct{}{}:
				default:
				}
			}
		}
		return true
	})
	for i := range s.tallies {
		s.tallies[i].held = true
	}
	if len(s.leaving) > 0 {
		s.leaving = slices.DeleteFunc(s.leaving, func(l leaver) bool { return s.tallies.of(l.id) > 0 })
	}
}
