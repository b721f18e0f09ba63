package stages

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// This file is a small world around the production machine: servers, agents, a client without one, a reader of roots, an admin, and a
// clock. What is true of them stands beside what the notes say. A minute is the step of time.

var td, newTD = must(trust.ParseDomain("td")), must(trust.ParseDomain("new"))

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

const (
	floor   = 2 // minutes
	servers = 2
	people  = 3 // consumers: e and f are agents, c is a client without one
)

var (
	epoch         = time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)
	serverNames   = [servers]string{"a", "b"}
	consumerNames = [people]string{"e", "f", "c"}
	issuerIDs     = [2]string{"I1", "I2"}
)

func at(minute int16) time.Time { return epoch.Add(time.Duration(minute) * time.Minute) }

// rules say what is different in a world with a mutant of the machine. The zero rules are production.
type rules struct {
	input  func(d *document.Document, e *Evidence, now time.Time) // changes what the machine is given
	output func(before, d *document.Document, now time.Time)      // and what it returns
	abort  func(d *document.Document, now time.Time) error
	back   func(d *document.Document, now time.Time) error
	// settles has servers take a consumer for settled by a call of any phase: what is wrong then is not the machine.
	settles bool
	// kinless has servers take the word of an agent for both domains of a migration that reads one only: likewise.
	kinless bool
}

// world is what can happen in it.
type world struct {
	name     string
	start    []string // what an admin starts, one of these
	consumer [people]bool
	home     [people]uint8 // servers that it knows, as bits; 0: both
	reader   bool
	faults   int8 // how many of die, pause, lose
	kinds    string
	commands []string
	orders   int8         // how many of these
	board    bool         // the driver's view of the notes may be old
	lag      bool         // a may read and write at other times, too; else it does both at once
	life     int16        // of a leaf, in minutes; 0: one
	blind    [people]bool // agents that read no kin before they are updated
	rules    rules
}

// entry is what a server knows of a consumer.
type entry struct {
	known     bool
	gen, ans  int16    // generation acknowledged; of the last answer
	held      [2]int16 // until when it may hold a leaf of an issuer
	until     int16
	version   uint64 // of the document by which this server worked when it was told
	seen      uint64 // the phase in which the last answer was given, after another server's note of that phase which lists it; 0: not so
	confirmed uint64 // seen of the answer that a call has confirmed
	blind     bool   // it reads no kin
}

type server struct {
	up, paused bool
	doc        *document.Document
	entries    [people][2]entry // by incarnation
	lost       int16            // until when what a process of before signed may be valid
}

type consumer struct {
	trust   uint8 // issuers that it accepts, by the roots, and CRLs, that it has
	gen     int16 // of that
	leaf    int8  // issuer
	until   int16 // of the leaf
	life    uint8 // incarnation of the agent's table
	unknown int16 // until when it does not know what it served before
	known   int16 // the generation of its agent, which has not forgotten it; 0: it has
	blind   bool  // its agent reads no kin
}

// state is a state of the world. It is copied by value; what it points to is never changed.
type state struct {
	doc    *document.Document
	now    int16
	srv    [servers]server
	con    [people]consumer
	notes  [servers]*board.Note
	board  [servers]*board.Note
	reads  uint8 // what the reader trusts
	age    int8  // of that
	faults int8
	orders int8
	bad    string // what must never be, which has come true in the last step
}

// label is a step in the notation of histories.
type step struct {
	label string
	to    state
}

func (w *world) leaf() int16 { return max(w.life, 1) }

func authority(kind document.AuthorityKind, id, root string, as document.AuthorityState) document.Authority {
	return document.Authority{ID: id, Kind: kind, Root: root, State: as, KeyRef: td.String() + ":" + id}
}

// certified is the trust domain for which an authority signs, whatever the document says.
func certified(a *document.Authority) string {
	domain, _, _ := strings.Cut(a.KeyRef, ":")
	return domain
}

// identities are those of consumers, by name. Their namespaces have these names.
var identities = [people]trust.ID{must(trust.WorkloadID(td, "e", "x")), must(trust.WorkloadID(td, "f", "x")), must(trust.WorkloadID(td, "c", "x"))}

// first is the state in which all is well: everybody holds a leaf of I1.
func (w *world) first() state {
	leafLife := w.leaf()
	doc := &document.Document{Format: document.Format, Version: 10, Domains: map[string]*document.DomainState{td.String(): {
		Generation: 1, Authorities: []document.Authority{authority(document.KindRoot, "R1", "", document.StateActive), authority(document.KindIssuer, "I1", "R1", document.StateActive)},
	}}}
	for i, n := range serverNames {
		doc.Logs = append(doc.Logs, document.LogState{ID: uint32(i + 1), Replica: n})
	}
	s := state{doc: doc, faults: w.faults, orders: w.orders, reads: 1}
	for i := range s.srv {
		s.srv[i].up, s.srv[i].doc = true, doc
	}
	for x := range s.con {
		if !w.consumer[x] {
			continue
		}
		s.con[x] = consumer{trust: 1, gen: 1, leaf: 0, until: leafLife, known: 1, blind: w.blind[x]}
		e := &s.srv[w.servedBy(x)].entries[x][0]
		*e = entry{known: true, gen: 1, ans: 1, until: leafLife, version: 10, blind: w.blind[x]}
		e.held[0] = leafLife
	}
	for i := range s.srv {
		w.writeNote(&s, i)
	}
	s.board = s.notes
	return s
}

// servedBy is the server that served somebody first: a for e, b for the others, as long as they know it.
func (w *world) servedBy(x int) int {
	if w.home[x] != 0 {
		return int(w.home[x] >> 1)
	}
	return min(x, 1)
}

func (s *state) dom() *document.DomainState { return s.doc.Domains[td.String()] }

func domain(d *document.Document) *document.DomainState { return d.Domains[td.String()] }

// accepts returns the issuers that somebody with the roots and CRLs of a document accepts, as bits.
func accepts(d *document.Document) (bits uint8) {
	for i := range issuerIDs {
		s := domain(d)
		if a := s.Get(document.KindIssuer, issuerIDs[i]); a != nil {
			if r := s.Get(document.KindRoot, a.Root); r != nil && r.DomainOf(s.Present(td)).String() == certified(a) { // roots vouch for their own domain only
				bits |= 1 << i
			}
		}
	}
	return bits
}

// acceptsOwn is likewise, of somebody who reads the roots of one domain only.
func acceptsOwn(d *document.Document) (bits uint8) {
	for i, id := range issuerIDs {
		if s := domain(d); accepts(d)&(1<<i) != 0 && certified(s.Get(document.KindIssuer, id)) == s.Present(td).String() {
			bits |= 1 << i
		}
	}
	return bits
}

// reads returns the issuers that a consumer accepts with what a server has.
func (c *consumer) reads(d *document.Document) uint8 {
	if c.blind {
		return acceptsOwn(d)
	}
	return accepts(d)
}

// hasKin reports whether the bundle of a document has more than one domain.
func hasKin(d *document.Document) bool {
	s := domain(d)
	return len(s.Former) > 0 || slices.ContainsFunc(s.Authorities, func(a document.Authority) bool {
		return a.Kind == document.KindRoot && a.DomainOf(s.Present(td)) != s.Present(td)
	})
}

// signer returns the issuer that signs by a document for a consumer.
func signer(d *document.Document, x int) int8 {
	if second := domain(d).Second(); second != nil && domain(d).Rotation.Gives(identities[x]) {
		return int8(slices.Index(issuerIDs[:], second.ID))
	}
	for i := range issuerIDs {
		if a := domain(d).Get(document.KindIssuer, issuerIDs[i]); a != nil && a.State == document.StateActive {
			return int8(i)
		}
	}
	return -1
}

func (s *state) live(x int) bool { return s.con[x].until > s.now }

func (s *state) dead(i int) bool { return s.doc.Logs[i].DeclaredDead != nil }

// writeNote has a server say what it knows. It announces a minute more than a leaf lives.
func (w *world) writeNote(s *state, i int) {
	v := &s.srv[i]
	goal := domain(v.doc).Goal()
	n := &board.Note{Replica: serverNames[i], Acknowledged: v.doc.Version}
	n.Evidence = board.Evidence{Goal: goal, Ahead: at(s.now + w.leaf() + 1)}
	other := s.notes[1-i]
	for x := range v.entries {
		for life := range v.entries[x] {
			e := &v.entries[x][life]
			until, fresh := e.behind(goal, hasKin(v.doc) && !w.rules.kinless), e.confirmed != 0 && (e.confirmed == version(v.doc) || w.rules.settles)
			if x < 2 { // an agent keeps the newest generation, and its word of leaves counts if nobody signs with the old issuer any more
				fresh = goal.Generation != 0 || domain(v.doc).Rotation != nil && e.version >= domain(v.doc).Rotation.Version
			}
			id := hash(x, life)
			switch {
			case !e.known:
			case until >= s.now:
				n.Evidence.Total++
				n.Evidence.Behind = append(n.Evidence.Behind, board.Behind{Consumer: id, Until: at(until)})
			case fresh && other != nil && slices.ContainsFunc(other.Evidence.Behind, func(b board.Behind) bool { return b.Consumer == id }):
				n.Evidence.Settled = append(n.Evidence.Settled, id)
			}
		}
	}
	if v.lost > 0 && v.lost >= s.now && !goal.IsZero() {
		n.Evidence.Lost = at(v.lost)
	}
	s.notes[i] = n
}

func hash(x, life int) uint64 { return uint64(2*x + life + 1) }

// behind returns until when a consumer counts as not having reached a goal; -1 if it has.
func (e *entry) behind(g document.Goal, kin bool) int16 {
	if g.Generation != 0 && (uint64(e.gen) < g.Generation || kin && e.blind) {
		return e.until
	}
	until := int16(-1)
	for i, id := range issuerIDs {
		if slices.Contains(g.Leave, id) && e.held[i] > 0 {
			until = max(until, e.held[i])
		}
	}
	return until
}

// take is an answer of a server to a consumer: a leaf until some minute, and the roots that the server has.
func (s *state) take(x, i int, until int16) bool {
	v, c := &s.srv[i], &s.con[x]
	by, gen := signer(v.doc, x), int16(domain(v.doc).Generation)
	if by < 0 {
		return false
	}
	e := &v.entries[x][c.life]
	if x == 2 { // no agent: the call confirms what was answered before, and takes all of this answer
		if e.known {
			e.gen, e.confirmed, e.held = e.ans, e.seen, [2]int16{}
			e.held[c.leaf] = c.until
		}
		other := s.notes[1-i]
		e.seen = 0
		if other != nil && other.Acknowledged >= version(v.doc) && other.Evidence.Goal.Equal(domain(v.doc).Goal()) &&
			slices.ContainsFunc(other.Evidence.Behind, func(b board.Behind) bool { return b.Consumer == hash(x, 0) }) {
			e.seen = version(v.doc)
		}
		e.ans, c.trust, c.gen = gen, accepts(v.doc), gen
	} else if gen > c.known {
		c.trust, c.gen, c.known = c.reads(v.doc), gen, gen
	}
	if c.trust&(1<<by) == 0 {
		return false // invariant 7: it would not verify
	}
	e.known, e.held[by], e.until, e.version, e.blind = true, max(e.held[by], until), max(e.until, until), v.doc.Version, c.blind
	c.leaf, c.until = by, until
	return true
}

// version is that in which the phase began which a server knows.
func version(d *document.Document) uint64 {
	if r := domain(d).Rotation; r != nil {
		return r.Version
	}
	return 0
}

// signs returns until when a server signs a leaf; zero if it does not. One that was declared dead and does not know it is held by what
// it announced, or by the rotation that it knows (decision D4).
func (w *world) signs(s *state, i int) int16 {
	v := &s.srv[i]
	if !v.up || v.paused || s.notes[i] == nil {
		return 0
	}
	full := s.now + w.leaf()
	announced := int16(s.notes[i].Evidence.Ahead.Sub(epoch) / time.Minute)
	if !s.dead(i) {
		if announced < full && i == 1 && w.mortal(s) {
			return 0 // it writes its note first
		}
		return full
	}
	until := min(full, announced)
	if r := domain(v.doc).Rotation; r != nil && !r.NotBefore.IsZero() && (r.Phase == document.PhasePrepare || r.Phase == document.PhaseDistribute || r.Phase == document.PhaseIssue) {
		until = max(until, min(full, int16(r.NotBefore.Sub(epoch)/time.Minute)))
	}
	if until <= s.now {
		return 0
	}
	return until
}

// change stores a change of the document.
func (s *state) change(f func(d *document.Document) error) error {
	next := s.doc.Clone()
	next.Version++
	if err := f(next); err != nil {
		return err
	}
	before := s.doc
	s.doc = next
	for i := range domain(next).Authorities {
		a := &domain(next).Authorities[i]
		if old := domain(before).Get(a.Kind, a.ID); a.Tainted != nil && a.State == document.StateActive && (old == nil || old.State != document.StateActive) {
			s.bad = fmt.Sprintf("D6: tainted %s %s became active", a.Kind, a.ID)
		}
	}
	return nil
}

func (w *world) evidence(s *state) Evidence {
	e := Evidence{LeafTTL: time.Duration(w.leaf()) * time.Minute}
	if w.reader {
		e.Floor = floor * time.Minute
	}
	for i, n := range s.board {
		if n := n; n != nil && s.doc.Logs[i].Replica == n.Replica {
			e.Notes = append(e.Notes, *n)
		}
	}
	return e
}

var errNothing = fmt.Errorf("nothing to do")

// drive is the driver's step: one write at most. That it may not happen is its crash.
func (w *world) drive(s *state) error {
	return s.change(func(d *document.Document) error {
		e, now, given := w.evidence(s), at(s.now), d
		if w.rules.input != nil {
			given = d.Clone()
			w.rules.input(given, &e, now)
		}
		next, actions := Next(given, td, e, now)
		for _, a := range actions {
			if a.Make != nil {
				next = next.Clone()
				add(next, *a.Make)
				next, _ = Next(next, td, e, now)
			}
		}
		if w.rules.output != nil {
			next = next.Clone()
			w.rules.output(d, next, now)
		}
		if next == given || w.rules.output != nil && same(next, d) {
			return errNothing
		}
		*d = *next
		return nil
	})
}

// same reports whether nothing of a rotation differs.
func same(a, b *document.Document) bool {
	x, y := domain(a), domain(b)
	if x.Generation != y.Generation || (x.Rotation == nil) != (y.Rotation == nil) || len(x.Authorities) != len(y.Authorities) {
		return false
	}
	if x.Rotation == nil {
		return true
	}
	p, q := *x.Rotation, *y.Rotation
	same := len(p.Overrides) == len(q.Overrides) && (p.Paused == nil) == (q.Paused == nil)
	p.Overrides, q.Overrides, p.Paused, q.Paused = nil, nil, nil, nil
	return same && fmt.Sprint(p) == fmt.Sprint(q)
}

// add enters what the machine wants made, as the driver does.
func add(d *document.Document, m Make) {
	s := domain(d)
	s.Generation++
	under := m.Under
	enter := func(a document.Authority) {
		if m := s.Rotation.Migration; m != nil {
			a.Domain, a.KeyRef = m.To, m.To+":"+a.ID
		}
		s.Authorities = append(s.Authorities, a)
	}
	if m.Root {
		enter(authority(document.KindRoot, "R2", "", document.StatePrepared))
		s.Rotation.ToRoot, under = "R2", "R2"
	}
	enter(authority(document.KindIssuer, "I2", under, document.StatePrepared))
	s.Rotation.ToIssuer = "I2"
}

// steps returns all that can happen, or the one step of a name.
func (w *world) steps(s *state, only string) []step {
	var all []step
	do := func(label string, f func(n *state) bool) {
		if only != "" && label != only {
			return
		}
		n := *s
		n.bad = ""
		if f(&n) {
			if w.follow(s, &n); n.bad == "" {
				w.check(&n)
			}
			all = append(all, step{label, n})
		}
	}
	r := s.dom().Rotation
	if r == nil && len(s.dom().Past) == 0 {
		for _, kind := range w.start {
			do("start "+kind, func(n *state) bool { return n.begin(kind) == nil })
		}
		return all // what can happen before can happen as well before the driver's first step
	}
	if r == nil && w.faults == 0 {
		return all // it has ended, and nobody comes late
	}
	if r != nil {
		do("drive", func(n *state) bool { return w.drive(n) == nil })
	}
	if w.board {
		do("board", func(n *state) bool { n.board = n.notes; return s.board != s.notes })
	}
	for i := range s.srv {
		w.serverSteps(s, i, do)
	}
	for x := range s.con {
		if w.consumer[x] {
			w.consumerSteps(s, x, do)
		}
	}
	for _, c := range w.commands {
		if free := c == "resume" || c == "issue 100"; r != nil && (s.orders > 0 || free) {
			do(c, func(n *state) bool {
				if !free {
					n.orders--
				}
				return w.order(n, c) == nil
			})
		}
	}
	do("minute", func(n *state) bool { return w.minute(n) })
	return all
}

// follow has a read what is new and write its note at once, so that there are fewer states; b is the one that lags.
func (w *world) follow(before, n *state) {
	v := &n.srv[0]
	if w.lag || v.doc == n.doc && v.entries == before.srv[0].entries && n.notes[1] == before.notes[1] && n.now == before.now {
		return
	}
	v.doc = n.doc
	note := n.notes[0]
	if w.writeNote(n, 0); note != nil && equalNotes(note, n.notes[0]) {
		n.notes[0] = note
	}
	w.shown(n)
}

// mortal reports whether it matters what b announces, and what it knows of times: it may be declared dead, or is.
func (w *world) mortal(s *state) bool {
	b := &s.srv[1]
	return s.faults > 0 && (strings.Contains(w.kinds, "die") || strings.Contains(w.kinds, "sleep")) || !b.up || b.paused || s.dead(1)
}

// begin starts a rotation: "root", "issuer", or either with "compromised"; or "migrate" and a share, or a namespace.
func (s *state) begin(what string) error {
	q := Request{Kind: document.KindRoot, Reason: document.ReasonAsked, Actor: "admin", ID: "1"}
	if who, is := strings.CutPrefix(what, "migrate "); is {
		q.Migrate = &Target{Domain: newTD}
		if share, err := strconv.Atoi(who); err == nil {
			q.Migrate.Share = share
		} else {
			q.Migrate.Namespaces = []string{who}
		}
		return s.change(func(d *document.Document) error { return Start(d, td, q, at(s.now)) })
	}
	kind, compromised := strings.CutSuffix(what, " compromised")
	if compromised {
		q.Reason = document.ReasonCompromised
	}
	q.Kind = document.AuthorityKind(kind)
	return s.change(func(d *document.Document) error { return Start(d, td, q, at(s.now)) })
}

func (w *world) minute(n *state) bool {
	if n.now++; w.reader {
		if n.age++; n.age > floor {
			return false // it reads in time
		}
	}
	for i := range n.srv {
		for x := range n.srv[i].entries {
			for l := range n.srv[i].entries[x] {
				if e := &n.srv[i].entries[x][l]; e.until < n.now {
					*e = entry{}
				}
			}
		}
	}
	return true
}

// order is an admin's command.
func (w *world) order(s *state, c string) error {
	now := at(s.now)
	return s.change(func(d *document.Document) error {
		gate, override := strings.CutPrefix(c, "override ")
		who, issue := strings.CutPrefix(c, "issue ")
		switch {
		case issue:
			if share, err := strconv.Atoi(who); err == nil {
				return Issue(d, td, "admin", &share, nil, now)
			}
			return Issue(d, td, "admin", nil, []string{who}, now)
		case override:
			return Override(d, td, document.Override{Gate: gate, Because: "told", Actor: "admin"}, now)
		case c == "pause":
			return Pause(d, td, "admin", now)
		case c == "resume":
			return Resume(d, td, "admin", now)
		case c == "abort" && w.rules.abort != nil:
			return w.rules.abort(d, now)
		case c == "abort":
			return Abort(d, td, "admin", now)
		case c == "rollback" && w.rules.back != nil:
			return w.rules.back(d, now)
		case c == "rollback":
			return Rollback(d, td, "admin", now)
		}
		return fmt.Errorf("command %q", c)
	})
}

func (w *world) can(s *state, fault string) bool {
	return s.faults > 0 && strings.Contains(w.kinds, fault)
}

// serverSteps are those of one server. Faults befall b alone: the names of a and b mean nothing, their consumers differ.
func (w *world) serverSteps(s *state, i int, do func(string, func(*state) bool)) {
	v, name := &s.srv[i], serverNames[i]
	runs := v.up && !v.paused
	switch {
	case runs && s.dead(i): // it finds out
		do(name+" registers", func(n *state) bool { return n.register(i) })
	case runs:
		if i != 0 || w.lag {
			if v.doc != s.doc {
				do(name+" reads", func(n *state) bool { n.srv[i].doc = n.doc; return true })
			}
			do(name+" writes", func(n *state) bool { w.writeNote(n, i); w.shown(n); return !equalNotes(s.notes[i], n.notes[i]) })
		}
		if w.reader {
			do("r reads "+name, func(n *state) bool {
				n.reads, n.age = accepts(v.doc), 0
				return n.reads != s.reads || s.age != 0
			})
		}
	}
	if i == 0 {
		return
	}
	if runs && !s.dead(i) && w.can(s, "die") {
		do(name+" dies", func(n *state) bool {
			n.faults--
			n.srv[i] = server{doc: v.doc}
			return true
		})
	}
	if runs && !s.dead(i) && w.can(s, "sleep") {
		do(name+" sleeps", func(n *state) bool { n.faults--; n.srv[i].paused = true; return true })
	}
	if v.paused {
		do(name+" wakes", func(n *state) bool { n.srv[i].paused = false; return true })
	}
	if !v.up {
		do(name+" restarts", func(n *state) bool { return n.restart(i) })
	}
	if !runs && !s.dead(i) {
		do(name+" declared dead", func(n *state) bool { return n.forget(i) })
	}
}

// shown is when the driver sees the notes at once.
func (w *world) shown(s *state) {
	if !w.board {
		s.board = s.notes
	}
}

func equalNotes(a, b *board.Note) bool {
	return a != nil && a.Acknowledged == b.Acknowledged && a.Evidence.Goal.Equal(b.Evidence.Goal) && a.Evidence.Ahead.Equal(b.Evidence.Ahead) && a.Evidence.Lost.Equal(b.Evidence.Lost) &&
		slices.Equal(a.Evidence.Behind, b.Evidence.Behind) && slices.Equal(a.Evidence.Settled, b.Evidence.Settled)
}

func (s *state) forget(i int) bool {
	return s.change(func(d *document.Document) error { _, err := d.Forget(serverNames[i], at(s.now)); return err }) == nil
}

// register is a server that was declared dead, and is not.
func (s *state) register(i int) bool {
	err := s.change(func(d *document.Document) error { d.Logs[i].DeclaredDead = nil; return nil })
	s.srv[i].doc = s.doc
	return err == nil
}

// restart is a process anew: it knows what its note announced, and nothing else.
func (s *state) restart(i int) bool {
	s.srv[i] = server{up: true, doc: s.doc}
	if n := s.notes[i]; n != nil {
		s.srv[i].lost = int16(n.Evidence.Ahead.Sub(epoch) / time.Minute)
	}
	if s.dead(i) {
		return s.register(i)
	}
	return true
}

func (w *world) consumerSteps(s *state, x int, do func(string, func(*state) bool)) {
	name := consumerNames[x]
	for i := range s.srv {
		v := &s.srv[i]
		if w.home[x] != 0 && w.home[x]&(1<<i) == 0 {
			continue
		}
		if c := &s.con[x]; c.until-s.now <= (w.leaf()+1)/2 || c.leaf != signer(v.doc, x) {
			if until := w.signs(s, i); until > c.until || until > 0 && x != 2 && c.leaf != signer(v.doc, x) { // a client that calls sooner tries again: it had no answer
				do(name+" renews "+serverNames[i], func(n *state) bool { return n.take(x, i, until) })
			}
		}
		if x == 2 || !v.up || v.paused || s.dead(i) {
			continue
		}
		if gen := int16(domain(v.doc).Generation); gen > s.con[x].known {
			do(name+" syncs "+serverNames[i], func(n *state) bool {
				c := &n.con[x]
				next := c.reads(v.doc)
				if n.live(x) && next&(1<<c.leaf) == 0 {
					return false // invariant 7
				}
				c.trust, c.gen, c.known = next, gen, gen
				return true
			})
		}
		do(name+" reports "+serverNames[i], func(n *state) bool { return n.report(x, i) })
	}
	if s.con[x].blind {
		do(name+" is updated", func(n *state) bool { // its agent asks for the roots anew
			n.con[x].blind, n.con[x].known = false, 0
			return true
		})
	}
	if x < 2 && s.con[x].life == 0 && w.can(s, "forget") {
		do(name+" loses its table", func(n *state) bool {
			n.faults--
			c := &n.con[x]
			c.life, c.known, c.unknown = 1, 0, c.until
			return true
		})
	}
}

// report is an agent's word to a server of what it has.
func (s *state) report(x, i int) bool {
	c, before := &s.con[x], s.srv[i].entries[x][s.con[x].life]
	e := &s.srv[i].entries[x][c.life]
	if !s.live(x) {
		return false
	}
	*e = entry{known: true, gen: c.known, until: c.until, version: s.srv[i].doc.Version, blind: c.blind}
	if c.unknown >= s.now {
		e.gen = 0
	}
	e.held[c.leaf] = c.until
	return *e != before
}

// check looks whether what must never be is so.
func (w *world) check(s *state) {
	if s.bad != "" {
		return
	}
	d := s.dom()
	active := map[document.AuthorityKind]*document.Authority{}
	for i := range d.Authorities {
		if a := &d.Authorities[i]; a.State == document.StateActive {
			if active[a.Kind] != nil {
				s.bad = "two active authorities"
			}
			active[a.Kind] = a
		}
	}
	if r, i := active[document.KindRoot], active[document.KindIssuer]; r == nil || i == nil || i.Root != r.ID {
		s.bad = "no active issuer under an active root"
		return
	}
	if s.bad = wrongDomain(d, active[document.KindIssuer]); s.bad != "" {
		return
	}
	if d.Rotation == nil && (active[document.KindRoot].Tainted != nil || active[document.KindIssuer].Tainted != nil) {
		s.bad = "D6: a tainted authority signs, and nothing is under way against it"
	}
	if overridden(d) {
		return
	}
	for x := range s.con {
		if !s.live(x) {
			continue
		}
		if accepts(s.doc)&(1<<s.con[x].leaf) == 0 {
			s.bad = w.broken(s, x, "who has the newest roots")
		}
		for y := range s.con {
			if s.live(y) && s.con[y].trust&(1<<s.con[x].leaf) == 0 {
				s.bad = w.broken(s, x, consumerNames[y])
			}
		}
		if w.reader && s.reads&(1<<s.con[x].leaf) == 0 {
			s.bad = w.broken(s, x, "the reader")
		}
	}
}

// wrongDomain says if the line is not of the trust domain that it should be: the new one once the old root has left, and not before; or if all
// get certificates of the new one before an admin says so.
func wrongDomain(d *document.DomainState, signs *document.Authority) string {
	r := d.Rotation
	if r != nil && r.Migration != nil && !r.Back && signs.ID == r.ToIssuer && r.Migration.Share < All {
		return "everybody gets certificates of the new domain, and no admin said so"
	}
	first := d.Get(document.KindRoot, "R1")
	switch present := d.Present(td).String(); {
	case first != nil && present != td.String():
		return fmt.Sprintf("the line is called %s, and its old root is still there", present)
	case first == nil && present != certified(d.Get(document.KindRoot, "R2")):
		return fmt.Sprintf("the line is called %s, and its old root is gone", present)
	}
	return ""
}

func (w *world) broken(s *state, x int, who string) string {
	leaf := issuerIDs[s.con[x].leaf]
	inv := "invariant 4"
	if s.dom().Get(document.KindIssuer, leaf) == nil {
		inv = "invariant 5"
	}
	return fmt.Sprintf("%s: %s presents a leaf of %s, and %s does not accept it", inv, consumerNames[x], leaf, who)
}

func overridden(d *document.DomainState) bool {
	return d.Rotation != nil && len(d.Rotation.Overrides) > 0 || len(d.Past) > 0 && len(d.Past[0].Overrides) > 0
}
