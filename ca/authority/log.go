package authority

import (
	"context"
	"fmt"

	"github.com/chancery-project/chancery/ca/replica"
)

// AttachLog lists a new issuance log in a document that has none for this server. It must bear the server's log ID.
func AttachLog(ctx context.Context, c Config) error {
	return replica.Change(ctx, c.Store, c.Sealer, func(next *Document) error {
		own := next.Own(c.name(), "")
		switch {
		case own == nil:
			return fmt.Errorf("the authority document lists no replica %s", c.name())
		case own.Key != "":
			if err := own.Check(c.IssuanceLog); err != nil {
				return err
			}
			return replica.ErrUnchanged
		case c.IssuanceLog.ID != own.ID:
			return fmt.Errorf("the issuance log %s is not of this authority, whose log ID is %d: name another folder in issuanceLog", c.IssuanceLog.Key, own.ID)
		}
		own.Key = c.IssuanceLog.Key
		return nil
	})
}

// Forget is Hold.Forget where no server runs, which may be the one that is forgotten: one that lost its log or its mark is
// registered anew at its next start.
func Forget(ctx context.Context, c Config, actor, name string) error {
	return replica.Forget(ctx, c.Store, c.Sealer, c.Log, actor, name)
}
