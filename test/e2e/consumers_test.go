package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// consumersFile is an agent's table of consumers, as far as tests look at it.
type consumersFile struct {
	Agent string `json:"agent"`
	Rows  []struct {
		PID      int    `json:"pid"`
		Node     string `json:"node"`
		Rejected []struct {
			Words string `json:"words"`
		} `json:"rejected"`
		SVIDs []struct {
			Acked bool `json:"acked"`
		} `json:"svids"`
		Contexts []struct {
			Name       string `json:"name"`
			Generation uint64 `json:"generation"`
		} `json:"contexts"`
	} `json:"rows"`
}

func (a *Agent) consumers(t *testing.T) (c consumersFile) {
	t.Helper()
	data, err := os.ReadFile(a.Socket + ".consumers")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

// gauge returns one of an agent's metrics without labels.
func (a *Agent) gauge(addr, name string) (float64, error) {
	body, err := httpGet(http.DefaultClient, "http://"+addr+"/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(body)) {
		if v, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(v), 64)
		}
	}
	return 0, fmt.Errorf("no metric %s", name)
}

// waitEvidence waits until the agent counts so many consumers, and says that all, or not all, have acknowledged its generation.
func (a *Agent) waitEvidence(t *testing.T, addr string, consumers float64, all bool) {
	t.Helper()
	a.WaitFor(t, 20*time.Second, fmt.Sprintf("counts %v consumers, all up to date: %v", consumers, all), func() error {
		var v [3]float64
		for i, name := range []string{"consumers", "bundle_generation", "acknowledged_generation"} {
			var err error
			if v[i], err = a.gauge(addr, "chancery_agent_"+name); err != nil {
				return err
			}
		}
		if v[0] != consumers || v[1] == 0 || (v[1] == v[2]) != all {
			return fmt.Errorf("%v consumers, generation %v of %v", v[0], v[2], v[1])
		}
		return nil
	})
}

// TestD1EvidenceOfRealEnvoys: an agent knows of each Envoy that it has handed an SVID whether it acknowledged the newest roots, why it
// did not in Envoy's own words, and counts it also once it has gone; kill -9 of the agent takes none of that away, and the Envoys that
// live go on in their rows, and serve all the while.
func TestD1EvidenceOfRealEnvoys(t *testing.T) {
	t.Parallel()
	Tool(t, "envoy")
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "evidence"), "web", "web-1", "node-a")
	s := StartServer(t, k.StaticCluster(t))
	a := StartAgent(t, s, AgentConfig{Pod: pod, Token: k.BoundToken(t, pod, time.Hour, audience)})
	addr := WaitAddrs(t, a.Process, filepath.Join(a.dir, "addrs"))["metrics"]
	a.waitEvidence(t, addr, 0, true) // itself alone

	id := pod.SPIFFEID(trustDomain)
	server := StartServerEnvoy(t, EnvoyConfig{Name: "server", SDSSocket: a.Socket, PeerURI: id, Upstream: StartEcho(t)})
	server.WaitReady(t, 20*time.Second)
	client := StartClientEnvoy(t, EnvoyConfig{Name: "client", SDSSocket: a.Socket, PeerURI: id, Upstream: server.Listen})
	client.WaitReady(t, 20*time.Second)
	a.waitEvidence(t, addr, 2, true)
	if _, err := Request(client.Listen, true); err != nil {
		t.Fatal(err)
	}

	// A real Envoy that cannot use the roots with its own configuration says so.
	bad := StartServerEnvoy(t, EnvoyConfig{Name: "bad", SDSSocket: a.Socket, PeerURI: id, Default: `verify_certificate_hash: ["` + strings.Repeat("zz", 32) + `"]`, Upstream: StartEcho(t)})
	a.waitEvidence(t, addr, 3, false)
	a.WaitLog(t, 20*time.Second, "proxy rejected secrets")
	words := "Invalid hex-encoded SHA-256"
	a.WaitFor(t, 20*time.Second, "has Envoy's own words in its table", func() error {
		for _, r := range a.consumers(t).Rows {
			if r.Node == "bad" && len(r.Rejected) > 0 && strings.Contains(r.Rejected[0].Words, words) && r.PID == bad.PID() {
				return nil
			}
		}
		return fmt.Errorf("it has %+v", a.consumers(t).Rows)
	})
	bad.Kill()

	before := a.consumers(t)
	a.Kill()
	if _, err := Request(client.Listen, true); err != nil {
		t.Errorf("without the agent: %v", err)
	}
	if err := os.Remove(filepath.Join(a.dir, "addrs")); err != nil { // of the life before
		t.Fatal(err)
	}
	a.Start(t)
	addr = WaitAddrs(t, a.Process, filepath.Join(a.dir, "addrs"))["metrics"]
	a.waitEvidence(t, addr, 3, false) // the one that has gone holds its SVID still, for all that is known
	a.WaitFor(t, 30*time.Second, "has the Envoys back in their rows", func() error {
		after := a.consumers(t)
		if after.Agent != before.Agent || len(after.Rows) != 3 {
			t.Fatalf("the table is of agent %s with %d rows; it was of %s with %d", after.Agent, len(after.Rows), before.Agent, len(before.Rows))
		}
		acked := 0
		for _, r := range after.Rows {
			last := len(r.SVIDs) - 1
			if r.Node != "bad" && last == 1 && r.SVIDs[0].Acked || r.Node != "bad" && last == 0 && r.SVIDs[0].Acked {
				acked++
			}
		}
		if streams, err := a.streams(addr); err != nil || streams < 4 {
			return errors.Join(err, fmt.Errorf("%v streams are back", streams))
		}
		if acked != 2 {
			return fmt.Errorf("the table has %+v", after.Rows)
		}
		return nil
	})
	if _, err := Request(client.Listen, true); err != nil {
		t.Errorf("with the agent back: %v", err)
	}
}

// streams returns how many SDS streams an agent has.
func (a *Agent) streams(addr string) (sum float64, err error) {
	for _, api := range []string{"sds_sotw", "sds_delta"} {
		n, e := a.gauge(addr, fmt.Sprintf("chancery_agent_streams{api=%q}", api))
		if e == nil {
			sum += n
		}
	}
	return sum, nil
}
