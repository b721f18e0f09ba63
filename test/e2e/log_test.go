package e2e

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// startLogged starts a server with an issuance log, and returns its folder too.
func startLogged(t *testing.T, cluster clusterYAML) (*Server, string) {
	t.Helper()
	s := NewServer(t, serverYAML{Clusters: []clusterYAML{cluster}, IssuanceLog: "log"})
	s.Start(t)
	s.WaitReady(t)
	return s, filepath.Join(s.Dir, "log")
}

// logEntry is what tests look at in a line of `chancery log search -o json`.
type logEntry struct {
	Index int64 `json:"index"`
	Entry struct {
		Event       string `json:"event"`
		Serial      string `json:"serial"`
		Certificate []byte `json:"certificate"`
	} `json:"entry"`
}

func searchLog(t *testing.T, args ...string) []logEntry {
	t.Helper()
	var all []logEntry
	for line := range strings.Lines(MustRun(t, append([]string{"log", "search", "-o", "json"}, args...)...)) {
		var e logEntry
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	return all
}

// TestKillServerFiftyTimes: whatever the moment of a kill -9, the issuance log verifies after the next start, continues every
// checkpoint that was seen before, and lacks no certificate that a client got.
func TestKillServerFiftyTimes(t *testing.T) {
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "log"), "web", "web-1", "node-a")
	server, dir := startLogged(t, k.StaticCluster(t))
	got := issueContinuously(t, server, Ask{Token: k.BoundToken(t, pod, time.Hour, audience)})
	kills := 50
	if testing.Short() {
		kills = 5
	}
	earlier := filepath.Join(t.TempDir(), "earlier")
	for kill := 1; kill <= kills; kill++ {
		before, _ := got.soFar()
		want := 20 + rand.IntN(400) // some of the kills hit within the first second, some a checkpoint being made
		Eventually(t, 30*time.Second, fmt.Sprintf("certificates are issued before kill %d", kill), func() error {
			if serials, err := got.soFar(); len(serials)-len(before) < want {
				return fmt.Errorf("%d since the last start; last error: %w", len(serials)-len(before), err)
			}
			return nil
		})
		server.Kill()
		if kill%10 == 0 {
			MustRun(t, "log", "verify", dir) // as the kill left it
		}
		data, err := os.ReadFile(filepath.Join(dir, "checkpoint"))
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, earlier, string(data), 0o600)
		server.Start(t)
		if kill%10 == 0 {
			MustRun(t, "log", "verify", dir, "--checkpoint", earlier)
		}
	}
	server.WaitReady(t)
	server.Kill()
	serials, _ := got.soFar() // of before the restart: nobody issues now
	server.Start(t)           // puts into the tree what the last kill left in the journal
	t.Log(MustRun(t, "log", "verify", dir, "--checkpoint", earlier))
	intents, certificates := map[string]bool{}, 0
	for _, e := range searchLog(t, "--log", dir, "--since", "1h") {
		switch e.Entry.Event {
		case "intent":
			intents[e.Entry.Serial] = true
		case "issued":
			certificates++
		}
	}
	missing := 0
	for _, serial := range serials {
		if !intents[serial] {
			missing++
			t.Logf("a client has serial %s, of which the log knows nothing", serial)
		}
	}
	t.Logf("%d kills; clients got %d certificates; the log has %d intents and %d certificates", kills, len(serials), len(intents), certificates)
	if missing > 0 {
		t.Errorf("the log lacks %d of %d certificates", missing, len(serials))
	}
}

// TestLogCommands: what an auditor does with a log, on one that a server made, while it runs.
func TestLogCommands(t *testing.T) {
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "logcmd"), "web", "web-1", "node-a")
	server, dir := startLogged(t, k.StaticCluster(t))
	cert, err := Ask{Token: k.BoundToken(t, pod, time.Hour, audience)}.Certificate(t.Context(), server.Dial(t))
	if err != nil {
		t.Fatal(err)
	}
	serial := serialOf(cert)
	Eventually(t, 10*time.Second, "the certificate is in the tree", func() error {
		for _, e := range searchLog(t, serial, "-c", server.Config) {
			if e.Entry.Event == "issued" && bytes.Equal(e.Entry.Certificate, cert.Raw) {
				return nil
			}
		}
		return errors.New("not yet")
	})
	out := MustRun(t, "log", "search", cert.URIs[0].String(), "--log", dir)
	for _, want := range []string{serial, "pod=web-1", "pod_uid=" + string(pod.UID), "node=node-a", "cluster=Kubernetes", "profile=workload", "credential_id=", "issuer="} {
		if !strings.Contains(out, want) {
			t.Errorf("search does not tell %s:\n%s", want, out)
		}
	}
	if out := MustRun(t, "log", "verify", dir); !strings.Contains(out, "clean\ntree size ") {
		t.Errorf("an untouched log: %s", out)
	}

	proof, certFile, old := filepath.Join(t.TempDir(), "proof.json"), filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "checkpoint")
	writeFile(t, proof, MustRun(t, "log", "prove", strings.ToUpper(serial), "-c", server.Config, "-o", "json"), 0o600)
	writeFile(t, certFile, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})), 0o600)
	if out := MustRun(t, "log", "check-proof", proof, "--key", filepath.Join(dir, "log.pub"), "--cert", certFile); !strings.Contains(out, serial) || !strings.Contains(out, "The certificate is the one") {
		t.Errorf("check-proof: %s", out)
	}
	if out, errs, err := Run(t, "", "log", "search", serial, "--log", dir, "--log", filepath.Join(dir, "elsewhere")); exitCode(err) != 2 || !strings.Contains(errs, "INCOMPLETE") || !strings.Contains(errs, "elsewhere") || !strings.Contains(out, serial) {
		t.Errorf("with a log that cannot be read: %v, %s, %s", err, out, errs)
	}

	if err := server.Stop(t, 20*time.Second); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "checkpoint"))
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, old, string(data), 0o600)
	bundles, err := filepath.Glob(filepath.Join(dir, "tile/entries/000.p/*"))
	if err != nil || len(bundles) != 1 {
		t.Fatal(bundles, err)
	}
	whole, err := os.ReadFile(bundles[0])
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(whole)
	flipped[bytes.LastIndex(whole, []byte(serial))-40] ^= 1
	writeFile(t, bundles[0], string(flipped), 0o600)
	if out, errs, err := Run(t, "", "log", "verify", dir, "--checkpoint", old); exitCode(err) != 1 || !strings.Contains(out, bundles[0]) || !strings.Contains(out, serial) {
		t.Errorf("with a byte flipped: %v, %s, %s", err, out, errs)
	}
	writeFile(t, bundles[0], string(whole), 0o600)
	MustRun(t, "log", "verify", dir, "--checkpoint", old)
}

func exitCode(err error) int {
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		return e.ExitCode()
	}
	return 0
}
