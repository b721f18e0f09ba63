package held

import (
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// Over reports whether no replica can sign with what a document calls active.
func Over(doc *document.Document, td trust.Domain, now time.Time) bool {
	x, err := doc.Active(td, document.KindIssuer)
	return err != nil || x.Ended(now)
}

// HalfOver reports whether half of the active issuer's life is over.
func HalfOver(doc *document.Document, td trust.Domain, now time.Time) bool {
	x, err := doc.Active(td, document.KindIssuer)
	if err != nil {
		return false
	}
	begin, life, err := x.Life()
	return err == nil && now.Sub(begin) > life/2
}
