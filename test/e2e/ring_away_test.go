package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestAgentOffDuringRotation: agents that were off during a whole root rotation come back: by what they kept; by a file of roots that
// was replaced meanwhile; and where there is neither, they say what to do, and that does.
func TestAgentOffDuringRotation(t *testing.T) {
	t.Parallel()
	r := startRing(t, ringConfig{Seed: ringSeed(t), Nodes: 2})
	ns := r.nodes[0].pod.Namespace
	type away struct {
		*Agent
		pod Pod
	}
	all := map[string]away{}
	for _, name := range []string{"keeps", "rereads", "lost"} {
		pod, agent := r.member(ns, name)
		all[name] = away{agent, pod}
	}
	old := r.authorities()
	for _, a := range all {
		a.WaitFor(t, 20*time.Second, "is ready", func() error { return readyAgent(t, a.Agent) })
	}
	for _, a := range all {
		a.Kill()
	}
	id := r.begin("--root")
	r.ends(id, "done", rotationLimit)
	now := r.authorities()
	if now.root == old.root {
		t.Fatal("the root is the old one")
	}

	back := func(name string) {
		t.Helper()
		all[name].WaitFor(t, 30*time.Second, "serves an SVID of the new issuer", func() error {
			if err := readyAgent(t, all[name].Agent); err != nil {
				return err
			}
			leaf, err := all[name].Leaf(t)
			if err == nil && issuerOf(leaf) != now.issuer {
				err = fmt.Errorf("it is of %s", issuerOf(leaf))
			}
			return err
		})
	}
	all["keeps"].Start(t)
	back("keeps")

	all["rereads"].forgets(t)
	all["rereads"].trusts(t, readFile(t, r.servers[0].Roots))
	all["rereads"].Start(t)
	back("rereads")

	all["lost"].forgets(t)
	all["lost"].Start(t)
	all["lost"].WaitLog(t, 30*time.Second, "serverRoots")
	line := ""
	for l := range strings.Lines(all["lost"].Log()) {
		if strings.Contains(l, "serverRoots") {
			line = strings.TrimSpace(l)
		}
	}
	t.Logf("an agent that knows old roots only says: %s", line)
	if err := readyAgent(t, all["lost"].Agent); err == nil {
		t.Error("an agent that cannot verify any server is ready")
	}
	// What it says is to be done while it runs.
	all["lost"].trusts(t, readFile(t, r.servers[0].Roots))
	back("lost")
	r.noneLost()
}

// forgets removes all that the agent keeps between two starts, as with an emptyDir.
func (a *Agent) forgets(t testing.TB) {
	t.Helper()
	files, err := os.ReadDir(a.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		switch f.Name() {
		case "agent.yaml", "token", "agent.log", "addrs":
		default:
			if err := os.RemoveAll(filepath.Join(a.dir, f.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// trusts replaces the agent's file of the roots that vouch for servers.
func (a *Agent) trusts(t testing.TB, roots string) {
	t.Helper()
	if err := errors.Join(os.WriteFile(a.roots+".new", []byte(roots), 0o600), os.Rename(a.roots+".new", a.roots)); err != nil {
		t.Fatal(err)
	}
}

// readyAgent returns what an agent's /readyz says, nil if it is ready.
func readyAgent(t testing.TB, a *Agent) error {
	addrs, err := readAddrs(filepath.Join(a.dir, "addrs"))
	if err != nil {
		return err
	}
	_, err = httpGet(http.DefaultClient, "http://"+addrs["metrics"]+"/readyz")
	return err
}
