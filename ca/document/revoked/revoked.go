// Package revoked owns what a revocation is (decision D13): a predicate that says which certificates are meant, who revoked them and
// until when that stands, and what the document says of CRLs.
//
// It refuses predicates that mean nothing, that no CRL could list, or that name identities of another authority. An identity that is revoked
// in one trust domain is in all of its line: the same workload has it.
package revoked

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/trust"
)

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

// Path returns the path of a SPIFFE ID, by which an identity is the same in each trust domain of a line. Of what is no SPIFFE ID, all.
func Path(id string) string {
	rest, ok := strings.CutPrefix(id, "spiffe://")
	if at := strings.IndexByte(rest, '/'); ok && at >= 0 {
		return rest[at:]
	}
	return id
}

// Names reports whether a revocation is of an identity, in whichever trust domain of its line.
func (p *Predicate) Names(id trust.ID) bool { return p.SPIFFEID != "" && Path(p.SPIFFEID) == id.Path() }

func domains(line []trust.Domain) string {
	var names []string
	for _, d := range line {
		names = append(names, d.String())
	}
	return strings.Join(names, " or ")
}

// Check says what is wrong with a predicate for a line of trust domains, the present one first.
func (p *Predicate) Check(line []trust.Domain, now time.Time) error {
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
		if !slices.Contains(line, id.Domain()) || id.Reserved() {
			return fmt.Errorf("%s is not a workload's identity in trust domain %s", id, domains(line))
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

// Equal reports whether two predicates mean the same. An identity is the same in each trust domain of its line.
func (p *Predicate) Equal(o *Predicate) bool {
	a, b := *p, *o
	a.IssuedBefore, b.IssuedBefore = nil, nil
	a.SPIFFEID, b.SPIFFEID = Path(a.SPIFFEID), Path(b.SPIFFEID)
	return a == b && (p.IssuedBefore == nil) == (o.IssuedBefore == nil) && (p.IssuedBefore == nil || p.IssuedBefore.Equal(*o.IssuedBefore))
}
