package revoking

import (
	"context"
	"encoding/hex"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/csr/evidence"
)

// This file is about the consumers of this server: what it knows of them goes into its note, and they hear that they should leave an issuer.

// reissueRate is how many SVIDs a second this server gives its agents when all of them are to be replaced: 500, with what it takes until
// the first and from the last. It leaves room for new pods.
const reissueRate = 600

// Consumers returns what is known of those who have certificates of this server.
func (d Desk) Consumers() *evidence.Ledger { return d.ledger }

// consumers says what the ledger is made of.
func (d *Desk) consumers() evidence.Config {
	c := evidence.Config{
		Board: d.config.Board, Life: ca.DefaultTTL, MaxLife: ca.DefaultMaxTTL, Logger: d.config.Logger,
		Served: !d.config.Authority.First(), Line: d.config.Authority.Domain(),
	}
	c.Kin = func() bool {
		b, err := d.source.Bundle()
		return err == nil && len(b.Kin()) > 0
	}
	if p := d.config.Profile; p != nil {
		c.Life, c.MaxLife = p.DefaultTTL(), p.MaxTTL()
	}
	if d.config.Leaf != nil {
		c.Own = func() (string, time.Time) {
			leaf := d.config.Leaf()
			if leaf == nil {
				return "", time.Time{}
			}
			return hex.EncodeToString(leaf.AuthorityKeyId), leaf.NotAfter
		}
	}
	return c
}

// acknowledge says in the own note that this replica works by a document, and what it knows of its consumers for what that document asks.
func (d *Desk) acknowledge(ctx context.Context, doc *authority.Document) error {
	state, since := doc.Domains[d.config.Domain.String()], uint64(0)
	if state.Rotation != nil {
		since = state.Rotation.Version
	}
	return d.ledger.Acknowledge(ctx, doc.Version, since, state.Goal())
}

// reissue has agents replace what they have of some issuers, spread over a time.
func (d *Desk) reissue(leave []string) *chanceryv1.Reissue {
	var ids [][]byte
	for _, id := range leave {
		if raw, err := hex.DecodeString(id); err == nil {
			ids = append(ids, raw)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	n, _ := d.hub.Counts()
	return &chanceryv1.Reissue{Issuers: ids, Within: durationpb.New(max(time.Second, time.Duration(n)*time.Second/reissueRate))}
}
