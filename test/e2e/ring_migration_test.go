package e2e

import (
	"crypto/x509"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// otherDomain is where migrations of tests lead to.
const otherDomain = "mesh.example"

// migrationTTL is that of SVIDs while domains move: each step waits for all of them.
const migrationTTL = 12 * time.Second

// TestD17Migration moves all identities from one trust domain to another and back, under requests all the time: by namespace, by share, and all; with a
// server and an agent killed on the way, and one agent that sleeps through all of it. In another ring it is taken back: while both domains are issued, and
// when all have the new one. No request is lost, counted on both sides; and what was retired is refused.
func TestD17Migration(t *testing.T) {
	t.Parallel()
	seed := ringSeed(t)
	t.Logf("RING_SEED=%d", seed)
	for name, history := range map[string]func(*ring){"there and back": movesThereAndBack, "taken back": movesAndIsTakenBack} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRing(t, ringConfig{Seed: seed, Nodes: 3, Servers: 2, Also: otherDomain, TTL: ringDuration(t, "RING_TTL", migrationTTL)})
			history(r)
			r.noneLost()
		})
	}
}

func movesThereAndBack(r *ring) {
	r.t.Helper()
	old := r.steal()
	pod, off := r.member(r.nodes[0].pod.Namespace, "off")
	off.WaitFor(r.t, 20*time.Second, "is ready", func() error { return readyAgent(r.t, off) })
	off.Kill()
	r.movesByShare(old)
	r.presents(old, false, "after the migration")
	r.holds(r.authorities().root)
	r.takesTheNewName()
	off.Start(r.t)
	off.WaitFor(r.t, 30*time.Second, "serves an SVID of the domain that came while it was off", func() error {
		leaf, err := off.Leaf(r.t)
		if err == nil && leaf.URIs[0].String() != r.names(pod.SPIFFEID(trustDomain))[1] {
			err = fmt.Errorf("it is %s", leaf.URIs[0])
		}
		return err
	})
	r.ends(r.migrates(trustDomain), "done", rotationLimit)
	r.gets()
	r.presents(old, false, "after the way back, which made another root")
}

func movesAndIsTakenBack(r *ring) {
	r.t.Helper()
	first := r.authorities()
	id := r.migrates(otherDomain, "--namespace", r.nodes[1].pod.Namespace)
	r.reaches(id, document.PhaseIssue, rotationLimit)
	r.gets()
	r.waits("share", "trust migrate issue")
	r.migrate("rollback", "--rotation", id)
	r.ends(id, "rolled back", rotationLimit)
	r.gets()
	r.holds(first.root)

	id = r.migrates(otherDomain)
	r.reaches(id, document.PhaseReissue, rotationLimit)
	r.passes(10, "while all certificates are replaced")
	r.migrate("rollback", "--rotation", id)
	r.ends(id, "rolled back", rotationLimit)
	r.gets()
	r.holds(first.root)
}

// migrate runs `chancery trust migrate ARGS...`.
func (r *ring) migrate(args ...string) {
	r.t.Helper()
	if _, stderr, err := r.run(r.admin, append([]string{"trust", "migrate"}, args...)...); err != nil {
		r.t.Fatalf("trust migrate %v: %v: %s", args, err, stderr)
	}
}

// migrates starts a migration and returns its ID.
func (r *ring) migrates(to string, args ...string) string {
	r.t.Helper()
	return r.beginBy(append([]string{"trust", "migrate", "start", "--to", to}, args...)...)
}

// movesByShare goes all the way, and kills a server and an agent while both domains are issued. Old is the issuer of before.
func (r *ring) movesByShare(old stolen) {
	r.t.Helper()
	id := r.migrates(otherDomain, "--namespace", r.nodes[1].pod.Namespace)
	r.reaches(id, document.PhaseIssue, rotationLimit)
	r.gets()
	for i, name := range r.names(r.nodes[0].id) { // each root vouches for its own domain only (decision D10)
		leaf := old.leaf(r.t, name)
		if err := r.probe.trusts(r.t, name, []*x509.Certificate{leaf.Leaf, old.cert}); (err == nil) != (i == 0) {
			r.t.Errorf("go-spiffe on a certificate of the old issuer for %s: %v", name, err)
		}
	}
	victim := r.servers[r.killer.draw.IntN(len(r.servers))]
	r.t.Logf("%s: kill -9 of %s", r.at(), victim.Name)
	victim.Kill()
	victim.Start(r.t)
	victim.WaitReady(r.t)
	r.migrate("issue", "--share", "50", "--rotation", id)
	n := r.nodes[r.killer.draw.IntN(len(r.nodes))]
	r.t.Logf("%s: kill -9 of the agent of %s", r.at(), n.Name)
	n.agent.Kill()
	n.agent.Start(r.t)
	r.gets()
	r.migrate("issue", "--share", "100", "--rotation", id)
	last := r.ends(id, "done", rotationLimit)
	if len(last.Overrides) != 0 || last.Migration == nil || last.Migration.To != otherDomain {
		r.t.Errorf("it ended as %+v", last)
	}
	r.gets()
}

// takesTheNewName gives a server and an agent a config that says what they are by now; the others go on under the old name.
func (r *ring) takesTheNewName() {
	r.t.Helper()
	s := r.servers[0]
	if err := s.Stop(r.t, 20*time.Second); err != nil {
		r.t.Fatal(err)
	}
	rewrite(r.t, s.Config, "trustDomain: "+trustDomain, "trustDomain: "+r.cfg.Also)
	s.Start(r.t)
	s.WaitReady(r.t)
	a := r.nodes[0].agent
	a.Kill()
	rewrite(r.t, a.config(), "trustDomain: "+trustDomain, "trustDomain: "+r.cfg.Also)
	rewrite(r.t, a.config(), r.nodes[0].id, r.names(r.nodes[0].id)[1])
	a.Start(r.t)
	r.passes(10, "after some have the new name")
}

// gets waits until each client shows certificates of the trust domain that the document gives it, and of no other.
func (r *ring) gets() {
	r.t.Helper()
	d, err := r.document()
	if err != nil {
		r.t.Fatal(err)
	}
	td := domain(r.t)
	only := func(id string, to *ringNode) error {
		key, _ := d.Line(td)
		path, err := trust.ParseID(id)
		if err != nil {
			return err
		}
		want := d.Of(td).DomainFor(key, path).String()
		for i, name := range r.names(id) {
			if n := sum(to.seen.issuers(name)); (n > 0) != ([]string{trustDomain, r.cfg.Also}[i] == want) {
				return fmt.Errorf("%d requests came from %s; want all to be of %s", n, name, want)
			}
		}
		return nil
	}
	Eventually(r.t, 3*r.cfg.TTL, "everybody has certificates of the domain that the plan gives", func() error {
		r.passes(5, "to see of which domain they are")
		errs := []error{only(r.probe.id, r.nodes[probeTarget])}
		for _, l := range r.loads {
			errs = append(errs, only(l.id, l.to))
		}
		return errors.Join(errs...)
	})
}

// waits checks that a gate is open, and its words.
func (r *ring) waits(gate, words string) {
	r.t.Helper()
	s, err := r.status()
	if err != nil {
		r.t.Fatal(err)
	}
	if g := s.Rotation.gate(gate); g.Passed || !slices.ContainsFunc(g.Waiting, func(w string) bool { return strings.Contains(w, words) }) {
		r.t.Errorf("gate %s is %+v; want it to wait, with %q", gate, g, words)
	}
}

// config is the file of the agent's config.
func (a *Agent) config() string { return filepath.Join(a.dir, "agent.yaml") }

// rewrite replaces what a file says in one place.
func rewrite(t *testing.T, path, old, with string) {
	t.Helper()
	text := readFile(t, path)
	if strings.Count(text, old) != 1 {
		t.Fatalf("%s has %q %d times; want it once", path, old, strings.Count(text, old))
	}
	writeFile(t, path, strings.Replace(text, old, with, 1), 0o600)
}
