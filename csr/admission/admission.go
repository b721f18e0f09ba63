// Package admission owns when a request is worked on: how many at a time, who comes first when there are more, and how soon
// those that there was no room for should come again (decision D19).
//
// Under contention nodes take turns, and on each node its identities do; within a round the request that is due first comes
// first (package turns). What is due when:
//   - a request whose sender shows an SVID, when that ends: he has no identity from then on;
//   - any other, a while after it came: a new pod cannot work before it has its first SVID, and one whose SVID has ended has
//     an outage already. They come before all who have more left than that while, and after those who have less.
//
// So after an outage the SVIDs that are about to end are renewed first, then those are served that have none, then the rest
// by the life that they have left.
//
// The end of the SVID is taken from the certificate that the connection shows without verifying its signature, which would
// cost a fifth of an issuance just when there is no time. Nothing is gained by lying: whoever may ask at all can have a true
// SVID that ends in five seconds whenever he likes, and either way he has the one turn of his node in each round.
//
// It refuses what waits longer than it may, and what would be more than may wait.
package admission

import (
	"context"
	"fmt"
	mrand "math/rand/v2"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/chancery-project/chancery/csr/turns"
)

// Defaults of Config.
const (
	DefaultMaxInFlight = 128 // far above the cores: most of an issuance is waiting for the log
	DefaultMaxQueue    = 10_000
	DefaultMaxWait     = 5 * time.Second
)

// patience is how long after it came a request of somebody without an SVID is due.
const patience = 15 * time.Second

// Config bounds what the server takes on at a time. Concurrency and waiting are always bounded; rates only where set.
type Config struct {
	MaxInFlight int           // requests worked on at a time; 0 = 128
	MaxQueue    int           // requests that wait; 0 = 10,000
	MaxWait     time.Duration // longest wait; 0 = 5s

	PerIdentity, PerNode, Global Rate
}

// Request is who asks.
type Request struct {
	Node     string // empty if not known
	Identity string
	Ends     time.Time // when the SVID ends that the sender shows; zero if he shows none
}

// Busy says that there is no room.
type Busy struct {
	Detail     string
	RetryAfter time.Duration
}

// Error returns the detail.
func (b *Busy) Error() string { return b.Detail }

// Admission lets requests in. Its methods are safe for concurrent use.
type Admission struct {
	config   Config
	global   *rate.Limiter
	identity limiters
	node     limiters

	mu       sync.Mutex // guards all below
	inFlight int
	queued   int
	waiting  *turns.Queue[chan struct{}] // each closed when the slot is handed over
}

// New returns an admission with all slots free.
func New(c Config) *Admission {
	if c.MaxInFlight <= 0 {
		c.MaxInFlight = DefaultMaxInFlight
	}
	if c.MaxQueue <= 0 {
		c.MaxQueue = DefaultMaxQueue
	}
	if c.MaxWait <= 0 {
		c.MaxWait = DefaultMaxWait
	}
	a := &Admission{config: c, identity: limiters{rate: c.PerIdentity}, node: limiters{rate: c.PerNode}, waiting: turns.New[chan struct{}]()}
	if c.Global.PerSecond > 0 {
		a.global = c.Global.limiter()
	}
	return a
}

// Acquire waits for a slot. The caller must call Release once, if there is no error. One is of type *Busy, or ctx's.
func (a *Admission) Acquire(ctx context.Context, r Request) error {
	if r.Node == "" {
		r.Node = "identity " + r.Identity // a caller without a known node is a node of its own
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := a.checkRates(r); err != nil {
		return err
	}
	a.mu.Lock()
	if a.inFlight < a.config.MaxInFlight {
		a.inFlight++
		a.mu.Unlock()
		return nil
	}
	if a.queued >= a.config.MaxQueue {
		defer a.mu.Unlock()
		return a.busy(fmt.Sprintf("%d requests wait already", a.config.MaxQueue))
	}
	a.queued++
	item := a.waiting.Push(r.Node, r.Identity, due(r.Ends, time.Now()), make(chan struct{}))
	a.mu.Unlock()
	return a.wait(ctx, item)
}

// due returns when a request is due that comes now.
func due(ends, now time.Time) time.Time {
	if now.Before(ends) {
		return ends
	}
	return now.Add(patience)
}

func (a *Admission) wait(ctx context.Context, item *turns.Item[chan struct{}]) error {
	timer := time.NewTimer(a.config.MaxWait)
	defer timer.Stop()
	late := false
	select {
	case <-item.Value:
		return nil
	case <-timer.C:
		late = true
	case <-ctx.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case <-item.Value: // the slot came at the same moment
		return nil
	default:
	}
	// One that gave up must not take up memory until a slot comes free, which may be long if the disk of the audit log hangs.
	a.waiting.Remove(item)
	a.queued--
	if late {
		return a.busy(fmt.Sprintf("no slot became free within %s", a.config.MaxWait))
	}
	return ctx.Err()
}

// Release hands the slot to the next in turn, or frees it.
func (a *Admission) Release() {
	a.mu.Lock()
	defer a.mu.Unlock()
	next := a.waiting.Next()
	if next == nil {
		a.inFlight--
		return
	}
	a.queued--
	close(next.Value)
}

// State returns how many requests are worked on, how many wait, and how many of these are really in the queue.
func (a *Admission) State() (inFlight, queued, waiting int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for range a.waiting.All() {
		waiting++
	}
	return a.inFlight, a.queued, waiting
}

// busy says that there is no room, and when to come again: the longer the queue, the later, from once to three times
// MaxWait, since that is about how long it will stay so; and each at a time of his own, from a half to one and a half of
// that, since those who are refused together would come back together. Caller holds mu.
func (a *Admission) busy(detail string) *Busy {
	full := float64(a.queued) / float64(a.config.MaxQueue)
	return &Busy{detail, time.Duration(float64(a.config.MaxWait) * (1 + 2*full) * (0.5 + mrand.Float64()))}
}
