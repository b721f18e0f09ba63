// Package naming owns the group `naming` of a server's config, and what the server does about secure naming: the engine and a reader for each
// cluster, what revocation and migration mean to them, metrics, and the admin call that shows who may serve what.
//
// It refuses to read anything where the config does not ask for it, and decides nothing itself: trust/naming does.
package naming

import (
	"errors"
	"fmt"
	"strings"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/naming"
	"github.com/chancery-project/chancery/trust/naming/names"
)

// Config says who may serve which service, and where that is read.
type Config struct {
	// Clusters lists the clusters whose Services, EndpointSlices, pods, ServiceEntries and WorkloadEntries say who may serve what. Nothing is said of any
	// service before each has been read once. Default none. Who can write those objects in a namespace can name who serves its services.
	Clusters []ClusterConfig `json:"clusters,omitempty"`
	// Rules name identities of services, whatever the objects say. Default none.
	Rules []RuleConfig `json:"rules,omitempty"`
	// RootNamespace is the namespace whose ServiceEntries may name identities of Services in all namespaces, as Istio's root namespace. Default
	// istio-system.
	RootNamespace string `json:"rootNamespace,omitempty"`
	// ClusterDomain is the DNS domain of Services, by which a ServiceEntry's host NAME.NAMESPACE.svc.DOMAIN is known to be one. Default cluster.local.
	ClusterDomain string `json:"clusterDomain,omitempty"`
}

// ClusterConfig is a cluster that is read.
type ClusterConfig struct {
	// Name is that of an entry of the server's clusters, which has kubeconfig or inCluster. Required.
	Name string `json:"name"`
	// TrustDomain is that of the cluster's service accounts. Default: the server's.
	TrustDomain string `json:"trustDomain,omitempty"`
}

// RuleConfig names who may serve a service.
type RuleConfig struct {
	// Service is NAMESPACE/NAME, or NAMESPACE/HOST for one outside of Kubernetes. Required.
	Service string `json:"service"`
	// Identities are the SPIFFE IDs that may serve it, besides those that objects name. An empty list says that there is the service, and names nobody.
	Identities []string `json:"identities"`
}

// Place is a Config that was checked.
type Place struct {
	clusters            []cluster
	rules               []naming.RuleConfig
	root, clusterDomain string
}

// cluster is one that is read.
type cluster struct {
	name, kubeconfig string // no kubeconfig: inCluster
	domain           trust.Domain
}

// maxRules bounds the rules of a config.
const maxRules = 10_000

// Parse checks a config. It returns nil where the server has nothing to do with naming.
func Parse(c *Config, own trust.Domain, known []clusters.Config) (*Place, error) {
	if c == nil {
		return nil, nil
	}
	if len(c.Clusters)+len(c.Rules) == 0 {
		return nil, errors.New("naming: clusters and rules are both empty, so nothing could be said of any service; set one, or leave naming out")
	}
	p := &Place{root: c.RootNamespace, clusterDomain: c.ClusterDomain}
	process.SetDefault(&p.root, "istio-system")
	process.SetDefault(&p.clusterDomain, "cluster.local")
	if err := names.Check(p.root + "/x"); err != nil {
		return nil, fmt.Errorf("naming.rootNamespace: %.80q should be the name of a namespace", p.root)
	}
	if err := names.Check("x/" + p.clusterDomain); err != nil || strings.HasPrefix(p.clusterDomain, "*") {
		return nil, fmt.Errorf("naming.clusterDomain: %.80q should be a DNS name, such as cluster.local", p.clusterDomain)
	}
	for i, one := range c.Clusters {
		parsed, err := parseCluster(one, own, known)
		if err != nil {
			return nil, fmt.Errorf("naming.clusters[%d].%w", i, err)
		}
		for _, other := range p.clusters {
			if other.name == parsed.name {
				return nil, fmt.Errorf("naming.clusters[%d].name: %q occurs twice", i, one.Name)
			}
		}
		p.clusters = append(p.clusters, parsed)
	}
	return p, p.parseRules(c.Rules)
}

func parseCluster(c ClusterConfig, own trust.Domain, known []clusters.Config) (out cluster, err error) {
	out.name, out.domain = c.Name, own
	if c.TrustDomain != "" {
		if out.domain, err = trust.ParseDomain(c.TrustDomain); err != nil {
			return out, fmt.Errorf("trustDomain: %w", err)
		}
	}
	for _, k := range known {
		if k.Name != c.Name {
			continue
		}
		if k.Kubeconfig == "" && !k.InCluster {
			return out, fmt.Errorf("name: cluster %q of `clusters` has neither kubeconfig nor inCluster, so its objects cannot be read", c.Name)
		}
		out.kubeconfig = k.Kubeconfig
		return out, nil
	}
	return out, fmt.Errorf("name: %.80q is none of the server's `clusters`", c.Name)
}

func (p *Place) parseRules(rules []RuleConfig) error {
	if len(rules) > maxRules {
		return fmt.Errorf("naming.rules: %d rules; at most %d are read", len(rules), maxRules)
	}
	seen := map[string]int{}
	for i, r := range rules {
		if err := names.Check(r.Service); err != nil {
			return fmt.Errorf("naming.rules[%d].service: %w", i, err)
		}
		if first, twice := seen[r.Service]; twice {
			return fmt.Errorf("naming.rules[%d].service: %q is that of rules[%d] already; put all its identities into one list", i, r.Service, first)
		}
		seen[r.Service] = i
		if len(r.Identities) > naming.MaxNamed {
			return fmt.Errorf("naming.rules[%d].identities: %d identities; at most %d are read", i, len(r.Identities), naming.MaxNamed)
		}
		rule := naming.RuleConfig{Service: r.Service}
		for j, text := range r.Identities {
			id, err := trust.ParseID(text)
			if err == nil && id.Reserved() {
				err = fmt.Errorf("%s is one of Chancery's own, which serves nothing else", id)
			}
			if err != nil {
				return fmt.Errorf("naming.rules[%d].identities[%d]: %w", i, j, err)
			}
			rule.IDs = append(rule.IDs, id)
		}
		p.rules = append(p.rules, rule)
	}
	return nil
}
