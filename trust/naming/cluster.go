package naming

import (
	"slices"
	"strings"

	"github.com/chancery-project/chancery/trust"
)

// Cluster takes the objects of one cluster.
type Cluster struct {
	engine *Engine
	name   string
	domain trust.Domain

	// Of the engine's mutex.
	spaces map[string]*space
	read   map[Kind]bool
	epoch  uint32 // of Replace: what it did not name is of an older one
}

// space is a namespace of a cluster.
type space struct {
	cluster   *Cluster
	name      string
	pods      map[string]*pod // also those that slices name and nobody has seen
	workloads map[string]*pod
	classes   map[classKey]*class
	byLabel   map[label][]*class
	services  map[string]*source
	slices    map[string]*source
	entries   map[string]*source
	selectors map[label][]*source
	backends  map[string][]*source // slices of a service
}

// pod is a pod or WorkloadEntry.
type pod struct {
	name    string
	uid     UID
	class   *class // nil: a pod that was not seen, or has ended
	uses    []use
	problem string // of a WorkloadEntry
	epoch   uint32
}

// use is an endpoint of a slice that names the pod.
type use struct {
	slice *source
	uid   UID
}

// class is what pods of one account and the same labels have in common. Thousands of pods are few of them.
type class struct {
	key     classKey
	space   *space
	id      trust.ID // zero: a WorkloadEntry that names no account
	labels  []label
	n       int
	sources []*source // whose selectors select it
}

type classKey struct {
	account string
	labels  Labels
}

// Put takes a new object, or its new version.
func (c *Cluster) Put(o Object) { c.engine.change(func() { c.put(o) }) }

// Drop takes word that an object is gone.
func (c *Cluster) Drop(k Key) { c.engine.change(func() { c.drop(k) }) }

// Replace takes all objects of a kind: what is not among them is gone. After the first one the kind has been read.
func (c *Cluster) Replace(kind Kind, all []Object) {
	c.engine.change(func() {
		c.epoch++
		for _, o := range all {
			if o.Key().Kind == kind {
				c.put(o)
			}
		}
		for _, k := range c.older(kind) {
			c.drop(k)
		}
		if !c.read[kind] {
			c.read[kind] = true
			c.engine.unread--
		}
	})
}

// Unread returns the kinds that have not been read.
func (c *Cluster) Unread() (kinds []Kind) {
	c.engine.mu.Lock()
	defer c.engine.mu.Unlock()
	for _, k := range Kinds {
		if !c.read[k] {
			kinds = append(kinds, k)
		}
	}
	return kinds
}

// older returns the objects of a kind that the last Replace did not name.
func (c *Cluster) older(kind Kind) (keys []Key) {
	for _, sp := range c.spaces {
		pods, sources := sp.of(kind)
		for name, p := range pods {
			if p.class != nil && p.epoch != c.epoch {
				keys = append(keys, Key{kind, sp.name, name})
			}
		}
		for name, s := range sources {
			if s.epoch != c.epoch {
				keys = append(keys, Key{kind, sp.name, name})
			}
		}
	}
	return keys
}

// of returns the map in which objects of a kind lie.
func (sp *space) of(kind Kind) (map[string]*pod, map[string]*source) {
	switch kind {
	case KindPod:
		return sp.pods, nil
	case KindWorkload:
		return sp.workloads, nil
	case KindService:
		return nil, sp.services
	case KindSlice:
		return nil, sp.slices
	}
	return nil, sp.entries
}

func (c *Cluster) put(o Object) {
	k := o.Key()
	sp := c.spaces[k.Namespace]
	if sp == nil {
		sp = &space{
			cluster: c, name: strings.Clone(k.Namespace), pods: map[string]*pod{}, workloads: map[string]*pod{}, classes: map[classKey]*class{}, byLabel: map[label][]*class{}, services: map[string]*source{},
			slices: map[string]*source{}, entries: map[string]*source{}, selectors: map[label][]*source{}, backends: map[string][]*source{},
		}
		c.spaces[sp.name] = sp
	}
	switch o := o.(type) {
	case *Pod:
		if o.Ended {
			c.drop(k)
			return
		}
		account := o.Account
		if account == "" {
			account = "default"
		}
		sp.setPod(sp.pods, o.Name, o.UID, classKey{account, o.Labels})
	case *Workload:
		sp.setWorkload(o)
	case *Service:
		sp.setService(o)
	case *Entry:
		sp.setEntry(o)
	case *Slice:
		sp.setSlice(o)
	}
	sp.tidy()
}

func (c *Cluster) drop(k Key) {
	sp := c.spaces[k.Namespace]
	if sp == nil {
		return
	}
	pods, sources := sp.of(k.Kind)
	if p := pods[k.Name]; p != nil {
		p.leave()
		if p.uid, p.problem = 0, ""; len(p.uses) == 0 {
			delete(pods, k.Name)
		}
	}
	if s := sources[k.Name]; s != nil {
		sp.remove(s)
	}
	sp.tidy()
}

// tidy forgets an empty namespace.
func (sp *space) tidy() {
	if len(sp.pods)+len(sp.workloads)+len(sp.services)+len(sp.slices)+len(sp.entries) == 0 {
		delete(sp.cluster.spaces, sp.name)
	}
}

// setPod takes a pod, or what is like one.
func (sp *space) setPod(in map[string]*pod, name string, uid UID, key classKey) *pod {
	p := in[name]
	if p == nil {
		p = &pod{name: name}
		in[name] = p
	}
	p.epoch = sp.cluster.epoch
	if p.class == nil || p.uid != uid || p.class.key != key {
		p.leave()
		p.uid = uid
		p.enter(sp.class(key))
	}
	return p
}

func (sp *space) setWorkload(o *Workload) {
	if o.Problem != "" {
		p := sp.workloads[o.Name]
		if p == nil { // it was never right: it names nobody
			p = sp.setPod(sp.workloads, o.Name, 0, classKey{})
		}
		p.problem, p.epoch = o.Problem, sp.cluster.epoch
		return
	}
	p := sp.setPod(sp.workloads, o.Name, 0, classKey{o.Account, o.Labels})
	if p.problem = ""; o.Account != "" && p.class.id.IsZero() {
		p.problem = "serviceAccount should be the name of a service account"
	}
}

// class returns the class of a key, which is made if there is none.
func (sp *space) class(key classKey) *class {
	c := sp.classes[key]
	if c != nil {
		return c
	}
	c = &class{key: key, space: sp, labels: key.labels.split()}
	if key.account != "" {
		c.id, _ = trust.WorkloadID(sp.cluster.domain, sp.name, key.account) // an API server has no account that is none
	}
	sp.classes[key] = c
	for _, l := range c.labels {
		sp.byLabel[l] = append(sp.byLabel[l], c)
		for _, s := range sp.selectors[l] {
			if covers(c.labels, s.selector) {
				c.join(s)
			}
		}
	}
	return c
}

// join makes a selector select the class.
func (c *class) join(s *source) {
	c.sources = append(c.sources, s)
	s.classes = append(s.classes, c)
	if !c.id.IsZero() {
		s.count(c.id, 1)
	}
}

// enter makes a pod one of a class.
func (p *pod) enter(c *class) {
	p.class = c
	c.n++
	for _, u := range p.uses {
		u.slice.follow(ref{p, u.uid}, 1)
	}
}

// leave is the opposite. The class goes with its last pod.
func (p *pod) leave() {
	c := p.class
	if c == nil {
		return
	}
	for _, u := range p.uses {
		u.slice.follow(ref{p, u.uid}, -1)
	}
	p.class = nil
	if c.n--; c.n > 0 {
		return
	}
	delete(c.space.classes, c.key)
	for _, l := range c.labels {
		without(c.space.byLabel, l, c)
	}
	for _, s := range c.sources {
		s.classes = slices.DeleteFunc(s.classes, func(o *class) bool { return o == c })
		if !c.id.IsZero() {
			s.count(c.id, -1)
		}
	}
}

// remove takes a source away.
func (sp *space) remove(s *source) {
	s.forget()
	sp.unrefer(s)
	s.vanish()
	_, sources := sp.of(s.kind)
	delete(sources, s.name)
	switch o := s.object.(type) {
	case *Service:
		sp.awaken(s.name)
	case *Slice:
		without(sp.backends, o.Service, s)
	}
}

// without takes one of a list away, and the list with its last one.
func without[T comparable](lists map[string][]T, name string, one T) {
	list := lists[name]
	if i := slices.Index(list, one); i >= 0 {
		last := len(list) - 1
		list[i] = list[last]
		clear(list[last:])
		list = list[:last]
	}
	if lists[name] = list; len(list) == 0 {
		delete(lists, name)
	}
}

// unrefer ends what a slice says of pods.
func (sp *space) unrefer(s *source) {
	for _, r := range s.refs {
		s.follow(r, -1)
		i := slices.IndexFunc(r.pod.uses, func(u use) bool { return u.slice == s && u.uid == r.uid })
		if r.pod.uses = slices.Delete(r.pod.uses, i, i+1); len(r.pod.uses) == 0 && r.pod.class == nil {
			delete(sp.pods, r.pod.name)
		}
	}
	s.refs = nil
}

// refer makes a slice name its pods.
func (sp *space) refer(s *source, pods []PodRef) {
	s.refs = make([]ref, 0, len(pods))
	for _, want := range pods {
		p := sp.pods[want.Name]
		if p == nil {
			p = &pod{name: want.Name}
			sp.pods[want.Name] = p
		}
		r := ref{p, want.UID}
		if slices.Contains(s.refs, r) {
			continue
		}
		p.uses = append(p.uses, use{s, r.uid})
		s.refs = append(s.refs, r)
		s.follow(r, 1)
	}
}

// awaken makes slices of a service count, or count no more, as the Service is there or not.
func (sp *space) awaken(service string) {
	s := sp.services[service]
	live := s != nil && !s.object.(*Service).External
	for _, slice := range sp.backends[service] {
		slice.setLive(live)
	}
}
