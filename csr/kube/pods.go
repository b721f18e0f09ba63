package kube

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/chancery-project/chancery/csr"
)

const (
	// maxBroken is how long the watch may be broken and still count as synced. A pod deleted meanwhile is thus believed
	// in no longer than deletionLeeway allows anyway.
	maxBroken = 60 * time.Second
	// maxSilent is how long an open watch may say nothing. The API server sends a bookmark every minute, so a longer
	// silence is a connection that only looks open.
	maxSilent = 3 * time.Minute
	// deletionLeeway is how long after its deletion time a pod still counts; the API server's own leeway for tokens.
	deletionLeeway = 60 * time.Second
	// maxGone bounds the memory of deleted pods.
	maxGone = 4096

	// livingPods keeps finished pods, such as those of past jobs, out of the watch: for it they are deleted when they end.
	livingPods = "status.phase!=Succeeded,status.phase!=Failed"
)

type podName struct{ namespace, name string }

type podHash [16]byte

// place is what a node agent asks for.
type place struct{ node, namespace, account string }

// pod is what we keep of a pod. It is immutable.
type pod struct {
	podName
	uid, node, account string
	hash               podHash
	running            bool      // Pending or Running
	deletion           time.Time // when it is or was to be gone; zero if nobody deleted it
}

func (p *pod) place() place { return place{p.node, p.namespace, p.account} }

func (p *pod) alive(now time.Time) bool {
	return p.running && (p.deletion.IsZero() || !now.After(p.deletion.Add(deletionLeeway)))
}

func (w *podWatch) podOf(o *corev1.Pod) *pod {
	p := &pod{
		podName: podName{strings.Clone(o.Namespace), strings.Clone(o.Name)},
		uid:     strings.Clone(string(o.UID)),
		node:    strings.Clone(o.Spec.NodeName),
		account: strings.Clone(o.Spec.ServiceAccountName),
		hash:    w.hashOf(string(o.UID)),
		running: o.Status.Phase == corev1.PodPending || o.Status.Phase == corev1.PodRunning,
	}
	if o.DeletionTimestamp != nil {
		p.deletion = o.DeletionTimestamp.Time
	}
	return p
}

func (w *podWatch) hashOf(uid string) (h podHash) {
	copy(h[:], csr.PodHash(w.cluster, uid))
	return h
}

// podWatch follows the pods of a cluster. It is the store that client-go's reflector fills: an informer would keep
// whole pods and a queue beside it; this keeps some 400 bytes a pod.
type podWatch struct {
	cluster string
	client  *Client
	log     *slog.Logger
	failing atomic.Bool // the last list or watch was refused

	mu      sync.RWMutex // guards the rest, so that a reader sees pods and the watch's state of one moment
	byName  map[podName]*pod
	byHash  map[podHash]*pod
	byPlace map[place][]*pod
	gone    map[podHash]struct{} // pods that were seen and are no more; UIDs do not come back
	ring    []podHash            // the same in order of their end, as a ring
	next    int                  // where the ring goes on

	listed  bool         // the store has been filled once
	current *openedWatch // nil if the watch is broken
	initial *openedWatch // a watch that still sends what there is; current once that is in the store
	broken  time.Time    // since when
	heard   time.Time    // when the watch last said something
}

func newPodWatch(cluster string, client *Client, log *slog.Logger) *podWatch {
	return &podWatch{
		cluster: cluster, client: client, log: log,
		byName: map[podName]*pod{}, byHash: map[podHash]*pod{}, byPlace: map[place][]*pod{}, gone: map[podHash]struct{}{},
	}
}

// run follows the pods until ctx ends.
func (w *podWatch) run(ctx context.Context) {
	log := logr.FromSlogHandler(w.log.Handler())
	r := cache.NewReflectorWithOptions(&cache.ListWatch{ListWithContextFunc: w.list, WatchFuncWithContext: w.watch},
		&corev1.Pod{}, w, cache.ReflectorOptions{
			Name:   "pods",
			Logger: &log,
			// The cap bounds how long we are blind after the API server is back.
			Backoff: &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 6, Cap: 10 * time.Second},
		})
	r.RunWithContext(logr.NewContext(ctx, log))
}

func (w *podWatch) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	o.FieldSelector = livingPods
	l, err := w.client.listPods(ctx, "", o)
	w.note(ctx, err)
	if err != nil {
		return nil, err
	}
	for i := range l.Items { // the reflector holds all pages at once
		strip(&l.Items[i])
	}
	return l, nil
}

func (w *podWatch) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.FieldSelector = livingPods
	inner, err := w.client.watchPods(ctx, o)
	w.note(ctx, err)
	if err != nil {
		return nil, err
	}
	t := &openedWatch{inner, w}
	w.mu.Lock()
	defer w.mu.Unlock()
	if o.SendInitialEvents != nil && *o.SendInitialEvents {
		w.initial = t
	} else {
		w.current, w.heard = t, time.Now()
	}
	return t, nil
}

// note logs when requests begin to fail and when they work again, as the reflector says little of that.
func (w *podWatch) note(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	failing := err != nil
	switch was := w.failing.Swap(failing); {
	case failing && !was:
		w.log.Warn("following the pods fails; until it works again pods are asked for one by one", "error", err)
	case was && !failing:
		w.log.Info("following the pods works again")
	}
}

// openedWatch is a watch that tells when it ends. The reflector stops each watch that it is through with.
type openedWatch struct {
	watch.Interface
	w *podWatch
}

// Stop ends the watch.
func (t *openedWatch) Stop() {
	t.Interface.Stop()
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	if t.w.current == t {
		t.w.current, t.w.broken = nil, time.Now()
	}
	if t.w.initial == t {
		t.w.initial = nil
	}
}

// missing says why the watch does not count as synced, or "".
func (w *podWatch) missing(now time.Time) string {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.state(now)
}

// state is missing for whoever holds mu.
func (w *podWatch) state(now time.Time) string {
	switch {
	case !w.listed:
		return "not listed yet"
	case w.current == nil && now.Sub(w.broken) >= maxBroken:
		return "the watch is broken"
	case now.Sub(w.heard) >= maxSilent:
		return "the watch is silent"
	}
	return ""
}

func (w *podWatch) size() int {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return len(w.byName)
}

// named returns the pod of a name and UID, or that it is gone. Neither: it was not seen, or the watch is not synced.
func (w *podWatch) named(n podName, uid string, now time.Time) (p *pod, gone bool) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if p := w.byName[n]; p != nil && p.uid == uid {
		return w.synced(p, now), false
	}
	_, gone = w.gone[w.hashOf(uid)]
	return nil, gone
}

// hashed is named for the hash of a UID.
func (w *podWatch) hashed(h podHash, now time.Time) (p *pod, gone bool) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if p := w.byHash[h]; p != nil {
		return w.synced(p, now), false
	}
	_, gone = w.gone[h]
	return nil, gone
}

// synced returns p, or nil if the watch is not synced. mu is held.
func (w *podWatch) synced(p *pod, now time.Time) *pod {
	if w.state(now) != "" {
		return nil
	}
	return p
}

// runs reports whether a pod lives at a place, as far as the watch knows.
func (w *podWatch) runs(at place, now time.Time) bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.state(now) == "" && slices.ContainsFunc(w.byPlace[at], func(p *pod) bool { return p.alive(now) })
}

// Add, Update, Delete, Replace, Resync, Bookmark and Transformer are what client-go's reflector wants of a store.
func (w *podWatch) Add(o any) error {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return fmt.Errorf("adding a pod: got %T", o)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.heard = time.Now()
	w.put(w.podOf(p))
	return nil
}

// Update is Add.
func (w *podWatch) Update(o any) error { return w.Add(o) }

// Delete forgets a pod and remembers that it is gone.
func (w *podWatch) Delete(o any) error {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return fmt.Errorf("deleting a pod: got %T", o)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.heard = time.Now()
	if old := w.byName[podName{p.Namespace, p.Name}]; old != nil && old.uid == string(p.UID) {
		w.drop(old)
	}
	w.bury(w.hashOf(string(p.UID)))
	return nil
}

// Replace sets what pods there are.
func (w *podWatch) Replace(list []any, _ string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	old := w.byName
	w.byName, w.byHash, w.byPlace = map[podName]*pod{}, map[podHash]*pod{}, map[place][]*pod{}
	for _, o := range list {
		p, ok := o.(*corev1.Pod)
		if !ok {
			return fmt.Errorf("listing pods: got %T", o)
		}
		w.put(w.podOf(p))
	}
	for _, p := range old {
		if w.byHash[p.hash] == nil {
			w.bury(p.hash)
		}
	}
	w.listed, w.heard = true, time.Now()
	if w.initial != nil {
		w.current, w.initial = w.initial, nil
	}
	return nil
}

// Resync has nothing to do.
func (w *podWatch) Resync() error { return nil }

// Bookmark notes that the watch is alive though nothing changed.
func (w *podWatch) Bookmark(string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.heard = time.Now()
	return nil
}

// Transformer makes the reflector drop what we do not keep before it collects a list.
func (w *podWatch) Transformer() cache.TransformFunc {
	return func(o any) (any, error) {
		if p, ok := o.(*corev1.Pod); ok {
			strip(p)
		}
		return o, nil
	}
}

// strip drops of a pod what podOf does not read.
func strip(p *corev1.Pod) {
	*p = corev1.Pod{
		TypeMeta: p.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion, DeletionTimestamp: p.DeletionTimestamp,
		},
		Spec:   corev1.PodSpec{NodeName: p.Spec.NodeName, ServiceAccountName: p.Spec.ServiceAccountName},
		Status: corev1.PodStatus{Phase: p.Status.Phase},
	}
}

// put stores a pod. mu is held for writing.
func (w *podWatch) put(p *pod) {
	if old := w.byName[p.podName]; old != nil {
		w.drop(old)
		if old.uid != p.uid {
			w.bury(old.hash)
		}
	}
	if peers := w.byPlace[p.place()]; len(peers) > 0 { // thousands of pods share few names of nodes and accounts
		p.namespace, p.node, p.account = peers[0].namespace, peers[0].node, peers[0].account
	}
	w.byName[p.podName], w.byHash[p.hash] = p, p
	w.byPlace[p.place()] = append(w.byPlace[p.place()], p)
}

// drop forgets a pod. mu is held for writing.
func (w *podWatch) drop(p *pod) {
	delete(w.byName, p.podName)
	delete(w.byHash, p.hash)
	peers := slices.DeleteFunc(w.byPlace[p.place()], func(o *pod) bool { return o == p })
	if len(peers) == 0 {
		delete(w.byPlace, p.place())
		return
	}
	w.byPlace[p.place()] = peers
}

// bury remembers that a pod is gone, in place of the one that is so longest. mu is held for writing.
func (w *podWatch) bury(h podHash) {
	if _, ok := w.gone[h]; ok {
		return
	}
	if len(w.ring) < maxGone {
		w.ring = append(w.ring, h)
	} else {
		delete(w.gone, w.ring[w.next])
		w.ring[w.next] = h
		w.next = (w.next + 1) % maxGone
	}
	w.gone[h] = struct{}{}
}
