package agent

import (
	"bufio"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	mrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/admission"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/kube"
	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/trust"
)

// fleet is many agents that lost all servers at once, and the one server that came back.
type fleet struct {
	t      *testing.T
	domain trust.Domain
	root   *x509.Certificate
	issuer *ca.Issuer
	addr   string
	token  func(node, account int) string

	end func() serverSaid // ends the server
}

// member is one agent of the fleet.
type member struct {
	id    trust.ID
	token string
	own   *trust.Identity // nil for a new pod
	ends  time.Time       // of own

	attempts  int
	refusals  int       // of these, with an answer of the server
	first     time.Time // attempt
	served    time.Time
	order     int64 // of being served
	lastError error
}

// counted counts the connections that the server accepts.
type counted struct {
	net.Listener
	n *atomic.Int64
}

func (l counted) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.n.Add(1)
	}
	return c, err
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

const onNode = 100 // agents

// slowKey takes its time, as a key in a token or a cloud does, so that it and not this machine is what agents wait for.
type slowKey struct{ crypto.Signer }

func (k slowKey) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	time.Sleep(signing)
	return k.Signer.Sign(r, digest, opts)
}

// newFleet makes the authority, and starts the server.
func newFleet(t *testing.T, n int) *fleet {
	dir := t.TempDir()
	if shm, err := os.MkdirTemp("/dev/shm", "chancery-fleet-"); err == nil { // a log whose disk is not shared
		t.Cleanup(func() { os.RemoveAll(shm) })
		dir = shm
	}
	f := &fleet{t: t, domain: must(trust.ParseDomain("cluster.local"))}
	log := must(audit.Open(filepath.Join(dir, "agents.jsonl")))
	t.Cleanup(func() { log.Close() })
	made := must(ca.Create(t.Context(), ca.CreateConfig{Domain: f.domain, LogID: ca.MinLogID + 1, Log: log}))
	f.root = made.Root
	f.issuer = f.newIssuer(made.IssuerKey, made.Issuer, log)
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	signer := must(jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "k"}}, nil))
	f.token = func(node, account int) string { return token(signer, node, account) }
	f.start(dir, n, map[string][]byte{
		"issuer.key": must(x509.MarshalPKCS8PrivateKey(made.IssuerKey)), "issuer": made.Issuer.Raw, "root": made.Root.Raw,
		"jwks.json": must(json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{KeyID: "k", Key: key.Public(), Use: "sig"}}})),
	})
	return f
}

// token is that of a pod, whose service account is its own.
func token(signer jose.Signer, node, account int) string {
	now := time.Now()
	payload := must(json.Marshal(map[string]any{
		"iss": "https://k8s.test", "sub": fmt.Sprint("system:serviceaccount:foo:web-", account), "aud": "chancery", "jti": fmt.Sprint(account),
		"iat": now.Add(-time.Minute).Unix(), "exp": now.Add(time.Hour).Unix(),
		"kubernetes.io": map[string]any{
			"namespace": "foo", "serviceaccount": map[string]string{"name": fmt.Sprint("web-", account)},
			"node": map[string]string{"name": fmt.Sprint("node-", node)}, "pod": map[string]string{"name": "p", "uid": fmt.Sprint("uid-", account)},
		},
	}))
	return must(must(signer.Sign(payload)).CompactSerialize())
}

func (f *fleet) newIssuer(key crypto.Signer, cert *x509.Certificate, log *audit.Log) *ca.Issuer {
	return must(ca.NewIssuer(ca.IssuerConfig{
		Domain: f.domain, Key: key, Chain: []*x509.Certificate{cert}, LogID: ca.MinLogID + 1, Log: log,
		Bundle: must(trust.NewBundle(f.domain, 1, []*x509.Certificate{f.root})),
	}))
}

// start runs the server in a process of its own, as long as the test: ten thousand agents that want to compute would keep a
// server in this one from the processors as no agents elsewhere do.
func (f *fleet) start(dir string, n int, files map[string][]byte) {
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			f.t.Fatal(err)
		}
	}
	cmd := exec.Command(must(os.Executable()), "-test.run", "^TestFleetServer$", "-test.timeout", "20m")
	cmd.Env = append(os.Environ(), "FLEET_SERVER="+dir, fmt.Sprint("FLEET_SLOTS=", slotsFor(n)), fmt.Sprint("FLEET_QUEUE=", max(n/maxQueue, 10)),
		fmt.Sprint("FLEET_WAIT=", min(max(time.Duration(n)*time.Second/2000, time.Second), 5*time.Second))) // the default; less for few
	cmd.Stderr = os.Stderr
	in, out := must(cmd.StdinPipe()), bufio.NewReader(must(cmd.StdoutPipe()))
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	f.addr = strings.TrimSpace(must(out.ReadString('\n')))
	f.end = sync.OnceValue(func() (said serverSaid) {
		in.Close()
		if err := errors.Join(json.NewDecoder(out).Decode(&said), drain(out), cmd.Wait()); err != nil {
			f.t.Errorf("the server: %v", err)
		}
		return said
	})
	f.t.Cleanup(func() { f.end() })
}

func drain(r io.Reader) error {
	_, err := io.Copy(io.Discard, r)
	return err
}

// serverSaid is what the server has to say at its end.
type serverSaid struct {
	Answers    map[string]int // by outcome
	Accepted   int            // connections
	NotBegun   int            // of these, closed before a handshake
	Heap       uint64         // at most
	Processors time.Duration  // used
}

// TestFleetServer is the server of TestD19AFleetComesBack: the real one, with real issuance, but for a slow key and few slots, so
// that requests have to wait. It serves until its input ends.
func TestFleetServer(t *testing.T) {
	dir := os.Getenv("FLEET_SERVER")
	if dir == "" {
		t.Skip("it is started by TestD19AFleetComesBack")
	}
	file := func(name string) []byte { return must(os.ReadFile(filepath.Join(dir, name))) }
	f := &fleet{t: t, domain: must(trust.ParseDomain("cluster.local")), root: must(x509.ParseCertificate(file("root")))}
	log := must(audit.Open(filepath.Join(dir, "server.jsonl")))
	defer log.Close()
	f.issuer = f.newIssuer(slowKey{must(x509.ParsePKCS8PrivateKey(file("issuer.key"))).(crypto.Signer)}, must(x509.ParseCertificate(file("issuer"))), log)
	cluster := must(kube.New(kube.Config{Name: "Kubernetes", Issuer: "https://k8s.test", Audiences: []string{"chancery"}, JWKSFile: filepath.Join(dir, "jwks.json")}))
	own := f.identity(trust.SystemID(f.domain, "server"), 0)
	registry := prometheus.NewRegistry()
	server := csr.NewServer(must(csr.NewService(csr.Config{
		Domain: f.domain, Issuer: func() (*ca.Issuer, error) { return f.issuer, nil }, Profile: must(ca.NewProfile("workload", ca.ProfileConfig{})),
		Clusters:  map[string]csr.ClusterConfig{"Kubernetes": {Cluster: cluster}},
		Admission: admission.Config{MaxInFlight: must(strconv.Atoi(os.Getenv("FLEET_SLOTS"))), MaxQueue: must(strconv.Atoi(os.Getenv("FLEET_QUEUE"))), MaxWait: must(time.ParseDuration(os.Getenv("FLEET_WAIT")))},
		Log:       log, Sampler: &ca.Sampler{}, Logger: slog.New(slog.DiscardHandler), Metrics: csr.NewMetrics(registry),
	})), func() *trust.Identity { return own })
	l := counted{must(net.Listen("tcp", "127.0.0.1:0")), new(atomic.Int64)}
	fmt.Println(l.Addr())
	peak := watch()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		drain(os.Stdin)
		cancel()
	}()
	if err := server.Run(ctx, l); err != nil {
		t.Error(err)
	}
	said := serverSaid{Answers: map[string]int{}, Accepted: int(l.n.Load()), Heap: peak(), Processors: used()}
	for _, family := range must(registry.Gather()) {
		for _, m := range family.Metric {
			switch family.GetName() {
			case "chancery_csr_request_seconds":
				for _, label := range m.Label {
					if label.GetName() == "outcome" {
						said.Answers[label.GetValue()] += int(m.Histogram.GetSampleCount())
					}
				}
			case "chancery_csr_handshakes_refused_total":
				said.NotBegun += int(m.Counter.GetValue())
			}
		}
	}
	fmt.Println(string(must(json.Marshal(said))))
}

// used returns the processor time of this process.
func used() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// What the server of the test can do: some 60 certificates a second for 500 agents, 260 for 2,000 and more, with a key that takes as long as one in a cloud. The agents
// share its processors, and cost more of them than the server itself.
const (
	signing = 150 * time.Millisecond

	maxQueue = 10 // one in so many agents has room in the queue, so that most are refused at first
	newPods  = 10 // one in so many agents has no SVID
	checked  = 10 // one in so many answers is verified
)

// slotsFor returns how many requests the server works on at a time.
func slotsFor(agents int) int { return min(max(agents/50, 1), 40) }

// takes returns how long the server needs for all agents.
func takes(agents int) time.Duration { return signing * time.Duration(agents/slotsFor(agents)) }

// identity issues past the server.
func (f *fleet) identity(id trust.ID, ttl time.Duration) *trust.Identity {
	p, key := ca.ServerProfile(), must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	r := ca.Request{ID: id, PublicKey: key.Public(), TTL: ttl}
	if !id.Reserved() {
		p = must(ca.NewProfile("workload", ca.ProfileConfig{}))
		r.Attestation = &ca.Attestation{Cluster: "Kubernetes", Time: time.Now()}
	}
	cert := must(x509.ParseCertificate(must(f.issuer.Issue(f.t.Context(), must(f.issuer.Prepare(p, r)))).DER))
	return &trust.Identity{ID: id, Chain: append([]*x509.Certificate{cert}, f.issuer.Chain()...), Key: key, Bundle: f.issuer.Bundle(), ReceivedAt: time.Now()}
}

// members makes the agents: a tenth show no SVID, as new pods or those whose SVID has ended; the others have left what agents
// may have after an outage, from three seconds to three times as long as the server needs for all of them. That is from when
// they may begin.
func (f *fleet) members(n int) (all []*member, begin time.Time) {
	all = make([]*member, n)
	lives := 3 * takes(n)
	const trial = 100
	made := func(from, to int) {
		var wg sync.WaitGroup
		places := make(chan struct{}, 64) // they share the syncs of the log
		for i := from; i < to; i++ {
			places <- struct{}{}
			wg.Go(func() {
				defer func() { <-places }()
				m := &member{id: must(trust.WorkloadID(f.domain, "foo", fmt.Sprint("web-", i))), token: f.token(i%(n/onNode), i)}
				all[i] = m
				if i%newPods > 0 {
					m.own = f.identity(m.id, time.Until(begin)+3*time.Second+time.Duration(float64(lives)*mrand.Float64()))
					m.ends = m.own.NotAfter()
				}
			})
		}
		wg.Wait()
	}
	begun := time.Now()
	begin = begun.Add(time.Minute)
	made(0, trial) // to see how long they take here
	begin = begun.Add(time.Second + time.Since(begun)*time.Duration(2*n/trial))
	made(0, n)
	if late := time.Since(begin); late > time.Second {
		f.t.Logf("the agents took %s longer to make than the first ones: each has as much less left", late)
	}
	time.Sleep(time.Until(begin))
	return all, begin
}

// beginning bounds the first attempts of agents that are under way: it is one process that plays them all. With more handshakes
// at a time than it can do in good time it would be its own processors, which no real fleet shares, that agents give up for.
var beginning = make(chan struct{}, 300)

// begins waits until one more agent may begin; what it returns, or two seconds later, says that it has.
func begins() (begun func()) {
	beginning <- struct{}{}
	begun = sync.OnceFunc(func() { <-beginning })
	time.AfterFunc(2*time.Second, begun)
	return begun
}

// run is an agent that lost its server: the real client, and the keeper's own pauses.
func (f *fleet) run(ctx context.Context, m *member, count *atomic.Int64) error {
	c := client.New(client.Config{
		Servers: []string{f.addr}, Domain: f.domain, ID: m.id,
		Roots:   func() ([]*x509.Certificate, error) { return []*x509.Certificate{f.root}, nil },
		Token:   func(context.Context) (string, error) { return m.token, nil },
		Current: func() *trust.Identity { return m.own },
	})
	begun := begins()
	m.first = time.Now()
	var tries rotate.Tries
	for {
		m.attempts++
		call, cancel := context.WithTimeout(ctx, 15*time.Second)
		key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) // as the keeper: one for each try
		chain, bundle, err := c.Issue(call, key)
		cancel()
		begun()
		if err == nil {
			m.served, m.order = time.Now(), count.Add(1)
			if m.order%checked != 0 {
				return nil
			}
			_, err = trust.NewIdentity(m.id, chain, key, bundle, time.Now())
			return err
		}
		m.lastError = err
		if r, ok := errors.AsType[*client.Refused](err); ok {
			if m.refusals++; r.Reason != csr.ReasonBusy {
				return err
			}
		}
		left := time.Duration(0)
		if m.own != nil {
			left = time.Until(m.ends)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %d attempts: %w", m.attempts, m.lastError)
		case <-time.After(tries.Pause(err, left)):
		}
	}
}

// After an outage of all servers the whole fleet comes back within seconds to one that is slow, and whose queue holds a few of
// them. No work is thrown away on those that are sent away again, and those whose SVID ends while others wait come first.
func TestD19AFleetComesBack(t *testing.T) {
	if testing.Short() {
		t.Skip("it needs the processors: under the race detector it is they that decide the order, and not the server")
	}
	n := 500 // with more it is the processors of a machine that is busy that they wait for, and not the server
	if all := os.Getenv("FLEET_AGENTS"); all != "" {
		n = must(strconv.Atoi(all))
	}
	f := newFleet(t, n)
	all, begun := f.members(n)
	spread := takes(n) / 2 // 20 s of 10,000: as the pauses of keepers after half a minute without a server
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	var count, failed atomic.Int64
	var wg sync.WaitGroup
	for _, m := range all {
		wait := mrand.N(spread)
		wg.Go(func() {
			time.Sleep(wait)
			if err := f.run(ctx, m, &count); err != nil {
				if failed.Add(1) <= 5 {
					t.Errorf("%s: %v", m.id, err)
				}
			}
		})
	}
	peak := watch()
	wg.Wait()
	heap := peak()
	if n := failed.Load(); n > 0 {
		t.Fatalf("%d agents did not come back", n)
	}
	t.Logf("%d agents came back in %s; heap %d MB at most", n, time.Since(begun).Round(time.Millisecond), heap>>20)
	f.judgeWork(all)
	f.judgeOrder(all)
}

// judgeWork holds what the server did against what came of it.
func (f *fleet) judgeWork(all []*member) {
	n := len(all)
	said := f.end()
	out := said.Answers
	attempts, most, refusals := 0, 0, 0
	for _, m := range all {
		attempts, most, refusals = attempts+m.attempts, max(most, m.attempts), refusals+m.refusals
	}
	handshakes := said.Accepted - said.NotBegun
	f.t.Logf("%d attempts, at most %d of one agent, %d of them refused with an answer; %d connections, %d not begun; answers %v",
		attempts, most, refusals, said.Accepted, said.NotBegun, out)
	f.t.Logf("the server used %s of processor time, %d MB of heap at most; the agents %s", said.Processors.Round(time.Millisecond), said.Heap>>20,
		used().Round(time.Millisecond))
	tenth := n / 10
	byTime := slices.SortedFunc(slices.Values(all), func(a, b *member) int { return int(a.order - b.order) })
	var took []time.Duration
	for i := range 10 {
		took = append(took, byTime[min((i+1)*tenth, n-1)].served.Sub(byTime[i*tenth].served).Round(10*time.Millisecond))
	}
	f.t.Logf("each tenth of them took %v", took)
	if lost := out["ok"] - n; lost > n/100 {
		f.t.Errorf("%d certificates were issued that nobody got", lost)
	}
	if out[csr.ReasonBusy] < n/10 {
		f.t.Errorf("only %d refusals: there was no contention, and nothing was tested", out[csr.ReasonBusy])
	}
	if limit := uint64(n)*64<<10 + 32<<20; said.Heap > limit {
		f.t.Errorf("the server had %d MB of heap; want at most %d", said.Heap>>20, limit>>20)
	}
	if handshakes > n+n/4 {
		f.t.Errorf("%d handshakes for %d certificates", handshakes, n)
	}
	if attempts > 6*n || most > 30 {
		f.t.Errorf("%d attempts of %d agents, at most %d of one", attempts, n, most)
	}
}

// judgeOrder holds those who lost their SVID while they waited against those who would have if the same answers, at the same
// moments, had been given to the agents in the order in which they came first; and against those who would have in the best order
// that there is, had each answer gone to whoever had waited longest of those that had least left, over all nodes.
func (f *fleet) judgeOrder(all []*member) {
	lost := func(m *member, served time.Time) bool {
		return m.own != nil && m.ends.After(m.first) && served.After(m.ends)
	}
	var moments []time.Time
	really, inTurn, best := 0, 0, 0
	for _, m := range all {
		moments = append(moments, m.served)
		if lost(m, m.served) {
			really++
		}
	}
	slices.SortFunc(moments, time.Time.Compare)
	coming := slices.SortedFunc(slices.Values(all), func(a, b *member) int { return a.first.Compare(b.first) })
	for i, m := range coming {
		if lost(m, moments[i]) {
			inTurn++
		}
	}
	var waiting []*member // sorted by end
	next := 0
	for _, at := range moments {
		for ; next < len(coming) && !coming[next].first.After(at); next++ {
			if m := coming[next]; m.own != nil && m.ends.After(m.first) {
				i, _ := slices.BinarySearchFunc(waiting, m, func(a, b *member) int { return a.ends.Compare(b.ends) })
				waiting = slices.Insert(waiting, i, m)
			}
		}
		for len(waiting) > 0 && lost(waiting[0], at) {
			best++
			waiting = waiting[1:]
		}
		if len(waiting) > 0 {
			waiting = waiting[1:]
		}
	}
	f.t.Logf("%d SVIDs ended before they were renewed; in the order of coming it would have been %d, in the best order %d", really, inTurn, best)
	if inTurn-best < len(all)/50 {
		f.t.Errorf("the order would have saved nearly nobody's SVID (%d of %d): nothing was tested", inTurn-best, inTurn)
	}
	if saved := inTurn - really; 4*saved < inTurn-best {
		f.t.Errorf("%d lost their SVID; in the order of coming %d would have, in the best one %d: urgency counts for little", really, inTurn, best)
	}
}

// watch looks at the memory in use until its end is asked for.
func watch() (peak func() uint64) {
	stop, done := make(chan struct{}), make(chan uint64)
	go func() {
		var most uint64
		for {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			most = max(most, m.HeapAlloc)
			select {
			case <-stop:
				done <- most
				return
			case <-time.After(200 * time.Millisecond):
			}
		}
	}()
	return func() uint64 { close(stop); return <-done }
}
