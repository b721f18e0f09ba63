// Package consumers owns the table of those whom an agent has handed SVIDs (decision D1): what each may present still, which
// generation of the trust domain's bundle it has acknowledged, and what it said when it rejected one. A consumer is a process; it
// counts until its last SVID ends, connected or not, also over restarts of the agent: an SVID is in the file before it is handed out.
//
// It refuses to guess. What a consumer did not acknowledge it does not have; who has an SVID and no validation context is unknown;
// a table that was lost gets another name, so that nobody takes an empty one for good news.
package consumers

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/chancery-project/chancery/sds/socket"
)

// Bounds of a table.
const (
	maxConsumers = 20000 // that are told apart
	maxApart     = 1000  // of those that are not connected; beyond that they are counted together, by user
	maxSVIDs     = 64    // of one consumer
	maxContexts  = 1000  // likewise
	maxRejected  = 64    // likewise
	maxName      = 4096  // bytes of a resource name
	maxWords     = 300   // bytes of a rejection
	maxNode      = 100   // bytes of what a consumer calls itself

	// strayFor is how long a validation context counts that a process no longer asks for, while it is connected otherwise: its
	// streams may have broken one by one and come back.
	strayFor = 2 * time.Minute
	// saveEvery is how often what may be lost in a crash is written.
	saveEvery = 5 * time.Second
	// writeTime bounds the wait for the disk.
	writeTime = 5 * time.Second
)

// Process is who is at the other end: one process, whatever connections and streams it has.
type Process struct {
	UID   uint32
	PID   int32
	Start uint64 // as in socket.Peer
}

// ProcessOf returns the process behind a connection.
func ProcessOf(p socket.Peer) Process { return Process{p.UID, p.PID, p.Start} }

// SVID is one that is about to be handed out, under the name that it was asked for by.
type SVID struct {
	Name     string
	Version  string // of the content; what an acknowledgement names
	Issuer   []byte // subject key identifier
	Serial   string // hex
	NotAfter time.Time
}

// Observed is all that is known of one stream.
type Observed struct {
	Node string // what its client calls itself
	// SVIDs says for each name of an identity that was sent which version was acknowledged last; empty if none was.
	SVIDs map[string]string
	// Contexts says for each name of a validation context of the trust domain which generation of the bundle was acknowledged
	// last; 0 if none was.
	Contexts map[string]uint64
	// Rejected says of each name, of either kind, that was rejected last and not taken since, with which words. Taken are the names
	// of which that which was sent last was acknowledged.
	Rejected map[string]string
	Taken    []string
}

// Config says where a table lies.
type Config struct {
	File   string       // its folder must be there
	Logger *slog.Logger // nil: nothing is logged
}

// Table is the table of consumers of one agent. It is safe for concurrent use.
type Table struct {
	file   string
	logger *slog.Logger
	lock   *os.File // held for as long as the table is used
	boot   string   // of the machine: processes of another one are gone
	opened time.Time

	mu      sync.Mutex // guards all below
	id      [16]byte
	live    map[Process]*consumer // of this boot
	gone    []*consumer           // of another boot, and those that are counted together
	changed chan struct{}         // closed when what State returns has changed
	dirty   bool                  // the file lacks something that may be lost
	saved   time.Time             // when the file was last written
	next    *batch                // what the next write is for; nil for nothing
	writing bool                  // somebody writes
}

// consumer is a row, and what is known of it while it is connected.
type consumer struct {
	row
	streams map[*Stream]struct{}
	joined  time.Time // when the first of its streams came
}

// Stream is one stream of a consumer.
type Stream struct {
	table *Table
	of    *consumer
	seen  Observed // last
}

// batch is a write that some wait for.
type batch struct {
	done chan struct{}
	err  error // once done is closed
}

// ID names the table. Another one means that what an earlier one said is lost.
func (t *Table) ID() []byte { return bytes.Clone(t.id[:]) }

// Close lets go of the file.
func (t *Table) Close() error { return t.lock.Close() }

// Join notes a stream that a process has opened; Leave ends it.
func (t *Table) Join(p Process, api string) *Stream {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.live[p]
	if c == nil {
		c = &consumer{row: row{UID: p.UID, PID: p.PID, Start: p.Start, Boot: t.boot, Count: 1}, streams: map[*Stream]struct{}{}}
		t.live[p] = c
	}
	if c.API == "" {
		c.API = api
	}
	s := &Stream{table: t, of: c}
	if len(c.streams) == 0 {
		c.joined = time.Now()
		for i := range c.Contexts {
			c.Contexts[i].stray = c.joined
		}
		for i := range c.Rejected {
			c.Rejected[i].stray = c.joined
		}
	}
	c.streams[s] = struct{}{}
	return s
}

// Hand enters SVIDs that are about to be sent, and returns once the file has them. After an error they must not be sent.
func (s *Stream) Hand(ctx context.Context, svids []SVID) error {
	t := s.table
	t.mu.Lock()
	b, err := t.enter(s.of, svids)
	t.mu.Unlock()
	if err != nil || b == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTime)
	defer cancel()
	select {
	case <-b.done:
		return b.err
	case <-ctx.Done():
		return fmt.Errorf("writing the table of consumers %s: %w", t.file, ctx.Err())
	}
}

// enter adds what is new to a row, and returns the write to wait for; nil if all of it is in the file. mu is held.
func (t *Table) enter(c *consumer, svids []SVID) (*batch, error) {
	if len(svids) == 0 {
		return nil, nil
	}
	if len(c.SVIDs) == 0 && t.count() >= maxConsumers {
		return nil, fmt.Errorf("the table of consumers %s has %d rows, which is the most", t.file, maxConsumers)
	}
	wait := false
	for _, v := range svids {
		if i := c.find(v.Name, v.Version); i >= 0 {
			wait = wait || !c.SVIDs[i].saved
			continue
		}
		h := handed{Name: v.Name, Version: v.Version, Issuer: hexBytes(v.Issuer), Serial: v.Serial, NotAfter: v.NotAfter.UTC()}
		h.life = t.now().up + time.Until(v.NotAfter)
		if err := h.check(); err != nil {
			return nil, fmt.Errorf("table of consumers: %w", err)
		}
		if len(c.SVIDs) >= maxSVIDs && !c.shrink() {
			return nil, fmt.Errorf("table of consumers: %s may present %d SVIDs of different issuers, which is the most", c.name(), maxSVIDs)
		}
		c.SVIDs = append(c.SVIDs, h)
		wait = true
	}
	if !wait {
		return nil, nil
	}
	t.tell()
	return t.join(), nil
}

// shrink gives up the row's oldest SVID that another one of the same issuer outlives: what counts is how long an issuer's are there.
func (r *row) shrink() bool {
	for i, v := range r.SVIDs {
		outlived := func(o handed) bool {
			return o.Version != v.Version && o.Issuer.equal(v.Issuer) && !o.NotAfter.Before(v.NotAfter)
		}
		if slices.ContainsFunc(r.SVIDs[i+1:], outlived) {
			r.SVIDs = slices.Delete(r.SVIDs, i, i+1)
			return true
		}
	}
	return false
}

// See takes over what is known of a stream now.
func (s *Stream) See(o Observed) {
	t := s.table
	t.mu.Lock()
	defer t.mu.Unlock()
	c, before := s.of, s.seen
	if _, there := c.streams[s]; !there {
		return
	}
	s.seen = o
	changed := false
	if o.Node != "" && o.Node != c.Node {
		c.Node, changed = clip(o.Node, maxNode), true
	}
	for name, words := range o.Rejected {
		changed = c.reject(name, clip(words, maxWords)) || changed
	}
	for _, name := range o.Taken {
		n := len(c.Rejected)
		c.Rejected = slices.DeleteFunc(c.Rejected, func(r rejection) bool { return r.Name == name && !c.rejects(name) })
		changed = changed || len(c.Rejected) != n
	}
	for name, version := range o.SVIDs {
		changed = s.acknowledge(name, version) || changed
	}
	changed = c.giveUp(before) || changed
	for name := range o.Contexts {
		changed = c.trust(name) || changed
	}
	if changed {
		t.dirty = true
		t.tell()
	}
}

// acknowledge notes that a process uses this version of a name now: what it had before is replaced, unless another stream has it.
func (s *Stream) acknowledge(name, version string) (changed bool) {
	c := s.of
	at := c.find(name, version)
	if at < 0 {
		return false
	}
	changed = !c.SVIDs[at].Acked
	c.SVIDs[at].Acked = true
	keep := c.SVIDs[:0:0]
	for i, v := range c.SVIDs {
		if i < at && v.Name == name && !c.holds(name, v.Version) {
			changed = true
			continue
		}
		keep = append(keep, v)
	}
	c.SVIDs = keep
	return changed
}

// holds reports whether some stream may have that version still: it acknowledged it last, or nothing yet. mu is held.
func (c *consumer) holds(name, version string) bool {
	for s := range c.streams {
		if v, sent := s.seen.SVIDs[name]; sent && (v == version || v == "") {
			return true
		}
	}
	return false
}

// giveUp drops what a stream asked for before and no stream does now: the process has no use for it. mu is held.
func (c *consumer) giveUp(before Observed) (changed bool) {
	contexts, rejected := len(c.Contexts), len(c.Rejected)
	c.Contexts = slices.DeleteFunc(c.Contexts, func(x trusts) bool {
		_, asked := before.Contexts[x.Name]
		return asked && !c.asks(x.Name)
	})
	c.Rejected = slices.DeleteFunc(c.Rejected, func(r rejection) bool {
		_, asked := before.Rejected[r.Name]
		return asked && !c.knows(r.Name)
	})
	return len(c.Contexts) != contexts || len(c.Rejected) != rejected
}

// reject notes a rejection. mu is held.
func (c *consumer) reject(name, words string) (changed bool) {
	at := slices.IndexFunc(c.Rejected, func(r rejection) bool { return r.Name == name })
	if at < 0 && (len(c.Rejected) >= maxRejected || len(name) > maxName) { // then all of these count as one, which stays
		name = ""
		at = slices.IndexFunc(c.Rejected, func(r rejection) bool { return r.Name == name })
	}
	if at < 0 {
		c.Rejected = append(c.Rejected, rejection{Name: name, Words: words})
		return true
	}
	r := &c.Rejected[at]
	changed = r.Words != words
	r.Words, r.stray = words, time.Time{}
	return changed
}

// rejects reports whether some stream has rejected a name. mu is held.
func (c *consumer) rejects(name string) bool {
	for s := range c.streams {
		if _, is := s.seen.Rejected[name]; is {
			return true
		}
	}
	return false
}

// knows reports whether some stream has a name of either kind. mu is held.
func (c *consumer) knows(name string) bool {
	for s := range c.streams {
		_, svid := s.seen.SVIDs[name]
		_, rejected := s.seen.Rejected[name]
		if svid || rejected {
			return true
		}
	}
	return c.asks(name)
}

// asks reports whether some stream asks for a validation context. mu is held.
func (c *consumer) asks(name string) bool {
	for s := range c.streams {
		if _, is := s.seen.Contexts[name]; is {
			return true
		}
	}
	return false
}

// trust brings what a row says of a validation context in line with its streams: the lowest of what they acknowledged. A stream
// that has not yet acknowledged anything leaves what the process had before. mu is held.
func (c *consumer) trust(name string) (changed bool) {
	at := slices.IndexFunc(c.Contexts, func(x trusts) bool { return x.Name == name })
	if at < 0 {
		if len(c.Contexts) >= maxContexts || len(name) > maxName {
			name = "" // then all of these count as one, which nobody acknowledges
			if at = slices.IndexFunc(c.Contexts, func(x trusts) bool { return x.Name == name }); at >= 0 {
				return false
			}
		}
		c.Contexts = append(c.Contexts, trusts{Name: name})
		at, changed = len(c.Contexts)-1, true
	}
	x := &c.Contexts[at]
	x.stray = time.Time{}
	lowest, any := uint64(0), false
	for s := range c.streams {
		if g := s.seen.Contexts[name]; g > 0 && (!any || g < lowest) {
			lowest, any = g, true
		}
	}
	if any && x.Generation != lowest {
		x.Generation, changed = lowest, true
	}
	return changed
}

// Leave notes that a stream has ended. What its process holds, it holds still.
func (s *Stream) Leave() {
	t := s.table
	t.mu.Lock()
	defer t.mu.Unlock()
	c := s.of
	delete(c.streams, s)
	now := time.Now()
	for i := range c.Contexts {
		if x := &c.Contexts[i]; x.stray.IsZero() && !c.asks(x.Name) {
			x.stray = now
		}
	}
	for i := range c.Rejected {
		if x := &c.Rejected[i]; x.stray.IsZero() && !c.knows(x.Name) {
			x.stray = now
		}
	}
	if len(c.streams) == 0 && len(c.SVIDs) == 0 {
		delete(t.live, c.process())
		return
	}
	t.tell()
}

// Run sees to what ends, and to what may be lost in a crash, until ctx ends.
func (t *Table) Run(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			t.look(t.now(), saveEvery)
		case <-ctx.Done():
			if b := t.look(t.now(), 0); b != nil {
				<-b.done
				return b.err
			}
			return nil
		}
	}
}

func (t *Table) now() moment {
	now := time.Now()
	return moment{now, now.Sub(t.opened)}
}

// look drops what has ended, and begins a write if one is due.
func (t *Table) look(now moment, every time.Duration) *batch {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.prune(now)
	if !t.dirty || now.wall.Sub(t.saved) < every && !now.wall.Before(t.saved) {
		return nil
	}
	t.saved = now.wall // also if it fails: it is tried again
	return t.join()
}

// prune drops what has ended. mu is held.
func (t *Table) prune(now moment) {
	changed := false
	all := t.gone[:0:0]
	for _, c := range t.gone {
		changed = c.drop(now) || changed
		if len(c.SVIDs) > 0 {
			all = append(all, c)
		}
	}
	t.gone = all
	apart := 0
	for p, c := range t.live {
		changed = c.drop(now) || changed
		if len(c.streams) > 0 {
			n := len(c.Contexts) + len(c.Rejected)
			old := func(stray time.Time) bool { return !stray.IsZero() && now.wall.Sub(stray) > strayFor }
			c.Contexts = slices.DeleteFunc(c.Contexts, func(x trusts) bool { return old(x.stray) })
			c.Rejected = slices.DeleteFunc(c.Rejected, func(r rejection) bool { return old(r.stray) && !c.knows(r.Name) })
			changed = changed || len(c.Contexts)+len(c.Rejected) != n
		} else if len(c.SVIDs) == 0 {
			delete(t.live, p)
		} else {
			apart++
		}
	}
	if apart > maxApart {
		t.gather()
		changed = true
	}
	if changed {
		t.dirty = true
		t.tell()
	}
}

// gather counts those that are not connected together, by user. One that comes back begins another row. mu is held.
func (t *Table) gather() {
	byUser := map[uint32]*consumer{}
	all := t.gone
	for p, c := range t.live {
		if len(c.streams) == 0 {
			all = append(all, c)
			delete(t.live, p)
		}
	}
	t.gone = nil
	for _, c := range all {
		sum := byUser[c.UID]
		if sum == nil {
			sum = &consumer{row: row{UID: c.UID, API: "several", Contexts: []trusts{{Generation: c.generation()}}}}
			byUser[c.UID] = sum
			t.gone = append(t.gone, sum)
		}
		sum.merge(&c.row)
	}
}

// Changed is closed once what State returns has changed.
func (t *Table) Changed() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changed
}

// tell says that something has changed. mu is held.
func (t *Table) tell() {
	close(t.changed)
	t.changed = make(chan struct{})
}

// count returns the number of rows. mu is held.
func (t *Table) count() int { return len(t.gone) + len(t.live) }
