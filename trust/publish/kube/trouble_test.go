package kube

import (
	"crypto/x509"
	"errors"
	"testing"
	"time"

	certificatesv1beta1 "k8s.io/api/certificates/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/test/apiserver"
	"github.com/chancery-project/chancery/test/process"
	"github.com/chancery-project/chancery/trust/publish"
)

var errAgain = errors.New("not yet")

// TestRightsThatLack: each right of the shipped role is needed, and what lacks is named. (This API server streams what there is with the watch;
// list is for those that do not.)
func TestRightsThatLack(t *testing.T) {
	t.Parallel()
	const (
		maps   = "should have the rights to list and watch namespaces, and to list, watch, create and patch configmaps"
		trusts = "should have the rights to list, watch, create and patch clustertrustbundles"
	)
	for without, want := range map[string]string{
		"clustertrustbundles create": trusts, "clustertrustbundles patch": trusts, "signers attest": "and the verb attest on signers chancery.dev/test-",
		"namespaces watch": maps, "configmaps watch": maps, "configmaps create": maps, "configmaps patch": maps,
	} {
		t.Run(without, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, server(t), []*x509.Certificate{newRoot("one")}, func(w *world, c *Config) { c.REST, c.HTTP = account(t, w.Server, w.role(without)) })
			ns := w.namespace(true)
			w.troubled(want)
			if len(w.publisher.Unpublished()) == 0 {
				t.Error("a rotation would not wait")
			}
			_, found := w.configMap(ns, w.names[0])
			_, bundle := w.Client.CertificatesV1().ClusterTrustBundles().Get(t.Context(), publish.BundleName(w.signer, publish.Live), metav1.GetOptions{})
			if found == nil && bundle == nil {
				t.Error("all was published")
			}
		})
	}
}

// TestBeta: where v1 is missing, v1beta1 is used.
func TestBeta(t *testing.T) {
	t.Parallel()
	s := server(t, "--runtime-config=certificates.k8s.io/v1beta1/clustertrustbundles=true,certificates.k8s.io/v1/clustertrustbundles=false")
	one, two := newRoot("one"), newRoot("two")
	w := newWorld(t, s, []*x509.Certificate{one}, func(_ *world, c *Config) { c.ConfigMaps = nil })
	has := func(roots string) {
		t.Helper()
		process.Eventually(t, 40*time.Second, "it is published", func() error {
			var b *certificatesv1beta1.ClusterTrustBundle
			b, err := s.Client.CertificatesV1beta1().ClusterTrustBundles().Get(t.Context(), publish.BundleName(w.signer, publish.Live), metav1.GetOptions{})
			if err == nil && b.Spec.TrustBundle != roots {
				err = errAgain
			}
			return err
		})
	}
	has(pemOf(one))
	w.set(2, one, two)
	has(pemOf(one, two))
	if _, err := s.Client.CertificatesV1().ClusterTrustBundles().Get(t.Context(), publish.BundleName(w.signer, publish.Live), metav1.GetOptions{}); err == nil {
		t.Error("this API server has v1: nothing is shown")
	}
}

// TestAPIServerAway: while the API server is away that is said, and a rotation would wait; once it is back all is published, what was changed
// meanwhile too.
func TestAPIServerAway(t *testing.T) {
	t.Parallel()
	s := apiserver.Start(t, "")
	one, two := newRoot("one"), newRoot("two")
	w := newWorld(t, s, []*x509.Certificate{one})
	ns := w.namespace(true)
	w.has(ns, w.names[0], "root-cert.pem", pemOf(one))
	w.published()
	s.APIServer().Kill()
	w.set(2, one, two)
	w.troubled("following")
	if len(w.publisher.Unpublished()) == 0 {
		t.Error("a rotation would go on")
	}
	s.RestartAPIServer(t)
	w.has(ns, w.names[0], "root-cert.pem", pemOf(one, two))
	w.trusts(publish.Live, pemOf(one, two))
	w.published()
	if err := w.publisher.Trouble(); err != nil {
		t.Error(err)
	}
}
