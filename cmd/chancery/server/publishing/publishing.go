package publishing

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	reach "github.com/chancery-project/chancery/ca/kube"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/publish"
	"github.com/chancery-project/chancery/trust/publish/kube"
)

// Env is what a server gives to its publisher.
type Env struct {
	Bundle  func() (*trust.Bundle, error) // of the newest document
	Drives  func() bool
	Logger  *slog.Logger
	Metrics prometheus.Registerer
}

// Publisher publishes roots. The nil one has nothing to do.
type Publisher struct{ publisher *kube.Publisher }

// Open makes the publisher; nobody is asked. A nil Plan gives nil.
func (p *Plan) Open(e Env) (*Publisher, error) {
	if p == nil {
		return nil, nil
	}
	cfg, client, err := reach.Client(p.cluster.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("publishing: %w", err)
	}
	c := kube.Config{
		REST: cfg, HTTP: client, Bundle: e.Bundle, Drives: e.Drives, Manager: p.manager, Force: p.force, Signer: p.signer, Lead: p.lead,
		Namespaces: p.selector, Hint: p.hint, Logger: e.Logger, Metrics: e.Metrics,
	}
	if p.maps != nil {
		roots := func(c publish.Contents) string { return c.Roots }
		c.ConfigMaps = map[string][]kube.Key{p.maps.Name: {{Name: "roots.pem", Of: roots}, {Name: "bundle.json", Of: func(c publish.Contents) string { return c.Bundle }}}}
		if p.maps.Istio {
			c.ConfigMaps[IstioName] = []kube.Key{{Name: "root-cert.pem", Of: roots}}
		}
	}
	k, err := kube.New(c)
	if err != nil {
		return nil, fmt.Errorf("publishing: %w", err)
	}
	return &Publisher{k}, nil
}

// Run publishes until ctx ends.
func (p *Publisher) Run(ctx context.Context) error {
	if p == nil {
		return nil
	}
	return p.publisher.Run(ctx)
}

// Unpublished says what does not have the newest roots yet: a rotation waits for it (decision D3).
func (p *Publisher) Unpublished() []string {
	if p == nil {
		return nil
	}
	return p.publisher.Unpublished()
}

// Trouble returns what keeps roots from being published, for people; empty if nothing does.
func (p *Publisher) Trouble() string {
	if p == nil {
		return ""
	}
	if err := p.publisher.Trouble(); err != nil {
		return err.Error()
	}
	return ""
}
