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
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/trust"
)

// Config is what a Manager is made of.
type Config struct {
	Domain    trust.Domain
	Authority *authority.Keeper
	Issuance  *issuelog.Log // nil without one
	Logger    *slog.Logger
	Metrics   prometheus.Registerer
	Publish   func(*Lists) // called with each new state, one after the other; should not block
}

// Lists are what verifiers need, of one snapshot.
type Lists struct {
	Bundle  *trust.Bundle
	CRLs    [][]byte // of every issuer; empty if one cannot have any
	Issuers [][]byte // certificates of the CRLs' issuers, and those between them and the roots
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
	predicates *predicates
	found      map[string]Certificate // by serial
	resolved   bool                   // the log was read for these predicates,
	upTo       int64                  // up to this index
	dirty      bool                   // something changed that CRLs are made of
	due        time.Time              // when to look at the CRLs in any case
	last       map[string]signed      // by issuer ID
	published  *Lists
	off, stale []string // see State
}

// State is what can be said of the revocations at a moment.
type State struct {
	Revocations []authority.Revocation
	Counts      []uint64  // certificates on CRLs, of each
	MissingLogs []string  // of other replicas (decision D13)
	Off         []string  // why there are no CRLs; empty if there are
	Stale       []string  // issuers whose CRL cannot be made anew, and what it lacks
	Ends        time.Time // when the first CRL ends
	Err         error     // why the last try to bring all up to date failed
}

// New returns a manager. What the document says is refused from here on; CRLs come with Refresh or Run.
func New(c Config) *Manager {
	m := &Manager{config: c, looked: make(chan struct{}), found: map[string]Certificate{}, last: map[string]signed{}}
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
	m.version, m.dirty = doc.Version, true // issuers may have changed
	all := doc.Revocations(m.config.Domain)
	raw, err := json.Marshal(all)
	if err != nil { // it came from JSON
		m.config.Logger.Error("revocations do not encode", "reason", err.Error())
	}
	if m.predicates != nil && bytes.Equal(raw, m.raw) {
		return
	}
	m.raw, m.predicates, m.found, m.resolved, m.upTo = raw, arrange(m.config.Domain, all), map[string]Certificate{}, false, 0
	m.storeSet(false)
}

// storeSet makes a new Set. Caller holds mu.
func (m *Manager) storeSet(resolved bool) {
	s := NewSet(nil, nil, resolved || !m.predicates.needLog())
	for _, r := range m.predicates.all {
		if r.SPIFFEID != "" && r.Restored == nil {
			s.identities[r.SPIFFEID] = true
		}
		if r.Serial != "" {
			s.serials[r.Serial] = true
		}
	}
	for serial := range m.found {
		s.serials[serial] = true
	}
	if old := m.set.Load(); !s.complete && old != nil { // what was known stays known while the rest is looked for
		maps.Copy(s.serials, old.serials)
		s.complete = old.complete
	}
	m.set.Store(s)
}

const (
	// tick is how often the log is asked for certificates that were being signed while they were revoked.
	tick = time.Second
	// lookEvery is how often CRLs are looked at though nothing changed: entries and issuers end, and CRLs are signed early.
	lookEvery = time.Minute
)

// Run keeps all up to date until ctx ends.
func (m *Manager) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.config.Authority.Changed():
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
		failing = err != nil
		timer.Reset(tick)
	}
}

// Refresh brings everything up to date with document, log and time, and publishes it if it changed. It does little where
// nothing did.
func (m *Manager) Refresh(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.refresh(ctx)
	m.describe(err)
	m.once.Do(func() { close(m.looked) })
	return err
}

func (m *Manager) refresh(ctx context.Context) error {
	doc := m.config.Authority.Document()
	m.look(doc)
	if err := m.resolve(ctx); err != nil {
		return err
	}
	now := time.Now()
	if !m.dirty && now.Before(m.due) {
		return nil
	}
	signers, err := m.config.Authority.CRLSigners(ctx)
	if err != nil {
		return err
	}
	crls, off, err := m.crls(ctx, signers, now)
	if err != nil {
		return err
	}
	bundle, err := doc.Bundle(m.config.Domain)
	if err != nil {
		return err
	}
	if len(off) > 0 && !slices.Equal(off, m.off) {
		m.config.Logger.Warn("there are no CRLs", "reason", off)
	}
	m.off = off
	next := &Lists{Bundle: bundle, CRLs: crls}
	if len(crls) > 0 {
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
	m.dirty, m.due = false, now.Add(lookEvery)
	return nil
}

func (l *Lists) same(o *Lists) bool {
	equal := func(a, b [][]byte) bool {
		return slices.EqualFunc(a, b, func(x, y []byte) bool { return string(x) == string(y) })
	}
	return o != nil && l.Bundle.SameRoots(o.Bundle) && l.Bundle.Generation() == o.Bundle.Generation() && equal(l.CRLs, o.CRLs) && equal(l.Issuers, o.Issuers)
}

// resolve finds the certificates that the predicates mean and that the log has got since. Caller holds mu.
func (m *Manager) resolve(ctx context.Context) error {
	log := m.config.Issuance
	if m.resolved && (!m.predicates.needLog() || log == nil || log.Size() == m.upTo) {
		return nil
	}
	known := len(m.found)
	end, err := m.scan(ctx, m.predicates, m.upTo, func(c Certificate) error {
		m.found[c.Serial] = c
		return nil
	})
	if err != nil {
		return err
	}
	for serial, i := range m.predicates.serials {
		if _, ok := m.found[serial]; !ok && m.predicates.all[i].Until != nil {
			m.found[serial] = Certificate{Serial: serial, Revocation: i, NotAfter: *m.predicates.all[i].Until}
		}
	}
	now := time.Now()
	maps.DeleteFunc(m.found, func(_ string, c Certificate) bool { return now.After(c.NotAfter) })
	if !m.resolved || len(m.found) != known {
		m.dirty = true
		m.storeSet(true)
	}
	m.resolved, m.upTo = true, end
	return nil
}

// describe stores what can be said. Caller holds mu.
func (m *Manager) describe(err error) {
	s := &State{Revocations: m.predicates.all, Counts: make([]uint64, len(m.predicates.all)), Off: m.off, Stale: m.stale, Err: err}
	for _, c := range m.found {
		s.Counts[c.Revocation]++
	}
	for _, l := range m.last {
		if s.Ends.IsZero() || l.ends.Before(s.Ends) {
			s.Ends = l.ends
		}
	}
	for i, l := range m.config.Authority.Document().Logs {
		switch {
		case i == 0: // this server's
		case l.Key == "":
			s.MissingLogs = append(s.MissingLogs, fmt.Sprintf("the replica with log ID %d has no issuance log", l.ID))
		default:
			s.MissingLogs = append(s.MissingLogs, fmt.Sprintf("log %s of another replica cannot be reached from here", l.Key))
		}
	}
	m.state.Store(s)
}

// Result says what a revocation means.
type Result struct {
	Certificates []Certificate // at most 1,000
	Count        uint64
	Revocation   string // its ID; empty after a dry run
	Delayed      error  // what failed after it was stored; it is tried again
}

// maxListed bounds what a Result lists.
const maxListed = 1000

// Revoke stores a revocation and brings it into effect, or with dryRun only says what it means.
func (m *Manager) Revoke(ctx context.Context, r authority.Revocation, dryRun bool) (*Result, error) {
	if err := r.Check(m.config.Domain, r.Time); err != nil {
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
		return result, nil
	}
	switch {
	case r.Serial != "":
		r.Until = &found.ends
	case r.SPIFFEID == "":
		until := r.Time.Add(ca.LeafTTLLimit)
		r.Until = &until
	}
	stored, err := m.config.Authority.Revoke(ctx, r)
	if err != nil {
		return nil, err
	}
	result.Revocation = stored.ID
	m.adopt(stored, found)
	result.Delayed = m.Refresh(ctx)
	return result, nil
}

// preview is what a revocation means at a moment.
type preview struct {
	all  []Certificate
	upTo int64     // index in the log up to which it is complete
	ends time.Time // when the last of them ends
}

// preview finds what a revocation means now.
func (m *Manager) preview(ctx context.Context, r authority.Revocation) (*preview, error) {
	if m.config.Issuance != nil { // what waits in the journal should be found
		if err := m.config.Issuance.Sequence(); err != nil {
			return nil, fmt.Errorf("finding revoked certificates: %w", err)
		}
	}
	m.mu.Lock()
	room := MaxEntries - len(m.found)
	m.mu.Unlock()
	out := new(preview)
	var err error
	out.upTo, err = m.scan(ctx, arrange(m.config.Domain, []authority.Revocation{r}), 0, func(c Certificate) error {
		switch {
		case c.SPIFFEID == m.config.Domain.URI():
			return fmt.Errorf("serial %s is that of a signing certificate; what hangs on it cannot be revoked one by one: make a new issuer", c.Serial)
		case len(out.all) >= room:
			return fmt.Errorf("more than %d certificates would go onto the CRLs, which have %d; at most %d fit. Narrow it by --node or an earlier time",
				room, MaxEntries-room, MaxEntries)
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

// adopt takes over what was found before a revocation was stored, so that the log is not read twice, if nothing else has
// changed since. Else Refresh finds it again.
func (m *Manager) adopt(stored authority.Revocation, p *preview) {
	m.mu.Lock()
	defer m.mu.Unlock()
	doc := m.config.Authority.Document()
	all := doc.Revocations(m.config.Domain)
	last := len(all) - 1
	if !m.resolved || last < 0 || all[last].ID != stored.ID {
		return
	}
	before, err := json.Marshal(all[:last])
	if err != nil || !bytes.Equal(before, m.raw) && last > 0 || last == 0 && len(m.predicates.all) > 0 {
		return
	}
	if m.predicates.needLog() {
		p.upTo = min(p.upTo, m.upTo)
	}
	found := m.found
	m.look(doc)
	for _, c := range p.all {
		c.Revocation = last
		if _, known := found[c.Serial]; !known {
			found[c.Serial] = c
		}
	}
	m.found, m.resolved, m.upTo = found, true, p.upTo
	if stored.Serial != "" && len(p.all) == 0 {
		m.found[stored.Serial] = Certificate{Serial: stored.Serial, Revocation: last, NotAfter: p.ends}
	}
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
