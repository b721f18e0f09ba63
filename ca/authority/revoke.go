package authority

import (
	"context"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// This file is about revocations in the document. They are stored as predicates (decision D13); package revocation finds
// what they mean.

// Revoke stores a revocation, and returns it. One that stands already is returned as it is. The actor goes into the audit
// log first.
func (a *Keeper) Revoke(ctx context.Context, r Revocation) (Revocation, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.config
	r.Time = r.Time.UTC()
	if err := r.Check(c.Domain, r.Time); err != nil {
		return r, err
	}
	detail := fmt.Sprintf("revoke %s (reason %d)", r.Predicate.String(), r.Reason)
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: r.Actor, Detail: detail}); err != nil {
		return r, err
	}
	next, err := a.doc.Next(a.data)
	if err != nil {
		return r, err
	}
	have, err := next.Revoke(c.Domain, r)
	if err != nil || have.Time != r.Time {
		return have, err
	}
	return have, a.store(ctx, next)
}

// Restore lets an identity have certificates again. What was revoked stays revoked.
func (a *Keeper) Restore(ctx context.Context, actor string, id trust.ID, now time.Time) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.config
	now = now.UTC()
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, SPIFFEID: id.String(), Detail: "restore " + id.String()}); err != nil {
		return err
	}
	next, err := a.doc.Next(a.data)
	if err != nil {
		return err
	}
	if err := next.Restore(c.Domain, id, now); err != nil {
		return err
	}
	return a.store(ctx, next)
}

// NextCRLNumber takes a number for CRLs that is above all before, also those of before a crash: the document has it before
// anything is signed with it.
func (a *Keeper) NextCRLNumber(ctx context.Context) (uint64, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	next, err := a.doc.Next(a.data)
	if err != nil {
		return 0, err
	}
	state := next.State(a.config.Domain)
	state.CRLNumber++
	return state.CRLNumber, a.storeQuietly(ctx, next)
}

// KeepCRLs stores the last CRL of issuers whose key may not be at hand later, by ID.
func (a *Keeper) KeepCRLs(ctx context.Context, crls map[string][]byte) error {
	if len(crls) == 0 {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	next, err := a.doc.Next(a.data)
	if err != nil {
		return err
	}
	state := next.State(a.config.Domain)
	for i := range state.Authorities {
		if crl := crls[state.Authorities[i].ID]; crl != nil && state.Authorities[i].Kind == document.KindIssuer {
			state.Authorities[i].CRL = crl
		}
	}
	return a.storeQuietly(ctx, next)
}
