package kube

import (
	"crypto/x509"
	"encoding/json"
	"sync/atomic"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/chancery-project/chancery/test/process"
	"github.com/chancery-project/chancery/trust/publish"
)

// TestListedAnew: while all is listed anew, such as after an outage of the API server, what is there is never taken for missing. A live one
// that is missing is made at once, with the new roots, before the canary's time is over.
func TestListedAnew(t *testing.T) {
	t.Parallel()
	b := newBundles(&Publisher{config: Config{Signer: "chancery.dev/workload", Manager: "chancery-cluster.local"}})
	one := &certificatesv1.ClusterTrustBundle{Spec: certificatesv1.ClusterTrustBundleSpec{TrustBundle: "one"}}
	w := b.watch(publish.Live)
	w.Put(one)
	var over atomic.Bool
	done := make(chan int)
	go func() {
		missing := 0
		for !over.Load() {
			b.mu.Lock()
			if b.get(publish.Live).Roots != "one" {
				missing++
			}
			b.mu.Unlock()
		}
		done <- missing
	}()
	for range 100_000 {
		w.Replace([]runtime.Object{one})
	}
	over.Store(true)
	if missing := <-done; missing > 0 {
		t.Errorf("it was missing %d times", missing)
	}
	w.Replace(nil)
	if b.get(publish.Live).Roots != "" {
		t.Error("what is gone is still there")
	}
}

// TestEditsDuringTheLead: while the live one waits for the canary, an edit of either is put back all the same.
func TestEditsDuringTheLead(t *testing.T) {
	t.Parallel()
	one, two := newRoot("one"), newRoot("two")
	w := newWorld(t, server(t), []*x509.Certificate{one}, func(_ *world, c *Config) { c.Lead, c.ConfigMaps = time.Hour, nil })
	w.trusts(publish.Live, pemOf(one))
	w.trusts(publish.Canary, pemOf(one))
	edit := func(version string, change map[string]any) {
		t.Helper()
		data := must(json.Marshal(change))
		must(w.Client.CertificatesV1().ClusterTrustBundles().Patch(t.Context(), publish.BundleName(w.signer, version), types.MergePatchType, data, metav1.PatchOptions{FieldManager: "kubectl-edit"}))
	}
	edit(publish.Canary, map[string]any{"metadata": map[string]any{"annotations": map[string]any{publish.SinceAnnotation: "some time ago"}}})
	process.Eventually(t, 40*time.Second, "it is said anew since when the canary has its roots", func() error {
		_, err := time.Parse(time.RFC3339, w.trusts(publish.Canary, pemOf(one)).Annotations[publish.SinceAnnotation])
		return err
	})
	w.set(2, one, two)
	w.trusts(publish.Canary, pemOf(one, two))
	w.trusts(publish.Live, pemOf(one))
	edit(publish.Live, map[string]any{"spec": map[string]any{"trustBundle": pemOf(newRoot("wrong"))}})
	w.trusts(publish.Live, pemOf(one, two))
	w.published()
}
