package authority

import (
	"context"
	"fmt"
)

// AttachLog lists a new issuance log in a document that has none. It must bear the document's log ID.
func AttachLog(ctx context.Context, c Config) error {
	data, version, err := c.Store.Load(ctx)
	if err != nil {
		return err
	}
	doc, err := DecodeDocument(data, version, c.Sealer)
	if err != nil {
		return err
	}
	if doc.Logs[0].Key != "" {
		return doc.CheckLog(c.IssuanceLog)
	}
	if c.IssuanceLog.ID != doc.LogID() {
		return fmt.Errorf("the issuance log %s is not of this authority, whose log ID is %d: name another folder in issuanceLog", c.IssuanceLog.Key, doc.LogID())
	}
	next, err := doc.Next(data)
	if err != nil {
		return err
	}
	next.Logs[0] = c.IssuanceLog
	if data, err = next.Encode(c.Sealer); err != nil {
		return err
	}
	return c.Store.Replace(ctx, version, next.Version, data)
}
