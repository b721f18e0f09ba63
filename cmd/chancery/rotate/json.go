package rotate

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// The shape of -o json. It is stable: fields are added, never changed. docs/rotation.md has them all.

// statusJSON is `chancery rotate status -o json`, and what the commands that change something print.
type statusJSON struct {
	TrustDomain string         `json:"trustDomain"`
	Time        time.Time      `json:"time"`
	Version     uint64         `json:"version"`
	Rotation    *rotationJSON  `json:"rotation,omitempty"`
	Past        []rotationJSON `json:"past"`
	Former      []useJSON      `json:"former,omitempty"`
}

// useJSON is something that has to do with the trust domain which a migration leaves.
type useJSON struct {
	Kind   string `json:"kind"`
	Who    string `json:"who"`
	Detail string `json:"detail"`
	Count  uint64 `json:"count,omitempty"`
}

// rotationJSON is a rotation.
type rotationJSON struct {
	ID            string         `json:"id"`
	Kind          string         `json:"kind"`
	Reason        string         `json:"reason"`
	Actor         string         `json:"actor"`
	FromRoot      string         `json:"fromRoot,omitempty"`
	FromIssuer    string         `json:"fromIssuer,omitempty"`
	ToRoot        string         `json:"toRoot,omitempty"`
	ToIssuer      string         `json:"toIssuer,omitempty"`
	FromDomain    string         `json:"fromDomain,omitempty"`
	ToDomain      string         `json:"toDomain,omitempty"`
	Share         *uint32        `json:"share,omitempty"`
	Namespaces    []string       `json:"namespaces,omitempty"`
	Started       time.Time      `json:"started"`
	Phase         string         `json:"phase"`
	Since         time.Time      `json:"phaseSince"`
	PhaseEstimate *float64       `json:"phaseEstimateSeconds,omitempty"`
	Latest        *time.Time     `json:"latestEnd,omitempty"`
	Paused        *time.Time     `json:"paused,omitempty"`
	PausedBy      string         `json:"pausedBy,omitempty"`
	Back          bool           `json:"rolledBack"`
	Gates         []gateJSON     `json:"gates"`
	Overrides     []overrideJSON `json:"overrides"`
	Trouble       string         `json:"trouble,omitempty"`
	Ended         *time.Time     `json:"ended,omitempty"`
	Outcome       string         `json:"outcome,omitempty"`
}

// gateJSON is a gate of the phase.
type gateJSON struct {
	Name       string     `json:"name"`
	Passed     bool       `json:"passed"`
	Overridden bool       `json:"overridden"`
	Have       uint64     `json:"have"`
	Want       uint64     `json:"want"`
	Waiting    []string   `json:"waiting"`
	Until      *time.Time `json:"until,omitempty"`
}

// overrideJSON is an override.
type overrideJSON struct {
	Gate    string    `json:"gate"`
	Phase   string    `json:"phase"`
	Because string    `json:"because"`
	Actor   string    `json:"actor"`
	Time    time.Time `json:"time"`
}

// planJSON is `chancery rotate plan -o json`.
type planJSON struct {
	Kind       string      `json:"kind"`
	Reason     string      `json:"reason"`
	ToDomain   string      `json:"toDomain,omitempty"`
	FromRoot   string      `json:"fromRoot,omitempty"`
	FromIssuer string      `json:"fromIssuer,omitempty"`
	Phases     []phaseJSON `json:"phases"`
	Least      float64     `json:"leastSeconds"`
	Most       float64     `json:"mostSeconds"`
	Notes      []string    `json:"notes"`
}

// phaseJSON is a phase of a plan.
type phaseJSON struct {
	Phase    string   `json:"phase"`
	Does     string   `json:"does"`
	WaitsFor []string `json:"waitsFor"`
	Least    float64  `json:"leastSeconds"`
	Most     float64  `json:"mostSeconds"`
}

func statusOf(r *chanceryv1.RotationStatus) statusJSON {
	s := statusJSON{TrustDomain: r.GetTrustDomain(), Time: r.GetTime().AsTime(), Version: r.GetVersion(), Past: []rotationJSON{}}
	if x := r.GetRotation(); x != nil {
		one := rotationOf(x)
		s.Rotation = &one
	}
	for _, x := range r.GetPast() {
		s.Past = append(s.Past, rotationOf(x))
	}
	for _, u := range r.GetFormer() {
		s.Former = append(s.Former, useJSON{u.GetKind(), u.GetWho(), u.GetDetail(), u.GetCount()})
	}
	return s
}

func rotationOf(x *chanceryv1.Rotation) rotationJSON {
	r := rotationJSON{
		ID: x.GetId(), Kind: x.GetKind(), Reason: x.GetReason(), Actor: x.GetActor(), FromRoot: x.GetFromRoot(), FromIssuer: x.GetFromIssuer(), ToRoot: x.GetToRoot(), ToIssuer: x.GetToIssuer(),
		Started: x.GetStarted().AsTime(), Phase: x.GetPhase(), Since: x.GetSince().AsTime(), Latest: timeOf(x.GetLatest()), Paused: timeOf(x.GetPaused()), PausedBy: x.GetPausedBy(), Back: x.GetBack(),
		Gates: []gateJSON{}, Overrides: []overrideJSON{}, Trouble: x.GetTrouble(), Ended: timeOf(x.GetEnded()), Outcome: x.GetOutcome(),
	}
	if x.GetToDomain() != "" {
		r.FromDomain, r.ToDomain, r.Share, r.Namespaces = x.GetFromDomain(), x.GetToDomain(), new(x.GetShare()), x.GetNamespaces()
	}
	if d := x.GetPhaseEstimate(); d != nil {
		r.PhaseEstimate = new(d.AsDuration().Seconds())
	}
	for _, g := range x.GetGates() {
		r.Gates = append(r.Gates, gateJSON{g.GetName(), g.GetPassed(), g.GetOverridden(), g.GetHave(), g.GetWant(), orEmpty(g.GetWaiting()), timeOf(g.GetUntil())})
	}
	for _, o := range x.GetOverrides() {
		r.Overrides = append(r.Overrides, overrideJSON{o.GetGate(), o.GetPhase(), o.GetBecause(), o.GetActor(), o.GetTime().AsTime()})
	}
	return r
}

func planOf(q *chanceryv1.StartRotationRequest, r *chanceryv1.PlanRotationResponse) planJSON {
	p := planJSON{Kind: q.GetKind(), Reason: q.GetReason(), ToDomain: q.GetToDomain(), FromRoot: r.GetFromRoot(), FromIssuer: r.GetFromIssuer(), Phases: []phaseJSON{}, Notes: orEmpty(r.GetNotes())}
	if p.Reason == "" {
		p.Reason = "asked"
	}
	if p.FromRoot != "" { // a compromised issuer takes its root along
		p.Kind = "root"
	}
	for _, x := range r.GetPhases() {
		one := phaseJSON{x.GetPhase(), x.GetDoes(), orEmpty(x.GetWaitsFor()), secondsOf(x.GetLeast()), secondsOf(x.GetMost())}
		p.Phases = append(p.Phases, one)
		p.Least, p.Most = p.Least+one.Least, p.Most+one.Most
	}
	return p
}

func secondsOf(d *durationpb.Duration) float64 { return d.AsDuration().Seconds() }

func timeOf(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	return new(t.AsTime())
}

func orEmpty(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}
