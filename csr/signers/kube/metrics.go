package kube

import "github.com/prometheus/client_golang/prometheus"

// metrics count what becomes of requests. The label resource is podcertificaterequests or certificatesigningrequests.
type metrics struct {
	decided *prometheus.CounterVec
	failed  *prometheus.CounterVec
	reg     prometheus.Registerer
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		decided: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "chancery_kubernetes_requests_total", Help: "Decisions on requests for certificates in Kubernetes' own APIs, by resource and outcome: ok, or the reason.",
		}, []string{"resource", "outcome"}),
		failed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "chancery_kubernetes_status_failures_total", Help: "Statuses of requests that could not be written; each is tried again.",
		}, []string{"resource"}),
		reg: reg,
	}
	reg.MustRegister(m.decided, m.failed)
	return m
}

func (m *metrics) outcome(resource, outcome string) {
	m.decided.WithLabelValues(resource, outcome).Inc()
}

func (m *metrics) waiting(resource string, count func() float64) {
	m.reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "chancery_kubernetes_requests_waiting", Help: "Requests for certificates in Kubernetes' own APIs that are not settled yet, where this replica drives.",
		ConstLabels: prometheus.Labels{"resource": resource},
	}, count))
}
