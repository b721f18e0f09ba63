// Package tally owns counts of the recent past: how often each of a few outcomes was met in the last minute, in the last hour
// and in all.
//
// It refuses to be a time series: what is older than an hour is known as a total only. For more there are the metrics.
package tally

import (
	"sync"
	"time"
)

// slots is the number of parts of a window: seconds of a minute, minutes of an hour.
const slots = 60

// Tally counts outcomes. Its names should be few, since none is forgotten. All methods are safe for concurrent use.
type Tally struct {
	begun time.Time // of the monotonic clock, which does not jump

	mu     sync.Mutex // guards counts and what is in it
	counts map[string]*count
}

// Count is how often an outcome was met.
type Count struct {
	Minute, Hour, Total uint64 // the minute is exact to a second, the hour to a minute
}

type count struct {
	total            uint64
	seconds, minutes window
}

// window is a ring of slots, each of which counts one unit of time.
type window struct {
	slots  [slots]uint64
	newest int64 // unit of time that was counted last
}

// New returns a tally that has counted nothing.
func New() *Tally { return &Tally{begun: time.Now(), counts: map[string]*count{}} }

// Add counts an outcome.
func (t *Tally) Add(outcome string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.counts[outcome]
	if c == nil {
		c = new(count)
		t.counts[outcome] = c
	}
	s := int64(time.Since(t.begun) / time.Second)
	c.total++
	c.seconds.slot(s)
	c.seconds.slots[s%slots]++
	c.minutes.slot(s / 60)
	c.minutes.slots[s/60%slots]++
}

// Counts returns all outcomes that were ever met.
func (t *Tally) Counts() map[string]Count {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := int64(time.Since(t.begun) / time.Second)
	out := map[string]Count{}
	for name, c := range t.counts {
		out[name] = Count{c.seconds.sum(s), c.minutes.sum(s / 60), c.total}
	}
	return out
}

// slot empties the slots of the units that have passed since the last one, up to now.
func (w *window) slot(now int64) {
	for u := max(w.newest+1, now-slots+1); u <= now; u++ {
		w.slots[u%slots] = 0
	}
	w.newest = now
}

func (w *window) sum(now int64) (n uint64) {
	w.slot(now)
	for _, c := range w.slots {
		n += c
	}
	return n
}
