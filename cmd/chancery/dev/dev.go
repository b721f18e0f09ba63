package dev

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/agent"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server"
	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
	"github.com/chancery-project/chancery/cmd/chancery/server/stores"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
)

const (
	domainName  = "cluster.local"
	clusterName = "dev"
	namespace   = "dev"
	socketName  = "agent.sock"
)

// dev is one run of `chancery dev`.
type dev struct {
	flags                   flags
	out                     io.Writer
	logger                  *slog.Logger
	pickListen, pickMetrics bool // the user named no port: any will do
}

func (d *dev) say(format string, args ...any) { fmt.Fprintf(d.out, format+"\n", args...) }

func (d *dev) path(name string) string { return filepath.Join(d.flags.dir, name) }

// run sets up the folder, then runs server and agent until ctx ends.
func (d *dev) run(ctx context.Context) error {
	begun := time.Now()
	if d.flags.ttl < ca.MinTTL || d.flags.ttl > ca.DefaultMaxTTL {
		return fmt.Errorf("--svid-ttl %s: use %s to %s", d.flags.ttl, ca.MinTTL, ca.DefaultMaxTTL)
	}
	if d.flags.dir == "" { // such as from a variable that is not set; it would mean the current folder
		return errors.New("--dir is empty; name a folder")
	}
	abs, err := filepath.Abs(d.flags.dir)
	if err != nil {
		return fmt.Errorf("--dir: %w", err)
	}
	d.flags.dir = abs
	if err := os.MkdirAll(abs, 0o755); err != nil { // other users must reach the socket; files are 0600
		return fmt.Errorf("--dir: %w", err)
	}
	lock, err := hold(abs)
	if err != nil {
		return err
	}
	defer lock.Close()
	d.say("Using the folder %s (remove it to start afresh).", abs)
	tokens, err := openTokens(d.path("tokens.key"), d.path("jwks.json"))
	if err != nil {
		return err
	}
	d.say("Token issuer ready: it signs tokens shaped like Kubernetes' service-account tokens.")
	s, settings, err := d.open(ctx)
	if errors.Is(err, store.ErrLocked) { // such as by `chancery server` on our config
		return held(abs, err)
	} else if err != nil {
		return err
	}
	defer s.Close()
	return d.serve(ctx, s, settings, tokens, begun)
}

// open makes the authorities on the first run, and the server.
func (d *dev) open(ctx context.Context) (*server.Server, *server.Settings, error) {
	settings, err := d.settings()
	if err != nil {
		return nil, nil, err
	}
	err = server.Init(ctx, settings, io.Discard)
	switch {
	case err == nil:
		d.say("Made a certificate authority: a root and an issuer under it, in %s.", settings.State.SQLite)
	case errors.Is(err, store.ErrConflict):
		d.say("Certificate authority of the last run found in %s.", settings.State.SQLite)
	default:
		return nil, nil, err
	}
	s, err := server.Open(ctx, settings, d.logger)
	return s, settings, err
}

// settings writes the server's config as a file, so that every command that takes -c works on a dev server too.
func (d *dev) settings() (*server.Settings, error) {
	data, err := yaml.Marshal(&server.Config{
		TrustDomain: domainName, Listen: d.pick(d.flags.listen, d.pickListen), Metrics: d.pick(d.flags.metrics, d.pickMetrics),
		State: stores.Config{SQLite: "state.db"}, AuditLog: "audit.jsonl", IssuanceLog: "log",
		// No certificate lives longer than was asked for: a rotation waits as long as one can.
		Profile: ca.ProfileConfig{DefaultTTL: d.flags.ttl.String(), MaxTTL: d.flags.ttl.String()},
		Clusters: []clusters.Config{{
			Name: clusterName, Issuer: tokenIssuer, Audiences: []string{"istio-ca", "chancery"}, JWKSFile: "jwks.json",
		}},
	})
	if err != nil {
		return nil, fmt.Errorf("making the server's config: %w", err)
	}
	file := d.path("server.yaml")
	if err := process.ReplaceFile(file, data, 0o600); err != nil {
		return nil, err
	}
	return server.Load(file)
}

// pick returns the address, or one with a port that the system picks, if it is in use and the user did not ask for it.
func (d *dev) pick(addr string, any bool) string {
	l, err := net.Listen("tcp", addr)
	if err == nil {
		l.Close()
	}
	if !any || !errors.Is(err, unix.EADDRINUSE) {
		return addr
	}
	d.say("Address %s is in use; taking another port.", addr)
	return "127.0.0.1:0"
}

// serve runs the server and, once that is ready, the agent.
func (d *dev) serve(ctx context.Context, s *server.Server, settings *server.Settings, tokens *tokens, begun time.Time) error {
	listen, metrics, err := s.Listen()
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	started := make(chan struct{})
	g.Go(func() error { return s.Run(ctx, func() { close(started) }) })
	g.Go(func() error {
		select {
		case <-started:
		case <-ctx.Done():
			return nil
		}
		d.say("Server listens on %s (gRPC, TLS 1.3) and shows metrics on http://%s/metrics.", listen, metrics)
		return d.agent(ctx, s, settings, newUsers(usersConfig{
			tokens: tokens, files: d.path(socketName), onChange: d.sayRenewed, logger: d.logger, observe: agent.CountRenewals(s.Registry()),
			client: client.Config{
				Servers: []string{listen.String()}, Roots: rootsOf(s), Cluster: clusterName, TTL: d.flags.ttl, Metrics: client.NewMetrics(s.Registry()),
			},
		}), begun)
	})
	return g.Wait()
}

// rootsOf gives the roots of the server in this process, whatever became of roots.pem.
func rootsOf(s *server.Server) func() ([]*x509.Certificate, error) {
	return func() ([]*x509.Certificate, error) {
		bundle, err := s.Bundle()
		if err != nil {
			return nil, err
		}
		return bundle.Roots(), nil
	}
}

// agent serves the socket; each Unix user gets a keeper of its own when it first connects.
func (d *dev) agent(ctx context.Context, s *server.Server, settings *server.Settings, u *users, begun time.Time) error {
	a, err := sds.NewServer(sds.Config{Logger: d.logger, Metrics: sds.NewMetrics(s.Registry()), Attest: u.attest, Consumers: u.consumers})
	if err != nil {
		return err
	}
	u.notEnforcing = func() []string { return agent.NotEnforcing(a.Streams()) }
	l, err := sds.Listen(d.path(socketName))
	if err != nil {
		return err
	}
	s.Registry().MustRegister(agent.Expiries(u.keepers)...)
	s.Registry().MustRegister(agent.Evidence(u.keepers)...)
	self := uint32(os.Getuid())
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.Run(ctx, l) })
	g.Go(func() error { return u.run(ctx) })
	g.Go(func() error { return u.tokens.keepFile(ctx, d.path("token"), accountOf(self), d.logger) })
	g.Go(func() error {
		ready, err := u.wait(ctx, self)
		if ready {
			d.sayReady(settings, time.Since(begun))
		}
		return err
	})
	return g.Wait()
}

func (d *dev) sayRenewed(id *trust.Identity) {
	d.say("SVID of %s: serial %s, ends %s.", id.ID, id.Serial(), id.NotAfter().Local().Format(time.TimeOnly))
}

func (d *dev) sayReady(settings *server.Settings, took time.Duration) {
	hint, admin := "", ""
	if !d.isFound() {
		hint = " --socket " + d.path(socketName)
	}
	if settings.AdminSocket() != DefaultAdmin() {
		admin = " -c " + d.path("server.yaml")
	}
	d.say("Agent serves SDS and the SPIFFE Workload API on %s.", d.path(socketName))
	d.say("Ready after %.1f s. Try, in another shell:", took.Seconds())
	// Each line can be pasted into a shell as it is: the words behind it are a comment, and we are called as dev was.
	name := os.Args[0]
	d.say("  %s svid fetch%s               # your own identity", name, hint)
	d.say("  %s svid watch%s               # see it renewed", name, hint)
	d.say("  %s svid fetch%s --write DIR   # as files", name, hint)
	d.say("  %s status -c %s   # how the server is", name, d.path("server.yaml"))
	d.say("  %s revoke --dry-run --issued-before 0s -c %s   # what a revocation would mean", name, d.path("server.yaml"))
	d.say("  %s rotate start --root%s   # replace the root: no restart, no lost connection", name, admin)
	d.say("  %s rotate status -w%s      # watch that", name, admin)
	d.say("  tail -f %s   # who got which certificate", settings.AuditLog)
	d.say("  %s log verify %s   # nothing was changed or left out", name, settings.IssuanceLog)
	d.say("A token for the Istio API (clusterid: %s) is kept fresh in %s.", clusterName, d.path("token"))
}

// isFound reports whether `chancery svid` finds this agent by itself.
func (d *dev) isFound() bool {
	if os.Getenv("SPIFFE_ENDPOINT_SOCKET") != "" || d.path(socketName) != DefaultSocket() {
		return false
	}
	_, err := os.Stat(agent.DefaultSocket)
	return err != nil
}
