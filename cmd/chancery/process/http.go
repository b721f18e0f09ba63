package process

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// NewRegistry returns a registry of metrics that has those of the Go runtime and the process.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// HTTP is what a process shows over HTTP, without authentication.
type HTTP struct {
	Metrics prometheus.Gatherer // at /metrics
	Ready   func() error        // for /readyz: what the process lacks to do its work, or nil

	Texts map[string]func() string // more pages of plain text, by path; nil = none
}

// Bounds on what anybody who can connect may do.
const (
	maxHeader    = 16 << 10
	readTimeout  = 10 * time.Second // of a whole request
	writeTimeout = 2 * time.Minute  // profiles take their time; readers that do not read must not hold the places for ever
)

// Run serves until ctx ends. /healthz says that the process runs, /readyz that it can do its work. On a loopback
// address /readyz also says what is missing, and Go's profiles are served: others should not see so much.
func (h HTTP) Run(ctx context.Context, l net.Listener) error {
	s := &http.Server{
		Handler: h.handler(l.Addr()), ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: time.Minute, MaxHeaderBytes: maxHeader,
	}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving metrics on %s: %w", l.Addr(), err)
	}
	return nil
}

func (h HTTP) handler(addr net.Addr) http.Handler {
	a, ok := addr.(*net.TCPAddr)
	local := ok && a.IP.IsLoopback()
	mux := http.NewServeMux()
	// A gzip writer costs 2 to 3 MB of heap at each scrape, as much as a fifth of an agent, for a page of a few kB.
	mux.Handle("GET /metrics", promhttp.HandlerFor(h.Metrics, promhttp.HandlerOpts{MaxRequestsInFlight: 4, DisableCompression: true}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		switch err := h.Ready(); {
		case err == nil:
			fmt.Fprintln(w, "ok")
		case local:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		default:
			http.Error(w, "not ready; the log says why", http.StatusServiceUnavailable)
		}
	})
	for path, text := range h.Texts {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text()) })
	}
	if local {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// Expiries is a collector of the seconds that certificates have left, read at each scrape.
type Expiries struct {
	Name, Help string
	Read       func() map[string]time.Time // certificate -> its end
}

func (e Expiries) desc() *prometheus.Desc {
	return prometheus.NewDesc(e.Name, e.Help, []string{"certificate"}, nil)
}

// Describe implements prometheus.Collector.
func (e Expiries) Describe(ch chan<- *prometheus.Desc) { ch <- e.desc() }

// Collect implements prometheus.Collector.
func (e Expiries) Collect(ch chan<- prometheus.Metric) {
	for name, end := range e.Read() {
		ch <- prometheus.MustNewConstMetric(e.desc(), prometheus.GaugeValue, time.Until(end).Seconds(), name)
	}
}
