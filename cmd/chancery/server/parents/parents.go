package parents

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/kube"
	"github.com/chancery-project/chancery/ca/parent/cfssl"
	parentfiles "github.com/chancery-project/chancery/ca/parent/files"
	parentkube "github.com/chancery-project/chancery/ca/parent/kube"
	"github.com/chancery-project/chancery/ca/parent/renewal"
	"github.com/chancery-project/chancery/ca/parent/vault"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/source"
	"github.com/chancery-project/chancery/csr/issuers"
	"github.com/chancery-project/chancery/trust"
)

// Env is what a server gives to its parent.
type Env struct {
	Domain    trust.Domain
	Authority *authority.Keeper
	Log       *audit.Log
	Logger    *slog.Logger
	Metrics   prometheus.Registerer
	MinLife   time.Duration // see renewal.Config
}

// Renewer renews a server's issuer. The nil one, of a server without a parent, has nothing to do.
type Renewer struct{ renewer *renewal.Renewer }

// Open makes the renewer; nobody is called. A nil Place gives nil.
func (p *Place) Open(e Env) (*Renewer, error) {
	if p == nil {
		return nil, nil
	}
	parent, err := p.open(e)
	if err != nil {
		return nil, fmt.Errorf("parent.%s: %w", p.kind, err)
	}
	return &Renewer{renewal.New(renewal.Config{
		Name: p.kind, Parent: parent, Authority: e.Authority, Domain: e.Domain, Asked: p.lifetime, MinLife: e.MinLife, Logger: e.Logger, Metrics: e.Metrics,
	})}, nil
}

// Wait waits until a server has its first issuer, so that nobody asks in vain until then, with ever longer pauses.
func (r *Renewer) Wait(ctx context.Context, a *authority.Keeper) {
	for r != nil {
		if _, err := a.Issuer(); err == nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Run renews until ctx ends.
func (r *Renewer) Run(ctx context.Context) error {
	if r == nil {
		return nil
	}
	return r.renewer.Run(ctx)
}

// Explain adds to why nothing can be issued what the parent has to do with it.
func (r *Renewer) Explain(err error) error {
	if r == nil || r.renewer.Err() == nil {
		return err
	}
	return fmt.Errorf("%w: %s", err, renewal.Shorten(r.renewer.Err()))
}

func (p *Place) open(e Env) (renewal.Parent, error) {
	switch c := p.config; p.kind {
	case "files":
		cfg := parentfiles.Config{Dir: c.Files.CACerts, Layout: files.CACerts, Domain: e.Domain, TTL: p.lifetime, Log: e.Log,
			LogID: e.Authority.LogID}
		if c.Files.TLS != "" {
			cfg.Dir, cfg.Layout = c.Files.TLS, files.TLS
		}
		return parentfiles.New(cfg), nil
	case "chancery":
		return client.NewParent(client.Config{
			Servers: []string{c.Chancery.Server}, Domain: e.Domain, Roots: source.RootsFile(c.Chancery.ServerRoots),
			Token: source.TokenFile(c.Chancery.TokenFile), Cluster: c.Chancery.Cluster, TTL: p.lifetime,
		}), nil
	case "certManager":
		api, err := kube.Config(c.CertManager.Kubeconfig)
		if err != nil {
			return nil, err
		}
		cfg := parentkube.Config{API: api, Namespace: c.CertManager.Namespace, Issuer: c.CertManager.Issuer, Kind: c.CertManager.Kind,
			Group: c.CertManager.Group, TTL: p.lifetime}
		process.SetDefault(&cfg.Kind, "Issuer")
		process.SetDefault(&cfg.Group, "cert-manager.io")
		return parentkube.New(cfg)
	}
	return p.webFor(e.Domain)
}

// web is webFor where the domain plays no part.
func (p *Place) web() (renewal.Parent, error) { return p.webFor(trust.Domain{}) }

// webFor makes the parents that are called over HTTPS.
func (p *Place) webFor(td trust.Domain) (renewal.Parent, error) {
	if f := p.config.CFSSL; f != nil {
		return cfssl.New(cfssl.Config{Address: f.Address, Roots: f.Roots, Label: f.Label, Profile: f.Profile, KeyFile: f.AuthKeyFile, Chain: f.ChainFile})
	}
	v := p.config.Vault
	cfg := vault.Config{
		Address: v.Address, Roots: v.Roots, Namespace: v.Namespace, Mount: v.Mount, Issuer: v.Issuer, TokenFile: v.TokenFile, Domain: td, TTL: p.lifetime,
	}
	process.SetDefault(&cfg.Mount, "pki")
	if k := v.Kubernetes; k != nil {
		cfg.Kubernetes = &vault.Kubernetes{Role: k.Role, Mount: k.Mount, TokenFile: k.TokenFile}
		process.SetDefault(&cfg.Kubernetes.Mount, "kubernetes")
		process.SetDefault(&cfg.Kubernetes.TokenFile, "/var/run/secrets/kubernetes.io/serviceaccount/token")
	}
	return vault.New(cfg)
}

// CheckRoots checks the roots given to `authority init` against the config: with a parent they are needed.
func (p *Place) CheckRoots(roots []*x509.Certificate) error {
	if p != nil && len(roots) == 0 {
		return errors.New("a parent is configured, so the root is kept elsewhere: give its certificate with --root FILE. " +
			"It is pinned: no answer of the parent's can change it")
	}
	return nil
}

// Below describes the API by which servers below get issuers; none if the config lists nobody. A server that could not
// sign them is an error.
func Below(service *csr.Service, td trust.Domain, a *authority.Keeper, grants map[trust.ID]issuers.Grant) ([]*grpc.ServiceDesc, error) {
	if len(grants) == 0 {
		return nil, nil
	}
	if err := a.SignsIssuers(); err != nil {
		return nil, fmt.Errorf("issuers: %w", err)
	}
	of := map[trust.ID]issuers.Grant{}
	for id, g := range grants { // as the config names the trust domain
		of[id.WithDomain(td)] = g
	}
	return []*grpc.ServiceDesc{issuers.Describe(service, issuers.Config{Domain: td, Present: a.Present, Grants: of, Sign: signer{td, a}.sign})}, nil
}
