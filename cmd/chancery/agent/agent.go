package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/csr/client/foreign"
	"github.com/chancery-project/chancery/csr/client/naming"
	"github.com/chancery-project/chancery/csr/client/source"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/sds/consumers"
)

// Command returns `chancery agent`.
func Command() *cobra.Command {
	var file string
	var logs process.LogFlags
	cmd := &cobra.Command{
		Use: "agent -c FILE", Short: "Fetch one identity, keep it fresh and serve it to proxies", Args: process.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			logger, err := logs.Logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			settings, err := Load(file)
			if err != nil {
				return err
			}
			return process.Ended(cmd.Context(), serve(cmd.Context(), settings, logger))
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "config file (YAML)")
	logs.Add(cmd)
	return cmd
}

// serve runs an agent until ctx ends.
func serve(ctx context.Context, s *Settings, logger *slog.Logger) error {
	registry := process.NewRegistry()
	metrics, l, err := s.listen() // what follows is this agent's as long as it has the socket
	if err != nil {
		return err
	}
	defer func() { metrics.Close(); l.Close() }() // for an error before they are served on
	table, kept, err := s.open(logger)
	if err != nil {
		return err
	}
	defer table.Close()
	named := naming.Open(naming.Config{File: s.Bundle + endNaming, Logger: logger})
	var server *sds.Server
	keeper := NewKeeper(KeeperConfig{
		Client: client.Config{
			Servers: s.Addresses(), Domain: s.id.Domain(), Roots: source.RootsFile(s.ServerRoots), Token: source.TokenFile(s.TokenFile),
			Cluster: s.Cluster, ID: s.id, TTL: s.ttl, Metrics: client.NewMetrics(registry), Anchor: kept, RootsAt: "serverRoots, " + s.ServerRoots,
			Foreign: foreign.Open(foreign.Config{File: s.Bundle + endFederation, Anchor: kept, Logger: logger}), Naming: named,
		},
		Logger: logger, Observe: CountRenewals(registry), NotEnforcing: func() []string { return NotEnforcing(server.Streams()) }, Table: table,
		Streams: func() []sds.StreamStatus { return server.Streams() },
	})
	source := SourceOf(keeper, s.naming)
	server, err = sds.NewServer(sds.Config{
		Files: s.Files, Logger: logger, Metrics: sds.NewMetrics(registry), Consumers: func(sds.Peer) *consumers.Table { return table },
		Services: services{named, s.naming},
		Attest: func(_ context.Context, p sds.Peer) (sds.Source, error) {
			if !s.allowed(p.UID) {
				return nil, &sds.Refused{Reason: "uid_not_allowed", Err: fmt.Errorf("uid %d is not in allowUIDs", p.UID)}
			}
			return source, nil
		},
	})
	if err != nil {
		return s.wrong(err)
	}
	keepers := func() []*Keeper { return []*Keeper{keeper} }
	registry.MustRegister(Expiries(keepers)...)
	registry.MustRegister(Evidence(keepers)...)
	logger.Info("agent serves", "socket", s.Socket, "metrics", metrics.Addr().String(), "spiffe_id", s.id.String())
	defer process.SayStopping(ctx, logger)()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return keeper.Run(ctx) })
	g.Go(func() error {
		return process.HTTP{
			Metrics: registry, Ready: func() error { return ready(keeper) }, Texts: map[string]func() string{"/checkpoints": keeper.checkpoints},
		}.Run(ctx, metrics)
	})
	g.Go(func() error { return server.Run(ctx, l) })
	return g.Wait()
}

// open reads what is kept over restarts.
func (s *Settings) open(logger *slog.Logger) (*consumers.Table, *anchor.Anchor, error) {
	kept, err := anchor.Open(anchor.Config{File: s.Bundle, Domain: s.id.Domain(), Logger: logger})
	if err != nil {
		return nil, nil, s.wrong(fmt.Errorf("bundle: %w", err))
	}
	table, err := consumers.Open(consumers.Config{File: s.Consumers, Logger: logger})
	if err != nil {
		return nil, nil, s.wrong(fmt.Errorf("consumers: %w", err))
	}
	return table, kept, nil
}

// listen opens the metrics address and the socket, and says where.
func (s *Settings) listen() (metrics, socket net.Listener, err error) {
	defer func() {
		for _, l := range []net.Listener{metrics, socket} {
			if err != nil && l != nil {
				l.Close()
			}
		}
	}()
	if metrics, err = process.Listen("metrics", s.Metrics); err != nil {
		return nil, nil, s.wrong(err)
	}
	if socket, err = sds.Listen(s.Socket); err != nil {
		return metrics, nil, s.wrong(fmt.Errorf("socket: %w", err))
	}
	return metrics, socket, process.WriteAddrFile(s.AddrFile, fmt.Sprintf("metrics=%s\n", metrics.Addr()))
}
