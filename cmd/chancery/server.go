package main

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/kube"
	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/trust"
)

func newServerCmd() *cobra.Command {
	var path string
	var logs logFlags
	cmd := &cobra.Command{
		Use: "server -c FILE", Short: "Run the certificate authority", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			logger, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			c, err := loadServerConfig(path)
			if err != nil {
				return err
			}
			s, err := openServer(cmd.Context(), c, logger)
			if err != nil {
				return err
			}
			defer s.close()
			tuneRuntime()
			return s.run(cmd.Context(), nil)
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", "", "config file (YAML)")
	logs.add(cmd)
	return cmd
}

// tuneRuntime trades for throughput, measured by test/bench/csr.
func tuneRuntime() {
	// The live heap is a few MB, so that at Go's default the collector would run every few hundred requests: trade a few
	// MB for a tenth of the processor.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(200)
	}
	// A sync of the audit log blocks in the kernel for a fifth of a millisecond, and the runtime counts its thread as
	// running for most of that time: without one more, a server on two cores would stand half idle during each sync.
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
	}
}

// server is all that `chancery server` runs.
type server struct {
	config    *serverConfig
	logger    *slog.Logger
	log       *audit.Log
	store     *store.SQLite
	authority *authority.Keeper
	clusters  []*kube.Cluster
	sampler   *ca.Sampler
	keeper    *rotate.Keeper // of the server's own certificate
	grpc      *csr.Server
	registry  *prometheus.Registry
	listener  net.Listener // set by listen
	metrics   net.Listener // set by listen
}

// openServer puts the server together. What it cannot work without is an error here, before anything listens.
func openServer(ctx context.Context, c *serverConfig, logger *slog.Logger) (_ *server, err error) {
	s := &server{config: c, logger: logger, registry: newRegistry()}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	cfg, err := s.openState(ctx, c)
	if err != nil {
		return nil, err
	}
	profile, err := ca.NewProfile("workload", c.Profile)
	if err != nil {
		return nil, err
	}
	cfg.Profiles = []*ca.Profile{profile, ca.ServerProfile()}
	if s.authority, err = authority.Open(ctx, cfg); err != nil {
		return nil, err
	}
	clusters, err := s.openClusters(c)
	if err != nil {
		return nil, err
	}
	admission, err := c.Admission.parse()
	if err != nil {
		return nil, err
	}
	s.sampler = newSampler(s.registry, logger)
	service, err := csr.NewService(csr.Config{
		Domain: cfg.Domain, Issuer: s.authority.Issuer, Profile: profile, Clusters: clusters, Admission: admission,
		Log: s.log, Sampler: s.sampler, Logger: logger, Metrics: csr.NewMetrics(s.registry),
	})
	if err != nil {
		return nil, err
	}
	dns, ips, err := c.names()
	if err != nil {
		return nil, err
	}
	s.keeper = rotate.NewKeeper(rotate.KeeperConfig{
		ID: trust.SystemID(cfg.Domain, "server"), Issue: s.issueOwn(dns, ips), Logger: logger,
	})
	s.grpc = csr.NewServer(service, s.own)
	s.registry.MustRegister(expiries{help: "Seconds until a certificate of the authority ends, by certificate.",
		name: "chancery_ca_certificate_expiry_seconds", read: s.authority.Expiries})
	return s, nil
}

// openState opens audit log, sealing key and store; the caller closes s on error.
func (s *server) openState(ctx context.Context, c *serverConfig) (authority.Config, error) {
	domain, err := trust.ParseDomain(c.TrustDomain)
	if err != nil {
		return authority.Config{}, fmt.Errorf("trustDomain: %w", err)
	}
	cfg := authority.Config{Domain: domain, Logger: s.logger, Plugged: c.Issuer.plugged()}
	if s.store, err = store.OpenSQLite(ctx, c.State.SQLite); errors.Is(err, store.ErrMissing) {
		return cfg, fmt.Errorf("%w: run `chancery authority init -c FILE` once", err)
	} else if err != nil {
		return cfg, err
	}
	if cfg.Sealer, err = keys.LoadSealer(c.State.SealingKey); err != nil {
		return cfg, err
	}
	if s.log, err = audit.Open(c.AuditLog); err != nil {
		return cfg, err
	}
	cfg.Store, cfg.Log = s.store, s.log
	return cfg, s.log.Append(audit.Record{Event: audit.Started, Detail: "server of trust domain " + c.TrustDomain})
}

func (s *server) openClusters(c *serverConfig) (map[string]csr.ClusterConfig, error) {
	out := map[string]csr.ClusterConfig{}
	for i, cl := range c.Clusters {
		k, err := newCluster(cl, s.logger, s.registry)
		if err != nil {
			return nil, fmt.Errorf("clusters[%d]: %w", i, err)
		}
		age, err := parseDuration(fmt.Sprintf("clusters[%d]: maxRenewalAge", i), cl.MaxRenewalAge, 0)
		if err != nil {
			return nil, err
		}
		s.clusters = append(s.clusters, k)
		out[cl.Name] = csr.ClusterConfig{Cluster: k, MaxRenewalAge: age}
	}
	return out, nil
}

func newCluster(c clusterConfig, logger *slog.Logger, reg prometheus.Registerer) (*kube.Cluster, error) {
	mode, err := kube.ParseMode(c.TokenReview)
	if err != nil {
		return nil, err
	}
	cfg := kube.Config{
		Name: c.Name, Issuer: c.Issuer, Audiences: c.Audiences, JWKSFile: c.JWKSFile, TokenReview: mode, NodeAgents: c.NodeAgents,
		AllowUnboundTokens: c.AllowUnboundTokens, Logger: logger, Metrics: reg,
	}
	switch {
	case c.Kubeconfig != "" && c.InCluster:
		return nil, errors.New("set kubeconfig or inCluster, not both")
	case c.Kubeconfig != "" || c.InCluster:
		client, err := kube.NewClient(c.Kubeconfig)
		if err != nil {
			return nil, err
		}
		cfg.Client = client
	}
	return kube.New(cfg)
}

// issueOwn issues the server's own certificate from its own issuer, by the same two steps as all others.
func (s *server) issueOwn(dns []string, ips []netip.Addr) func(context.Context, crypto.Signer) (rotate.Issued, error) {
	return func(ctx context.Context, key crypto.Signer) (rotate.Issued, error) {
		issuer, err := s.authority.Issuer()
		if err != nil {
			return rotate.Issued{}, err
		}
		token, err := issuer.Prepare(ca.ServerProfile(), ca.Request{
			ID: trust.SystemID(issuer.Domain(), "server"), PublicKey: key.Public(), DNSNames: dns, IPs: ips,
			Requester: audit.Requester{Method: "server certificate"},
		})
		if err != nil {
			return rotate.Issued{}, err
		}
		cert, err := issuer.Issue(ctx, token)
		if err != nil {
			return rotate.Issued{}, err
		}
		leaf, err := x509.ParseCertificate(cert.DER)
		if err != nil {
			return rotate.Issued{}, err
		}
		return rotate.Issued{Chain: append([]*x509.Certificate{leaf}, issuer.Chain()...), Bundle: issuer.Bundle()}, nil
	}
}

func (s *server) own() *trust.Identity {
	id, _ := s.keeper.Current()
	return id
}

// ready returns nil if certificates can be issued, else what is missing.
func (s *server) ready() error {
	if s.own() == nil {
		return errors.New("the server has no certificate of its own yet")
	}
	if _, err := s.authority.Issuer(); err != nil {
		return err
	}
	for _, c := range s.clusters {
		if err := c.Ready(); err != nil {
			return err
		}
	}
	return s.log.Err()
}

// listen opens the two addresses, so that a port in use is an error before anything runs.
func (s *server) listen() (err error) {
	if s.listener, err = net.Listen("tcp", s.config.Listen); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	if s.metrics, err = net.Listen("tcp", s.config.Metrics); err != nil {
		s.listener.Close()
		return fmt.Errorf("metrics: %w", err)
	}
	return nil
}

// run serves until ctx ends. started, if not nil, is called once the server is ready for the first time.
func (s *server) run(ctx context.Context, started func()) error {
	if s.listener == nil {
		if err := s.listen(); err != nil {
			return err
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.authority.Run(ctx) })
	g.Go(func() error { return s.sampler.Run(ctx) })
	g.Go(func() error { return s.keeper.Run(ctx) })
	for _, c := range s.clusters {
		g.Go(func() error { return c.Run(ctx) })
	}
	g.Go(func() error { return serveHTTP(ctx, s.metrics, s.registry, s.ready) })
	g.Go(func() error { return serveAdmin(ctx, s.adminSocket(), s.authority, s.log) })
	g.Go(func() error { return s.reopenLog(ctx) })
	g.Go(func() error { return s.watchReady(ctx, started) })
	g.Go(func() error { return s.grpc.Run(ctx, s.listener) })
	return g.Wait()
}

// watchReady keeps gRPC health in step with readiness and writes the address file.
func (s *server) watchReady(ctx context.Context, started func()) error {
	addrs := fmt.Sprintf("listen=%s\nmetrics=%s\n", s.listener.Addr(), s.metrics.Addr())
	if err := writeAddrFile(s.config.AddrFile, addrs); err != nil {
		return err
	}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	var was error = errors.New("starting")
	for {
		s.retryLog()
		err := s.ready()
		s.grpc.SetReady(err == nil)
		switch {
		case err == nil && was != nil:
			s.logger.Info("ready", "listen", s.listener.Addr().String(), "metrics", s.metrics.Addr().String())
			ticker.Reset(time.Second)
			if started != nil {
				started()
				started = nil
			}
		case err != nil && was == nil:
			s.logger.Error("not ready any more", "reason", err.Error())
		}
		was = err
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// retryLog writes a line to a log that failed before: a server that is not ready gets no requests whose lines would
// show that the disk has room again.
func (s *server) retryLog() {
	if s.log.Err() != nil && s.log.Append(audit.Record{Event: audit.Started, Detail: "the audit log can be written again"}) == nil {
		s.logger.Info("the audit log can be written again")
	}
}

// reopenLog opens the audit log anew on SIGHUP, for tools that move log files away.
func (s *server) reopenLog(ctx context.Context) error {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-hup:
			s.log.Reopen()
			s.logger.Info("audit log reopened")
		}
	}
}

func (s *server) adminSocket() string { return adminSocket(s.config) }

// adminSocket lies beside the state (decision D14).
func adminSocket(c *serverConfig) string {
	return filepath.Join(filepath.Dir(c.State.SQLite), "admin.sock")
}

func (s *server) close() {
	for _, c := range []io.Closer{closerOf(s.listener), closerOf(s.metrics)} {
		c.Close()
	}
	if s.log != nil {
		s.log.Close()
	}
	if s.store != nil {
		s.store.Close()
	}
}

// closerOf makes a nil listener closable.
func closerOf(l net.Listener) io.Closer {
	if l == nil {
		return io.NopCloser(nil)
	}
	return l
}
