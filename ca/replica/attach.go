package replica

import (
	"context"
	"fmt"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
)

// AttachLog lists a new issuance log in a document that has none for a replica. It must bear the replica's log ID.
func AttachLog(ctx context.Context, st store.Store, s *keys.Sealer, name string, have document.LogState) error {
	return Change(ctx, st, s, func(next *document.Document) error {
		own := next.Own(name, "")
		switch {
		case own == nil:
			return fmt.Errorf("the authority document lists no replica %s", name)
		case own.Key != "":
			if err := own.Check(have); err != nil {
				return err
			}
			return ErrUnchanged
		case have.ID != own.ID:
			return fmt.Errorf("the issuance log %s is not of this authority, whose log ID is %d: name another folder in issuanceLog", have.Key, own.ID)
		}
		own.Key = have.Key
		return nil
	})
}
