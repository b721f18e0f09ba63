package evidence

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
)

// aim is a goal as entries are held against it.
type aim struct {
	generation uint64
	leave      []uint64
	kin        bool  // the bundle has other trust domains of the same authority
	now        int64 // milliseconds
}

func (l *Ledger) aimOf(g document.Goal, now time.Time) aim {
	a := aim{generation: g.Generation, kin: !g.IsZero() && l.config.Kin != nil && l.config.Kin(), now: now.UnixMilli()}
	for _, id := range g.Leave {
		a.leave = append(a.leave, Leaf{Issuer: id}.key())
	}
	return a
}

// leaves returns when the last of some certificates ends that should be left behind; 0: there is none.
func (a *aim) leaves(all []leaf) (end uint32) {
	for _, x := range all {
		if x.issuer == 0 || slices.Contains(a.leave, x.issuer) {
			end = max(end, x.until)
		}
	}
	if int64(end)*1000 <= a.now || len(a.leave) == 0 {
		return 0
	}
	return end
}

// verdict is how a consumer stands to a goal.
type verdict struct {
	behind bool
	here   bool   // it says so itself, and is connected
	until  uint32 // how long that counts at most
	last   uint32 // when its last certificate ends
	why    string
}

func stamp(end uint32) string { return time.Unix(int64(end), 0).UTC().Format(time.RFC3339) }

func moment(at int64) string { return time.UnixMilli(at).UTC().Format(time.RFC3339) }

// judge holds a consumer against a goal. The words are made for those asked for only: ten thousand need none.
func (e *entry) judge(a *aim, words bool) (v verdict) {
	v.last = e.until(a.now)
	if int64(v.last)*1000 <= a.now {
		return v
	}
	behind := func(until uint32, here bool, why func() string) {
		if v.behind, v.until, v.here = true, max(v.until, until), v.here || here; words && v.why == "" {
			v.why = why()
		}
	}
	if !e.agent {
		if a.generation > 0 && e.low < a.generation && len(e.given) > 0 {
			behind(v.last, false, e.called)
		}
		if end := a.leaves(e.given); end > 0 {
			behind(end, false, e.called)
		}
		return v
	}
	for i := range e.said {
		x := &e.said[i]
		said := func() string {
			if x.stream == nil {
				return strings.TrimPrefix(fmt.Sprintf("%s; silent since %s; the last certificate that it spoke of ends at %s", x.why, moment(x.at), stamp(x.until(a.now))), "; ")
			}
			if a.kin && !x.kin && !x.blind {
				return "it is of a version that knows no second trust domain of one authority: update it"
			}
			return cmp.Or(x.why, fmt.Sprintf("its consumers have generation %d of the bundle, and certificates of %d issuers", x.low, len(x.held)))
		}
		if x.blind && (a.generation > 0 || len(a.leave) > 0) || a.kin && !x.kin || a.generation > 0 && x.low < a.generation {
			behind(v.last, x.stream != nil, said)
		}
		if end := a.leaves(x.held); end > 0 {
			behind(end, x.stream != nil, said)
		}
	}
	given := func() string {
		return fmt.Sprintf("it was given a certificate at %s that ends at %s, and has said nothing to this server since", moment(e.given[len(e.given)-1].at), stamp(v.last))
	}
	if a.generation > 0 && len(e.said) == 0 {
		behind(v.last, false, given)
	}
	if end := a.leaves(e.given); end > 0 {
		behind(end, false, given)
	}
	return v
}

// called says of a client how long it has not called.
func (e *entry) called() string {
	return fmt.Sprintf("has not called again since %s; its certificate ends at %s", moment(e.answered), stamp(e.until(0)))
}

// proved reports whether it is known that a consumer which is not behind was so after some time; ask, whether it would tell if asked.
func (e *entry) proved(after time.Time) (proved, ask bool) {
	t := after.UnixMilli()
	if !e.agent {
		return e.sure > t, false
	}
	for i := range e.said {
		x := &e.said[i]
		proved = proved || x.at > t
		ask = ask || x.stream != nil
	}
	return proved, !proved && ask
}

// sets are what a look at all consumers gave.
type sets struct {
	board.Evidence
	ask  bool // somebody would be less behind, or is settled, if it said again how it is
	rest int  // of those that others have as behind, so many are not settled here
}

// sets looks at all consumers. Caller holds mu.
func (l *Ledger) sets(now time.Time) (out sets) {
	out.Goal = l.goal
	a := l.aimOf(l.goal, now)
	var sample []board.Laggard
	l.others(&out, &sample, now) // first: who is not under way any more is in the shards
	judged := map[uint64]bool{}  // of those that the former process had as behind
	inherits := l.inherits()
	if inherits {
		for _, b := range l.former.behind {
			judged[b.Consumer] = false
		}
	}
	for i := range l.shards {
		s := &l.shards[i]
		s.mu.Lock()
		for consumer, e := range s.all {
			v := e.judge(&a, false)
			switch {
			case int64(v.last)*1000 <= a.now:
				l.drop(s, consumer, e, &a)
				continue
			case v.behind:
				out.Behind = append(out.Behind, board.Behind{Consumer: consumer, Until: time.Unix(int64(v.until), 0).UTC(), Here: v.here})
				if len(sample) < 10*board.MaxSample {
					sample = append(sample, board.Laggard{Consumer: consumer, Name: e.name, Why: shorten(e.judge(&a, true).why, board.MaxWhy)})
				}
				out.ask = out.ask || e.mayClear(&a)
			default:
				if since, pointed := l.pointed[consumer]; pointed {
					proved, ask := e.proved(since)
					if out.ask = out.ask || ask; proved {
						out.Settled = append(out.Settled, consumer)
					}
				}
			}
			if _, is := judged[consumer]; is && (v.behind || e.agent && len(e.said) > 0 || e.sure > 0) { // else nothing is known of it that the former process did not know
				judged[consumer] = true
			}
		}
		s.mu.Unlock()
	}
	if inherits {
		for _, b := range l.former.behind {
			if !judged[b.Consumer] && now.Before(b.Until) {
				b.Here = false
				out.Behind = append(out.Behind, b)
				if len(sample) < 10*board.MaxSample {
					sample = append(sample, board.Laggard{Consumer: b.Consumer, Name: "one who was served before this server's last start", Why: "has said nothing to this server since"})
				}
			}
		}
	}
	l.bound(&out.Evidence, sample, now)
	out.rest = len(l.pointed) - len(out.Settled)
	return out
}

// mayClear reports whether an agent is behind by what it was given only, and would say that it has it or not if it were asked. Caller
// holds the shard.
func (e *entry) mayClear(a *aim) bool {
	if a.leaves(e.given) == 0 || a.now-e.given[len(e.given)-1].at <= delivery.Milliseconds() {
		return false
	}
	return slices.ContainsFunc(e.said, func(x statement) bool { return x.stream != nil && !x.blind })
}

// drop forgets who has no certificate any more, and names agents that were waited for. Caller holds the shard.
func (l *Ledger) drop(s *shard, consumer uint64, e *entry, a *aim) {
	if slices.ContainsFunc(e.said, func(x statement) bool { return x.stream != nil }) { // it is there, and holds nothing now
		return
	}
	delete(s.all, consumer)
	l.count.Add(-1)
	if (a.generation > 0 || len(a.leave) > 0) && e.agent {
		before := *a
		before.now = 0
		if e.judge(&before, false).behind {
			l.names.Do(func() {
				l.config.Logger.Info("an agent has said nothing here until the last certificate ended that it was given by this server, which does not wait for it any more", "agent", e.name)
			})
		}
	}
}

// others adds what is no consumer with an entry: answers under way, and the server's own certificate. Caller holds mu.
func (l *Ledger) others(out *sets, sample *[]board.Laggard, now time.Time) {
	if l.goal.IsZero() {
		return
	}
	add := func(name, what, why string, until time.Time) {
		c := hash(name, l.config.Board.Replica(), what)
		out.Behind = append(out.Behind, board.Behind{Consumer: c, Until: until.Truncate(time.Second).Add(time.Second).UTC()})
		*sample = append([]board.Laggard{{Consumer: c, Name: name, Why: why}}, *sample...)
	}
	const what = "certificates that are being signed"
	if !l.settle() {
		add(what, "", "a moment ago", now.Add(l.config.MaxLife))
	}
	l.calls.Range(func(k, c any) bool {
		if k := k.(by); c.(*Calls).n.Load() > 0 && (slices.Contains(l.goal.Leave, k.issuer) || k.generation < l.goal.Generation) {
			add(what, fmt.Sprintf("%s %d", k.issuer, k.generation), fmt.Sprintf("by issuer %s, with generation %d of the bundle, a moment ago", k.issuer, k.generation), now.Add(l.config.MaxLife))
		}
		return true
	})
	if l.config.Own == nil {
		return
	}
	if issuer, end := l.config.Own(); slices.Contains(l.goal.Leave, issuer) && now.Before(end) {
		add("this server's own certificate", "", "is of issuer "+issuer, end)
	}
}

// bound puts the sets into the form of a note. Caller holds mu.
func (l *Ledger) bound(e *board.Evidence, sample []board.Laggard, now time.Time) {
	slices.SortFunc(e.Behind, func(a, b board.Behind) int { return cmp.Compare(a.Consumer, b.Consumer) })
	slices.Sort(e.Settled)
	lost := time.Unix(l.over.Load(), 0)
	if !l.inherits() && l.former.ahead.After(lost) {
		lost = l.former.ahead
	}
	if l.former.lost.After(lost) {
		lost = l.former.lost
	}
	if len(e.Behind) > board.MaxBehind {
		for _, b := range e.Behind[board.MaxBehind:] {
			if b.Until.After(lost) {
				lost = b.Until
			}
		}
		e.Behind = e.Behind[:board.MaxBehind]
	}
	if e.Lost = (time.Time{}); now.Before(lost) {
		e.Lost = lost.UTC()
	}
	e.Settled = e.Settled[:min(len(e.Settled), board.MaxBehind)]
	e.Total = uint64(max(int64(len(e.Behind)), l.count.Load()))
	slices.SortStableFunc(sample, func(a, b board.Laggard) int { return cmp.Compare(plain(a.Why), plain(b.Why)) })
	sample = slices.Clone(sample[:min(len(sample), board.MaxSample)])
	slices.SortFunc(sample, func(a, b board.Laggard) int { return cmp.Compare(a.Consumer, b.Consumer) })
	e.Sample = slices.CompactFunc(sample, func(a, b board.Laggard) bool { return a.Consumer == b.Consumer })
}

// plain orders words: an agent's or a proxy's own come before ours.
func plain(why string) int {
	for _, ours := range []string{"has not called", "has said nothing", "it was given", "its consumers have"} {
		if strings.HasPrefix(why, ours) {
			return 1
		}
	}
	return 0
}

// inherits reports whether what the former process said of this goal stands: its sets had everybody. Caller holds mu.
func (l *Ledger) inherits() bool {
	return l.acknowledged && l.former.acknowledged >= l.since && l.former.goal.Equal(l.goal) && !l.goal.IsZero()
}

// point notes whom others have as behind. What is settled here has to be newer than that. Caller holds mu.
func (l *Ledger) point(now time.Time) {
	if l.config.Board == nil {
		return
	}
	changed := l.config.Board.Changed()
	if changed == l.changed {
		return
	}
	l.changed = changed
	l.told = l.config.Board.Others()
	was := l.pointed
	l.pointed = map[uint64]time.Time{}
	if l.goal.IsZero() {
		return
	}
	for i := range l.told {
		n := &l.told[i]
		if n.Acknowledged < l.since || !n.Evidence.Goal.Equal(l.goal) {
			continue
		}
		for _, b := range n.Evidence.Behind {
			if !now.Before(b.Until) || len(l.pointed) >= maxConsumers {
				continue
			}
			since, known := was[b.Consumer]
			if !known {
				since = now
			}
			l.pointed[b.Consumer] = since
		}
	}
	l.dirty.Store(true)
}

// Goal returns what the sets are about, and how many consumers are known.
func (l *Ledger) Goal() (document.Goal, int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return document.Goal{Generation: l.goal.Generation, Leave: slices.Clone(l.goal.Leave)}, int(l.count.Load())
}
