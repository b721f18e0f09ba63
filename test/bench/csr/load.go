package main

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/metadata"
	securityv1alpha1 "istio.io/api/security/v1alpha1"
)

// verifyEvery: one answer in so many has its whole chain verified; all have key and name compared. Verifying each
// would make the client dearer than the server. A prime, so that in time every request gets its turn.
const verifyEvery = 101

// load drives one server at a time and counts what fails, in warm-up too.
type load struct {
	requests   []request
	callers    int
	next       atomic.Uint64 // the next request, over all callers and slices
	failed     atomic.Uint64
	firstError atomic.Pointer[error]
}

// alternate warms both servers up, then gives them slices of the duration in the order A B B A. b may be nil.
func (l *load) alternate(ctx context.Context, duration time.Duration, a, b *target) error {
	slice := duration / turns
	for _, t := range []*target{a, b} {
		if t == nil {
			continue
		}
		if _, err := l.slice(ctx, slice, t); err != nil {
			return err
		}
	}
	for i := range turns {
		t := a
		if b != nil && (i%4 == 1 || i%4 == 2) {
			t = b
		}
		before, err := t.cpuTime()
		if err != nil {
			return err
		}
		result, err := l.slice(ctx, slice, t)
		if err != nil {
			return err
		}
		after, err := t.cpuTime()
		if err != nil {
			return err
		}
		t.cpu += after - before
		t.elapsed += result.elapsed
		t.latencies = append(t.latencies, result.latencies...)
		t.rates = append(t.rates, float64(len(result.latencies))/result.elapsed.Seconds())
	}
	return nil
}

// sliceResult holds the latencies of the calls that succeeded in one slice.
type sliceResult struct {
	elapsed   time.Duration
	latencies []time.Duration
}

// slice calls t for the duration and returns when the last call has been answered, so that none runs into the next
// server's slice.
func (l *load) slice(ctx context.Context, duration time.Duration, t *target) (sliceResult, error) {
	latencies := make([][]time.Duration, l.callers)
	start := time.Now()
	end := start.Add(duration)
	var callers sync.WaitGroup
	for i := range l.callers {
		client := t.clients[i%len(t.clients)]
		callers.Go(func() {
			for now := time.Now(); now.Before(end) && ctx.Err() == nil; {
				err := l.call(ctx, client, t.roots)
				done := time.Now()
				if err != nil {
					l.fail(fmt.Errorf("calling %s: %w", t.name, err))
				} else {
					latencies[i] = append(latencies[i], done.Sub(now))
				}
				now = done
			}
		})
	}
	callers.Wait()
	if err := ctx.Err(); err != nil {
		return sliceResult{}, fmt.Errorf("measuring %s: %w", t.name, err)
	}
	result := sliceResult{elapsed: time.Since(start)}
	for _, part := range latencies {
		result.latencies = append(result.latencies, part...)
	}
	t.succeeded += len(result.latencies)
	for _, p := range t.processes() {
		if err := p.Ended(); err != nil {
			return sliceResult{}, fmt.Errorf("measuring %s: %w", t.name, err)
		}
	}
	if len(result.latencies) == 0 {
		return sliceResult{}, fmt.Errorf("measuring %s: no call succeeded", t.name)
	}
	return result, nil
}

func (l *load) fail(err error) {
	l.failed.Add(1)
	l.firstError.CompareAndSwap(nil, &err)
}

// err says how many calls failed, if any did, and how the first one failed.
func (l *load) err() error {
	first := l.firstError.Load()
	if first == nil {
		return nil
	}
	return fmt.Errorf("%d calls failed; the first: %w", l.failed.Load(), *first)
}

// call makes the next call and checks the answer.
func (l *load) call(ctx context.Context, client securityv1alpha1.IstioCertificateServiceClient, roots *x509.CertPool) error {
	n := l.next.Add(1)
	r := &l.requests[n%uint64(len(l.requests))]
	ctx, cancel := context.WithTimeout(metadata.NewOutgoingContext(ctx, r.metadata), 10*time.Second)
	defer cancel()
	answer, err := client.CreateCertificate(ctx, r.message)
	if err != nil {
		return err
	}
	return r.check(answer.GetCertChain(), roots, n%verifyEvery == 0)
}

// check holds the answer against the request: our key, our name, and, when asked, a chain up to the server's roots.
func (r *request) check(chain []string, roots *x509.CertPool, verify bool) error {
	if len(chain) < 2 {
		return fmt.Errorf("checking answer: %d certificates, want leaf, intermediates and roots", len(chain))
	}
	leaf, err := parsePEM(chain[0])
	if err != nil {
		return fmt.Errorf("checking leaf: %w", err)
	}
	if !bytes.Equal(leaf.RawSubjectPublicKeyInfo, r.spki) {
		return errors.New("checking leaf: not the key of the request")
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != r.id {
		return fmt.Errorf("checking leaf: URIs %v, want only %s", leaf.URIs, r.id)
	}
	if !verify {
		return nil
	}
	intermediates := x509.NewCertPool()
	for _, text := range chain[1 : len(chain)-1] {
		intermediates.AppendCertsFromPEM([]byte(text))
	}
	_, err = leaf.Verify(x509.VerifyOptions{
		Roots:         roots,
		Intermediates: intermediates,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		return fmt.Errorf("checking chain: %w", err)
	}
	return nil
}

func parsePEM(text string) (*x509.Certificate, error) {
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		return nil, errors.New("not PEM")
	}
	return x509.ParseCertificate(block.Bytes)
}
