package staged

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/rotate/stages"
	"github.com/chancery-project/chancery/trust"
)

// This file says how a rotation stands: to admins, in the log, and in numbers.

// Status is how rotations stand, as far as this server knows.
type Status struct {
	Rotation *document.Rotation // under way; nil: none is. Callers must not change it
	Gates    []stages.Gate      // of its phase
	Phases   []PlannedPhase     // as one would be planned now; nil if that cannot be told
	Past     []document.PastRotation
	Former   []Use        // of a migration: what still has to do with the trust domain that is left
	Trouble  string       // why this server, if it drives, could not go on when it last tried
	Version  uint64       // of the document
	Domain   trust.Domain // the present one
}

// Status returns how rotations stand.
func (m *Manager) Status() Status {
	doc, now := m.config.Authority.Document(), time.Now()
	out := Status{Version: doc.Version, Domain: doc.Present(m.config.Domain)}
	if state := doc.Of(m.config.Domain); state != nil {
		out.Rotation, out.Past = state.Rotation, state.Past
	}
	if out.Rotation != nil {
		out.Gates = stages.Gates(doc, m.config.Domain, m.known(out.Rotation, now), now)
		if out.Rotation.Migration != nil {
			out.Former = m.former(doc, now)
		}
		if p, err := m.outline(doc, askedFor(out.Rotation), now); err == nil { // estimates; without them the rest is still worth saying
			out.Phases = p.Phases
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	out.Trouble = m.trouble
	return out
}

// known is the evidence as one looks at it who changes nothing.
func (m *Manager) known(r *document.Rotation, now time.Time) stages.Evidence {
	e := m.evidence()
	if r.Reason == document.ReasonFiles {
		e.Files = m.rootsInFiles(r, now)
	}
	return e
}

// watched is what Run has seen, so that each thing is told once.
type watched struct {
	id     string
	phase  document.Phase
	paused bool
	back   bool
	gates  map[string]bool      // that have passed
	passed map[string]time.Time // when that was told last
	since  time.Time            // when a warning is due counts from here
	ended  map[string]bool      // IDs of rotations that have ended
	hinted string
	hintAt time.Time
}

// begin takes what has ended by now for told.
func (w *watched) begin(doc *document.Document, td trust.Domain) {
	w.ended = map[string]bool{}
	if state := doc.Of(td); state != nil {
		for _, p := range state.Past {
			w.ended[p.ID] = true
		}
	}
}

// observe tells what has become of rotations since the last look. Each server does, whoever drives.
func (m *Manager) observe(doc *document.Document, now time.Time) {
	state := doc.Of(m.config.Domain)
	if state == nil {
		return
	}
	log, w := m.config.Logger, &m.seen
	over := map[string]bool{}
	for _, p := range slices.Backward(state.Past) {
		over[p.ID] = true
		if !w.ended[p.ID] {
			m.ended.WithLabelValues(string(p.Kind), p.Outcome).Inc()
			log.Info("rotation ended", "rotation", p.ID, "kind", string(p.Kind), "outcome", p.Outcome, "took", p.Ended.Sub(p.Started).Truncate(time.Second).String())
		}
	}
	w.ended = over
	r := state.Rotation
	if r == nil {
		w.id = ""
		return
	}
	if r.ID != w.id || r.Phase != w.phase || r.Back != w.back {
		w.id, w.phase, w.back, w.gates, w.passed, w.since = r.ID, r.Phase, r.Back, map[string]bool{}, map[string]time.Time{}, now
		log.Info("rotation has a new phase", "rotation", r.ID, "kind", string(r.Kind), "reason", string(r.Reason), "phase", string(r.Phase), "back", r.Back,
			"from", cmpOr(r.FromRoot, r.FromIssuer), "to", cmpOr(r.ToRoot, r.ToIssuer), "generation", state.Generation)
	}
	if paused := r.Paused != nil; paused != w.paused {
		w.paused = paused
		log.Info("rotation is paused, or goes on", "rotation", r.ID, "paused", paused, "by", r.PausedBy)
	}
}

// cmpOr is the root of a rotation, or, without one, the issuer.
func cmpOr(root, issuer string) string {
	if root != "" {
		return root
	}
	return issuer
}

// noteGates tells which gates have passed since the last look: one that passes again and again, as consumers come and go, now and then. It
// is for the driver.
func (m *Manager) noteGates(gates []stages.Gate, r *document.Rotation, now time.Time) {
	w := &m.seen
	if w.id != r.ID || w.phase != r.Phase {
		return
	}
	for _, g := range gates {
		if last, told := w.passed[g.Name]; g.Passed && !w.gates[g.Name] && (!told || now.Sub(last) >= warnEvery) {
			w.passed[g.Name] = now
			m.config.Logger.Info("gate of a rotation passed", "rotation", r.ID, "phase", string(r.Phase), "gate", g.Name, "overridden", g.Overridden, "have", g.Have, "want", g.Want)
		}
		w.gates[g.Name] = g.Passed
	}
}

// warnEvery is how often it is said whom a rotation waits for.
const warnEvery = time.Hour

// warn says whom a rotation waits for that has been in one phase for long. It is for the driver.
func (m *Manager) warn(doc *document.Document, now time.Time) {
	r, w := doc.Rotating(m.config.Domain), &m.seen
	if r == nil || now.Sub(w.since) < warnEvery {
		return
	}
	w.since = now
	if r.Paused != nil {
		m.config.Logger.Warn("a rotation is paused", "rotation", r.ID, "phase", string(r.Phase), "by", r.PausedBy, "since", r.Paused.UTC())
		return
	}
	var waits []string
	for _, g := range stages.Gates(doc, m.config.Domain, m.known(r, now), now) {
		if !g.Passed {
			waits = append(waits, fmt.Sprintf("%s: %s", g.Name, strings.Join(g.Waiting, "; ")))
		}
	}
	m.config.Logger.Warn("a rotation waits", "rotation", r.ID, "phase", string(r.Phase), "since", r.Since.UTC(), "waits_for", waits)
}

// hint says now and then what plugged-in files should have.
func (m *Manager) hint(text string) {
	w, now := &m.seen, time.Now()
	if text == "" || text == w.hinted && now.Sub(w.hintAt) < warnEvery {
		return
	}
	w.hinted, w.hintAt = text, now
	m.config.Logger.Warn("the issuer files are used, and should be changed", "reason", text)
}

// collector gives the state of a rotation in numbers. It waits for nothing but memory.
type collector struct{ m *Manager }

var (
	phaseDesc = prometheus.NewDesc("chancery_ca_rotation_phase", "1 for the phase of the rotation that is under way; absent if none is.", []string{"kind", "reason", "phase"}, nil)
	sinceDesc = prometheus.NewDesc("chancery_ca_rotation_phase_seconds", "How long the rotation has been in its phase; absent if none is under way.", nil, nil)
	gateDesc  = prometheus.NewDesc("chancery_ca_rotation_gate_passed", "1 if a gate of the rotation's phase has passed, else 0.", []string{"gate"}, nil)
	waitDesc  = prometheus.NewDesc("chancery_ca_rotation_gate_missing", "How many a gate waits for, where it counts some.", []string{"gate"}, nil)
	pauseDesc = prometheus.NewDesc("chancery_ca_rotation_paused", "1 if the rotation is paused, else 0; absent if none is under way.", nil, nil)
	stuckDesc = prometheus.NewDesc("chancery_ca_rotation_failing", "1 if this server drives rotations and could not go on when it last tried, else 0.", nil, nil)
)

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{phaseDesc, sinceDesc, gateDesc, waitDesc, pauseDesc, stuckDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	truth := map[bool]float64{true: 1}
	s := c.m.Status()
	send(stuckDesc, truth[s.Trouble != ""])
	r := s.Rotation
	if r == nil {
		return
	}
	send(phaseDesc, 1, string(r.Kind), string(r.Reason), string(r.Phase))
	send(sinceDesc, time.Since(r.Since).Seconds())
	send(pauseDesc, truth[r.Paused != nil])
	for _, g := range s.Gates {
		send(gateDesc, truth[g.Passed], g.Name)
		if g.Want > 0 {
			send(waitDesc, float64(g.Want-min(g.Have, g.Want)), g.Name)
		}
	}
}
