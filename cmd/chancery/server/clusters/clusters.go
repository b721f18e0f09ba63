// Package clusters owns the `clusters` of a server's config, whose tokens are accepted: checking them, opening them, and what each
// means for the server's readiness.
//
// It refuses two clusters of one name, and to take a server out of rotation for a cluster that was there and is lost.
package clusters

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/kube"
)

// Cluster is a cluster as the server's readiness sees it. One that has never been ready since the start, such as with
// a wrong address in its config, keeps the server from being ready, so that a bad rollout stops. One that was ready
// and is lost harms its own requests only, which are answered Unavailable.
type Cluster struct {
	Name  string
	Ready func() error // nil if its requests can be answered now
	Run   func(context.Context) error
	seen  atomic.Bool // was ready once
	lost  bool        // was logged as lost; of the goroutine that calls Note
}

// Open makes the clusters. It changes nothing outside the process.
func (cs *Clusters) Open(logger *slog.Logger, reg prometheus.Registerer) ([]*Cluster, map[string]csr.ClusterConfig, error) {
	var all []*Cluster
	byName := map[string]csr.ClusterConfig{}
	for i, c := range cs.configs {
		k, err := open(c, cs.reviews[i], logger, reg)
		if err != nil {
			return nil, nil, fmt.Errorf("clusters[%d]: %w", i, err)
		}
		one := &Cluster{Name: c.Name, Ready: k.Ready, Run: k.Run}
		reg.MustRegister(one.gauge())
		all = append(all, one)
		byName[c.Name] = csr.ClusterConfig{Cluster: k, MaxRenewalAge: cs.renewalAges[i]}
	}
	return all, byName, nil
}

func open(c Config, mode kube.Mode, logger *slog.Logger, reg prometheus.Registerer) (*kube.Cluster, error) {
	cfg := kube.Config{
		Name: c.Name, Issuer: c.Issuer, Audiences: c.Audiences, JWKSFile: c.JWKSFile, TokenReview: mode, NodeAgents: c.NodeAgents,
		AllowUnboundTokens: c.AllowUnboundTokens, Logger: logger, Metrics: reg,
	}
	if c.Kubeconfig != "" || c.InCluster {
		client, err := kube.NewClient(c.Kubeconfig)
		if err != nil {
			return nil, err
		}
		cfg.Client = client
	}
	return kube.New(cfg)
}

// WasReady reports whether it was ready once since the start.
func (c *Cluster) WasReady() bool { return c.seen.Load() }

func (c *Cluster) gauge() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "chancery_server_cluster_ready", Help: "1 if the cluster's tokens can be verified and its pods are known, else 0.",
		ConstLabels: prometheus.Labels{"cluster": c.Name},
	}, func() float64 {
		if c.Ready() != nil {
			return 0
		}
		return 1
	})
}

// Blocks returns what keeps the server from being ready.
func (c *Cluster) Blocks() error {
	err := c.Ready()
	if err == nil {
		c.seen.Store(true)
	}
	if c.seen.Load() {
		return nil
	}
	return err
}

// Note logs when a cluster that was ready is lost, and when it is back.
func (c *Cluster) Note(logger *slog.Logger) {
	err := c.Ready()
	switch lost := err != nil && c.seen.Load(); {
	case lost && !c.lost:
		logger.Warn("cluster lost; its requests that need it get Unavailable until it is back", "cluster", c.Name, "reason", err.Error())
		c.lost = true
	case err == nil && c.lost:
		logger.Info("cluster is back", "cluster", c.Name)
		c.lost = false
	}
}
