package staged

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/authority/swap"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/rotate/stages"
)

// This file starts rotations, and has what admins change in one that is under way.

// Asked is what somebody asks for.
type Asked struct {
	Kind    document.AuthorityKind
	Reason  document.Reason
	Migrate *stages.Target // to another trust domain; Kind is KindRoot then. May be nil
}

// Start starts a rotation that somebody asks for. It can be called on any server.
func (m *Manager) Start(ctx context.Context, actor string, q Asked) error {
	if q.Reason != document.ReasonAsked && q.Reason != document.ReasonCompromised {
		return fmt.Errorf("a rotation is asked for with the reason %q or none, not %.40q", document.ReasonCompromised, q.Reason)
	}
	m.config.Authority.Follow(ctx) // so that the answer is about the newest document
	return m.start(ctx, m.config.Authority.Change, stages.Request{Kind: q.Kind, Reason: q.Reason, Actor: actor, Migrate: q.Migrate}, nil)
}

// changer is one of the ways to change the document.
type changer func(ctx context.Context, f func(next *document.Document) error) error

// start tries a start on a copy, notes it, and stores it. Also does more to the same document.
func (m *Manager) start(ctx context.Context, change changer, q stages.Request, also func(next *document.Document) error) error {
	c, now := m.config, time.Now()
	var id [8]byte
	rand.Read(id[:])
	q.ID = hex.EncodeToString(id[:])
	do := func(d *document.Document) error {
		if err := stages.Start(d, c.Domain, q, now); err != nil || also == nil {
			return err
		}
		return also(d)
	}
	if err := m.refusal(Asked{q.Kind, q.Reason, q.Migrate}); err != nil {
		return err
	}
	tried := c.Authority.Document().Clone()
	if err := do(tried); err != nil {
		return err
	}
	detail := fmt.Sprintf("rotate start: rotation %s of the %s, reason %s", q.ID, q.Kind, q.Reason)
	if q.Migrate != nil {
		if err := m.refuses(tried, q.Migrate.Domain); err != nil {
			return err
		}
		detail = "trust migrate start: " + stages.Told(tried.Rotating(c.Domain))
	}
	if err := m.note(q.Actor, detail); err != nil {
		return err
	}
	if err := change(ctx, do); err != nil {
		return err
	}
	m.poke()
	return nil
}

// refusal says why a rotation cannot be made here, and what to do instead.
func (m *Manager) refusal(q Asked) error {
	if q.Reason == document.ReasonCompromised {
		q.Kind = document.KindRoot
	}
	switch {
	case q.Reason == document.ReasonFiles || q.Kind != document.KindRoot && q.Kind != document.KindIssuer:
		return nil
	case q.Migrate != nil:
		return m.config.Authority.Migratable(q.Migrate.Domain)
	}
	return m.config.Authority.Rotatable(q.Kind)
}

// Change is what an admin changes in a rotation that is under way.
type Change struct {
	What     string // "pause", "resume", "abort", "rollback", "override", or, of a migration, "issue"
	Gate     string // of override
	Because  string // of override
	Rotation string // its ID; empty: whichever is under way
	// Of issue: see stages.Issue.
	Share      *int
	Namespaces []string
}

// Change makes a change that somebody asks for. It can be called on any server.
func (m *Manager) Change(ctx context.Context, actor string, c Change) error {
	td, now := m.config.Domain, time.Now()
	do := func(d *document.Document) error {
		r := d.Rotating(td)
		if r == nil {
			return errors.New("no rotation is under way")
		}
		if c.Rotation != "" && c.Rotation != r.ID {
			return fmt.Errorf("rotation %.40q is not the one under way, which is %s", c.Rotation, r.ID)
		}
		switch c.What {
		case "pause":
			return stages.Pause(d, td, actor, now)
		case "resume":
			return stages.Resume(d, td, actor, now)
		case "abort":
			return stages.Abort(d, td, actor, now)
		case "rollback":
			return stages.Rollback(d, td, actor, now)
		case "override":
			return stages.Override(d, td, document.Override{Gate: c.Gate, Because: c.Because, Actor: actor}, now)
		case "issue":
			return stages.Issue(d, td, actor, c.Share, c.Namespaces, now)
		}
		return fmt.Errorf("change %.40q is not known: pause, resume, abort, rollback, override or issue", c.What)
	}
	m.config.Authority.Follow(ctx) // so that the answer is about the newest document
	doc := m.config.Authority.Document()
	tried := doc.Clone()
	if err := do(tried); err != nil {
		return err
	}
	c.Rotation = doc.Rotating(td).ID // what was tried, and no other
	if err := m.note(actor, c.detail(doc.Rotating(td), tried.Rotating(td))); err != nil {
		return err
	}
	if err := m.config.Authority.Change(ctx, do); err != nil {
		return err
	}
	m.poke()
	return nil
}

// detail is what the audit log has of a change, which makes one rotation another.
func (c Change) detail(was, is *document.Rotation) string {
	command := "rotate"
	if was.Migration != nil {
		command = "trust migrate"
	}
	switch c.What {
	case "override":
		return fmt.Sprintf("%s override: gate %s of rotation %s, because %q", command, c.Gate, c.Rotation, c.Because)
	case "issue":
		return fmt.Sprintf("%s issue: %s", command, stages.Told(is))
	}
	return fmt.Sprintf("%s %s: rotation %s", command, c.What, c.Rotation)
}

// begin starts what files or the policy ask for, while no rotation is under way.
func (m *Manager) begin(ctx context.Context, doc *document.Document, now time.Time) error {
	set, step, err := m.config.Authority.Swap(now)
	if err != nil {
		return err
	}
	if set != nil {
		return m.beginByFiles(ctx, doc, step, swap.ID(set.Chain[0]), now)
	}
	kind, why := m.due(doc, now)
	if why == "" {
		return nil
	}
	if !m.starts.isDue(now) {
		return m.starts.last
	}
	err = m.starts.note(m.start(ctx, m.config.Authority.Drive, stages.Request{Kind: kind, Reason: document.ReasonPolicy, Actor: "policy"}, nil), now)
	if err == nil {
		m.config.Logger.Info("a rotation was started by policy", "kind", string(kind), "reason", why)
	}
	return err
}

// beginByFiles starts the rotation to a root that was added to plugged-in files. Their issuer is the active one by then.
func (m *Manager) beginByFiles(ctx context.Context, doc *document.Document, step swap.Step, issuer string, now time.Time) error {
	m.hint(step.Hint)
	using, err := doc.Active(m.config.Domain, document.KindIssuer)
	if step.Kind != swap.Add || err != nil || using.ID != issuer {
		return err
	}
	if !m.starts.isDue(now) {
		return m.starts.last
	}
	q := stages.Request{Kind: document.KindRoot, Reason: document.ReasonFiles, Actor: "files"}
	err = m.starts.note(m.start(ctx, m.config.Authority.Drive, q, func(next *document.Document) error {
		if b, err := next.Bundle(m.config.Domain); err != nil || slices.ContainsFunc(b.Roots(), step.Root.Equal) {
			return cmp.Or(err, replica.ErrUnchanged) // by another one's files, meanwhile
		}
		return next.AddSuccessors(m.config.Domain, nil, &document.Made{Certificate: step.Root}, nil)
	}), now)
	if err == nil {
		m.config.Logger.Info("the issuer files have a root more: a rotation to it begins", "root", swap.ID(step.Root))
	}
	return err
}

// due says what the policy rotates now, and why; empty: nothing.
func (m *Manager) due(doc *document.Document, now time.Time) (document.AuthorityKind, string) {
	c := m.config
	if c.Authority.Rotatable(document.KindIssuer) != nil {
		return "", ""
	}
	root, err := doc.Active(c.Domain, document.KindRoot)
	if err != nil {
		return "", ""
	}
	if cert, err := root.X509(); err == nil && c.RootMaxAge > 0 && now.Sub(cert.NotBefore) >= c.RootMaxAge && !m.rests(doc, document.KindRoot, now, 24*time.Hour) {
		return document.KindRoot, fmt.Sprintf("root %s is older than %s", root.ID, c.RootMaxAge)
	}
	issuer, err := doc.Active(c.Domain, document.KindIssuer)
	if err != nil || issuer.Ended(now) { // what has ended is renewed at once, by the authority
		return "", ""
	}
	begin, life, err := issuer.Life()
	if err == nil && now.Sub(begin) > life/2 && !m.rests(doc, document.KindIssuer, now, min(time.Hour, life/8)) {
		return document.KindIssuer, fmt.Sprintf("issuer %s is past half of its life", issuer.ID)
	}
	return "", ""
}

// rests reports whether somebody ended a rotation of a kind before its time a while ago: the policy leaves them some time.
func (m *Manager) rests(doc *document.Document, kind document.AuthorityKind, now time.Time, long time.Duration) bool {
	for _, p := range doc.Of(m.config.Domain).Past {
		if p.Kind == kind && p.Outcome != stages.OutcomeDone && now.Sub(p.Ended) < long {
			return true
		}
	}
	return false
}
