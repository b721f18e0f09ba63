package csr

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr/turns"
)

// Defaults of AdmissionConfig.
const (
	DefaultMaxInFlight = 128 // far above the cores: most of an issuance is waiting for the log
	DefaultMaxQueue    = 10_000
	DefaultMaxWait     = 5 * time.Second

	maxLimiters = 20_000    // identities or nodes whose rates are remembered
	maxRetry    = time.Hour // the longest wait that a refusal names
)

// AdmissionConfig bounds what the server takes on at a time (decision D19). Concurrency and waiting are always
// bounded; rates only where set.
type AdmissionConfig struct {
	MaxInFlight int           // requests worked on at a time; 0 = 128
	MaxQueue    int           // requests that wait; 0 = 10,000
	MaxWait     time.Duration // longest wait; 0 = 5s

	PerIdentity, PerNode, Global Rate
}

// Rate is a token bucket. The zero value sets no limit.
type Rate struct {
	PerSecond float64
	Burst     int // 0 = PerSecond, at least 1
}

func (r Rate) limiter() *rate.Limiter {
	burst := r.Burst
	if burst <= 0 {
		burst = max(1, int(r.PerSecond))
	}
	return rate.NewLimiter(rate.Limit(r.PerSecond), burst)
}

// admission lets requests in. Under contention nodes take turns, and on each node its identities do: a node or a
// workload that floods waits behind itself.
type admission struct {
	config   AdmissionConfig
	global   *rate.Limiter
	identity limiters
	node     limiters

	mu       sync.Mutex // guards all below
	inFlight int
	queued   int
	turns    *turns.Queue[*turns.Queue[*waiter]] // node -> identity -> waiters
}

// waiter is one request in the queue.
type waiter struct {
	node, identity string
	admitted       chan struct{} // closed when the slot is handed over
}

func newAdmission(c AdmissionConfig) *admission {
	if c.MaxInFlight <= 0 {
		c.MaxInFlight = DefaultMaxInFlight
	}
	if c.MaxQueue <= 0 {
		c.MaxQueue = DefaultMaxQueue
	}
	if c.MaxWait <= 0 {
		c.MaxWait = DefaultMaxWait
	}
	a := &admission{
		config: c, identity: limiters{rate: c.PerIdentity}, node: limiters{rate: c.PerNode}, turns: turns.New[*turns.Queue[*waiter]](),
	}
	if c.Global.PerSecond > 0 {
		a.global = c.Global.limiter()
	}
	return a
}

// acquire waits for a slot. The caller must call release once, if there is no denial.
func (a *admission) acquire(ctx context.Context, node, identity string) *Denial {
	if node == "" {
		node = "identity " + identity // a caller without a known node is a node of its own
	}
	if ctx.Err() != nil {
		return gaveUp(ctx)
	}
	if d := a.checkRates(node, identity); d != nil {
		return d
	}
	a.mu.Lock()
	if a.inFlight < a.config.MaxInFlight {
		a.inFlight++
		a.mu.Unlock()
		return nil
	}
	if a.queued >= a.config.MaxQueue {
		a.mu.Unlock()
		return busy(a.config.MaxWait, "%d requests wait already", a.config.MaxQueue)
	}
	w := &waiter{node, identity, make(chan struct{})}
	a.queued++
	ids := a.turns.First(node)
	if ids == nil {
		ids = turns.New[*waiter]()
		a.turns.Push(node, ids)
	}
	ids.Push(identity, w)
	a.mu.Unlock()
	return a.wait(ctx, w)
}

func (a *admission) wait(ctx context.Context, w *waiter) *Denial {
	timer := time.NewTimer(a.config.MaxWait)
	defer timer.Stop()
	var d *Denial
	select {
	case <-w.admitted:
		return nil
	case <-timer.C:
		d = busy(a.config.MaxWait, "no slot became free within %s", a.config.MaxWait)
	case <-ctx.Done():
		d = gaveUp(ctx)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case <-w.admitted: // the slot came at the same moment
		return nil
	default:
	}
	a.leave(w)
	return d
}

func gaveUp(ctx context.Context) *Denial {
	d := &Denial{Code: codes.Canceled, Reason: ReasonBusy, Detail: "the caller gave up waiting"}
	if ctx.Err() == context.DeadlineExceeded {
		d.Code = codes.DeadlineExceeded
	}
	return d
}

// leave takes a waiter out of the queue: one that gave up must not take up memory until a slot comes free, which may
// be long if the disk of the audit log hangs. Caller holds mu.
func (a *admission) leave(w *waiter) {
	a.queued--
	ids := a.turns.First(w.node)
	if ids.Drop(w.identity, w); ids.Keys() == 0 {
		a.turns.Remove(w.node)
	}
}

// release hands the slot to the next in turn, or frees it.
func (a *admission) release() {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, ids, ok := a.turns.Next()
	if !ok {
		a.inFlight--
		return
	}
	_, w, _ := ids.Next() // never empty: leave removes it then
	a.leave(w)
	close(w.admitted)
}

func (a *admission) checkRates(node, identity string) *Denial {
	if d := limited(a.identity.get(identity), "identity "+identity); d != nil {
		return d
	}
	if d := limited(a.node.get(node), "node "+node); d != nil {
		return d
	}
	return limited(a.global, "the server")
}

func limited(l *rate.Limiter, whose string) *Denial {
	if l == nil || l.Allow() {
		return nil
	}
	// Not Reserve and Cancel, which gives nothing back once another call has reserved: under a flood of refusals the
	// bucket would sink ever deeper.
	seconds := (1 - l.Tokens()) / float64(l.Limit())
	wait := time.Duration(min(seconds, maxRetry.Seconds()) * float64(time.Second))
	return busy(max(wait, time.Millisecond), "the rate of %s (%v a second) is used up", whose, float64(l.Limit()))
}

func busy(retry time.Duration, format string, args ...any) *Denial {
	return &Denial{Code: codes.ResourceExhausted, Reason: ReasonBusy, Detail: fmt.Sprintf(format, args...), RetryAfter: retry}
}

// limiters is a bounded set of token buckets by name.
type limiters struct {
	rate Rate
	mu   sync.Mutex // guards all
	all  map[string]*rate.Limiter
}

func (l *limiters) get(name string) *rate.Limiter {
	if l.rate.PerSecond <= 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if x := l.all[name]; x != nil {
		return x
	}
	if l.all == nil || len(l.all) >= maxLimiters {
		l.sweep()
	}
	x := l.rate.limiter()
	l.all[name] = x
	return x
}

// sweep forgets full buckets, which are as good as new ones; if that is not enough, all.
func (l *limiters) sweep() {
	kept := map[string]*rate.Limiter{}
	for name, x := range l.all {
		if x.Tokens() < float64(x.Burst()) {
			kept[name] = x
		}
	}
	if len(kept) >= maxLimiters {
		clear(kept)
	}
	l.all = kept
}
