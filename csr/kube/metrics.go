package kube

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/csr"
)

// metrics are a cluster's metrics.
type metrics struct {
	outcomes *prometheus.CounterVec
	ok       prometheus.Counter // outcomes of reason OK
	reviews  *prometheus.HistogramVec
}

// newMetrics makes the metrics and registers them, each with the label cluster. reg may be nil.
func newMetrics(reg prometheus.Registerer, c *Cluster) (*metrics, error) {
	m := &metrics{
		outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "chancery_kube_tokens_total",
			Help: "Tokens verified, by reason of the denial, or OK.",
		}, []string{"reason"}),
		reviews: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "chancery_kube_token_review_seconds",
			Help:    "Time that the API server took for a TokenReview, by result: answer or error.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
		}, []string{"result"}),
	}
	m.ok = m.outcomes.WithLabelValues("OK")
	if reg == nil {
		return m, nil
	}
	all := []prometheus.Collector{m.outcomes, m.reviews,
		lookups("hit", func() uint64 { return c.tokens.Stats().Hits }), lookups("miss", func() uint64 { return c.tokens.Stats().Misses })}
	if c.mode != Always {
		all = append(all,
			gauge("chancery_kube_jwks_keys", "Keys that tokens are verified with.", func() float64 { return float64(c.tokens.Stats().Keys) }),
			gauge("chancery_kube_jwks_loaded_timestamp_seconds", "When the keys were last loaded, or 0.", func() float64 {
				if t := c.tokens.Stats().Loaded; !t.IsZero() {
					return float64(t.Unix())
				}
				return 0
			}))
	}
	if c.pods != nil {
		all = append(all,
			gauge("chancery_kube_pods", "Pods that the watch knows.", func() float64 { return float64(c.pods.size()) }),
			gauge("chancery_kube_pod_watch_synced", "1 if the pod watch is synced, else 0.", func() float64 {
				if c.pods.missing(time.Now()) != "" {
					return 0
				}
				return 1
			}))
	}
	reg = prometheus.WrapRegistererWith(prometheus.Labels{"cluster": c.name}, reg)
	var errs []error
	for _, x := range all {
		errs = append(errs, reg.Register(x))
	}
	return m, errors.Join(errs...)
}

func lookups(result string, value func() uint64) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name:        "chancery_kube_token_cache_total",
		Help:        "Look-ups of a token's verdict in the cache, by result: hit or miss.",
		ConstLabels: prometheus.Labels{"result": result},
	}, func() float64 { return float64(value()) })
}

func gauge(name, help string, value func() float64) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
}

func (m *metrics) verified(err error) {
	if err == nil {
		m.ok.Inc()
		return
	}
	reason := csr.ReasonInternal
	if d := (*csr.Denial)(nil); errors.As(err, &d) {
		reason = d.Reason
	}
	m.outcomes.WithLabelValues(reason).Inc()
}

func (m *metrics) reviewed(took time.Duration, answered bool) {
	result := "answer"
	if !answered {
		result = "error"
	}
	m.reviews.WithLabelValues(result).Observe(took.Seconds())
}
