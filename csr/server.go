package csr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/handshakes"
	"github.com/chancery-project/chancery/csr/others"
	"github.com/chancery-project/chancery/trust"
)

// Bounds on what a connection may do.
const (
	maxMessage = 2 << 20  // of a known caller; so that a CSR that is too large gets an answer that says so
	maxHeaders = 64 << 10 // of one call, read before anybody is known: the largest token has 16 kB
	maxStreams = 250      // concurrent calls of one connection
	drainTime  = 10 * time.Second
	ageGrace   = 30 * time.Second // for calls of a connection that has reached its age
	// streamWorkers are goroutines that stay, with stacks grown already; calls beyond them get goroutines of their own.
	streamWorkers = 32
	// readBuffer and writeBuffer are of each connection: nearly all are silent, and with gRPC's 32 kB each ten thousand agents would hold
	// 320 MB of either. Reads are buffered by TLS already. Buffers for writes are shared, but when all agents are sent something, nearly
	// all connections write at one moment.
	readBuffer  = 1 << 10
	writeBuffer = 4 << 10
	// window is what a connection, and each of its calls, may send unread; more where a message is larger. gRPC's own grows by a measure
	// for which it sends a ping of its own along with nearly each message.
	window = 64 << 10
)

// Server serves a Service over gRPC with TLS 1.3.
type Server struct {
	grpc   *grpc.Server
	health *health.Server
	agents *agents.Hub
	delay  time.Duration // of the drain

	stopping atomic.Bool
}

// NewServer returns a server that presents own's certificate, and serves more APIs (see Service.Method) beside its own.
// Health says NOT_SERVING until SetReady.
func NewServer(s *Service, own func() *trust.Identity, more ...*grpc.ServiceDesc) *Server {
	g := grpc.NewServer(
		grpc.Creds(handshakes.Bound(credentials.NewTLS(trust.ServerTLS(own)), handshakes.Config{Refused: s.metrics.handshakes.Inc})),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(10*time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionIdle: 30 * time.Minute, Time: time.Minute, Timeout: 20 * time.Second, MaxConnectionAge: s.maxAge, MaxConnectionAgeGrace: ageGrace,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 20 * time.Second, PermitWithoutStream: true}),
		grpc.ReadBufferSize(readBuffer), grpc.WriteBufferSize(writeBuffer), grpc.StaticStreamWindowSize(window), grpc.StaticConnWindowSize(window),
		grpc.NumStreamWorkers(streamWorkers), grpc.ForceServerCodecV2(agents.NewCodec()),
		grpc.StreamInterceptor(s.recoverPanic),
		grpc.InTapHandle(others.Bound([]string{chanceryv1.Issuance_GetBundle_FullMethodName}, s.istioService().ServiceName, s.nativeService().ServiceName)),
	)
	h := health.NewServer()
	h.SetServingStatus("", healthpb.HealthCheckResponse_NOT_SERVING)
	healthpb.RegisterHealthServer(g, h)
	g.RegisterService(s.istioService(), nil)
	g.RegisterService(s.nativeService(), nil)
	for _, desc := range more {
		g.RegisterService(desc, nil)
	}
	reflection.Register(g)
	return &Server{grpc: g, health: h, agents: s.agents, delay: s.drainDelay}
}

// SetReady sets what the health service says.
func (s *Server) SetReady(ready bool) {
	st := healthpb.HealthCheckResponse_NOT_SERVING
	if ready {
		st = healthpb.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", st)
}

// Stopping reports whether the server has been told to stop. It may serve for some time yet, but should get nothing new.
func (s *Server) Stopping() bool { return s.stopping.Load() }

// Run serves on l until ctx ends. Then it is not ready, at once; serves on for the drain delay, so that balancers can take
// notice; and ends in order: agents with a stream are told to open another one elsewhere, all connections get a GOAWAY,
// calls under way finish within drainTime.
func (s *Server) Run(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() {
		s.stopping.Store(true)
		s.health.Shutdown()
		time.Sleep(s.delay)
		s.agents.Close()
		hard := time.AfterFunc(drainTime, s.grpc.Stop)
		defer hard.Stop()
		s.grpc.GracefulStop()
	})
	defer stop()
	if err := s.grpc.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) { // stopped before it began
		return fmt.Errorf("serving on %s: %w", l.Addr(), err)
	}
	return nil
}

// recoverPanic turns a bug met by one request into an error of that request.
func (s *Service) recoverPanic(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.metrics.panics.Inc()
			s.logger.Error("request ended in a panic", "method", info.FullMethod, "reason", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = status.Error(codes.Internal, "internal error; see the server's log")
		}
	}()
	return handle(srv, stream)
}
