package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/signers"
	"github.com/chancery-project/chancery/csr/turns"
	follow "github.com/chancery-project/chancery/trust/kube"
)

const (
	// workers is how many requests of one kind are worked on at a time: a kubelet that restarts asks anew for each volume of its node, and
	// what comes over gRPC should not wait for them.
	workers = 8
	// maxWaiting bounds the requests that are known. What is more is found again when the others are done.
	maxWaiting = 20_000
	// backoffFirst and backoffMost bound the time between two tries of one request.
	backoffFirst = 500 * time.Millisecond
	backoffMost  = 30 * time.Second
	// fresh is how long after its NotBefore a certificate may be written that was signed before; then another is signed. The API server
	// takes none after five minutes.
	fresh     = 4 * time.Minute
	troubling = time.Minute // a request that waits longer for us is trouble
)

// kind is one of the two APIs.
type kind interface {
	resource() string
	empty() runtime.Object
	list() runtime.Object
	// read returns what is known of an object; nil if nothing is to be done about it.
	read(o runtime.Object) *request
	// decide has it signed or refused.
	decide(ctx context.Context, o runtime.Object) (*signers.Signed, *signers.Refusal)
	// settle returns the object with the status for what was decided. A nil Signed is a final refusal.
	settle(o runtime.Object, s *signers.Signed, r *signers.Refusal) runtime.Object
}

// request is one that waits.
type request struct {
	namespace, name, uid string
	node, identity       string // whose turn it takes
	object               runtime.Object

	signed  *signers.Signed  // but not written yet
	refusal *signers.Refusal // final, but not written yet
	since   time.Time
	tries   int
	at      *turns.Item[*request] // in the queue
	working bool
	again   *time.Timer // until the next try
	err     error       // of the last try
}

func (r *request) key() string { return r.namespace + "/" + r.name }

// line is what waits to be signed by one signer.
type line struct {
	c      *Controller
	kind   kind
	signer string
	watch  *follow.Watch

	mu       sync.Mutex // guards the rest
	requests map[string]*request
	queue    *turns.Queue[*request]
	news     chan struct{} // there may be something in the queue
	over     bool          // some did not fit
	restart  func()        // follows anew
	began    time.Time     // to follow
}

func (c *Controller) newLine(scheme *runtime.Scheme, k kind, signer string) *line {
	l := &line{c: c, kind: k, signer: signer}
	l.reset()
	l.watch = &follow.Watch{
		Client: c.client, Scheme: scheme, Resource: k.resource(), Fields: "spec.signerName=" + signer, Object: k.empty(), List: k.list, Logger: c.config.Logger,
		Put: l.put, Drop: l.drop, Replace: l.replace, Hint: func(err error) error { return hint(err, k.resource(), signer) },
	}
	c.metrics.waiting(k.resource(), func() float64 {
		l.mu.Lock()
		defer l.mu.Unlock()
		return float64(len(l.requests))
	})
	return l
}

func (l *line) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.requests {
		if r.again != nil {
			r.again.Stop()
		}
	}
	l.requests, l.queue, l.over = map[string]*request{}, turns.New[*request](), false
	l.news = make(chan struct{}, workers)
}

// run follows and signs until ctx ends.
func (l *line) run(ctx context.Context) {
	l.mu.Lock()
	l.began = time.Now()
	l.mu.Unlock()
	var working sync.WaitGroup
	for range workers {
		working.Go(func() { l.work(ctx) })
	}
	for ctx.Err() == nil {
		following, restart := context.WithCancel(ctx)
		l.mu.Lock()
		l.restart = restart
		l.mu.Unlock()
		l.watch.Run(following)
		restart()
	}
	working.Wait()
	l.reset()
}

func (l *line) put(o runtime.Object) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.take(o)
}

// take notes an object. Caller holds mu.
func (l *line) take(o runtime.Object) {
	r := l.kind.read(o)
	if r == nil {
		return
	}
	was := l.requests[r.key()]
	if r.object == nil { // settled
		if was != nil {
			l.forget(was)
		}
		return
	}
	if was != nil && was.uid == r.uid {
		was.object = r.object
		return
	}
	if was != nil {
		l.forget(was)
	}
	if len(l.requests) >= maxWaiting {
		l.over = true
		return
	}
	r.since = time.Now()
	l.requests[r.key()] = r
	l.push(r)
}

// push puts a request into the queue. Caller holds mu.
func (l *line) push(r *request) {
	r.at = l.queue.Push(r.node, r.identity, r.since, r)
	select {
	case l.news <- struct{}{}:
	default: // all workers have been woken
	}
}

func (l *line) drop(o runtime.Object) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.kind.read(o); r != nil {
		if was := l.requests[r.key()]; was != nil && was.uid == r.uid {
			l.forget(was)
		}
	}
}

func (l *line) replace(all []runtime.Object) {
	l.mu.Lock()
	defer l.mu.Unlock()
	there := map[string]bool{}
	for _, o := range all {
		if r := l.kind.read(o); r != nil {
			there[r.key()] = true
		}
		l.take(o)
	}
	for key, r := range l.requests {
		if !there[key] {
			l.forget(r)
		}
	}
}

// forget is for what is settled or gone. Caller holds mu.
func (l *line) forget(r *request) {
	if r.at != nil {
		l.queue.Remove(r.at)
		r.at = nil
	}
	if r.again != nil {
		r.again.Stop()
	}
	if l.requests[r.key()] == r {
		delete(l.requests, r.key())
	}
	if l.over && len(l.requests) < maxWaiting/2 && l.restart != nil {
		l.over = false
		l.restart()
	}
}

// work works on what is next until ctx ends.
func (l *line) work(ctx context.Context) {
	for ctx.Err() == nil {
		r, o := l.next()
		if r == nil {
			select {
			case <-ctx.Done():
				return
			case <-l.news:
			}
			continue
		}
		err := l.try(ctx, r, o)
		if ctx.Err() != nil {
			return
		}
		l.done(ctx, r, err)
	}
}

func (l *line) next() (*request, runtime.Object) {
	l.mu.Lock()
	defer l.mu.Unlock()
	item := l.queue.Next()
	if item == nil {
		return nil, nil
	}
	r := item.Value
	r.at, r.working = nil, true
	return r, r.object
}

// try decides on a request, unless that is done already, and writes its status.
func (l *line) try(ctx context.Context, r *request, o runtime.Object) error {
	if r.signed != nil && time.Since(r.signed.NotBefore) > fresh {
		r.signed = nil
	}
	if r.signed == nil && r.refusal == nil {
		signed, refused := l.kind.decide(ctx, o)
		if refused != nil {
			l.c.metrics.outcome(l.kind.resource(), refused.Reason)
			if !refused.Final {
				return refused
			}
			l.c.config.Logger.Info("request for a certificate denied", "resource", l.kind.resource(), "request", r.key(), "reason", refused.Reason, "detail", refused.Detail)
		} else {
			l.c.metrics.outcome(l.kind.resource(), "ok")
		}
		r.signed, r.refusal = signed, refused
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	body := l.kind.settle(o, r.signed, r.refusal)
	err := l.c.client.Put().NamespaceIfScoped(r.namespace, r.namespace != "").Resource(l.kind.resource()).Name(r.name).SubResource("status").Body(body).Do(ctx).Error()
	if err != nil {
		l.c.metrics.failed.WithLabelValues(l.kind.resource()).Inc()
		err = fmt.Errorf("writing the status: %w", hint(err, l.kind.resource(), l.signer))
	}
	return err
}

// done notes what became of a try: what failed comes again.
func (l *line) done(ctx context.Context, r *request, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.working, r.err = false, err
	switch {
	case l.requests[r.key()] != r: // gone meanwhile
		return
	case err == nil, apierrors.IsNotFound(err):
		l.forget(r)
		return
	}
	if r.tries == 0 {
		level := l.c.config.Logger.Warn
		if apierrors.IsConflict(err) {
			level = l.c.config.Logger.Debug
		}
		level("request for a certificate waits; it is tried again", "resource", l.kind.resource(), "request", r.key(), "reason", err.Error())
	}
	pause := min(backoffFirst<<min(r.tries, 10), backoffMost)
	r.tries++
	r.again = time.AfterFunc(pause/2+rand.N(pause), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if ctx.Err() == nil && l.requests[r.key()] == r && r.at == nil && !r.working {
			l.push(r)
		}
	})
}

// trouble returns why requests wait, if they do for long.
func (l *line) trouble() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.watch.Err(); err != nil {
		if errors.Is(err, follow.ErrNotListed) && time.Since(l.began) < troubling {
			return nil
		}
		return err
	}
	return l.late()
}

// late returns why requests wait for long. Those of pods that are gone, and of identities that are revoked, are as they should be. Caller holds mu.
func (l *line) late() error {
	late := 0
	var first *request
	for _, r := range l.requests {
		refused, _ := errors.AsType[*signers.Refusal](r.err)
		if time.Since(r.since) < troubling || refused != nil && (refused.Reason == csr.ReasonPodGone || refused.Reason == csr.ReasonRevoked) {
			continue
		}
		late++
		if r.err != nil && (first == nil || r.since.Before(first.since)) {
			first = r
		}
	}
	switch {
	case late == 0:
		return nil
	case first == nil:
		return errors.New("requests come faster than they are signed")
	}
	return fmt.Errorf("%d requests wait for more than %s; %s: %w", late, troubling, first.key(), first.err)
}
