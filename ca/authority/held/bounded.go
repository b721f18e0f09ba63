package held

import (
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/document"
)

// This file bounds what is signed by a server that may not know how a rotation stands (decision D4).

// maxStale is how long a replica may lack the store's word that its document is the newest, until it must not sign what could outlive
// its root.
const maxStale = 30 * time.Second

// maxWindow bounds window.
const maxWindow = time.Hour

// cut is an issuer that signs nothing beyond a time.
type cut struct {
	of    *ca.Issuer
	until time.Time
	as    *ca.Issuer
}

// Bounded returns an issuer as it may be used now. One that the store has not confirmed for a while may be of a root that leaves the
// bundle, without this replica having heard of it: what it signs must have ended by then. If that is too soon, ca.ErrNotReady.
func (h *Issuers) Bounded(i *ca.Issuer, state *document.DomainState, confirmed, now time.Time) (*ca.Issuer, error) {
	r := state.Rotation
	if now.Sub(confirmed) <= maxStale || r == nil || r.FromRoot == "" || r.Phase != document.PhasePrepare && r.Phase != document.PhaseDistribute && r.Phase != document.PhaseIssue {
		return i, nil
	}
	x := state.Get(document.KindIssuer, i.SKI())
	if x == nil || x.RootID() != r.FromRoot && (r.Phase != document.PhaseIssue || x.RootID() != r.ToRoot) { // in issue a rollback has the new root leave
		return i, nil
	}
	root, last := x.RootID(), &h.cut
	if root != r.FromRoot {
		last = &h.cutSecond
	}
	end := r.NotBefore
	if end.IsZero() { // it was started, and nobody has driven it since: whoever does sets a time that is later
		end = r.Since.Add(h.window())
	}
	if left := end.Sub(now); left < h.least() {
		return nil, fmt.Errorf("%w: the store has not confirmed since %s that this server knows the newest authority document, and root %s, which it signs under, may leave the bundle from %s on",
			ca.ErrNotReady, confirmed.UTC().Format(time.RFC3339), root, end.UTC().Format(time.RFC3339))
	}
	if have := last.Load(); have != nil && have.of == i && have.until.Equal(end) {
		return have.as, nil
	}
	next := &cut{i, end, i.Until(end)}
	last.Store(next)
	return next.as, nil
}

// window is how far ahead, at least, the time is set first at which a root may leave: as long as a leaf may live.
func (h *Issuers) window() time.Duration {
	shortest := maxWindow
	for _, p := range h.config.Profiles {
		shortest = min(shortest, p.MaxTTL())
	}
	return shortest
}

// least is the life that a leaf should have at least: with less it would have ended before its successor is there.
func (h *Issuers) least() time.Duration {
	least := time.Minute
	for _, p := range h.config.Profiles {
		least = min(least, p.DefaultTTL()/10)
	}
	return least
}
