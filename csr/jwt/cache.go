package jwt

import (
	"context"
	"crypto/sha256"
	"maps"
	"sync"
	"time"
)

const (
	maxVerdicts = 10_000
	maxCached   = 60 * time.Second // decision D18
)

// digest is the SHA-256 of a token. The cache holds digests, not tokens, so that a dump of our memory is no treasure.
type digest = [sha256.Size]byte

// verdicts remembers whose signatures verified (decision D18). Only good verdicts are kept. When it is full, the one
// of a few at random that ends first makes room: an attacker needs valid tokens to push others out, and gains nothing.
type verdicts struct {
	limit int
	mu    sync.Mutex // guards m
	m     map[digest]*verdict
}

func newVerdicts(limit int) *verdicts {
	return &verdicts{limit: limit, m: map[digest]*verdict{}}
}

// get returns the verdict of a token, or nil if there is none, if it is over, or if its key has left the key set.
func (c *verdicts) get(d *digest, now time.Time) *verdict {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := c.m[*d]
	if v == nil {
		return nil
	}
	if !now.Before(v.until) || v.key != nil && v.key.retired.Load() {
		delete(c.m, *d)
		return nil
	}
	return v
}

func (c *verdicts) put(d *digest, v *verdict) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.m[*d]; !ok && len(c.m) >= c.limit {
		c.evict()
	}
	c.m[*d] = v
}

// sweep drops what is over, once a minute until ctx ends, so that a burst of callers does not keep its memory.
func (c *verdicts) sweep(ctx context.Context) {
	tick := time.NewTicker(maxCached)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			c.mu.Lock()
			maps.DeleteFunc(c.m, func(_ digest, v *verdict) bool { return !now.Before(v.until) })
			c.mu.Unlock()
		}
	}
}

// evict drops one of up to 8 entries. A range over a map starts at a random place.
func (c *verdicts) evict() {
	var first digest
	var until time.Time
	n := 0
	for d, v := range c.m {
		if n == 0 || v.until.Before(until) {
			first, until = d, v.until
		}
		if n++; n == 8 {
			break
		}
	}
	delete(c.m, first)
}
