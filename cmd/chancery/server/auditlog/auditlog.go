// Package auditlog owns what a running server does about its audit log beside writing it: opening it anew when it is told to, and finding out
// that it can be written again.
//
// It refuses to be waited for by anything that issues.
package auditlog

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
)

// Retry writes a line to a log that failed before: a server that is not ready gets no requests whose lines would
// show that the disk has room again. A disk that hangs holds it up, and nothing else.
func Retry(ctx context.Context, log *audit.Log, logger *slog.Logger) {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if log.Err() != nil && log.Append(audit.Record{Event: audit.Started, Detail: "the audit log can be written again"}) == nil {
			logger.Info("the audit log can be written again")
		}
	}
}

// Reopen opens the audit log anew on SIGHUP, for tools that move log files away.
func Reopen(ctx context.Context, log *audit.Log, logger *slog.Logger) error {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-hup:
			log.Reopen()
			logger.Info("audit log reopened")
		}
	}
}
