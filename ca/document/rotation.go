package document

import (
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/document/line"
)

// This file is about the rotation of roots and issuers: what the document says of one that is under way. Package rotate/stages
// decides what comes next; nobody else changes a Rotation.

// Phase is where a rotation stands. Each ends once its gates have passed.
type Phase string

// Phases, in their order.
const (
	// PhasePrepare makes the successor's keys and certificates, or waits for those that come from elsewhere.
	PhasePrepare Phase = "prepare"
	// PhaseDistribute waits until everybody trusts the successor: each replica, and each consumer (invariant 4).
	PhaseDistribute Phase = "distribute"
	// PhaseIssue, of a migration only, comes between: everybody trusts both domains, and each signs for its share of the identities. It ends
	// when the share is all of them.
	PhaseIssue Phase = "issue"
	// PhaseActivate: the successor is the active one in the document; it waits until each replica signs with it (decision D4).
	PhaseActivate Phase = "activate"
	// PhaseReissue waits until every leaf of the predecessor has been replaced, or has ended (invariant 5).
	PhaseReissue Phase = "reissue"
	// PhaseRetire: the predecessor is not trusted any more; it waits until everybody has that.
	PhaseRetire Phase = "retire"
)

// Reason is why a rotation was started.
type Reason string

// Reasons.
const (
	ReasonAsked       Reason = "asked"       // by an admin
	ReasonPolicy      Reason = "policy"      // the issuer is at half of its life, or the root at the age that an admin set
	ReasonCompromised Reason = "compromised" // the predecessor's key may be known to others: it is tainted
	ReasonFiles       Reason = "files"       // plugged-in files have changed (decision D7)
)

// Rotation is a change from one root, or one issuer, to the next, under way. There is one at a time in a trust domain.
type Rotation struct {
	ID     string        `json:"id"`   // hex, 8 bytes
	Kind   AuthorityKind `json:"kind"` // root: with the issuer below it; issuer: under the same root
	Reason Reason        `json:"reason"`
	Actor  string        `json:"actor"`

	// Predecessor and successor, by ID. With an issuer's rotation the roots are empty. ToRoot and ToIssuer are empty until they are made.
	FromRoot   string `json:"fromRoot,omitempty"`
	FromIssuer string `json:"fromIssuer,omitempty"`
	ToRoot     string `json:"toRoot,omitempty"`
	ToIssuer   string `json:"toIssuer,omitempty"`

	Started time.Time `json:"started"`
	Phase   Phase     `json:"phase"`
	Since   time.Time `json:"since"`   // when the phase began,
	Version uint64    `json:"version"` // and the document in which it did
	// Generation is the one that consumers must trust for the gate of the phase: that with the successor, then that without the predecessor.
	Generation uint64 `json:"generation,omitempty"`
	// NotBefore is the earliest time at which the predecessor's root may leave the bundle. A replica that the store does not confirm
	// signs under that root no leaf that ends later (decision D4). While the predecessor signs, it is moved ahead in time.
	NotBefore time.Time `json:"notBefore,omitzero"`
	// Spread is when each replica had acknowledged the document in which the phase began: those who only read roots may have read the
	// former ones until then. Zero: not yet, or there are no such readers.
	Spread time.Time `json:"spread,omitzero"`

	Paused    *time.Time `json:"paused,omitempty"` // since when no gate is passed
	PausedBy  string     `json:"pausedBy,omitempty"`
	Back      bool       `json:"back,omitempty"` // it was rolled back: From and To have changed places
	Overrides []Override `json:"overrides,omitempty"`

	// Migration is set where the successor is of another trust domain; Kind is KindRoot then. See PhaseIssue.
	Migration *Migration `json:"migration,omitempty"`
}

// Migration is what a rotation to another trust domain has beside.
type Migration = line.Migration

// Override is an admin's word that a gate passes without its evidence, for one phase.
type Override struct {
	Gate    string    `json:"gate"`
	Phase   Phase     `json:"phase"`
	Because string    `json:"because"`
	Actor   string    `json:"actor"`
	Time    time.Time `json:"time"`
}

// PastRotation is one that has ended.
type PastRotation struct {
	Rotation
	Ended   time.Time `json:"ended"`
	Outcome string    `json:"outcome"` // "done", "aborted", "rolled back"
}

// MaxPast bounds the rotations that a document remembers of each trust domain.
const MaxPast = 10

// Goal is what the gate of a phase asks of each consumer: to trust a generation of the bundle, or to have left issuers behind. The
// zero Goal asks for nothing.
type Goal struct {
	// Generation of the bundle that the consumer, and all that it serves, should have acknowledged at least; 0: none.
	Generation uint64
	// Leave are IDs of issuers: the consumer should hold no leaf of them whose successor it has not acknowledged, and that has not
	// ended. In order; nil: none.
	Leave []string
	// Shown: nobody is waited for, for weeks perhaps. Who has not reached it is shown to people, and need not be news.
	Shown bool
}

// Equal reports whether two goals ask for the same.
func (g Goal) Equal(o Goal) bool {
	return g.Generation == o.Generation && slices.Equal(g.Leave, o.Leave)
}

// IsZero reports whether a goal asks for nothing.
func (g Goal) IsZero() bool { return g.Generation == 0 && len(g.Leave) == 0 }

// Goal returns what consumers are waited for.
func (s *DomainState) Goal() Goal {
	switch r := s.Rotation; {
	case r == nil:
		return Goal{}
	case r.Phase == PhaseDistribute || r.Phase == PhaseRetire:
		return Goal{Generation: r.Generation}
	case r.Phase == PhaseIssue || r.Phase == PhaseReissue:
		return Goal{Leave: s.Leaving(), Shown: r.Phase == PhaseIssue}
	}
	return Goal{}
}

// Leaving returns the IDs of the issuers that a rotation's predecessor is, or vouches for, in order. Nil while there is no rotation.
func (s *DomainState) Leaving() []string {
	r := s.Rotation
	if r == nil {
		return nil
	}
	var all []string
	for i := range s.Authorities {
		a := &s.Authorities[i]
		if a.Kind == KindIssuer && (a.ID == r.FromIssuer || r.FromRoot != "" && a.RootID() == r.FromRoot) {
			all = append(all, a.ID)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Hurried returns the IDs of the issuers whose leaves are to be replaced before their time: those that are left behind since a key may be
// known to others. All others wait for their renewal.
func (s *DomainState) Hurried() []string {
	if r := s.Rotation; r == nil || r.Reason != ReasonCompromised || r.Phase != PhaseReissue {
		return nil
	}
	return s.Leaving()
}

// Get returns an authority by ID; nil if there is none.
func (s *DomainState) Get(kind AuthorityKind, id string) *Authority {
	for i := range s.Authorities {
		if a := &s.Authorities[i]; a.Kind == kind && a.ID == id && id != "" {
			return a
		}
	}
	return nil
}
