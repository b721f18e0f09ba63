package signing

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/revocation"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/signers"
	"github.com/chancery-project/chancery/csr/signers/kube"
	"github.com/chancery-project/chancery/trust"
)

// Env is what a server gives to its signer.
type Env struct {
	Domain      trust.Domain
	Authority   *authority.Keeper
	Profile     *ca.Profile
	Clusters    map[string]csr.ClusterConfig
	Log         *audit.Log
	Sampler     *ca.Sampler
	Agents      *agents.Hub
	Revocations func() *revocation.Set
	Logger      *slog.Logger
	Metrics     prometheus.Registerer
}

// Signer signs Kubernetes' own requests. The nil one has nothing to do.
type Signer struct{ controller *kube.Controller }

// Open makes the signer; nobody is asked. A nil Plan gives nil.
func (p *Plan) Open(e Env) (*Signer, error) {
	if p == nil {
		return nil, nil
	}
	signer := signers.New(signers.Config{
		Domain: e.Domain, IssuerFor: e.Authority.IssuerFor, IssuerOf: e.issuerOf, Profile: e.Profile, Cluster: p.cluster.Name, Alive: e.Clusters[p.cluster.Name].Cluster.Alive, PodLife: p.life,
		Requesters: p.requesters, Root: p.root, Log: e.Log, Sampler: e.Sampler, Ledger: e.Agents.Ledger(), Issued: e.Agents.Issued, Revocations: e.Revocations, Logger: e.Logger,
	})
	c, err := kube.New(kube.Config{
		Kubeconfig: p.cluster.Kubeconfig, PodSigner: p.pods, NamedSigner: p.named, Drives: e.Authority.Drives, Logger: e.Logger, Metrics: e.Metrics,
	}, signer)
	if err != nil {
		return nil, fmt.Errorf("signing: %w", err)
	}
	return &Signer{c}, nil
}

// issuerOf returns the issuer of an identity that is issued exactly as it is asked for, or not at all (decision D17).
func (e Env) issuerOf(id trust.ID) (*ca.Issuer, error) {
	p, err := e.Authority.Issuers()
	if err != nil {
		return nil, err
	}
	if err := p.Allows(id); err != nil {
		return nil, fmt.Errorf("%w: %w", ca.ErrName, err)
	}
	return p.As(id)
}

// Run signs until ctx ends.
func (s *Signer) Run(ctx context.Context) error {
	if s == nil {
		return nil
	}
	return s.controller.Run(ctx)
}

// Trouble returns what keeps requests from being signed, for people; empty if nothing does.
func (s *Signer) Trouble() string {
	if s == nil {
		return ""
	}
	all := s.controller.Trouble()
	var out []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		out = append(out, fmt.Sprintf("signer %s: %v", name, all[name]))
	}
	return strings.Join(out, "; ")
}
