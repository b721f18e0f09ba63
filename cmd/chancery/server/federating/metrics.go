package federating

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/trust"
)

// metrics says in numbers how old bundles are, and how getting them goes.
type metrics struct{ desk *Desk }

var (
	rootsDesc    = prometheus.NewDesc("chancery_trust_bundle_roots", "Roots in the bundle of a trust domain. 0: nothing of it is trusted.", []string{"trust_domain"}, nil)
	sequenceDesc = prometheus.NewDesc("chancery_trust_bundle_sequence", "Number of the bundle of a trust domain: the generation of an own one, spiffe_sequence of a foreign one.", []string{"trust_domain"}, nil)
	sinceDesc    = prometheus.NewDesc("chancery_trust_bundle_since_timestamp_seconds", "When the bundle of a foreign trust domain was taken over.", []string{"trust_domain"}, nil)
	successDesc  = prometheus.NewDesc("chancery_federation_success_timestamp_seconds", "When this server last fetched the bundle of a foreign trust domain; 0 if not since its start. Only the server that renews issuers does so each time that it is due.", []string{"trust_domain"}, nil)
	failingDesc  = prometheus.NewDesc("chancery_federation_failing", "1 if this server's last try to fetch the bundle of a foreign trust domain failed, else 0.", []string{"trust_domain"}, nil)
	failuresDesc = prometheus.NewDesc("chancery_federation_failures_total", "Fetches of the bundle of a foreign trust domain that failed.", []string{"trust_domain"}, nil)
)

// Describe implements prometheus.Collector.
func (m metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{rootsDesc, sequenceDesc, sinceDesc, successDesc, failingDesc, failuresDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It waits for nothing but memory.
func (m metrics) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, td trust.Domain) {
		ch <- prometheus.MustNewConstMetric(d, kind, value, td.String())
	}
	k := m.desk.known()
	if k.own != nil {
		for _, b := range append([]*trust.Bundle{k.own}, k.own.Kin()...) {
			send(rootsDesc, prometheus.GaugeValue, float64(len(b.Roots())), b.Domain())
			send(sequenceDesc, prometheus.GaugeValue, float64(b.Generation()), b.Domain())
		}
	}
	for td, f := range k.foreign {
		if k.own.Of(td) != nil || f.bundle == nil {
			continue
		}
		send(rootsDesc, prometheus.GaugeValue, float64(len(f.bundle.Roots)), td)
		send(sequenceDesc, prometheus.GaugeValue, float64(f.bundle.Sequence), td)
		send(sinceDesc, prometheus.GaugeValue, float64(f.stored.Since.Unix()), td)
	}
	truth := map[bool]float64{true: 1}
	for _, s := range m.desk.poller.Status() {
		td := s.Relationship.Domain
		at := 0.0
		if !s.LastSuccess.IsZero() {
			at = float64(s.LastSuccess.Unix())
		}
		send(successDesc, prometheus.GaugeValue, at, td)
		send(failingDesc, prometheus.GaugeValue, truth[s.Error != ""], td)
		send(failuresDesc, prometheus.CounterValue, float64(s.Failures), td)
	}
}
