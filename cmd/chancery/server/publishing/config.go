// Package publishing owns the group `publishing` of a server's config: where the roots are published in Kubernetes, how long its readers
// take, and joining the publisher to the parts of the server.
//
// It refuses to publish nowhere. What is not configured runs nothing and keeps nothing.
package publishing

import (
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
	"github.com/chancery-project/chancery/cmd/chancery/server/signing"
	"github.com/chancery-project/chancery/trust"
)

// Config says where the roots are published in Kubernetes.
type Config struct {
	// Cluster names the entry of clusters whose API server is written to; it needs kubeconfig or inCluster. Default: the only one that has.
	Cluster string `json:"cluster,omitempty"`
	// ClusterTrustBundle publishes two ClusterTrustBundles, live and canary. Default none.
	ClusterTrustBundle *BundleConfig `json:"clusterTrustBundle,omitempty"`
	// ConfigMaps publishes ConfigMaps in namespaces. Default none.
	ConfigMaps *MapsConfig `json:"configMaps,omitempty"`
	// FieldManager is under which name fields are applied, and others are told apart. Default chancery- and the trust domain. Two authorities
	// that publish in one cluster need two.
	FieldManager string `json:"fieldManager,omitempty"`
	// Force takes keys that another manager had first, such as istiod. Default false: they are left, and reported.
	Force bool `json:"force,omitempty"`
	// KubeletSync is the kubelets' syncFrequency: a projected file follows its object within twice that. From 1s to 1h. Default 1m.
	KubeletSync string `json:"kubeletSync,omitempty"`
	// Reread is how long those who read the files may take to read them again. At most 168h. Default 1m.
	Reread string `json:"reread,omitempty"`
}

// BundleConfig says which ClusterTrustBundles there are.
type BundleConfig struct {
	// SignerName is DOMAIN/NAME, such as chancery.dev/workload; the names are made of it. Required.
	SignerName string `json:"signerName"`
	// CanaryLead is how much earlier the canary has new roots. At most 168h. Default 1m.
	CanaryLead string `json:"canaryLead,omitempty"`
}

// MapsConfig says which ConfigMaps there are.
type MapsConfig struct {
	// NamespaceSelector is a label selector, such as istio-injection=enabled. Default: all namespaces.
	NamespaceSelector string `json:"namespaceSelector,omitempty"`
	// Name is that of our own, with roots.pem and bundle.json. Default chancery-roots.
	Name string `json:"name,omitempty"`
	// Istio publishes istio-ca-root-cert as well, for Istio's proxies. Default false. istiod does that itself unless it is told not to.
	Istio bool `json:"istio,omitempty"`
}

// IstioName is the ConfigMap that Istio's proxies mount.
const IstioName = "istio-ca-root-cert"

const longest = 7 * 24 * time.Hour // of each time; a rotation waits for all of them

// Plan is a Config that was checked. Nil: nothing is published.
type Plan struct {
	cluster  clusters.Config
	signer   string // empty for none
	lead     time.Duration
	maps     *MapsConfig // nil for none; with defaults
	selector labels.Selector
	manager  string
	force    bool
	floor    time.Duration
	hint     time.Duration
}

// Floor is how long readers take to have roots from when they are published (decision D3): twice a kubelet's sync and their own time; 0 where
// nothing is. The canary's lead is not in it, since it is over by then.
func (p *Plan) Floor() time.Duration {
	if p == nil {
		return 0
	}
	return p.floor
}

// Parse checks a config; nil gives nil.
func Parse(c *Config, td trust.Domain, all *clusters.Clusters) (*Plan, error) {
	if c == nil {
		return nil, nil
	}
	if c.ClusterTrustBundle == nil && c.ConfigMaps == nil {
		return nil, fmt.Errorf("publishing: neither clusterTrustBundle nor configMaps is set; leave publishing out, or set one")
	}
	p := &Plan{force: c.Force, manager: c.FieldManager}
	process.SetDefault(&p.manager, "chancery-"+td.String())
	var err error
	if p.cluster, err = all.WithServer("publishing.cluster", c.Cluster); err != nil {
		return nil, err
	}
	if len(p.manager) > 128 || strings.ContainsFunc(p.manager, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, fmt.Errorf("publishing.fieldManager: %.140q should be at most 128 printable characters; set a shorter one", p.manager)
	}
	sync, err := within("publishing.kubeletSync", c.KubeletSync, time.Minute, time.Second, time.Hour)
	if err != nil {
		return nil, err
	}
	reread, err := within("publishing.reread", c.Reread, time.Minute, 0, longest)
	if err != nil {
		return nil, err
	}
	p.hint, p.floor = sync, 2*sync+reread
	if b := c.ClusterTrustBundle; b != nil {
		if err := signing.CheckSigner("publishing.clusterTrustBundle.signerName", b.SignerName); err != nil {
			return nil, err
		}
		p.signer = b.SignerName
		if p.lead, err = within("publishing.clusterTrustBundle.canaryLead", b.CanaryLead, time.Minute, 0, longest); err != nil {
			return nil, err
		}
	}
	return p, p.parseMaps(c.ConfigMaps)
}

func within(field, s string, def, least, most time.Duration) (time.Duration, error) {
	if s == "" {
		return def, nil
	}
	d, err := process.Duration(field, s)
	if err == nil && (d < least || d > most) {
		err = fmt.Errorf("%s: %s should be from %s to %s", field, d, least, most)
	}
	return d, err
}

func (p *Plan) parseMaps(c *MapsConfig) (err error) {
	if c == nil {
		return nil
	}
	own := *c
	process.SetDefault(&own.Name, "chancery-roots")
	p.maps = &own
	if p.selector, err = labels.Parse(c.NamespaceSelector); err != nil {
		return fmt.Errorf("publishing.configMaps.namespaceSelector: %.200q is no label selector, such as istio-injection=enabled: %w", c.NamespaceSelector, err)
	}
	if len(validation.IsDNS1123Subdomain(own.Name)) > 0 || own.Name == IstioName {
		return fmt.Errorf("publishing.configMaps.name: %.80q should be a name for our own ConfigMap, such as chancery-roots; istio: true publishes %s", own.Name, IstioName)
	}
	return nil
}
