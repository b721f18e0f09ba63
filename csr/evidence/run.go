package evidence

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
)

const (
	// tick is how often the sets are looked at while something changes.
	tick = time.Second
	// again is how often that is done in any case, and how often agents are asked.
	again = 10 * time.Second
	// seldom is the same where nobody waits for what they say: each certificate that is renewed would be news.
	seldom = 5 * time.Minute
	// leastLeeway and mostLeeway bound leeway; the most are two beats of the board, so that one that fails holds up nobody.
	leastLeeway, mostLeeway = 20 * time.Second, 2 * board.Beat
	// patience is how long a certificate waits that ends later than was announced.
	patience = 2 * time.Second
	// cutOff is how long nobody waits after one has waited in vain.
	cutOff = 10 * time.Second
)

// leeway is how far beyond the life of a certificate that begins now ends are announced. A rotation waits as much longer for a process
// that was killed, so where lives are short it is, and notes are written more often.
func (l *Ledger) leeway() time.Duration { return min(mostLeeway, max(leastLeeway, l.config.MaxLife)) }

// Calls counts the calls that may sign with one issuer, and answer with one generation of the bundle, at this moment.
type Calls struct{ n atomic.Int64 }

// Enter counts a call by another issuer than that which the function Enter was told of; it is called from within.
func (c *Calls) Enter() { c.n.Add(1) }

// Leave ends what Enter began, once all that was given is noted.
func (c *Calls) Leave() { c.n.Add(-1) }

// Enter begins a call: of finds out which issuer it goes by, and returns its Calls; nil if there is none. Of two that come after
// one another, a change of the issuer and a look at the counters, the second misses no call that began by the issuer before.
func Enter[T any](l *Ledger, of func() (T, *Calls)) T {
	l.entering.Add(1)
	defer l.entering.Add(-1)
	x, c := of()
	if c != nil {
		c.n.Add(1)
	}
	return x
}

// settle waits until nobody is between finding out the issuer and counting itself; that takes nanoseconds.
func (l *Ledger) settle() bool {
	for range 10_000 {
		if l.entering.Load() == 0 {
			return true
		}
		runtime.Gosched()
	}
	return false
}

// by is what a call goes by.
type by struct {
	issuer     string
	generation uint64
}

// Calls returns the counter of an issuer, named in hex, with a generation of the bundle.
func (l *Ledger) Calls(issuer string, generation uint64) *Calls {
	if c, ok := l.calls.Load(by{issuer, generation}); ok {
		return c.(*Calls)
	}
	c, _ := l.calls.LoadOrStore(by{issuer, generation}, new(Calls))
	return c.(*Calls)
}

// ErrClosed: the server has said in its last note what it signed.
var ErrClosed = errors.New("the server is stopping")

// Reserve comes before a certificate is signed. It returns at once, unless it ends later than others were told, as one with an unusual life:
// then it waits until they are, for a moment. While they cannot be told nobody is held up, since the store is not on the way of a request; but
// then the certificate must end by the time that is returned: others wait for a server that is cut off, and is declared dead, for as long as
// it said that certificates of it live. Zero: it is as good as it is.
func (l *Ledger) Reserve(ctx context.Context, notAfter time.Time) (until time.Time, err error) {
	if l.closed.Load() {
		return until, ErrClosed
	}
	b := l.config.Board
	if b == nil || notAfter.Unix() <= b.Announced() {
		return until, nil
	}
	if !l.extend(notAfter) {
		return l.usual(), nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for notAfter.Unix() > b.Announced() {
		select {
		case <-ctx.Done():
			l.mu.Lock()
			l.cut = time.Now()
			l.mu.Unlock()
			l.config.Logger.Warn("others could not be told of a longer certificate, so it gets the usual life", "not_after", notAfter.UTC(), "usual", l.config.Life)
			return l.usual(), nil
		case <-ticker.C:
		}
	}
	return until, nil
}

// usual is when a certificate ends of which others need not be told, or that ends no later than they were.
func (l *Ledger) usual() time.Time {
	until := time.Now().Add(l.config.Life)
	if told := time.Unix(l.config.Board.Announced(), 0); told.After(until) {
		return told
	}
	return until
}

// extend has a later end announced, and reports whether that is worth waiting for.
func (l *Ledger) extend(notAfter time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if !l.cut.IsZero() && now.Sub(l.cut) < cutOff {
		return false
	}
	if life := notAfter.Sub(now) + time.Second; life > time.Duration(l.life.Load()) {
		l.life.Store(int64(life))
	}
	if l.take(now) {
		if l.ahead.Before(notAfter) {
			l.ahead = time.Time{} // the next step is made now
		}
		ahead := l.announce(now)
		l.config.Board.Vouch(func(e *board.Evidence) {
			if ahead.After(e.Ahead) {
				e.Ahead = ahead
			}
		})
		l.config.Board.Hurry()
	}
	return true
}

// Ask sets what has connected agents say again how they are.
func (l *Ledger) Ask(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ask = f
}

// Acknowledge says in the own note that this replica works by a version of the document, and what it knows of its consumers for the goal
// that stands in it since a version.
func (l *Ledger) Acknowledge(ctx context.Context, version, since uint64, goal document.Goal) error {
	b := l.config.Board
	if _, known := b.Former(); !known { // its first read has failed so far
		if err := b.Read(ctx); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.take(now)
	if len(goal.Leave) > board.MaxLeave {
		return errors.New("too many issuers are to be left at once")
	}
	if !l.acknowledged || !l.goal.Equal(goal) || l.since != since {
		l.phase = phase{true, goal, since}
		l.pointed, l.changed = map[uint64]time.Time{}, nil
	}
	l.point(now)
	e := l.look(now)
	b.Own(func(n *board.Note) { n.Acknowledged, n.Evidence = version, e.Evidence })
	return nil
}

// take takes over what the former process left, once. Caller holds mu; the board knows it.
func (l *Ledger) take(now time.Time) bool {
	n, known := l.config.Board.Former()
	if l.known || !known {
		return l.known
	}
	l.known = true
	if n == nil {
		if l.config.Served {
			l.former.lost = l.start.Add(l.config.MaxLife + time.Minute)
		}
		return true
	}
	e := &n.Evidence
	l.former = former{e.Goal, n.Acknowledged, e.Behind, e.Lost, e.Ahead}
	switch {
	case e.Ahead.IsZero(): // of a version that announced nothing
		l.former.lost = l.start.Add(l.config.MaxLife + time.Minute)
	case l.start.Sub(n.Seen) > l.leeway(): // it may have gone on without the store, beyond what it had announced, if it had not just stopped
		if span := min(e.Ahead.Sub(n.Seen), l.config.MaxLife+l.leeway()); span > 0 {
			l.former.ahead = l.start.Add(span)
		}
	}
	return true
}

// look makes the sets. Caller holds mu.
func (l *Ledger) look(now time.Time) sets {
	l.dirty.Store(false)
	l.made = now
	e := l.sets(now)
	e.Ahead = l.announce(now)
	if l.ask != nil && e.ask && now.Sub(l.asked) >= again {
		l.asked = now
		l.ask()
	}
	return e
}

// announce returns up to when certificates may end. It is moved in steps, so that a note is not new for it each time. Caller holds mu.
func (l *Ledger) announce(now time.Time) time.Time {
	next := now.Add(time.Duration(l.life.Load()) + l.leeway())
	if last := time.Unix(l.issued.Load(), 0); last.After(next) {
		next = last
	}
	if l.former.ahead.After(next) { // what the process before that one signed is in no other note
		next = l.former.ahead
	}
	if next = next.Add(time.Second).Truncate(time.Second).UTC(); next.Sub(l.ahead) >= again {
		l.ahead = next
	}
	return l.ahead
}

// post brings the own note up to date, if there is something new. Caller holds mu.
func (l *Ledger) post(now time.Time) {
	b := l.config.Board
	if !l.take(now) {
		return
	}
	l.point(now)
	if !l.acknowledged { // what the former process said stands, and more is announced
		b.Vouch(func(e *board.Evidence) {
			if ahead := l.announce(now); ahead.After(e.Ahead) {
				e.Ahead = ahead
			}
		})
		if b.Announced() < l.ahead.Add(-l.leeway()).Unix() { // nothing was, for this process
			b.Hurry()
		}
		return
	}
	if b.Announced() < now.Add(time.Duration(l.life.Load())+l.leeway()/2).Unix() { // before a certificate has to wait for it
		ahead := l.announce(now)
		b.Vouch(func(e *board.Evidence) { e.Ahead = ahead })
		b.Hurry()
	}
	due := !l.goal.IsZero() && l.dirty.Load() || now.Sub(l.made) >= again
	if l.goal.Shown {
		due = now.Sub(l.made) >= seldom
	}
	if due {
		e, empty := l.look(now), false
		b.Vouch(func(was *board.Evidence) {
			empty = len(e.Behind) == 0 && len(was.Behind) > 0 || e.rest == 0 && len(e.Settled) > len(was.Settled)
			*was = e.Evidence
		})
		if empty && l.hurries.AllowN(now, 1) { // a gate may have waited for that one
			b.Hurry()
		}
	}
}

// Run keeps the own note up to date until ctx ends.
func (l *Ledger) Run(ctx context.Context) error {
	if l.config.Board == nil {
		<-ctx.Done()
		return nil
	}
	ticker := time.NewTicker(tick / 50)
	defer ticker.Stop()
	for known := false; ; {
		l.mu.Lock()
		l.post(time.Now())
		if l.known && !known { // from here on it is not urgent
			known = true
			ticker.Reset(tick)
		}
		l.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// close makes the last note: from here on nothing is signed, so what was announced for what might come is taken back.
func (l *Ledger) close() {
	l.closed.Store(true)
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if !l.take(now) {
		return
	}
	signing := !l.settle()
	l.calls.Range(func(_, c any) bool { signing = signing || c.(*Calls).n.Load() > 0; return true })
	var e board.Evidence
	if l.acknowledged {
		e = l.look(now).Evidence
	} else {
		e = l.config.Board.Mine().Evidence
	}
	if !signing {
		if e.Ahead = time.Unix(max(l.issued.Load(), now.Unix()), 0).UTC(); l.former.ahead.After(e.Ahead) {
			e.Ahead = l.former.ahead
		}
	}
	l.config.Board.Vouch(func(was *board.Evidence) { *was = e })
}

func valid(s string) string { return strings.ToValidUTF8(s, "?") }
