package sds

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/sds/consumers"
	"github.com/chancery-project/chancery/sds/files"
	"github.com/chancery-project/chancery/sds/holds"
	"github.com/chancery-project/chancery/sds/secret"
	"github.com/chancery-project/chancery/sds/socket"
	"github.com/chancery-project/chancery/sds/wake"
)

// drainTimeout bounds how long clients that do not read can hold up the end of Run.
const drainTimeout = 5 * time.Second

// Config is what a server needs.
type Config struct {
	// Attest says who a peer is. Required.
	Attest Attest

	// Files lists the directories whose files file-cert: and file-root: names may name. Every caller that Attest
	// accepts can read the keys in them. None: such names are unknown.
	Files []string

	// Consumers returns the table in which a caller is noted before it gets an SVID (decision D1). Nil, or a nil table: it is noted
	// nowhere.
	Consumers func(Peer) *consumers.Table

	// Services is told which services are asked for by name; see View.Asks. May be nil.
	Services holds.Services

	Logger  *slog.Logger // nil: nothing is logged
	Metrics *Metrics     // nil: nothing is counted
}

// Server serves views on a socket. Its methods are safe for concurrent use.
type Server struct {
	cfg   Config
	files *files.Watcher
	holds holds.Holds
	cache secret.Cache

	wakes    wake.Hub      // what SDS streams wait on for changes of their views
	stopping chan struct{} // closed when Run's context ends; streams end then
	ran      chan struct{} // full once Run has been called

	mu        sync.Mutex // guards streams, processes, stopped, and adding to workloads
	streams   map[*subscription]struct{}
	processes map[consumers.Process]map[*subscription]struct{} // the SDS streams of each
	stopped   bool                                             // no stream may open any more
	workloads sync.WaitGroup                                   // open streams of the Workload API
}

// NewServer returns a server that does nothing until Run.
func NewServer(cfg Config) (*Server, error) {
	if cfg.Attest == nil {
		return nil, errors.New("sds server: Attest is missing")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics(nil)
	}
	f, err := files.New(files.Config{Dirs: cfg.Files, Logger: cfg.Logger})
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg:      cfg,
		files:    f,
		holds:    holds.Holds{Files: f, Services: cfg.Services, Logger: cfg.Logger},
		stopping: make(chan struct{}),
		ran:      make(chan struct{}, 1),
		streams:  make(map[*subscription]struct{}),

		processes: make(map[consumers.Process]map[*subscription]struct{}),
	}
	return s, nil
}

// Run serves on ln, which must be a Unix socket (see Listen), until ctx ends or the listener fails; it closes ln. At
// the end clients get Unavailable, which they answer by coming back. A server runs once.
func (s *Server) Run(ctx context.Context, ln net.Listener) error {
	return s.serve(ctx, ln, socket.Credentials{Limit: socket.NewLimit()})
}

func (s *Server) serve(ctx context.Context, ln net.Listener, creds credentials.TransportCredentials) error {
	select {
	case s.ran <- struct{}{}:
	default:
		return errors.New("sds server: Run called twice")
	}
	g, h := s.newGRPC(creds)
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { s.files.Run(ctx) })
	wg.Go(func() { s.followFiles(ctx) })
	wg.Go(func() {
		<-ctx.Done()
		h.Shutdown()
		s.drain(g)
	})
	err := g.Serve(ln)
	ended := ctx.Err() != nil
	cancel()
	wg.Wait()
	if err != nil && !ended {
		return fmt.Errorf("serving on %s: %w", ln.Addr(), err)
	}
	return nil
}

func (s *Server) newGRPC(creds credentials.TransportCredentials) (*grpc.Server, *health.Server) {
	g := grpc.NewServer(
		grpc.Creds(creds),
		grpc.MaxRecvMsgSize(1<<20),
		grpc.MaxConcurrentStreams(4096), // an Envoy opens a stream for each secret
		// A connection without a stream costs memory and file descriptors and does nothing.
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: 5 * time.Minute}),
		// A node has many connections that are silent nearly always: small buffers.
		grpc.ReadBufferSize(1<<10),
		grpc.WriteBufferSize(16<<10),
		grpc.ChainUnaryInterceptor(socket.GuardUnary),
		grpc.ChainStreamInterceptor(socket.GuardStream),
	)
	secretv3.RegisterSecretDiscoveryServiceServer(g, &secretService{Server: s})
	workload.RegisterSpiffeWorkloadAPIServer(g, &workloadService{Server: s})
	h := health.NewServer()
	for name := range g.GetServiceInfo() {
		h.SetServingStatus(name, healthv1.HealthCheckResponse_SERVING)
	}
	healthv1.RegisterHealthServer(g, h)
	reflection.Register(g)
	return g, h
}

var errStopping = status.Error(codes.Unavailable, "the agent is stopping; connect again")

// drain ends all calls. Calls of the Workload API end by themselves; SDS streams wait for requests, which only the
// end of their connection interrupts.
func (s *Server) drain(g *grpc.Server) {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	close(s.stopping)
	hard := time.AfterFunc(drainTimeout, g.Stop)
	defer hard.Stop()
	go func() {
		s.workloads.Wait()
		g.Stop()
	}()
	g.GracefulStop()
}

// open attests the caller of a stream and enters the stream in the list; close takes it out.
func (s *Server) open(ctx context.Context, api string) (*subscription, Source, error) {
	p, source, err := s.attest(ctx)
	if err != nil {
		return nil, nil, err
	}
	sub := &subscription{api: api, peer: p, since: time.Now(), names: make(map[string]*entry)}
	sub.pump = &pump{server: s, source: source, sub: sub}
	sub.pump.waiter.Wake = sub.pump.wake
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil, nil, errStopping
	}
	s.streams[sub] = struct{}{}
	sub.consumer = s.join(p, api)
	if sub.isWorkload() {
		s.workloads.Add(1)
	} else {
		s.enter(sub)
	}
	s.cfg.Metrics.streams.WithLabelValues(api).Inc()
	return sub, source, nil
}

func (s *Server) close(sub *subscription) {
	s.leave(sub)
	sub.forget(s)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.streams, sub)
	if sub.isWorkload() {
		s.workloads.Done()
	} else {
		s.exit(sub)
	}
	s.cfg.Metrics.streams.WithLabelValues(sub.api).Dec()
}

func (s *Server) attest(ctx context.Context) (Peer, Source, error) {
	p, ok := socket.PeerOf(ctx)
	if !ok {
		return Peer{}, nil, status.Error(codes.Internal, "connection has no peer credentials")
	}
	source, err := s.cfg.Attest(ctx, p)
	switch {
	case err == nil:
		return p, source, nil
	case ctx.Err() != nil: // the caller went away meanwhile
		return Peer{}, nil, status.FromContextError(ctx.Err()).Err()
	}
	reason := "not_attested"
	if r, ok := errors.AsType[*Refused](err); ok {
		reason = r.Reason
	}
	s.cfg.Metrics.refusals.WithLabelValues(reason).Inc()
	s.cfg.Logger.Warn("caller refused", "uid", p.UID, "gid", p.GID, "pid", p.PID, "reason", reason, "error", err.Error())
	return Peer{}, nil, status.Errorf(codes.PermissionDenied, "no identity issued: %s", reason)
}
