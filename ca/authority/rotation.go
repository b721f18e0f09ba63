package authority

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/replica"
)

// This file is what a server does for the rotation that a document has under way. What comes next in it, package rotate/stages decides.

// Staged says that somebody rotates the issuers that are signed here, by policy (package rotate/staged). Without, Run renews them by
// itself at half of their lives. It is called before Run.
func (a *Keeper) Staged() { a.staged = true }

// stateOf returns what a document in use has of the trust domain. It must not be changed.
func (a *Keeper) stateOf(doc *Document) *document.DomainState {
	if state := doc.Of(a.config.Domain); state != nil {
		return state
	}
	return new(document.DomainState)
}

// leaves reports whether the next issuer is not for mindIssuer to prepare. While a root rotates there can be no rotation of an issuer, and
// the one in use may not live until its end: then it is renewed as ever.
func (a *Keeper) leaves(doc *Document) bool {
	r := a.stateOf(doc).Rotation
	return a.staged && (r == nil || r.Kind != KindRoot)
}

// isStray reports whether a prepared issuer is under another root than the active one: it was prepared before a rotation's roots changed
// places.
func (a *Keeper) isStray(doc *Document, x *Authority) bool {
	root, err := doc.Active(a.config.Domain, KindRoot)
	return err == nil && a.config.Plugged == nil && x.RootID() != "" && x.RootID() != root.ID
}

// dropStray forgets a prepared issuer that will not sign.
func (a *Keeper) dropStray(ctx context.Context) error {
	return a.Drive(ctx, func(next *Document) error {
		x := next.Prepared(a.config.Domain)
		if x == nil || !a.isStray(next, x) {
			return replica.ErrUnchanged
		}
		next.DropPrepared(a.config.Domain)
		return nil
	})
}

// MakeSuccessors makes what a rotation leads to, before that signs, and enters it into the document in one change: a root with an issuer
// under it, or an issuer under the root that is there. Each has a new key. An issuer that has waited for so long that most of its life is
// over is replaced by another. Nothing happens if the rotation has what it needs. A crash on the way leaves the document as it was.
func (a *Keeper) MakeSuccessors(ctx context.Context, rotation string) error {
	doc := a.Document()
	if !a.stateOf(doc).LacksSuccessor(rotation, time.Now()) {
		return nil
	}
	r := a.stateOf(doc).Rotation
	root, issuer, made, err := a.held.Successors(ctx, doc, r, held.Lives{KeyType: a.config.KeyType, Root: a.config.RootTTL, Issuer: a.config.IssuerTTL})
	if err == nil {
		err = a.addSuccessors(ctx, r, root, issuer)
	} else {
		a.dropMade(ctx, made...)
	}
	if err != nil && !errors.Is(err, replica.ErrNotDriver) && ctx.Err() == nil {
		a.making.Store(&err) // another server may be able to
		return err
	}
	a.making.Store(nil)
	return err
}

// LacksSuccessor reports whether MakeSuccessors has something to do.
func (a *Keeper) LacksSuccessor(rotation string, now time.Time) bool {
	return a.stateOf(a.Document()).LacksSuccessor(rotation, now)
}

// addSuccessors enters them, if they pass the checks of every issuer. Keys that no document can name are deleted.
func (a *Keeper) addSuccessors(ctx context.Context, was *document.Rotation, root, issuer *document.Made) error {
	td, tried := a.config.Domain, false
	err := a.Drive(ctx, func(next *Document) error {
		state := next.State(td)
		r := state.Rotation
		if r == nil || r.ToRoot != was.ToRoot || r.ToIssuer != was.ToIssuer || !state.LacksSuccessor(was.ID, time.Now()) {
			return replica.ErrUnchanged // it was ended, or another one was faster
		}
		if r.Kind == KindIssuer && a.isOther(next, issuer.Certificate) {
			return errors.New("the active root has changed meanwhile")
		}
		state.DropIssuer(r.ToIssuer)
		r.ToIssuer = ""
		if err := next.AddSuccessors(td, a.config.Sealer, root, issuer); err != nil {
			return err
		}
		tried = true
		return a.held.Try(ctx, next, state.Get(KindIssuer, r.ToIssuer))
	})
	if now := a.stateOf(a.Document()).Get(KindIssuer, fmt.Sprintf("%x", issuer.Certificate.SubjectKeyId)); now == nil && (!tried || err == nil) {
		a.dropMade(ctx, issuer.Key)
		if root != nil {
			a.dropMade(ctx, root.Key)
		}
	}
	return err
}

func (a *Keeper) isOther(doc *Document, issuer *x509.Certificate) bool {
	root, err := doc.Active(a.config.Domain, KindRoot)
	return err != nil || document.RootOf([]*x509.Certificate{issuer}) != root.ID
}

// dropMade deletes keys from the key store that were made for nothing.
func (a *Keeper) dropMade(ctx context.Context, made ...Key) {
	held.DropKeys(ctx, a.config.Keys, a.config.Logger, made...)
}

// Rotatable returns why this server cannot make another root or, under the one that there is, another issuer, and what to do instead;
// nil if it can.
func (a *Keeper) Rotatable(kind document.AuthorityKind) error {
	dir := ""
	if a.config.Plugged != nil {
		dir = a.config.Plugged.Dir
	}
	return held.Rotatable(a.Document(), a.config.Domain, kind, dir, a.config.Parented)
}

// bounded returns an issuer as it may be used now (decision D4).
func (a *Keeper) bounded(i *ca.Issuer, now time.Time) (*ca.Issuer, error) {
	confirmed, _ := a.Fresh()
	return a.held.Bounded(i, a.stateOf(a.Document()), confirmed, now)
}
