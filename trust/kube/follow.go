// Package kube owns how objects of an API server are followed: client-go's reflector without an informer's cache behind it, told to
// whoever keeps what it needs of them.
//
// It refuses to keep objects itself, and to say more than once that something fails which is tried again for ever.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// Group returns a client for the objects of one group and version, which the scheme knows. Groups of one API server share the HTTP client.
func Group(cfg *rest.Config, client *http.Client, scheme *runtime.Scheme, gv schema.GroupVersion) (*rest.RESTClient, error) {
	c := rest.CopyConfig(cfg)
	c.QPS, c.GroupVersion, c.APIPath = -1, &gv, "/apis"
	c.WarningHandler = rest.NoWarnings{} // they would go to standard error, past our log
	if gv.Group == "" {
		c.APIPath = "/api"
	}
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientForConfigAndClient(c, client)
}

// listTime bounds a list, which watches take the place of.
const listTime = 30 * time.Second

// ErrNotListed: it is not known yet what there is. Who has just begun should not call that trouble.
var ErrNotListed = errors.New("not listed yet")

// Watch says which objects are followed, and who is told.
type Watch struct {
	Client   rest.Interface
	Scheme   *runtime.Scheme
	Resource string
	Fields   string                // a field selector; empty for all
	Object   runtime.Object        // one of them, empty
	List     func() runtime.Object // an empty list of them

	// Put is told of each object that is there, when it is first seen and when it changes; Drop when it is gone. Replace is told all that
	// there are, at the beginning and whenever changes may have been missed: what it does not hold is gone.
	Put, Drop func(runtime.Object)
	Replace   func([]runtime.Object)
	// Hint is added to an error, such as one of a right that lacks. May be nil.
	Hint func(error) error

	Logger *slog.Logger

	mu      sync.Mutex // guards the rest
	failing error
	synced  bool
}

// Err returns why the objects are not known now: what fails, or that they were not listed yet. Nil if they are followed.
func (w *Watch) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.failing != nil:
		return w.failing
	case !w.synced:
		return fmt.Errorf("%s: %w", w.Resource, ErrNotListed)
	}
	return nil
}

// Run follows the objects until ctx ends. It returns then, though client-go may sleep out a backoff before it ends: what it still tells is dropped.
func (w *Watch) Run(ctx context.Context) {
	log := logr.FromSlogHandler(w.Logger.Handler())
	s := &store{w: w, ctx: ctx}
	r := cache.NewReflectorWithOptions(&cache.ListWatch{ListWithContextFunc: w.list, WatchFuncWithContext: w.watch}, w.Object, s, cache.ReflectorOptions{
		Name: w.Resource, Logger: &log,
		// The cap bounds how long we are blind after the API server is back.
		Backoff: &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 6, Cap: 10 * time.Second},
	})
	go r.RunWithContext(logr.NewContext(ctx, log))
	<-ctx.Done()
	s.mu.Lock() // nobody is told any more once this returns
	defer s.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.synced, w.failing = false, nil
}

func (w *Watch) options(o metav1.ListOptions) *metav1.ListOptions {
	o.FieldSelector = w.Fields
	return &o
}

func (w *Watch) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	l := w.List()
	err := w.Client.Get().Resource(w.Resource).VersionedParams(w.options(o), runtime.NewParameterCodec(w.Scheme)).Do(ctx).Into(l)
	return l, w.note(ctx, err)
}

func (w *Watch) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	i, err := w.Client.Get().Resource(w.Resource).VersionedParams(w.options(o), runtime.NewParameterCodec(w.Scheme)).Watch(ctx)
	return i, w.note(ctx, err)
}

// note logs when requests begin to fail and when they work again, as the reflector says little of that.
func (w *Watch) note(ctx context.Context, err error) error {
	if err != nil && w.Hint != nil {
		err = w.Hint(err)
	}
	if err != nil {
		err = fmt.Errorf("following %s: %w", w.Resource, err)
	}
	if context.Cause(ctx) == context.Canceled {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch was := w.failing; {
	case err != nil && was == nil:
		w.Logger.Warn("following objects of the API server fails; it is tried again", "resource", w.Resource, "error", err)
	case err == nil && was != nil:
		w.Logger.Info("following objects of the API server works again", "resource", w.Resource)
	}
	w.failing = err
	return err
}

// store is what the reflector fills.
type store struct {
	w   *Watch
	ctx context.Context // of the run; what comes after its end is not told
	mu  sync.Mutex      // held while somebody is told
}

func (s *store) tell(o any, f func(runtime.Object)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x, ok := o.(runtime.Object); ok && s.ctx.Err() == nil {
		f(x)
	}
	return nil
}

// Add, Update, Delete, Replace and Resync are what client-go's reflector wants of a store.
func (s *store) Add(o any) error { return s.tell(o, s.w.Put) }

// Update is Add.
func (s *store) Update(o any) error { return s.tell(o, s.w.Put) }

// Delete tells that an object is gone.
func (s *store) Delete(o any) error { return s.tell(o, s.w.Drop) }

// Replace tells what objects there are.
func (s *store) Replace(list []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return nil
	}
	all := make([]runtime.Object, 0, len(list))
	for _, o := range list {
		if x, ok := o.(runtime.Object); ok {
			all = append(all, x)
		}
	}
	s.w.Replace(all)
	s.w.mu.Lock()
	s.w.synced = true
	s.w.mu.Unlock()
	return nil
}

// Resync has nothing to do.
func (s *store) Resync() error { return nil }
