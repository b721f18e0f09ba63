package authority

import (
	"context"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/replica"
)

// This file is about the other replicas.

// Forget declares a replica dead, whose absence holds up others: nobody waits for it any more. What it issued stays valid. It
// leaves the document once all of that has ended; if it comes back before, with its log, it is as before.
func (a *Keeper) Forget(ctx context.Context, actor, name string) error {
	if name == a.Replica() {
		return fmt.Errorf("replica %s is this server, and alive", name)
	}
	return forget(a.config, actor, name, func(f func(next *Document) error) error { return a.Change(ctx, f) })
}

// Forget is Keeper.Forget where no server runs, which may be the one that is forgotten: one that lost its log or its mark is
// registered anew at its next start.
func Forget(ctx context.Context, c Config, actor, name string) error {
	return forget(c, actor, name, func(f func(next *Document) error) error { return replica.Change(ctx, c.Store, c.Sealer, f) })
}

func forget(c Config, actor, name string, change func(func(next *Document) error) error) error {
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: fmt.Sprintf("replica forget %.80q", name)}); err != nil {
		return err
	}
	return change(func(next *Document) error {
		fresh, err := next.Forget(name, time.Now())
		if err == nil && !fresh {
			err = replica.ErrUnchanged
		}
		return err
	})
}

// mindReplicas drops replicas that were declared dead, once what they issued has ended, and their notes. It is for the driver.
func (a *Keeper) mindReplicas(ctx context.Context, now time.Time) {
	if probe := (&document.Document{Logs: a.Document().Logs}); len(probe.DropDead(now)) == 0 && len(probe.Logs) == len(a.Document().Logs) {
		return
	}
	var gone []string
	err := a.Drive(ctx, func(next *Document) error {
		gone = next.DropDead(now)
		return nil
	})
	for _, name := range gone {
		if err == nil {
			err = a.config.Store.DropNote(ctx, name)
		}
	}
	if err != nil {
		a.config.Logger.Warn("replicas that were forgotten are not dropped", "reason", err.Error())
	}
}
