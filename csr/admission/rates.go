package admission

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	maxLimiters = 20_000    // identities or nodes whose rates are remembered
	maxRetry    = time.Hour // the longest wait that a refusal names
)

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

func (a *Admission) checkRates(r Request) error {
	if b := limited(a.identity.get(r.Identity), "identity ", r.Identity); b != nil {
		return b
	}
	if b := limited(a.node.get(r.Node), "node ", r.Node); b != nil {
		return b
	}
	if b := limited(a.global, "the server", ""); b != nil {
		return b
	}
	return nil
}

func limited(l *rate.Limiter, what, name string) *Busy {
	if l == nil || l.Allow() {
		return nil
	}
	// Not Reserve and Cancel, which gives nothing back once another call has reserved: under a flood of refusals the
	// bucket would sink ever deeper.
	seconds := (1 - l.Tokens()) / float64(l.Limit())
	wait := time.Duration(min(seconds, maxRetry.Seconds()) * float64(time.Second))
	return &Busy{fmt.Sprintf("the rate of %s%s (%v a second) is used up", what, name, float64(l.Limit())), max(wait, time.Millisecond)}
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
