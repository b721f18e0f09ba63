package rotate

import (
	"fmt"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// Adopt takes over the roots and CRLs of the trust domain as they are now; they show with the SVID as one snapshot. It
// refuses a bundle that the SVID in use does not verify against (invariant 7).
//
// CRLs under which the SVID itself would be refused, though it is on none, are out of date and would cut peers off:
// Envoy refuses every leaf of an issuer without a current CRL once it has any. They are kept, and shown as soon as they
// fit. An SVID that is on them is replaced as soon as the server gives another; until then it stays.
func (k *Keeper) Adopt(b *trust.Bundle) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if b.Domain() != k.config.ID.Domain() {
		return fmt.Errorf("the bundle is of %s; expected %s", b.Domain(), k.config.ID.Domain())
	}
	if k.current == nil {
		k.adopted = b
		return nil
	}
	next, err := k.current.WithBundle(b, time.Now())
	if err != nil {
		return fmt.Errorf("the SVID in use does not verify against the new roots: %w", err)
	}
	k.adopted = b
	k.swap(next, b)
	return nil
}

// Withheld says why CRLs that were adopted are not shown; "" if they are, or if there are none.
func (k *Keeper) Withheld() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.withheld
}

// newest returns the bundle to show with a new SVID: the one that came with it, or the adopted one if that is newer; a
// change of roots can overtake an answer. CRLs are always the adopted ones. mu is held.
func (k *Keeper) newest(next *trust.Identity) *trust.Bundle {
	if k.adopted == nil {
		return next.Bundle
	}
	if k.adopted.Generation() > next.Bundle.Generation() {
		if _, err := next.WithBundle(k.adopted, time.Now()); err == nil {
			return k.adopted
		}
	}
	k.adopted = next.Bundle.WithCRLs(k.adopted.CRLs())
	return k.adopted
}

// look brings what is shown in line with the time. mu is not held.
func (k *Keeper) look() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current != nil && k.adopted != nil && k.adopted.CRLs() != nil {
		k.swap(k.current, k.adopted)
	}
}

// swap shows an SVID with a bundle that it verifies against, less CRLs that do not fit, if that is anything new. It
// returns what is shown. mu is held.
func (k *Keeper) swap(id *trust.Identity, b *trust.Bundle) *trust.Identity {
	crls := b.CRLs()
	trouble := ""
	if crls != nil {
		if err := crls.Covers(id.Leaf(), time.Now()); err != nil {
			b, trouble = b.WithCRLs(nil), err.Error()
		}
	}
	if trouble != k.withheld {
		k.withheld = trouble
		if trouble == "" {
			k.config.Logger.Info("CRLs are served again", "spiffe_id", k.config.ID.String())
		} else {
			k.config.Logger.Error("CRLs are not served: proxies would refuse peers that are not revoked", "spiffe_id", k.config.ID.String(), "reason", trouble)
		}
	}
	k.noteRevoked(id, crls)
	if k.current != nil && id.Leaf() == k.current.Leaf() && b.SameRoots(k.current.Bundle) &&
		b.Generation() == k.current.Bundle.Generation() && b.CRLs().Equal(k.current.Bundle.CRLs()) {
		return k.current
	}
	shown := *id
	shown.Bundle = b
	k.current = &shown
	close(k.changed)
	k.changed = make(chan struct{})
	return k.current
}

// noteRevoked wakes Run if the SVID is on a CRL, once for each SVID. mu is held.
func (k *Keeper) noteRevoked(id *trust.Identity, crls *trust.CRLs) {
	err := crls.Check(id.Leaf())
	if err == nil || k.reported == id.Leaf() {
		return
	}
	k.reported = id.Leaf()
	k.config.Logger.Error("the SVID in use was revoked; asking for another", "spiffe_id", k.config.ID.String(), "reason", err.Error())
	select {
	case k.revoked <- struct{}{}:
	default:
	}
}
