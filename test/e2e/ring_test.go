package e2e

import (
	"context"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// ring is the world in which rotations are proved: three servers on one PostgreSQL, and four Envoys, each of which is a server for
// the one before it and a client of the one after it, all by mTLS with exact SPIFFE IDs; beside them a program with go-spiffe
// and an Istio agent, both clients of an Envoy in the ring. Each Envoy and the program have an agent of ours. Requests run all
// the time, and are counted on both sides.
type ring struct {
	t       *testing.T
	cfg     ringConfig
	k       *Kube
	store   *sharedStore
	sealing string // file of the sealing key
	servers []*Server
	nodes   []*ringNode
	probe   *spiffeProbe
	sidecar *PilotAgent // nil: there is none
	loads   []*ringLoad
	killer  *killer
	admin   int // the server that is asked for rotations
	started time.Time
}

type ringConfig struct {
	Seed  uint64
	TTL   time.Duration // of all SVIDs; 0: ringTTL
	Pilot bool          // with an Istio agent
	Nodes int           // 0: 4
	// Also is another trust domain, whose identities everybody admits beside those of the same path; every other Envoy is of another namespace
	// then. Empty: there is none.
	Also    string
	Servers int           // 0: ringServers
	Kill    time.Duration // mean time between two kills while a rotation is under way; 0: nobody is killed
}

const (
	// ringTTL is short, so that a rotation, which waits for all SVIDs, ends soon; and long enough for what is killed to come back. On a
	// machine that stands still for longer than half of it SVIDs end, and requests fail: then $RING_TTL is to be more.
	ringTTL = 20 * time.Second
	// ringLimit is how long a ring may run at most.
	ringLimit = 30 * time.Minute
	// ringPatience is how long a request may take: on a machine with much to do one that is late is not lost.
	ringPatience = time.Minute
	// ringServers is how many there are.
	ringServers = 3
)

// ringNode is an Envoy of the ring with its agent.
type ringNode struct {
	*Envoy
	pod     Pod
	id      string
	agent   *Agent
	inbound string // its Unix socket for mTLS
	seen    *upstreamCount
}

// upstreamCount counts what arrives behind an Envoy, by the client's SPIFFE ID and by the issuer of its certificate.
type upstreamCount struct {
	mu   sync.Mutex // guards what follows
	from map[string]int
	last map[string]map[string]int // by ID: how many requests since clear, by the issuer's ID in hex
	bad  []string                  // what could not be read
	ours map[string]int            // what the test itself sent under an ID
}

func newUpstreamCount() *upstreamCount {
	return &upstreamCount{from: map[string]int{}, ours: map[string]int{}, last: map[string]map[string]int{}}
}

func (c *upstreamCount) add(xfcc string) {
	id, issuer, err := readXFCC(xfcc)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.bad = append(c.bad, fmt.Sprintf("%v: %.200s", err, xfcc))
		return
	}
	c.from[id]++
	if c.last[id] == nil {
		c.last[id] = map[string]int{}
	}
	c.last[id][issuer]++
}

// of returns how many requests came from an identity by its names, those of the test itself left out.
func (c *upstreamCount) of(names ...string) (n int, bad []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range names {
		n += c.from[id] - c.ours[id]
	}
	return n, slices.Clone(c.bad)
}

// own notes that the test has sent a request itself, and was answered.
func (c *upstreamCount) own(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ours[id]++
}

// issuers returns those of the certificates that an ID has shown since clear.
func (c *upstreamCount) issuers(id string) map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.last[id])
}

func (c *upstreamCount) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.last)
}

// readXFCC returns the SPIFFE ID and the ID of the issuer in an x-forwarded-client-cert header with one element.
func readXFCC(xfcc string) (id, issuer string, err error) {
	var cert *x509.Certificate
	for field := range strings.SplitSeq(xfcc, ";") {
		name, value, _ := strings.Cut(field, "=")
		switch name {
		case "URI":
			id = value
		case "Cert":
			if cert, err = certFromHeader(strings.Trim(value, `"`)); err != nil {
				return "", "", err
			}
		}
	}
	if id == "" || cert == nil {
		return "", "", errors.New("no URI, or no certificate")
	}
	return id, issuerOf(cert), nil
}

// issuerOf is the ID of a certificate's issuer, as documents and commands have it.
func issuerOf(cert *x509.Certificate) string { return hex.EncodeToString(cert.AuthorityKeyId) }

// ringLoad is a load through one client, and where its requests arrive.
type ringLoad struct {
	*Load
	name string
	id   string // of the client
	to   *ringNode

	mu     sync.Mutex     // guards last
	server map[string]int // requests since clear by the issuer of the server's certificate
}

func (l *ringLoad) see(p Passage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.server[issuerOf(p.Server)]++
}

func (l *ringLoad) issuers() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.server)
}

func (l *ringLoad) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.server)
}

// ringSeed is $RING_SEED, or a new one.
func ringSeed(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("RING_SEED")
	if text == "" {
		return rand.Uint64()
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("RING_SEED: %v; want a number", err)
	}
	return seed
}

// ringKill is the mean time between two kills: $RING_KILL, or what the test says. 0s: nobody is killed.
func ringKill(t *testing.T, usual time.Duration) time.Duration {
	t.Helper()
	return ringDuration(t, "RING_KILL", usual)
}

// ringDuration is what an environment variable says, or what is usual.
func ringDuration(t *testing.T, name string, usual time.Duration) time.Duration {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return usual
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return d
}

// startRing starts all of it, and waits until requests pass everywhere.
func startRing(t *testing.T, cfg ringConfig) *ring {
	t.Helper()
	Tool(t, "envoy")
	if cfg.TTL == 0 {
		cfg.TTL = ringDuration(t, "RING_TTL", ringTTL)
	}
	if cfg.Nodes == 0 {
		cfg.Nodes = 4
	}
	if cfg.Servers == 0 {
		cfg.Servers = ringServers
	}
	r := &ring{t: t, cfg: cfg, k: SharedKube(t), store: postgresStore(t), started: time.Now()}
	r.killer = newKiller(r)
	r.watchMachine()
	r.startServers()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("RING_SEED=%d; killed: %v", cfg.Seed, r.killer.did)
		}
	})
	ns := r.k.Namespace(t, "ring")
	r.startNodes(ns)
	r.startProbe(ns)
	if cfg.Pilot {
		r.startSidecar(ns)
	}
	r.startLoads()
	r.passes(10, "at first")
	t.Logf("the ring runs %v after its start", time.Since(r.started).Round(time.Millisecond))
	return r
}

// watchMachine tells when the machine stood still, for who reads why something took long.
func (r *ring) watchMachine() {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for last := time.Now(); ctx.Err() == nil; {
			wait(ctx, 100*time.Millisecond)
			if gap := time.Since(last); gap > 2*time.Second {
				r.t.Logf("%s: the machine did nothing for this test for %v", r.at(), gap.Round(time.Millisecond))
			}
			last = time.Now()
		}
	})
	r.t.Cleanup(func() { cancel(); wg.Wait() })
}

// startServers starts them on one store.
func (r *ring) startServers() {
	r.t.Helper()
	cluster := r.k.StaticCluster(r.t)
	r.sealing = filepath.Join(SocketDir(r.t), "key")
	for i := range r.cfg.Servers {
		state := maps.Clone(r.store.state)
		state["sealingKey"], state["replica"] = r.sealing, fmt.Sprintf("chancery-%d", i)
		config := serverYAML{
			State: state, IssuanceLog: "log", Clusters: []clusterYAML{cluster},
			Profile: map[string]string{"defaultTTL": r.cfg.TTL.String(), "maxTTL": r.cfg.TTL.String()},
		}
		if i == 0 {
			r.servers = append(r.servers, NewServer(r.t, config))
			r.store.record()
		} else {
			r.servers = append(r.servers, writeServer(r.t, config))
			r.servers[i].Roots = r.servers[0].Roots
		}
		r.servers[i].Start(r.t)
	}
	for _, s := range r.servers {
		s.WaitReady(r.t)
	}
}

func (r *ring) addresses() (all []string) {
	for _, s := range r.servers {
		all = append(all, s.Listen)
	}
	return all
}

// member makes a pod and its agent, which has a file of its own with the roots of now: nobody will put newer ones into it.
func (r *ring) member(ns, name string) (Pod, *Agent) {
	r.t.Helper()
	pod := r.k.RunPod(r.t, ns, name, name, "node-"+name)
	roots := filepath.Join(r.t.TempDir(), "roots.pem")
	writeFile(r.t, roots, readFile(r.t, r.servers[0].Roots), 0o600)
	return pod, StartAgent(r.t, r.servers[0], AgentConfig{
		Pod: pod, Token: r.k.BoundToken(r.t, pod, time.Hour, audience), TTL: r.cfg.TTL, Servers: r.addresses(), Roots: roots,
	})
}

// startNodes starts the Envoys, once all know whom they will have for neighbours.
func (r *ring) startNodes(ns string) {
	r.t.Helper()
	sockets, others := SocketDir(r.t), ns
	if r.cfg.Also != "" {
		others = r.k.Namespace(r.t, "others")
	}
	for i := range r.cfg.Nodes {
		of := ns
		if i%2 == 1 {
			of = others
		}
		pod, agent := r.member(of, fmt.Sprintf("ring-%d", i))
		r.nodes = append(r.nodes, &ringNode{
			pod: pod, id: pod.SPIFFEID(trustDomain), agent: agent, inbound: filepath.Join(sockets, fmt.Sprintf("in-%d", i)), seen: newUpstreamCount(),
		})
	}
	for i, n := range r.nodes {
		left, right := r.nodes[(i+len(r.nodes)-1)%len(r.nodes)], r.nodes[(i+1)%len(r.nodes)]
		in := EnvoyConfig{SDSSocket: n.agent.Socket, PeerURI: left.id, OtherURIs: r.others(append([]string{left.id}, r.guests(ns, i)...)), Upstream: startEcho(r.t, n.seen.add)}
		out := EnvoyConfig{SDSSocket: n.agent.Socket, PeerURI: right.id, OtherURIs: r.others([]string{right.id}), Upstream: right.inbound}
		n.Envoy = startRingEnvoy(r.t, fmt.Sprintf("ring-%d", i), n.inbound, in, out)
	}
	for _, n := range r.nodes {
		n.WaitReady(r.t, 30*time.Second)
	}
}

// names are those of an identity in each trust domain, the first one first.
func (r *ring) names(id string) []string {
	if r.cfg.Also == "" {
		return []string{id}
	}
	return []string{id, strings.Replace(id, "//"+trustDomain+"/", "//"+r.cfg.Also+"/", 1)}
}

// others are the names of some identities, but for the first.
func (r *ring) others(ids []string) (all []string) {
	for _, id := range ids {
		all = append(all, r.names(id)...)
	}
	return all[1:]
}

// guests are those besides its neighbour that an Envoy of the ring admits.
func (r *ring) guests(ns string, node int) []string {
	switch node {
	case probeTarget:
		return []string{Pod{Namespace: ns, ServiceAccount: "probe"}.SPIFFEID(trustDomain)}
	case sidecarTarget:
		return []string{Pod{Namespace: ns, ServiceAccount: "sidecar"}.SPIFFEID(trustDomain)}
	}
	return nil
}

// probeTarget and sidecarTarget are the Envoys that the program with go-spiffe and the sidecar of Istio's agent call.
const probeTarget, sidecarTarget = 0, 1

// startSidecar starts Istio's agent, which asks one server, and whose file of roots is kept up to date as a ConfigMap would be.
func (r *ring) startSidecar(ns string) {
	r.t.Helper()
	Tool(r.t, "pilot-agent")
	pod := r.k.RunPod(r.t, ns, "sidecar", "sidecar", "node-sidecar")
	roots := filepath.Join(r.t.TempDir(), "root-cert.pem")
	writeFile(r.t, roots, readFile(r.t, r.servers[0].Roots), 0o600)
	r.probe.follow(roots)
	target := r.nodes[sidecarTarget]
	r.sidecar = StartPilotAgent(r.t, PilotAgentConfig{
		Pod: pod, Token: r.k.BoundToken(r.t, pod, time.Hour, audience), CAAddr: r.servers[0].Listen, CARootFile: roots, SecretTTL: r.cfg.TTL,
		Client: &EnvoyConfig{Name: "sidecar", PeerURI: target.id, Upstream: target.inbound, MaxRequests: 5},
	})
	r.sidecar.Envoy.WaitReady(r.t, 30*time.Second)
}

// startLoads keeps each client busy.
func (r *ring) startLoads() {
	add := func(name, id string, e *Envoy, to *ringNode) {
		l := &ringLoad{name: name, id: id, to: to, server: map[string]int{}}
		l.Load = StartLoad(r.t, LoadConfig{Addr: e.Listen, Kept: 2, Fresh: 1, Rate: 25, Limit: ringLimit, Timeout: ringPatience, Seen: l.see})
		r.loads = append(r.loads, l)
	}
	for i, n := range r.nodes {
		add(n.Name, n.id, n.Envoy, r.nodes[(i+1)%len(r.nodes)])
	}
	if r.sidecar != nil {
		add("sidecar", Pod{Namespace: r.nodes[0].pod.Namespace, ServiceAccount: "sidecar"}.SPIFFEID(trustDomain), r.sidecar.Envoy, r.nodes[sidecarTarget])
	}
}

// passes waits until so many more requests have passed on each edge.
func (r *ring) passes(n int, when string) {
	r.t.Helper()
	r.window()
	Eventually(r.t, 30*time.Second, fmt.Sprintf("%d requests pass on each edge %s", n, when), func() error {
		for _, l := range r.loads {
			if have := sum(l.issuers()); have < n {
				return fmt.Errorf("%d from %s: %v", have, l.name, l.Report())
			}
		}
		if have := r.probe.since(); have < n {
			return fmt.Errorf("%d by go-spiffe: %v", have, r.probe.report())
		}
		return nil
	})
}

// window begins a new count of the issuers that are seen.
func (r *ring) window() {
	for _, l := range r.loads {
		l.clear()
	}
	for _, n := range r.nodes {
		n.seen.clear()
	}
	r.probe.clear()
}

func sum(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// under waits until every edge has shown certificates of one issuer only, on both sides, for a while of requests.
func (r *ring) under(issuer string) {
	r.t.Helper()
	only := func(who string, counts map[string]int) error {
		if len(counts) != 1 || counts[issuer] == 0 {
			return fmt.Errorf("%s showed certificates of %v; want only %s", who, counts, issuer)
		}
		return nil
	}
	Eventually(r.t, 2*r.cfg.TTL, "all certificates on the wire are of issuer "+issuer, func() error {
		r.passes(10, "to see whose certificates they show")
		var errs []error
		for _, l := range r.loads {
			errs = append(errs, only("the server of "+l.name, l.issuers()), only("client "+l.name, l.to.seen.issuers(l.id)))
		}
		return errors.Join(append(errs, only("go-spiffe", r.nodes[probeTarget].seen.issuers(r.probe.id)))...)
	})
}

// noneLost ends the load, and holds both sides against each other.
func (r *ring) noneLost() {
	r.t.Helper()
	sent := 0
	for _, l := range r.loads {
		report := l.Stop()
		arrived, bad := l.to.seen.of(r.names(l.id)...)
		sent += report.OK + report.Failed
		r.t.Logf("%s: sent %d, answered %d, failed %d; arrived %d; %d and %d certificates", l.name, report.OK+report.Failed, report.OK, report.Failed,
			arrived, len(report.ClientSerials), len(report.ServerSerials))
		if report.Failed > 0 || report.OK == 0 || arrived != report.OK || len(bad) > 0 {
			r.t.Errorf("%s: %d requests failed, %d arrived of %d that were answered; not to be read: %q: %q", l.name, report.Failed, arrived, report.OK, bad, report.Errors)
		}
	}
	report := r.probe.stop()
	arrived, _ := r.nodes[probeTarget].seen.of(r.names(r.probe.id)...)
	r.t.Logf("go-spiffe: sent %d, answered %d, failed %d; arrived %d", report.sent, report.ok, report.sent-report.ok, arrived)
	if report.ok != report.sent || report.ok == 0 || arrived != report.ok {
		r.t.Errorf("go-spiffe: %d of %d requests failed, %d arrived: %q", report.sent-report.ok, report.sent, arrived, report.errors)
	}
	if ran := time.Since(r.started); ran > ringLimit {
		r.t.Errorf("the ring ran for %v; the load ends after %v", ran, ringLimit)
	}
	r.t.Logf("RING_SEED=%d: %d requests, none lost: %v", r.cfg.Seed, sent+report.sent, !r.t.Failed())
}

// startRingEnvoy starts an Envoy that serves mTLS on a Unix socket as in says, and takes plain HTTP/1.1 on a port for out. Connections to
// the next one are made anew all the time: after five requests, or for each that asks for it.
func startRingEnvoy(t testing.TB, name, inbound string, in, out EnvoyConfig) *Envoy {
	t.Helper()
	for _, cfg := range []*EnvoyConfig{&in, &out} {
		cfg.CertName, cfg.RootName = "default", "ROOTCA"
	}
	dir := t.TempDir()
	return runEnvoy(t, name, dir, writeTemplate(t, dir, ringBootstrap, map[string]any{"Inbound": inbound, "In": in, "Out": out}))
}

var ringBootstrap = bootstrap("ring", `{{define "cluster"}}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {max_requests_per_connection: {{.Requests}}}
        explicit_http_config: {http_protocol_options: {}}
    {{- with .Config}}
    type: STATIC
    connect_timeout: 25s
    load_assignment: {{template "upstream" .}}
    transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          max_session_keys: 0
          {{- template "tls" .}}
    {{- end}}
{{end}}{{template "admin"}}
static_resources:
  listeners:
  - name: inbound
    stat_prefix: inbound
    address: {pipe: {path: {{printf "%q" .Inbound}}}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          disable_stateless_session_resumption: true
          {{- template "tls" .In}}
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: inbound
          forward_client_cert_details: SANITIZE_SET
          set_current_client_cert_details: {uri: true, cert: true}
          {{- template "router"}}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              response_headers_to_add: [{header: {key: x-client-serial, value: "%DOWNSTREAM_PEER_SERIAL%"}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}]
              routes: [{match: {prefix: /}, route: {cluster: echo, timeout: 0s}}]
  - name: outbound
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: outbound
          {{- template "router"}}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              response_headers_to_add: [{header: {key: x-server-cert, value: "%UPSTREAM_PEER_CERT%"}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}]
              routes:
              - {match: {prefix: /, headers: [{name: x-fresh, string_match: {exact: "1"}}]}, route: {cluster: fresh, timeout: 0s}}
              - {match: {prefix: /}, route: {cluster: kept, timeout: 0s}}
  clusters:
  - name: kept
    {{- template "cluster" (requests 5 .Out)}}
  - name: fresh
    {{- template "cluster" (requests 1 .Out)}}
  - name: echo
    type: STATIC
    connect_timeout: 5s
    load_assignment: {{template "upstream" .In}}
{{template "agent" .In}}`)

// wait is a pause in the rhythm of a load or of a killer; what a test waits for is a condition.
func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
