package sds

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics counts what the server does. Labels are bounded: resources are counted by kind, never by name.
type Metrics struct {
	streams  *prometheus.GaugeVec   // by api
	pushes   *prometheus.CounterVec // by api
	acks     *prometheus.CounterVec // by api
	nacks    *prometheus.CounterVec // by resource kind
	unknown  *prometheus.CounterVec // by resource kind
	refusals *prometheus.CounterVec // by reason
	kept     *prometheus.CounterVec // by reason
}

// NewMetrics registers the server's metrics; with a nil registerer they are counted, but shown nowhere.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	f := promauto.With(reg)
	counter := func(name, help, label string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: "chancery_agent_" + name, Help: help}, []string{label})
	}
	return &Metrics{
		streams: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "chancery_agent_streams",
			Help: "Open streams on the agent's socket, by API.",
		}, []string{"api"}),
		pushes:   counter("pushes_total", "Responses sent on streams, by API.", "api"),
		acks:     counter("acks_total", "Responses that a proxy acknowledged, by API.", "api"),
		nacks:    counter("nacks_total", "Resources that a proxy rejected, by kind of resource.", "resource"),
		unknown:  counter("unknown_names_total", "Resources asked for that do not exist for the caller, by kind of name.", "resource"),
		kept:     counter("svids_kept_back_total", "Times that a proxy was not sent its new SVID yet, by reason (order, disk).", "reason"),
		refusals: counter("attestation_failures_total", "Callers that were refused, by reason.", "reason"),
	}
}
