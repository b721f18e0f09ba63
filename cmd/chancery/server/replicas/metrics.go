package replicas

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
)

// metrics says in numbers what Status says: how long ago the store confirmed the document, who drives, and who is silent.
type metrics struct {
	status   func() *chanceryv1.GetStatusResponse_Store
	document func() *authority.Document
}

var (
	confirmedDesc = prometheus.NewDesc("chancery_ca_store_confirmed_timestamp_seconds", "When the store last confirmed the authority document.", nil, nil)
	failingDesc   = prometheus.NewDesc("chancery_ca_store_failing", "1 if the store did not answer, or gave what is refused, when it was asked last, else 0.", nil, nil)
	versionDesc   = prometheus.NewDesc("chancery_ca_document_version", "Version of the authority document that this server works by.", nil, nil)
	drivesDesc    = prometheus.NewDesc("chancery_ca_drives", "1 if the authority document names this server as the one that renews issuers, else 0.", nil, nil)
	seenDesc      = prometheus.NewDesc("chancery_ca_replica_seen_timestamp_seconds", "When another server on the store was last heard of, by its own clock; 0 if never.", []string{"replica"}, nil)
)

// Describe implements prometheus.Collector.
func (m metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{confirmedDesc, failingDesc, versionDesc, drivesDesc, seenDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It waits for nothing but memory.
func (m metrics) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	truth := map[bool]float64{true: 1}
	s := m.status()
	send(confirmedDesc, float64(s.GetConfirmed().GetSeconds()))
	send(failingDesc, truth[s.GetError() != ""])
	send(versionDesc, float64(m.document().Version))
	send(drivesDesc, truth[s.GetDriver() == s.GetReplica()])
	sent := map[string]bool{}
	for _, r := range s.GetReplicas() {
		if name := r.GetName(); !r.GetOwn() && r.GetDeclaredDead() == nil && !sent[name] { // a document may list a name twice, for a moment
			sent[name] = true
			send(seenDesc, float64(r.GetSeen().GetSeconds()), name)
		}
	}
}
