package server

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/cmd/chancery/server/connections"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/admission"
	"github.com/chancery-project/chancery/csr/agents"
)

const minimal = `
trustDomain: cluster.local
state: {sqlite: state/state.db}
auditLog: audit.jsonl
clusters:
- name: Kubernetes
  issuer: https://kubernetes.default.svc
  audiences: [istio-ca, chancery]
  jwksFile: jwks.json
`

// TestDocumentedDefaults holds what the comments of Config say.
func TestDocumentedDefaults(t *testing.T) {
	s, err := parseConfig([]byte(minimal), "/etc/chancery/server.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name      string
		got, want any
	}{
		{"listen", s.Listen, "127.0.0.1:8443"},
		{"metrics", s.Metrics, "127.0.0.1:9443"},
		{"serverNames, DNS", s.dns, []string{"localhost"}},
		{"serverNames, IPs", s.ips, []netip.Addr{netip.MustParseAddr("127.0.0.1")}},
		{"addrFile", s.AddrFile, ""},
		{"state.sqlite", s.State.SQLite, "/etc/chancery/state/state.db"},
		{"state.sealingKey", s.State.SealingKey, "/etc/chancery/state/state.key"},
		{"state.replica", s.State.Replica, "server"},
		{"state.dir", s.State.Dir, "/etc/chancery/state"},
		{"state.mark", s.place.Mark(), "/etc/chancery/state/state.mark"},
		{"roots.pem", s.rootsFile(), "/etc/chancery/state/roots.pem"},
		{"admin.sock", s.AdminSocket(), "/etc/chancery/state/admin.sock"},
		{"auditLog", s.AuditLog, "/etc/chancery/audit.jsonl"},
		{"issuer", s.Issuer.plugged() == nil, true},
		{"jwksFile", s.Clusters[0].JWKSFile, "/etc/chancery/jwks.json"},
		{"kubeconfig", s.Clusters[0].Kubeconfig, ""},
		{"inCluster", s.Clusters[0].InCluster, false},
		{"nodeAgents", len(s.Clusters[0].NodeAgents), 0},
		{"allowUnboundTokens", s.Clusters[0].AllowUnboundTokens, false},
		{"maxRenewalAge of csr", csr.DefaultMaxRenewalAge, 24 * time.Hour},
		{"lifetimes.root", s.lifetimes.Root, 87600 * time.Hour},
		{"lifetimes.issuer", s.lifetimes.Issuer, 168 * time.Hour},
		{"profile.maxTTL", s.profile.MaxTTL(), 24 * time.Hour},
		{"profile.defaultTTL", ca.DefaultTTL, time.Hour},
		{"connections", s.connections, connections.Times{}}, // csr takes its default:
		{"connections.maxAge", agents.DefaultMaxAge, 30 * time.Minute},
		{"admission", s.admission, admission.Config{}}, // likewise:
		{"admission.maxInFlight", admission.DefaultMaxInFlight, 128},
		{"admission.maxQueue", admission.DefaultMaxQueue, 10000},
		{"admission.maxWait", admission.DefaultMaxWait, 5 * time.Second},
	} {
		if !reflect.DeepEqual(c.got, c.want) {
			t.Errorf("%s is %v; documented is %v", c.name, c.got, c.want)
		}
	}
}

func TestEveryFieldArrives(t *testing.T) {
	s, err := parseConfig([]byte(`
trustDomain: example.org
listen: 0.0.0.0:8443
serverNames: [chancery.example, 10.0.0.1, "fd00::1", chancery.example]
metrics: 127.0.0.1:0
addrFile: addr
state: {sqlite: /var/lib/state.db, sealingKey: key}
auditLog: audit.jsonl
issuer: {tls: tls}
profile: {defaultTTL: 30m, maxTTL: 2h, backdate: 0s, keyTypes: [p256], idPaths: [/ns/*/sa/*], keyEncipherment: true}
clusters:
- name: a
  issuer: https://a
  audiences: [x]
  kubeconfig: kc
  tokenReview: fallback
  nodeAgents: [istio-system/ztunnel]
  allowUnboundTokens: true
  maxRenewalAge: 2h
- {name: b, issuer: https://b, audiences: [x], inCluster: true, tokenReview: always}
admission: {maxInFlight: 1, maxQueue: 2, maxWait: 3s, perIdentity: {perSecond: 4}, perNode: {perSecond: 5, burst: 6}, global: {perSecond: 0.5}}
connections: {maxAge: 10m, drainDelay: 5s}
federation:
- {trustDomain: b.example, url: "https://b.example/", profile: https_web, roots: web.pem}
- {trustDomain: c.example, url: "https://c.example/", profile: https_spiffe, endpointID: "spiffe://c.example/server", bootstrap: c.json}
bundleEndpoint: {listen: "0.0.0.0:8444", profile: https_web, certificate: e.pem, key: /etc/e.key, refreshHint: 10m}
`), "/c/server.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"chancery.example"}; !slices.Equal(s.dns, want) {
		t.Errorf("DNS names are %v, want %v", s.dns, want)
	}
	if want := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}; !slices.Equal(s.ips, want) {
		t.Errorf("IPs are %v, want %v", s.ips, want)
	}
	if p := s.Issuer.plugged(); p == nil || p.Dir != "/c/tls" {
		t.Errorf("issuer is %+v", p)
	}
	if s.State.SealingKey != "/c/key" || s.AddrFile != "/c/addr" || s.Clusters[0].Kubeconfig != "/c/kc" {
		t.Errorf("paths are %+v", s.Config)
	}
	if s.Federation[0].Roots != "/c/web.pem" || s.Federation[1].Bootstrap != "/c/c.json" || s.BundleEndpoint.Certificate != "/c/e.pem" || s.BundleEndpoint.Key != "/etc/e.key" {
		t.Errorf("federation is %+v, %+v", s.Federation, s.BundleEndpoint)
	}
	if s.rotation.Readers != 50*time.Minute { // decision D3
		t.Errorf("readers get %s", s.rotation.Readers)
	}
	want := admission.Config{
		MaxInFlight: 1, MaxQueue: 2, MaxWait: 3 * time.Second,
		PerIdentity: admission.Rate{PerSecond: 4}, PerNode: admission.Rate{PerSecond: 5, Burst: 6}, Global: admission.Rate{PerSecond: 0.5},
	}
	if want := (connections.Times{MaxAge: 10 * time.Minute, DrainDelay: 5 * time.Second}); s.connections != want {
		t.Errorf("connections are %+v, want %+v", s.connections, want)
	}
	if s.admission != want {
		t.Errorf("admission is %+v, want %+v", s.admission, want)
	}
	if s.profile.MaxTTL() != 2*time.Hour {
		t.Errorf("maxTTL is %s", s.profile.MaxTTL())
	}
}

// TestConfigErrors has for each field what is wrong with it; every error names the file, the field and what is right.
func TestConfigErrors(t *testing.T) {
	const cluster = "clusters:\n- {name: a, issuer: https://a, audiences: [x], jwksFile: j"
	for _, c := range []struct{ old, new, field, right string }{
		{"trustDomain: cluster.local", "", "trustDomain", "cluster.local"},
		{"cluster.local", "Cluster_Local!", "trustDomain", "only a-z"},
		{"state:", "listen: nowhere\nstate:", "listen", "host:port"},
		{"state:", "metrics: nowhere\nstate:", "metrics", "host:port"},
		{"state:", "serverNames: [0.0.0.0]\nstate:", "serverNames[0]", "DNS names"},
		{"state:", "serverNames: [a, '*.b']\nstate:", "serverNames[1]", "DNS names"},
		{"state:", "serverNames: [a..b]\nstate:", "serverNames[0]", "DNS names"},
		{"state:", "listen: 'bad host:1'\nstate:", "serverNames[1]", "DNS names"},
		{"sqlite: state/state.db", "", "state", "state.db"},
		{"state/state.db", "state/state.db, replica: Server_1", "state.replica", "server-1"},
		{"state/state.db", "s.db, postgres: {url: 'postgres://u@h/d'}", "state", "more than one"},
		{"sqlite: state/state.db", "postgres: {url: 'postgres://u@h/d'}", "state.sealingKey", "all servers on this store"},
		{"sqlite: state/state.db}", "kubernetes: {namespace: ca, inCluster: true}, sealingKey: k}\nkeys: {dir: d, passphraseFile: p}", "keys.dir and state.kubernetes", "D12"},
		{"auditLog: audit.jsonl", "auditLog: state/state.mark", "auditLog and the mark of the state", "each needs its own"},
		{"auditLog: audit.jsonl", "", "auditLog", "audit.jsonl"},
		{"auditLog: audit.jsonl", "auditLog: state/../state/state.db", "state.sqlite and auditLog", "each needs its own"},
		{"auditLog: audit.jsonl", "auditLog: state/state.key", "state.sealingKey and auditLog", "each needs its own"},
		{"auditLog: audit.jsonl", "auditLog: state/roots.pem", "auditLog and the roots for agents", "each needs its own"},
		{"auditLog: audit.jsonl", "auditLog: jwks.json", "auditLog, which is written, and clusters[0].jwksFile", "each needs its own"},
		{"state:", "addrFile: audit.jsonl\nstate:", "auditLog and addrFile", "each needs its own"},
		{"state:", "issuanceLog: audit.jsonl\nstate:", "auditLog and issuanceLog", "each needs its own"},
		{"state:", "issuer: {}\nstate:", "issuer", "set cacerts or tls"},
		{"state:", "issuer: {cacerts: a, tls: b}\nstate:", "issuer", "set the one"},
		{"state:", "lifetimes: {root: 10y}\nstate:", "lifetimes.root", "like 90s"},
		{"state:", "lifetimes: {root: 335h}\nstate:", "lifetimes.root", "at least twice lifetimes.issuer"},
		{"state:", "lifetimes: {root: 219001h}\nstate:", "lifetimes.root", "above 219000h"},
		{"state:", "lifetimes: {issuer: 9m}\nstate:", "lifetimes.issuer", "twice profile.defaultTTL"},
		{"state:", "lifetimes: {issuer: 3h}\nprofile: {defaultTTL: 2h}\nstate:", "lifetimes.issuer", "below 4h"},
		{"state:", "lifetimes: {issuer: 87601h, root: 219000h}\nstate:", "lifetimes.issuer", "above 87600h"},
		{"state:", "lifetimes: {issuer: -1h}\nstate:", "lifetimes.issuer", "negative"},
		{"state:", "lifetimes: {leaf: 1h}\nstate:", `there is no field "lifetimes.leaf"`, "known are root, issuer"},
		{"state:", "lifetimes: {issuer: 24h}\nissuer: {tls: t}\nstate:", "issuer and lifetimes", "leave lifetimes out"},
		{"state:", "profile: {defaultTTL: 48h}\nstate:", "profile", "above maxTTL"},
		{"state:", "profile: {maxTTL: 1d}\nstate:", "profile", "like 90s"},
		{"state:", "profile: {keyTypes: [dsa]}\nstate:", "profile", "keyTypes"},
		{"state:", "admission: {maxWait: soon}\nstate:", "admission.maxWait", "like 90s"},
		{"state:", "connections: {maxAge: 1s}\nstate:", "connections.maxAge", "from 1m0s"},
		{"state:", "admission: {maxQueue: -1}\nstate:", "admission", "not be negative"},
		{"state:", "admission: {perNode: {burst: 3}}\nstate:", "admission.perNode", "above 0"},
		{"state:", "admission: {global: {perSecond: -3}}\nstate:", "admission.global", "above 0"},
		{minimal[strings.Index(minimal, "clusters:"):], "clusters: []", "clusters", "list whose tokens"},
		{minimal[strings.Index(minimal, "clusters:"):], cluster + ", tokenReview: sometimes}", "clusters[0]", "never, fallback or always"},
		{minimal[strings.Index(minimal, "clusters:"):], cluster + ", maxRenewalAge: 1 day}", "clusters[0].maxRenewalAge", "like 90s"},
		{minimal[strings.Index(minimal, "clusters:"):], cluster + ", maxRenewalAge: -1h}", "clusters[0].maxRenewalAge", "negative"},
		{minimal[strings.Index(minimal, "clusters:"):], cluster + ", kubeconfig: k, inCluster: true}", "clusters[0]", "set one"},
		{minimal[strings.Index(minimal, "clusters:"):], cluster + "}\n- {name: a, issuer: https://b, audiences: [x]}", "clusters[1].name", "needs its own"},
	} {
		text := strings.Replace(minimal, c.old, c.new, 1)
		_, err := parseConfig([]byte(text), "/c/server.yaml")
		if err == nil || !strings.HasPrefix(err.Error(), "config /c/server.yaml: "+c.field) || !strings.Contains(err.Error(), c.right) ||
			strings.Contains(err.Error(), "profile: profile") {
			t.Errorf("%q: got %v; want the field %s and %q", c.new, err, c.field, c.right)
		}
	}
}

// TestClusterErrors has what is found when the clusters are put together, still before anything is touched.
func TestClusterErrors(t *testing.T) {
	for _, c := range []struct{ old, new, field string }{
		{"name: Kubernetes", "name: ''", "name"},
		{"issuer: https://kubernetes.default.svc", "issuer: ''", "issuer"},
		{"audiences: [istio-ca, chancery]", "audiences: []", "audiences"},
		{"chancery]", "https://kubernetes.default.svc]", "audiences"},
		{"jwksFile: jwks.json", "jwksFile: none.json", "jwksFile"},
		{"jwksFile: jwks.json", "nodeAgents: []", "jwksFile"},
		{"jwksFile: jwks.json", "kubeconfig: none.yaml", "kubeconfig"},
		{"jwksFile: jwks.json", "jwksFile: jwks.json\n  nodeAgents: [ztunnel]", "nodeAgents"},
		{"jwksFile: jwks.json", "jwksFile: jwks.json\n  tokenReview: always", "tokenReview"},
	} {
		dir := t.TempDir()
		file := filepath.Join(dir, "server.yaml")
		for name, text := range map[string]string{"server.yaml": strings.Replace(minimal, c.old, c.new, 1), "jwks.json": "{}"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s, err := Load(file)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Open(t.Context(), s, discard)
		if err == nil || !strings.HasPrefix(err.Error(), "config "+file+": clusters[0]: ") || !strings.Contains(err.Error(), c.field) {
			t.Errorf("%q: got %v; want clusters[0] and %s", c.new, err, c.field)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) != 2 {
			t.Errorf("%q: a wrong config left %v behind", c.new, left)
		}
	}
}

// TestD12SharedStoresNeedSharedKeys: keys in a folder of one server are refused where others work on the same state.
func TestD12SharedStoresNeedSharedKeys(t *testing.T) {
	stores := map[string]string{
		"sqlite":     "sqlite: s.db",
		"postgres":   "postgres: {url: 'postgres://u@h/d'}, sealingKey: k, replica: a",
		"kubernetes": "kubernetes: {namespace: ca, inCluster: true}, sealingKey: k, replica: a",
	}
	kinds := map[string]string{
		"sealed": "",
		"dir":    "keys: {dir: d, passphraseFile: p}\n",
		"token":  `keys: {pkcs11: "pkcs11:module-path=/l.so;token=a?pin-source=/p"}` + "\n",
		"secret": "keys: {secrets: {namespace: ca, inCluster: true}}\n",
	}
	for store, state := range stores {
		for kind, keys := range kinds {
			_, err := parseConfig([]byte(strings.Replace(minimal, "sqlite: state/state.db", state, 1)+keys), "/etc/server.yaml")
			if refused := store != "sqlite" && kind == "dir"; refused != (err != nil) || refused && !strings.Contains(err.Error(), "keys.dir and state."+store) {
				t.Errorf("state %s, keys %s: %v", store, kind, err)
			}
		}
	}
}
