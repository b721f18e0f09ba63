package stages

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// This file has what a migration to another trust domain has beside a rotation of the root: a phase in which both domains are issued, and,
// in the very change that takes the old root out, another name for the line.

// Target is where a migration leads to.
type Target struct {
	Domain trust.Domain
	// Who gets certificates of it as soon as everybody trusts it: see document.Migration.
	Share      int
	Namespaces []string
}

// All is the share that ends the phase issue.
const All = 100

// name says in words what is under way.
func name(r *document.Rotation) string {
	if m := r.Migration; m != nil {
		from, to := m.From, m.To
		if r.Back {
			from, to = to, from
		}
		return fmt.Sprintf("migration %s from %s to %s", r.ID, from, to)
	}
	return fmt.Sprintf("rotation %s of the %s", r.ID, r.Kind)
}

// command is that with which an admin changes what is under way.
func command(r *document.Rotation) string {
	if r.Migration != nil {
		return "chancery trust migrate"
	}
	return "chancery rotate"
}

// Told says in words what a migration is, and who is issued the new domain, for the audit log.
func Told(r *document.Rotation) string {
	if r == nil || r.Migration == nil {
		return "nothing"
	}
	return name(r) + ", issuing to " + shareOf(r.Migration)
}

// Presents names consumers that hold a certificate of the domain that a migration leaves, and says how many there are, where the phase
// tells: in issue and reissue.
func Presents(d *document.Document, td trust.Domain, e Evidence, now time.Time) (names []string, n uint64) {
	v := look(d, td, e, now)
	if v == nil || v.r.Migration == nil || len(v.goal.Leave) == 0 {
		return nil, 0
	}
	behind := v.behind()
	return v.words(behind), uint64(len(behind))
}

// migration checks where one would lead to.
func migration(d *document.Document, td trust.Domain, t Target) (*document.Migration, error) {
	if t.Domain.String() == "" {
		return nil, errors.New("a migration leads to a trust domain, and none is named")
	}
	if err := d.CheckMigration(td, t.Domain); err != nil {
		return nil, err
	}
	m := &document.Migration{From: d.Present(td).String(), To: t.Domain.String()}
	return grow(m, t.Share, t.Namespaces)
}

// grow returns a migration with which more identities have certificates of the new domain.
func grow(m *document.Migration, share int, namespaces []string) (*document.Migration, error) {
	if m.Share == All && share < All {
		return nil, fmt.Errorf("all identities are given %s already, and a share never shrinks; `rollback` goes back", m.To)
	}
	if share < m.Share || share > All {
		return nil, fmt.Errorf("a share of %d is not between %d, which it is now, and %d: it never shrinks; `rollback` goes back", share, m.Share, All)
	}
	all := slices.Concat(m.Namespaces, namespaces)
	slices.Sort(all)
	next := &document.Migration{From: m.From, To: m.To, Share: share, Namespaces: slices.Compact(all)}
	return next, next.Check()
}

// shareOf says in words who gets certificates of the new domain in phase issue.
func shareOf(m *document.Migration) string {
	switch n := len(m.Namespaces); {
	case m.Share == All:
		return "all identities"
	case n == 0 && m.Share == 0:
		return "no identities yet"
	case n == 0:
		return fmt.Sprintf("%d %% of all identities", m.Share)
	case m.Share == 0:
		return "identities of " + namespacesOf(m)
	}
	return fmt.Sprintf("%d %% of all identities, and those of %s", m.Share, namespacesOf(m))
}

func namespacesOf(m *document.Migration) string {
	const most = 5
	if n := len(m.Namespaces); n > most {
		return fmt.Sprintf("the namespaces %s and %d more", strings.Join(m.Namespaces[:most], ", "), n-most)
	} else if n > 1 {
		return "the namespaces " + strings.Join(m.Namespaces, ", ")
	}
	return "the namespace " + m.Namespaces[0]
}

// Issue lets more identities have certificates of the new domain: a share of a hundred at least, and namespaces beside those that have it already. Both
// only grow.
func Issue(d *document.Document, td trust.Domain, actor string, share *int, namespaces []string, _ time.Time) error {
	_, r, err := change(d, td, actor)
	if err != nil {
		return err
	}
	m := r.Migration
	switch {
	case m == nil:
		return fmt.Errorf("%s is not to another trust domain: there is nothing to share out", name(r))
	case r.Back:
		return fmt.Errorf("%s was rolled back: %s is issued to nobody any more", name(r), m.From)
	case r.Phase != document.PhasePrepare && r.Phase != document.PhaseDistribute && r.Phase != document.PhaseIssue:
		return fmt.Errorf("%s is in phase %s: all identities get certificates of %s already", name(r), r.Phase, m.To)
	case share == nil && len(namespaces) == 0:
		return errors.New("issue to whom? A share, or namespaces")
	}
	if share == nil {
		share = &m.Share
	}
	next, err := grow(m, *share, namespaces)
	if err != nil {
		return err
	}
	if next.Share == m.Share && len(next.Namespaces) == len(m.Namespaces) {
		return fmt.Errorf("%s issues to %s already", name(r), shareOf(m))
	}
	r.Migration = next
	return nil
}

// share is the gate of phase issue: that both domains are issued ends once an admin says so.
func (v *view) share() Gate {
	m := v.r.Migration
	if m == nil { // no rotation is in this phase but a migration
		return Gate{Name: GateShare, Waiting: []string{"this rotation has no new trust domain, and should not be in phase issue: `chancery rotate rollback`"}}
	}
	g := Gate{Name: GateShare, Have: uint64(m.Share), Want: All, Passed: m.Share >= All}
	if !g.Passed {
		g.Waiting = []string{fmt.Sprintf("%s get %s: `chancery trust migrate issue --share N` lets others follow, and with N = %d all do", shareOf(m), m.To, All)}
	}
	return g
}

// mayTurn refuses to go back where that would not lead to where it was before.
func mayTurn(r *document.Rotation) error {
	if m := r.Migration; m != nil && r.Back && m.Share < All {
		return fmt.Errorf("%s was rolled back while %s: forward again would be to all. Let it end, and start it again", name(r), "only a part of the identities had the new domain")
	}
	return nil
}

// turn has the domains of a migration change places, with its roots. What is left behind in phase issue has signed, and is an issuer like
// any other that retires.
func turn(s *document.DomainState, r *document.Rotation, now time.Time) {
	m := r.Migration
	if m == nil {
		return
	}
	at := now.UTC().Truncate(time.Second)
	for _, a := range []*document.Authority{s.Get(document.KindRoot, r.ToRoot), s.Get(document.KindIssuer, r.ToIssuer)} {
		if a != nil && a.State == document.StatePrepared {
			a.State, a.Retired = document.StateRetiring, &at
		}
	}
	r.Migration = m.Clone()
	r.Migration.From, r.Migration.To = m.To, m.From
}
