package agent

import (
	"path/filepath"
	"strings"
	"testing"
)

// FuzzConfig: what is accepted is complete, and what is refused is refused in one line that names the file.
func FuzzConfig(f *testing.F) {
	f.Add("server: 127.0.0.1:8443\nserverRoots: r\ntokenFile: t\nidentity: spiffe://cluster.local/ns/a/sa/b\n")
	f.Add("server: a:1\nserverRoots: r\ntokenFile: t\nidentity: spiffe://td/ns/a/sa/b\ntrustDomain: td\nsvidTTL: 1h\nsocket: s\nallowUIDs: [0, 1]\n" +
		"files: [d]\nnaming: [{service: a/b, identities: [spiffe://td/x, spiffe://td/y]}]\n")
	f.Add("server: [\n")
	f.Add("a: &a [*a]\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseConfig([]byte(text), "/etc/agent.yaml")
		if err != nil {
			if !strings.HasPrefix(err.Error(), "config /etc/agent.yaml: ") || strings.Contains(err.Error(), "\n") {
				t.Errorf("%q: %q", text, err)
			}
			return
		}
		if s.id.IsZero() || s.id.Reserved() || s.ttl < 0 || len(s.naming) != len(s.Naming) {
			t.Errorf("%q was accepted as %+v", text, s)
		}
		for _, path := range append([]string{s.ServerRoots, s.TokenFile, s.Socket}, s.Files...) {
			if !filepath.IsAbs(path) {
				t.Errorf("%q: the path %q depends on where the agent is started", text, path)
			}
		}
		for service, ids := range s.naming {
			if strings.Count(service, "/") != 1 || len(ids) == 0 {
				t.Errorf("%q: anybody may serve %q", text, service)
			}
		}
	})
}
