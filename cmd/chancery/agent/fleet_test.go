package agent

import (
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
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
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
}

// member is one agent of the fleet.
type member struct {
	id    trust.ID
	token string
	own   *trust.Identity // nil for a new pod
	ends  time.Time       // of own

	attempts int
	first    time.Time // attempt
	served   time.Time
	order    int64 // of being served
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

const nodes = 100

// slowKey takes its time, as a key in a token or a cloud does, so that it and not this machine is what agents wait for.
type slowKey struct{ crypto.Signer }

func (k slowKey) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	time.Sleep(3 * time.Millisecond)
	return k.Signer.Sign(r, digest, opts)
}

// newFleet starts the server: the real one, with real issuance, but for a slow key and two slots, so that requests have to
// wait.
func newFleet(t *testing.T) *fleet {
	dir := t.TempDir()
	if shm, err := os.MkdirTemp("/dev/shm", "chancery-fleet-"); err == nil { // a log whose disk is not shared
		t.Cleanup(func() { os.RemoveAll(shm) })
		dir = shm
	}
	f := &fleet{t: t, domain: must(trust.ParseDomain("cluster.local"))}
	log := must(audit.Open(filepath.Join(dir, "audit.jsonl")))
	t.Cleanup(func() { log.Close() })
	made := must(ca.Create(t.Context(), ca.CreateConfig{Domain: f.domain, LogID: ca.MinLogID + 1, Log: log}))
	f.root = made.Root
	f.issuer = must(ca.NewIssuer(ca.IssuerConfig{
		Domain: f.domain, Key: slowKey{made.IssuerKey}, Chain: []*x509.Certificate{made.Issuer}, LogID: ca.MinLogID + 1, Log: log,
		Bundle: must(trust.NewBundle(f.domain, 1, []*x509.Certificate{made.Root})),
	}))
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	keySet := filepath.Join(dir, "jwks.json")
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{KeyID: "k", Key: key.Public(), Use: "sig"}}}
	if err := os.WriteFile(keySet, must(json.Marshal(set)), 0o600); err != nil {
		t.Fatal(err)
	}
	signer := must(jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "k"}}, nil))
	f.token = func(node, account int) string {
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
	cluster := must(kube.New(kube.Config{Name: "Kubernetes", Issuer: "https://k8s.test", Audiences: []string{"chancery"}, JWKSFile: keySet}))
	own := f.identity(trust.SystemID(f.domain, "server"), 0)
	registry := prometheus.NewRegistry()
	server := csr.NewServer(must(csr.NewService(csr.Config{
		Domain: f.domain, Issuer: func() (*ca.Issuer, error) { return f.issuer, nil }, Profile: must(ca.NewProfile("workload", ca.ProfileConfig{})),
		Clusters:  map[string]csr.ClusterConfig{"Kubernetes": {Cluster: cluster}},
		Admission: admission.Config{MaxInFlight: 2, MaxQueue: maxQueue, MaxWait: maxWait},
		Log:       log, Sampler: &ca.Sampler{}, Logger: slog.New(slog.DiscardHandler), Metrics: csr.NewMetrics(registry),
	})), func() *trust.Identity { return own })
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	f.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return f
}

// The bounds of the server's queue: small enough that many are refused and come again.
const (
	maxQueue = 500
	maxWait  = 5 * time.Second
)

// atOnce bounds the calls under way: this process plays all agents, and with more of them it would be its own processor time
// that they wait for, handshake upon handshake, and not the server.
const atOnce = 1000

var calls = make(chan struct{}, atOnce)

const (
	checked = 10 // one in so many answers is verified
)

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

// members makes the agents: a fifth show no SVID, as new pods or those whose SVID has ended, the others have from half a minute
// to a quarter of an hour.
func (f *fleet) members(n int) []*member {
	all := make([]*member, n)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 64) // they share the syncs of the log
	for i := range all {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			m := &member{id: must(trust.WorkloadID(f.domain, "foo", fmt.Sprint("web-", i))), token: f.token(i%nodes, i)}
			all[i] = m
			if i%5 > 0 {
				m.own = f.identity(m.id, 30*time.Second+time.Duration(float64(15*time.Minute)*float64(i)/float64(n)))
				m.ends = m.own.NotAfter()
			}
		})
	}
	wg.Wait()
	return all
}

// run is an agent that lost its server: the real client, and the keeper's own pauses.
func (f *fleet) run(ctx context.Context, m *member, count *atomic.Int64) error {
	c := client.New(client.Config{
		Servers: []string{f.addr}, Domain: f.domain, ID: m.id,
		Roots:   func() ([]*x509.Certificate, error) { return []*x509.Certificate{f.root}, nil },
		Token:   func(context.Context) (string, error) { return m.token, nil },
		Current: func() *trust.Identity { return m.own },
	})
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	for backoff := 500 * time.Millisecond; ; backoff = min(2*backoff, time.Minute) {
		calls <- struct{}{}
		if m.attempts++; m.attempts == 1 {
			m.first = time.Now()
		}
		call, cancel := context.WithTimeout(ctx, 15*time.Second)
		chain, bundle, err := c.Issue(call, key)
		cancel()
		<-calls
		if err == nil {
			m.served, m.order = time.Now(), count.Add(1)
			if m.order%checked != 0 {
				return nil
			}
			_, err = trust.NewIdentity(m.id, chain, key, bundle, time.Now())
			return err
		}
		if r, ok := errors.AsType[*client.Refused](err); ok && r.Reason != csr.ReasonBusy {
			return err
		}
		left := time.Duration(0)
		if m.own != nil {
			left = time.Until(m.ends)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(rotate.Pause(err, backoff, left)):
		}
	}
}

// After an outage of all servers the whole fleet comes back to one that is slow, and whose queue holds a few of them. Those
// who have least left, or nothing, come first; nobody loses an SVID to somebody who had more time; and nobody is refused over
// and over.
func TestD19AFleetComesBack(t *testing.T) {
	n := 500
	if all := os.Getenv("FLEET_AGENTS"); all != "" { // 10000 wants two cores to itself
		n = must(strconv.Atoi(all))
	}
	f := newFleet(t)
	all := f.members(n)
	spread := time.Duration(n) * time.Millisecond // they were in the pauses between tries
	begun := time.Now()
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
	peak := f.watch()
	wg.Wait()
	heap := peak()
	if n := failed.Load(); n > 0 {
		t.Fatalf("%d agents did not come back", n)
	}
	f.judge(all, n)
	attempts, waits := 0, []time.Duration{}
	most := 0
	for _, m := range all {
		attempts, most = attempts+m.attempts, max(most, m.attempts)
		waits = append(waits, m.served.Sub(m.first))
	}
	slices.Sort(waits)
	t.Logf("%d agents came back in %s, with %.2f attempts each (at most %d); from the first attempt p50 %s, p99 %s, all %s; heap %d MB at most",
		n, time.Since(begun).Round(time.Millisecond), float64(attempts)/float64(n), most, waits[n/2].Round(time.Millisecond),
		waits[n*99/100].Round(time.Millisecond), waits[n-1].Round(time.Millisecond), heap>>20)
	if attempts > 6*n || most > 15 {
		t.Errorf("%d attempts of %d agents, at most %d of one", attempts, n, most)
	}
}

// watch looks at the memory in use until its end is asked for.
func (f *fleet) watch() (peak func() uint64) {
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

// due is when the agent needs an SVID: as admission has it.
func (m *member) due() time.Time {
	if m.own != nil && m.ends.After(m.first) {
		return m.ends
	}
	return m.first.Add(15 * time.Second)
}

// judge holds the order in which the agents were served against the life that they had left: of two that waited at the same
// time, the one that needs it sooner should most often come first.
func (f *fleet) judge(all []*member, n int) {
	pairs, right := 0, 0
	for range 100 * n {
		a, b := all[mrand.N(n)], all[mrand.N(n)]
		if a.due().After(b.due()) {
			a, b = b, a
		}
		if b.due().Sub(a.due()) > time.Minute && a.first.Before(b.served) && b.first.Before(a.served) {
			if pairs++; a.order < b.order {
				right++
			}
		}
	}
	for _, m := range all {
		if m.own != nil && m.ends.After(m.first) && m.served.After(m.ends) {
			f.judgeLost(all, m)
		}
	}
	f.t.Logf("of %d pairs that waited at the same time, the one due first was served first in %.0f %%", pairs, 100*float64(right)/float64(pairs))
	if float64(right) < 0.6*float64(pairs) {
		f.t.Error("those who need it are not served before those who have time")
	}
}

// judgeLost judges an SVID that ended while its agent waited: on a machine that is slow enough that cannot be helped, but then
// nobody may have been served instead who had a minute more.
func (f *fleet) judgeLost(all []*member, lost *member) {
	instead := 0
	for _, m := range all {
		if m.own != nil && m.ends.After(lost.ends.Add(time.Minute)) && m.served.After(lost.first.Add(maxWait)) && m.served.Before(lost.ends) {
			instead++
		}
	}
	f.t.Logf("%s ended after %s of waiting and %d attempts", lost.id, lost.ends.Sub(lost.first), lost.attempts)
	if instead > len(all)/20 {
		f.t.Errorf("%s lost its SVID, while %d were served that had a minute more", lost.id, instead)
	}
}
