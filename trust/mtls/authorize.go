package mtls

import (
	"fmt"
	"slices"

	"github.com/chancery-project/chancery/trust"
)

// Authorizer says whether a peer is welcome, whose certificate has been verified; an error says why it is not. It is asked again while a connection
// lasts, from any goroutine.
type Authorizer func(peer trust.ID) error

// Anyone welcomes each peer of a trusted domain.
func Anyone() Authorizer { return func(trust.ID) error { return nil } }

// IDs welcomes the named peers.
func IDs(ids ...trust.ID) Authorizer {
	return Allowed(func() []trust.ID { return ids })
}

// Members welcomes the peers of the named trust domains.
func Members(domains ...trust.Domain) Authorizer {
	return func(peer trust.ID) error {
		if !slices.Contains(domains, peer.Domain()) {
			return fmt.Errorf("peer %s is of none of the trust domains that are welcome", peer)
		}
		return nil
	}
}

// Allowed welcomes the peers that a list has at that moment, such as the identities that a service runs as (secure naming). An empty list welcomes
// nobody.
func Allowed(list func() []trust.ID) Authorizer {
	return func(peer trust.ID) error {
		if !slices.Contains(list(), peer) {
			return fmt.Errorf("peer %s is none of those that are welcome", peer)
		}
		return nil
	}
}

// Equivalent welcomes whom another authorizer welcomes under any of the names that count as the same identity: where trust domains are migrated, a rule
// need not change with them.
func Equivalent(a trust.Aliases, to Authorizer) Authorizer {
	return func(peer trust.ID) error {
		err := to(peer)
		for _, id := range a.Equivalent(peer) {
			if err == nil {
				return nil
			}
			if to(id) == nil {
				return nil
			}
		}
		return err
	}
}

// Lookup returns the bundles of an authority (with its kin) and of federated trust domains, as they are at each call. Where both have one for a trust domain the
// authority's counts.
func Lookup(own func() *trust.Bundle, federated func() []*trust.Bundle) func(trust.Domain) *trust.Bundle {
	return func(d trust.Domain) *trust.Bundle {
		if b := own().Of(d); b != nil {
			return b
		}
		for _, b := range federated() {
			if b.Domain() == d {
				return b
			}
		}
		return nil
	}
}
