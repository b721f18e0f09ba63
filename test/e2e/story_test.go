package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestStoryTokenToEnvoyMTLS is the product's whole way: bound tokens of two pods go in at one end, two Envoys talk mTLS at the
// other, and no request is lost while certificates rotate and while agent and server are killed (decision D8).
func TestStoryTokenToEnvoyMTLS(t *testing.T) {
	Tool(t, "envoy")
	k := SharedKube(t)
	ns := k.Namespace(t, "story")
	web, api := k.RunPod(t, ns, "web", "web-1", "node-a"), k.RunPod(t, ns, "api", "api-1", "node-b")
	server := StartServer(t, k.Cluster(k.ServerKubeconfig(t)))
	agentOf := func(pod Pod) *Agent {
		return StartAgent(t, server, AgentConfig{Pod: pod, Token: k.BoundToken(t, pod, time.Hour, audience), TTL: 8 * time.Second})
	}
	webAgent, apiAgent := agentOf(web), agentOf(api)

	inbound := StartServerEnvoy(t, EnvoyConfig{Name: "inbound", SDSSocket: apiAgent.Socket, PeerURI: web.SPIFFEID(trustDomain), Upstream: StartEcho(t)})
	inbound.WaitReady(t, 20*time.Second)
	outbound := StartClientEnvoy(t, EnvoyConfig{Name: "outbound", SDSSocket: webAgent.Socket, PeerURI: api.SPIFFEID(trustDomain), Upstream: inbound.Listen})
	outbound.WaitReady(t, 20*time.Second)
	load := StartLoad(t, LoadConfig{Addr: outbound.Listen, Rate: 100})

	waitRotations(t, load, 5, 5) // the first ones and four rotations
	noneLost(t, load, "over the rotations")

	refusedByPeer(t, "client", StartClientEnvoy(t, EnvoyConfig{
		Name: "expects-other", SDSSocket: webAgent.Socket, PeerURI: "spiffe://cluster.local/ns/foo/sa/other", Upstream: inbound.Listen,
	}), "cluster.fresh.ssl.fail_verify_san", nil)
	refusedByPeer(t, "server", StartClientEnvoy(t, EnvoyConfig{
		Name: "is-other", SDSSocket: apiAgent.Socket, PeerURI: api.SPIFFEID(trustDomain), Upstream: inbound.Listen,
	}), "listener.127.0.0.1_0.ssl.fail_verify_san", inbound)

	apiAgent.Kill()
	apiAgent.Start(t)
	waitRotations(t, load, 1, 2)
	noneLost(t, load, "over kill -9 of the server Envoy's agent")
	webAgent.Kill()
	webAgent.Start(t)
	waitRotations(t, load, 2, 1)
	noneLost(t, load, "over kill -9 of the client Envoy's agent")
	server.Kill()
	server.Start(t)
	waitRotations(t, load, 2, 2)

	report := load.Stop()
	t.Log(report)
	noneLost(t, load, "over kill -9 of the server")
	issuedTo(t, server, web.SPIFFEID(trustDomain), report.ClientSerials)
	issuedTo(t, server, api.SPIFFEID(trustDomain), report.ServerSerials)
}

// waitRotations waits until that many serials have been seen on each side that were not seen before.
func waitRotations(t *testing.T, load *Load, client, server int) {
	t.Helper()
	before := load.Report()
	Eventually(t, 60*time.Second, fmt.Sprintf("%d new client and %d new server certificates are seen", client, server), func() error {
		r := load.Report()
		c, s := len(r.ClientSerials)-len(before.ClientSerials), len(r.ServerSerials)-len(before.ServerSerials)
		if c < client || s < server {
			return fmt.Errorf("%d and %d: %v", c, s, r)
		}
		return nil
	})
}

func noneLost(t *testing.T, load *Load, when string) {
	t.Helper()
	if r := load.Report(); r.Failed > 0 || r.OK == 0 {
		t.Errorf("requests lost %s: %v", when, r)
	}
}

// refusedByPeer sends requests through an Envoy that must not succeed because one side (the Envoy's own cluster, or the counting
// server) finds another SPIFFE ID than it wants.
func refusedByPeer(t *testing.T, side string, e *Envoy, stat string, counting *Envoy) {
	t.Helper()
	if counting == nil {
		counting = e
	}
	e.WaitReady(t, 20*time.Second)
	before := counting.Stats(t, "fail_verify_san")[stat]
	for range 5 {
		if p, err := Request(e.Listen, true); err == nil || !strings.Contains(err.Error(), "503") {
			t.Errorf("%s should refuse the other's SPIFFE ID: got %+v, %v; want 503", side, p, err)
		}
	}
	if after := counting.Stats(t, "fail_verify_san"); after[stat] == before {
		t.Errorf("%s counts no refused SAN: %v", side, after)
	}
}

// issuedTo checks that the audit log has an issuance to the ID for each serial that was seen on the wire.
func issuedTo(t *testing.T, s *Server, id string, seen map[string]int) {
	t.Helper()
	lines, _ := s.Audit(t, func(a auditLine) bool { return a.Event == "intent" && a.SPIFFEID == id })
	for serial := range maps.Keys(seen) {
		if !slices.ContainsFunc(lines, func(a auditLine) bool { return strings.TrimLeft(a.Serial, "0") == strings.TrimLeft(serial, "0") }) {
			t.Errorf("serial %s was seen on the wire; the audit log has no issuance of it to %s", serial, id)
		}
	}
}

// TestStoryIstioAgent: a real Istio agent gets its certificate from the server and keeps it fresh, and the Envoy that it runs
// talks mTLS to one whose certificate comes from our agent.
func TestStoryIstioAgent(t *testing.T) {
	Tool(t, "envoy")
	Tool(t, "pilot-agent")
	k := SharedKube(t)
	ns := k.Namespace(t, "istio")
	web, api := k.RunPod(t, ns, "web", "web-1", "node-a"), k.RunPod(t, ns, "api", "api-1", "node-b")
	server := StartServer(t, k.Cluster(k.ServerKubeconfig(t)))
	apiAgent := StartAgent(t, server, AgentConfig{Pod: api, Token: k.BoundToken(t, api, time.Hour, audience), TTL: 8 * time.Second})
	inbound := StartServerEnvoy(t, EnvoyConfig{Name: "inbound", SDSSocket: apiAgent.Socket, PeerURI: web.SPIFFEID(trustDomain), Upstream: StartEcho(t)})
	inbound.WaitReady(t, 20*time.Second)

	sidecar := StartPilotAgent(t, PilotAgentConfig{
		Pod: web, Token: k.BoundToken(t, web, time.Hour, audience), CAAddr: server.Listen, CARootFile: server.Roots, SecretTTL: 8 * time.Second,
		Client: &EnvoyConfig{Name: "sidecar", PeerURI: api.SPIFFEID(trustDomain), Upstream: inbound.Listen},
	})
	secrets := sidecar.WaitSDS(t, 30*time.Second)
	chain, err := SecretChain(secrets["default"])
	if err != nil {
		t.Fatal(err)
	}
	roots, err := SecretRoots(secrets["ROOTCA"])
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(chain[0].URIs); got != "["+web.SPIFFEID(trustDomain)+"]" || len(chain) != 3 || len(roots) != 1 {
		t.Errorf("Istio's agent serves %s, a chain of %d and %d roots; want %s, the chain as it was answered (leaf, issuer, root), one root", got, len(chain), len(roots), web.SPIFFEID(trustDomain))
	}
	if err := chain[1].CheckSignatureFrom(roots[0]); err != nil {
		t.Errorf("the issuer is not signed by the root: %v", err)
	}

	sidecar.Envoy.WaitReady(t, 20*time.Second)
	load := StartLoad(t, LoadConfig{Addr: sidecar.Envoy.Listen, Rate: 50})
	waitRotations(t, load, 4, 4)
	report := load.Stop()
	t.Log(report)
	noneLost(t, load, "between Istio's sidecar and ours")
	issuedTo(t, server, web.SPIFFEID(trustDomain), report.ClientSerials)
	if lines, _ := server.Audit(t, func(a auditLine) bool {
		return a.Event == "intent" && a.SPIFFEID == web.SPIFFEID(trustDomain) && (a.Requester.Pod != web.Name || a.Requester.Node != web.Node)
	}); len(lines) > 0 {
		t.Errorf("the audit log names another pod or node than %s on %s: %+v", web.Name, web.Node, lines[0])
	}
}
