package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
)

// spiffeProbe is a program with go-spiffe: it has its SVID and roots from an agent's Workload API, and calls an Envoy of the ring
// by mTLS, with a new connection for each request.
type spiffeProbe struct {
	id     string
	agent  *Agent
	source *workloadapi.X509Source
	end    func()
	// domains are the trust domains whose roots it may have.
	domains []string

	mu    sync.Mutex // guards what follows
	all   probeReport
	count int    // that passed since clear
	file  string // where the roots are written whenever they change; "": nowhere
	roots string // that were written last
}

type probeReport struct {
	sent, ok int
	errors   []string // the first 20
}

// probePace is the time between two of its requests.
const probePace = 100 * time.Millisecond

func (r *ring) startProbe(ns string) {
	r.t.Helper()
	pod, agent := r.member(ns, "probe")
	p := &spiffeProbe{id: pod.SPIFFEID(trustDomain), agent: agent, domains: []string{trustDomain}}
	if r.cfg.Also != "" {
		p.domains = append(p.domains, r.cfg.Also)
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), 30*time.Second)
	defer cancel()
	var err error
	if p.source, err = workloadapi.NewX509Source(ctx, workloadapi.WithClientOptions(workloadapi.WithAddr("unix://"+agent.Socket))); err != nil {
		r.t.Fatalf("go-spiffe: %v", err)
	}
	target := r.nodes[probeTarget]
	var peers []spiffeid.ID
	for _, name := range r.names(target.id) {
		peers = append(peers, spiffeid.RequireFromString(name))
	}
	config := tlsconfig.MTLSClientConfig(p.source, p.source, tlsconfig.AuthorizeOneOf(peers...))
	client := &http.Client{Timeout: ringPatience, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&tls.Dialer{Config: config}).DialContext(ctx, "unix", target.inbound)
		},
	}}
	run, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ; run.Err() == nil; wait(run, probePace) {
			p.record(get(client, "https://ring/"))
		}
	})
	p.end = sync.OnceFunc(func() { stop(); wg.Wait(); p.source.Close() })
	r.t.Cleanup(p.end)
	r.probe = p
}

// get asks for a page and reads it.
func get(client *http.Client, url string) error {
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.300s", resp.Status, body)
	}
	return err
}

func (p *spiffeProbe) record(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all.sent++
	if err == nil {
		p.all.ok++
		p.count++
	} else if len(p.all.errors) < loadErrors {
		p.all.errors = append(p.all.errors, fmt.Sprintf("%s: %v", time.Now().Format(time.TimeOnly), err))
	}
	if p.file != "" {
		p.writeRoots()
	}
}

// follow keeps a file as a ConfigMap with the roots would be.
func (p *spiffeProbe) follow(file string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.file = file
}

func (p *spiffeProbe) writeRoots() {
	bundle, err := p.source.GetX509BundleForTrustDomain(spiffeid.RequireTrustDomainFromString(trustDomain))
	if err != nil {
		return // it is closed
	}
	var cas []*testCA
	for _, root := range bundle.X509Authorities() {
		cas = append(cas, &testCA{cert: root})
	}
	if text := certsPEM(cas...); text != p.roots {
		err = errors.Join(os.WriteFile(p.file+".new", []byte(text), 0o600), os.Rename(p.file+".new", p.file))
		if err == nil {
			p.roots = text
		}
	}
}

func (p *spiffeProbe) report() probeReport {
	p.mu.Lock()
	defer p.mu.Unlock()
	report := p.all
	report.errors = slices.Clone(report.errors)
	return report
}

func (p *spiffeProbe) since() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

func (p *spiffeProbe) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count = 0
}

func (p *spiffeProbe) stop() probeReport {
	p.end()
	return p.report()
}

// trusts says whether go-spiffe, by the roots that it has now, takes a chain for that of the ID.
func (p *spiffeProbe) trusts(t testing.TB, id string, chain []*x509.Certificate) error {
	t.Helper()
	got, _, err := x509svid.Verify(chain, p.source)
	if err == nil && got.String() != id {
		err = fmt.Errorf("it is %s", got)
	}
	return err
}

// rootIDs returns the IDs of the roots that the program has, of all domains.
func (p *spiffeProbe) rootIDs(t testing.TB) (ids []string) {
	t.Helper()
	for _, domain := range p.domains {
		bundle, err := p.source.GetX509BundleForTrustDomain(spiffeid.RequireTrustDomainFromString(domain))
		if err != nil && len(p.domains) == 1 {
			t.Fatal(err)
		}
		if err != nil { // none yet, or none any more
			continue
		}
		for _, root := range bundle.X509Authorities() {
			ids = append(ids, fmt.Sprintf("%x", root.SubjectKeyId))
		}
	}
	slices.Sort(ids)
	return ids
}
