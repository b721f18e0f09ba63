package sds

import (
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/sds/view"
)

// workloadService is the SPIFFE Workload API, X.509 profile. Each message on a stream is the full state, sent only
// when it differs from the one before.
type workloadService struct {
	workload.UnimplementedSpiffeWorkloadAPIServer
	*Server
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
