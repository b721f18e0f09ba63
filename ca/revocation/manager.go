package revocation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document/revoked"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/revocation/match"
	"github.com/chancery-project/chancery/trust"
)

// Config is what a Manager is made of.
type Config struct {
	Domain    trust.Domain
	Authority *authority.Keeper
	Issuance  *issuelog.Log // nil without one
	Board     *board.Board  // where replicas tell each other; nil for a server that is alone
	Logger    *slog.Logger
	Metrics   prometheus.Registerer
	Publish   func(*Lists) // called with each new state, one after the other; should not block
	// Acknowledge says in the own note that this replica works by a document, along with what goes with that; nil says that alone.
	Acknowledge func(context.Context, *authority.Document) error
}

// Lists are what verifiers need, of one snapshot.
type Lists struct {
	Version uint64 // of the document that all of this was worked out from
	Bundle  *trust.Bundle
	CRLs    [][]byte // of every issuer; empty if one cannot have any
	Issuers [][]byte // certificates of the CRLs' issuers, and those between them and the roots
	Leave   []string // IDs of issuers whose leaves are to be replaced before their time
}

// Manager keeps revocations.
type Manager struct {
	config Config
	set    atomic.Pointer[Set]
	state  atomic.Pointer[State]
	looked chan struct{} // closed after the first Refresh
	once   sync.Once     // of looked

	mu         sync.Mutex // guards all below; held while CRLs are made
	version    uint64     // of the document that was looked at last; 0: none yet
	raw        []byte     // its revocations
	predicates *match.Predicates
	found      map[string]Certificate // in the own log, by serial
	resolved   bool                   // the log was read for these predicates,
	upTo       int64                  // up to this index
	pruned     time.Time              // what had left the CRLs by then was forgotten
	dirty      bool                   // something changed that CRLs are made of
	due        time.Time              // when to look at the CRLs in any case
	at         *listing               // what our CRLs list; nil before the first
	last       map[string]signed      // by keyOf
	failing    time.Time              // see State
	without    time.Time              // since when an issuer should have a CRL and has none; zero: none does
	published  *Lists
	off, stale []string // see State

	// Of several replicas; see replicas.go.
	started      time.Time
	gather       time.Duration          // see the constant
	changed      <-chan struct{}        // of the board, when notes were taken over
	notes        []board.Note           // of others
	tells        []board.Revoked        // what the own note says; nil: to be made anew from found
	omitted      int                    // how much of found does not fit into it
	all          map[string]Certificate // see union; nil: to be made anew
	listed       uint64                 // version of the document whose replicas the board knows
	differs      time.Time              // since when the CRLs do not list what they should; zero: they do
	waiting      bool                   // for others to tell
	corrected    time.Time              // when a number was taken since the last one was of the future
	acknowledged uint64                 // version of the document
	blocked      error                  // why it cannot be acknowledged,
	blockedTold  bool                   // and whether the log says so
}

// State is what can be said of the revocations at a moment.
type State struct {
	Revocations []authority.Revocation
	Counts      []uint64  // certificates on CRLs, of each
	MissingLogs []string  // whose certificates may be revoked without being on the CRLs (decision D13)
	Blocked     error     // why the document is not acknowledged to other replicas, if there is a reason but Err
	Off         []string  // why there are no CRLs; empty if there are
	Stale       []string  // issuers whose CRL cannot be made anew, and what it lacks
	Ends        time.Time // when the first CRL ends
	Err         error     // why the last try to bring all up to date failed,
	Failing     time.Time // since when tries fail; zero if the last one did not
}

// New returns a manager. What the document says is refused from here on; CRLs come with Refresh or Run.
func New(c Config) *Manager {
	m := &Manager{config: c, looked: make(chan struct{}), found: map[string]Certificate{}, last: map[string]signed{}, started: time.Now(), gather: gather}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.look(c.Authority.Document())
	m.describe(errors.New("the server has just started"))
	if c.Metrics != nil {
		m.register(c.Metrics)
	}
	return m
}

// Set returns what is revoked now.
func (m *Manager) Set() *Set { return m.set.Load() }

// State returns what can be said now.
func (m *Manager) State() *State { return m.state.Load() }

// Looked is closed once State says more than that the server has just started.
func (m *Manager) Looked() <-chan struct{} { return m.looked }

// look takes the document's revocations over. Caller holds mu.
func (m *Manager) look(doc *authority.Document) {
	if m.version == doc.Version {
		return
	}
	m.version, m.dirty, m.all = doc.Version, true, nil                                                         // issuers and replicas may have changed
	if state := doc.Domains[m.config.Domain.String()]; state != nil && state.LastCRL().Time.Before(m.pruned) { // what was forgotten is on these CRLs
		m.forget()
	}
	all, names := doc.Revocations(m.config.Domain), doc.Names(m.config.Domain)
	raw, err := json.Marshal(all)
	if err != nil { // it came from JSON
		m.config.Logger.Error("revocations do not encode", "reason", err.Error())
	}
	if m.predicates != nil && bytes.Equal(raw, m.raw) && m.predicates.Of(names) {
		return
	}
	m.raw, m.predicates = raw, match.Arrange(names, all)
	m.forget()
	m.storeSet(false)
}

// forget has the log read again. Caller holds mu.
func (m *Manager) forget() {
	m.found, m.tells, m.all, m.resolved, m.upTo, m.pruned = map[string]Certificate{}, nil, nil, false, 0, time.Time{}
}

// storeSet makes a new Set. Caller holds mu.
func (m *Manager) storeSet(resolved bool) {
	s := NewSet(nil, nil, resolved || !m.predicates.NeedLog())
	for _, r := range m.predicates.All {
		if r.SPIFFEID != "" && r.Restored == nil {
			s.identities[revoked.Path(r.SPIFFEID)] = true
		}
		if r.Serial != "" {
			s.serials[r.Serial] = true
		}
	}
	for serial := range m.found {
		s.serials[serial] = true
	}
	for i := range m.notes {
		for _, r := range m.notes[i].Revoked {
			s.serials[r.Serial] = true
		}
	}
	s.behind, s.predicates = m.behind(), m.predicates
	if old := m.set.Load(); !s.complete && old != nil { // what was known stays known while the rest is looked for
		maps.Copy(s.serials, old.serials)
	}
	m.set.Store(s)
}

const (
	// tick is how often the log is asked for certificates that were being signed while they were revoked.
	tick = time.Second
	// maxTick is how seldom it is tried again what fails.
	maxTick = 30 * time.Second
	// lookEvery is how often CRLs are looked at though nothing changed: entries and issuers end, and CRLs are signed early.
	lookEvery = time.Minute
)

// Run keeps all up to date until ctx ends.
func (m *Manager) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	failing, wait := false, tick
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.config.Authority.Changed():
		case <-m.news():
		case <-timer.C:
		}
		err := m.Refresh(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !failing:
			m.config.Logger.Error("revocations are not up to date; trying again", "reason", err.Error())
		case err == nil && failing:
			m.config.Logger.Info("revocations are up to date again")
		}
		if failing = err != nil; failing { // each try to sign takes a number, and lines of both logs
			wait = min(2*wait, maxTick)
		} else {
			wait = tick
		}
		if m.isWaiting() {
			timer.Reset(gather / 10)
		} else {
			timer.Reset(wait)
		}
	}
}

// news is closed once another replica says something that was not looked at.
func (m *Manager) news() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

func (m *Manager) isWaiting() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.waiting
}

// isGathering reports whether another replica has not told yet what it has of the newest revocations.
func (m *Manager) isGathering() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gathering(m.config.Authority.Document(), time.Now())
}

// Refresh brings everything up to date with document, log and time, and publishes it if it changed. It does little where
// nothing did.
func (m *Manager) Refresh(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.refresh(ctx)
	switch {
	case err == nil:
		m.failing = time.Time{}
	case m.failing.IsZero():
		m.failing = time.Now()
	}
	m.describe(err)
	m.once.Do(func() { close(m.looked) })
	return err
}

func (m *Manager) refresh(ctx context.Context) error {
	doc := m.config.Authority.Document()
	m.look(doc)
	m.takeNotes()
	if err := m.resolve(ctx); err != nil {
		return err
	}
	m.post(doc)
	now := time.Now()
	if !m.dirty && now.Before(m.due) {
		return nil // as it was
	}
	signers, err := m.config.Authority.CRLSigners(ctx)
	if err != nil {
		return err
	}
	life := crlLife
	for _, s := range signers {
		life = max(life, 2*s.MaxTTL) // so that what is left at half outlives every leaf
	}
	late := m.reach(ctx, now, life)
	if m.at == nil {
		return late
	}
	crls, off, failed, err := m.crls(ctx, signers, now)
	if err != nil {
		return errors.Join(late, err)
	}
	bundle, err := doc.Bundle(m.config.Domain)
	if err != nil {
		return err
	}
	m.publish(&Lists{Version: doc.Version, Bundle: bundle, CRLs: crls, Leave: doc.Domains[m.config.Domain.String()].Hurried()}, signers, off)
	late = errors.Join(late, failed)
	if m.dirty, m.due = false, now.Add(lookEvery); late != nil || m.waiting {
		m.due = now
	}
	if late == nil {
		m.acknowledge(ctx, doc)
	}
	return late
}

// publish passes a new state on, if it is one. Caller holds mu.
func (m *Manager) publish(next *Lists, signers []authority.CRLSigner, off []string) {
	if len(off) > 0 && !slices.Equal(off, m.off) {
		m.config.Logger.Warn("there are no CRLs", "reason", off)
	}
	m.off = off
	if len(next.CRLs) > 0 {
		seen := map[string]bool{}
		for _, s := range signers {
			for _, x := range s.Chain {
				if !seen[string(x.Raw)] {
					seen[string(x.Raw)] = true
					next.Issuers = append(next.Issuers, x.Raw)
				}
			}
		}
	}
	if !next.same(m.published) {
		m.published = next
		m.config.Publish(next)
	}
}

func (l *Lists) same(o *Lists) bool {
	equal := func(a, b [][]byte) bool {
		return slices.EqualFunc(a, b, func(x, y []byte) bool { return string(x) == string(y) })
	}
	return o != nil && l.Bundle.SameRoots(o.Bundle) && l.Bundle.Generation() == o.Bundle.Generation() && equal(l.CRLs, o.CRLs) &&
		equal(l.Issuers, o.Issuers) && slices.Equal(l.Leave, o.Leave)
}

// resolve finds the certificates that the predicates mean and that the log has got since. Caller holds mu.
func (m *Manager) resolve(ctx context.Context) error {
	log := m.config.Issuance
	if m.resolved && (!m.predicates.NeedLog() || log == nil || log.Size() == m.upTo) {
		return nil
	}
	known := len(m.found)
	since := time.Now()
	if state := m.config.Authority.Document().Domains[m.config.Domain.String()]; state != nil && state.LastCRL().Content != "" {
		if at := state.LastCRL().Time; at.Before(since) { // the last CRLs list it still
			since = at
		}
	}
	end, err := m.scan(ctx, m.predicates, m.upTo, since, func(c Certificate) error {
		m.found[c.Serial] = c
		return nil
	})
	if err != nil {
		return err
	}
	if !m.resolved || len(m.found) != known {
		m.dirty, m.tells, m.all = true, nil, nil
		m.storeSet(true)
	}
	m.resolved, m.upTo = true, end
	return nil
}

// describe stores what can be said. Caller holds mu.
func (m *Manager) describe(err error) {
	s := &State{Revocations: m.predicates.All, Counts: make([]uint64, len(m.predicates.All)), Off: m.off, Stale: m.stale, Blocked: m.blocked, Err: err, Failing: m.failing}
	now := time.Now()
	doc := m.config.Authority.Document()
	for _, c := range m.union(doc) {
		if now.Before(c.NotAfter) {
			s.Counts[c.Revocation]++
		}
	}
	for _, l := range m.last {
		if s.Ends.IsZero() || l.ends.Before(s.Ends) {
			s.Ends = l.ends
		}
	}
	if doc.Domains[m.config.Domain.String()] != nil {
		s.MissingLogs = m.missingLogs(doc)
	}
	m.state.Store(s)
}

// Result says what a revocation means.
type Result struct {
	Certificates []Certificate // at most 1,000
	Count        uint64
	Revocation   string   // its ID; empty after a dry run
	Delayed      error    // what failed after it was stored; it is tried again
	Unseen       []string // logs of other replicas, which a dry run does not see
}

// maxListed bounds what a Result lists.
const maxListed = 1000

// Revoke stores a revocation and brings it into effect, or with dryRun only says what it means.
func (m *Manager) Revoke(ctx context.Context, r authority.Revocation, dryRun bool) (*Result, error) {
	if err := r.Check(m.config.Authority.Document().Names(m.config.Domain), r.Time); err != nil {
		return nil, err
	}
	if r.Serial == "" && m.config.Issuance == nil {
		return nil, errNoLog
	}
	found, err := m.preview(ctx, r)
	if err != nil {
		return nil, err
	}
	result := &Result{Count: uint64(len(found.all)), Certificates: found.all[:min(len(found.all), maxListed)]}
	if dryRun {
		if r.Serial == "" || result.Count == 0 {
			result.Unseen = m.unseen()
		}
		return result, nil
	}
	switch {
	case r.Serial != "":
		r.Until = &found.ends
	case r.SPIFFEID == "":
		until := r.Time.Add(ca.LeafTTLLimit)
		r.Until = &until
	}
	if result.Revocation, err = m.store(ctx, r, found); err != nil {
		return nil, err
	}
	result.Delayed = m.settle(ctx)
	m.count(result)
	return result, nil
}

// settle is Refresh, until those who live have told what they have, or had the time to.
func (m *Manager) settle(ctx context.Context) error {
	for end := time.Now().Add(m.gather); ; {
		changed := m.news()
		err := m.Refresh(ctx)
		if more := m.isWaiting() || m.isGathering() && time.Now().Before(end); err != nil || !more {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-time.After(gather / 10):
		}
	}
}

// count adds what others have found for a revocation.
func (m *Manager) count(r *Result) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i, ok := m.predicates.ByID[r.Revocation]
	if !ok {
		return
	}
	own := map[string]bool{}
	for _, c := range r.Certificates {
		own[c.Serial] = true
	}
	now := time.Now()
	var count uint64
	for _, c := range m.union(m.config.Authority.Document()) {
		if c.Revocation != i || !now.Before(c.NotAfter) || c.Issuer == "" {
			continue
		}
		count++
		if !own[c.Serial] && len(r.Certificates) < maxListed {
			c.SPIFFEID = m.predicates.All[i].SPIFFEID
			r.Certificates = append(r.Certificates, c)
		}
	}
	r.Count = max(r.Count, count)
}

// store stores a revocation and takes over what was found for it. Under mu, so that Run does not come in between and read the
// log once more, while no certificate could be renewed by one that may be revoked.
func (m *Manager) store(ctx context.Context, r authority.Revocation, found *preview) (id string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if left := m.left(time.Now()); len(found.all)+len(found.ended) > left { // another came in between
		return "", tooMany(left)
	}
	stored, err := m.config.Authority.Revoke(ctx, r)
	if err != nil {
		return "", err
	}
	m.adopt(stored, found)
	return stored.ID, nil
}

// preview is what a revocation means at a moment.
type preview struct {
	all   []Certificate
	ended []Certificate // those that clocks that are behind accept still
	upTo  int64         // index in the log up to which it is complete
	ends  time.Time     // when the last of them ends
}

// preview finds what a revocation means now.
func (m *Manager) preview(ctx context.Context, r authority.Revocation) (*preview, error) {
	if m.config.Issuance != nil { // what waits in the journal should be found
		if err := m.config.Issuance.Sequence(); err != nil {
			return nil, fmt.Errorf("finding revoked certificates: %w", err)
		}
	}
	now := time.Now()
	room, err := m.room(ctx, now)
	if err != nil {
		return nil, err
	}
	out := new(preview)
	out.upTo, err = m.scan(ctx, match.Arrange(m.config.Authority.Document().Names(m.config.Domain), []authority.Revocation{r}), 0, now, func(c Certificate) error {
		switch {
		case c.SPIFFEID != "" && revoked.Path(c.SPIFFEID) == c.SPIFFEID: // a trust domain alone
			return fmt.Errorf("serial %s is that of a signing certificate; what hangs on it cannot be revoked one by one: make a new issuer", c.Serial)
		case !now.Before(c.NotAfter):
			out.ended = append(out.ended, c)
			return nil
		case len(out.all)+len(out.ended) >= room:
			return tooMany(room)
		}
		out.all = append(out.all, c)
		if c.NotAfter.After(out.ends) {
			out.ends = c.NotAfter
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if r.Serial != "" && len(out.all) == 0 { // somebody may have signed it behind the log's back: it stays until no issuer is left
		signers, err := m.config.Authority.CRLSigners(ctx)
		if err != nil {
			return nil, err
		}
		for _, s := range signers {
			if s.NotAfter.After(out.ends) {
				out.ends = s.NotAfter
			}
		}
	}
	return out, nil
}

// room returns how many certificates still fit onto the CRLs, once it is known what is on them.
func (m *Manager) room(ctx context.Context, now time.Time) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.look(m.config.Authority.Document())
	if err := m.resolve(ctx); err != nil {
		return 0, err
	}
	return m.left(now), nil
}

// left is room for who holds mu.
func (m *Manager) left(now time.Time) int {
	left := MaxEntries
	for _, c := range m.union(m.config.Authority.Document()) {
		if !c.gone(now) {
			left--
		}
	}
	return left
}

func tooMany(room int) error {
	return fmt.Errorf("more than %d certificates would go onto the CRLs, which have %d; at most %d fit. Narrow it by --node or an earlier time",
		room, MaxEntries-room, MaxEntries)
}

// adopt takes over what was found before a revocation was stored, so that the log is not read twice, if nothing else has
// changed since. Else Refresh finds it again. Caller holds mu.
func (m *Manager) adopt(stored authority.Revocation, p *preview) {
	doc := m.config.Authority.Document()
	all := doc.Revocations(m.config.Domain)
	last := len(all) - 1
	if !m.resolved || last < 0 || all[last].ID != stored.ID {
		return
	}
	before, err := json.Marshal(all[:last])
	if err != nil || !bytes.Equal(before, m.raw) && last > 0 || last == 0 && len(m.predicates.All) > 0 {
		return
	}
	if m.predicates.NeedLog() {
		p.upTo = min(p.upTo, m.upTo)
	}
	found, pruned := m.found, m.pruned
	if doc.State(m.config.Domain).LastCRL().Time.Before(pruned) { // see look
		return
	}
	m.look(doc)
	for _, c := range slices.Concat(p.all, p.ended) {
		c.Revocation = last
		if _, known := found[c.Serial]; !known {
			found[c.Serial] = c
		}
	}
	m.found, m.pruned, m.resolved, m.upTo = found, pruned, true, p.upTo
	m.storeSet(true)
}

// Restore lets an identity have certificates again.
func (m *Manager) Restore(ctx context.Context, actor string, id trust.ID) error {
	if err := m.config.Authority.Restore(ctx, actor, id, time.Now()); err != nil {
		return err
	}
	// Nothing on a CRL depends on it: what fails here is tried again.
	if err := m.Refresh(ctx); err != nil && !errors.Is(err, context.Canceled) {
		m.config.Logger.Error("revocations are not up to date; trying again", "reason", err.Error())
	}
	return nil
}

func (m *Manager) register(r prometheus.Registerer) {
	gauge := func(name, help string, read func(*State) float64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return read(m.State()) }))
	}
	gauge("chancery_ca_revocations", "Revocations in the authority document.", func(s *State) float64 { return float64(len(s.Revocations)) })
	gauge("chancery_ca_crl_entries", "Certificates that are revoked and have not ended.", func(s *State) float64 {
		var n uint64
		for _, c := range s.Counts {
			n += c
		}
		return float64(n)
	})
	gauge("chancery_ca_crl_seconds_left", "Seconds until the first CRL ends; 0 if there is none.", func(s *State) float64 {
		if s.Ends.IsZero() {
			return 0
		}
		return time.Until(s.Ends).Seconds()
	})
	gauge("chancery_ca_crl_failing", "1 if revocations or CRLs are not up to date, or if there can be no CRLs, else 0.", func(s *State) float64 {
		if s.Err != nil || len(s.Off) > 0 {
			return 1
		}
		return 0
	})
}
