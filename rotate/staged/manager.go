package staged

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/authority/swap"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/rotate/stages"
	"github.com/chancery-project/chancery/trust"
)

// Config is what a Manager is made of.
type Config struct {
	Domain    trust.Domain
	Authority *authority.Keeper
	Notes     func() []board.Note    // of all replicas, the own one included, the newest known of each
	Changed   func() <-chan struct{} // closed when they have changed; asked for before Notes
	Floor     time.Duration          // see stages.Evidence
	// Unpublished: see stages.Evidence; asked each second. May be nil.
	Unpublished func() []string
	LeafTTL     time.Duration // longest life of a leaf
	Typical     time.Duration // life of most, for estimates; zero: LeafTTL
	// RootMaxAge is the age at which a root is rotated by itself; 0: never. An admin sets it (decision D11).
	RootMaxAge time.Duration
	// Refuses says why the config of this server does not let it become another trust domain; nil: it has nothing against any.
	Refuses func(trust.Domain) error
	// Former returns what this server knows that names or allows a trust domain which is left; may be nil.
	Former func(trust.Domain) []Use
	// Blind names consumers that cannot enforce CRLs, for plans; may be nil.
	Blind   func() []string
	Log     *audit.Log
	Logger  *slog.Logger
	Metrics prometheus.Registerer // may be nil
}

// Manager drives rotations.
type Manager struct {
	config Config
	wake   chan struct{}
	seen   watched         // of Run's goroutine
	retry  retry           // likewise, of making a successor,
	starts retry           // and of starting a rotation
	told   map[string]bool // what the audit log has of a step that could not be stored yet; likewise
	ended  *prometheus.CounterVec

	mu      sync.Mutex // guards trouble
	trouble string     // why the driver could not go on, when it last tried
}

// New returns a manager. From here on the authority leaves the renewal of issuers that it signs itself to it.
func New(c Config) *Manager {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	m := &Manager{config: c, wake: make(chan struct{}, 1), told: map[string]bool{}}
	m.ended = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "chancery_ca_rotations_ended_total", Help: "Rotations of roots and issuers that have ended since the server's start, by kind and outcome.",
	}, []string{"kind", "outcome"})
	if c.Metrics != nil {
		c.Metrics.MustRegister(m.ended, collector{m})
	}
	m.seen.begin(c.Authority.Document(), c.Domain)
	c.Authority.Staged()
	return m
}

const (
	// tick is how often the driver looks though nothing woke it: gates pass by time, too.
	tick = time.Second
	// maxSteps bounds how far one look goes.
	maxSteps = 10
	// firstRetry and maxRetry bound how soon it is tried again to make a successor, or to start a rotation: each try makes keys, or a
	// line in the audit log.
	firstRetry = 2 * time.Second
	maxRetry   = time.Minute
)

// Run follows rotations, and drives them while this server is the one that does, until ctx ends.
func (m *Manager) Run(ctx context.Context) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		changed := m.config.Changed()
		m.look(ctx, time.Now())
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		case <-m.wake:
		case <-changed:
		}
	}
}

func (m *Manager) poke() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// look does once what there is to do.
func (m *Manager) look(ctx context.Context, now time.Time) {
	a := m.config.Authority
	m.observe(a.Document(), now)
	if !a.Drives() {
		m.setTrouble(nil)
		return
	}
	err := m.drive(ctx, now)
	if errors.Is(err, replica.ErrNotDriver) || ctx.Err() != nil {
		return
	}
	m.setTrouble(err)
	m.observe(a.Document(), now)
	m.warn(a.Document(), now)
}

func (m *Manager) setTrouble(err error) {
	said := ""
	if err != nil {
		said = err.Error()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if said != "" && said != m.trouble {
		m.config.Logger.Error("a rotation does not go on; trying again", "reason", said)
	}
	m.trouble = said
}

// drive starts what is to be started, and moves what is under way as far as it goes.
func (m *Manager) drive(ctx context.Context, now time.Time) error {
	for range maxSteps {
		doc := m.config.Authority.Document()
		if doc.Rotating(m.config.Domain) == nil {
			if err := m.begin(ctx, doc, now); err != nil || m.config.Authority.Document() == doc {
				return err
			}
			continue
		}
		e, err := m.files(ctx, now)
		if err != nil {
			return err
		}
		if m.config.Authority.Document().Rotating(m.config.Domain) == nil { // they ended it
			continue
		}
		moved, err := m.advance(ctx, e, now)
		if err != nil || !moved {
			return err
		}
		m.observe(m.config.Authority.Document(), now)
	}
	return nil
}

// evidence is what is known now. Files are added by who follows them.
func (m *Manager) evidence() stages.Evidence {
	e := stages.Evidence{Notes: m.config.Notes(), Floor: m.config.Floor, LeafTTL: m.config.LeafTTL}
	if m.config.Unpublished != nil {
		e.Unpublished = m.config.Unpublished()
	}
	return e
}

// errMoved: the document is another than the one that was looked at.
var errMoved = errors.New("the document has changed meanwhile")

// advance goes one step, if there is one. What is told of it is in the audit log before: once, however often the store does not take it.
func (m *Manager) advance(ctx context.Context, e stages.Evidence, now time.Time) (moved bool, _ error) {
	a, td := m.config.Authority, m.config.Domain
	doc := a.Document()
	if id := doc.Rotating(td).ID; a.LacksSuccessor(id, now) { // also one that waits for so long that it would end soon
		if !m.retry.isDue(now) {
			return false, m.retry.last
		}
		return true, m.retry.note(a.MakeSuccessors(ctx, id), now)
	}
	m.noteGates(stages.Gates(doc, td, e, now), doc.Rotating(td), now)
	next, actions := stages.Next(doc, td, e, now)
	for _, act := range actions {
		if act.Event != "" && !m.told[act.Event] {
			if err := m.config.Log.Append(audit.Record{Event: audit.Admin, Actor: "server " + a.Replica(), Detail: act.Event}); err != nil {
				return false, fmt.Errorf("a rotation goes on only once the audit log says so: %w", err)
			}
			m.told[act.Event] = true
		}
	}
	if next == doc {
		return false, nil
	}
	err := a.Drive(ctx, func(n *document.Document) error {
		next, actions := stages.Next(n, td, e, now)
		if next == n || a.LacksSuccessor(n.Rotating(td).ID, now) {
			return replica.ErrUnchanged
		}
		for _, act := range actions {
			if act.Event != "" && !m.told[act.Event] {
				return errMoved
			}
		}
		*n = *next
		return nil
	})
	if errors.Is(err, errMoved) {
		return true, nil
	}
	if err == nil {
		clear(m.told)
		for _, act := range actions {
			m.config.Logger.Info(act.Event)
		}
	}
	return a.Document().Version > doc.Version, err
}

// retry spaces tries that fail.
type retry struct {
	next time.Time
	wait time.Duration
	last error
}

func (r *retry) isDue(now time.Time) bool { return !now.Before(r.next) }

func (r *retry) note(err error, now time.Time) error {
	if err == nil {
		*r = retry{}
		return nil
	}
	r.wait = min(max(2*r.wait, firstRetry), maxRetry)
	r.next, r.last = now.Add(r.wait), err
	return err
}

// files does what plugged-in files ask of a rotation that follows them, and returns the evidence with what they have. Without them it
// does not go on: what is missing in files that are not there would count as taken out.
func (m *Manager) files(ctx context.Context, now time.Time) (stages.Evidence, error) {
	a, td := m.config.Authority, m.config.Domain
	e, r := m.evidence(), a.Document().Rotating(td)
	if r.Reason != document.ReasonFiles {
		return e, nil
	}
	set, step, err := a.Swap(now)
	if err != nil {
		return e, err
	}
	if set == nil {
		return e, fmt.Errorf("rotation %s follows plugged-in files, and this server has none: set `issuer` in the config, as on the others", r.ID)
	}
	m.hint(step.Hint)
	e.Files = m.rootsInFiles(r, now)
	if step.Kind == swap.Back {
		return e, m.abortByFiles(ctx, r, now)
	}
	if step.Kind != swap.Next || r.Phase != document.PhaseDistribute || r.Paused != nil {
		return e, nil
	}
	cert := set.Chain[0]
	if r.ToIssuer == swap.ID(cert) || r.ToIssuer == "" && !allBut(stages.Gates(a.Document(), td, e, now), stages.GateSuccessor) {
		return e, nil
	}
	if err := m.note("files", fmt.Sprintf("rotation %s of the root: the files bring issuer %s", r.ID, swap.ID(cert))); err != nil {
		return e, err
	}
	return e, a.Drive(ctx, func(next *document.Document) error {
		s := next.State(td)
		if now := s.Rotation; now == nil || now.ID != r.ID || now.Phase != document.PhaseDistribute || now.ToIssuer != r.ToIssuer {
			return replica.ErrUnchanged
		}
		if r.ToIssuer != "" { // the files have changed once more
			s.DropIssuer(r.ToIssuer)
			s.Rotation.ToIssuer = ""
		}
		return next.AddSuccessors(td, nil, nil, &document.Made{Certificate: cert, Chain: set.Chain[1:]})
	})
}

// rootsInFiles returns the IDs of the roots in the files, and of one that is lacking there for another reason than that it was taken out.
func (m *Manager) rootsInFiles(r *document.Rotation, now time.Time) (ids []string) {
	set, step, err := m.config.Authority.Swap(now)
	if set != nil {
		for _, root := range set.Roots {
			ids = append(ids, swap.ID(root))
		}
	}
	if err != nil || step.Kind != swap.Remove {
		ids = append(ids, r.FromRoot)
	}
	return ids
}

// allBut reports whether all gates have passed but one.
func allBut(gates []stages.Gate, name string) bool {
	for _, g := range gates {
		if !g.Passed && g.Name != name {
			return false
		}
	}
	return true
}

func (m *Manager) abortByFiles(ctx context.Context, r *document.Rotation, now time.Time) error {
	if err := m.note("files", fmt.Sprintf("rotation %s of the root: aborted, since the files do not have root %s any more", r.ID, r.ToRoot)); err != nil {
		return err
	}
	return m.config.Authority.Drive(ctx, func(next *document.Document) error {
		if now := next.Rotating(m.config.Domain); now == nil || now.ID != r.ID {
			return replica.ErrUnchanged
		}
		return stages.Abort(next, m.config.Domain, "files", now)
	})
}

func (m *Manager) note(actor, detail string) error {
	return m.config.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: detail})
}
