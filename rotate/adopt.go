package rotate

import (
	"fmt"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// Unfit is the error of a bundle that the SVID in use does not verify against.
type Unfit struct{ err error }

// Error says why.
func (u *Unfit) Error() string {
	return "the SVID in use does not verify against the new roots: " + u.err.Error()
}

// Unwrap returns the details.
func (u *Unfit) Unwrap() error { return u.err }

// Adopt takes over the roots and CRLs of the trust domain as they are now, and those of its kin; they show with the SVID as one snapshot. It
// refuses, by an *Unfit, a bundle that the SVID in use does not verify against (invariant 7), and by a *trust.Older one that has
// been replaced.
//
// CRLs under which the SVID itself would be refused, though it is on none, are out of date and would cut peers off:
// Envoy refuses every leaf of an issuer without a current CRL once it has any. They are kept, and shown as soon as they
// fit. An SVID that is on them is replaced as soon as the server gives another; until then it stays.
func (k *Keeper) Adopt(b *trust.Bundle) error { return k.adopt(b, false) }

// Enforce is Adopt for roots that do not vouch for the SVID in use any more, by the word of the authority and not of a server alone:
// that of a root that is tainted, say (decision D6). It works for no peer that knows, and must not keep us from knowing.
func (k *Keeper) Enforce(b *trust.Bundle) error { return k.adopt(b, true) }

func (k *Keeper) adopt(b *trust.Bundle, enforce bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if b.Of(k.config.ID.Domain()) == nil { // a migration makes another one of the authority's domains the first
		return fmt.Errorf("the bundle is of %s; expected %s", b.Domain(), k.config.ID.Domain())
	}
	if b.Generation() < k.roots && k.works() {
		return k.older(b)
	}
	if k.current == nil {
		k.adopted, k.roots = b, b.Generation()
		return nil
	}
	next, err := k.current.WithBundle(b, time.Now())
	if err != nil && !enforce {
		return &Unfit{err}
	}
	if err != nil {
		next = k.current
	}
	k.adopted, k.roots = b, b.Generation()
	k.swap(next, b)
	return nil
}

// works reports whether there is an SVID that has not ended. mu is held.
func (k *Keeper) works() bool { return k.current != nil && time.Now().Before(k.current.NotAfter()) }

func (k *Keeper) older(b *trust.Bundle) error {
	return trust.NewOlder(fmt.Sprintf("the roots are of generation %d of the bundle; those of generation %d are there already", b.Generation(), k.roots))
}

// Withheld says why CRLs that were adopted are not shown; "" if they are, or if there are none.
func (k *Keeper) Withheld() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.withheld
}

// newest returns the bundle to show with a new SVID: the newer of that which came with it and the one that there is; a change of
// roots can overtake an answer. An SVID that only roots vouch for which have been replaced is refused: a server that was asleep
// signed it (decision D4). mu is held.
//
// Roots of an answer are shown under the generation that Adopt took last, 0 before: what stands for a generation are its roots and
// its CRLs, and an answer has none of those (decision D22).
func (k *Keeper) newest(next *trust.Identity) (*trust.Bundle, error) {
	from := next.Bundle.Generation()
	if k.adopted != nil && from <= k.roots {
		_, err := next.WithBundle(k.adopted, time.Now())
		switch {
		case err == nil:
			return k.adopted, nil
		case from < k.roots && k.works():
			return nil, fmt.Errorf("the answer is refused: %w", k.older(next.Bundle))
		}
	}
	if k.adopted == nil {
		k.adopted = next.Bundle.WithGeneration(0)
	} else {
		k.adopted = next.Bundle.WithGeneration(k.adopted.Generation()).WithCRLs(k.adopted.CRLs())
	}
	k.roots = from
	return k.adopted, nil
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
