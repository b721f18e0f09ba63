package rotating

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/rotate/staged"
	"github.com/chancery-project/chancery/rotate/stages"
)

// Manager carries rotations out; *staged.Manager is one.
type Manager interface {
	Plan(staged.Asked) (staged.Plan, error)
	Start(ctx context.Context, actor string, q staged.Asked) error
	Change(ctx context.Context, actor string, c staged.Change) error
	Status() staged.Status
}

// DeskConfig is what a Desk is made of.
type DeskConfig struct {
	Manager Manager
	ActorOf func(context.Context) (string, error) // who calls, or a refusal
	Note    func(actor, detail string)            // notes in the audit log who has read what; not for each call
}

// Desk answers.
type Desk struct{ config DeskConfig }

// Open makes a desk.
func Open(c DeskConfig) *Desk { return &Desk{c} }

// PlanRotation implements chancery.v1.Admin. It changes nothing.
func (d *Desk) PlanRotation(ctx context.Context, q *chanceryv1.StartRotationRequest) (*chanceryv1.PlanRotationResponse, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	what, err := asked(q)
	if err != nil {
		return nil, err
	}
	note := "rotate plan"
	if what.Migrate != nil {
		note = "trust migrate plan"
	}
	d.config.Note(actor, note)
	plan, err := d.config.Manager.Plan(what)
	if err != nil {
		return nil, refusal(err)
	}
	resp := &chanceryv1.PlanRotationResponse{FromRoot: plan.FromRoot, FromIssuer: plan.FromIssuer, Notes: plan.Notes}
	for _, p := range plan.Phases {
		resp.Phases = append(resp.Phases, &chanceryv1.PlannedPhase{
			Phase: string(p.Phase), Does: p.Does, WaitsFor: p.WaitsFor, Least: durationpb.New(p.Least), Most: durationpb.New(p.Most),
		})
	}
	return resp, nil
}

// StartRotation implements chancery.v1.Admin. Who asked goes into the audit log first, which is the manager's to do, as for changes.
func (d *Desk) StartRotation(ctx context.Context, q *chanceryv1.StartRotationRequest) (*chanceryv1.RotationStatus, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	what, err := asked(q)
	if err != nil {
		return nil, err
	}
	if err := d.config.Manager.Start(ctx, actor, what); err != nil {
		return nil, refusal(err)
	}
	return d.Describe(), nil
}

// GetRotation implements chancery.v1.Admin.
func (d *Desk) GetRotation(ctx context.Context, _ *chanceryv1.GetRotationRequest) (*chanceryv1.RotationStatus, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	d.config.Note(actor, "rotate status")
	return d.Describe(), nil
}

// ChangeRotation implements chancery.v1.Admin.
func (d *Desk) ChangeRotation(ctx context.Context, q *chanceryv1.ChangeRotationRequest) (*chanceryv1.RotationStatus, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := d.check(q); err != nil {
		return nil, err
	}
	c := staged.Change{What: q.GetChange(), Gate: q.GetGate(), Because: q.GetBecause(), Rotation: q.GetRotation(), Namespaces: q.GetNamespaces()}
	if q.Share != nil {
		c.Share = new(int(min(q.GetShare(), stages.All+1))) // what is too much is refused with the rest
	}
	if err := d.config.Manager.Change(ctx, actor, c); err != nil {
		return nil, refusal(err)
	}
	return d.Describe(), nil
}

// asked reads what a request is about.
func asked(q *chanceryv1.StartRotationRequest) (what staged.Asked, err error) {
	what = staged.Asked{Kind: document.AuthorityKind(q.GetKind()), Reason: document.ReasonAsked}
	if what.Kind != document.KindRoot && what.Kind != document.KindIssuer {
		return what, status.Errorf(codes.InvalidArgument, "%.40q cannot be rotated; it should be root or issuer", q.GetKind())
	}
	switch q.GetReason() {
	case "":
	case Compromised:
		what.Reason = document.ReasonCompromised
	default:
		return what, status.Errorf(codes.InvalidArgument, "reason %.40q is not known; it should be empty or %s", q.GetReason(), Compromised)
	}
	what.Migrate, err = target(q)
	return what, err
}

// refusal passes on why something was not done.
func refusal(err error) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.Unavailable, "it was not done in time, and whether it will be is not known: look with `chancery rotate status`: "+err.Error())
	case errors.Is(err, context.Canceled):
		return status.FromContextError(err).Err()
	}
	return status.Error(codes.FailedPrecondition, err.Error())
}

// Changes are what ChangeRotation knows.
var Changes = []string{"pause", "resume", "abort", "rollback", "override", "issue"}

// check looks whether there is what a change names. The manager looks again, at the document that it changes.
func (d *Desk) check(q *chanceryv1.ChangeRotationRequest) error {
	if !slices.Contains(Changes, q.GetChange()) {
		return status.Errorf(codes.InvalidArgument, "change %.40q is not known; it should be one of %s", q.GetChange(), strings.Join(Changes, ", "))
	}
	s := d.config.Manager.Status()
	if s.Rotation == nil {
		return status.Errorf(codes.FailedPrecondition, "no rotation is under way, nor a migration, so there is nothing to %s; `chancery rotate status` shows how the last ones ended", q.GetChange())
	}
	if id := q.GetRotation(); id != "" && id != s.Rotation.ID {
		return status.Errorf(codes.FailedPrecondition, "rotation %.40q is not under way; %s of the %s is, in phase %s", id, s.Rotation.ID, s.Rotation.Kind, s.Rotation.Phase)
	}
	if q.GetChange() != "override" {
		return nil
	}
	if err := CheckBecause(q.GetBecause()); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	return checkGate(&s, q.GetGate())
}

// CheckBecause checks the reason of an override: it stays in the document and in logs.
func CheckBecause(text string) error {
	switch {
	case strings.TrimSpace(text) == "":
		return errors.New("why? An override needs a reason, which goes into the audit log: --because TEXT")
	case len(text) > MaxBecause || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }):
		return fmt.Errorf("the reason of an override (--because) should be one line of at most %d bytes that can be printed", MaxBecause)
	}
	return nil
}

// checkGate refuses a gate that the phase does not have, or that cannot be overridden.
func checkGate(s *staged.Status, gate string) error {
	var open, known []string
	for _, g := range s.Gates {
		if stages.Risk(s.Rotation.Phase, g.Name) == "" {
			if g.Name == gate {
				return status.Errorf(codes.FailedPrecondition, "gate %s of phase %s cannot be overridden: %s", gate, s.Rotation.Phase, strings.Join(g.Waiting, "; "))
			}
			continue
		}
		known = append(known, g.Name)
		if !g.Passed {
			open = append(open, g.Name)
		}
		if g.Name == gate {
			return nil
		}
	}
	switch {
	case len(known) == 0:
		return status.Errorf(codes.FailedPrecondition, "phase %s has no gate that can be overridden", s.Rotation.Phase)
	case len(open) == 0:
		return status.Errorf(codes.FailedPrecondition, "phase %s has no gate %.40q; it has %s, which have passed", s.Rotation.Phase, gate, strings.Join(known, ", "))
	}
	return status.Errorf(codes.FailedPrecondition, "phase %s has no gate %.40q; it has %s, and waits for %s", s.Rotation.Phase, gate, strings.Join(known, ", "), strings.Join(open, ", "))
}

// Describe returns the rotation under way, and those that have ended.
func (d *Desk) Describe() *chanceryv1.RotationStatus {
	s, now := d.config.Manager.Status(), time.Now()
	resp := &chanceryv1.RotationStatus{Time: timestamppb.New(now), Version: s.Version, TrustDomain: s.Domain.String(), Rotation: d.current(&s, now)}
	for _, u := range s.Former {
		resp.Former = append(resp.Former, &chanceryv1.FormerUse{Kind: u.Kind, Who: u.Who, Detail: u.Detail, Count: u.Count})
	}
	for i := range s.Past {
		p := &s.Past[i]
		one := describe(&p.Rotation)
		one.Ended, one.Outcome = timestamppb.New(p.Ended), p.Outcome
		resp.Past = append(resp.Past, one)
	}
	return resp
}

// Current returns the rotation under way; nil for none.
func (d *Desk) Current() *chanceryv1.Rotation {
	s := d.config.Manager.Status()
	return d.current(&s, time.Now())
}

func (d *Desk) current(s *staged.Status, now time.Time) *chanceryv1.Rotation {
	if s.Rotation == nil {
		return nil
	}
	out := describe(s.Rotation)
	out.Trouble = s.Trouble
	for _, g := range s.Gates {
		one := &chanceryv1.Gate{Name: g.Name, Passed: g.Passed, Overridden: g.Overridden, Have: g.Have, Want: g.Want, Waiting: g.Waiting}
		if !g.Until.IsZero() {
			one.Until = timestamppb.New(g.Until)
		}
		out.Gates = append(out.Gates, one)
	}
	if s.Phases != nil {
		e := estimate{s.Phases, s, now}
		if most, ok := e.phase(s.Rotation.Phase); ok && s.Rotation.Phase != document.PhaseIssue { // it is as long as an admin wants
			out.PhaseEstimate = durationpb.New(most)
		}
		if at, ok := e.latest(); ok {
			out.Latest = timestamppb.New(at)
		}
	}
	return out
}

func describe(r *document.Rotation) *chanceryv1.Rotation {
	out := &chanceryv1.Rotation{
		Id: r.ID, Kind: string(r.Kind), Reason: string(r.Reason), Actor: r.Actor, FromRoot: r.FromRoot, FromIssuer: r.FromIssuer, ToRoot: r.ToRoot, ToIssuer: r.ToIssuer,
		Started: timestamppb.New(r.Started), Phase: string(r.Phase), Since: timestamppb.New(r.Since), PausedBy: r.PausedBy, Back: r.Back,
	}
	if m := r.Migration; m != nil {
		out.FromDomain, out.ToDomain, out.Share, out.Namespaces = m.From, m.To, uint32(max(0, m.Share)), m.Namespaces
	}
	if r.Paused != nil {
		out.Paused = timestamppb.New(*r.Paused)
	}
	for _, o := range r.Overrides {
		out.Overrides = append(out.Overrides, &chanceryv1.RotationOverride{Gate: o.Gate, Phase: string(o.Phase), Because: o.Because, Actor: o.Actor, Time: timestamppb.New(o.Time)})
	}
	return out
}

// estimate says how long a rotation may take.
type estimate struct {
	plan   []staged.PlannedPhase
	status *staged.Status
	now    time.Time
}

// phase returns how long a phase takes at most.
func (e *estimate) phase(p document.Phase) (most time.Duration, ok bool) {
	i := e.index(p)
	if i < 0 {
		return 0, false
	}
	return e.plan[i].Most, true
}

func (e *estimate) index(p document.Phase) int {
	return slices.IndexFunc(e.plan, func(x staged.PlannedPhase) bool { return x.Phase == p })
}

// latest returns when the rotation has ended at the latest: the end of its phase, and all that comes after. It cannot be told while the
// rotation is paused, or its phase takes longer than was thought and no gate says until when.
func (e *estimate) latest() (time.Time, bool) {
	r := e.status.Rotation
	i := e.index(r.Phase)
	if i < 0 || r.Paused != nil {
		return time.Time{}, false
	}
	if at := e.index(document.PhaseIssue); at >= i && r.Migration != nil && r.Migration.Share < stages.All { // an admin says when
		return time.Time{}, false
	}
	end := e.now
	for _, g := range e.status.Gates {
		switch {
		case g.Passed:
		case !g.Until.IsZero():
			end = later(end, g.Until)
		default:
			end = later(end, r.Since.Add(e.plan[i].Most))
			if !e.now.Before(r.Since.Add(e.plan[i].Most)) {
				return time.Time{}, false
			}
		}
	}
	for _, p := range e.plan[i+1:] {
		end = end.Add(p.Most)
	}
	return end, true
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
