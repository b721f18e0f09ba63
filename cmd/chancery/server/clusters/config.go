package clusters

import (
	"fmt"
	"time"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/csr/kube"
)

// Config is one cluster whose tokens are accepted.
type Config struct {
	// Name is what callers send as clusterid. Required. Renaming a cluster makes its workloads come with a token again.
	Name string `json:"name"`
	// Issuer is the exact iss of tokens, such as https://kubernetes.default.svc. Required.
	Issuer string `json:"issuer"`
	// Audiences are the accepted aud values, one of which a token must have. At least one, and never the issuer, which
	// is the API server's own audience.
	Audiences []string `json:"audiences"`
	// JWKSFile holds the keys that sign tokens. It is read again when it changes. With it alone, pods are not watched: a
	// token is good until it ends. Who can write it can be anybody in this cluster.
	JWKSFile string `json:"jwksFile,omitempty"`
	// Kubeconfig reaches the API server, for keys, pods and TokenReview. Who can write it can be anybody in this cluster.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// InCluster reaches the API server by the service account of the pod that the server runs in, instead of Kubeconfig.
	// Default false.
	InCluster bool `json:"inCluster,omitempty"`
	// TokenReview says when the API server is asked about a token: never (default), fallback (for unknown keys only) or
	// always. The latter two need Kubeconfig or InCluster.
	TokenReview string `json:"tokenReview,omitempty"`
	// NodeAgents lists NAMESPACE/NAME of service accounts that may ask for the pods of their own node, where
	// pods are watched. Default none.
	NodeAgents []string `json:"nodeAgents,omitempty"`
	// AllowUnboundTokens accepts tokens that are bound to no pod though pods are watched. Default false.
	AllowUnboundTokens bool `json:"allowUnboundTokens,omitempty"`
	// MaxRenewalAge is how long an SVID may renew itself by certificate after its last token. Default 24h.
	MaxRenewalAge string `json:"maxRenewalAge,omitempty"`
}

// Paths are the fields that name files.
func (c *Config) Paths() []*string { return []*string{&c.JWKSFile, &c.Kubeconfig} }

// Clusters are configs that were checked.
type Clusters struct {
	configs     []Config
	reviews     []kube.Mode     // parallel to configs
	renewalAges []time.Duration // likewise; 0 = the default
}

// Parse checks what concerns the config file alone; Open checks each cluster as a whole.
func Parse(configs []Config) (*Clusters, error) {
	all := &Clusters{configs: configs}
	seen := map[string]int{}
	for i, c := range configs {
		field := fmt.Sprintf("clusters[%d]", i)
		if first, twice := seen[c.Name]; twice {
			return nil, fmt.Errorf("%s.name: %q is the name of clusters[%d] already; each needs its own", field, c.Name, first)
		}
		seen[c.Name] = i
		if c.Kubeconfig != "" && c.InCluster {
			return nil, fmt.Errorf("%s: kubeconfig and inCluster are both set; set one", field)
		}
		mode, err := kube.ParseMode(c.TokenReview)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", field, err)
		}
		age, err := process.Duration(field+".maxRenewalAge", c.MaxRenewalAge)
		if err != nil {
			return nil, err
		}
		all.reviews, all.renewalAges = append(all.reviews, mode), append(all.renewalAges, age)
	}
	return all, nil
}

// WithServer returns the cluster of a name whose API server is reached: the only such one where the name is empty. Field is whose name it is.
func (cs *Clusters) WithServer(field, name string) (Config, error) {
	var found []Config
	for _, c := range cs.configs {
		if name != "" && c.Name == name || name == "" && (c.Kubeconfig != "" || c.InCluster) {
			found = append(found, c)
		}
	}
	switch {
	case len(found) == 0 && name == "":
		return Config{}, fmt.Errorf("%s: no entry of clusters has kubeconfig or inCluster, and the API server has to be reached", field)
	case len(found) == 0:
		return Config{}, fmt.Errorf("%s: %q is no name in clusters", field, name)
	case len(found) > 1:
		return Config{}, fmt.Errorf("%s is missing: %d entries of clusters have kubeconfig or inCluster; name the one that is meant", field, len(found))
	case found[0].Kubeconfig == "" && !found[0].InCluster:
		return Config{}, fmt.Errorf("%s: cluster %q has neither kubeconfig nor inCluster, and its API server has to be reached", field, name)
	}
	return found[0], nil
}
