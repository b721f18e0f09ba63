package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
)

// devFlags are the flags of `chancery dev`.
type devFlags struct {
	dir, listen, metrics, agentMetrics string
	ttl                                time.Duration
	verbose                            bool
}

func newDevCmd() *cobra.Command {
	var f devFlags
	cmd := &cobra.Command{
		Use: "dev", Short: "Run everything in one process, to see it work", Args: cobra.NoArgs,
		Long: "Runs a server, an agent and a token issuer in one process, with all state in one folder. Whoever connects to the\n" +
			"agent's socket is identified by Unix user, as spiffe://cluster.local/ns/dev/sa/USER. For trying things out, not for\n" +
			"production: the token issuer vouches for whatever this process asks.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			d := &dev{flags: f, out: cmd.OutOrStdout(), pickListen: !cmd.Flags().Changed("listen"), pickMetrics: !cmd.Flags().Changed("metrics")}
			if err := d.run(cmd.Context(), cmd.ErrOrStderr()); err != nil {
				return fmt.Errorf("dev: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&f.dir, "dir", devDir(), "folder for all state")
	cmd.Flags().DurationVar(&f.ttl, "svid-ttl", time.Hour, "lifetime of SVIDs; 20s or 1m show rotation happen")
	cmd.Flags().StringVar(&f.listen, "listen", "127.0.0.1:8443", "gRPC address; without the flag another port is taken if this one is in use")
	cmd.Flags().StringVar(&f.metrics, "metrics", "127.0.0.1:9443", "HTTP address of the server's /metrics, likewise")
	cmd.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "print the logs of server and agent")
	return cmd
}

// devDir is where `chancery dev` keeps its state, and where `chancery svid` looks for its socket.
func devDir() string {
	if state := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(state) {
		return filepath.Join(state, "chancery-dev")
	}
	if home, err := os.UserHomeDir(); err == nil {
		return filepath.Join(home, ".local", "state", "chancery-dev")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("chancery-dev-%d", os.Getuid()))
}

// dev is one run of `chancery dev`.
type dev struct {
	flags                   devFlags
	out                     io.Writer
	pickListen, pickMetrics bool // the user named no port: any will do
	logger                  *slog.Logger
}

const (
	devDomain  = "cluster.local"
	devCluster = "dev"
	devNS      = "dev"
)

func (d *dev) say(format string, args ...any) { fmt.Fprintf(d.out, format+"\n", args...) }

func (d *dev) path(name string) string { return filepath.Join(d.flags.dir, name) }

// run sets up the folder, then runs server and agent until ctx ends.
func (d *dev) run(ctx context.Context, stderr io.Writer) error {
	begun := time.Now()
	if d.flags.ttl < ca.MinTTL || d.flags.ttl > ca.DefaultMaxTTL {
		return fmt.Errorf("--svid-ttl %s: use %s to %s", d.flags.ttl, ca.MinTTL, ca.DefaultMaxTTL)
	}
	d.logger = slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if d.flags.verbose {
		d.logger = slog.New(slog.NewTextHandler(stderr, nil))
	}
	abs, err := filepath.Abs(d.flags.dir)
	if err != nil {
		return err
	}
	d.flags.dir = abs
	if err := os.MkdirAll(abs, 0o755); err != nil { // other users must reach the socket; files are 0600
		return err
	}
	d.say("Using the folder %s (remove it to start afresh).", abs)
	tokens, err := openDevTokens(d.path("tokens.key"), d.path("jwks.json"))
	if err != nil {
		return err
	}
	d.say("Token issuer ready: it signs tokens shaped like Kubernetes' service-account tokens.")
	config, err := d.writeConfig()
	if err != nil {
		return err
	}
	if err := d.authorities(ctx, config); err != nil {
		return err
	}
	s, err := openServer(ctx, config, d.logger)
	if err != nil {
		return err
	}
	defer s.close()
	if err := d.listen(s); err != nil {
		return err
	}
	return d.serve(ctx, s, tokens, begun)
}

// writeConfig writes the server's config as a file, so that every command that takes -c works on a dev server too.
func (d *dev) writeConfig() (*serverConfig, error) {
	c := &serverConfig{
		TrustDomain: devDomain, Listen: d.flags.listen, Metrics: d.flags.metrics,
		State: stateConfig{SQLite: "state.db"}, AuditLog: "audit.jsonl",
		Profile: ca.ProfileConfig{DefaultTTL: d.flags.ttl.String(), MaxTTL: ca.DefaultMaxTTL.String()},
		Clusters: []clusterConfig{{
			Name: devCluster, Issuer: devIssuer, Audiences: []string{"istio-ca", "chancery"}, JWKSFile: "jwks.json",
		}},
	}
	data, err := yaml.Marshal(c)
	if err != nil {
		return nil, err
	}
	path := d.path("server.yaml")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return nil, err
	}
	return loadServerConfig(path)
}

// authorities makes root and issuer on the first run.
func (d *dev) authorities(ctx context.Context, c *serverConfig) error {
	if _, err := os.Stat(c.State.SQLite); err == nil {
		d.say("Certificate authority of the last run found in %s.", c.State.SQLite)
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := initAuthority(ctx, c, io.Discard); err != nil {
		return err
	}
	d.say("Made a certificate authority: a root and an issuer under it, in %s.", c.State.SQLite)
	return nil
}

// listen takes other ports where the usual ones are in use and the user did not insist on them.
func (d *dev) listen(s *server) error {
	for _, a := range []struct {
		addr *string
		pick bool
	}{{&s.config.Listen, d.pickListen}, {&s.config.Metrics, d.pickMetrics}} {
		l, err := net.Listen("tcp", *a.addr)
		if err == nil {
			l.Close()
		} else if a.pick {
			d.say("Address %s is in use; taking another port.", *a.addr)
			*a.addr = "127.0.0.1:0"
		}
	}
	return s.listen()
}

// serve runs the server and, once that is ready, the agent.
func (d *dev) serve(ctx context.Context, s *server, tokens *devTokens, begun time.Time) error {
	g, ctx := errgroup.WithContext(ctx)
	started := make(chan struct{})
	g.Go(func() error { return s.run(ctx, func() { close(started) }) })
	g.Go(func() error {
		select {
		case <-started:
		case <-ctx.Done():
			return nil
		}
		d.say("Server listens on %s (gRPC, TLS 1.3) and shows metrics on http://%s/metrics.", s.listener.Addr(), s.metrics.Addr())
		return d.agent(ctx, s, tokens, begun)
	})
	return g.Wait()
}

// agent serves the socket; each Unix user gets a keeper of its own when it first connects.
func (d *dev) agent(ctx context.Context, s *server, tokens *devTokens, begun time.Time) error {
	socket := d.path("agent.sock")
	l, err := sds.Listen(socket)
	if err != nil {
		return err
	}
	users := &devUsers{ctx: ctx, logger: d.logger, tokens: tokens, onChange: d.sayRenewed, contact: newContact(s.registry), client: client.Config{
		Server: s.listener.Addr().String(), Roots: client.RootsFile(rootsFile(s.config)), Cluster: devCluster, TTL: d.flags.ttl,
	}}
	s.registry.MustRegister(expiries{name: "chancery_agent_svid_expiry_seconds", help: "Seconds until an SVID or root ends, by certificate.", read: users.expiries})
	agent, err := sds.NewServer(sds.Config{Logger: d.logger, Metrics: sds.NewMetrics(s.registry), Attest: users.attest})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return agent.Run(ctx, l) })
	g.Go(func() error { return tokens.keepFile(ctx, d.path("token"), users.nameOf(uint32(os.Getuid()))) })
	g.Go(func() error {
		if err := users.wait(ctx, uint32(os.Getuid())); err != nil {
			return err
		}
		d.sayReady(socket, time.Since(begun))
		return nil
	})
	err = g.Wait()
	return errors.Join(err, users.wg.Wait())
}

func (d *dev) sayRenewed(id *trust.Identity) {
	d.say("SVID of %s: serial %s, ends %s.", id.ID, id.Serial(), id.NotAfter().Local().Format(time.TimeOnly))
}

func (d *dev) sayReady(socket string, took time.Duration) {
	hint := ""
	if d.flags.dir != devDir() {
		hint = " --socket " + socket
	}
	d.say("Agent serves SDS and the SPIFFE Workload API on %s.", socket)
	d.say("Ready after %.1f s. Try, in another shell:", took.Seconds())
	d.say("  chancery svid fetch%s            your own identity", hint)
	d.say("  chancery svid watch%s            see it renewed", hint)
	d.say("  chancery svid fetch%s --write DIR   as files", hint)
	d.say("  chancery authority show -c %s", d.path("server.yaml"))
	d.say("  tail -f %s   who got which certificate", d.path("audit.jsonl"))
	d.say("A token for the Istio API (clusterid: %s) is kept fresh in %s.", devCluster, d.path("token"))
}
