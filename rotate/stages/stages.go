package stages

import (
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// Evidence is what is known beside the document.
type Evidence struct {
	// Notes of all replicas, the own one included, the newest known of each, also of those that were declared dead.
	Notes []board.Note
	// Floor is how long those need who read roots and cannot acknowledge them (decision D3); 0: there are none.
	Floor time.Duration
	// Unpublished says what they read and does not have the roots of the document yet, as far as the driver knows: the floor counts from when
	// nothing is.
	Unpublished []string
	// LeafTTL is the longest life of a leaf in any profile.
	LeafTTL time.Duration
	// Files are the IDs of the roots in plugged-in files, where a rotation comes from those.
	Files []string
}

// Action is something to do beside the change of the document.
type Action struct {
	Make  *Make  // nil: nothing is to be made
	Event string // for the log and the audit log; empty: nothing to tell
}

// Make asks for the successor's keys and certificates. They enter the document prepared, in one change.
type Make struct {
	Root  bool   // a root, and an issuer under it
	Under string // else an issuer under this root
}

const (
	// skew is how far clocks may differ.
	skew = 5 * time.Second
	// settled is how long after a replica was declared dead it may have taken itself for alive, and its last note may be on its way.
	settled = 30 * time.Second
	// maxWindow bounds window.
	maxWindow = time.Hour
)

// window is how long a leaf may live from now on that a replica signs without knowing how the rotation stands (decision D4).
func window(leafTTL time.Duration) time.Duration {
	if leafTTL <= 0 {
		return maxWindow
	}
	return min(leafTTL, maxWindow)
}

// Next returns the document in which the rotation of a trust domain has gone on, by one step at most, and what is to be done beside. It
// returns d itself if nothing changes, and never changes d. The version of d is the one under which the result is to be stored.
//
// Whatever it decides can be lost: it decides the same again. Evidence may be old, since what a note vouches for stays true.
func Next(d *document.Document, td trust.Domain, e Evidence, now time.Time) (*document.Document, []Action) {
	v := look(d, td, e, now)
	if v == nil {
		return d, nil
	}
	next := d.Clone()
	s := next.Of(td)
	changed := v.mindTime(s)
	if v.r.Paused != nil {
		return pick(changed, next, d), nil
	}
	if v.r.Phase == document.PhasePrepare && v.r.Reason != document.ReasonFiles && v.lacksSuccessor() {
		m := Make{Root: v.r.Kind == document.KindRoot}
		if root := v.active(document.KindRoot); !m.Root && root != nil {
			m.Under = root.ID
		}
		return pick(changed, next, d), []Action{{Make: &m}}
	}
	if v.follow(s) {
		return next, nil // its gates begin anew
	}
	var events []Action
	gates := v.gates()
	if over := v.endsSoon(gates); over != nil {
		s.Rotation.Overrides = append(s.Rotation.Overrides, over...)
		events = append(events, v.event("the issuer in use ends soon: its successor signs without the evidence that everybody has its CRL"))
		changed = true
		for i := range gates {
			gates[i].Passed = gates[i].Passed || Risk(v.r.Phase, gates[i].Name) != ""
		}
	}
	if passed(gates) {
		events = append(events, v.step(next, s))
		return next, events
	}
	return pick(v.noteSpread(s, gates) || changed, next, d), events
}

func pick(changed bool, next, d *document.Document) *document.Document {
	if changed {
		return next
	}
	return d
}

func passed(gates []Gate) bool {
	for _, g := range gates {
		if !g.Passed {
			return false
		}
	}
	return true
}

// view is a rotation under way, and what is known of it.
type view struct {
	key  trust.Domain // of the line
	d    *document.Document
	s    *document.DomainState
	r    *document.Rotation
	e    Evidence
	goal document.Goal
	now  time.Time
}

// look returns nil while there is no rotation.
func look(d *document.Document, td trust.Domain, e Evidence, now time.Time) *view {
	s := d.Of(td)
	if s == nil || s.Rotation == nil {
		return nil
	}
	key, _ := d.Line(td)
	return &view{key, d, s, s.Rotation, e, s.Goal(), now}
}

func (v *view) event(format string, args ...any) Action {
	return Action{Event: fmt.Sprintf("%s: ", name(v.r)) + fmt.Sprintf(format, args...)}
}

// mindTime moves the earliest time at which the predecessor's root may leave ahead, while the predecessor signs. Once half of the
// window is left, so that the document changes seldom and a replica that is cut off can sign leaves of a useful life.
func (v *view) mindTime(s *document.DomainState) bool {
	w := window(v.e.LeafTTL)
	early := v.r.Phase == document.PhasePrepare || v.r.Phase == document.PhaseDistribute || v.r.Phase == document.PhaseIssue
	if v.r.Kind != document.KindRoot || !early || v.r.NotBefore.Sub(v.now) >= w/2 {
		return false
	}
	s.Rotation.NotBefore = v.now.Add(w).UTC()
	return true
}

// noteSpread notes when each replica has the phase's document. Until then readers may have been given the roots of before.
func (v *view) noteSpread(s *document.DomainState, gates []Gate) bool {
	if v.r.Phase != document.PhaseDistribute || v.e.Floor <= 0 || !v.r.Spread.IsZero() || len(v.e.Unpublished) > 0 {
		return false
	}
	for _, g := range gates {
		if g.Name == GateReplicas && g.Passed {
			s.Rotation.Spread = v.now.UTC()
			return true
		}
	}
	return false
}

// follow is for what enters the bundle while it is distributed already: the issuer that plugged-in files bring after their root.
func (v *view) follow(s *document.DomainState) bool {
	if v.r.Phase != document.PhaseDistribute || s.Generation == v.r.Generation {
		return false
	}
	s.Rotation.Generation, s.Rotation.Version, s.Rotation.Spread = s.Generation, v.d.Version, time.Time{}
	return true
}

// endsSoon overrides the gates of an issuer's rotation whose predecessor is about to end: to sign nothing at all is worse than leaves
// which some do not take before they have the CRL.
func (v *view) endsSoon(gates []Gate) (over []document.Override) {
	from := v.s.Get(document.KindIssuer, v.r.FromIssuer)
	if v.r.Kind != document.KindIssuer || v.r.Phase != document.PhaseDistribute || from == nil || v.lacksSuccessor() {
		return nil
	}
	begin, life, err := from.Life()
	end := begin.Add(life)
	if err != nil || end.Sub(v.now) >= min(v.e.LeafTTL, life/6) {
		return nil
	}
	for _, g := range gates {
		if !g.Passed && Risk(v.r.Phase, g.Name) != "" {
			over = append(over, document.Override{Gate: g.Name, Phase: v.r.Phase, Because: "the issuer in use ends at " + end.UTC().Format(time.RFC3339), Actor: "policy", Time: v.stamp()})
		}
	}
	return over
}

// stamp is the time of an override, never before the phase began, whatever clock says so.
func (v *view) stamp() time.Time {
	if v.now.Before(v.r.Since) {
		return v.r.Since
	}
	return v.now.UTC()
}

// step goes to the next phase: next is the document to be stored, s its part of the trust domain.
func (v *view) step(next *document.Document, s *document.DomainState) Action {
	r := s.Rotation
	switch r.Phase {
	case document.PhasePrepare:
		v.begin(r, document.PhaseDistribute)
		r.Generation = s.Generation
		return v.event("the successor is prepared, and distributed with generation %d", s.Generation)
	case document.PhaseDistribute:
		if m := r.Migration; m != nil {
			v.begin(r, document.PhaseIssue)
			return v.event("everybody trusts both domains: issuer %s signs for %s of %s from now on", r.ToIssuer, shareOf(m), m.To)
		}
		return v.activate(s)
	case document.PhaseIssue:
		return v.activate(s)
	case document.PhaseActivate:
		v.begin(r, document.PhaseReissue)
		return v.event("each server signs with issuer %s; certificates of the issuer before are replaced", r.ToIssuer)
	case document.PhaseReissue:
		if r.Kind == document.KindIssuer {
			return v.end(s)
		}
		s.DropRoot(r.FromRoot)
		if m := r.Migration; m != nil && !r.Back {
			if to, err := trust.ParseDomain(m.To); err == nil { // it was checked when it came
				s.Become(v.key, to)
			}
		}
		v.begin(r, document.PhaseRetire)
		r.Generation = s.Generation
		return v.event("nobody presents a certificate under root %s any more: it leaves the bundle, with generation %d", r.FromRoot, s.Generation)
	}
	return v.end(s)
}

// activate has the successor sign, and nobody else.
func (v *view) activate(s *document.DomainState) Action {
	r := s.Rotation
	if r.Kind == document.KindRoot {
		s.Activate(document.KindRoot, r.ToRoot, v.now)
	}
	s.Activate(document.KindIssuer, r.ToIssuer, v.now)
	v.begin(r, document.PhaseActivate)
	return v.event("everybody has the successor: issuer %s signs from now on", r.ToIssuer)
}

// begin begins a phase with the document that is made.
func (v *view) begin(r *document.Rotation, p document.Phase) {
	r.Phase, r.Version, r.Since, r.Generation, r.Spread = p, v.d.Version, v.now.UTC(), 0, time.Time{}
	for _, o := range r.Overrides {
		if !o.Time.Before(r.Since) { // by a clock that is ahead: it was for the phase before
			r.Since = o.Time.Add(time.Nanosecond)
		}
	}
}

func (v *view) end(s *document.DomainState) Action {
	outcome := OutcomeDone
	if v.r.Back {
		outcome = OutcomeRolledBack
	}
	s.EndRotation(outcome, v.now)
	return v.event("%s", outcome)
}

// How rotations end.
const (
	OutcomeDone       = "done"
	OutcomeAborted    = "aborted"
	OutcomeRolledBack = "rolled back"
)
