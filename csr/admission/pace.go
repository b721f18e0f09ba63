package admission

import (
	"math"
	mrand "math/rand/v2"
	"time"
)

// farthest is how far a refusal looks ahead, in units of MaxWait: not so far that somebody is sent away for long because of others
// that never come back, or because of a hiccup. Beyond it, it counts only that all come at times of their own.
const farthest = 2

const (
	// window is how long the pace is measured before it is taken for that of the moment.
	window = time.Second
	// slower is how much of the pace is believed after a window that was slow. A server that is thought to be slower than it is
	// stands idle while its callers wait; if it is thought to be faster, some come too early, on a connection that they have.
	slower = 0.8
)

// pace is how fast slots come free while there are requests that wait, and when those that were sent away come again.
type pace struct {
	since    time.Time // begin of this window
	count    int       // slots that came free in it
	last     float64   // slots a second before it; 0 if there is nothing before
	expected time.Time // when the last of those that were refused should come
}

// begin notes that somebody waits again, after nobody did: what was measured before is only what to go by at first.
func (p *pace) begin(now time.Time) { p.since, p.count = now, 0 }

// served notes that a slot came free for one that waited.
func (p *pace) served(now time.Time) {
	p.count++
	if now.Sub(p.since) >= window {
		p.last, _ = p.perSecond(now)
		p.since, p.count = now, 0
	}
}

// perSecond returns the pace of the moment, if it is known.
func (p *pace) perSecond(now time.Time) (n float64, known bool) {
	d := now.Sub(p.since)
	measured := float64(p.count) / d.Seconds()
	switch {
	case p.last > 0 && d < window:
		return p.last, true
	case p.last > 0:
		return max(measured, p.last*math.Pow(slower, d.Seconds()/window.Seconds())), true
	case d < window/10: // nothing can be said
		return 0, false
	}
	return measured, p.count > 0 || d >= 2*window
}

// retry returns when the next one that is refused should come again: once those that wait have had their turn, and those that
// were told to come before him. So they come about as fast as they are served, however many they are; each of them costs a TLS
// handshake, which is most of what an issuance costs, and is wasted on who is refused again. The times are spread, since the pace
// may not be what it was.
func (p *pace) retry(now time.Time, queued int, maxWait time.Duration) time.Duration {
	most := farthest * maxWait
	spread := func(d time.Duration) time.Duration { return time.Duration(float64(d) * (0.5 + 0.5*mrand.Float64())) }
	perSecond, known := p.perSecond(now)
	if !known {
		return spread(2 * maxWait)
	}
	ahead := float64(queued) / perSecond // seconds; without end if nothing comes free at all
	if !(ahead < most.Seconds()) {
		return spread(most)
	}
	at := now.Add(time.Duration(ahead * float64(time.Second)))
	if at.Before(p.expected) {
		at = p.expected
	}
	at = at.Add(time.Duration(min(1/perSecond, most.Seconds()) * float64(time.Second)))
	wait := at.Sub(now)
	if wait >= most {
		return spread(most)
	}
	p.expected = at
	return spread(max(wait, maxWait/5))
}
