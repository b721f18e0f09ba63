package signing

import (
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
)

func profile(t *testing.T, c ca.ProfileConfig) *ca.Profile {
	t.Helper()
	p, err := ca.NewProfile("workload", c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func all(t *testing.T, configs ...clusters.Config) *clusters.Clusters {
	t.Helper()
	c, err := clusters.Parse(configs)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestParse(t *testing.T) {
	one := clusters.Config{Name: "one", InCluster: true}
	file := clusters.Config{Name: "file", JWKSFile: "keys"}
	pods := &PodsConfig{SignerName: "chancery.dev/workload"}
	named := &NamedConfig{SignerName: "chancery.dev/mesh", Requesters: []RequesterConfig{{"istiod", []string{"/ns/*/sa/*"}}}}
	for name, tc := range map[string]struct {
		in      *Config
		profile ca.ProfileConfig
		all     []clusters.Config
		error   string
	}{
		"none":               {},
		"both":               {in: &Config{PodCertificates: pods, CSRSigner: named}},
		"named cluster":      {in: &Config{Cluster: "one", PodCertificates: pods}, all: []clusters.Config{file, one, {Name: "two", InCluster: true}}},
		"nothing":            {in: &Config{}, error: "neither podCertificates nor csrSigner"},
		"no such cluster":    {in: &Config{Cluster: "x", PodCertificates: pods}, error: `signing.cluster: "x" is no name in clusters`},
		"cluster of a file":  {in: &Config{Cluster: "file", PodCertificates: pods}, all: []clusters.Config{file, one}, error: `cluster "file" has neither kubeconfig nor inCluster`},
		"no API server":      {in: &Config{PodCertificates: pods}, all: []clusters.Config{file}, error: "no entry of clusters has kubeconfig"},
		"two clusters":       {in: &Config{PodCertificates: pods}, all: []clusters.Config{one, {Name: "two", Kubeconfig: "k"}}, error: "signing.cluster is missing: 2 entries"},
		"signer":             {in: &Config{PodCertificates: &PodsConfig{SignerName: "workload"}}, error: "signing.podCertificates.signerName: \"workload\" should be DOMAIN/NAME"},
		"Kubernetes' signer": {in: &Config{PodCertificates: &PodsConfig{SignerName: "a.kubernetes.io/x"}}, error: "Kubernetes' own"},
		"short":              {in: &Config{PodCertificates: &PodsConfig{"chancery.dev/w", "59m"}}, error: "lifetime: 59m0s should be from 1h0m0s"},
		"long":               {in: &Config{PodCertificates: &PodsConfig{"chancery.dev/w", "25h"}}, error: "lifetime: 25h0m0s should be from"},
		"short profile":      {in: &Config{PodCertificates: pods}, profile: ca.ProfileConfig{MaxTTL: "30m"}, error: "profile.maxTTL is 30m0s"},
		"backdate":           {in: &Config{PodCertificates: pods}, profile: ca.ProfileConfig{Backdate: "5m"}, error: "profile.backdate is 5m0s"},
		"same signer":        {in: &Config{PodCertificates: pods, CSRSigner: &NamedConfig{SignerName: "chancery.dev/workload", Requesters: named.Requesters}}, error: "is that of podCertificates, too"},
		"no requesters":      {in: &Config{CSRSigner: &NamedConfig{SignerName: "chancery.dev/mesh"}}, error: "requesters is empty"},
		"no user":            {in: &Config{CSRSigner: &NamedConfig{SignerName: "chancery.dev/mesh", Requesters: []RequesterConfig{{"", []string{"/a"}}}}}, error: "requesters[0].user is missing"},
		"twice":              {in: &Config{CSRSigner: &NamedConfig{SignerName: "chancery.dev/mesh", Requesters: []RequesterConfig{{"a", []string{"/a"}}, {"a", []string{"/b"}}}}}, error: "requesters[1].user: \"a\" is listed twice"},
		"no ids":             {in: &Config{CSRSigner: &NamedConfig{SignerName: "chancery.dev/mesh", Requesters: []RequesterConfig{{"a", nil}}}}, error: "requesters[0].ids is empty"},
		"reserved":           {in: &Config{CSRSigner: &NamedConfig{SignerName: "chancery.dev/mesh", Requesters: []RequesterConfig{{"a", []string{"/chancery/server"}}}}}, error: "requesters[0].ids: pattern \"/chancery/server\": paths under /chancery/ are reserved"},
	} {
		if tc.all == nil {
			tc.all = []clusters.Config{file, one}
		}
		p, err := Parse(tc.in, profile(t, tc.profile), all(t, tc.all...))
		if (err == nil) != (tc.error == "") || err != nil && !strings.Contains(err.Error(), tc.error) {
			t.Errorf("%s: %v, want %q", name, err, tc.error)
		}
		if err == nil && (p == nil) != (tc.in == nil) {
			t.Errorf("%s: plan %+v", name, p)
		}
		if err == nil && p != nil && (p.cluster.Name != "one" || p.pods != "" && p.life != 24*time.Hour) {
			t.Errorf("%s: cluster %s, life %s", name, p.cluster.Name, p.life)
		}
	}
}
