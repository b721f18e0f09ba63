package stages

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
)

// This file explores a world from its first state through all that can happen, in order of the length of histories.

// key is a state as far as anything can come of it: times are seen from now, and versions from the phase's.
type key struct {
	b    []byte
	now  int16
	base uint64
}

func (k *key) byte(b ...byte) { k.b = append(k.b, b...) }

func (k *key) bool(all ...bool) {
	var b byte
	for i, x := range all {
		if x {
			b |= 1 << i
		}
	}
	k.b = append(k.b, b)
}

// minute is a time that counts from some minutes ago on.
func (k *key) minute(t, back int16) { k.b = append(k.b, byte(max(t-k.now, -back-1))) }

func (k *key) time(t time.Time, back int16) {
	if t.IsZero() {
		k.b = append(k.b, 127)
		return
	}
	k.minute(int16(t.Sub(epoch)/time.Minute), back)
}

func (k *key) goal(g document.Goal) {
	k.byte(byte(g.Generation), byte(len(g.Leave)))
	for _, id := range g.Leave {
		k.byte(id[1])
	}
}

func (w *world) key(s *state, buf []byte) []byte {
	k := key{b: buf[:0], now: s.now, base: version(s.doc)}
	k.document(s.doc, true, true)
	if overridden(s.dom()) {
		k.byte(1)
	}
	for i := range s.srv {
		v := &s.srv[i]
		k.bool(v.up, v.paused, v.doc == s.doc, s.board[i] == s.notes[i], s.dead(i), v.doc.Version >= k.base)
		k.minute(v.lost, 0)
		if s.dead(i) {
			k.time(*s.doc.Logs[i].DeclaredDead, 3)
		}
		if v.doc != s.doc {
			k.document(v.doc, false, i == 1 && w.mortal(s))
		}
		for x := range v.entries {
			for l := range v.entries[x] {
				e := &v.entries[x][l]
				if k.bool(e.known); !e.known {
					continue
				}
				k.bool(e.blind, e.seen != 0 && e.seen == version(v.doc), e.confirmed != 0 && e.confirmed == version(v.doc), e.version >= k.base, w.rules.settles && e.confirmed != 0)
				k.byte(byte(e.gen), byte(e.ans))
				k.minute(e.held[0], 0)
				k.minute(e.held[1], 0)
				k.minute(e.until, 0)
			}
		}
		ahead := i == 1 && w.mortal(s)
		k.note(s.notes[i], ahead)
		if s.board[i] != s.notes[i] {
			k.note(s.board[i], ahead)
		}
	}
	for x := range s.con {
		if c := &s.con[x]; w.consumer[x] {
			k.bool(c.blind)
			k.byte(c.trust, byte(c.gen), byte(c.leaf), c.life, byte(c.known))
			k.minute(c.until, 0)
			k.minute(c.unknown, 0)
		}
	}
	k.byte(s.reads, byte(s.age), byte(s.faults), byte(s.orders))
	return k.b
}

func (k *key) document(d *document.Document, stored, times bool) {
	s := domain(d)
	k.byte(byte(s.Generation), byte(len(s.Past)), accepts(d), byte(len(s.Domain)))
	for i := range s.Authorities {
		a := &s.Authorities[i]
		k.byte(a.ID[0], a.ID[1], a.State[0])
		k.bool(a.Tainted != nil)
	}
	r := s.Rotation
	if r == nil {
		return
	}
	k.byte(r.Phase[0], r.Phase[2], byte(r.Generation))
	if m := r.Migration; m != nil {
		k.byte(byte(m.Share))
		for _, ns := range m.Namespaces {
			k.byte(ns[0])
		}
	}
	k.bool(r.Version >= k.base, r.Back)
	if times {
		k.time(r.NotBefore, 0)
	}
	if stored {
		k.time(r.Spread, floor)
		k.bool(r.Paused != nil, r.Spread.IsZero())
		for _, o := range r.Overrides {
			if o.Phase == r.Phase && !o.Time.Before(r.Since) {
				k.byte(o.Gate[0], o.Gate[2])
			}
		}
	}
}

func (k *key) note(n *board.Note, ahead bool) {
	if n == nil {
		k.byte(255)
		return
	}
	k.bool(n.Acknowledged >= k.base)
	k.goal(n.Evidence.Goal)
	if ahead {
		k.time(n.Evidence.Ahead, 1)
	}
	if k.bool(n.Evidence.Lost.IsZero()); !n.Evidence.Lost.IsZero() {
		k.time(n.Evidence.Lost, 0)
	}
	for _, b := range n.Evidence.Behind {
		k.byte(byte(b.Consumer))
		k.time(b.Until, 0)
	}
	k.byte(0)
	for _, c := range n.Evidence.Settled {
		k.byte(byte(c))
	}
	k.byte(0)
}

// outcome of an exploration.
type outcome struct {
	states int
	all    bool   // there are no others
	bad    string // what must never be and came true, first by the length of its history
	path   string // the history
}

type node struct {
	parent int32
	label  string
	state  *state // nil once expanded
	ended  bool
}

// explore looks at states until there are no more, something is bad, or there are limit of them. With progress, each must come to an end
// once faults stop.
func (w *world) explore(limit int, progress bool) outcome {
	first := w.first()
	nodes := []node{{parent: -1, state: &first}}
	seen := map[string]int32{string(w.key(&first, nil)): 0}
	good := map[string]bool{}
	var calm []edge
	var buf []byte
	for i := 0; i < len(nodes); i++ {
		from := nodes[i].state
		nodes[i].state = nil
		for _, st := range w.steps(from, "") {
			to := st.to
			if to.bad != "" {
				nodes = append(nodes, node{int32(i), st.label, nil, false})
				return outcome{len(seen), false, to.bad, w.history(nodes, len(nodes)-1)}
			}
			buf = w.key(&to, buf)
			is, known := seen[string(buf)]
			if !known {
				is = int32(len(nodes))
			}
			if progress && !w.fault(st.label) {
				calm = append(calm, edge{int32(i), is})
			}
			if known {
				continue
			}
			if len(seen) >= limit {
				return outcome{len(seen), false, "", ""}
			}
			seen[string(buf)] = is
			nodes = append(nodes, node{int32(i), st.label, &to, to.ended()})
			if progress && is%64 == 0 {
				if why := w.ends(to, good); why != "" {
					return outcome{len(seen), false, why, w.history(nodes, len(nodes)-1)}
				}
			}
		}
	}
	if at := stuck(nodes, calm); progress && at >= 0 {
		return outcome{len(seen), true, "no progress: it never ends", w.history(nodes, at)}
	}
	return outcome{len(seen), true, "", ""}
}

type edge struct{ from, to int32 }

// fault reports whether a step is a fault, or an admin's order: none of these is needed to come to an end, but for an end of a pause.
func (w *world) fault(label string) bool {
	for _, f := range []string{"dies", "sleeps", "loses its table"} {
		if strings.HasSuffix(label, f) {
			return true
		}
	}
	return label != "resume" && label != "issue 100" && slices.Contains(w.commands, label)
}

func (s *state) ended() bool { return s.dom().Rotation == nil && len(s.dom().Past) > 0 }

// stuck returns a state from which no end can be reached without faults; -1 if there is none.
func stuck(nodes []node, edges []edge) int {
	into := make([][]int32, len(nodes))
	for _, e := range edges {
		into[e.to] = append(into[e.to], e.from)
	}
	reached := make([]bool, len(nodes))
	var todo []int32
	for i := range nodes {
		if nodes[i].ended {
			reached[i], todo = true, append(todo, int32(i))
		}
	}
	for len(todo) > 0 {
		at := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, from := range into[at] {
			if !reached[from] {
				reached[from], todo = true, append(todo, from)
			}
		}
	}
	return slices.Index(reached, false)
}

// history is the way to a state, in the notation.
func (w *world) history(nodes []node, at int) string {
	var labels []string
	for ; nodes[at].parent >= 0; at = int(nodes[at].parent) {
		labels = append([]string{nodes[at].label}, labels...)
	}
	return w.told(labels)
}

// told plays a history, and tells it with the phases that it comes to.
func (w *world) told(labels []string) string {
	s := w.first()
	var b strings.Builder
	last := ""
	for i, l := range labels {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(l)
		next, err := w.play(s, l)
		if err != nil {
			return b.String() + ": " + err.Error()
		}
		s = next
		if p := s.phase(); p != last {
			b.WriteString(" -> " + p)
			last = p
		}
	}
	return b.String()
}

// play takes the one step of a name.
func (w *world) play(s state, label string) (state, error) {
	for _, st := range w.steps(&s, label) {
		return st.to, nil
	}
	var names []string
	for _, st := range w.steps(&s, "") {
		names = append(names, st.label)
	}
	return s, fmt.Errorf("%q cannot happen now; what can is %s", label, strings.Join(names, "; "))
}

// phase is where a rotation stands, or how it ended.
func (s *state) phase() string {
	d := s.dom()
	switch {
	case d.Rotation != nil && d.Rotation.Paused != nil:
		return string(d.Rotation.Phase) + " (paused)"
	case d.Rotation != nil && d.Rotation.Back:
		return string(d.Rotation.Phase) + " (back)"
	case d.Rotation != nil:
		return string(d.Rotation.Phase)
	case len(d.Past) > 0:
		return d.Past[0].Outcome
	}
	return "none"
}

// patience is after how many minutes a rotation must have ended once faults stop.
const patience = 30

// ends says why a rotation does not come to its end though nothing fails any more: servers which are down are declared dead, or come back
// if no other is left, everybody does what is to be done, and nobody overrides anything.
func (w *world) ends(s state, good map[string]bool) string {
	s.faults, s.orders = 0, 0
	var way []string
	for range patience {
		if s.dom().Rotation == nil && (len(s.dom().Past) > 0 || len(w.start) == 0) {
			break
		}
		k := string(w.key(&s, nil))
		if good[k] {
			break
		}
		way = append(way, k)
		if s = w.calm(s); s.bad != "" {
			return s.bad + " (once faults stop)"
		}
	}
	if r := s.dom().Rotation; r != nil && len(way) >= patience {
		var words []string
		for _, g := range Gates(s.doc, td, w.evidence(&s), at(s.now)) {
			if !g.Passed {
				words = append(words, g.Name+": "+strings.Join(g.Waiting, ", "))
			}
		}
		return fmt.Sprintf("no progress: after %d minutes without faults it is in phase %s, and waits: %s", patience, r.Phase, strings.Join(words, "; "))
	}
	for _, k := range way {
		good[k] = true
	}
	return ""
}

// calm is a minute in which everybody does what is to be done.
func (w *world) calm(s state) state {
	var bad string
	act := func(label string) {
		for _, st := range w.steps(&s, label) {
			if s = st.to; s.bad != "" && bad == "" {
				bad = s.bad
			}
		}
	}
	if s.dom().Rotation == nil && len(w.start) > 0 {
		act("start " + w.start[0])
	}
	if r := s.dom().Rotation; r != nil && r.Paused != nil {
		_ = w.order(&s, "resume")
	}
	if r := s.dom().Rotation; r != nil && r.Migration != nil {
		_ = w.order(&s, "issue 100")
	}
	for _, n := range consumerNames {
		act(n + " is updated")
	}
	act("b wakes")
	act("b registers")
	act("b declared dead")
	for range 3 {
		for _, n := range serverNames {
			act(n + " reads")
			act(n + " writes")
		}
		for x, n := range consumerNames {
			if w.consumer[x] {
				for _, at := range serverNames {
					act(n + " syncs " + at)
					act(n + " renews " + at)
					act(n + " reports " + at)
				}
			}
		}
		for _, n := range serverNames {
			act(n + " writes")
		}
		act("board")
		act("drive")
	}
	act("r reads a")
	act("minute")
	if bad != "" {
		s.bad = bad
	}
	return s
}
