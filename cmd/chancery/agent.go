package main

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
)

// defaultSocket is where agents serve and `chancery svid` looks.
const defaultSocket = "/run/chancery/agent.sock"

func newAgentCmd() *cobra.Command {
	var path string
	var logs logFlags
	cmd := &cobra.Command{
		Use: "agent -c FILE", Short: "Fetch one identity, keep it fresh and serve it to proxies", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			logger, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			c, err := loadAgentConfig(path)
			if err != nil {
				return err
			}
			if err := runAgent(cmd.Context(), c, logger); err != nil {
				return fmt.Errorf("agent: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", "", "config file (YAML)")
	logs.add(cmd)
	return cmd
}

// runAgent serves until ctx ends.
func runAgent(ctx context.Context, c *agentConfig, logger *slog.Logger) error {
	registry := newRegistry()
	keeper, err := newAgentKeeper(c, logger, newContact(registry))
	if err != nil {
		return err
	}
	naming, err := c.naming()
	if err != nil {
		return err
	}
	source := viewOf(keeper, naming)
	server, err := sds.NewServer(sds.Config{
		Files: c.Files, Logger: logger, Metrics: sds.NewMetrics(registry),
		Attest: func(_ context.Context, p sds.Peer) (sds.Source, error) {
			if !c.allowed(p.UID) {
				return nil, &sds.Refused{Reason: "uid_not_allowed", Err: fmt.Errorf("uid %d is not in allowUIDs", p.UID)}
			}
			return source, nil
		},
	})
	if err != nil {
		return err
	}
	registry.MustRegister(expiries{name: "chancery_agent_svid_expiry_seconds", help: "Seconds until an SVID or root ends, by certificate.",
		read: keeperExpiries(keeper)})
	metrics, err := net.Listen("tcp", c.Metrics)
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	l, err := sds.Listen(c.Socket)
	if err != nil {
		metrics.Close()
		return err
	}
	if err := writeAddrFile(c.AddrFile, fmt.Sprintf("metrics=%s\n", metrics.Addr())); err != nil {
		return err
	}
	logger.Info("agent serves", "socket", c.Socket, "metrics", metrics.Addr().String(), "spiffe_id", c.Identity)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return keeper.Run(ctx) })
	g.Go(func() error { return serveHTTP(ctx, metrics, registry, keeperReady(keeper)) })
	g.Go(func() error { return server.Run(ctx, l) })
	return g.Wait()
}

func (c *agentConfig) allowed(uid uint32) bool {
	return uid == 0 || int(uid) == os.Getuid() || slices.Contains(c.AllowUIDs, uid)
}

// newAgentKeeper returns the keeper of the configured identity, fed by the server.
func newAgentKeeper(c *agentConfig, logger *slog.Logger, contact func(error)) (*rotate.Keeper, error) {
	id, err := trust.ParseID(c.Identity)
	if err != nil {
		return nil, fmt.Errorf("identity: %w", err)
	}
	domain := id.Domain()
	if c.TrustDomain != "" {
		if domain, err = trust.ParseDomain(c.TrustDomain); err != nil {
			return nil, fmt.Errorf("trustDomain: %w", err)
		}
	}
	ttl, err := parseDuration("svidTTL", c.SVIDTTL, 0)
	if err != nil {
		return nil, err
	}
	return newClientKeeper(client.Config{
		Server: c.Server, Domain: domain, Roots: client.RootsFile(c.ServerRoots), Token: client.TokenFile(c.TokenFile),
		Cluster: c.Cluster, ID: id, TTL: ttl,
	}, logger, contact), nil
}

// newClientKeeper joins a keeper and a client: the client shows the keeper's SVID, the keeper gets what the client brings.
func newClientKeeper(c client.Config, logger *slog.Logger, contact func(error)) *rotate.Keeper {
	var keeper *rotate.Keeper
	c.Current = func() *trust.Identity {
		id, _ := keeper.Current()
		return id
	}
	issuing := client.New(c)
	keeper = rotate.NewKeeper(rotate.KeeperConfig{
		ID: c.ID, Logger: logger, Observe: contact,
		Issue: func(ctx context.Context, key crypto.Signer) (rotate.Issued, error) {
			chain, bundle, err := issuing.Issue(ctx, key)
			return rotate.Issued{Chain: chain, Bundle: bundle}, err
		},
	})
	return keeper
}

// viewOf shows one keeper's identity to whoever is let in. The view is made once for each identity.
func viewOf(k *rotate.Keeper, naming map[string][]trust.ID) sds.Source {
	var mu sync.Mutex // guards view and of
	view := &sds.View{Naming: naming}
	var of *trust.Identity
	return func() (*sds.View, <-chan struct{}) {
		mu.Lock()
		defer mu.Unlock()
		id, changed := k.Current()
		if id != of {
			of = id
			view = &sds.View{
				Identities: []*trust.Identity{id}, Bundles: []*trust.Bundle{id.Bundle}, Naming: naming, Generation: view.Generation + 1,
			}
		}
		return view, changed
	}
}

func keeperReady(k *rotate.Keeper) func() error {
	return func() error {
		id, _ := k.Current()
		if id == nil {
			return errors.New("no identity yet")
		}
		if time.Now().After(id.NotAfter()) {
			return fmt.Errorf("the identity ended at %s", id.NotAfter().UTC().Format(time.RFC3339))
		}
		return nil
	}
}

func keeperExpiries(keepers ...*rotate.Keeper) func() map[string]time.Time {
	return func() map[string]time.Time {
		out := map[string]time.Time{}
		for _, k := range keepers {
			id, _ := k.Current()
			if id == nil {
				continue
			}
			out[id.ID.String()] = id.NotAfter()
			for _, r := range id.Bundle.Roots() {
				out[fmt.Sprintf("root %x", r.SubjectKeyId)] = r.NotAfter
			}
		}
		return out
	}
}

// newContact returns a function that counts tries to reach the server.
func newContact(reg prometheus.Registerer) func(error) {
	last := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "chancery_agent_last_renewal_timestamp_seconds", Help: "Unix time of the last successful renewal.",
	})
	tries := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "chancery_agent_renewals_total", Help: "Tries to renew, by result (ok, error).",
	}, []string{"result"})
	reg.MustRegister(last, tries)
	return func(err error) {
		if err != nil {
			tries.WithLabelValues("error").Inc()
			return
		}
		tries.WithLabelValues("ok").Inc()
		last.SetToCurrentTime()
	}
}
