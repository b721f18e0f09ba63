package checkup

import (
	"math"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/document"
)

// Rotation is one of root or issuer that is under way.
type Rotation struct {
	ID            string     `json:"id"`
	Kind          string     `json:"kind"` // "root" or "issuer"
	Reason        string     `json:"reason"`
	FromDomain    string     `json:"fromDomain,omitempty"` // of a migration
	ToDomain      string     `json:"toDomain,omitempty"`
	Started       time.Time  `json:"started"`
	Phase         string     `json:"phase"`
	Since         time.Time  `json:"phaseSince"`
	PhaseEstimate *float64   `json:"phaseEstimateSeconds,omitempty"` // at most; absent where it is not known
	Latest        *time.Time `json:"latestEnd,omitempty"`
	Paused        *time.Time `json:"paused,omitempty"`
	PausedBy      string     `json:"pausedBy,omitempty"`
	Back          bool       `json:"rolledBack"`
	Trouble       string     `json:"trouble,omitempty"` // why its driver could not go on
	Gates         []Gate     `json:"gates"`             // of the phase; empty where no server said
	Overrides     []Override `json:"overrides"`
}

// Gate is what the phase of a rotation waits for.
type Gate struct {
	Name       string   `json:"name"`
	Passed     bool     `json:"passed"`
	Overridden bool     `json:"overridden"`
	Have       uint64   `json:"have"` // of Want are there; both 0 for one that counts nothing
	Want       uint64   `json:"want"`
	Waiting    []string `json:"waiting"` // some of those who are missing, and why
}

// Override is somebody's word that a gate passes without its evidence.
type Override struct {
	Gate    string    `json:"gate"`
	Phase   string    `json:"phase"`
	Because string    `json:"because"`
	Actor   string    `json:"actor"`
	Time    time.Time `json:"time"`
}

// RotationOf describes the rotation that a document has, without its gates; nil for none.
func RotationOf(d *document.DomainState) *Rotation {
	if d == nil || d.Rotation == nil {
		return nil
	}
	r := d.Rotation
	out := &Rotation{
		ID: r.ID, Kind: string(r.Kind), Reason: string(r.Reason), Started: r.Started, Phase: string(r.Phase), Since: r.Since, Paused: r.Paused, PausedBy: r.PausedBy, Back: r.Back,
		Gates: []Gate{}, Overrides: []Override{},
	}
	if m := r.Migration; m != nil {
		out.FromDomain, out.ToDomain = m.From, m.To
	}
	for _, o := range r.Overrides {
		out.Overrides = append(out.Overrides, Override{o.Gate, string(o.Phase), o.Because, o.Actor, o.Time})
	}
	return out
}

// The thresholds of rotations.
const (
	lateFactor    = 2                // how many times its estimate a phase may take,
	lateLeast     = 10 * time.Minute // and at least
	lateUnknown   = 24 * time.Hour   // where there is no estimate
	troubleAfter  = 2 * time.Minute  // what fails for a moment is tried again each second
	longPause     = 24 * time.Hour
	longPauseLost = time.Hour // of one whose key others may know
)

// judgeRotation looks at a rotation that does not get on, and at what an admin took upon himself.
func (s *State) judgeRotation() (all []Finding) {
	r := s.Rotation
	if r == nil {
		return nil
	}
	subject := r.Name()
	most := longPause
	if r.Reason == string(document.ReasonCompromised) {
		most = longPauseLost
	}
	since := s.Time.Sub(r.Since)
	switch {
	case r.Paused != nil && s.Time.Sub(*r.Paused) > most:
		all = append(all, Found("rotation.paused", Warning, subject, "has been paused for %s, by %s, in phase %s", Span(s.Time.Sub(*r.Paused)), r.PausedBy, r.Phase))
	case r.Paused == nil && since > r.patience():
		all = append(all, Found("rotation.waiting", Warning, subject, "has been in phase %s for %s%s", r.Phase, Span(since), r.waitsFor()))
	}
	if r.Trouble != "" && since > troubleAfter {
		all = append(all, Found("rotation.failing", Warning, subject, "does not get on in phase %s: %s", r.Phase, r.Trouble))
	}
	for _, o := range r.Overrides {
		all = append(all, Found("rotation.overridden", Warning, subject, "passed gate %s of phase %s without its evidence, by %s at %s: %s", o.Gate, o.Phase, o.Actor, stamp(o.Time), o.Because))
	}
	return all
}

// Name says what is under way.
func (r *Rotation) Name() string {
	from, to := r.FromDomain, r.ToDomain
	if r.Back { // it leads back, and keeps its name
		from, to = to, from
	}
	if to != "" {
		return "migration " + r.ID + " from " + from + " to " + to
	}
	return "rotation " + r.ID + " of the " + r.Kind
}

// patience is how long a phase may last without a word.
func (r *Rotation) patience() time.Duration {
	if r.Phase == string(document.PhaseIssue) { // of a migration: as long as an admin wants
		return math.MaxInt64
	}
	if r.PhaseEstimate == nil {
		return lateUnknown
	}
	return max(lateLeast, time.Duration(lateFactor**r.PhaseEstimate*float64(time.Second)))
}

// waitsFor names the gates that have not passed.
func (r *Rotation) waitsFor() string {
	var words []string
	for _, g := range r.Gates {
		if g.Passed {
			continue
		}
		one := g.Name
		if len(g.Waiting) > 0 {
			one += " (" + strings.Join(g.Waiting, "; ") + ")"
		}
		words = append(words, one)
	}
	if len(words) == 0 {
		return ""
	}
	return ", and waits for " + strings.Join(words, ", ")
}
