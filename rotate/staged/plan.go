package staged

import (
	"fmt"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/below"
	"github.com/chancery-project/chancery/rotate/stages"
)

// Plan is what a rotation would do.
type Plan struct {
	FromRoot, FromIssuer string   // what would be replaced
	Notes                []string // what to know before
	Phases               []PlannedPhase
}

// PlannedPhase is a phase of a Plan. Least and Most are estimates; both zero if it takes a moment.
type PlannedPhase struct {
	Phase       document.Phase
	Does        string
	WaitsFor    []string
	Least, Most time.Duration
}

// moment is what it takes until all servers, and the agents that are connected, have a document.
const moment = 15 * time.Second

// silent is how long ago a replica that lives was heard of at most.
const silent = 5 * board.Beat / 2

// Plan says what a rotation would do and how long each phase may take, and changes nothing. An error says why there can be none.
func (m *Manager) Plan(q Asked) (Plan, error) {
	doc, now := m.config.Authority.Document(), time.Now()
	p, err := m.outline(doc, q, now)
	if err == nil && q.Migrate != nil {
		err = m.mayMigrate(doc, q.Migrate)
	}
	if err != nil {
		return Plan{}, err
	}
	p.Notes = m.planNotes(doc, q, now)
	return p, nil
}

// outline is a plan without notes, which ask about each agent: who follows a rotation looks every second.
func (m *Manager) outline(doc *document.Document, q Asked, now time.Time) (Plan, error) {
	c, kind, reason := m.config, q.Kind, q.Reason
	if kind != document.KindRoot && kind != document.KindIssuer {
		return Plan{}, fmt.Errorf("what is rotated is %q or %q, not %.40q", document.KindRoot, document.KindIssuer, kind)
	}
	if err := m.refusal(q); err != nil {
		return Plan{}, err
	}
	issuer, err := doc.Active(c.Domain, document.KindIssuer)
	if err != nil {
		return Plan{}, err
	}
	root, err := doc.Active(c.Domain, document.KindRoot)
	if err != nil {
		return Plan{}, err
	}
	p := Plan{FromIssuer: issuer.ID}
	compromised := reason == document.ReasonCompromised
	if kind == document.KindRoot || compromised {
		p.FromRoot = root.ID
		p.Phases = m.rootPhases(compromised, now)
		if q.Migrate != nil {
			p.Phases = migrationPhases(p.Phases, doc.Present(c.Domain), q.Migrate)
		}
	} else {
		p.Phases = m.issuerPhases(now)
	}
	return p, nil
}

// longest is how long certificates that are valid now, or issued soon, may count: by what servers have announced, at most what profiles allow.
func (m *Manager) longest(now time.Time) time.Duration {
	life := m.usual()
	for _, n := range m.config.Notes() {
		life = max(life, n.Evidence.Ahead.Sub(now))
		for _, b := range n.Evidence.Behind {
			life = max(life, b.Until.Sub(now))
		}
	}
	return min(life, max(m.config.LeafTTL, m.usual())).Round(time.Second)
}

// usual is the life of most leaves.
func (m *Manager) usual() time.Duration {
	if m.config.Typical > 0 {
		return m.config.Typical
	}
	return m.config.LeafTTL
}

func (m *Manager) rootPhases(compromised bool, now time.Time) []PlannedPhase {
	longest, floor := m.longest(now), m.config.Floor
	window := min(m.config.LeafTTL, time.Hour)
	consumers := "each agent, and all that it serves, has acknowledged the new bundle; clients without our agent by their next call, or until their certificate ends"
	distribute := PlannedPhase{
		Phase: document.PhaseDistribute, Does: "the bundle holds old and new root, everywhere; the old issuer signs on",
		WaitsFor: []string{"each server has the new document", consumers}, Least: max(floor, 0), Most: max(longest, floor+moment),
	}
	if floor > 0 {
		distribute.WaitsFor = append(distribute.WaitsFor, fmt.Sprintf("readers that cannot acknowledge (federated peers, ConfigMaps) get %s", floor))
	}
	reissue := PlannedPhase{
		Phase: document.PhaseReissue, Does: "certificates of the old root's issuers are replaced as they are renewed",
		WaitsFor: []string{"each consumer has acknowledged a certificate under the new root, or its old one has ended", "what a server that was cut off may have signed has ended"},
		Least:    min(window/2, m.usual()/2), Most: longest,
	}
	if compromised {
		reissue.Does = "agents are told to renew at once, at a pace that leaves room for new pods; renewal by a certificate of a tainted issuer is refused, so that they show a token"
	}
	return []PlannedPhase{
		{Phase: document.PhasePrepare, Does: "makes a new root and an issuer under it, with new keys", WaitsFor: []string{"the key store"}},
		distribute,
		{Phase: document.PhaseActivate, Does: "the new issuer signs; the old one no more", WaitsFor: []string{"each server signs with it"}, Most: moment},
		reissue,
		{Phase: document.PhaseRetire, Does: "the old root leaves the bundle, its keys are deleted", WaitsFor: []string{"each server has the new document", consumers}, Most: longest},
	}
}

func (m *Manager) issuerPhases(now time.Time) []PlannedPhase {
	longest := m.longest(now)
	return []PlannedPhase{
		{Phase: document.PhasePrepare, Does: "makes a new issuer under the same root, with a new key", WaitsFor: []string{"the key store"}},
		{
			Phase: document.PhaseDistribute, Does: "the new issuer's CRL goes out; the old issuer signs on",
			WaitsFor: []string{"each server has the new document", "each agent, and all that it serves, has acknowledged it; clients without our agent by their next call, or until their certificate ends"},
			Most:     longest,
		},
		{Phase: document.PhaseActivate, Does: "the new issuer signs; the old one no more", WaitsFor: []string{"each server signs with it"}, Most: moment},
		{
			Phase: document.PhaseReissue, Does: "certificates of the old issuer are replaced as they are renewed; its CRL goes on until they have ended",
			WaitsFor: []string{"each consumer has acknowledged a certificate of the new issuer, or its old one has ended"}, Least: m.usual() / 2, Most: longest,
		},
	}
}

// maxNamed bounds the names in a note.
const maxNamed = 5

func (m *Manager) planNotes(doc *document.Document, q Asked, now time.Time) (notes []string) {
	add := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	kind, reason := q.Kind, q.Reason
	if q.Migrate != nil {
		notes = m.migrationNotes(doc, q.Migrate.Domain)
	}
	if r := doc.Rotating(m.config.Domain); r != nil {
		add("rotation %s of the %s is under way, in phase %s: another one can start once it has ended", r.ID, r.Kind, r.Phase)
	}
	if reason == document.ReasonCompromised {
		add("the old authority is tainted at once, for good: no abort and no rollback lets it sign again")
		if kind == document.KindIssuer {
			add("with a compromised issuer its root is replaced, too. A CRL of the root that lists the issuer would be seen only by verifiers which check the CRLs of a whole chain, " +
				"as OpenSSL does with X509_V_FLAG_CRL_CHECK_ALL: Envoy checks that of the leaf's issuer alone (only_verify_leaf_cert_crl), and Go clients check none")
		}
		add("until the old root has left a bundle, whoever has the key can make certificates that its holders accept: each phase that waits long is worth a look, and an override says what it risks")
	}
	if kind == document.KindRoot || reason == document.ReasonCompromised {
		add("the new root's key is a new one, kept apart from the old (%s); the old root's key is deleted when it retires", m.config.Authority.KeyPlace())
		add("copies of roots.pem that somebody was given (serverRoots of new agents, CA_ROOT_CA of Istio's) should be replaced from the phase distribute on, and before retire; agents that run need nothing")
	}
	if root, err := doc.Active(m.config.Domain, document.KindRoot); err == nil && (kind == document.KindRoot || reason == document.ReasonCompromised) {
		for _, x := range below.Under(doc.Of(m.config.Domain).Below, root.ID, now) {
			add("server below %s has an issuer under this root, and pins it: the gate %s waits until that has ended, at %s or, if it is renewed meanwhile, later", x.To, stages.GateIssuers, x.Until.UTC().Format(time.RFC3339))
		}
	}
	if m.config.Blind != nil {
		if blind := m.config.Blind(); len(blind) > 0 {
			named := blind[:min(len(blind), maxNamed)]
			add("consumers that cannot enforce CRLs: %d, among them %s: a certificate of the old issuer that was revoked is good for them until it ends, or its root is gone", len(blind), strings.Join(named, ", "))
		}
	}
	heard := map[string]time.Time{}
	for _, n := range m.config.Notes() {
		heard[n.Replica] = n.Seen
	}
	for _, l := range doc.Live() {
		switch at, ok := heard[l.Replica]; {
		case !ok:
			add("replica %s was never heard of: every gate waits for it, unless `chancery replica forget %s` declares it dead", l.Replica, l.Replica)
		case now.Sub(at) > silent:
			add("replica %s was last heard of at %s: every gate waits for it, unless `chancery replica forget %s` declares it dead", l.Replica, at.UTC().Format(time.RFC3339), l.Replica)
		}
	}
	return notes
}
