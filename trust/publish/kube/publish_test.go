package kube

import (
	"crypto/x509"
	"encoding/json"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/chancery-project/chancery/test/process"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/publish"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// TestPublish: what is selected has the roots, each in its form, and nothing else has; new namespaces get them, new roots reach all; what
// was edited or deleted is put back, and what others have there stays.
func TestPublish(t *testing.T) {
	t.Parallel()
	one, two := newRoot("one"), newRoot("two")
	w := newWorld(t, server(t), []*x509.Certificate{one})
	in, out := w.namespace(true), w.namespace(false)
	w.has(in, w.names[0], "root-cert.pem", pemOf(one))
	own := w.has(in, w.names[1], "roots.pem", pemOf(one))
	if b, err := spiffebundle.Parse(td, []byte(own.Data["bundle.json"])); err != nil || len(b.Roots) != 1 || !b.Roots[0].Equal(one) || b.Sequence != 1 {
		t.Errorf("bundle.json: %+v, %v", b, err)
	}
	w.trusts(publish.Live, pemOf(one))
	if b := w.trusts(publish.Canary, pemOf(one)); b.Spec.SignerName != w.signer || b.Labels[publish.VersionLabel] != publish.Canary {
		t.Errorf("the canary is of %s with labels %v", b.Spec.SignerName, b.Labels)
	}
	w.published()
	if err := w.publisher.Trouble(); err != nil {
		t.Error(err)
	}
	if _, err := w.configMap(out, w.names[0]); err == nil {
		t.Error("a namespace that is not selected has one")
	}

	// Others have keys and labels of their own in it.
	patch := []byte(`{"metadata": {"labels": {"istio.io/config": "true"}, "annotations": {"team": "infra"}}, "data": {"other.pem": "theirs"}}`)
	maps := w.Client.CoreV1().ConfigMaps(in)
	must(maps.Patch(t.Context(), w.names[0], types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "somebody"}))
	w.set(2, one, two)
	c := w.has(in, w.names[0], "root-cert.pem", pemOf(one, two))
	w.has(in, w.names[1], "roots.pem", pemOf(one, two))
	w.trusts(publish.Live, pemOf(one, two))
	if c.Data["other.pem"] != "theirs" || c.Labels["istio.io/config"] != "true" || c.Annotations["team"] != "infra" {
		t.Errorf("what is of others is %v, %v, %v", c.Data["other.pem"], c.Labels, c.Annotations)
	}

	// Edited, emptied, deleted.
	must(maps.Patch(t.Context(), w.names[0], types.MergePatchType, []byte(`{"data": {"root-cert.pem": "mine"}}`), metav1.PatchOptions{FieldManager: "kubectl-edit"}))
	w.has(in, w.names[0], "root-cert.pem", pemOf(one, two))
	must(maps.Patch(t.Context(), w.names[1], types.MergePatchType, []byte(`{"data": null}`), metav1.PatchOptions{FieldManager: "kubectl-edit"}))
	w.has(in, w.names[1], "roots.pem", pemOf(one, two))
	for _, name := range w.names {
		if err := maps.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	w.has(in, w.names[0], "root-cert.pem", pemOf(one, two))
	w.has(in, w.names[1], "roots.pem", pemOf(one, two))
	bundles := w.Client.CertificatesV1().ClusterTrustBundles()
	for _, version := range []string{publish.Live, publish.Canary} {
		name := publish.BundleName(w.signer, version)
		change, _ := json.Marshal(map[string]any{"spec": map[string]any{"trustBundle": pemOf(newRoot("wrong"))}})
		must(bundles.Patch(t.Context(), name, types.MergePatchType, change, metav1.PatchOptions{FieldManager: "kubectl-edit"}))
		w.trusts(version, pemOf(one, two))
		if err := bundles.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.trusts(version, pemOf(one, two))
	}

	// A namespace that is selected later; and one that is not any more keeps what it has, without its changes being undone.
	label := func(ns, value string) {
		t.Helper()
		change, _ := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{"mesh": value}}})
		must(w.Client.CoreV1().Namespaces().Patch(t.Context(), ns, types.MergePatchType, change, metav1.PatchOptions{}))
	}
	label(out, w.label)
	w.has(out, w.names[0], "root-cert.pem", pemOf(one, two))
	label(in, "none")
	w.set(3, two)
	w.has(out, w.names[0], "root-cert.pem", pemOf(two))
	w.has(in, w.names[0], "root-cert.pem", pemOf(one, two))
	w.published()
}

// TestCanaryThenLive: during a rotation those that read the canary have the new roots before those that read the live one, also when another
// replica takes over in between.
func TestCanaryThenLive(t *testing.T) {
	t.Parallel()
	one, two := newRoot("one"), newRoot("two")
	const lead = 8 * time.Second
	s := server(t)
	w := newWorld(t, s, []*x509.Certificate{one}, func(_ *world, c *Config) { c.Lead, c.ConfigMaps = lead, nil })
	w.trusts(publish.Live, pemOf(one))
	w.trusts(publish.Canary, pemOf(one))
	w.published()
	w.set(2, one, two)
	canary := w.trusts(publish.Canary, pemOf(one, two))
	if live := must(w.Client.CertificatesV1().ClusterTrustBundles().Get(t.Context(), publish.BundleName(w.signer, publish.Live), metav1.GetOptions{})); live.Spec.TrustBundle != pemOf(one) {
		t.Error("the live one has the new roots with the canary")
	}
	if len(w.publisher.Unpublished()) == 0 {
		t.Error("a rotation would go on, though most do not have the new roots")
	}
	since := must(time.Parse(time.RFC3339, canary.Annotations[publish.SinceAnnotation]))
	w.drives.Store(false)
	process.Eventually(t, 20*time.Second, "it lets go", func() error {
		if b, _ := w.publisher.parts(); b != nil {
			return errAgain
		}
		return nil
	})
	w.drives.Store(true)
	w.trusts(publish.Live, pemOf(one, two))
	if now := time.Now(); now.Before(since.Add(lead)) {
		t.Errorf("the live one has the new roots at %s, the canary since %s", now, since)
	}
	if again := w.trusts(publish.Canary, pemOf(one, two)); again.Annotations[publish.SinceAnnotation] != canary.Annotations[publish.SinceAnnotation] {
		t.Error("the successor began anew")
	}
	w.published()
}

// TestD24OwnRootsOnly: both domains of a migration are one authority, and published together; a SPIFFE bundle is of one domain.
func TestD24OwnRootsOnly(t *testing.T) {
	t.Parallel()
	one, two := newRoot("one"), newRoot("two")
	w := newWorld(t, server(t), []*x509.Certificate{one})
	ns := w.namespace(true)
	w.has(ns, w.names[0], "root-cert.pem", pemOf(one))
	other := must(trust.ParseDomain("new.example"))
	kin := must(must(trust.NewBundle(td, 2, []*x509.Certificate{one})).WithKin(must(trust.NewBundle(other, 2, []*x509.Certificate{two}))))
	w.bundle.Store(kin)
	both := string(trust.EncodeCertificates(one, two))
	w.has(ns, w.names[0], "root-cert.pem", both)
	own := w.has(ns, w.names[1], "roots.pem", both)
	if b, err := spiffebundle.Parse(td, []byte(own.Data["bundle.json"])); err != nil || len(b.Roots) != 1 || !b.Roots[0].Equal(one) {
		t.Errorf("bundle.json: %+v, %v", b, err)
	}
	w.trusts(publish.Live, both)
	w.bundle.Store(must(trust.NewBundle(td, 3, nil))) // nothing: what is there stays
	w.troubled("has no roots")
	w.has(ns, w.names[0], "root-cert.pem", both)
}

// TestNobodyFights: what another manager owned first is left to it, and said; what we had is put back, unless it is taken again and again.
func TestNobodyFights(t *testing.T) {
	t.Parallel()
	one := newRoot("one")
	w := newWorld(t, server(t), []*x509.Certificate{one})
	ns := w.namespace(false)
	maps := w.Client.CoreV1().ConfigMaps(ns)
	theirs := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: w.names[0]}, Data: map[string]string{"root-cert.pem": "istiod's"}}
	must(maps.Create(t.Context(), theirs, metav1.CreateOptions{FieldManager: "pilot-discovery"}))
	change, _ := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{"mesh": w.label}}})
	must(w.Client.CoreV1().Namespaces().Patch(t.Context(), ns, types.MergePatchType, change, metav1.PatchOptions{}))
	w.has(ns, w.names[1], "roots.pem", pemOf(one))
	w.troubled(ns+"/"+w.names[0], "left to another manager", "pilot-discovery manages it")
	w.has(ns, w.names[0], "root-cert.pem", "istiod's")
	w.published() // it is not ours: a rotation does not wait for it

	for range mostHeals {
		must(maps.Patch(t.Context(), w.names[1], types.MergePatchType, []byte(`{"data": {"roots.pem": "other"}}`), metav1.PatchOptions{FieldManager: "other-plane"}))
		w.has(ns, w.names[1], "roots.pem", pemOf(one))
	}
	must(maps.Patch(t.Context(), w.names[1], types.MergePatchType, []byte(`{"data": {"roots.pem": "other"}}`), metav1.PatchOptions{FieldManager: "other-plane"}))
	w.troubled("other-plane has taken it 3 times")
	w.has(ns, w.names[1], "roots.pem", "other")
	w.published()

	// Who gives it up leaves it to us.
	if err := maps.Delete(t.Context(), w.names[0], metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.has(ns, w.names[0], "root-cert.pem", pemOf(one))
}

// TestForce takes what another manager owned first, where the config says so, and leaves its other keys.
func TestForce(t *testing.T) {
	t.Parallel()
	one := newRoot("one")
	w := newWorld(t, server(t), []*x509.Certificate{one}, func(_ *world, c *Config) { c.Force = true })
	ns := w.namespace(false)
	theirs := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: w.names[0]}, Data: map[string]string{"root-cert.pem": "istiod's", "more": "theirs"}}
	must(w.Client.CoreV1().ConfigMaps(ns).Create(t.Context(), theirs, metav1.CreateOptions{FieldManager: "pilot-discovery"}))
	change, _ := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{"mesh": w.label}}})
	must(w.Client.CoreV1().Namespaces().Patch(t.Context(), ns, types.MergePatchType, change, metav1.PatchOptions{}))
	if c := w.has(ns, w.names[0], "root-cert.pem", pemOf(one)); c.Data["more"] != "theirs" {
		t.Error("what was theirs is gone")
	}
}
