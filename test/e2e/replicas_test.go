package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
)

// sharedStore is the engine that holds the document of three servers.
type sharedStore struct {
	state   map[string]any // of a server's config: the engine's part
	init    map[string]any // the same for who makes it, with more rights
	record  func()         // begins to keep each document
	history func() []kept  // every document that the engine ever had, in the order in which it got them
	holder  func() string  // replica that has the lease
	crash   func()         // kill -9 of the engine,
	restart func()         // and its start with what it has on disk

	postgres *pgtest.Cluster // if it is that,
	database string          // and the database there
}

// kept is one version of the document, as it was stored.
type kept struct {
	version uint64
	data    []byte
}

// TestThreeServers: three servers on one store issue under load without a renewal that fails twice, whichever of them, or the
// store, is killed, and whoever is paused; what they write is one history, and no certificate is of an issuer that the
// history does not know (D4, D8, D12, D13).
func TestThreeServers(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	for name, start := range map[string]func(*testing.T) *sharedStore{"postgres": postgresStore, "kubernetes": kubernetesStore} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newServerFleet(t, k, start(t))
			f.startLoad()
			f.survivesKills()
			f.survivesTheStore()
			f.survivesAPause()
			f.load.stop()
			f.checkHistory()
			f.checkLogs()
			f.checkRevocation()
			f.checkAgents()
		})
	}
}

// serverFleet is three servers, what they issue, and agents of all three.
type serverFleet struct {
	t       *testing.T
	k       *Kube
	store   *sharedStore
	root    *testCA
	servers []*Server
	load    *fleetLoad
	agents  []*Agent
	bad     *revoked
	end     func() // of the watch over the agents
	gaps    func() []string
	first   []byte // ID of the first issuer
}

type revoked struct {
	id    string
	agent *Agent
}

func newServerFleet(t *testing.T, k *Kube, store *sharedStore) *serverFleet {
	t.Helper()
	f := &serverFleet{t: t, k: k, store: store, root: authority(t, "offline root", p256(t), nil)}
	dir := t.TempDir()
	root, cluster := filepath.Join(dir, "root.pem"), k.StaticCluster(t)
	writeFile(t, root, certsPEM(f.root), 0o600)
	sealing := SocketDir(t)
	for i := range 3 {
		config := func(state map[string]any) serverYAML {
			state = maps.Clone(state)
			state["sealingKey"], state["replica"] = filepath.Join(sealing, "key"), fmt.Sprintf("chancery-%d", i)
			return serverYAML{State: state, IssuanceLog: "log", Clusters: []clusterYAML{cluster}}
		}
		if i == 0 {
			s := NewServer(t, config(store.init), "--root", root)
			f.servers = append(f.servers, s)
			s.yaml.State = config(store.state).State
			s.writeConfig(t)
			store.record()
			if stderr, err := f.importIssuer(0, "first"); err != nil {
				t.Fatalf("%v: %s", err, stderr)
			}
		} else {
			f.servers = append(f.servers, writeServer(t, config(store.state)))
			f.servers[i].Roots = f.servers[0].Roots
		}
		f.servers[i].Start(t)
		f.servers[i].WaitReady(t)
	}
	return f
}

// importIssuer has one server ask for the next issuer of all, and signs it as the offline CA does. It returns what the command says.
func (f *serverFleet) importIssuer(through int, name string) (stderr string, err error) {
	f.t.Helper()
	config := f.servers[through].Config
	block, _ := pem.Decode([]byte(MustRun(f.t, "authority", "csr", "-c", config)))
	if block == nil {
		f.t.Fatal("authority csr prints no PEM")
	}
	file := filepath.Join(f.t.TempDir(), name+".pem")
	writeFile(f.t, file, certsPEM(&testCA{cert: signIssuer(f.t, f.root, block.Bytes)}), 0o600)
	_, stderr, err = Run(f.t, "", "authority", "import", "-c", config, file)
	return stderr, err
}

func (f *serverFleet) startLoad() {
	f.t.Helper()
	ns := f.k.Namespace(f.t, "fleet")
	pod := f.k.RunPod(f.t, ns, "load", "load-1", "node-a")
	var conns []*grpc.ClientConn
	for _, s := range f.servers {
		conns = append(conns, s.Dial(f.t))
	}
	f.load = startFleetLoad(f.t, conns, Ask{Token: f.k.BoundToken(f.t, pod, time.Hour, audience), Seconds: 600, FailFast: true})
	var listen []string
	for _, s := range f.servers {
		listen = append(listen, s.Listen)
	}
	for i := range 3 {
		pod := f.k.RunPod(f.t, ns, fmt.Sprintf("web-%d", i), fmt.Sprintf("web-%d", i), "node-a")
		a := StartAgent(f.t, f.servers[i], AgentConfig{Pod: pod, Token: f.k.BoundToken(f.t, pod, time.Hour, audience), TTL: 20 * time.Second, Servers: listen})
		a.WaitRenewal(f.t, 20*time.Second, nil)
		f.agents = append(f.agents, a)
	}
	pod = f.k.RunPod(f.t, ns, "bad", "bad-1", "node-b")
	f.bad = &revoked{pod.SPIFFEID(trustDomain), StartAgent(f.t, f.servers[1], AgentConfig{
		Pod: pod, Token: f.k.BoundToken(f.t, pod, time.Hour, audience), TTL: time.Hour, Servers: listen[1:2],
	})}
	f.bad.agent.WaitRenewal(f.t, 20*time.Second, nil)
	f.watchAgents()
}

// watchAgents looks all the time whether an agent serves a certificate that has ended, or none.
func (f *serverFleet) watchAgents() {
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex // guards gaps
	var gaps []string
	var wg sync.WaitGroup
	for i, a := range f.agents {
		wg.Go(func() {
			for ctx.Err() == nil {
				leaf, err := a.Leaf(f.t)
				if err == nil && time.Now().After(leaf.NotAfter) {
					err = fmt.Errorf("its certificate ended at %s", leaf.NotAfter)
				}
				if err != nil && ctx.Err() == nil {
					mu.Lock()
					gaps = append(gaps, fmt.Sprintf("agent %d at %s: %v", i, time.Now().Format(time.TimeOnly), err))
					mu.Unlock()
				}
				time.Sleep(200 * time.Millisecond) // the pace of the watch
			}
		})
	}
	f.end = func() { cancel(); wg.Wait() }
	f.t.Cleanup(f.end)
	f.gaps = func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(gaps)
	}
}

// survivesKills: kill -9 of each server in turn.
func (f *serverFleet) survivesKills() {
	f.t.Helper()
	for i, s := range f.servers {
		f.load.more(300, fmt.Sprintf("before server %d is killed", i))
		s.Kill()
		f.load.more(300, fmt.Sprintf("while server %d is dead", i))
		s.Start(f.t)
		s.WaitReady(f.t)
	}
}

// survivesTheStore: with the store dead all goes on but changes, and the servers say so.
func (f *serverFleet) survivesTheStore() {
	f.t.Helper()
	f.store.crash()
	f.load.more(500, "while the store is dead")
	for i, s := range f.servers {
		Eventually(f.t, time.Minute, fmt.Sprintf("status of server %d tells of the store", i), func() error {
			out, _, _ := Run(f.t, "", "status", "-c", s.Config)
			if !strings.Contains(out, ", FAILS: ") {
				return errors.New(out)
			}
			return nil
		})
		if err := s.readyNow(); err != nil {
			f.t.Errorf("server %d with the store dead: %v; want it ready", i, err)
		}
	}
	if _, stderr, err := Run(f.t, "", "revoke", "-c", f.servers[0].Config, f.bad.id); err == nil {
		f.t.Error("a revocation is confirmed while the store is dead")
	} else {
		f.t.Logf("revoke with the store dead: %s", strings.TrimSpace(stderr))
	}
	f.store.restart()
	for i, s := range f.servers {
		Eventually(f.t, time.Minute, fmt.Sprintf("status of server %d is at peace with the store", i), func() error {
			if out, _, _ := Run(f.t, "", "status", "-c", s.Config); strings.Contains(out, ", FAILS: ") {
				return errors.New(out)
			}
			return nil
		})
	}
}

// survivesAPause: the holder of the lease stands still for 30 s. Meanwhile another drives, the issuer changes, and an identity is
// revoked. When it wakes it follows.
func (f *serverFleet) survivesAPause() {
	f.t.Helper()
	var holder string
	Eventually(f.t, 30*time.Second, "a server has the lease", func() error {
		if holder = f.store.holder(); holder == "" {
			return errors.New("nobody has it")
		}
		return nil
	})
	at := slices.IndexFunc(f.servers, func(s *Server) bool { return s.yaml.State["replica"] == holder })
	if at < 0 {
		f.t.Fatalf("the lease is held by %q, which is no server here", holder)
	}
	paused, other := f.servers[at], f.servers[(at+1)%3]
	history := f.store.history()
	f.first = f.active(history[len(history)-1])[0]
	began := time.Now()
	if err := paused.Signal(syscall.SIGSTOP); err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = paused.Signal(syscall.SIGCONT) }() // it may have ended
	Eventually(f.t, 30*time.Second, "another server has the lease", func() error {
		if h := f.store.holder(); h == holder || h == "" {
			return fmt.Errorf("%q has it", h)
		}
		return nil
	})
	f.t.Logf("another server had the lease %v after the pause of its holder", time.Since(began).Round(time.Millisecond))
	// It does not sign before the one that sleeps knows its CRL (D4).
	if stderr, err := f.importIssuer((at+1)%3, "second"); err == nil || !strings.Contains(stderr, "is not acknowledged by replica "+holder) {
		f.t.Errorf("importing an issuer while a replica sleeps: %v: %s; want that it waits for that one", err, stderr)
	}
	// It holds at once, and what the one that sleeps has signed is not known yet (D13).
	out, stderr, err := Run(f.t, "", "revoke", "-c", other.Config, f.bad.id)
	if ended, ok := errors.AsType[*exec.ExitError](err); !ok || ended.ExitCode() != 2 || !strings.Contains(out+stderr, "INCOMPLETE") || !strings.Contains(out+stderr, holder) {
		f.t.Errorf("revoking while a replica sleeps: %v: %s%s; want INCOMPLETE, with its name, and exit status 2", err, out, stderr)
	}
	f.load.until(began.Add(30 * time.Second))
	if err := paused.Signal(syscall.SIGCONT); err != nil {
		f.t.Fatal(err)
	}
	f.load.more(300, "after the pause")
	for i, s := range f.servers {
		conn := s.Dial(f.t)
		s.WaitFor(f.t, 90*time.Second, fmt.Sprintf("signs as server %d with the issuer that was imported meanwhile", i), func() error {
			cert, err := f.load.ask.Certificate(f.t.Context(), conn)
			if err != nil {
				return err
			}
			history := f.store.history()
			if active := f.active(history[len(history)-1]); bytes.Equal(active[0], f.first) || !bytes.Equal(cert.AuthorityKeyId, active[0]) {
				err = fmt.Errorf("signed by %x; active is %x", cert.AuthorityKeyId, active)
			}
			return err
		})
	}
}

// documentJSON is what the test reads of a stored document.
type documentJSON struct {
	Document struct {
		Version  uint64 `json:"version"`
		Previous string `json:"previous"`
		Domains  map[string]struct {
			Authorities []struct {
				ID    string `json:"id"`
				Kind  string `json:"kind"`
				State string `json:"state"`
			} `json:"authorities"`
		} `json:"domains"`
	} `json:"document"`
}

func (f *serverFleet) decode(k kept) *documentJSON {
	f.t.Helper()
	d := new(documentJSON)
	if err := json.Unmarshal(k.data, d); err != nil {
		f.t.Fatalf("version %d: %v", k.version, err)
	}
	return d
}

// issuers returns those of a document in the given states.
func (f *serverFleet) issuers(k kept, states ...string) (all [][]byte) {
	f.t.Helper()
	for _, a := range f.decode(k).Document.Domains[trustDomain].Authorities {
		if a.Kind == "issuer" && slices.Contains(states, a.State) {
			id, err := hex.DecodeString(a.ID)
			if err != nil {
				f.t.Fatal(err)
			}
			all = append(all, id)
		}
	}
	return all
}

func (f *serverFleet) active(k kept) [][]byte { return f.issuers(k, "active") }

// checkHistory: each version follows the one before, has one active issuer at most, and all certificates are of one that was active.
func (f *serverFleet) checkHistory() {
	f.t.Helper()
	history := f.store.history()
	var once []string
	for i, h := range history {
		d := f.decode(h).Document
		if d.Version != h.version {
			f.t.Errorf("version %d is stored as %d", d.Version, h.version)
		}
		if i > 0 {
			sum := sha256.Sum256(history[i-1].data)
			if d.Version != history[i-1].version+1 || d.Previous != hex.EncodeToString(sum[:]) {
				f.t.Errorf("version %d does not follow version %d", d.Version, history[i-1].version)
			}
		}
		active := f.active(h)
		if len(active) > 1 {
			f.t.Errorf("version %d has %d active issuers", d.Version, len(active))
		}
		for _, id := range active {
			once = append(once, hex.EncodeToString(id))
		}
	}
	slices.Sort(once)
	once = slices.Compact(once)
	byIssuer := map[string]int{}
	for _, c := range f.load.certificates() {
		byIssuer[hex.EncodeToString(c.cert.AuthorityKeyId)]++
	}
	for id, n := range byIssuer {
		if !slices.Contains(once, id) {
			f.t.Errorf("%d certificates are signed by %s, which was never the document's active issuer", n, id)
		}
	}
	if len(once) != 2 || len(byIssuer) != 2 {
		f.t.Errorf("%d issuers were active and %d signed; want 2 of each", len(once), len(byIssuer))
	}
	f.t.Logf("%d versions of the document, %d bytes the last", len(history), len(history[len(history)-1].data))
}

// checkLogs: no serial twice, and each certificate is in the log of one server, all of which verify.
func (f *serverFleet) checkLogs() {
	f.t.Helper()
	logged := map[string]int{}
	for i, s := range f.servers {
		dir := filepath.Join(s.Dir, "log")
		Eventually(f.t, 20*time.Second, fmt.Sprintf("log %d verifies", i), func() error {
			_, stderr, err := Run(f.t, "", "log", "verify", dir)
			if err != nil {
				err = fmt.Errorf("%w: %s", err, stderr)
			}
			return err
		})
		intents, _ := s.Audit(f.t, func(a auditLine) bool { return a.Event == "intent" && a.Serial != "" })
		for _, a := range intents {
			logged[a.Serial]++
		}
	}
	for serial, n := range logged {
		if n > 1 {
			f.t.Errorf("serial %s was used %d times", serial, n)
		}
	}
	certs := f.load.certificates()
	for _, c := range certs {
		if logged[serialOf(c.cert)] == 0 {
			f.t.Errorf("serial %s is in no audit log", serialOf(c.cert))
		}
	}
	report := f.load.report()
	f.t.Logf("%d certificates by three servers, %d of them at the second try, %d lost", len(certs), report.retried, len(report.lost))
	for _, l := range report.lost[:min(len(report.lost), 5)] {
		f.t.Errorf("a renewal failed twice: %s", l)
	}
}

// checkRevocation: what was revoked through one server is known to all, and every agent has the CRLs.
func (f *serverFleet) checkRevocation() {
	f.t.Helper()
	serial := serialOf(f.bad.agent.WaitRenewal(f.t, 10*time.Second, nil))
	for i, s := range f.servers {
		Eventually(f.t, 30*time.Second, fmt.Sprintf("server %d lists the revoked certificate, and no log is missing", i), func() error {
			out, stderr, err := Run(f.t, "", "revoke", "list", "-c", s.Config)
			if err != nil || !strings.Contains(out, f.bad.id) || strings.Contains(out, "INCOMPLETE") {
				return fmt.Errorf("%w: %s%s", err, out, stderr)
			}
			return nil
		})
	}
	for i, a := range f.agents {
		Eventually(f.t, 30*time.Second, fmt.Sprintf("the CRLs of agent %d list %s", i, serial), func() error {
			lists, err := a.CRLs(f.t)
			if err != nil {
				return err
			}
			for _, l := range lists {
				for _, e := range l.RevokedCertificateEntries {
					if fmt.Sprintf("%x", e.SerialNumber.Bytes()) == serial {
						return nil
					}
				}
			}
			return fmt.Errorf("%d CRLs without it", len(lists))
		})
	}
}

// checkAgents: none was ever without a good certificate, none saw anything go back.
func (f *serverFleet) checkAgents() {
	f.t.Helper()
	f.end()
	for _, gap := range f.gaps() {
		f.t.Error(gap)
	}
	for i, a := range f.agents {
		for _, wrong := range []string{`updates_total{result="refused"}`, "chancery_agent_log_inconsistencies_total{"} {
			if strings.Contains(a.page(f.t, "/metrics"), wrong) {
				f.t.Errorf("the metrics of agent %d have %s", i, wrong)
			}
		}
	}
}

// fleetLoad asks servers at random. A call that fails is made once more, at another server.
type fleetLoad struct {
	t    *testing.T
	ask  Ask
	stop func()

	mu      sync.Mutex // guards all below
	all     []answered
	retried int
	lost    []string
}

type answered struct {
	cert *x509.Certificate
	at   time.Time
}

type fleetReport struct {
	retried int
	lost    []string
}

// patience is how long a caller waits for one server.
const patience = 3 * time.Second

func startFleetLoad(t *testing.T, conns []*grpc.ClientConn, ask Ask) *fleetLoad {
	t.Helper()
	var err error
	if ask.CSR, err = newCSR(nil); err != nil {
		t.Fatal(err)
	}
	l := &fleetLoad{t: t, ask: ask}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for ctx.Err() == nil {
				l.once(ctx, conns)
				time.Sleep(10 * time.Millisecond) // the pace of a caller: the machine has other tests to run
			}
		})
	}
	l.stop = func() { cancel(); wg.Wait() }
	t.Cleanup(l.stop)
	return l
}

// once is one renewal.
func (l *fleetLoad) once(ctx context.Context, conns []*grpc.ClientConn) {
	var failed []string
	for _, i := range rand.Perm(len(conns))[:2] {
		began := time.Now()
		try, cancel := context.WithTimeout(ctx, patience)
		cert, err := l.ask.Certificate(try, conns[i])
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			l.mu.Lock()
			l.all = append(l.all, answered{cert, time.Now()})
			l.retried += len(failed)
			l.mu.Unlock()
			return
		}
		failed = append(failed, fmt.Sprintf("server %d at %s after %s: %v", i, began.Format(time.TimeOnly), time.Since(began).Round(time.Millisecond), err))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = append(l.lost, strings.Join(failed, "; "))
}

func (l *fleetLoad) certificates() []answered {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

func (l *fleetLoad) report() fleetReport {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fleetReport{l.retried, slices.Clone(l.lost)}
}

// more waits for n more certificates.
func (l *fleetLoad) more(n int, when string) {
	l.t.Helper()
	before := len(l.certificates())
	Eventually(l.t, time.Minute, fmt.Sprintf("%d certificates are issued %s", n, when), func() error {
		if have := len(l.certificates()) - before; have < n {
			return fmt.Errorf("%d so far; lost: %.500v", have, l.report().lost)
		}
		return nil
	})
}

// until lets the load go on until a time.
func (l *fleetLoad) until(end time.Time) {
	l.t.Helper()
	Eventually(l.t, time.Minute, "the time has come", func() error {
		if time.Now().Before(end) {
			return errors.New("not yet")
		}
		return nil
	})
}
