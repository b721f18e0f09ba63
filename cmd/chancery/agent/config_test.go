package agent

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

const minimal = `
server: 127.0.0.1:8443
serverRoots: roots.pem
tokenFile: token
identity: spiffe://cluster.local/ns/foo/sa/web
`

func load(t *testing.T, text string) (*Settings, string, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Load(file)
	return s, file, err
}

// TestDocumentedDefaults holds what the comments of Config say.
func TestDocumentedDefaults(t *testing.T) {
	s, file, err := load(t, minimal)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name      string
		got, want any
	}{
		{"serverRoots", s.ServerRoots, filepath.Join(filepath.Dir(file), "roots.pem")},
		{"tokenFile", s.TokenFile, filepath.Join(filepath.Dir(file), "token")},
		{"trustDomain", s.id.Domain().String(), "cluster.local"},
		{"cluster", s.Cluster, ""},
		{"socket", s.Socket, "/run/chancery/agent.sock"},
		{"allowUIDs, root", s.allowed(0), true},
		{"allowUIDs, own", s.allowed(uint32(os.Getuid())), true},
		{"allowUIDs, others", s.allowed(54321), false},
		{"svidTTL", s.ttl, time.Duration(0)},
		{"files", len(s.Files), 0},
		{"naming", len(s.naming), 0},
		{"metrics", s.Metrics, "127.0.0.1:9444"},
		{"addrFile", s.AddrFile, ""},
	} {
		if !reflect.DeepEqual(c.got, c.want) {
			t.Errorf("%s is %v; documented is %v", c.name, c.got, c.want)
		}
	}
}

func TestEveryFieldArrives(t *testing.T) {
	s, file, err := load(t, minimal+`
trustDomain: cluster.local
cluster: east
socket: agent.sock
allowUIDs: [54321]
svidTTL: 10m
files: [certs, /etc/certs]
naming:
- {service: foo/api, identities: [spiffe://cluster.local/ns/foo/sa/api, spiffe://cluster.local/ns/foo/sa/api2]}
metrics: 127.0.0.1:0
addrFile: addr
`)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(file)
	if want := []string{filepath.Join(dir, "certs"), "/etc/certs"}; !reflect.DeepEqual(s.Files, want) {
		t.Errorf("files are %v, want the absolute %v", s.Files, want)
	}
	if s.Socket != filepath.Join(dir, "agent.sock") || s.AddrFile != filepath.Join(dir, "addr") || s.ttl != 10*time.Minute || !s.allowed(54321) {
		t.Errorf("got %+v", s)
	}
	if got := s.Addresses(); !reflect.DeepEqual(got, []string{"127.0.0.1:8443"}) {
		t.Errorf("servers are %v", got)
	}
	several, _, err := load(t, strings.Replace(minimal, "server: 127.0.0.1:8443", "servers: [a:8443, b.example.org:8443]", 1))
	if err != nil {
		t.Fatal(err)
	}
	if got := several.Addresses(); !reflect.DeepEqual(got, []string{"a:8443", "b.example.org:8443"}) {
		t.Errorf("servers are %v", got)
	}
	if ids := s.naming["foo/api"]; len(ids) != 2 || ids[1].String() != "spiffe://cluster.local/ns/foo/sa/api2" {
		t.Errorf("naming is %v", s.naming)
	}
}

// TestConfigErrors has for each field what is wrong with it; every error names the file, the field and what is right.
func TestConfigErrors(t *testing.T) {
	for _, c := range []struct{ old, new, field, right string }{
		{"server: 127.0.0.1:8443", "", "server is missing", "host:port"},
		{"serverRoots: roots.pem", "", "serverRoots is missing", "authority init"},
		{"tokenFile: token", "", "tokenFile is missing", "service-account token"},
		{"identity: spiffe://cluster.local/ns/foo/sa/web", "", "identity is missing", "spiffe://"},
		{"127.0.0.1:8443", "localhost", "server: ", "host:port"},
		{"server: 127.0.0.1:8443", "servers: [a:1, b]", "servers[1]: ", "host:port"},
		{"server: 127.0.0.1:8443", "servers: [a:1, b:1, a:1]", "servers[2]: a:1 occurs twice", "once"},
		{"server: 127.0.0.1:8443", "servers: ['', a:1]", "servers[0]: ", "host:port"},
		{"server: 127.0.0.1:8443", "servers: []", "server is missing", "host:port"},
		{"server: 127.0.0.1:8443", "servers: [a:1,a:2,a:3,a:4,a:5,a:6,a:7,a:8,a:9,a:10,a:11,a:12,a:13,a:14,a:15,a:16,a:17]", "servers lists 17", "at most 16"},
		{"tokenFile", "servers: [a:1]\ntokenFile", "server and servers are both set", "servers"},
		{"tokenFile", "metrics: 1\ntokenFile", "metrics should be text", "quotes"},
		{"tokenFile", "addrFile: token\ntokenFile", "addrFile, which is written, and tokenFile", "each needs its own"},
		{"tokenFile", "metrics: here\ntokenFile", "metrics: ", "host:port"},
		{"spiffe://", "https://", "identity: ", "spiffe://"},
		{"ns/foo/sa/web", "chancery/server", "identity: ", "/ns/NS/sa/SA"},
		{"tokenFile", "trustDomain: other\ntokenFile", "trustDomain is other", "should be the same"},
		{"tokenFile", "trustDomain: 'a b'\ntokenFile", "trustDomain: ", "only a-z"},
		{"tokenFile", "svidTTL: 1 hour\ntokenFile", "svidTTL: ", "like 90s"},
		{"tokenFile", "svidTTL: -1h\ntokenFile", "svidTTL: ", "negative"},
		{"tokenFile", "files: ['']\ntokenFile", "files[0] is empty", "/etc/certs"},
		{"tokenFile", "naming: [{service: api, identities: [spiffe://a/b]}]\ntokenFile", "naming[0].service: ", "NAMESPACE/NAME"},
		{"tokenFile", "naming: [{service: foo/api, identities: []}]\ntokenFile", "naming[0].identities is empty", "list who"},
		{"tokenFile", "naming: [{service: foo/api, identities: [web]}]\ntokenFile", "naming[0].identities[0]: ", "spiffe://"},
		{"tokenFile", "naming: [{service: f/a, identities: [spiffe://a/b]}, {service: f/a, identities: [spiffe://a/b]}]\ntokenFile", "naming[1].service: ", "occurs twice"},
		{"tokenFile", "allowUIDs: [-1]\ntokenFile", "allowUIDs[0] should be", "from 0"},
		{"tokenFile", "allowUids: [1]\ntokenFile", `there is no field "allowUids"`, "allowUIDs"},
	} {
		_, file, err := load(t, strings.Replace(minimal, c.old, c.new, 1))
		if err == nil || !strings.HasPrefix(err.Error(), "config "+file+": "+c.field) || !strings.Contains(err.Error(), c.right) {
			t.Errorf("%q: got %v; want %s and %q", c.new, err, c.field, c.right)
		}
	}
}
