package server

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/kube"
)

// cluster is a cluster as the server's readiness sees it. One that has never been ready since the start, such as with
// a wrong address in its config, keeps the server from being ready, so that a bad rollout stops. One that was ready
// and is lost harms its own requests only, which are answered Unavailable.
type cluster struct {
	name  string
	ready func() error
	run   func(context.Context) error
	seen  atomic.Bool // was ready once
	lost  bool        // was logged as lost; of the goroutine that calls note
}

// openClusters makes the clusters. It changes nothing outside the process.
func openClusters(s *Settings, logger *slog.Logger, reg prometheus.Registerer) ([]*cluster, map[string]csr.ClusterConfig, error) {
	var all []*cluster
	byName := map[string]csr.ClusterConfig{}
	for i, c := range s.Clusters {
		k, err := openCluster(c, s.reviews[i], logger, reg)
		if err != nil {
			return nil, nil, s.wrong(fmt.Errorf("clusters[%d]: %w", i, err))
		}
		one := &cluster{name: c.Name, ready: k.Ready, run: k.Run}
		reg.MustRegister(one.gauge())
		all = append(all, one)
		byName[c.Name] = csr.ClusterConfig{Cluster: k, MaxRenewalAge: s.renewalAges[i]}
	}
	return all, byName, nil
}

func openCluster(c ClusterConfig, mode kube.Mode, logger *slog.Logger, reg prometheus.Registerer) (*kube.Cluster, error) {
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

func (c *cluster) gauge() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "chancery_server_cluster_ready", Help: "1 if the cluster's tokens can be verified and its pods are known, else 0.",
		ConstLabels: prometheus.Labels{"cluster": c.name},
	}, func() float64 {
		if c.ready() != nil {
			return 0
		}
		return 1
	})
}

// blocks returns what keeps the server from being ready.
func (c *cluster) blocks() error {
	err := c.ready()
	if err == nil {
		c.seen.Store(true)
	}
	if c.seen.Load() {
		return nil
	}
	return err
}

// note logs when a cluster that was ready is lost, and when it is back.
func (c *cluster) note(logger *slog.Logger) {
	err := c.ready()
	switch lost := err != nil && c.seen.Load(); {
	case lost && !c.lost:
		logger.Warn("cluster lost; its requests that need it get Unavailable until it is back", "cluster", c.name, "reason", err.Error())
		c.lost = true
	case err == nil && c.lost:
		logger.Info("cluster is back", "cluster", c.name)
		c.lost = false
	}
}
