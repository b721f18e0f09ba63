// Package others owns the bound on calls that are for anybody: of gRPC's own services, health and reflection, and of methods that do
// not exist, whose messages gRPC reads before it asks us, or without asking; and of those methods of ours that are open.
//
// It refuses nothing of our other methods: who calls them is known before a message is read.
package others

import (
	"context"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
)

// Max is how many such calls may be under way in a server, and how many of open methods.
const Max = 64

// Bound bounds all calls but those of our services, and among these those of the methods that are open to anybody. The latter are
// counted apart, so that neither keeps the other out.
func Bound(open []string, ours ...string) tap.ServerInHandle {
	slots, opened := make(chan struct{}, Max), make(chan struct{}, Max)
	return func(ctx context.Context, info *tap.Info) (context.Context, error) {
		if slices.Contains(open, info.FullMethodName) {
			return take(ctx, opened, "%d calls of this method are under way; try again later")
		}
		for _, service := range ours {
			if rest, ok := strings.CutPrefix(info.FullMethodName, "/"+service); ok && strings.HasPrefix(rest, "/") {
				return ctx, nil
			}
		}
		return take(ctx, slots, "%d calls of health and reflection are under way; try again later")
	}
}

// take takes a slot until the call ends.
func take(ctx context.Context, slots chan struct{}, full string) (context.Context, error) {
	select {
	case slots <- struct{}{}:
		context.AfterFunc(ctx, func() { <-slots })
		return ctx, nil
	default:
		return nil, status.Errorf(codes.ResourceExhausted, full, Max)
	}
}
