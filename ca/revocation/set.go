package revocation

import (
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"math/big"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document/revoked"
	"github.com/chancery-project/chancery/ca/revocation/match"
)

// Set is what is revoked at a moment, for the way of each request. It is immutable; the nil Set is empty.
type Set struct {
	identities map[string]bool   // by path: an identity is the same in each trust domain of its line
	serials    map[string]bool   // hex
	complete   bool              // false until the issuance log was read after a start
	behind     map[uint32]bool   // IDs of logs that nobody has searched for all that is revoked
	predicates *match.Predicates // by which their certificates are judged
}

// NewSet returns a set of identities and serials (hex). It is complete if no other serial can turn out to be revoked.
func NewSet(identities, serials []string, complete bool) *Set {
	s := &Set{identities: map[string]bool{}, serials: map[string]bool{}, complete: complete}
	for _, id := range identities {
		s.identities[revoked.Path(id)] = true
	}
	for _, x := range serials {
		s.serials[x] = true
	}
	return s
}

// Identity reports whether an identity gets no certificates, of whichever trust domain of the authority's.
func (s *Set) Identity(id string) bool {
	return s != nil && len(s.identities) > 0 && s.identities[revoked.Path(id)]
}

// Serial reports whether a certificate is revoked; sure is false while that cannot be told yet.
func (s *Set) Serial(serial *big.Int) (is, sure bool) {
	if s == nil {
		return false, true
	}
	return s.serials[hex.EncodeToString(serial.Bytes())], s.complete
}

// Certificate is Serial for a certificate that is at hand: one from a log that nobody has searched yet, as that of a replica which is
// down, is judged by what it says of itself. Its time is that from which on it is valid, so that too much rather than too little
// counts as revoked, by a minute or so.
func (s *Set) Certificate(c *x509.Certificate) (is, sure bool) {
	is, sure = s.Serial(c.SerialNumber)
	serial := c.SerialNumber.Bytes()
	if is || s == nil || len(serial) < 4 || !s.behind[binary.BigEndian.Uint32(serial)] || len(c.URIs) != 1 {
		return is, sure
	}
	e := audit.Record{Serial: hex.EncodeToString(serial), SPIFFEID: c.URIs[0].String(), Time: c.NotBefore}
	if at, err := ca.AttestationOf(c); err == nil && at != nil {
		e.Requester.Cluster, e.Requester.Node = at.Cluster, at.Node
	}
	return s.predicates.Match(&e) >= 0, sure
}
