package kube

import "github.com/prometheus/client_golang/prometheus"

// metrics say how far publishing is, where this replica drives.
type metrics struct {
	writes *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, p *Publisher) *metrics {
	m := &metrics{writes: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "chancery_publish_writes_total", Help: "Writes of published roots, by resource and outcome: ok, conflict with another manager, or failed. Each that failed is tried again.",
	}, []string{"resource", "outcome"})}
	reg.MustRegister(m.writes, progress{p})
	return m
}

var (
	objectsDesc = prometheus.NewDesc("chancery_publish_objects", "Objects with published roots, by resource and state: current, waiting, failing, or left to another manager. Only where this replica drives.", []string{"resource", "state"}, nil)
	generation  = prometheus.NewDesc("chancery_publish_generation", "Generation of the roots that are published. Only where this replica drives.", nil, nil)
)

// progress counts objects when it is asked.
type progress struct{ p *Publisher }

// Describe implements prometheus.Collector.
func (progress) Describe(out chan<- *prometheus.Desc) { out <- objectsDesc; out <- generation }

// Collect implements prometheus.Collector.
func (c progress) Collect(out chan<- prometheus.Metric) {
	want := c.p.want.Load()
	b, m := c.p.parts()
	if want == nil || b == nil && m == nil {
		return
	}
	out <- prometheus.MustNewConstMetric(generation, prometheus.GaugeValue, float64(want.Generation))
	if b != nil {
		n := 2 - len(b.unpublished(*want))
		out <- prometheus.MustNewConstMetric(objectsDesc, prometheus.GaugeValue, float64(n), trustBundles, "current")
		out <- prometheus.MustNewConstMetric(objectsDesc, prometheus.GaugeValue, float64(2-n), trustBundles, "waiting")
	}
	if m == nil {
		return
	}
	states := map[string]int{"current": 0, "waiting": 0, "failing": 0, "left": 0}
	m.mu.Lock()
	m.counts(*want, func(_ place, _ *object, state string) { states[state]++ })
	m.mu.Unlock()
	for state, n := range states {
		out <- prometheus.MustNewConstMetric(objectsDesc, prometheus.GaugeValue, float64(n), "configmaps", state)
	}
}
