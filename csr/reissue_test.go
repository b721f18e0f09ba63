package csr_test

import (
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
)

// Agents that were asked to replace SVIDs with hours left come over connections that show no SVID, or an old one. Those that wait
// for a slot let new pods go first, of either API, and those whose SVID is about to end.
func TestD19ARenewalWithHoursLeftComesAfterANewPod(t *testing.T) {
	begun, goOn := make(chan struct{}), make(chan struct{})
	w := newWorld(t, withPods, func(w *world, c *csr.Config) {
		c.Clusters["Kubernetes"] = csr.ClusterConfig{Cluster: waitsOnNode{w.pods, begun, goOn}}
		c.Admission.MaxInFlight, c.Admission.MaxWait = 1, time.Minute
	})
	answered := make(chan error)
	add := func(waiting int, do func() error) {
		t.Helper()
		go func() { answered <- do() }()
		for w.service.Waiting() != waiting {
			time.Sleep(time.Millisecond)
		}
	}
	add(0, func() error { _, err := w.istio(bearer(ztunnel()), ask(webURI)); return err })
	<-begun // it holds the slot
	asks := func(account string, left time.Duration) func() error {
		r := askNative("")
		if left > 0 {
			r.ReplacesUntil = timestamppb.New(time.Now().Add(left))
		}
		return func() error {
			resp, err := w.native(bearer(token(claims{account: account})), r)
			if err == nil && resp.GetResults()[0].GetCertificate() == nil {
				t.Errorf("%s: %v", account, resp.GetResults()[0].GetRefusal())
			}
			return err
		}
	}
	add(1, asks("hours", 5*time.Hour))
	add(2, asks("hour", time.Hour))
	add(3, asks("new", 0))
	add(4, func() error { _, err := w.istio(bearer(token(claims{account: "istio"})), ask("")); return err })
	add(5, asks("ends", 5*time.Second))
	old := w.svid("spiffe://cluster.local/ns/foo/sa/shows", &ca.Attestation{Cluster: "Kubernetes", Time: time.Now()}) // for an hour
	add(6, func() error {
		_, err := w.native(call{headers: bearer(token(claims{account: "shows"})).headers, show: old}, &chanceryv1.CertificateRequest{
			Csr: newCSR(newKey(), ""), ReplacesUntil: timestamppb.New(time.Now().Add(2 * time.Hour)),
		})
		return err
	})
	close(goOn)
	for range 7 {
		if err := <-answered; err != nil {
			t.Error(err)
		}
	}
	var order []string
	for _, r := range w.records(audit.Intent) {
		if a := r.Requester.ServiceAccount; a != "" {
			order = append(order, a)
		}
	}
	if want := []string{"ztunnel", "ends", "new", "istio", "hour", "shows", "hours"}; !slices.Equal(order, want) {
		t.Errorf("served in the order %q, want %q", order, want)
	}
}
