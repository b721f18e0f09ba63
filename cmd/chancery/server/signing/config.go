// Package signing owns the group `signing` of a server's config: which of Kubernetes' own requests for certificates are signed, and joining
// their signer to the parts of the server.
//
// It refuses what could never be signed: lifetimes below the API's hour, and requesters without IDs. What is not configured runs nothing and
// keeps nothing.
package signing

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
)

// Config says which of Kubernetes' own requests for certificates are signed.
type Config struct {
	// Cluster names the entry of clusters whose API server has the requests; it needs kubeconfig or inCluster. Default: the only one that has.
	Cluster string `json:"cluster,omitempty"`
	// PodCertificates signs PodCertificateRequests, which kubelets make for volumes of pods. Default none.
	PodCertificates *PodsConfig `json:"podCertificates,omitempty"`
	// CSRSigner signs CertificateSigningRequests, such as istiod's as a registration authority. Default none.
	CSRSigner *NamedConfig `json:"csrSigner,omitempty"`
}

// PodsConfig says how PodCertificateRequests are signed.
type PodsConfig struct {
	// SignerName is what requests name, DOMAIN/NAME, such as chancery.dev/workload. Required.
	SignerName string `json:"signerName"`
	// Lifetime is that of the certificates, backdating included, unless the volume asks for less. From 1h, the API's minimum, to
	// profile.maxTTL. Default 24h, or profile.maxTTL if that is shorter. Rotations wait for as long.
	Lifetime string `json:"lifetime,omitempty"`
}

// NamedConfig says how CertificateSigningRequests are signed.
type NamedConfig struct {
	// SignerName is what requests name, DOMAIN/NAME; as Istio makes it of CERT_SIGNER_DOMAIN and the mesh's cert signer. Required.
	SignerName string `json:"signerName"`
	// Requesters lists who may have certificates, and of which IDs. At least one. Trusted: a requester can be any workload of its IDs.
	Requesters []RequesterConfig `json:"requesters"`
	// IncludeRoot appends the root to the chain, for Istio where it has no root from elsewhere. Default false.
	IncludeRoot bool `json:"includeRoot,omitempty"`
}

// RequesterConfig is one who makes CertificateSigningRequests.
type RequesterConfig struct {
	// User is its name as the API server knows it, such as system:serviceaccount:istio-system:istiod. Required.
	User string `json:"user"`
	// IDs lists patterns of the paths that it may have, as in profile.idPaths, which hold as well. At least one.
	IDs []string `json:"ids"`
}

// Plan is a Config that was checked. Nil: nothing is signed.
type Plan struct {
	cluster    clusters.Config
	pods       string // signer name; empty for none
	life       time.Duration
	named      string
	requesters map[string]*ca.Profile
	root       bool
}

// The API takes no NotBefore that is five minutes ago, by its own clock.
const maxBackdate = 3 * time.Minute

const leastLife = time.Hour

var signerForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[a-zA-Z0-9]([-a-zA-Z0-9._:]{0,200}[a-zA-Z0-9])?$`)

// CheckSigner checks a signer name.
func CheckSigner(field, name string) error {
	domain, _, _ := strings.Cut(name, "/")
	switch {
	case !signerForm.MatchString(name) || !strings.Contains(domain, "."):
		return fmt.Errorf("%s: %.80q should be DOMAIN/NAME, such as chancery.dev/workload", field, name)
	case domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io"):
		return fmt.Errorf("%s: %.80q is Kubernetes' own; take a domain of yours", field, name)
	}
	return nil
}

// Parse checks a config; nil gives nil.
func Parse(c *Config, profile *ca.Profile, all *clusters.Clusters) (*Plan, error) {
	if c == nil {
		return nil, nil
	}
	if c.PodCertificates == nil && c.CSRSigner == nil {
		return nil, fmt.Errorf("signing: neither podCertificates nor csrSigner is set; leave signing out, or set one")
	}
	p := &Plan{}
	var err error
	if p.cluster, err = all.WithServer("signing.cluster", c.Cluster); err != nil {
		return nil, err
	}
	if c.PodCertificates != nil {
		if err := p.parsePods(*c.PodCertificates, profile); err != nil {
			return nil, err
		}
	}
	if c.CSRSigner != nil {
		if err := p.parseNamed(*c.CSRSigner); err != nil {
			return nil, err
		}
	}
	if p.pods == p.named {
		return nil, fmt.Errorf("signing.csrSigner.signerName: %q is that of podCertificates, too; each needs its own, as rights go by it", p.named)
	}
	return p, nil
}

func (p *Plan) parsePods(c PodsConfig, profile *ca.Profile) (err error) {
	const field = "signing.podCertificates"
	if err := CheckSigner(field+".signerName", c.SignerName); err != nil {
		return err
	}
	p.pods = c.SignerName
	if p.life, err = process.Duration(field+".lifetime", c.Lifetime); err != nil {
		return err
	}
	if p.life == 0 {
		p.life = min(24*time.Hour, profile.MaxTTL())
	}
	switch {
	case profile.MaxTTL() < leastLife:
		return fmt.Errorf("%s: profile.maxTTL is %s, and the API takes no certificate of a pod that lives for less than %s", field, profile.MaxTTL(), leastLife)
	case p.life < leastLife || p.life > profile.MaxTTL():
		return fmt.Errorf("%s.lifetime: %s should be from %s, the API's minimum, to %s (profile.maxTTL)", field, p.life, leastLife, profile.MaxTTL())
	case profile.Backdate() > maxBackdate:
		return fmt.Errorf("%s: profile.backdate is %s; it should be at most %s, since the API takes no certificate that began five minutes ago", field, profile.Backdate(), maxBackdate)
	}
	return nil
}

func (p *Plan) parseNamed(c NamedConfig) error {
	const field = "signing.csrSigner"
	if err := CheckSigner(field+".signerName", c.SignerName); err != nil {
		return err
	}
	p.named, p.root, p.requesters = c.SignerName, c.IncludeRoot, map[string]*ca.Profile{}
	if len(c.Requesters) == 0 {
		return fmt.Errorf("%s.requesters is empty, so nobody could have a certificate; list who may, such as system:serviceaccount:istio-system:istiod", field)
	}
	for i, r := range c.Requesters {
		one := fmt.Sprintf("%s.requesters[%d]", field, i)
		switch {
		case r.User == "":
			return fmt.Errorf("%s.user is missing; it is a name as the API server knows it, such as system:serviceaccount:istio-system:istiod", one)
		case p.requesters[r.User] != nil:
			return fmt.Errorf("%s.user: %.80q is listed twice", one, r.User)
		case len(r.IDs) == 0:
			return fmt.Errorf("%s.ids is empty; list patterns of paths, such as /ns/*/sa/*", one)
		}
		patterns, err := ca.NewProfile("ids", ca.ProfileConfig{IDPaths: r.IDs})
		if err != nil {
			return fmt.Errorf("%s.ids: %s", one, strings.TrimPrefix(err.Error(), "profile ids: idPaths: "))
		}
		p.requesters[r.User] = patterns
	}
	return nil
}
