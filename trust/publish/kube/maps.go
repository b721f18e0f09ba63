package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	follow "github.com/chancery-project/chancery/trust/kube"
	"github.com/chancery-project/chancery/trust/publish"
)

const (
	// workers is how many ConfigMaps are written at a time: thousands of namespaces should be no burst.
	workers = 4
	// maxObjects bounds the ConfigMaps that are kept in mind.
	maxObjects = 100_000
	// maxNamed is how many are named for people.
	maxNamed     = 5
	backoffFirst = time.Second
	backoffMost  = time.Minute
)

func backoff(tries int) time.Duration {
	d := min(backoffFirst<<min(tries, 10), backoffMost)
	return d/2 + rand.N(d)
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

type place struct{ namespace, name string }

func (p place) String() string { return p.namespace + "/" + p.name }

// object is what is kept of a ConfigMap that is there, or should be.
type object struct {
	data    map[string]string // our keys, as it has them; nil: there is none
	ours    bool
	other   string // manager of one of the keys, if that is not us
	contest contest
	err     error
	tries   int
	queued  bool
	working bool
	timer   *time.Timer
}

// configMaps publishes in each namespace that is selected.
type configMaps struct {
	p       *Publisher
	watches []*follow.Watch
	news    chan struct{}

	mu         sync.Mutex // guards the rest
	namespaces map[string]bool
	objects    map[place]*object
	queue      []place
	crowded    bool // some did not fit
	closed     bool
}

func newMaps(p *Publisher) *configMaps {
	m := &configMaps{p: p, news: make(chan struct{}, workers), namespaces: map[string]bool{}, objects: map[place]*object{}}
	m.watches = append(m.watches, &follow.Watch{
		Client: p.core, Scheme: p.scheme, Resource: "namespaces", Logger: p.config.Logger, Hint: m.hint,
		Object: &corev1.Namespace{}, List: func() runtime.Object { return &corev1.NamespaceList{} },
		Put: m.namespace, Drop: m.namespaceGone, Replace: m.allNamespaces,
	})
	for name := range p.config.ConfigMaps {
		m.watches = append(m.watches, &follow.Watch{
			Client: p.core, Scheme: p.scheme, Resource: "configmaps", Fields: "metadata.name=" + name, Logger: p.config.Logger, Hint: m.hint,
			Object: &corev1.ConfigMap{}, List: func() runtime.Object { return &corev1.ConfigMapList{} },
			Put: m.put, Drop: m.gone, Replace: func(all []runtime.Object) { m.replace(name, all) },
		})
	}
	return m
}

// run publishes until ctx ends.
func (m *configMaps) run(ctx context.Context) {
	var g sync.WaitGroup
	for _, w := range m.watches {
		g.Go(func() { w.Run(ctx) })
	}
	for range workers {
		g.Go(func() { m.work(ctx) })
	}
	g.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	for _, o := range m.objects {
		if o.timer != nil {
			o.timer.Stop()
		}
	}
}

// all looks at all again, as the roots are others.
func (m *configMaps) all() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for at, o := range m.objects {
		o.contest.until = time.Time{}
		m.push(at, o)
	}
}

func (m *configMaps) namespace(o runtime.Object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.take(o)
}

// take notes a namespace. Caller holds mu.
func (m *configMaps) take(o runtime.Object) {
	ns, ok := o.(*corev1.Namespace)
	if !ok {
		return
	}
	if ns.Status.Phase == corev1.NamespaceTerminating || ns.DeletionTimestamp != nil || !m.p.config.Namespaces.Matches(labels.Set(ns.Labels)) {
		delete(m.namespaces, ns.Name) // what is published there stays
		return
	}
	if m.namespaces[ns.Name] {
		return
	}
	m.namespaces[strings.Clone(ns.Name)] = true
	for name := range m.p.config.ConfigMaps {
		at := place{ns.Name, name}
		m.push(at, m.at(at))
	}
}

func (m *configMaps) namespaceGone(o runtime.Object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if ns, ok := o.(*corev1.Namespace); ok {
		m.forget(ns.Name)
	}
}

// forget is for a namespace that is gone. Caller holds mu.
func (m *configMaps) forget(ns string) {
	delete(m.namespaces, ns)
	for name := range m.p.config.ConfigMaps {
		if o := m.objects[place{ns, name}]; o != nil && o.timer != nil {
			o.timer.Stop()
		}
		delete(m.objects, place{ns, name})
	}
}

func (m *configMaps) allNamespaces(all []runtime.Object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	there := map[string]bool{}
	for _, o := range all {
		if ns, ok := o.(*corev1.Namespace); ok {
			there[ns.Name] = true
		}
		m.take(o)
	}
	for ns := range m.namespaces {
		if !there[ns] {
			m.forget(ns)
		}
	}
}

// at returns what is kept of a ConfigMap; nil if there is no room. Caller holds mu.
func (m *configMaps) at(at place) *object {
	o := m.objects[at]
	if o == nil {
		if len(m.objects) >= maxObjects {
			m.crowded = true
			return nil
		}
		o = &object{}
		m.objects[place{strings.Clone(at.namespace), strings.Clone(at.name)}] = o
	}
	return o
}

// read notes a ConfigMap, also in namespaces that are not selected: they may be later. Caller holds mu.
func (m *configMaps) read(x runtime.Object) {
	c, ok := x.(*corev1.ConfigMap)
	if !ok {
		return
	}
	at := place{c.Namespace, c.Name}
	o := m.at(at)
	if o == nil {
		return
	}
	var paths []string
	o.data = map[string]string{}
	for _, k := range m.p.config.ConfigMaps[c.Name] {
		paths = append(paths, "f:data\x00f:"+k.Name)
		if v, ok := c.Data[k.Name]; ok {
			o.data[k.Name] = strings.Clone(v)
		}
	}
	o.ours, o.other = owners(c.ManagedFields, m.p.config.Manager, paths...)
	o.other = strings.Clone(o.other)
	m.share(o)
	m.push(at, o)
}

// share keeps one copy of what all of them should have. Caller holds mu.
func (m *configMaps) share(o *object) {
	want := m.p.want.Load()
	if want == nil {
		return
	}
	for _, keys := range m.p.config.ConfigMaps {
		for _, k := range keys {
			if v := k.Of(*want); o.data[k.Name] == v {
				o.data[k.Name] = v
			}
		}
	}
}

func (m *configMaps) put(o runtime.Object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.read(o)
}

func (m *configMaps) gone(x runtime.Object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c, ok := x.(*corev1.ConfigMap); ok {
		m.lost(place{c.Namespace, c.Name})
	}
}

// lost is for a ConfigMap that is not there any more. Caller holds mu.
func (m *configMaps) lost(at place) {
	o := m.objects[at]
	switch {
	case o == nil:
	case m.namespaces[at.namespace]:
		o.data, o.ours, o.other = nil, false, ""
		m.push(at, o)
	default:
		delete(m.objects, at)
	}
}

func (m *configMaps) replace(name string, all []runtime.Object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	there := map[string]bool{}
	for _, x := range all {
		if c, ok := x.(*corev1.ConfigMap); ok {
			there[c.Namespace] = true
		}
		m.read(x)
	}
	for at, o := range m.objects {
		switch {
		case at.name != name:
		case !there[at.namespace]:
			m.lost(at)
		default:
			m.push(at, o)
		}
	}
}

// push has a ConfigMap looked at. Caller holds mu.
func (m *configMaps) push(at place, o *object) {
	if o == nil || o.queued || m.closed {
		return
	}
	o.queued = true
	m.queue = append(m.queue, at)
	select {
	case m.news <- struct{}{}:
	default:
	}
}

func (m *configMaps) work(ctx context.Context) {
	for ctx.Err() == nil {
		if m.unknown() != nil { // what is not known would be taken for missing, and its owner not be seen
			sleep(ctx, 200*time.Millisecond)
			continue
		}
		m.mu.Lock()
		var at place
		var o *object
		for len(m.queue) > 0 && o == nil {
			at, m.queue = m.queue[0], m.queue[1:]
			if o = m.objects[at]; o != nil && o.working { // by another worker, which looks once more
				o = nil
			}
		}
		if o == nil {
			m.queue = nil
			m.mu.Unlock()
			select {
			case <-ctx.Done():
			case <-m.news:
			}
			continue
		}
		o.queued, o.working = false, true
		m.mu.Unlock()
		again := m.settle(ctx, at, o)
		m.mu.Lock()
		o.working = false
		if o.queued || again {
			o.queued = false
			m.push(at, o)
		}
		m.mu.Unlock()
	}
}

// unknown returns why it is not known what there is.
func (m *configMaps) unknown() error {
	for _, w := range m.watches {
		if err := w.Err(); err != nil {
			return err
		}
	}
	return nil
}

// settle brings a ConfigMap to what it should be. True: something changed meanwhile, so look once more.
func (m *configMaps) settle(ctx context.Context, at place, o *object) (again bool) {
	want := m.p.want.Load()
	m.mu.Lock()
	if want == nil || !m.namespaces[at.namespace] {
		m.mu.Unlock()
		return false
	}
	data := m.wanted(*want, at.name)
	if maps.Equal(o.data, data) {
		o.err, o.tries, o.contest.held = nil, 0, ""
		m.mu.Unlock()
		return false
	}
	now := time.Now()
	if now.Before(o.contest.until) && o.other != "" {
		m.mu.Unlock()
		return false
	}
	other := o.other
	force, err := o.contest.force(o.ours, other, m.p.config.Force, now)
	m.mu.Unlock()
	if err == nil {
		err = m.p.apply(ctx, m.p.core, "configmaps", applied{
			APIVersion: "v1", Kind: "ConfigMap", Data: data,
			Metadata: metadata{Namespace: at.namespace, Name: at.name, Annotations: map[string]string{publish.ByAnnotation: m.p.config.Manager}},
		}, force)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	if err == nil {
		if force {
			m.p.config.Logger.Warn("what was changed in a ConfigMap has been put back", "config_map", at.String(), "by", other)
		}
		o.data, o.ours, o.other, o.err, o.tries, o.contest.held = data, true, "", nil, 0, ""
		return m.p.want.Load() != want
	}
	m.failed(at, o, other, err)
	return false
}

// failed notes why a ConfigMap is not what it should be, and has it tried again. Caller holds mu.
func (m *configMaps) failed(at place, o *object, other string, err error) {
	pause := backoff(o.tries)
	switch {
	case apierrors.IsConflict(err):
		o.contest.held, o.contest.until = other, time.Now().Add(healWindow)
		if other == "" {
			o.contest.held = "another manager"
		}
		err = fmt.Errorf("%s manages it: leave the namespace out, give ours another name, or set publishing.force (%w)", o.contest.held, err)
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		delete(m.namespaces, at.namespace)
		return
	default:
		err = m.hint(err)
	}
	if o.contest.held != "" {
		pause = max(pause, time.Until(o.contest.until))
	}
	if o.tries == 0 {
		m.p.config.Logger.Warn("roots are not published; it is tried again", "config_map", at.String(), "reason", err.Error())
	}
	o.err = err
	o.tries++
	o.timer = time.AfterFunc(pause, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.objects[at] == o {
			m.push(at, o)
		}
	})
}

// wanted is what our keys should be.
func (m *configMaps) wanted(c publish.Contents, name string) map[string]string {
	data := map[string]string{}
	for _, k := range m.p.config.ConfigMaps[name] {
		data[k.Name] = k.Of(c)
	}
	return data
}

// hint names the rights that lack.
func (m *configMaps) hint(err error) error {
	if apierrors.IsForbidden(err) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return fmt.Errorf("%w; its account should have the rights to list and watch namespaces, and to list, watch, create and patch configmaps %s, as in deploy/kubernetes/publishing/rbac.yaml",
			err, strings.Join(slices.Sorted(maps.Keys(m.p.config.ConfigMaps)), " and "))
	}
	return err
}

// counts returns how many are as they should be, wait, fail, and are left to others. Caller holds mu.
func (m *configMaps) counts(want publish.Contents, each func(at place, o *object, state string)) {
	wanted := map[string]map[string]string{}
	for name := range m.p.config.ConfigMaps {
		wanted[name] = m.wanted(want, name)
	}
	for at, o := range m.objects {
		switch {
		case !m.namespaces[at.namespace]:
		case maps.Equal(o.data, wanted[at.name]):
			each(at, o, "current")
		case o.contest.held != "":
			each(at, o, "left")
		case o.err != nil:
			each(at, o, "failing")
		default:
			each(at, o, "waiting")
		}
	}
}

func (m *configMaps) unpublished(want publish.Contents) []string {
	if err := m.unknown(); err != nil {
		return []string{"ConfigMaps: " + err.Error()}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var late []string
	m.counts(want, func(at place, _ *object, state string) {
		if state == "failing" || state == "waiting" {
			late = append(late, at.String())
		}
	})
	if len(late) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%d ConfigMaps do not have the new roots yet, such as %s", len(late), some(late))}
}

func some(all []string) string {
	slices.Sort(all)
	return strings.Join(all[:min(len(all), maxNamed)], ", ")
}

func (m *configMaps) trouble() error {
	if err := m.unknown(); err != nil {
		return err
	}
	want := m.p.want.Load()
	if want == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	names := map[string][]string{}
	first := map[string]error{}
	m.counts(*want, func(at place, o *object, state string) {
		if state == "failing" || state == "left" {
			names[state] = append(names[state], at.String())
			if first[state] == nil {
				first[state] = o.err
			}
		}
	})
	var errs []error
	if m.crowded {
		errs = append(errs, fmt.Errorf("there are more than %d ConfigMaps; narrow publishing.configMaps.namespaceSelector", maxObjects))
	}
	for state, words := range map[string]string{"failing": "are not published", "left": "are left to another manager"} {
		if all := names[state]; len(all) > 0 {
			errs = append(errs, fmt.Errorf("%d ConfigMaps %s (%s): %w", len(all), words, some(all), first[state]))
		}
	}
	return errors.Join(errs...)
}
