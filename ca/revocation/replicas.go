package revocation

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
)

// This file is about several replicas: each finds what is revoked in its own log and tells the others, and each signs, by itself,
// CRLs that say the same.
//
// What the CRLs of a number are stands in the document: a time, and a hash of what they list (document.CRL). Who has all of that signs
// them. Who has something else, after it has told what it knows and has read what all others told, takes the next number. What
// others told before they took a number is read by whoever sees that number: so what differs then is news, and no two replicas
// take numbers from each other in turn.

const (
	// gather is how long a number waits for other replicas to search their logs, so that one number does for all of them.
	gather = 2 * time.Second
	// heard is how recently another must have been heard of to be waited for.
	heard = 5 * board.Beat / 2
	// maxTurns bounds how often a number is tried to be taken in one go, while others change the document.
	maxTurns = 10
	// maxSkew is how far clocks of replicas may differ: up to that, times of numbers do not go back.
	maxSkew = 10 * time.Minute
	// correctEvery is how often at most a number is taken since the last one is of a time that is ahead by more than that.
	correctEvery = 10 * time.Minute
)

// listing is what the CRLs of one number list.
type listing struct {
	document.CRL
	entries  []entry // by serial
	sum      string
	overflow int // revoked certificates that do not fit
}

// entry is a certificate as a CRL lists it.
type entry struct {
	serial, issuer string // hex, ID; no issuer: any
	reason         int
	time           time.Time
}

// takeNotes takes over what other replicas say. Caller holds mu.
func (m *Manager) takeNotes() {
	b := m.config.Board
	if b == nil {
		return
	}
	changed := b.Changed()
	if changed == m.changed {
		return
	}
	m.changed = changed
	before := m.notes
	m.notes = b.Others()
	same := slices.EqualFunc(before, m.notes, func(a, b board.Note) bool {
		return a.LogID == b.LogID && a.Resolved == b.Resolved && a.Omitted == b.Omitted && slices.Equal(a.Revoked, b.Revoked)
	})
	if !same {
		m.all, m.dirty = nil, true
		m.storeSet(m.resolved)
	}
}

// noteOf returns what a replica said last. Its log says who it is, since names change; nil if it has said nothing.
func (m *Manager) noteOf(l *authority.LogState) *board.Note {
	var best *board.Note
	for i := range m.notes {
		if n := &m.notes[i]; n.LogID == l.ID && (best == nil || n.Replica == l.Replica || best.Replica != l.Replica && n.Resolved > best.Resolved) {
			best = n
		}
	}
	return best
}

// others returns the entries of the document's replicas but this one. Caller must not change them.
func (m *Manager) others(doc *authority.Document) []*authority.LogState {
	var out []*authority.LogState
	own := m.config.Authority.LogID()
	for i := range doc.Logs {
		if doc.Logs[i].ID != own {
			out = append(out, &doc.Logs[i])
		}
	}
	return out
}

// told returns what was found, as the own note has it; there is a board. Caller holds mu.
func (m *Manager) told() []board.Revoked {
	if m.tells != nil {
		return m.tells
	}
	all := make([]board.Revoked, 0, len(m.found))
	add := func(gone func(*Certificate) bool) {
		for _, c := range m.found {
			if !gone(&c) {
				all = append(all, board.Revoked{Serial: c.Serial, NotAfter: c.NotAfter, Revocation: m.predicates.All[c.Revocation].ID, Issuer: c.Issuer})
			}
		}
	}
	if add(func(*Certificate) bool { return false }); len(all) > board.MaxRevoked { // what has ended leaves the CRLs with the next number
		now := time.Now()
		all = all[:0]
		add(func(c *Certificate) bool { return c.gone(now) })
	}
	m.tells, m.omitted = m.config.Board.Fit(all)
	return m.tells
}

// post says in the own note what was found. Caller holds mu.
func (m *Manager) post(doc *authority.Document) {
	b := m.config.Board
	if b == nil {
		return
	}
	told := m.told()
	b.Own(func(n *board.Note) {
		n.LogID, n.Revoked, n.Omitted = m.config.Authority.LogID(), told, uint64(m.omitted)
		if m.resolved {
			n.Resolved = doc.Version
		}
		if m.config.Issuance != nil {
			n.Checkpoint = m.config.Issuance.Checkpoint()
		}
	})
	if m.listed != doc.Version {
		m.listed = doc.Version
		names := map[string]bool{}
		for _, l := range doc.Logs {
			names[l.Replica], names[board.HeirName(l.Replica, l.ID)] = true, true
		}
		b.Keep(func(note string) bool { return names[note] })
	}
}

// union returns all revoked certificates that replicas in the document have found, by serial, and those of the document that nobody
// has found. All replicas work it out alike. Caller holds mu.
func (m *Manager) union(doc *authority.Document) map[string]Certificate {
	if m.all != nil {
		return m.all
	}
	all := map[string]Certificate{}
	add := func(c Certificate) {
		if have, ok := all[c.Serial]; !ok || before(&c, &have) {
			all[c.Serial] = c
		}
	}
	told := func(revoked []board.Revoked) {
		for _, r := range revoked {
			if i, ok := m.predicates.ByID[r.Revocation]; ok { // else it stands in another document than ours
				add(Certificate{Serial: r.Serial, Issuer: r.Issuer, NotAfter: r.NotAfter, Revocation: i})
			}
		}
	}
	if m.config.Board == nil {
		for _, c := range m.found {
			add(c)
		}
	} else {
		told(m.told())
		for _, l := range m.others(doc) {
			for i := range m.notes {
				if n := &m.notes[i]; n.LogID == l.ID && n == m.noteOf(l) {
					told(n.Revoked)
				}
			}
		}
	}
	for serial, i := range m.predicates.Serials {
		if _, ok := all[serial]; !ok && m.predicates.All[i].Until != nil { // somebody may have signed it behind the logs' back
			all[serial] = Certificate{Serial: serial, NotAfter: *m.predicates.All[i].Until, Revocation: i}
		}
	}
	m.all = all
	return all
}

// before orders what several say of one serial.
func before(a, b *Certificate) bool {
	return cmp.Or(cmp.Compare(a.Revocation, b.Revocation), -strings.Compare(a.Issuer, b.Issuer), -a.NotAfter.Compare(b.NotAfter)) < 0
}

// listingOf works out what CRLs list that are as c says. Caller holds mu.
func (m *Manager) listingOf(doc *authority.Document, c document.CRL) *listing {
	var list []Certificate
	for _, x := range m.union(doc) {
		if !x.gone(c.Time) {
			list = append(list, x)
		}
	}
	l := &listing{CRL: c}
	if l.overflow = len(list) - MaxEntries; l.overflow > 0 { // what was revoked first stays
		slices.SortFunc(list, func(a, b Certificate) int {
			return cmp.Or(cmp.Compare(a.Revocation, b.Revocation), cmp.Compare(a.Serial, b.Serial))
		})
		list = list[:MaxEntries]
	}
	slices.SortFunc(list, func(a, b Certificate) int { return cmp.Compare(a.Serial, b.Serial) })
	h := sha256.New()
	fmt.Fprintln(h, "chancery CRL content 1")
	for _, x := range list {
		r := &m.predicates.All[x.Revocation]
		e := entry{x.Serial, x.Issuer, r.Reason, r.Time.UTC().Truncate(time.Second)}
		if e.time.After(c.Time) { // by a clock that was ahead
			e.time = c.Time
		}
		l.entries = append(l.entries, e)
		fmt.Fprintln(h, e.serial, e.issuer, e.reason, e.time.Unix())
	}
	l.sum = hex.EncodeToString(h.Sum(nil))
	return l
}

// reach brings m.at to what the document says the CRLs are, or has the document say what they should be. An error says why that cannot be
// now; what was reached before stands. Caller holds mu.
func (m *Manager) reach(ctx context.Context, now time.Time, life time.Duration) error {
	m.waiting = false
	for range maxTurns {
		doc := m.config.Authority.Document()
		m.look(doc)
		if err := m.resolve(ctx); err != nil {
			return err
		}
		m.post(doc)
		m.takeNotes()
		last := doc.Domains[m.config.Domain.String()].LastCRL()
		ahead := last.Content != "" && last.Time.After(now.Add(maxSkew))
		if ahead && now.Sub(m.corrected) < correctEvery {
			return fmt.Errorf("CRLs with number %d are of %s: the clock of the replica that took it is ahead, or that of this one behind. Those before stand", last.Number,
				last.Time.Format(time.RFC3339))
		}
		if !ahead && m.isReached(doc, last) && !due(last, now, life) {
			return nil
		}
		if err := m.mayTake(ctx, doc, last, now); err != nil || m.waiting {
			return err
		}
		if !ahead && m.isReached(doc, last) && !due(last, now, life) { // by what was read meanwhile
			return nil
		}
		next := document.CRL{Time: now.UTC().Truncate(time.Second)}
		if last.Time.After(next.Time) && last.Time.Before(next.Time.Add(maxSkew)) {
			next.Time = last.Time
		}
		next.Until = next.Time.Add(life)
		next.Content = m.listingOf(doc, next).sum
		if err := m.config.Authority.TakeCRL(ctx, doc, next); err != nil && !errors.Is(err, authority.ErrMoved) {
			return fmt.Errorf("taking a number for CRLs: %w", err)
		} else if err == nil && ahead {
			m.corrected = now
			m.config.Logger.Error("the last number of CRLs was taken with a clock that is ahead, and another one is taken", "number", last.Number, "time", last.Time)
		}
	}
	return errors.New("taking a number for CRLs: the document is changed all the time")
}

// isReached reports whether we have all that the last CRLs list, and takes it over.
func (m *Manager) isReached(doc *authority.Document, last document.CRL) bool {
	if last.Content == "" {
		return false
	}
	l := m.listingOf(doc, last)
	if l.sum != last.Content {
		return false
	}
	if m.at == nil || m.at.Number != last.Number || m.at.sum != l.sum {
		m.prune(last.Time)
	}
	m.at, m.differs = l, time.Time{}
	return true
}

// prune forgets what has left the CRLs. Serials that were revoked by name are kept in mind, so that they do not pass for such that nobody
// knows.
func (m *Manager) prune(at time.Time) {
	for serial, c := range m.found {
		if _, named := m.predicates.Serials[serial]; !named && c.gone(at) {
			delete(m.found, serial)
			m.tells = nil
		}
	}
	m.pruned = at
}

// due reports whether CRLs should be signed anew though they list what they should: at half of their life, or if it is too short for the
// leaves that there are now.
func due(last document.CRL, now time.Time, life time.Duration) bool {
	whole := last.Until.Sub(last.Time)
	return !now.Before(last.Time.Add(whole/2)) || whole < life
}

// mayTake gets ready to take a number: others are given time to tell, what we know is told, and what they told is read. It sets waiting if
// it is too early. Caller holds mu.
func (m *Manager) mayTake(ctx context.Context, doc *authority.Document, last document.CRL, now time.Time) error {
	b := m.config.Board
	if b == nil {
		return nil
	}
	if m.differs.IsZero() {
		m.differs = now
	}
	if now.Sub(m.differs) < m.gather && m.gathering(doc, now) {
		m.waiting = true
		return nil
	}
	if err := b.Write(ctx); err != nil {
		return fmt.Errorf("telling other replicas what is revoked: %w", err)
	}
	if err := b.Read(ctx); err != nil {
		return fmt.Errorf("reading what is revoked elsewhere: %w", err)
	}
	m.takeNotes()
	if m.at != nil || last.Content == "" || now.Sub(m.started) >= patience {
		return nil
	}
	for _, l := range m.others(doc) { // we have just started: what we do not know would leave the CRLs
		if l.Key != "" && m.noteOf(l) == nil && m.listingOf(doc, last).sum != last.Content {
			return fmt.Errorf("CRLs with number %d list what only replica %s can know, which has left no note; waiting for it until %s", last.Number, nameOf(l),
				m.started.Add(patience).UTC().Format(time.RFC3339))
		}
	}
	return nil
}

// gathering reports whether a replica that lives has not told yet what it has of the newest revocations.
func (m *Manager) gathering(doc *authority.Document, now time.Time) bool {
	need := doc.Domains[m.config.Domain.String()].NeedsResolved()
	for _, l := range m.others(doc) {
		if n := m.noteOf(l); n != nil && l.DeclaredDead == nil && n.Resolved < need && now.Sub(n.Seen) < heard {
			return true
		}
	}
	return false
}

// behind returns the logs of other replicas that were not searched for all that is revoked.
func (m *Manager) behind() map[uint32]bool {
	out := map[uint32]bool{}
	doc := m.config.Authority.Document()
	state := doc.Domains[m.config.Domain.String()]
	if state == nil {
		return out
	}
	for _, l := range m.others(doc) {
		if n := m.noteOf(l); n == nil || n.Resolved < state.NeedsResolved() || n.Omitted > 0 {
			out[l.ID] = true
		}
	}
	return out
}

func nameOf(l *authority.LogState) string {
	if l.Replica == "" {
		return fmt.Sprintf("with log ID %d", l.ID)
	}
	return l.Replica
}

// missing says whose certificates may be revoked without being on the CRLs (decision D13). Caller holds mu.
func (m *Manager) missingLogs(doc *authority.Document) (out []string) {
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	need := max(doc.Domains[m.config.Domain.String()].NeedsResolved(), 1)
	var trouble map[string]string
	if m.config.Board != nil {
		trouble = m.config.Board.Trouble()
	}
	for _, l := range m.others(doc) {
		n := m.noteOf(l)
		why := ""
		if t := trouble[l.Replica]; t != "" {
			why = ": its note is not taken, since " + t
		}
		switch {
		case l.Key == "":
			add("the replica %s has no issuance log", nameOf(l))
		case n == nil:
			add("log %s of replica %s cannot be reached from here, and the replica has left no note%s", l.Key, nameOf(l), why)
		case n.Resolved < need:
			add("log %s of replica %s, last heard of at %s, was not searched for the newest revocations%s", l.Key, nameOf(l), n.Seen.UTC().Format(time.RFC3339), why)
		}
		if n != nil && n.Omitted > 0 {
			add("replica %s has %d more revoked certificates than it can tell others; those are on no CRL", nameOf(l), n.Omitted)
		}
	}
	if m.omitted > 0 {
		add("this replica has %d more revoked certificates than it can tell others; those are on no CRL", m.omitted)
	}
	if m.at != nil && m.at.overflow > 0 {
		add("%d revoked certificates, those revoked last, are on no CRL: at most %d fit", m.at.overflow, MaxEntries)
	}
	return out
}

// unseen names the logs that only other replicas can read.
func (m *Manager) unseen() (out []string) {
	for _, l := range m.others(m.config.Authority.Document()) {
		if l.Key != "" {
			out = append(out, fmt.Sprintf("log %s of replica %s: a dry run sees the log of the server that is asked only", l.Key, nameOf(l)))
		}
	}
	return out
}

// acknowledge tells the others that this replica has published CRLs of all issuers in a document, and can sign with the key of
// the one that waits to (decision D4). Caller holds mu.
func (m *Manager) acknowledge(ctx context.Context, doc *authority.Document) {
	b := m.config.Board
	if b == nil || m.acknowledged >= doc.Version {
		return
	}
	now, before := time.Now(), m.blocked
	if m.blocked = m.config.Authority.HoldsPrepared(ctx); m.blocked == nil {
		m.blocked = m.inStep(doc)
	}
	if m.blocked == nil && m.config.Acknowledge != nil {
		m.blocked = m.config.Acknowledge(ctx, doc)
	}
	if m.blocked != nil {
		m.due = now.Add(2 * gather)
		if before == nil { // an issuer comes into use a moment after its document
			m.due, m.blockedTold = now.Add(gather/4), false
		} else if !m.blockedTold {
			m.blockedTold = true
			m.config.Logger.Warn("this replica cannot acknowledge the document; until it can, or is declared dead, others wait for it", "version", doc.Version, "reason", m.blocked.Error())
		}
		return
	}
	m.acknowledged = doc.Version
	if m.config.Acknowledge == nil {
		b.Own(func(n *board.Note) { n.Acknowledged = doc.Version })
	}
}

// inStep returns why what is signed here is not what a document says: nil if nothing is signed.
func (m *Manager) inStep(doc *authority.Document) error {
	i := m.config.Authority.InUse()
	if i == nil {
		return nil
	}
	x, err := doc.Active(m.config.Domain, document.KindIssuer)
	if err == nil && (x.ID != i.SKI() || doc.Domains[m.config.Domain.String()].Generation != i.Bundle().Generation()) {
		err = fmt.Errorf("issuer %s signs with roots of generation %d", i.SKI(), i.Bundle().Generation())
	}
	return err
}

// Acknowledged returns once each other replica that nobody declared dead works by a version of the document, or a later one: it has
// published CRLs of all issuers in it to its agents, and can sign with the one that waits to. When ctx ends before, the error names those
// that do not, or says why this one does not.
func (m *Manager) Acknowledged(ctx context.Context, version uint64) error {
	b := m.config.Board
	if b == nil {
		return nil
	}
	for {
		changed := b.Changed()
		waits := m.unacknowledged(version)
		if len(waits) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("version %d of the authority document is not acknowledged by %s", version, strings.Join(waits, ", "))
		case <-changed:
		case <-time.After(gather / 10): // this one's own does not show there
		}
	}
}

// unacknowledged names the replicas that have not acknowledged a version of the document.
func (m *Manager) unacknowledged(version uint64) (out []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.takeNotes()
	doc := m.config.Authority.Document()
	if m.acknowledged < version {
		why := m.state.Load().Err
		if m.blocked != nil {
			why = m.blocked
		}
		out = append(out, fmt.Sprintf("this replica (%v)", why))
	}
	for _, l := range m.others(doc) {
		switch n := m.noteOf(l); {
		case l.DeclaredDead != nil || n != nil && n.Acknowledged >= version:
		case n == nil:
			out = append(out, fmt.Sprintf("replica %s, which was never heard of", nameOf(l)))
		default:
			out = append(out, fmt.Sprintf("replica %s, which has version %d and was last heard of at %s", nameOf(l), n.Acknowledged, n.Seen.UTC().Format(time.RFC3339)))
		}
	}
	if len(out) > 0 && len(m.others(doc)) > 0 {
		out[len(out)-1] += "; `chancery replica forget NAME` is for those that will not come back"
	}
	return out
}
