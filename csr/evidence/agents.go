package evidence

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/board"
)

// Bounds of what an agent says.
const (
	AgentID    = 16 // bytes
	maxHeld    = 32
	maxIssuer  = 64
	maxLagging = 5
	maxName    = 200
	maxWhy     = 300
)

// Check reports what is wrong with what an agent says, in words for its owner; nil is fine.
func Check(m *chanceryv1.ConsumersState, now time.Time) error {
	if m == nil {
		return nil
	}
	if n := len(m.GetAgent()); n != AgentID {
		return fmt.Errorf("consumers: the agent's ID has %d bytes; it should have %d", n, AgentID)
	}
	if n := len(m.GetHeld()); n > maxHeld {
		return fmt.Errorf("consumers: %d issuers are held; at most %d can be reported", n, maxHeld)
	}
	if n := len(m.GetLagging()); n > maxLagging {
		return fmt.Errorf("consumers: %d are named as behind; at most %d can be", n, maxLagging)
	}
	most := now.Add(ca.LeafTTLLimit + time.Hour)
	if t := m.GetUntil(); t != nil && (t.CheckValid() != nil || t.AsTime().After(most) || t.GetSeconds() < 0) {
		return fmt.Errorf("consumers: the last SVID ends at %v; no SVID of this server ends after %s", t, most.UTC().Format(time.RFC3339))
	}
	for _, h := range m.GetHeld() {
		if n := len(h.GetIssuer()); n == 0 || n > maxIssuer {
			return fmt.Errorf("consumers: an issuer is named by %d bytes; it should be 1 to %d", n, maxIssuer)
		}
		if t := h.GetUntil(); t == nil || t.CheckValid() != nil || t.AsTime().After(most) || t.GetSeconds() < 0 {
			return fmt.Errorf("consumers: SVIDs of issuer %x end at %v; no SVID of this server ends after %s", h.GetIssuer(), t, most.UTC().Format(time.RFC3339))
		}
	}
	for _, x := range m.GetLagging() {
		if len(x.GetName()) > maxName || len(x.GetWhy()) > maxWhy {
			return fmt.Errorf("consumers: one is described in %d and %d bytes; at most %d and %d are read", len(x.GetName()), len(x.GetWhy()), maxName, maxWhy)
		}
	}
	return nil
}

// statement is what an agent said by one stream.
type statement struct {
	stream *Stream // nil once it is gone
	began  int64   // the stream; for the order of two
	at     int64   // when it was said last; the stream's end, once it is gone
	blind  bool    // it keeps no table
	kin    bool    // it reads the other trust domains of a bundle
	life   uint32  // of certificates at most, where it is blind
	low    uint64
	ends   uint32
	held   []leaf
	why    string
}

func (x *statement) until(now int64) uint32 {
	end := x.ends
	for _, h := range x.held {
		end = max(end, h.until)
	}
	if x.blind {
		if x.stream == nil {
			now = x.at
		}
		return uint32(now/1000) + x.life
	}
	return end
}

// Stream is an agent's way of saying how its consumers are. It is used by one goroutine at a time.
type Stream struct {
	ledger   *Ledger
	identity string
	place    string
	name     string
	began    int64
	consumer uint64 // 0 before it has said anything
	reads    uint32 // what it can read of an update
}

// ReadsKin is the bit of SyncRequest.reads that stands for Bundle.kin.
const ReadsKin = 1

// Reads notes what the agent can read of an update, with what it says next.
func (s *Stream) Reads(bits uint32) { s.reads = bits }

// Open returns a stream of an agent that authenticated as an identity; place tells agents without a table apart.
func (l *Ledger) Open(identity, place, remote string) *Stream {
	return &Stream{ledger: l, identity: identity, place: place, name: "agent " + identity + " at " + remote, began: time.Now().UnixNano()}
}

// Say takes over what the agent says now, all of it; m is nil from one that keeps no table, of which nothing is known. It has passed Check.
func (s *Stream) Say(m *chanceryv1.ConsumersState) error {
	l := s.ledger
	consumer := hash("agent without a table", s.ledger.same(s.identity), s.place)
	if m != nil {
		consumer = Agent(s.ledger.same(s.identity), m.GetAgent())
	}
	if s.consumer != 0 && s.consumer != consumer { // it lost its table; what it said before stands
		s.Close()
	}
	now := time.Now()
	x := s.statement(m, now)
	sh := l.shard(consumer)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	e := sh.all[consumer]
	if e == nil {
		e = l.add(sh, consumer, s.name)
	}
	if e == nil {
		l.ends(&l.over, time.Unix(int64(x.until(now.UnixMilli())), 0))
		return nil
	}
	e.agent = true
	e.name = shorten(s.name, board.MaxName)
	if err := l.put(e, x); err != nil {
		return err
	}
	s.consumer = consumer
	e.given = slices.DeleteFunc(e.given, func(g leaf) bool { return x.covers(g) })
	l.dirty.Store(true)
	return nil
}

// covers reports whether what an agent says includes what it was given, or that it has got it and replaced it since.
func (x *statement) covers(g leaf) bool {
	if x.blind {
		return false
	}
	return x.at-g.at > delivery.Milliseconds() || slices.ContainsFunc(x.held, func(h leaf) bool { return h.issuer == g.issuer && h.until >= g.until })
}

func (s *Stream) statement(m *chanceryv1.ConsumersState, now time.Time) statement {
	x := statement{stream: s, began: s.began, kin: s.reads&ReadsKin != 0, at: now.UnixMilli(), blind: m == nil, low: m.GetGeneration(), ends: uint32(max(0, m.GetUntil().GetSeconds()))}
	if x.blind {
		x.life = uint32(s.ledger.config.MaxLife / time.Second)
		x.why = "it is of a version that does not say who uses its certificates, and counts as long as it renews: update it, or override the gate"
		return x
	}
	if m.GetUntil().GetNanos() > 0 {
		x.ends++
	}
	for _, h := range m.GetHeld() {
		end := h.GetUntil().GetSeconds()
		if h.GetUntil().GetNanos() > 0 {
			end++
		}
		x.held = append(x.held, leaf{issuer: issuerOf(h.GetIssuer()), until: uint32(end), at: x.at})
	}
	var words []string
	for _, c := range m.GetLagging() {
		words = append(words, c.GetName()+": "+c.GetWhy())
	}
	x.why = shorten(strings.Join(words, "; "), board.MaxWhy)
	return x
}

// put takes a statement over. One agent has one stream; what an older one said does not count once another has come. But if the older one
// goes on to say something, there are two processes with one table, and the worst of all that they said counts.
func (l *Ledger) put(e *entry, x statement) error {
	if !e.twice && !x.blind { // those without a table share a name, and any number of them may
		for i := range e.said {
			if o := &e.said[i]; o.stream != nil && o.stream != x.stream && o.began > x.began {
				e.twice = true
				l.config.Logger.Warn("two agents use one table of consumers, as from a copied disk; each should have its own", "agent", e.name)
				break
			}
		}
	}
	e.said = slices.DeleteFunc(e.said, func(o statement) bool {
		return o.stream == x.stream || o.stream == nil && (!e.twice || o.until(x.at) <= uint32(x.at/1000))
	})
	if len(e.said) >= maxSaid && !x.blind {
		i := slices.IndexFunc(e.said, func(o statement) bool { return o.stream == nil })
		if i < 0 {
			return fmt.Errorf("consumers: %d streams say that they are one agent; each should have a table of its own", len(e.said)+1)
		}
		x.low = min(x.low, e.said[i].low)
		x.held = append(x.held, leaf{issuer: 0, until: e.said[i].until(x.at)})
		e.said = slices.Delete(e.said, i, i+1)
	}
	e.said = append(e.said, x)
	return nil
}

// Close ends the stream. What it said stands until the last certificate of which it spoke has ended, or another stream of the agent came.
func (s *Stream) Close() {
	if s.consumer == 0 {
		return
	}
	sh := s.ledger.shard(s.consumer)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	e := sh.all[s.consumer]
	s.consumer = 0
	s.ledger.dirty.Store(true)
	if e == nil {
		return
	}
	i := slices.IndexFunc(e.said, func(o statement) bool { return o.stream == s })
	if i < 0 {
		return
	}
	if newer := slices.ContainsFunc(e.said, func(o statement) bool { return o.stream != nil && o.began > s.began }); newer && !e.twice {
		e.said = slices.Delete(e.said, i, i+1)
		return
	}
	if e.said[i].stream = nil; e.said[i].blind {
		e.said[i].at = time.Now().UnixMilli()
	}
}
