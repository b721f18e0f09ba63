package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/test/bench/parts"
	"github.com/chancery-project/chancery/trust"
)

// ahead is for how many seconds tokens of new pods are made in advance.
const ahead = 60

// pods are new ones, each with an identity of its own on one of the fleet's nodes.
type pods struct {
	config config
	server *server
	domain trust.Domain
	tokens *parts.Tokens
	next   int
	made   []parts.Workload
}

func newPods(c config, s *server, tokens *parts.Tokens) (*pods, error) {
	p := &pods{config: c, server: s, tokens: tokens}
	var err error
	if p.domain, err = trust.ParseDomain(parts.TrustDomain); err != nil {
		return nil, err
	}
	for len(p.made) < ahead*c.pods {
		if err := p.make(); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *pods) make() error {
	w, err := p.tokens.Workload(p.config.agents+p.next, p.config.nodes)
	p.next++
	p.made = append(p.made, w)
	return err
}

// latencies are of those that were served.
type latencies struct {
	took   []time.Duration // sorted
	failed int
	first  error
}

// at returns a percentile.
func (l *latencies) at(percent int) time.Duration {
	if len(l.took) == 0 {
		return 0
	}
	return l.took[min(len(l.took)*percent/100, len(l.took)-1)]
}

func (l *latencies) print(w io.Writer, when string, rate int, more string) {
	milliseconds := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	fmt.Fprintf(w, "new-pods when=%s rate=%d/s n=%d p50=%.1fms p99=%.1fms max=%.1fms failed=%d%s\n", when, rate, len(l.took), milliseconds(l.at(50)),
		milliseconds(l.at(99)), milliseconds(l.at(100)), l.failed, more)
}

// ask has pods come at a steady rate, however long those before take, until it is over; and waits for them all.
func (p *pods) ask(ctx context.Context, over <-chan time.Time) (latencies, error) {
	var l latencies
	var mu sync.Mutex // guards l
	var all sync.WaitGroup
	tick := time.NewTicker(time.Second / time.Duration(p.config.pods))
	defer tick.Stop()
	for {
		if len(p.made) == 0 {
			if err := p.make(); err != nil {
				return l, err
			}
		}
		w := p.made[0]
		p.made = p.made[1:]
		all.Go(func() {
			begun := time.Now()
			err := p.one(ctx, w)
			took := time.Since(begun)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				l.took = append(l.took, took)
				return
			}
			if l.failed++; l.first == nil {
				l.first = err
			}
		})
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
		case <-over:
		}
		all.Wait()
		slices.Sort(l.took)
		return l, ctx.Err()
	}
}

// one gets a pod's first SVID, from making the key to having it verified.
func (p *pods) one(ctx context.Context, w parts.Workload) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	id, err := trust.ParseID(w.ID)
	if err != nil {
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	c := client.New(client.Config{
		Servers: []string{p.server.addr}, Domain: p.domain, ID: id, Cluster: parts.ClusterName,
		Roots: p.server.trusted,
		Token: func(context.Context) (string, error) { return w.Token, nil },
	})
	chain, bundle, err := c.Issue(ctx, key)
	if err != nil {
		return err
	}
	_, err = trust.NewIdentity(id, chain, key, bundle, time.Now())
	return err
}

// How the floor asks, as test/bench/csr does.
const (
	floorCallers = 16
	floorConns   = 4
	floorTokens  = 200
)

// floor has the server issue certificates as fast as it can: each connection is kept, and requests are made in advance.
func floor(ctx context.Context, s *server, tokens *parts.Tokens, n int) (rate float64, err error) {
	domain, err := trust.ParseDomain(parts.TrustDomain)
	if err != nil {
		return 0, err
	}
	roots, err := s.trusted()
	if err != nil {
		return 0, err
	}
	bundle, err := trust.NewBundle(domain, 0, roots)
	if err != nil {
		return 0, err
	}
	var conns []chanceryv1.IssuanceClient
	for range floorConns {
		tls := trust.ClientTLS(trust.SystemID(domain, "server"), trust.Only(bundle), func() *trust.Identity { return nil })
		conn, err := grpc.NewClient(s.addr, grpc.WithTransportCredentials(credentials.NewTLS(tls)))
		if err != nil {
			return 0, err
		}
		defer conn.Close()
		conns = append(conns, chanceryv1.NewIssuanceClient(conn))
	}
	type call struct {
		metadata metadata.MD
		request  *chanceryv1.IssueRequest
	}
	var calls []call
	for i := range floorTokens {
		w, err := tokens.Workload(i, floorTokens)
		if err != nil {
			return 0, err
		}
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return 0, err
		}
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
		if err != nil {
			return 0, err
		}
		calls = append(calls, call{metadata.Pairs("authorization", "Bearer "+w.Token, "clusterid", parts.ClusterName),
			&chanceryv1.IssueRequest{Requests: []*chanceryv1.CertificateRequest{{Csr: der}}}})
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	failed := make(chan error, floorCallers)
	begun := time.Now()
	for i := range floorCallers {
		wg.Go(func() {
			for {
				at := int(next.Add(1))
				if at > n {
					return
				}
				c := calls[at%len(calls)]
				answer, err := conns[i%floorConns].Issue(metadata.NewOutgoingContext(ctx, c.metadata), c.request)
				if err == nil && answer.GetResults()[0].GetCertificate() == nil {
					err = errors.New(answer.GetResults()[0].GetRefusal().GetMessage())
				}
				if err != nil {
					failed <- fmt.Errorf("measuring the floor: %w", err)
					return
				}
			}
		})
	}
	wg.Wait()
	select {
	case err := <-failed:
		return 0, err
	default:
		return float64(n) / time.Since(begun).Seconds(), nil
	}
}
