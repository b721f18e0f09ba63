package authority

import (
	"context"
	"errors"
	"fmt"
)

// checkLog holds the log that a server writes to the one that the document lists: a log that is lost, or that another
// one was put in place of, must not pass for the whole history.
func (d *Document) checkLog(have LogState) error {
	listed := d.Logs[0]
	switch {
	case listed.Key == have.Key && (have.Key == "" || have.ID == listed.ID):
		return nil
	case have.Key == "":
		return fmt.Errorf("the authority document lists the issuance log %s: set issuanceLog in the config to its folder; what is issued would be missing from it", listed.Key)
	case listed.Key == "":
		return errors.New("the authority document lists no issuance log yet: run `chancery authority init -c FILE` once")
	}
	return fmt.Errorf("the issuance log is %s, and the authority document lists %s: put the folder of that one back", have.Key, listed.Key)
}

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
		return doc.checkLog(c.IssuanceLog)
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
	return c.Store.Replace(ctx, version, data)
}
