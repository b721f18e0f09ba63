package publishing

import (
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
	"github.com/chancery-project/chancery/trust"
)

func TestParse(t *testing.T) {
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	all, err := clusters.Parse([]clusters.Config{{Name: "one", InCluster: true}})
	if err != nil {
		t.Fatal(err)
	}
	bundle := &BundleConfig{SignerName: "chancery.dev/workload"}
	for name, tc := range map[string]struct {
		in    *Config
		floor time.Duration
		error string
	}{
		"none":         {},
		"defaults":     {in: &Config{ClusterTrustBundle: bundle, ConfigMaps: &MapsConfig{}}, floor: 3 * time.Minute},
		"times":        {in: &Config{ConfigMaps: &MapsConfig{NamespaceSelector: "a=b,c notin (d)"}, KubeletSync: "10s", Reread: "0s"}, floor: 20 * time.Second},
		"nothing":      {in: &Config{}, error: "neither clusterTrustBundle nor configMaps"},
		"cluster":      {in: &Config{Cluster: "x", ConfigMaps: &MapsConfig{}}, error: `publishing.cluster: "x" is no name in clusters`},
		"manager":      {in: &Config{ConfigMaps: &MapsConfig{}, FieldManager: "a b"}, error: "publishing.fieldManager"},
		"sync":         {in: &Config{ConfigMaps: &MapsConfig{}, KubeletSync: "2h"}, error: "publishing.kubeletSync: 2h0m0s should be from 1s"},
		"reread":       {in: &Config{ConfigMaps: &MapsConfig{}, Reread: "200h"}, error: "publishing.reread: 200h0m0s"},
		"signer":       {in: &Config{ClusterTrustBundle: &BundleConfig{SignerName: "x"}}, error: "publishing.clusterTrustBundle.signerName"},
		"lead":         {in: &Config{ClusterTrustBundle: &BundleConfig{"a.b/c", "x"}}, error: `canaryLead: "x" is not a duration`},
		"selector":     {in: &Config{ConfigMaps: &MapsConfig{NamespaceSelector: "a=b=c"}}, error: "is no label selector"},
		"name":         {in: &Config{ConfigMaps: &MapsConfig{Name: "A_B"}}, error: "publishing.configMaps.name"},
		"Istio's name": {in: &Config{ConfigMaps: &MapsConfig{Name: IstioName}}, error: "istio: true publishes istio-ca-root-cert"},
	} {
		p, err := Parse(tc.in, td, all)
		if (err == nil) != (tc.error == "") || err != nil && !strings.Contains(err.Error(), tc.error) {
			t.Errorf("%s: %v, want %q", name, err, tc.error)
		}
		if err == nil && p.Floor() != tc.floor {
			t.Errorf("%s: floor %s, want %s", name, p.Floor(), tc.floor)
		}
	}
}
