package authority

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/trust"
)

// This file is about revocations in the document. They are stored as predicates (decision D13); package revocation finds
// what they mean.

// Revoke stores a revocation, and returns it. One that stands already is returned as it is. The actor goes into the audit
// log first.
func (a *Keeper) Revoke(ctx context.Context, r Revocation) (Revocation, error) {
	c := a.config
	r.Time = r.Time.UTC()
	if err := r.Check(a.Document().Names(c.Domain), r.Time); err != nil {
		return r, err
	}
	detail := fmt.Sprintf("revoke %s (reason %d)", r.Predicate.String(), r.Reason)
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: r.Actor, Detail: detail}); err != nil {
		return r, err
	}
	have := r
	err := a.Change(ctx, func(next *Document) (err error) {
		if have, err = next.Revoke(c.Domain, r); err == nil && have.Time != r.Time {
			err = replica.ErrUnchanged
		}
		return err
	})
	return have, err
}

// Restore lets an identity have certificates again. What was revoked stays revoked.
func (a *Keeper) Restore(ctx context.Context, actor string, id trust.ID, now time.Time) error {
	c := a.config
	now = now.UTC()
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, SPIFFEID: id.String(), Detail: "restore " + id.String()}); err != nil {
		return err
	}
	return a.Change(ctx, func(next *Document) error { return next.Restore(c.Domain, id, now) })
}

// ErrMoved: the document is another than the one that a change was worked out for.
var ErrMoved = errors.New("the document has changed meanwhile")

// TakeCRL takes the next number for CRLs that are otherwise as c says, if seen is the newest document there is; else ErrMoved, and
// Document returns a newer one. The document has the number before anything is signed with it.
func (a *Keeper) TakeCRL(ctx context.Context, seen *Document, c document.CRL) error {
	return a.ChangeQuietly(ctx, func(next *Document) error {
		if next.Version != seen.Version+1 {
			return ErrMoved
		}
		next.State(a.config.Domain).NextCRL(c)
		return nil
	})
}

// KeepCRLs stores the last CRL of issuers whose key may not be at hand later, by ID, unless another replica stored it already.
func (a *Keeper) KeepCRLs(ctx context.Context, crls map[string][]byte) error {
	if len(crls) == 0 {
		return nil
	}
	return a.ChangeQuietly(ctx, func(next *Document) error {
		if !next.State(a.config.Domain).KeepCRLs(crls) {
			return replica.ErrUnchanged
		}
		return nil
	})
}
