package e2e

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
)

// TestNACKBlocksRotation: an Envoy that rejects the roots holds the rotation up, which says so in Envoy's own words; an admin who knows
// better lets it go on, and that is noted.
func TestNACKBlocksRotation(t *testing.T) {
	t.Parallel()
	// With SVIDs that live a minute: one that ends, on a machine with much to do, is a reason to go on.
	r := startRing(t, ringConfig{Seed: ringSeed(t), Nodes: 2, TTL: time.Minute})
	pod, agent := r.member(r.nodes[0].pod.Namespace, "broken")
	const words = "Invalid hex-encoded SHA-256"
	// It has an SVID, which it acknowledges. What it makes of the roots for another cluster fails.
	broken := startRingEnvoy(t, "broken", filepath.Join(SocketDir(t), "in"),
		EnvoyConfig{SDSSocket: agent.Socket, PeerURI: pod.SPIFFEID(trustDomain), Upstream: StartEcho(t)},
		EnvoyConfig{SDSSocket: agent.Socket, PeerURI: r.nodes[0].id, Upstream: r.nodes[0].inbound, Anonymous: true, Default: `verify_certificate_hash: ["` + strings.Repeat("z", 64) + `"]`})
	broken.WaitFor(t, 20*time.Second, "rejects the roots", func() error {
		if n := broken.Stats(t, "update_rejected")["sds.ROOTCA.update_rejected"]; n == 0 {
			return errors.New("it has not yet")
		}
		return nil
	})

	id := r.begin("--root")
	r.reaches(id, document.PhaseDistribute, rotationLimit)
	const because = "the broken proxy is being replaced"
	blocked := func(phase document.Phase) {
		t.Helper()
		Eventually(t, 2*r.cfg.TTL, "the gate waits for the broken Envoy, in its own words, and for nobody else", func() error {
			s, err := r.status()
			if err != nil || s.Rotation == nil {
				return fmt.Errorf("%+v, %w", s, err)
			}
			if s.Rotation.Phase != string(phase) {
				t.Fatalf("phase %s is reached though an Envoy rejects the roots: %+v", s.Rotation.Phase, s.Rotation)
			}
			for _, g := range s.Rotation.Gates {
				if g.Passed != (g.Name != "consumers") {
					return fmt.Errorf("gates %+v", s.Rotation.Gates)
				}
			}
			if g := s.Rotation.gate("consumers"); !strings.Contains(strings.Join(g.Waiting, "\n"), words) || g.Have+1 != g.Want {
				return fmt.Errorf("gate %+v; want all but one, and the words %q", g, words)
			}
			return nil
		})
		out, _, err := r.rotate(r.admin, "status")
		t.Logf("%v\n%s", err, out)
		if !strings.Contains(out, words) {
			t.Errorf("rotate status does not have Envoy's words %q", words)
		}
		r.mustRotate("override", "consumers", "--because", because)
	}
	blocked(document.PhaseDistribute)
	r.reaches(id, document.PhaseRetire, rotationLimit)
	blocked(document.PhaseRetire)
	last := r.ends(id, "done", rotationLimit)
	var phases []string
	for _, o := range last.Overrides {
		phases = append(phases, string(o.Phase))
		if o.Gate != "consumers" || o.Because != because || o.Actor == "" {
			t.Errorf("override %+v", o)
		}
	}
	if fmt.Sprint(phases) != "[distribute retire]" {
		t.Errorf("overridden in phases %v", phases)
	}
	lines, _ := r.servers[r.admin].Audit(t, func(a auditLine) bool { return strings.Contains(a.Detail+a.Reason, because) })
	if len(lines) != 2 {
		t.Errorf("the audit log tells of %d overrides with their reason; want 2: %+v", len(lines), lines)
	}
	r.noneLost()
}
