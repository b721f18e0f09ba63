// Package match owns which certificates the revocations in the authority document mean: it judges one certificate at a time, by what
// the audit log says of it.
//
// It refuses to judge the certificates that sign, and the servers' own: those are revoked by other means.
package match

import (
	"bytes"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/revoked"
	"github.com/chancery-project/chancery/trust"
)

// Predicates are revocations, arranged so that an entry finds its own fast.
type Predicates struct {
	All     []document.Revocation // in the order of the document
	ByID    map[string]int
	Serials map[string]int // of those by serial
	line    []trust.Domain
	ids     map[string][]int // by path
	nodes   map[[2]string][]int
	names   map[string]bool // of the nodes
	before  int             // of those by time alone, the one with the latest: it means what the others mean; -1: none
}

// Arrange arranges the revocations of a line of trust domains. An identity that is revoked in one of them is in all.
func Arrange(line []trust.Domain, all []document.Revocation) *Predicates {
	p := &Predicates{line: line, All: all, ByID: map[string]int{}, Serials: map[string]int{}, ids: map[string][]int{}, nodes: map[[2]string][]int{}, names: map[string]bool{}, before: -1}
	for i, r := range all {
		p.ByID[r.ID] = i
		switch {
		case r.Serial != "":
			p.Serials[r.Serial] = i
		case r.SPIFFEID != "":
			path := revoked.Path(r.SPIFFEID)
			p.ids[path] = append(p.ids[path], i)
		case r.Node != "":
			at := [2]string{r.Cluster, r.Node}
			p.nodes[at], p.names[r.Node] = append(p.nodes[at], i), true
		case p.before < 0 || r.IssuedBefore.After(*all[p.before].IssuedBefore):
			p.before = i
		}
	}
	return p
}

// Of reports whether the revocations are those of a line.
func (p *Predicates) Of(line []trust.Domain) bool { return slices.Equal(p.line, line) }

// NeedLog reports whether some mean certificates that only a log knows.
func (p *Predicates) NeedLog() bool { return len(p.All) > len(p.Serials) }

// Match returns the index of the first predicate that means the certificate of an intent, -1 for none. A node means what
// was issued to it until it was revoked: it may have new certificates.
func (p *Predicates) Match(e *audit.Record) int {
	if i, ok := p.Serials[e.Serial]; ok {
		return i
	}
	id, err := trust.ParseID(e.SPIFFEID)
	if err != nil || id.Reserved() || !slices.Contains(p.line, id.Domain()) { // a signing certificate, or the server's own
		return -1
	}
	for _, i := range p.ids[id.Path()] {
		if end := p.All[i].Restored; end == nil || !e.Time.After(*end) {
			return i
		}
	}
	if e.Requester.Node != "" {
		for _, i := range p.nodes[[2]string{e.Requester.Cluster, e.Requester.Node}] {
			r := &p.All[i]
			if r.IssuedBefore == nil && !e.Time.After(r.Time) || r.IssuedBefore != nil && e.Time.Before(*r.IssuedBefore) {
				return i
			}
		}
	}
	if p.before >= 0 && e.Time.Before(*p.All[p.before].IssuedBefore) {
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

// MayMatch reports, without decoding it, whether an entry may be the intent of a certificate that has not ended and that a
// predicate means.
func (p *Predicates) MayMatch(raw []byte, now time.Time) bool {
	if !bytes.Contains(raw, intentMark) {
		return false
	}
	if _, ok := p.Serials[string(textAfter(raw, serialMark))]; ok { // also of one that has ended: else it would pass for one that no log has
		return true
	}
	if t, err := time.Parse(time.RFC3339Nano, string(textAfter(raw, notAfterMark))); err == nil && !t.After(now) {
		return false
	}
	if p.before >= 0 {
		return true
	}
	node := textAfter(raw, nodeMark)
	return p.ids[revoked.Path(string(textAfter(raw, idMark)))] != nil || p.names[string(node)] || bytes.IndexByte(node, '\\') >= 0
}
