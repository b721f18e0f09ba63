package e2e

import (
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"
)

// TestD16RenewalByCertificate: without its token an agent goes on by the SVID that it holds, but neither beyond its pod nor beyond
// maxRenewalAge, and a refusal takes nothing away before its time (invariant 7).
func TestD16RenewalByCertificate(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	ns := k.Namespace(t, "renewal")
	// The same cluster under two names, so that one server has both limits.
	day := k.Cluster(k.ServerKubeconfig(t))
	short := day
	short.Name, short.MaxRenewalAge = "short", "7s"
	server := StartServer(t, day, short)

	t.Run("until the pod is gone", func(t *testing.T) {
		t.Parallel()
		pod := k.RunPod(t, ns, "web", "web-1", "node-a")
		agent := StartAgent(t, server, AgentConfig{
			Pod: pod, Token: k.BoundToken(t, pod, time.Hour, audience), Cluster: day.Name, TTL: 8 * time.Second,
		})
		leaf := withoutToken(t, agent)
		for range 2 {
			leaf = agent.WaitRenewal(t, 15*time.Second, leaf)
			renewedBy(t, server, leaf, "mtls")
		}
		k.DeletePod(t, pod)
		agent.WaitLog(t, 20*time.Second, "POD_GONE")
		keptUntilItEnds(t, agent)
	})

	t.Run("until the last token is too old", func(t *testing.T) {
		t.Parallel()
		pod := k.RunPod(t, ns, "api", "api-1", "node-a")
		agent := StartAgent(t, server, AgentConfig{
			Pod: pod, Token: k.BoundToken(t, pod, time.Hour, audience), Cluster: short.Name, TTL: 8 * time.Second,
		})
		// The first renewal comes after 3 to 5 s, the second before or after 7.
		renewedBy(t, server, agent.WaitRenewal(t, 15*time.Second, withoutToken(t, agent)), "mtls")
		agent.WaitLog(t, 20*time.Second, "ATTESTATION_TOO_OLD")
		ended := keptUntilItEnds(t, agent)
		WriteToken(t, agent.TokenFile, k.BoundToken(t, pod, time.Hour, audience))
		renewedBy(t, server, agent.WaitRenewal(t, 30*time.Second, ended), "token")
	})
}

// withoutToken waits for an agent's first certificate and takes its token away.
func withoutToken(t *testing.T, a *Agent) *x509.Certificate {
	t.Helper()
	leaf := a.WaitRenewal(t, 15*time.Second, nil)
	if err := os.Remove(a.TokenFile); err != nil {
		t.Fatal(err)
	}
	return leaf
}

// renewedBy checks how the agent proved itself for a certificate.
func renewedBy(t *testing.T, s *Server, leaf *x509.Certificate, method string) {
	t.Helper()
	lines, _ := s.Audit(t, func(a auditLine) bool { return a.Event == "intent" && a.Serial == serialOf(leaf) })
	if len(lines) != 1 || lines[0].Requester.Method != method || lines[0].SPIFFEID != leaf.URIs[0].String() {
		t.Errorf("serial %s should have been issued once, to %s, by %s: %+v", serialOf(leaf), leaf.URIs[0], method, lines)
	}
}

// keptUntilItEnds checks that an agent which is refused serves its certificate to the end of its life, and returns it.
func keptUntilItEnds(t *testing.T, a *Agent) *x509.Certificate {
	t.Helper()
	served, err := a.Leaf(t)
	if err != nil || time.Now().After(served.NotAfter) {
		t.Fatalf("after a refusal the agent should serve what it has: %v, %v", served, err)
	}
	Eventually(t, 20*time.Second, "the certificate has ended", func() error {
		leaf, err := a.Leaf(t)
		switch now := time.Now(); {
		case now.After(served.NotAfter):
			return nil
		case err != nil || !leaf.Equal(served):
			t.Fatalf("%v before its end serial %s is not served: %v", served.NotAfter.Sub(now), serialOf(served), err)
		}
		return fmt.Errorf("not before %v", served.NotAfter)
	})
	a.WaitFor(t, 10*time.Second, "is not ready any more", func() error {
		if a.ready(t) {
			return errors.New("it says it is")
		}
		return nil
	})
	return served
}
