package server

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca"
)

// FuzzConfig: what is accepted is complete and within bounds, and what is refused is refused in one line that names the file.
func FuzzConfig(f *testing.F) {
	f.Add(minimal)
	f.Add(minimal + "listen: 0.0.0.0:0\nmetrics: '[::1]:1'\nserverNames: [a.b, 10.0.0.1]\naddrFile: a\nissuanceLog: l\n" +
		"profile: {defaultTTL: 1h, maxTTL: 2h, keyTypes: [p256, rsa]}\nadmission: {maxInFlight: 1, maxQueue: 2, maxWait: 1s, perNode: {perSecond: 0.5, burst: 3}}\n")
	f.Add(strings.Replace(minimal, "jwksFile: jwks.json", "kubeconfig: k\n  tokenReview: fallback\n  nodeAgents: [a/b]\n  maxRenewalAge: 2h", 1))
	f.Add(minimal + "keys: {store: files, dir: k, passphraseFile: p, type: p384}\n")
	f.Add(minimal + "issuer: {cacerts: d}\n")
	f.Add(strings.Replace(minimal, "sqlite: state/state.db", "postgres: {url: 'postgres://u@h:1/d?sslmode=disable', passwordFile: p, schema: s}, sealingKey: k, replica: a.b, dir: d", 1))
	f.Add(strings.Replace(minimal, "sqlite: state/state.db", "kubernetes: {namespace: n, name: x, inCluster: true}, sealingKey: k", 1))
	f.Add("a: &a [*a]\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseConfig([]byte(text), "/etc/server.yaml")
		if err != nil {
			if !strings.HasPrefix(err.Error(), "config /etc/server.yaml: ") || strings.Contains(err.Error(), "\n") {
				t.Errorf("%q: %q", text, err)
			}
			return
		}
		if s.domain.IsZero() || s.profile == nil || s.profile.MaxTTL() > ca.LeafTTLLimit || len(s.Clusters) == 0 || s.clusters == nil || s.place == nil ||
			len(s.dns)+len(s.ips) == 0 {
			t.Errorf("%q was accepted as %+v", text, s)
		}
		if s.place.Shared() == (s.State.SQLite != "") || s.place.Shared() && s.keys.Local() {
			t.Errorf("%q was accepted as %+v", text, s.State)
		}
		for _, path := range []string{s.State.SealingKey, s.State.Dir, s.AuditLog} {
			if !filepath.IsAbs(path) {
				t.Errorf("%q: the path %q depends on where the server is started", text, path)
			}
		}
		names := map[string]bool{}
		for i, c := range s.Clusters {
			if names[c.Name] || c.Kubeconfig != "" && c.InCluster { // kube.New checks the rest
				t.Errorf("%q: cluster %d was accepted as %+v", text, i, c)
			}
			names[c.Name] = true
		}
		if a := s.admission; a.MaxInFlight < 0 || a.MaxQueue < 0 || a.MaxWait < 0 {
			t.Errorf("%q: admission %+v", text, a)
		}
	})
}
