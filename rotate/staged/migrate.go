package staged

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/rotate/stages"
	"github.com/chancery-project/chancery/trust"
)

// This file has what a migration to another trust domain has beside a rotation of the root.

// Use is something that still presents, names or allows the trust domain that a migration leaves.
type Use struct {
	Kind   string // "presents", "names", "allows" or "federates"
	Who    string
	Detail string
	Count  uint64 // how many there are of the kind in all, where not each is listed; 0: this one
}

// askedFor is what was asked for when a rotation began.
func askedFor(r *document.Rotation) Asked {
	q := Asked{Kind: r.Kind, Reason: r.Reason}
	if m := r.Migration; m != nil {
		to, err := trust.ParseDomain(m.To)
		if err == nil {
			q.Migrate = &stages.Target{Domain: to, Share: m.Share, Namespaces: m.Namespaces}
		}
	}
	return q
}

// refuses says why there can be no migration to a trust domain now that package stages cannot know: this server's config, and what other
// servers can read.
func (m *Manager) refuses(doc *document.Document, to trust.Domain) error {
	if m.config.Refuses != nil {
		if err := m.config.Refuses(to); err != nil {
			return err
		}
	}
	var live []string
	for _, l := range doc.Live() {
		live = append(live, l.Replica)
	}
	if less := board.Lagging(live, m.config.Notes(), document.Format); len(less) > 0 {
		return fmt.Errorf("replica %s does not say that it reads documents with a migration (format %d): update each server first, or, where one will not come back, `chancery replica forget NAME`",
			strings.Join(less, ", "), document.Format)
	}
	return nil
}

// mayMigrate says why there can be no migration now.
func (m *Manager) mayMigrate(doc *document.Document, t *stages.Target) error {
	tried := doc.Clone()
	err := stages.Start(tried, m.config.Domain, stages.Request{Kind: document.KindRoot, Reason: document.ReasonAsked, Actor: "plan", ID: "plan", Migrate: t}, time.Now())
	if doc.Rotating(m.config.Domain) != nil { // the plan says so, and is worth having
		err = doc.CheckMigration(m.config.Domain, t.Domain)
	}
	return errors.Join(err, m.refuses(doc, t.Domain))
}

// migrationPhases are those of a rotation of the root, as a migration has them.
func migrationPhases(all []PlannedPhase, from trust.Domain, t *stages.Target) []PlannedPhase {
	issue := PlannedPhase{
		Phase: document.PhaseIssue, Does: fmt.Sprintf("certificates of %s go to those whom you name, of %s to all others; everybody accepts both", t.Domain, from),
		WaitsFor: []string{"your word, `chancery trust migrate issue`, that all identities get the new domain"},
	}
	if t.Share >= stages.All {
		issue.Does, issue.WaitsFor = "it is over at once, since all identities get the new domain: `start --share N` or `--namespace NS` begins with some", nil
	}
	all = slices.Clone(all)
	for i := range all {
		p := &all[i]
		switch p.Phase {
		case document.PhasePrepare:
			p.Does = fmt.Sprintf("makes a root for %s and an issuer under it, with new keys", t.Domain)
		case document.PhaseDistribute:
			p.Does = fmt.Sprintf("everybody gets the roots of both domains, each for identities of its own; certificates are of %s as before", from)
		case document.PhaseActivate:
			p.Does = fmt.Sprintf("all certificates are issued in %s", t.Domain)
		case document.PhaseReissue:
			p.Does = fmt.Sprintf("certificates of %s are replaced as they are renewed", from)
		case document.PhaseRetire:
			p.Does = fmt.Sprintf("the root of %s leaves the bundle, and its keys are deleted; the authority is one of %s", from, t.Domain)
		}
	}
	at := slices.IndexFunc(all, func(p PlannedPhase) bool { return p.Phase == document.PhaseActivate })
	return slices.Insert(all, at, issue)
}

// migrationNotes says what to know, and to change, before a migration.
func (m *Manager) migrationNotes(doc *document.Document, to trust.Domain) (notes []string) {
	from := doc.Present(m.config.Domain)
	add := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	add("before anybody is issued %s: whatever names spiffe://%s/... exactly (SAN matchers of Envoys, principals of policies, go-spiffe programs) should name spiffe://%s/... beside it", to, from, to)
	add("the domain does not move in tokens, Kubernetes' service accounts or DNS names: namespaces and accounts stay what they are")
	for _, u := range m.federates(doc, from) {
		add("%s federates: %s", u.Who, u.Detail)
	}
	add("at its end: set trustDomain to %s in the config of each server and agent, at a time that suits you: until then %s works there, too", to, from)
	return notes
}

// former returns what still has to do with the trust domain that a migration leaves.
func (m *Manager) former(doc *document.Document, now time.Time) []Use {
	r := doc.Rotating(m.config.Domain)
	from, err := trust.ParseDomain(r.Migration.From)
	if err != nil {
		return nil
	}
	var all []Use
	names, n := stages.Presents(doc, m.config.Domain, m.known(r, now), now)
	for _, name := range names {
		all = append(all, Use{Kind: "presents", Who: name, Detail: "has a certificate of " + from.String(), Count: n})
	}
	if m.config.Former != nil {
		all = append(all, m.config.Former(from)...)
	}
	return append(all, m.federates(doc, from)...)
}

// federates returns the foreign trust domains whose admins have to hear of a migration.
func (m *Manager) federates(doc *document.Document, from trust.Domain) (all []Use) {
	for name := range doc.Foreign {
		all = append(all, Use{Kind: "federates", Who: name, Detail: fmt.Sprintf("if it trusts %s in turn, it needs the bundle of the new domain as a relationship of its own, before certificates are issued in that", from)})
	}
	slices.SortFunc(all, func(a, b Use) int { return strings.Compare(a.Who, b.Who) })
	return all
}
