package revocation

import (
	"encoding/hex"
	"math/big"
)

// Set is what is revoked at a moment, for the way of each request. It is immutable; the nil Set is empty.
type Set struct {
	identities map[string]bool
	serials    map[string]bool // hex
	complete   bool            // false until the issuance log was read after a start
}

// NewSet returns a set of identities and serials (hex). It is complete if no other serial can turn out to be revoked.
func NewSet(identities, serials []string, complete bool) *Set {
	s := &Set{identities: map[string]bool{}, serials: map[string]bool{}, complete: complete}
	for _, id := range identities {
		s.identities[id] = true
	}
	for _, x := range serials {
		s.serials[x] = true
	}
	return s
}

// Identity reports whether an identity gets no certificates.
func (s *Set) Identity(id string) bool { return s != nil && s.identities[id] }

// Serial reports whether a certificate is revoked; sure is false while that cannot be told yet.
func (s *Set) Serial(serial *big.Int) (revoked, sure bool) {
	if s == nil {
		return false, true
	}
	return s.serials[hex.EncodeToString(serial.Bytes())], s.complete
}
