package federating

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// A server that has just started has not heard of the others yet: that long it waits for their word.
const (
	wordWait  = 5 * time.Second
	wordEvery = 100 * time.Millisecond
)

// allRead returns why there can be no foreign bundle in the document yet: a server of the version before would be shut out by it, in the
// middle of an update of all of them.
func (d *Desk) allRead(ctx context.Context) error {
	if d.config.Notes == nil {
		return nil
	}
	var less []string
	for deadline := time.Now().Add(wordWait); ; {
		if less = d.lagging(d.config.Authority.Document()); len(less) == 0 {
			return nil
		}
		if ctx.Err() != nil || !time.Now().Before(deadline) {
			return mayNotRead(less)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wordEvery):
		}
	}
}

func mayNotRead(less []string) error {
	return fmt.Errorf("replica %s does not say that it reads documents with foreign trust domains (format %d): update each server first, or, where one will not come back, `chancery replica forget NAME`",
		strings.Join(less, ", "), document.Format)
}

// lagging returns the other replicas that live and would be shut out by what is new in a document's format.
func (d *Desk) lagging(doc *document.Document) []string {
	if d.config.Notes == nil || doc.Needs() >= document.Format { // who cannot read that is shut out already
		return nil
	}
	var others []string
	for _, l := range doc.Live() {
		if l.Replica != d.config.Authority.Replica() {
			others = append(others, l.Replica)
		}
	}
	return board.Lagging(others, d.config.Notes(), document.Format)
}

// refuses is refuseOurs for a document that is about to be stored: a replica may have come since allRead.
func (d *Desk) refuses(next *document.Document, td trust.Domain) error {
	if less := d.lagging(next); len(less) > 0 {
		return mayNotRead(less)
	}
	return d.refuseOurs(next, td)
}
