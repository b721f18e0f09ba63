package process

import (
	"context"
	"errors"
	"log/slog"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// SayStopping logs once ctx ends, so that a log tells a process that was told to end from one that was killed. The caller
// calls what it returns at its own end: the line is in the log then.
func SayStopping(ctx context.Context, logger *slog.Logger) (end func()) {
	said := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		logger.Info("stopping", "reason", context.Cause(ctx).Error())
		close(said)
	})
	return func() {
		if !stop() {
			<-said
		}
	}
}

// Ended returns the error of a command that runs until ctx ends: once that is so, errors that only say that it was
// ended, or that it listens no more, are none.
func Ended(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	for _, is := range []error{context.Canceled, net.ErrClosed, grpc.ErrServerStopped} {
		if errors.Is(err, is) {
			return nil
		}
	}
	if status.Code(err) == codes.Canceled {
		return nil
	}
	return err
}
