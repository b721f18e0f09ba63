package federation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// Times between polls.
const (
	// DefaultEvery is for bundles without a refresh hint (SPIFFE Federation section 4.3).
	DefaultEvery = 5 * time.Minute
	// Shortest and Longest bound refresh hints: others shall not decide what they cost us, nor that we never look.
	Shortest = time.Minute
	Longest  = time.Hour

	// An unknown authority brings the next poll forward, but no closer to the one before than this. What brings nothing new makes that
	// time longer, so that somebody with a certificate of his own making does not have us ask for ever.
	unknownEvery = time.Minute
	unknownMost  = 16 * time.Minute

	watchLease = time.Second      // how often who does not poll looks whether it is to
	spread     = 10 * time.Second // over which the first polls are spread, where there is a bundle to go on with
	atATime    = 8
)

// PollerConfig is what a Poller is made of.
type PollerConfig struct {
	Clients []*Client // one for each trust domain
	// Polls reports whether this process is the one that polls now.
	Polls func() bool
	// Hint returns the refresh hint of the bundle that was taken last, 0 for none, and whether there is one at all.
	Hint func(trust.Domain) (hint time.Duration, have bool)
	// Take takes a bundle that was fetched, unless it is older than the one that there is. Polled says that this was done because Polls
	// said so, not because somebody asked. It reports whether anything changed.
	Take   func(ctx context.Context, r Relationship, b *spiffebundle.Bundle, polled bool) (changed bool, err error)
	Logger *slog.Logger
}

// ErrElsewhere is what Take returns if another process is to poll by now. It is no failure of the relationship.
var ErrElsewhere = errors.New("another server polls")

// Poller fetches bundles when they are due. Each relationship goes its own way: what one fails at does not touch others.
type Poller struct {
	config  PollerConfig
	order   []*relation
	wake    chan struct{} // has room for one
	running chan struct{} // has room for as many as fetch at a time

	mu     sync.Mutex // guards all but client and lock of each relation, and polled
	polled bool       // Polls said so when Run looked last
}

type relation struct {
	client *Client
	lock   chan struct{} // has room for the one that fetches

	begun    time.Time     // when the last fetch was, or the one under way
	due      time.Time     // when it is polled next, by who polls
	soon     time.Time     // when it is fetched because of an unknown authority; zero: no need
	patience time.Duration // between two such
	status   Status
}

// Status is how a relationship goes.
type Status struct {
	Relationship Relationship
	LastSuccess  time.Time // as far as this process knows, which is since its start; zero: none
	LastTry      time.Time
	Next         time.Time // zero: not by this process
	Error        string    // of the last try; empty if it worked
	Failures     uint64    // since the start
}

// NewPoller makes a poller that has fetched nothing.
func NewPoller(c PollerConfig) *Poller {
	p := &Poller{config: c, wake: make(chan struct{}, 1), running: make(chan struct{}, atATime)}
	for _, one := range c.Clients {
		p.order = append(p.order, &relation{client: one, lock: make(chan struct{}, 1), patience: unknownEvery, status: Status{Relationship: one.Relationship()}})
	}
	return p
}

// Run polls until ctx ends, whenever Polls says so, and fetches what Unknown asks for whether it does or not.
func (p *Poller) Run(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	if len(p.order) == 0 {
		return nil
	}
	for {
		timer := time.NewTimer(p.start(ctx, &all))
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-p.wake:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// start begins what is due and returns how long there is nothing more to do.
func (p *Poller) start(ctx context.Context, all *sync.WaitGroup) time.Duration {
	polls, now, wait := p.config.Polls(), time.Now(), Longest
	if !polls {
		wait = watchLease
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if polls && !p.polled {
		for _, r := range p.order {
			r.due = now.Add(p.first(r))
		}
	}
	p.polled = polls
	for _, r := range p.order {
		asked := !r.soon.IsZero() && !now.Before(r.soon)
		if !asked && (!polls || now.Before(r.due)) {
			if polls {
				wait = min(wait, r.due.Sub(now))
			}
			if !r.soon.IsZero() {
				wait = min(wait, r.soon.Sub(now))
			}
			continue
		}
		if !take(p.running) { // the end of any fetch wakes us
			break
		}
		if !take(r.lock) { // that of this one does
			<-p.running
			continue
		}
		r.begun, r.soon = now, time.Time{}
		all.Go(func() {
			defer p.signal()
			defer func() { <-p.running; <-r.lock }()
			p.poll(ctx, r, polls, asked) // what is wrong is in the status and the log
		})
	}
	return wait
}

func take(c chan struct{}) bool {
	select {
	case c <- struct{}{}:
		return true
	default:
		return false
	}
}

func (p *Poller) signal() { take(p.wake) }

// first is how long who begins to poll waits: not at all where there is nothing to go on with.
func (p *Poller) first(r *relation) time.Duration {
	if _, have := p.config.Hint(r.client.Relationship().Domain); !have {
		return 0
	}
	return rand.N(spread)
}

// every returns how long after a fetch the next one comes: never later than the hint, and not when all others come. A fetch that failed changes
// nothing about it (section 4.3); where there is no bundle at all, the first one is not waited for that long.
func (p *Poller) every(r *relation) time.Duration {
	hint, have := p.config.Hint(r.client.Relationship().Domain)
	switch {
	case !have:
		hint = Shortest
	case hint <= 0:
		hint = DefaultEvery
	}
	hint = min(max(hint, Shortest), Longest)
	return hint - rand.N(hint/10)
}

// poll fetches once, for who has the relation's lock.
func (p *Poller) poll(ctx context.Context, r *relation, polls, asked bool) error {
	begun := time.Now()
	b, err := r.client.Fetch(ctx)
	changed := false
	if err == nil {
		changed, err = p.config.Take(ctx, r.client.Relationship(), b, polls && !asked)
	}
	if err != nil && ctx.Err() != nil {
		return err // we were told to stop: nothing is known of the endpoint
	}
	every, td := p.every(r), r.client.Relationship().Domain.String()
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &r.status
	s.LastTry, r.due = begun, time.Now().Add(every)
	switch {
	case errors.Is(err, ErrElsewhere):
		return err
	case changed:
		r.patience = unknownEvery
	case asked:
		r.patience = min(2*r.patience, unknownMost)
	}
	if err != nil {
		s.Error = err.Error()
		s.Failures++
		p.config.Logger.Warn("bundle of a federated trust domain not refreshed; the last one stays", "trust_domain", td, "reason", err.Error())
		return err
	}
	if s.Error != "" {
		p.config.Logger.Info("bundle of a federated trust domain is refreshed again", "trust_domain", td)
	}
	s.LastSuccess, s.Error = time.Now(), ""
	return nil
}

// Unknown says that a peer of a trust domain showed a certificate that no known root vouches for: its roots may have been replaced. The
// domain's bundle is fetched soon, as often as that may be. It does not wait, and nothing happens for a domain without a relationship.
func (p *Poller) Unknown(td trust.Domain) {
	r := p.of(td)
	if r == nil {
		return
	}
	now := time.Now()
	p.mu.Lock()
	at := now
	if next := r.begun.Add(r.patience); next.After(now) {
		at = next
	}
	if r.soon.IsZero() || at.Before(r.soon) {
		r.soon = at
	}
	p.mu.Unlock()
	p.signal()
}

// Refresh fetches the bundle of a trust domain now, whoever polls; the zero Domain stands for all. The error says which failed.
func (p *Poller) Refresh(ctx context.Context, td trust.Domain) error {
	if !td.IsZero() {
		r := p.of(td)
		if r == nil {
			return fmt.Errorf("there is no relationship with trust domain %s in `federation` of the config, so there is nowhere to fetch its bundle", td)
		}
		return p.refresh(ctx, r)
	}
	errs := make([]error, len(p.order))
	var g errgroup.Group
	g.SetLimit(atATime)
	for i, r := range p.order {
		g.Go(func() error {
			errs[i] = p.refresh(ctx, r)
			return nil
		})
	}
	g.Wait()
	return errors.Join(errs...)
}

func (p *Poller) refresh(ctx context.Context, r *relation) error {
	select {
	case r.lock <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer p.signal()
	defer func() { <-r.lock }()
	p.mu.Lock()
	r.begun = time.Now()
	p.mu.Unlock()
	return p.poll(ctx, r, false, false)
}

func (p *Poller) of(td trust.Domain) *relation {
	for _, r := range p.order {
		if r.client.Relationship().Domain == td {
			return r
		}
	}
	return nil
}

// Status returns how each relationship goes, in the order of the clients.
func (p *Poller) Status() []Status {
	polls := p.config.Polls()
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []Status
	for _, r := range p.order {
		s := r.status
		if polls && p.polled {
			s.Next = r.due
		}
		if !r.soon.IsZero() && (s.Next.IsZero() || r.soon.Before(s.Next)) {
			s.Next = r.soon
		}
		all = append(all, s)
	}
	return all
}
