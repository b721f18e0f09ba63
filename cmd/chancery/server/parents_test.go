package server

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/trust"
)

// TestParentConfigErrors: every error names the file, the field and what is right.
func TestParentConfigErrors(t *testing.T) {
	const east = "identity: spiffe://cluster.local/ns/chancery/sa/east"
	for _, c := range []struct{ text, field, right string }{
		{"parent: {}", "parent", "exactly one of"},
		{"parent: {lifetime: 1h}", "parent", "exactly one of"},
		{"parent: {files: {tls: a}, vault: {address: 'https://a', tokenFile: t}}", "parent", "2 kinds are set (files, vault)"},
		{"parent: {files: {tls: a}}\nissuer: {tls: a}", "issuer and parent are both set", "set issuer for"},
		{"parent: {files: {tls: a}}\nlifetimes: {issuer: 24h}", "parent and lifetimes are both set", "parent.lifetime"},
		{"parent: {files: {}}", "parent.files", "set one of cacerts and tls"},
		{"parent: {files: {tls: a, cacerts: b}}", "parent.files", "set one of cacerts and tls"},
		{"parent: {files: {tls: a}, lifetime: soon}", "parent.lifetime", "like 90s"},
		{"parent: {files: {tls: a}, lifetime: 1s}", "parent.lifetime", "between 10s"},
		{"parent: {files: {tls: a}, lifetime: 900000h}", "parent.lifetime", "between 10s"},
		{"parent: {chancery: {server: nowhere, serverRoots: r, tokenFile: t}}", "parent.chancery.server", "host:port"},
		{"parent: {chancery: {server: 'a:1', tokenFile: t}}", "parent.chancery.serverRoots", "is missing"},
		{"parent: {chancery: {server: 'a:1', serverRoots: r}}", "parent.chancery.tokenFile", "is missing"},
		{"parent: {certManager: {namespace: a, issuer: b}}", "parent.certManager", "one of kubeconfig and inCluster"},
		{"parent: {certManager: {namespace: a, issuer: b, kubeconfig: k, inCluster: true}}", "parent.certManager", "one of kubeconfig and inCluster"},
		{"parent: {certManager: {issuer: b, inCluster: true}}", "parent.certManager.namespace", "is missing"},
		{"parent: {certManager: {namespace: b, inCluster: true}}", "parent.certManager.issuer", "is missing"},
		{"parent: {vault: {address: 'http://vault.example', tokenFile: t}}", "parent.vault: address", "https://"},
		{"parent: {vault: {address: 'https://a'}}", "parent.vault", "one of tokenFile and kubernetes"},
		{"parent: {vault: {address: 'https://a', tokenFile: t, kubernetes: {role: r}}}", "parent.vault", "one of tokenFile and kubernetes"},
		{"parent: {vault: {address: 'https://a', kubernetes: {role: ''}}}", "parent.vault: kubernetes", "role"},
		{"parent: {vault: {address: 'https://a', tokenFile: t, mount: ../sys}}", "parent.vault: mount", "such as pki"},
		{"parent: {cfssl: {address: ca.example, authKeyFile: k}}", "parent.cfssl: address", "https://host"},
		{"parent: {cfssl: {address: 'https://a'}}", "parent.cfssl: authKeyFile", "in hex"},
		{"parent: {cfssl: {address: 'https://a', authKeyFile: k}, lifetime: 1h}", "parent.lifetime", "leave it out"},
		{"issuers: [{maxLifetime: 1h}]", "issuers[0].identity", ""},
		{"issuers: [{identity: 'spiffe://cluster.local/chancery/server', maxLifetime: 1h}]", "issuers[0].identity", "not the identity of a pod"},
		{"issuers: [{identity: 'spiffe://other/ns/a/sa/b', maxLifetime: 1h}]", "issuers[0].identity", "in this trust domain"},
		{"issuers: [{" + east + "}]", "issuers[0].maxLifetime", "between"},
		{"issuers: [{" + east + ", maxLifetime: 1h, pathLength: -1}]", "issuers[0].pathLength", "between 0 and"},
		{"issuers: [{" + east + ", maxLifetime: 1h}, {" + east + ", maxLifetime: 2h}]", "issuers[1].identity", "listed twice"},
	} {
		_, err := parseConfig([]byte(minimal+c.text), "/c/server.yaml")
		if err == nil || !strings.HasPrefix(err.Error(), "config /c/server.yaml: "+c.field) || !strings.Contains(err.Error(), c.right) {
			t.Errorf("%q: got %v; want the field %s and %q", c.text, err, c.field, c.right)
		}
	}
}

// TestParentPathsAreAbsolute: files that a parent is reached by count from the config's folder, as all do.
func TestParentPathsAreAbsolute(t *testing.T) {
	for _, text := range []string{
		"parent: {files: {tls: F}}", "parent: {files: {cacerts: F}}", "parent: {chancery: {server: 'a:1', serverRoots: F, tokenFile: F}}",
		"parent: {certManager: {kubeconfig: F, namespace: a, issuer: b}}", "parent: {vault: {address: 'https://a', roots: F, tokenFile: F}}",
		"parent: {vault: {address: 'https://a', kubernetes: {role: r, tokenFile: F}}}",
		"parent: {cfssl: {address: 'https://a', roots: F, authKeyFile: F, chainFile: F}}",
	} {
		s, err := parseConfig([]byte(minimal+text), "/c/server.yaml")
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		n := 0
		for _, p := range s.Parent.Paths() {
			if *p != "" && *p != "/c/F" {
				t.Errorf("%s: a path is %s", text, *p)
			}
			if *p != "" {
				n++
			}
		}
		if n != strings.Count(text, ": F") {
			t.Errorf("%s: %d paths", text, n)
		}
	}
}

// TestParentExamples: what docs/parents.md shows as a server's config is one.
func TestParentExamples(t *testing.T) {
	data, err := os.ReadFile("../../../docs/parents.md")
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]bool{}
	for i, block := range strings.Split(string(data), "```") {
		text, ok := strings.CutPrefix(block, "yaml\n# server")
		if i%2 == 0 || !ok {
			continue
		}
		_, text, _ = strings.Cut(text, "\n")
		s, err := parseConfig([]byte(minimal+text), "/etc/chancery/server.yaml")
		if err != nil {
			t.Errorf("%v:\n%s", err, text)
			continue
		}
		switch {
		case s.parent != nil:
			kinds[s.parent.Kind()] = true
		case len(s.grants) > 0:
			kinds["issuers"] = true
		}
	}
	if len(kinds) != 6 {
		t.Errorf("there are examples of %v", kinds)
	}
}

// With a parent, init needs the root, and makes nothing without it.
func TestInitWithAParentNeedsTheRoot(t *testing.T) {
	dir := t.TempDir()
	s, err := parseConfig([]byte(strings.Replace(minimal, "state/state.db", "state.db", 1)+"parent: {files: {tls: parent}}"), filepath.Join(dir, "server.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := Init(t.Context(), s, &out); err == nil || !strings.Contains(err.Error(), "--root FILE") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(s.State.SQLite); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a state was made: %v", err)
	}
	root := newRoot(t)
	if err := initialize(t.Context(), s, []*x509.Certificate{root}, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "the server asks its parent (files)") {
		t.Error(out.String())
	}
	if pem, err := os.ReadFile(s.rootsFile()); err != nil || !bytes.Equal(pem, trust.EncodeCertificates(root)) {
		t.Errorf("roots.pem: %v", err)
	}
}

// newRoot returns the root of another server.
func newRoot(t *testing.T) *x509.Certificate {
	t.Helper()
	srv, stop := started(t, "")
	defer stop()
	b, err := srv.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	return b.Roots()[0]
}

// A server whose root is kept elsewhere cannot sign issuers, and does not start with a list of who may have some; nor does one
// start with a parent that has a root of its own.
func TestServersThatCannotSignOrNeedNoParent(t *testing.T) {
	root := newRoot(t)
	for name, c := range map[string]struct {
		more  string
		roots []*x509.Certificate
		later string // added after init
		want  string
	}{
		"issuers": {"parent: {files: {tls: parent}}\n", []*x509.Certificate{root},
			"issuers: [{identity: 'spiffe://cluster.local/ns/a/sa/b', maxLifetime: 1h}]\n", "cannot sign issuers of other servers"},
		"parent": {"", nil, "parent: {files: {tls: parent}}\n", "the root's key lies here"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			text := strings.Replace(minimal, "state/state.db", "state.db", 1) + c.more
			parse := func(text string) *Settings {
				s, err := parseConfig([]byte(text), filepath.Join(dir, "server.yaml"))
				if err != nil {
					t.Fatal(err)
				}
				return s
			}
			if err := os.WriteFile(filepath.Join(dir, "jwks.json"), []byte(`{"keys": [{"kty": "EC", "crv": "P-256", "use": "sig", "kid": "a", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU", "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}`), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := initialize(context.Background(), parse(text), c.roots, t.Output()); err != nil {
				t.Fatal(err)
			}
			srv, err := Open(t.Context(), parse(text+c.later), discard)
			if err == nil {
				srv.Close()
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}
