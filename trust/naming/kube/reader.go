package kube

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/chancery-project/chancery/trust/naming"
)

const (
	// lookForDefinitions is how often a cluster is asked whether it has Istio's definitions by now.
	lookForDefinitions = 30 * time.Second
	// patience bounds a request that is no watch and no list of all.
	patience = 10 * time.Second
)

// Config says what is read, and who is told.
type Config struct {
	REST    *rest.Config
	HTTP    *http.Client
	Cluster *naming.Cluster
	Logger  *slog.Logger
}

// Reader reads one cluster.
type Reader struct {
	log   *slog.Logger
	feeds []*feed
}

// New makes a reader. It asks the API server nothing before Run.
func New(c Config) (*Reader, error) {
	all, err := resources(c.REST, c.HTTP)
	if err != nil {
		return nil, err
	}
	r := &Reader{log: c.Logger}
	for _, kind := range naming.Kinds {
		r.feeds = append(r.feeds, &feed{kind: kind, resource: all[kind], to: c.Cluster, log: c.Logger.With("resource", all[kind].name)})
	}
	return r, nil
}

// Run reads until ctx ends.
func (r *Reader) Run(ctx context.Context) error {
	for _, f := range r.feeds {
		// Not waited for: client-go's reflector may sleep out its backoff before it sees that ctx ended.
		go f.run(ctx)
	}
	<-ctx.Done()
	return nil
}

// Trouble says what cannot be read now, and could not for so long, in order; nothing if all can.
func (r *Reader) Trouble(long time.Duration) (all []string) {
	for _, f := range r.feeds {
		if why := f.trouble(long); why != "" {
			all = append(all, why)
		}
	}
	slices.Sort(all)
	return all
}

// feed follows the objects of one kind. It is the store that client-go's reflector fills, and keeps none of them: the engine does.
type feed struct {
	resource
	kind naming.Kind
	to   *naming.Cluster
	log  *slog.Logger

	mu     sync.Mutex // guards the rest
	failed error      // of the last list or watch; nil if it worked
	since  time.Time  // when that began
	absent bool       // the cluster has no such definition
	stop   context.CancelFunc
}

func (f *feed) run(ctx context.Context) {
	if !f.optional {
		f.follow(ctx)
		return
	}
	for ctx.Err() == nil {
		pause := lookForDefinitions
		asking, cancel := context.WithTimeout(ctx, patience)
		_, err := f.get(asking, metav1.ListOptions{Limit: 1})
		cancel()
		switch {
		case apierrors.IsNotFound(err):
			f.miss()
		case err != nil:
			f.note(ctx, err)
			pause = 5 * time.Second
		default:
			following, stop := context.WithCancel(ctx)
			f.mu.Lock()
			f.stop, f.absent = stop, false
			f.mu.Unlock()
			f.follow(following)
			stop()
			pause = time.Second
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause + rand.N(pause/4)):
		}
	}
}

// miss notes that the cluster has no such definition, and so no objects of it. Many have none.
func (f *feed) miss() {
	f.mu.Lock()
	was, stop := f.absent, f.stop
	f.absent, f.failed = true, nil
	f.mu.Unlock()
	if stop != nil {
		stop()
	}
	if !was {
		f.log.Debug("the cluster has no such definition", "kind", string(f.kind))
		f.to.Replace(f.kind, nil)
	}
}

// follow lists and watches until ctx ends.
func (f *feed) follow(ctx context.Context) {
	log := logr.FromSlogHandler(f.log.Handler())
	r := cache.NewReflectorWithOptions(&cache.ListWatch{ListWithContextFunc: f.list, WatchFuncWithContext: f.open}, f.one, f, cache.ReflectorOptions{
		Name:   f.name,
		Logger: &log,
		// The cap bounds how long we are blind after the API server is back.
		Backoff: &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 6, Cap: 10 * time.Second},
	})
	r.RunWithContext(logr.NewContext(ctx, log))
}

func (f *feed) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	l, err := f.get(ctx, o)
	f.note(ctx, err)
	return l, err
}

func (f *feed) open(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	w, err := f.watch(ctx, o)
	f.note(ctx, err)
	return w, err
}

// note logs when requests begin to fail and when they work again, as the reflector says little of that.
func (f *feed) note(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	if f.optional && apierrors.IsNotFound(err) {
		f.miss()
		return
	}
	f.mu.Lock()
	was := f.failed
	if f.failed = err; err != nil && was == nil {
		f.since = time.Now()
	}
	f.mu.Unlock()
	switch {
	case err != nil && was == nil:
		f.log.Warn("what secure naming reads cannot be followed; what was last read of it counts until it works again", "reason", err.Error())
	case err == nil && was != nil:
		f.log.Info("what secure naming reads can be followed again")
	}
}

func (f *feed) trouble(long time.Duration) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failed == nil || time.Since(f.since) < long {
		return ""
	}
	return fmt.Sprintf("%s cannot be read since %s: %.300s", f.name, f.since.UTC().Format(time.RFC3339), strings.ToValidUTF8(f.failed.Error(), "?"))
}

// Add, Update, Delete, Replace, Resync and Transformer are what client-go's reflector wants of a store.
func (f *feed) Add(o any) error {
	kept, err := convert(f.kind, o)
	if err != nil {
		return err
	}
	f.to.Put(kept)
	return nil
}

// Update is Add.
func (f *feed) Update(o any) error { return f.Add(o) }

// Delete takes word that an object is gone.
func (f *feed) Delete(o any) error {
	kept, err := convert(f.kind, o)
	if err != nil {
		return err
	}
	f.to.Drop(kept.Key())
	return nil
}

// Replace takes all objects.
func (f *feed) Replace(list []any, _ string) error {
	all := make([]naming.Object, 0, len(list))
	for _, o := range list {
		kept, err := convert(f.kind, o)
		if err != nil {
			return err
		}
		all = append(all, kept)
	}
	f.to.Replace(f.kind, all)
	return nil
}

// Resync has nothing to do.
func (f *feed) Resync() error { return nil }

// Transformer makes the reflector collect what we keep, not whole objects.
func (f *feed) Transformer() cache.TransformFunc {
	return func(o any) (any, error) { return convert(f.kind, o) }
}
