// Package foreign owns what the authority document holds of a foreign trust domain: its bundle as it was last taken over, and the one before.
//
// It refuses a bundle whose sequence goes back, and knows of no network.
package foreign

import "time"

// Domain is a foreign trust domain, by whose roots its own identities are verified and nobody else's.
type Domain struct {
	Bundle   []byte    `json:"bundle"`             // SPIFFE bundle, as JSON, normalized
	Previous []byte    `json:"previous,omitempty"` // the one before it
	Since    time.Time `json:"since"`              // when it was taken over,
	Actor    string    `json:"actor"`              // and by whom: an admin, or the endpoint's URL
}
