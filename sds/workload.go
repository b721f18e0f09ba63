package sds

import (
	"context"
	"path"
	"strings"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/sds/view"
)

// workloadService is the SPIFFE Workload API, X.509 profile. Each message on a stream is the full state, sent only
// when it differs from the one before.
type workloadService struct {
	workload.UnimplementedSpiffeWorkloadAPIServer
	*Server
}

// securityHeader must come with every request, so that a workload cannot be tricked into fetching for somebody else
// by a forged URL (SPIFFE Workload Endpoint, section 6.1).
const securityHeader = "workload.spiffe.io"

// guard lets through what the Workload API allows and this agent serves.
func guard(ctx context.Context, method string) error {
	if !strings.HasPrefix(method, "/"+workload.SpiffeWorkloadAPI_ServiceDesc.ServiceName+"/") {
		return nil
	}
	if v := metadata.ValueFromIncomingContext(ctx, securityHeader); len(v) != 1 || v[0] != "true" {
		return status.Errorf(codes.InvalidArgument, "metadata %q is missing; the SPIFFE Workload API requires it to be \"true\"", securityHeader)
	}
	if !strings.HasPrefix(path.Base(method), "FetchX509") {
		return status.Errorf(codes.Unimplemented, "%s: this agent serves the X.509 profile only (FetchX509SVID, FetchX509Bundles)", path.Base(method))
	}
	return nil
}

func guardUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := guard(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

func guardStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := guard(ss.Context(), info.FullMethod); err != nil {
		return err
	}
	return next(srv, ss)
}

// FetchX509SVID streams the caller's SVIDs. A caller to whom nothing has been issued yet waits; one that had SVIDs
// and loses the last of them gets PermissionDenied (Workload API section 4.1).
func (s *workloadService) FetchX509SVID(_ *workload.X509SVIDRequest, stream workload.SpiffeWorkloadAPI_FetchX509SVIDServer) error {
	return deliver(s.Server, stream, APIX509SVID, view.SVIDVersion, view.SVIDResponse)
}

// FetchX509Bundles streams the bundles of all trust domains that the caller may verify.
func (s *workloadService) FetchX509Bundles(_ *workload.X509BundlesRequest, stream workload.SpiffeWorkloadAPI_FetchX509BundlesServer) error {
	return deliver(s.Server, stream, APIX509Bundles, view.BundlesVersion, view.BundlesResponse)
}

// deliver sends the message that render makes of the view whenever its version changes; version is empty while there
// is nothing to send.
func deliver[T any](s *Server, stream grpc.ServerStreamingServer[T], api string, version func(*View) string, render func(*View) (*T, error)) error {
	sub, source, err := s.open(stream.Context(), api)
	if err != nil {
		return err
	}
	defer s.close(sub)
	sent := ""
	for {
		seen, changed := source()
		now, kept := version(seen), false
		switch {
		case now == "" && sent != "":
			return status.Error(codes.PermissionDenied, "no identity issued: all that was issued has been withdrawn")
		case now == sent:
		case api == APIX509SVID && !s.entered(sub, seen): // the caller keeps what it has
			kept = true
		default:
			msg, err := render(seen)
			if err != nil {
				s.cfg.Logger.Error("workload not served", "api", api, "uid", sub.peer.UID, "reason", err.Error())
				return status.Error(codes.Internal, "the agent cannot hand out this identity; its log says why")
			}
			if err := stream.Send(msg); err != nil {
				return err
			}
			s.cfg.Metrics.pushes.WithLabelValues(api).Inc()
		}
		if !kept {
			sent = now
		}
		if !kept && sent != "" {
			s.delivered(sub, sent, seen)
		}
		select {
		case <-changed:
		case <-sub.again():
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-s.stopping:
			return errStopping
		}
	}
}
