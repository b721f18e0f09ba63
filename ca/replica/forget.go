package replica

import (
	"context"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
)

// Forget declares another replica dead, whose absence holds up others: nobody waits for it any more. What it issued stays valid. It
// leaves the document once all of that has ended; if it comes back before, with its log, it is as before. Who asked goes into the
// audit log first.
func (h *Hold) Forget(ctx context.Context, actor, name string) error {
	if name == h.config.Name {
		return fmt.Errorf("replica %s is this server, and alive", name)
	}
	if err := noteForget(h.config.Log, actor, name); err != nil {
		return err
	}
	return h.Change(ctx, func(next *document.Document) error { return forget(next, name) })
}

// Forget is Hold.Forget for who has no hold: where no server runs, it may be the one that is forgotten.
func Forget(ctx context.Context, st store.Store, s *keys.Sealer, log *audit.Log, actor, name string) error {
	if err := noteForget(log, actor, name); err != nil {
		return err
	}
	return Change(ctx, st, s, func(next *document.Document) error { return forget(next, name) })
}

func noteForget(log *audit.Log, actor, name string) error {
	return log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: fmt.Sprintf("replica forget %.80q", name)})
}

func forget(next *document.Document, name string) error {
	fresh, err := next.Forget(name, time.Now())
	if err == nil && !fresh {
		err = ErrUnchanged
	}
	return err
}

// DropDead drops replicas that were declared dead, once what they issued has ended, and their notes. It is for the driver.
func (h *Hold) DropDead(ctx context.Context, now time.Time) {
	doc := h.Document()
	if probe := (&document.Document{Logs: doc.Logs}); len(probe.DropDead(now)) == 0 && len(probe.Logs) == len(doc.Logs) {
		return
	}
	var gone []string
	err := h.Drive(ctx, func(next *document.Document) error {
		gone = next.DropDead(now)
		return nil
	})
	for _, name := range gone {
		if err == nil {
			err = h.config.Store.DropNote(ctx, name)
		}
	}
	if err != nil {
		h.config.Logger.Warn("replicas that were forgotten are not dropped", "reason", err.Error())
	}
}
