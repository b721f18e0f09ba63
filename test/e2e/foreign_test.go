package e2e

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

func domainOf(t testing.TB, name string) trust.Domain {
	t.Helper()
	td, err := trust.ParseDomain(name)
	if err != nil {
		t.Fatal(err)
	}
	return td
}

func idOf(t testing.TB, text string) trust.ID {
	t.Helper()
	id, err := trust.ParseID(text)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func bundleOf(t testing.TB, name string, roots ...*testCA) *trust.Bundle {
	t.Helper()
	var all []*x509.Certificate
	for _, r := range roots {
		all = append(all, r.cert)
	}
	b, err := trust.NewBundle(domainOf(t, name), 1, all)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestD24ForeignRootsInEnvoy: what each SDS name makes an Envoy 1.40 accept, where the authority has two trust domains and federates with
// two others. A foreign SVID is taken by the names that are for it, and by no other; and a foreign root that signs an identity of ours, or of
// another foreign domain, is refused by each of them.
func TestD24ForeignRootsInEnvoy(t *testing.T) {
	t.Parallel()
	Tool(t, "envoy")
	root := map[string]*testCA{}
	for _, name := range []string{"own", "kin", "one", "two"} {
		root[name] = authority(t, name+" root", p256(t), nil)
	}
	const own, kin, one, two = "spiffe://cluster.local/ns/foo/sa/web", "spiffe://kin.test/ns/foo/sa/web", "spiffe://one.test/vm", "spiffe://two.test/vm"
	w := &crlWorld{clients: map[string]certFiles{}}
	for client, c := range map[string]struct{ by, id string }{
		"o": {"own", own}, "k": {"kin", kin}, "1": {"one", one}, "2": {"two", two}, "x": {"one", "spiffe://one.test/another"},
		"A": {"one", own}, "B": {"one", kin}, "C": {"two", one}, "D": {"own", one}, "E": {"one", "spiffe://nowhere.test/vm"}, // forged
	} {
		files, err := root[c.by].issue(t.TempDir(), client, pkix.Name{}, c.id)
		if err != nil {
			t.Fatal(err)
		}
		w.clients[client] = files
	}
	line, err := bundleOf(t, trustDomain, root["own"]).WithKin(bundleOf(t, "kin.test", root["kin"]), bundleOf(t, "former.test"))
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(w.clients["o"].Cert, w.clients["o"].Key)
	if err != nil {
		t.Fatal(err)
	}
	id, err := trust.NewIdentity(idOf(t, own), []*x509.Certificate{pair.Leaf}, pair.PrivateKey.(crypto.Signer), line, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	view := &sds.View{
		Identities: []*trust.Identity{id}, Bundles: []*trust.Bundle{line, bundleOf(t, "one.test", root["one"]), bundleOf(t, "two.test", root["two"])},
		Naming: map[string][]trust.ID{
			"s/own": {idOf(t, own)}, "s/mixed": {idOf(t, own), idOf(t, one)}, "s/one": {idOf(t, one)}, "s/both": {idOf(t, one), idOf(t, two)}, "s/none": {},
		},
	}
	socket := serveView(t, view)
	for name, want := range map[string]string{
		"ROOTCA":                 "ko",
		"ALL":                    "12kox",
		"spiffe://cluster.local": "o",
		"spiffe://kin.test":      "k",
		"spiffe://former.test":   "",
		"spiffe://one.test":      "1x",
		"service:s/own":          "ko",
		"service:s/mixed":        "ko",
		"service:s/one":          "1",
		"service:s/both":         "12",
		"service:s/none":         "",
	} {
		// Plain contexts do not bind a root to a domain: what the own root signs of a foreign name is no worse than what it signs anyway.
		forged := ""
		if name == "ROOTCA" || name == "spiffe://cluster.local" {
			forged = "D"
		}
		t.Run(strings.NewReplacer("/", "_", ":", "").Replace(name), func(t *testing.T) {
			t.Parallel()
			server := StartServerEnvoy(t, EnvoyConfig{Name: "server", SDSSocket: socket, RootName: name, Upstream: StartEcho(t)})
			server.WaitReady(t, 60*time.Second)
			got := ""
			for _, client := range []string{"A", "B", "C", "D", "E", "1", "2", "k", "o", "x"} {
				if _, err := w.call(t, server.Listen, client, nil); err == nil {
					got += client
				} else if !strings.Contains(err.Error(), "tls: ") && !strings.Contains(err.Error(), "broken pipe") && !strings.Contains(err.Error(), "reset by peer") {
					t.Errorf("%s failed by something else than the handshake: %v", client, err)
				}
			}
			if got != forged+want {
				t.Errorf("let in are %q, want %q", got, forged+want)
			}
		})
	}
}

// TestD24FederationReachesProxies: the bundle of a foreign trust domain that an admin imports reaches an Envoy by the server and its agent, and so
// does that it is forgotten; meanwhile it outlives a kill -9 of the agent while the server is away.
func TestD24FederationReachesProxies(t *testing.T) {
	t.Parallel()
	Tool(t, "envoy")
	foreign := authority(t, "foreign root", p256(t), nil)
	w := &crlWorld{clients: map[string]certFiles{}}
	for client, id := range map[string]string{"foreign": "spiffe://foreign.test/vm", "forged": "spiffe://" + trustDomain + "/ns/foo/sa/web"} {
		files, err := foreign.issue(t.TempDir(), client, pkix.Name{}, id)
		if err != nil {
			t.Fatal(err)
		}
		w.clients[client] = files
	}
	bundle, err := (&spiffebundle.Bundle{Domain: domainOf(t, "foreign.test"), Roots: []*x509.Certificate{foreign.cert}, Sequence: 3, HasSequence: true}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "federation"), "web", "web-1", "node-a")
	s := StartServer(t, k.StaticCluster(t))
	a := StartAgent(t, s, AgentConfig{Pod: pod, Token: k.BoundToken(t, pod, time.Hour, audience)})
	all := StartServerEnvoy(t, EnvoyConfig{Name: "all", SDSSocket: a.Socket, RootName: "ALL", Upstream: StartEcho(t)})
	own := StartServerEnvoy(t, EnvoyConfig{Name: "own", SDSSocket: a.Socket, Upstream: StartEcho(t)})
	all.WaitReady(t, 60*time.Second)
	own.WaitReady(t, 60*time.Second)
	wait := func(what string, let bool) {
		t.Helper()
		a.WaitFor(t, 30*time.Second, what, func() error {
			if _, err := w.call(t, all.Listen, "foreign", nil); (err == nil) != let {
				return fmt.Errorf("a foreign client: %v", err)
			}
			return nil
		})
		for name, envoy := range map[string]*Envoy{"ALL": all, "ROOTCA": own} {
			if _, err := w.call(t, envoy.Listen, "forged", nil); err == nil {
				t.Errorf("%s: by %s an identity of ours counts that a foreign root has signed", what, name)
			}
		}
		if _, err := w.call(t, own.Listen, "foreign", nil); err == nil {
			t.Errorf("%s: ROOTCA lets a foreign client in", what)
		}
	}
	wait("before anything is known", false)
	file := filepath.Join(t.TempDir(), "foreign.json")
	writeFile(t, file, string(bundle), 0o600)
	MustRun(t, "trust", "import", "foreign.test", file, "-c", s.Config)
	wait("once it is imported", true)

	s.Kill()
	a.Kill()
	a.Start(t)
	a.WaitFor(t, 30*time.Second, "has the foreign roots that it kept", func() error {
		data, err := os.ReadFile(a.Socket + ".bundle.federation")
		if err != nil || !strings.Contains(string(data), `"federation":`) {
			return fmt.Errorf("kept is %q, %v", data, err)
		}
		return nil
	})
	wait("while the server is away", true)
	s.Start(t)
	s.WaitReady(t)
	MustRun(t, "trust", "forget", "foreign.test", "-c", s.Config)
	wait("once it is forgotten", false)
}
