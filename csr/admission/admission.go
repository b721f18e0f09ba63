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
// The end of the SVID is what the request says, else taken from the certificate that the connection shows without verifying its
// signature, which would cost a fifth of an issuance just when there is no time. Nothing is gained by lying: whoever may ask at all can have a true
// SVID that ends in five seconds whenever he likes, and either way he has the one turn of his node in each round.
//
// It refuses what waits longer than it may, and what would be more than may wait: then who is due last, of a node that has many
// there, gives way to who is due sooner. Whoever is refused is told to come when there should be room: those that wait, and those
// that were told to come before him, take so long at the pace of the moment.
package admission

import (
	"context"
	"fmt"
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
	Ends     time.Time // when the SVID ends that the sender has; zero if he shows none
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
	waiting  *turns.Queue[chan bool] // each is told once: true when it gets the slot, false when it gives way
	pace     pace
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
	a := &Admission{config: c, identity: limiters{rate: c.PerIdentity}, node: limiters{rate: c.PerNode}, waiting: turns.New[chan bool]()}
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
	now := time.Now()
	due := due(r.Ends, now)
	if a.queued >= a.config.MaxQueue {
		last := a.waiting.GivesWay(r.Node, due)
		if last == nil {
			defer a.mu.Unlock()
			return a.full()
		}
		a.waiting.Remove(last)
		a.queued--
		last.Value <- false
	}
	if a.queued == 0 {
		a.pace.begin(now)
	}
	a.queued++
	item := a.waiting.Push(r.Node, r.Identity, due, make(chan bool, 1))
	a.mu.Unlock()
	return a.wait(ctx, item)
}

// full is the refusal of one that there is no room for. Caller holds mu.
func (a *Admission) full() *Busy {
	return a.busy(fmt.Sprintf("%d requests wait already", a.config.MaxQueue))
}

// due returns when a request is due that comes now.
func due(ends, now time.Time) time.Time {
	if now.Before(ends) {
		return ends
	}
	return now.Add(patience)
}

// patienceOf returns how long a request may wait: a little less than its caller does, so that he hears when to come again
// instead of nothing, and no slot goes to one that has left, or is about to.
func (a *Admission) patienceOf(ctx context.Context) time.Duration {
	if end, ok := ctx.Deadline(); ok {
		return min(a.config.MaxWait, time.Until(end)*9/10)
	}
	return a.config.MaxWait
}

func (a *Admission) wait(ctx context.Context, item *turns.Item[chan bool]) error {
	patience := a.patienceOf(ctx)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	told, mine, late := false, false, false
	select {
	case mine = <-item.Value:
		told = true
	case <-timer.C:
		late = true
	case <-ctx.Done():
	}
	if mine {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !told {
		select {
		case mine = <-item.Value: // at the same moment
			told = true
		default:
		}
	}
	switch {
	case mine:
		return nil
	case told:
		return a.full()
	}
	// One that gave up must not take up memory until a slot comes free, which may be long if the disk of the audit log hangs.
	a.waiting.Remove(item)
	a.queued--
	if late {
		return a.busy(fmt.Sprintf("no slot became free within %s", patience.Round(time.Millisecond)))
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
	a.pace.served(time.Now())
	next.Value <- true
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

// busy says that there is no room, and when there should be. Caller holds mu.
func (a *Admission) busy(detail string) *Busy {
	return &Busy{detail, a.pace.retry(time.Now(), a.queued, a.config.MaxWait)}
}
