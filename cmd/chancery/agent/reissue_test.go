package agent

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/kube"
	"github.com/chancery-project/chancery/trust"
)

// urged is a fleet of agents, and a server that has them replace their SVIDs.
type urged struct {
	t        *testing.T
	domain   trust.Domain
	made     [2]*ca.Created // two authorities
	bundle   *trust.Bundle  // both
	issuer   atomic.Pointer[ca.Issuer]
	hub      *agents.Hub
	listener counted
	logPath  string
	log      *audit.Log
	keepers  []*Keeper
}

func newUrged(t *testing.T, n int) *urged {
	u := &urged{t: t, domain: must(trust.ParseDomain("cluster.local")), hub: agents.New(agents.Config{}), logPath: filepath.Join(t.TempDir(), "audit.jsonl")}
	u.log = must(audit.Open(u.logPath))
	t.Cleanup(func() { u.log.Close() })
	for i := range u.made {
		u.made[i] = must(ca.Create(t.Context(), ca.CreateConfig{Domain: u.domain, LogID: ca.MinLogID + 1, Log: u.log}))
	}
	u.bundle = must(trust.NewBundle(u.domain, 1, []*x509.Certificate{u.made[0].Root, u.made[1].Root}))
	u.sign(0)
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	jwks := filepath.Join(t.TempDir(), "jwks.json")
	if err := os.WriteFile(jwks, must(json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{KeyID: "k", Key: key.Public(), Use: "sig"}}})), 0o600); err != nil {
		t.Fatal(err)
	}
	own := (&fleet{t: t, domain: u.domain, issuer: u.issuer.Load()}).identity(trust.SystemID(u.domain, "server"), 0)
	server := csr.NewServer(must(csr.NewService(csr.Config{
		Domain: u.domain, Issuer: func() (*ca.Issuer, error) { return u.issuer.Load(), nil }, Profile: must(ca.NewProfile("workload", ca.ProfileConfig{})),
		Clusters: map[string]csr.ClusterConfig{"Kubernetes": {Cluster: must(kube.New(kube.Config{
			Name: "Kubernetes", Issuer: "https://k8s.test", Audiences: []string{"chancery"}, JWKSFile: jwks,
		}))}},
		Log: u.log, Sampler: &ca.Sampler{}, Logger: slog.New(slog.DiscardHandler), Metrics: csr.NewMetrics(prometheus.NewRegistry()), Agents: u.hub,
	})), func() *trust.Identity { return own })
	u.listener = counted{must(net.Listen("tcp", "127.0.0.1:0")), new(atomic.Int64)}
	signer := must(jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "k"}}, nil))
	ctx, cancel := context.WithCancel(context.Background())
	var g errgroup.Group
	g.Go(func() error { return server.Run(ctx, u.listener) })
	for i := range n {
		jwt := token(signer, i%10, i)
		k := NewKeeper(KeeperConfig{Logger: slog.New(slog.DiscardHandler), Client: client.Config{
			Servers: []string{u.listener.Addr().String()}, Domain: u.domain, ID: must(trust.WorkloadID(u.domain, "foo", fmt.Sprint("web-", i))),
			Roots: func() ([]*x509.Certificate, error) { return u.bundle.Roots(), nil },
			Token: func(context.Context) (string, error) { return jwt, nil },
		}})
		u.keepers = append(u.keepers, k)
		g.Go(func() error { return k.Run(ctx) })
	}
	t.Cleanup(func() {
		cancel()
		if err := g.Wait(); err != nil {
			t.Error(err)
		}
	})
	return u
}

// sign has one of the authorities sign from now on.
func (u *urged) sign(by int) {
	u.issuer.Store(must(ca.NewIssuer(ca.IssuerConfig{
		Domain: u.domain, Key: u.made[by].IssuerKey, Chain: []*x509.Certificate{u.made[by].Issuer}, LogID: ca.MinLogID + 1, Log: u.log, Bundle: u.bundle,
	})))
}

// publish sends an update, and waits until all agents have it.
func (u *urged) publish(r *chanceryv1.Reissue) {
	u.t.Helper()
	m := &chanceryv1.SyncUpdate{Bundle: &chanceryv1.Bundle{TrustDomain: u.domain.String(), Generation: u.bundle.Generation()}, Reissue: r}
	for _, root := range u.bundle.Roots() {
		m.Bundle.Roots = append(m.Bundle.Roots, root.Raw)
	}
	if err := u.hub.Publish(m); err != nil {
		u.t.Fatal(err)
	}
	u.await("each agent has the update", func() bool {
		connected, acknowledged := u.hub.Counts()
		return connected == len(u.keepers) && acknowledged == connected
	})
}

func (u *urged) await(what string, holds func() bool) {
	u.t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			u.t.Fatalf("waited in vain: %s", what)
		}
	}
}

// allBy reports whether each agent has an SVID by one of the authorities.
func (u *urged) allBy(by int) bool {
	return !slices.ContainsFunc(u.keepers, func(k *Keeper) bool {
		id, _ := k.Current()
		return id == nil || !bytes.Equal(id.Leaf().AuthorityKeyId, u.made[by].Issuer.SubjectKeyId)
	})
}

// issued counts the certificates of each agent, from the audit log.
func (u *urged) issued() map[string]int {
	out := map[string]int{}
	for line := range strings.Lines(string(must(os.ReadFile(u.logPath)))) {
		var r audit.Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			u.t.Fatal(err)
		}
		if r.Event == audit.Intent && r.Requester.ServiceAccount != "" {
			out[r.Requester.ServiceAccount]++
		}
	}
	return out
}

// A server has all its agents replace their SVIDs: each does so once, however often it is told, within the time that it is given and
// not all at once, and none opens a connection for it.
func TestD19EachSVIDIsReissuedOnceOverTheStream(t *testing.T) {
	const n, within = 200, 2 * time.Second
	u := newUrged(t, n)
	u.publish(nil)
	u.await("each agent has an SVID", func() bool { return u.allBy(0) })
	connections := u.listener.n.Load()

	u.sign(1)
	r := &chanceryv1.Reissue{Issuers: [][]byte{u.made[0].Issuer.SubjectKeyId}, Within: durationpb.New(within)}
	begun := time.Now()
	u.publish(r)
	u.publish(r)
	u.await("each agent has an SVID of the other authority", func() bool { return u.allBy(1) })
	u.publish(r)
	if now := u.listener.n.Load(); now != connections {
		t.Errorf("%d connections were opened for %d SVIDs", now-connections, n)
	}
	all := u.issued()
	for account, times := range all {
		if times != 2 {
			t.Errorf("%s was given %d SVIDs, want 2", account, times)
		}
	}
	if len(all) != n {
		t.Errorf("%d agents were given SVIDs, want %d", len(all), n)
	}
	var after []time.Duration
	for _, k := range u.keepers {
		id, _ := k.Current()
		after = append(after, id.ReceivedAt.Sub(begun))
	}
	slices.Sort(after)
	t.Logf("replaced after %s to %s, half of them after %s", after[0], after[n-1], after[n/2])
	if late := after[n-1-n/10]; late < within/2 { // of 200 moments drawn from the whole time, less than a tenth fell into the second half
		t.Errorf("all but a tenth had another SVID after %s of %s: they came all at once", late, within)
	}
}
