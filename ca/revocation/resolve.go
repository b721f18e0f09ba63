package revocation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
	"github.com/chancery-project/chancery/trust"
)

// Certificate is one that a revocation means.
type Certificate struct {
	Serial        string // hex
	SPIFFEID      string // empty, with those below, for a serial that no log has
	Cluster, Node string
	Issuer        string // ID of its issuer; empty: not known
	NotAfter      time.Time
	Revocation    int // index of the first predicate that means it
}

// gone reports whether a certificate has ended by all clocks.
func (c *Certificate) gone(now time.Time) bool { return now.After(c.NotAfter.Add(endedStays)) }

// predicates are revocations, arranged so that an entry finds its own fast.
type predicates struct {
	domain  trust.Domain
	all     []authority.Revocation
	byID    map[string]int
	serials map[string]int
	ids     map[string][]int
	nodes   map[[2]string][]int
	names   map[string]bool // of the nodes
	before  int             // of those by time alone, the one with the latest: it means what the others mean; -1: none
}

func arrange(td trust.Domain, all []authority.Revocation) *predicates {
	p := &predicates{domain: td, all: all, byID: map[string]int{}, serials: map[string]int{}, ids: map[string][]int{}, nodes: map[[2]string][]int{}, names: map[string]bool{}, before: -1}
	for i, r := range all {
		p.byID[r.ID] = i
		switch {
		case r.Serial != "":
			p.serials[r.Serial] = i
		case r.SPIFFEID != "":
			p.ids[r.SPIFFEID] = append(p.ids[r.SPIFFEID], i)
		case r.Node != "":
			at := [2]string{r.Cluster, r.Node}
			p.nodes[at], p.names[r.Node] = append(p.nodes[at], i), true
		case p.before < 0 || r.IssuedBefore.After(*all[p.before].IssuedBefore):
			p.before = i
		}
	}
	return p
}

// needLog reports whether some mean certificates that only a log knows.
func (p *predicates) needLog() bool { return len(p.all) > len(p.serials) }

// match returns the index of the first predicate that means the certificate of an intent, -1 for none. A node means what
// was issued to it until it was revoked: it may have new certificates.
func (p *predicates) match(e *audit.Record) int {
	if i, ok := p.serials[e.Serial]; ok {
		return i
	}
	id, err := trust.ParseID(e.SPIFFEID)
	if err != nil || id.Reserved() || id.Domain() != p.domain { // a signing certificate, or the server's own
		return -1
	}
	for _, i := range p.ids[e.SPIFFEID] {
		if end := p.all[i].Restored; end == nil || !e.Time.After(*end) {
			return i
		}
	}
	if e.Requester.Node != "" {
		for _, i := range p.nodes[[2]string{e.Requester.Cluster, e.Requester.Node}] {
			r := &p.all[i]
			if r.IssuedBefore == nil && !e.Time.After(r.Time) || r.IssuedBefore != nil && e.Time.Before(*r.IssuedBefore) {
				return i
			}
		}
	}
	if p.before >= 0 && e.Time.Before(*p.all[p.before].IssuedBefore) {
		return p.before
	}
	return -1
}

// Marks of the fields that matter. Inside a JSON text their quotes would be escaped, so none is found there; of two fields
// with one name the certificate's own comes before its requester's.
var (
	intentMark   = []byte(`"event":"intent"`)
	notAfterMark = []byte(`"not_after":"`)
	serialMark   = []byte(`"serial":"`)
	idMark       = []byte(`"spiffe_id":"`)
	nodeMark     = []byte(`"node":"`)
)

// textAfter returns the text that follows a mark.
func textAfter(raw, mark []byte) []byte {
	_, rest, _ := bytes.Cut(raw, mark)
	text, _, _ := bytes.Cut(rest, []byte{'"'})
	return text
}

// mayMatch reports, without decoding it, whether an entry may be the intent of a certificate that has not ended and that a
// predicate means.
func (p *predicates) mayMatch(raw []byte, now time.Time) bool {
	if !bytes.Contains(raw, intentMark) {
		return false
	}
	if _, ok := p.serials[string(textAfter(raw, serialMark))]; ok { // also of one that has ended: else it would pass for one that no log has
		return true
	}
	if t, err := time.Parse(time.RFC3339Nano, string(textAfter(raw, notAfterMark))); err == nil && !t.After(now) {
		return false
	}
	if p.before >= 0 {
		return true
	}
	node := textAfter(raw, nodeMark)
	return p.ids[string(textAfter(raw, idMark))] != nil || p.names[string(node)] || bytes.IndexByte(node, '\\') >= 0
}

// errNoLog: the predicate cannot be resolved.
var errNoLog = errors.New("without an issuance log it is not known which certificates that means: set `issuanceLog` in the server's config, " +
	"run `chancery authority init` once, and start the server; what is issued from then on can be revoked so. A serial can be revoked without")

// scan gives each certificate in the log that a predicate means and that was not gone at a time, from an index on, and returns where
// the log ended.
func (m *Manager) scan(ctx context.Context, p *predicates, from int64, since time.Time, each func(Certificate) error) (int64, error) {
	if m.config.Issuance == nil || len(p.all) == 0 {
		return 0, nil
	}
	r, err := verify.OpenReader(m.config.Issuance.Dir(), m.config.Issuance.PublicKey())
	if err != nil {
		return from, fmt.Errorf("finding revoked certificates: %w", err)
	}
	now := time.Now()
	if from == 0 {
		// An hour for clocks that were set.
		if from, err = r.IndexOf(now.Add(-ca.LeafTTLLimit - time.Hour)); err != nil {
			return 0, fmt.Errorf("finding revoked certificates: %w", err)
		}
	}
	alive := since.Add(-endedStays)
	q := verify.Query{From: from, Keep: func(raw []byte) bool { return p.mayMatch(raw, alive) }}
	err = r.Search(ctx, q, func(f verify.Found) error {
		e := f.Entry
		i := p.match(&e.Record)
		if i < 0 || e.Event != audit.Intent || e.NotAfter == nil {
			return nil
		}
		return each(Certificate{
			Serial: e.Serial, SPIFFEID: e.SPIFFEID, Cluster: e.Requester.Cluster, Node: e.Requester.Node, Issuer: e.Issuer,
			NotAfter: e.NotAfter.UTC().Truncate(time.Second), Revocation: i,
		})
	})
	if err != nil {
		return from, fmt.Errorf("finding revoked certificates: %w", err)
	}
	return r.Checkpoint.Size, nil
}
