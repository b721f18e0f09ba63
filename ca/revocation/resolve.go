package revocation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
	"github.com/chancery-project/chancery/ca/revocation/match"
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

// errNoLog: the predicate cannot be resolved.
var errNoLog = errors.New("without an issuance log it is not known which certificates that means: set `issuanceLog` in the server's config, " +
	"run `chancery authority init` once, and start the server; what is issued from then on can be revoked so. A serial can be revoked without")

// scan gives each certificate in the log that a predicate means and that was not gone at a time, from an index on, and returns where
// the log ended.
func (m *Manager) scan(ctx context.Context, p *match.Predicates, from int64, since time.Time, each func(Certificate) error) (int64, error) {
	if m.config.Issuance == nil || len(p.All) == 0 {
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
	q := verify.Query{From: from, Keep: func(raw []byte) bool { return p.MayMatch(raw, alive) }}
	err = r.Search(ctx, q, func(f verify.Found) error {
		e := f.Entry
		i := p.Match(&e.Record)
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
