package csr

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/csr/tally"
)

// Metrics counts what the endpoint does. Labels have few values: api (istio, native), authenticator (token, mtls,
// none) and outcome (ok or a reason constant).
type Metrics struct {
	requests       *prometheus.HistogramVec
	deniedUnlogged prometheus.Counter
	panics         prometheus.Counter
	handshakes     prometheus.Counter // refused
	recent         *tally.Tally
}

// NewMetrics registers the metrics of the CSR endpoint.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		recent: tally.New(),
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "chancery_csr_request_seconds", Help: "Time to answer a certificate request, by API, authenticator and outcome.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 5},
		}, []string{"api", "authenticator", "outcome"}),
		deniedUnlogged: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "chancery_csr_denials_not_logged_total", Help: "Refusals left out of the audit log because there were too many a second.",
		}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "chancery_csr_panics_total", Help: "Requests that ended in a panic. Each is a bug.",
		}),
		handshakes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "chancery_csr_handshakes_refused_total", Help: "Connections closed because more came than there was time for handshakes; agents come again.",
		}),
	}
	r.MustRegister(m.requests, m.deniedUnlogged, m.panics, m.handshakes)
	return m
}

func (m *Metrics) observe(api, authenticator, outcome string, took time.Duration) {
	if authenticator == "" {
		authenticator = "none"
	}
	m.recent.Add(outcome)
	m.requests.WithLabelValues(api, authenticator, outcome).Observe(took.Seconds())
}

// Recent counts the outcomes of requests, ok or a reason constant.
func (m *Metrics) Recent() *tally.Tally { return m.recent }
