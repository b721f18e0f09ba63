// Package others owns the bound on calls of gRPC's own services, health and reflection, and of methods that do not exist. They
// are for anybody, and gRPC reads their messages before it asks us, or without asking.
//
// It refuses nothing of our own methods: who calls them is known before a message is read.
package others

import (
	"context"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
)

// Max is how many such calls may be under way in a server.
const Max = 64

// Bound bounds all calls but those of the services named.
func Bound(ours ...string) tap.ServerInHandle {
	slots := make(chan struct{}, Max)
	return func(ctx context.Context, info *tap.Info) (context.Context, error) {
		for _, service := range ours {
			if rest, ok := strings.CutPrefix(info.FullMethodName, "/"+service); ok && strings.HasPrefix(rest, "/") {
				return ctx, nil
			}
		}
		select {
		case slots <- struct{}{}:
			context.AfterFunc(ctx, func() { <-slots })
			return ctx, nil
		default:
			return nil, status.Errorf(codes.ResourceExhausted, "%d calls of health and reflection are under way; try again later", Max)
		}
	}
}
