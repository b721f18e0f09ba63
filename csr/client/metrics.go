package client

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics counts what comes by Sync.
type Metrics struct {
	connected       prometheus.Gauge
	lastUpdate      prometheus.Gauge
	updates         *prometheus.CounterVec // by result
	inconsistencies *prometheus.CounterVec // by kind
}

// NewMetrics registers the metrics; with a nil registerer they are counted, but shown nowhere.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	f := promauto.With(reg)
	return &Metrics{
		connected: f.NewGauge(prometheus.GaugeOpts{
			Name: "chancery_agent_sync_connected", Help: "Open streams over which the server keeps roots and CRLs up to date.",
		}),
		lastUpdate: f.NewGauge(prometheus.GaugeOpts{
			Name: "chancery_agent_sync_last_update_timestamp_seconds", Help: "Unix time of the last roots and CRLs that were taken over.",
		}),
		updates: f.NewCounterVec(prometheus.CounterOpts{
			Name: "chancery_agent_sync_updates_total", Help: "Roots and CRLs from the server, by result (applied, refused, older).",
		}, []string{"result"}),
		inconsistencies: f.NewCounterVec(prometheus.CounterOpts{
			Name: "chancery_agent_log_inconsistencies_total", Help: "Checkpoints of issuance logs that contradict one seen before, by kind (shrunk, changed, key, malformed).",
		}, []string{"kind"}),
	}
}
