package stages

import (
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// This file has what admins change. Each function changes d, which is to be stored, or returns an error and leaves it as it is.

// Request asks for a rotation.
type Request struct {
	Kind   document.AuthorityKind
	Reason document.Reason
	Actor  string
	ID     string // drawn by the caller: 8 bytes in hex
	// Migrate asks for a successor of another trust domain; Kind is KindRoot then, and Reason ReasonAsked. May be nil.
	Migrate *Target
}

// Bounds of what an admin says.
const (
	maxActor     = 256
	maxBecause   = 500
	maxOverrides = 32
)

// Start begins a rotation. With a compromised key the predecessor is tainted at once; of an issuer, its root is replaced too, since
// verifiers look for revoked leaves only, so that an issuer cannot be taken from them in another way (decision D6).
func Start(d *document.Document, td trust.Domain, q Request, now time.Time) error {
	if err := q.check(); err != nil {
		return err
	}
	root, err := d.Active(td, document.KindRoot)
	if err != nil {
		return err
	}
	issuer, err := d.Active(td, document.KindIssuer)
	if err != nil {
		return err
	}
	s := d.Of(td)
	if r := s.Rotation; r != nil {
		return underWay(r)
	}
	if !root.HasKey() && q.Reason != document.ReasonFiles {
		return fmt.Errorf("the key of root %s lies elsewhere, so no successor can be made here: where plugged-in files bring the issuer, change those in steps; "+
			"else a ceremony makes another root", root.ID)
	}
	if p := d.Prepared(td); p != nil && p.Wanted {
		return fmt.Errorf("issuer %s was brought by an admin or a parent and waits to sign; try again once it does", p.ID)
	}
	var m *document.Migration
	if q.Migrate != nil {
		if m, err = migration(d, td, *q.Migrate); err != nil {
			return err
		}
	}
	if q.Reason == document.ReasonCompromised {
		if q.Kind == document.KindRoot {
			s.Taint(document.KindRoot, root.ID, now)
		}
		s.Taint(document.KindIssuer, issuer.ID, now)
		q.Kind = document.KindRoot
	}
	r := &document.Rotation{
		ID: q.ID, Kind: q.Kind, Reason: q.Reason, Actor: q.Actor, FromIssuer: issuer.ID, Started: now.UTC(), Phase: document.PhasePrepare, Since: now.UTC(), Version: d.Version,
		Migration: m,
	}
	if q.Kind == document.KindRoot {
		r.FromRoot = root.ID
	}
	s.Rotation = r
	d.DropPrepared(td) // it never signed
	return nil
}

func (q Request) check() error {
	switch {
	case q.Kind != document.KindRoot && q.Kind != document.KindIssuer:
		return fmt.Errorf("what is rotated is %q or %q, not %.40q", document.KindRoot, document.KindIssuer, q.Kind)
	case q.ID == "":
		return errors.New("the rotation has no ID")
	case q.Reason == document.ReasonFiles && q.Kind != document.KindRoot:
		return errors.New("plugged-in files that bring another issuer under the same root need no rotation")
	case q.Reason != document.ReasonAsked && q.Reason != document.ReasonPolicy && q.Reason != document.ReasonCompromised && q.Reason != document.ReasonFiles:
		return fmt.Errorf("reason %.40q is not known", q.Reason)
	case q.Migrate != nil && (q.Kind != document.KindRoot || q.Reason != document.ReasonAsked):
		return errors.New("a migration to another trust domain replaces the root, and is asked for by an admin; a compromised key is a rotation of its own, before or after")
	}
	return checkActor(q.Actor)
}

func checkActor(actor string) error {
	if actor == "" || len(actor) > maxActor {
		return fmt.Errorf("the actor's name has %d bytes; it should have 1 to %d", len(actor), maxActor)
	}
	return nil
}

func underWay(r *document.Rotation) error {
	if r.Migration != nil {
		return fmt.Errorf("%s is under way, in phase %s: wait for its end, or `chancery trust migrate abort` (before the new domain is issued) or `rollback`", name(r), r.Phase)
	}
	return fmt.Errorf("%s is under way, in phase %s: wait for its end, or `chancery rotate abort` (before the successor signs) or `rollback`", name(r), r.Phase)
}

// change returns the rotation that an admin changes.
func change(d *document.Document, td trust.Domain, actor string) (*document.DomainState, *document.Rotation, error) {
	if err := checkActor(actor); err != nil {
		return nil, nil, err
	}
	s := d.Of(td)
	if s == nil || s.Rotation == nil {
		return nil, nil, errors.New("no rotation is under way")
	}
	return s, s.Rotation, nil
}

// Pause holds a rotation where it is. What servers and consumers do in its phase goes on.
func Pause(d *document.Document, td trust.Domain, actor string, now time.Time) error {
	_, r, err := change(d, td, actor)
	switch {
	case err != nil:
		return err
	case r.Paused != nil:
		return fmt.Errorf("rotation %s was paused by %s already", r.ID, r.PausedBy)
	}
	at := now.UTC()
	r.Paused, r.PausedBy = &at, actor
	return nil
}

// Resume ends a pause.
func Resume(d *document.Document, td trust.Domain, actor string, _ time.Time) error {
	_, r, err := change(d, td, actor)
	switch {
	case err != nil:
		return err
	case r.Paused == nil:
		return fmt.Errorf("rotation %s is not paused", r.ID)
	}
	r.Paused, r.PausedBy = nil, ""
	return nil
}

// Abort ends a rotation whose successor has signed nothing yet: it leaves the document. Where it is in the bundle, that gets another
// generation.
func Abort(d *document.Document, td trust.Domain, actor string, now time.Time) error {
	s, r, err := change(d, td, actor)
	switch {
	case err != nil:
		return err
	case r.Phase != document.PhasePrepare && r.Phase != document.PhaseDistribute:
		return fmt.Errorf("%s is in phase %s: its successor has signed already. `%s rollback` goes back to the predecessor, in steps", name(r), r.Phase, command(r))
	}
	if err := untainted(s, r.FromRoot, r.FromIssuer); err != nil {
		return err
	}
	switch {
	case s.Get(document.KindRoot, r.ToRoot) != nil:
		s.DropRoot(r.ToRoot)
	case s.Get(document.KindIssuer, r.ToIssuer) != nil:
		s.DropIssuer(r.ToIssuer)
		s.Generation++ // whoever took this one's CRL for part of it
	}
	s.EndRotation(OutcomeAborted, now)
	return nil
}

// Rollback makes the predecessor sign again: everybody still trusts it. What the successor has signed is replaced in turn, before its
// root leaves. Before the successor signs, it is Abort.
func Rollback(d *document.Document, td trust.Domain, actor string, now time.Time) error {
	s, r, err := change(d, td, actor)
	if err != nil {
		return err
	}
	switch r.Phase {
	case document.PhasePrepare, document.PhaseDistribute:
		return Abort(d, td, actor, now)
	case document.PhaseIssue, document.PhaseActivate, document.PhaseReissue:
	default:
		return fmt.Errorf("rotation %s is in phase %s: the predecessor is not trusted any more. Start another rotation", r.ID, r.Phase)
	}
	root, issuer := s.Get(document.KindRoot, r.FromRoot), s.Get(document.KindIssuer, r.FromIssuer)
	switch {
	case r.Reason == document.ReasonFiles:
		return fmt.Errorf("rotation %s follows plugged-in files: wait for its end, and change those in steps again", r.ID)
	case issuer == nil || issuer.Ended(now) || r.Kind == document.KindRoot && (root == nil || root.Ended(now)):
		return fmt.Errorf("issuer %s, or its root, has ended or is gone: it cannot sign again. Start another rotation after this one", r.FromIssuer)
	case !issuer.HasKey():
		return fmt.Errorf("the key of issuer %s is not here any more: it cannot sign again", r.FromIssuer)
	}
	if err := mayTurn(r); err != nil {
		return err
	}
	if err := untainted(s, r.FromRoot, r.FromIssuer); err != nil {
		return err
	}
	turn(s, r, now)
	if root != nil {
		s.Activate(document.KindRoot, root.ID, now)
	}
	s.Activate(document.KindIssuer, issuer.ID, now)
	r.FromRoot, r.ToRoot, r.FromIssuer, r.ToIssuer, r.Back = r.ToRoot, r.FromRoot, r.ToIssuer, r.FromIssuer, !r.Back
	r.Paused, r.PausedBy = nil, ""
	(&view{d: d, now: now}).begin(r, document.PhaseActivate)
	return nil
}

// untainted refuses to let an authority sign, or go on to sign, whose key may be known to others (decision D6).
func untainted(s *document.DomainState, root, issuer string) error {
	for _, a := range []*document.Authority{s.Get(document.KindRoot, root), s.Get(document.KindIssuer, issuer)} {
		if a != nil && a.Tainted != nil {
			return fmt.Errorf("%s %s is tainted since %s, and would sign: a rotation away from it goes on to its end", a.Kind, a.ID, stamp(*a.Tainted))
		}
	}
	return nil
}

// Override notes somebody's word for a gate of the present phase. See Risk.
func Override(d *document.Document, td trust.Domain, o document.Override, now time.Time) error {
	_, r, err := change(d, td, o.Actor)
	if err != nil {
		return err
	}
	v := &view{d: d, r: r, now: now}
	switch {
	case o.Because == "" || len(o.Because) > maxBecause:
		return fmt.Errorf("the reason has %d bytes; it should have 1 to %d", len(o.Because), maxBecause)
	case Risk(r.Phase, o.Gate) == "":
		return fmt.Errorf("phase %s has no gate %.40q that can be overridden", r.Phase, o.Gate)
	case v.overridden(o.Gate):
		return fmt.Errorf("gate %s is overridden already", o.Gate)
	case len(r.Overrides) >= maxOverrides:
		return fmt.Errorf("rotation %s has %d overrides, and no more fit", r.ID, len(r.Overrides))
	}
	o.Phase, o.Time = r.Phase, v.stamp()
	r.Overrides = append(r.Overrides, o)
	return nil
}
