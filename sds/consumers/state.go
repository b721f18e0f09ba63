package consumers

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Bounds of a State.
const (
	maxHeld    = 32
	maxLagging = 5
)

// State is what others are told of a table.
type State struct {
	Agent      [16]byte
	Consumers  int       // that may present an SVID still
	Generation uint64    // the lowest that one of them has acknowledged; 0 if there is one of which it is not known, or none at all
	Until      time.Time // when the last SVID ends; zero without consumers
	Held       []Held    // by issuer
	Lagging    []Lagging // some of those behind, the last first
}

// Held is an issuer whose SVIDs some may present still.
type Held struct {
	Issuer    []byte // subject key identifier
	Until     time.Time
	Consumers int
}

// Lagging is a consumer that is behind.
type Lagging struct {
	Name       string
	Generation uint64
	Why        string
}

// State returns what is known now; newest is the generation that consumers should have.
func (t *Table) State(newest uint64) State {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	s := State{Agent: t.id}
	held := map[string]*Held{}
	for _, c := range t.rows() {
		n, until := max(c.Count, 1), time.Time{}
		for _, h := range c.SVIDs {
			if !h.ended(now) && h.NotAfter.After(until) {
				until = h.NotAfter
			}
		}
		if until.IsZero() {
			continue
		}
		generation := c.generation()
		if s.Consumers == 0 || generation < s.Generation {
			s.Generation = generation
		}
		s.Consumers += n
		if until.After(s.Until) {
			s.Until = until
		}
		c.hold(held, now, n)
		if generation < newest {
			s.Lagging = append(s.Lagging, Lagging{c.name(), generation, c.why(until)})
		}
	}
	slices.SortFunc(s.Lagging, func(a, b Lagging) int {
		return cmp.Or(cmp.Compare(a.Generation, b.Generation), cmp.Compare(a.Name, b.Name))
	})
	s.Lagging = s.Lagging[:min(len(s.Lagging), maxLagging)]
	for _, key := range slices.Sorted(maps.Keys(held)) {
		s.Held = append(s.Held, *held[key])
	}
	if len(s.Held) > maxHeld { // those that end last; there are never so many
		slices.SortStableFunc(s.Held, func(a, b Held) int { return b.Until.Compare(a.Until) })
		s.Held = s.Held[:maxHeld]
	}
	return s
}

// rows are those that count. mu is held.
func (t *Table) rows() []*consumer {
	out := slices.Clone(t.gone)
	for _, c := range t.live {
		if len(c.SVIDs) > 0 {
			out = append(out, c)
		}
	}
	return out
}

// hold adds the issuers of what a row may present, once each.
func (c *consumer) hold(all map[string]*Held, now moment, n int) {
	mine := map[string]time.Time{}
	for _, h := range c.SVIDs {
		if key := string(h.Issuer); !h.ended(now) && h.NotAfter.After(mine[key]) {
			mine[key] = h.NotAfter
		}
	}
	for key, until := range mine {
		h := all[key]
		if h == nil {
			h = &Held{Issuer: []byte(key)}
			all[key] = h
		}
		h.Consumers += n
		if until.After(h.Until) {
			h.Until = until
		}
	}
}

// why says why a row is behind.
func (c *consumer) why(until time.Time) string {
	end := until.UTC().Format(time.RFC3339)
	switch {
	case len(c.Rejected) > 0:
		r := c.Rejected[0]
		return clip(fmt.Sprintf("it rejected %s: %s", clip(r.Name, maxNode), r.Words), maxWords)
	case len(c.streams) == 0:
		return "it is not connected; its SVID ends at " + end
	case len(c.Contexts) == 0:
		return "it has an SVID and no validation context from here; its SVID ends at " + end
	}
	oldest := slices.MinFunc(c.Contexts, func(a, b trusts) int { return compare(a.Generation, b.Generation) })
	return "it has not acknowledged the newest roots in " + clip(oldest.Name, maxNode)
}

// String is for logs.
func (s *State) String() string {
	return fmt.Sprintf("agent %s, %d consumers, generation %d", hex.EncodeToString(s.Agent[:]), s.Consumers, s.Generation)
}
