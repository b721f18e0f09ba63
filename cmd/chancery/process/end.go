package process

import (
	"context"
	"errors"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

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
