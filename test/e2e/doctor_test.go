package e2e

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// health is what tests look at in the JSON of status and doctor.
type health struct {
	Severity string    `json:"severity"`
	Findings []finding `json:"findings"`
	CA       *struct {
		Running      bool `json:"running"`
		Certificates []struct {
			Kind        string `json:"kind"`
			InUse       bool   `json:"inUse"`
			SecondsLeft int64  `json:"secondsLeft"`
		} `json:"certificates"`
		Keys []struct {
			Error string `json:"error"`
		} `json:"keys"`
		Requests struct {
			Issued struct {
				Minute uint64 `json:"lastMinute"`
				Total  uint64 `json:"sinceStart"`
			} `json:"issued"`
			Reasons map[string]struct {
				Total uint64 `json:"sinceStart"`
			} `json:"refusedByReason"`
		} `json:"requests"`
		IssuanceLog struct {
			Entries int64 `json:"entries"`
		} `json:"issuanceLog"`
	} `json:"ca"`
}

type finding struct {
	ID       string `json:"id"`
	Severity string `json:"severity"`
	Subject  string `json:"subject"`
	Problem  string `json:"problem"`
}

// ids returns the findings as "severity id", without what depends on the machine that the test runs on.
func (h *health) ids() []string {
	out := []string{}
	for _, f := range h.Findings {
		if f.ID != "disk.low" && f.ID != "place.volatile" {
			out = append(out, f.Severity+" "+f.ID)
		}
	}
	return out
}

// askHealth runs status or doctor and returns what it says and its exit code.
func askHealth(t *testing.T, args ...string) (*health, int) {
	t.Helper()
	out, stderr, err := Run(t, "", append(args, "-o", "json")...)
	code := 0
	if e := (*exec.ExitError)(nil); errors.As(err, &e) {
		code = e.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	h := new(health)
	if err := json.Unmarshal([]byte(out), h); err != nil {
		t.Fatalf("chancery %s: exit code %d, %v\n%s%s", strings.Join(args, " "), code, err, out, stderr)
	}
	if want := map[string]int{"ok": 0, "warning": 2, "critical": 3}[h.Severity]; code != want {
		t.Errorf("chancery %s: exit code %d for %s", strings.Join(args, " "), code, h.Severity)
	}
	return h, code
}

// waitFound waits until a command finds exactly these.
func waitFound(t *testing.T, limit time.Duration, command, config string, want ...string) *health {
	t.Helper()
	var last *health
	Eventually(t, limit, fmt.Sprintf("%s finds %v", command, want), func() error {
		last, _ = askHealth(t, command, "-c", config)
		if got := last.ids(); !slices.Equal(got, want) {
			return fmt.Errorf("found %v: %+v", got, last.Findings)
		}
		return nil
	})
	return last
}

// TestStatusAndDoctor: a server that is well, and what both commands say as one thing after the other breaks, and is mended.
func TestStatusAndDoctor(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "doctor"), "web", "web-1", "node-a")
	server, _ := startLogged(t, k.StaticCluster(t))
	conn, ask := server.Dial(t), Ask{Token: k.BoundToken(t, pod, time.Hour, audience)}
	issue := func() error {
		_, err := ask.Certificate(t.Context(), conn)
		return err
	}
	for range 3 {
		if err := issue(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := (Ask{Token: "not.a.token"}).Certificate(t.Context(), conn); err == nil {
		t.Fatal("a bad token is accepted")
	}
	const beside = "warning sealing-key.beside-state" // as `authority init` does by default
	h := waitFound(t, 30*time.Second, "status", server.Config)
	if r := h.CA.Requests; r.Issued.Total != 3 || r.Issued.Minute > 3 || r.Reasons["TOKEN_MALFORMED"].Total != 1 {
		t.Errorf("requests: %+v", r)
	}
	if len(h.CA.Certificates) != 3 || len(h.CA.Keys) != 2 || h.CA.IssuanceLog.Entries < 8 || !h.CA.Running {
		t.Errorf("%+v", h.CA)
	}
	waitFound(t, 10*time.Second, "doctor", server.Config, beside)
	text := MustRun(t, "status", "-c", server.Config)
	for _, want := range []string{"ready, started ", "issuer  ", "(100 %)  in use", "sealed in the state: signs", "TOKEN_MALFORMED: ", "cluster Kubernetes ready", "revocations 0, of 0 certificates, CRLs until ", "agents 0, 0 of"} {
		if !strings.Contains(text, want) {
			t.Errorf("status does not say %q:\n%s", want, text)
		}
	}

	// The audit log was moved away, and nobody told the server.
	auditLog := filepath.Join(server.Dir, "audit.jsonl")
	hup := func() {
		t.Helper()
		if err := server.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(auditLog, auditLog+".1"); err != nil {
		t.Fatal(err)
	}
	waitFound(t, 10*time.Second, "status", server.Config, "critical audit-log.moved")
	hup()
	Eventually(t, 10*time.Second, "a certificate", issue)
	waitFound(t, 10*time.Second, "status", server.Config)

	// It cannot be written.
	if err := errors.Join(os.Rename(auditLog, auditLog+".2"), os.Mkdir(auditLog, 0o700)); err != nil {
		t.Fatal(err)
	}
	hup()
	Eventually(t, 10*time.Second, "nothing is issued", func() error {
		if issue() == nil {
			return errors.New("something is")
		}
		return nil
	})
	waitFound(t, 10*time.Second, "status", server.Config, "critical server.not-ready", "critical audit-log.failed")
	waitFound(t, 10*time.Second, "doctor", server.Config, "critical server.not-ready", "critical audit-log.failed", beside)
	if err := os.Remove(auditLog); err != nil {
		t.Fatal(err)
	}
	waitFound(t, 30*time.Second, "status", server.Config) // without a restart

	// The server hangs.
	if err := server.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if h, _ := askHealth(t, "doctor", "-c", server.Config); !slices.Equal(h.ids(), []string{"critical server.silent", beside}) || h.CA == nil || h.CA.Running {
		t.Errorf("a server that hangs: %+v", h)
	}
	if err := server.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}

	// It is down, by a crash that left its write-ahead log; doctor never keeps it from starting.
	server.Kill()
	waitFound(t, 10*time.Second, "status", server.Config, "critical server.down")
	waitFound(t, 10*time.Second, "doctor", server.Config, "critical server.down", beside)
	if h, code := askHealth(t, "doctor", "--offline", "-c", server.Config); code != 2 || len(h.CA.Certificates) != 2 || len(h.CA.Keys) != 2 || h.CA.Keys[0].Error != "" {
		t.Errorf("exit code %d, %+v", code, h)
	}
	stop, stopped := make(chan bool), make(chan bool)
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				Run(t, "", "doctor", "--offline", "-c", server.Config)
			}
		}
	}()
	for range 3 {
		server.Start(t) // fails if its state is locked
		server.WaitReady(t)
		server.Kill()
	}
	close(stop)
	<-stopped
	if strings.Contains(server.Log(), "in use by another process") {
		t.Error("a server found its state locked")
	}

	// A key is gone: told before a start fails.
	if err := os.Rename(filepath.Join(server.Dir, "state.key"), filepath.Join(server.Dir, "key")); err != nil {
		t.Fatal(err)
	}
	if h, code := askHealth(t, "doctor", "--offline", "-c", server.Config); code != 3 || !slices.Contains(h.ids(), "critical sealing-key.unusable") {
		t.Errorf("without a sealing key: %+v", h)
	}
}

// TestDoctorFindsAFailedKey: a key file that is gone is told while the server is down, and one that does not decrypt.
func TestDoctorFindsAFailedKey(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	pass := filepath.Join(t.TempDir(), "passphrase")
	writeFile(t, pass, "correct horse battery staple", 0o600)
	server := NewServer(t, serverYAML{Clusters: []clusterYAML{k.StaticCluster(t)}, Keys: map[string]string{"dir": "keys", "passphraseFile": pass}})
	if h, code := askHealth(t, "doctor", "--offline", "-c", server.Config); code != 2 {
		t.Errorf("keys that are well: %+v", h.Findings)
	}
	if err := os.Rename(filepath.Join(server.Dir, "keys"), filepath.Join(server.Dir, "gone")); err != nil {
		t.Fatal(err)
	}
	if h, code := askHealth(t, "doctor", "--offline", "-c", server.Config); code != 3 || !slices.Contains(h.ids(), "critical key.failed") {
		t.Errorf("keys that are gone: %+v", h.Findings)
	}
}

// TestStatusOfAnIssuerThatEnds: a plugged-in issuer that nobody renews is a warning, then critical, and then it has ended.
func TestStatusOfAnIssuerThatEnds(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	root := authority(t, "e2e root", p256(t), nil)
	key := p256(t)
	cert, err := sign(&x509.Certificate{
		SerialNumber: randomSerial(), Subject: pkix.Name{CommonName: "e2e issuer that ends"}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(25 * time.Second),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}, root.cert, key.Public(), root.key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	mountSecret(t, dir, tlsSecret.files(&testCA{cert: cert, key: key}, nil, root))
	server := NewServer(t, serverYAML{Clusters: []clusterYAML{k.StaticCluster(t)}, Issuer: map[string]string{"tls": dir}})
	server.Start(t)
	server.WaitReady(t)
	foreign := authority(t, "foreign root", p256(t), nil)
	mountSecret(t, dir, tlsSecret.files(authority(t, "issuer of a foreign root", p256(t), foreign), nil, foreign))
	if h, _ := askHealth(t, "doctor", "-c", server.Config); !slices.Contains(h.ids(), "warning issuer-files.unusable") {
		t.Errorf("files that bring other roots: %+v", h.Findings)
	}
	Eventually(t, time.Minute, "the end of the issuer is told", func() error {
		h, code := askHealth(t, "status", "-c", server.Config)
		for _, f := range h.Findings {
			if f.ID == "certificate.ended" && strings.HasPrefix(f.Subject, "issuer") && f.Severity == "critical" && code == 3 {
				return nil
			}
		}
		return fmt.Errorf("%+v", h.Findings)
	})
	if h, code := askHealth(t, "doctor", "-c", server.Config); code != 3 || !slices.Contains(h.ids(), "critical certificate.ended") || !slices.Contains(h.ids(), "critical server.not-ready") {
		t.Errorf("doctor: %+v", h.Findings)
	}
}

// TestDoctorOfAnAgent: an agent that is well, and what is said as server, roots and agent go.
func TestDoctorOfAnAgent(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "doctor-agent"), "web", "web-1", "node-a")
	server := StartServer(t, k.StaticCluster(t))
	agent := StartAgent(t, server, AgentConfig{Pod: pod, Token: k.BoundToken(t, pod, time.Hour, audience), TTL: time.Hour})
	agent.WaitRenewal(t, 30*time.Second, nil)
	config := filepath.Join(agent.dir, "agent.yaml")
	waitFound(t, 10*time.Second, "doctor", config)
	other := StartServer(t, k.StaticCluster(t))
	roots, err := os.ReadFile(server.Roots)
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := os.ReadFile(other.Roots)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, server.Roots, string(foreign), 0o644)
	waitFound(t, 10*time.Second, "doctor", config, "warning roots.outdated")
	kept := agent.Socket + ".bundle"
	if err := os.Rename(kept, kept+".away"); err != nil {
		t.Fatal(err)
	}
	waitFound(t, 10*time.Second, "doctor", config, "critical server.unverified")
	if err := os.Rename(kept+".away", kept); err != nil {
		t.Fatal(err)
	}
	writeFile(t, server.Roots, string(roots), 0o644)
	server.Kill()
	waitFound(t, 10*time.Second, "doctor", config, "critical server.unreachable")
	agent.Kill()
	waitFound(t, 10*time.Second, "doctor", config, "critical server.unreachable", "critical agent.down")
	if h, _ := askHealth(t, "doctor", "--offline", "-c", config); !slices.Equal(h.ids(), []string{"critical server.unreachable"}) {
		t.Errorf("offline: %+v", h.Findings)
	}
}

// TestDoctorOfAStranger: for a user who may look at little, each thing that was not looked at is said, and nothing is taken for
// wrong on that account.
func TestDoctorOfAStranger(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can run a command as somebody else")
	}
	t.Parallel()
	k := SharedKube(t)
	server := NewServer(t, serverYAML{Clusters: []clusterYAML{{Name: "Kubernetes", Issuer: k.Issuer, Audiences: []string{audience}, JWKSFile: "jwks.json"}}, IssuanceLog: "log"})
	writeFile(t, filepath.Join(server.Dir, "jwks.json"), string(k.JWKS(t)), 0o644)
	server.Start(t)
	server.WaitReady(t)
	for _, path := range []string{filepath.Dir(server.Dir), server.Dir} {
		if err := os.Chmod(path, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(server.Config, 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), copyTo(t, ChanceryBinary(t), filepath.Join(server.Dir, "chancery")), "doctor", "-c", server.Config, "-o", "json")
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 54321, Gid: 54321}}
	out, err := cmd.Output()
	h := new(health)
	if e := (*exec.ExitError)(nil); !errors.As(err, &e) || e.ExitCode() != 2 || json.Unmarshal(out, h) != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, f := range h.Findings {
		if f.ID != "unchecked" && f.ID != "sealing-key.beside-state" && f.ID != "disk.low" && f.ID != "place.volatile" {
			t.Errorf("%+v", f)
		}
	}
	if !slices.ContainsFunc(h.Findings, func(f finding) bool {
		return f.ID == "unchecked" && f.Subject == "server" && strings.Contains(f.Problem, "permission denied")
	}) {
		t.Errorf("it is not said that the server could not be asked: %+v", h.Findings)
	}
}

// copyTo copies a file that others may run.
func copyTo(t *testing.T, from, to string) string {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err == nil {
		_, err = io.Copy(out, in)
	}
	if err = errors.Join(err, out.Close()); err != nil {
		t.Fatal(err)
	}
	return to
}
