package socket

import (
	"context"
	"path"
	"strings"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// SecurityHeader must come with every request, so that a workload cannot be tricked into fetching for somebody else
// by a forged URL (SPIFFE Workload Endpoint, section 6.1).
const SecurityHeader = "workload.spiffe.io"

// guard lets through what the Workload API allows and this agent serves.
func guard(ctx context.Context, method string) error {
	if !strings.HasPrefix(method, "/"+workload.SpiffeWorkloadAPI_ServiceDesc.ServiceName+"/") {
		return nil
	}
	if v := metadata.ValueFromIncomingContext(ctx, SecurityHeader); len(v) != 1 || v[0] != "true" {
		return status.Errorf(codes.InvalidArgument, "metadata %q is missing; the SPIFFE Workload API requires it to be \"true\"", SecurityHeader)
	}
	if !strings.HasPrefix(path.Base(method), "FetchX509") {
		return status.Errorf(codes.Unimplemented, "%s: this agent serves the X.509 profile only (FetchX509SVID, FetchX509Bundles)", path.Base(method))
	}
	return nil
}

// GuardUnary is the guard of calls.
func GuardUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := guard(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

// GuardStream is the guard of streams.
func GuardStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := guard(ss.Context(), info.FullMethod); err != nil {
		return err
	}
	return next(srv, ss)
}
