package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/chancery-project/chancery/ca"
)

func newRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// serveHTTP serves metrics and health until ctx ends. /healthz says that the process runs, /readyz that it can do its work.
// On a loopback address it also serves Go's profiles.
func serveHTTP(ctx context.Context, l net.Listener, reg *prometheus.Registry, ready func() error) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	if a, ok := l.Addr().(*net.TCPAddr); ok && a.IP.IsLoopback() { // profiles show more than others should see
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving metrics on %s: %w", l.Addr(), err)
	}
	return nil
}

// expiries is a collector of the time that certificates have left, read at each scrape.
type expiries struct {
	name, help string
	read       func() map[string]time.Time // certificate -> its end
}

func (e expiries) desc() *prometheus.Desc {
	return prometheus.NewDesc(e.name, e.help, []string{"certificate"}, nil)
}

// Describe implements prometheus.Collector.
func (e expiries) Describe(ch chan<- *prometheus.Desc) { ch <- e.desc() }

// Collect implements prometheus.Collector.
func (e expiries) Collect(ch chan<- prometheus.Metric) {
	for name, end := range e.read() {
		ch <- prometheus.MustNewConstMetric(e.desc(), prometheus.GaugeValue, time.Until(end).Seconds(), name)
	}
}

func newSampler(reg prometheus.Registerer, logger *slog.Logger) *ca.Sampler {
	found := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "chancery_ca_lint_findings_total", Help: "Issued certificates of the background sample that failed an RFC lint. Each is a bug.",
	})
	reg.MustRegister(found)
	return &ca.Sampler{Logger: logger, Found: found.Inc}
}

// writeAddrFile writes where the process listens, complete or not at all. An empty path writes nothing.
func writeAddrFile(path, content string) error {
	if path == "" {
		return nil
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(content), 0o644); err != nil {
		return fmt.Errorf("addrFile: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("addrFile %s: %w", filepath.Clean(path), err)
	}
	return nil
}
