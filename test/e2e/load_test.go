package e2e

import (
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"
)

// LoadConfig says how a client Envoy is kept busy.
type LoadConfig struct {
	Addr  string     // the client Envoy's listener
	Kept  int        // workers whose requests share kept upstream connections; 0: 4
	Fresh int        // workers whose every request is a new mTLS connection; 0: 2
	Rate  rate.Limit // requests a second, all workers together; 0: 200, which leaves a machine of 2 cores idle enough

	Limit   time.Duration // it ends after that by itself; 0: loadLimit
	Timeout time.Duration // of a request; 0: loadTimeout

	Seen func(Passage) // is shown each request that passed; nil: nobody
}

// Load is a running load. It ends with Stop, with the test, or by itself after loadLimit.
type Load struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex // guards report
	report LoadReport
}

// LoadReport is what a load has seen so far. Serials are lower-case hex, with the number of requests that passed under each.
type LoadReport struct {
	OK, Failed    int
	KeptOK        int
	FreshOK       int
	Errors        []string // the first 20, with the time since the start
	ClientSerials map[string]int
	ServerSerials map[string]int
}

// String is a summary for t.Log.
func (r LoadReport) String() string {
	return fmt.Sprintf("ok=%d (kept %d, fresh %d) failed=%d client_serials=%v server_serials=%v errors=%q",
		r.OK, r.KeptOK, r.FreshOK, r.Failed, r.ClientSerials, r.ServerSerials, r.Errors)
}

const (
	loadLimit   = 10 * time.Minute
	loadTimeout = 10 * time.Second // for one request
	loadErrors  = 20               // how many are kept in words
)

// StartLoad sends requests to a client Envoy until it is stopped.
func StartLoad(t testing.TB, cfg LoadConfig) *Load {
	t.Helper()
	if cfg.Kept == 0 {
		cfg.Kept = 4
	}
	if cfg.Fresh == 0 {
		cfg.Fresh = 2
	}
	if cfg.Rate == 0 {
		cfg.Rate = 200
	}
	if cfg.Limit == 0 {
		cfg.Limit = loadLimit
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = loadTimeout
	}
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Limit)
	l := &Load{cancel: cancel, report: LoadReport{ClientSerials: map[string]int{}, ServerSerials: map[string]int{}}}
	limiter := rate.NewLimiter(cfg.Rate, 1)
	client := &http.Client{Timeout: cfg.Timeout, Transport: &http.Transport{MaxIdleConnsPerHost: cfg.Kept + cfg.Fresh}}
	started := time.Now()
	for i := range cfg.Kept + cfg.Fresh {
		fresh := i >= cfg.Kept
		l.wg.Go(func() {
			// The limiter waits until ctx ends; a request that has begun is finished, so that stopping loses none.
			for limiter.Wait(ctx) == nil {
				p, err := request(client, cfg.Addr, fresh)
				if err == nil && cfg.Seen != nil {
					cfg.Seen(p)
				}
				l.record(time.Since(started), fresh, p, err)
			}
		})
	}
	t.Cleanup(func() {
		l.Stop()
		client.CloseIdleConnections()
	})
	return l
}

// Stop ends the load, waits for the requests under way and returns the report.
func (l *Load) Stop() LoadReport {
	l.cancel()
	l.wg.Wait()
	return l.Report()
}

// Report returns what has been seen so far.
func (l *Load) Report() LoadReport {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.report
	r.Errors = slices.Clone(r.Errors)
	r.ClientSerials, r.ServerSerials = maps.Clone(r.ClientSerials), maps.Clone(r.ServerSerials)
	return r
}

func (l *Load) record(at time.Duration, fresh bool, p Passage, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.report.Failed++
		if len(l.report.Errors) < loadErrors {
			l.report.Errors = append(l.report.Errors, fmt.Sprintf("%v fresh=%v: %v", at.Round(time.Millisecond), fresh, err))
		}
		return
	}
	l.report.OK++
	if fresh {
		l.report.FreshOK++
	} else {
		l.report.KeptOK++
	}
	l.report.ClientSerials[p.ClientSerial]++
	l.report.ServerSerials[p.ServerSerial]++
}

// Passage is what one request tells: the certificates that it passed under, and what the echo behind the server Envoy got.
type Passage struct {
	ClientSerial, ServerSerial string            // lower-case hex
	Server                     *x509.Certificate // whose serial that is
	XFCC                       string            // x-forwarded-client-cert
}

// Request sends one request through a client Envoy, on a new upstream connection if it is to be fresh.
func Request(addr string, fresh bool) (Passage, error) {
	return request(&http.Client{Timeout: loadTimeout, Transport: &http.Transport{DisableKeepAlives: true}}, addr, fresh)
}

func request(client *http.Client, addr string, fresh bool) (Passage, error) {
	req, err := http.NewRequest(http.MethodGet, "http://"+addr+"/", nil)
	if err != nil {
		return Passage{}, err
	}
	if fresh {
		req.Header.Set(freshHeader, "1")
	}
	resp, err := client.Do(req)
	if err != nil {
		return Passage{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return Passage{}, fmt.Errorf("reading the answer: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return Passage{}, fmt.Errorf("%s: %.300s", resp.Status, body)
	}
	server, err := certFromHeader(resp.Header.Get(serverCertHeader))
	if err != nil {
		return Passage{}, fmt.Errorf("header %s: %w", serverCertHeader, err)
	}
	return Passage{
		ClientSerial: resp.Header.Get(clientSerialHeader),
		ServerSerial: serialOf(server),
		Server:       server,
		XFCC:         strings.TrimSpace(string(body)),
	}, nil
}

// seenCerts remembers each URL-encoded certificate that was seen: parsing one per request would cost more than the request.
var seenCerts sync.Map

func certFromHeader(encoded string) (*x509.Certificate, error) {
	if cert, ok := seenCerts.Load(encoded); ok {
		return cert.(*x509.Certificate), nil
	}
	text, err := url.QueryUnescape(encoded)
	if err != nil {
		return nil, err
	}
	certs, err := parseCerts([]byte(text))
	if err != nil {
		return nil, err
	}
	seenCerts.Store(encoded, certs[0])
	return certs[0], nil
}
