package document

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/trust"
)

// Revocations are stored as predicates (decision D13); package revocation finds what they mean.

// MaxRevocations bounds those that a trust domain has at a time.
const MaxRevocations = 10_000

// maxActor bounds the name of who revoked.
const maxActor = 256

// Predicate says which certificates are revoked: exactly one of serial, SPIFFE ID, or time and node, which may be combined.
type Predicate struct {
	Serial       string     `json:"serial,omitempty"` // hex, lower case
	SPIFFEID     string     `json:"spiffeId,omitempty"`
	IssuedBefore *time.Time `json:"issuedBefore,omitempty"`
	Cluster      string     `json:"cluster,omitempty"` // of the node
	Node         string     `json:"node,omitempty"`
}

// Revocation is a predicate that was revoked.
type Revocation struct {
	ID string `json:"id"`
	Predicate
	Reason   int        `json:"reason,omitempty"` // CRLReason of RFC 5280 section 5.3.1
	Time     time.Time  `json:"time"`
	Actor    string     `json:"actor"`
	Restored *time.Time `json:"restored,omitempty"` // when the identity was allowed new certificates
	// Until is when the last certificate that it can mean has ended, after which it is forgotten. Nil: while it stands.
	Until *time.Time `json:"until,omitempty"`
	// Version of the document that had it first: a log that was searched for an earlier one may have more. Zero for those of
	// format 1.
	Version uint64 `json:"version,omitempty"`
}

// CRL says what the CRLs of one number are, those of all issuers. All replicas sign the same by it: a number stands for one
// content (RFC 5280 section 5.2.3), whoever signed, so that verifiers may ask this replica now and that one then.
type CRL struct {
	Number uint64    `json:"number"`
	Time   time.Time `json:"time"`  // of this number: certificates that had ended by then are not listed
	Until  time.Time `json:"until"` // nextUpdate, unless the issuer ends before
	// Content is a hash of the certificates on them; see package revocation. Empty: unknown.
	Content string `json:"content,omitempty"`
}

// LastCRL returns what the last CRLs are. Without a content only the number counts.
func (s *DomainState) LastCRL() CRL {
	if s.CRL == nil {
		return CRL{Number: s.CRLNumber}
	}
	return *s.CRL
}

// NextCRL takes the next number, for CRLs that are otherwise as c says.
func (s *DomainState) NextCRL(c CRL) CRL {
	c.Number = s.LastCRL().Number + 1
	s.CRL, s.CRLNumber = &c, 0
	return c
}

// endedStays is how long the revocation of a certificate that has ended stays, so that clocks which are behind find it on
// a CRL.
const endedStays = time.Hour

// NeedsResolved returns the version of the document from which on a log must have been searched to have all that is revoked.
func (s *DomainState) NeedsResolved() uint64 {
	var last uint64
	for _, r := range s.Revocations {
		last = max(last, r.Version)
	}
	return last
}

// Check says what is wrong with a predicate for a trust domain.
func (p *Predicate) Check(td trust.Domain, now time.Time) error {
	kinds := 0
	for _, set := range []bool{p.Serial != "", p.SPIFFEID != "", p.IssuedBefore != nil || p.Node != ""} {
		if set {
			kinds++
		}
	}
	if kinds != 1 {
		return errors.New("give exactly one of a serial, a SPIFFE ID, or a time and a node, of which one is enough")
	}
	switch {
	case p.Serial != "":
		b, err := hex.DecodeString(p.Serial)
		switch {
		case err != nil || len(b) == 0 || len(b) > 20 || b[0] == 0 || strings.ToLower(p.Serial) != p.Serial:
			return fmt.Errorf("serial %.60q should be hex in lower case, of 1 to 20 bytes, without zeros in front", p.Serial)
		case !p.listable(): // stored, it would stop every CRL
			return fmt.Errorf("serial %s can be no certificate's: one of 20 bytes begins with a digit from 0 to 7 (RFC 5280 4.1.2.2)", p.Serial)
		}
	case p.SPIFFEID != "":
		id, err := trust.ParseID(p.SPIFFEID)
		if err != nil {
			return err
		}
		if id.Domain() != td || id.Reserved() {
			return fmt.Errorf("%s is not a workload's identity in trust domain %s", id, td)
		}
	case p.IssuedBefore != nil && p.IssuedBefore.After(now):
		return fmt.Errorf("%s lies in the future; only what was issued can be revoked by time", p.IssuedBefore.UTC().Format(time.RFC3339))
	case p.Node != "" && (len(p.Node) > 253 || p.Cluster == "" || len(p.Cluster) > 253):
		return errors.New("a node is named by its cluster and its name, each of at most 253 bytes")
	}
	return nil
}

// listable reports whether a CRL can list the serial: as a number it has at most 20 octets, of which the first bit is its sign.
func (p *Predicate) listable() bool { return len(p.Serial) < 40 || p.Serial[0] < '8' }

// String says what is revoked.
func (p *Predicate) String() string {
	var words []string
	if p.Serial != "" {
		words = append(words, "serial "+p.Serial)
	}
	if p.SPIFFEID != "" {
		words = append(words, p.SPIFFEID)
	}
	if p.Node != "" {
		words = append(words, "node "+p.Cluster+"/"+p.Node)
	}
	if p.IssuedBefore != nil {
		words = append(words, "issued before "+p.IssuedBefore.UTC().Format(time.RFC3339Nano))
	}
	return strings.Join(words, ", ")
}

func (p *Predicate) equal(o *Predicate) bool {
	a, b := *p, *o
	a.IssuedBefore, b.IssuedBefore = nil, nil
	return a == b && (p.IssuedBefore == nil) == (o.IssuedBefore == nil) && (p.IssuedBefore == nil || p.IssuedBefore.Equal(*o.IssuedBefore))
}

// Revocations returns those of a trust domain. Callers must not change them.
func (d *Document) Revocations(td trust.Domain) []Revocation {
	if state := d.Domains[td.String()]; state != nil {
		return state.Revocations
	}
	return nil
}

// dropOver forgets revocations of certificates that have all ended.
func (s *DomainState) dropOver(now time.Time) {
	kept := s.Revocations[:0]
	for _, r := range s.Revocations {
		if r.Until == nil || now.Before(r.Until.Add(endedStays)) {
			kept = append(kept, r)
		}
	}
	s.Revocations = kept
}

// Revoke adds a revocation and gives it an ID. One that stands already is returned as it is.
func (d *Document) Revoke(td trust.Domain, r Revocation) (Revocation, error) {
	state := d.State(td)
	state.dropOver(r.Time)
	for _, have := range state.Revocations {
		// A node alone is bound to the moment: it means more now than then.
		if have.Predicate.equal(&r.Predicate) && have.Restored == nil && (r.Node == "" || r.IssuedBefore != nil) {
			return have, nil
		}
	}
	if len(r.Actor) > maxActor {
		return r, fmt.Errorf("the actor's name has %d bytes; at most %d are kept", len(r.Actor), maxActor)
	}
	if len(state.Revocations) >= MaxRevocations {
		return r, fmt.Errorf("there are %d revocations already, and no more fit: those by serial, node and time are forgotten once the certificates "+
			"have ended, those of an identity some time after `chancery restore`", len(state.Revocations))
	}
	b := make([]byte, 8)
	rand.Read(b) // never fails
	r.ID, r.Version = hex.EncodeToString(b), d.Version
	state.Revocations = append(state.Revocations, r)
	return r, nil
}

// Restore ends the revocation of an identity.
func (d *Document) Restore(td trust.Domain, id trust.ID, now time.Time) error {
	until := now.Add(ca.LeafTTLLimit)
	found := false
	state := d.State(td)
	for i := range state.Revocations {
		if r := &state.Revocations[i]; r.SPIFFEID == id.String() && r.Restored == nil {
			r.Restored, r.Until, found = &now, &until, true
		}
	}
	if !found {
		return fmt.Errorf("%s is not revoked; `chancery revoke list` prints what is", id)
	}
	return nil
}
