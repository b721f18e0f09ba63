package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/revocation"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/signers"
	"github.com/chancery-project/chancery/test/process"
)

// TestD20PodCertificate: a node asks for a pod of its own, and gets an SVID of the pod's account whose life, backdating included, is within
// what it asked for and an hour; with an attestation as other SVIDs have it; through the audit log; in one write.
func TestD20PodCertificate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.pod("web-1")
	for _, most := range []int32{3600, 5000, 86400, 7862400} {
		key := newKey()
		asked := w.ask(p, stub(key), func(r *certificatesv1.PodCertificateRequest) { r.Spec.MaxExpirationSeconds = &most })
		got := w.settled(asked, "Issued")
		leaf := w.chain([]byte(got.Status.CertificateChain))
		if want := fmt.Sprintf("spiffe://cluster.local/ns/%s/sa/web", w.namespace); len(leaf.URIs) != 1 || leaf.URIs[0].String() != want {
			t.Errorf("the certificate is of %v, want %s", leaf.URIs, want)
		}
		if life, want := leaf.NotAfter.Sub(leaf.NotBefore), min(time.Duration(most)*time.Second, 24*time.Hour); life != want {
			t.Errorf("asked for %d s at most: it lives for %s, want %s", most, life, want)
		}
		att, err := ca.AttestationOf(leaf)
		if err != nil || att == nil || att.Cluster != "Kubernetes" || att.Node != node || string(att.PodHash) != string(csr.PodHash("Kubernetes", string(p.UID))) {
			t.Errorf("attestation %+v, %v", att, err)
		}
		if s := got.Status; !s.NotBefore.Time.Equal(leaf.NotBefore) || !s.NotAfter.Time.Equal(leaf.NotAfter) ||
			s.BeginRefreshAt.Sub(leaf.NotBefore) < 10*time.Minute || leaf.NotAfter.Sub(s.BeginRefreshAt.Time) < 10*time.Minute {
			t.Errorf("times %v, %v, %v", s.NotBefore, s.BeginRefreshAt, s.NotAfter)
		}
	}
	if n := w.auditLines("intent", "PodCertificateRequest "+w.namespace); n != 4 {
		t.Errorf("%d intents in the audit log, want 4", n)
	}
}

// TestPodCertificateDenied: what can never be met is denied with a reason, and nothing is signed.
func TestPodCertificateDenied(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.pod("web-1")
	p521 := must(ecdsa.GenerateKey(elliptic.P521(), rand.Reader))
	for name, tc := range map[string]struct {
		request []byte
		change  func(*certificatesv1.PodCertificateRequest)
		reason  string
	}{
		"key type": {stub(p521), nil, "UnsupportedKeyType"},
		"annotations": {stub(newKey()), func(r *certificatesv1.PodCertificateRequest) {
			r.Spec.UnverifiedUserAnnotations = map[string]string{"chancery.dev/admin": "yes"}
		}, "InvalidUnverifiedUserAnnotations"},
		"names": {stub(newKey(), "spiffe://cluster.local/ns/other/sa/admin"), nil, "NamesNotAllowed"},
	} {
		asked := w.ask(p, tc.request, func(r *certificatesv1.PodCertificateRequest) {
			if tc.change != nil {
				tc.change(r)
			}
		})
		got := w.settled(asked, "Denied")
		if c := got.Status.Conditions[0]; c.Reason != tc.reason || got.Status.CertificateChain != "" {
			t.Errorf("%s: %s: %s", name, c.Reason, c.Message)
		}
		process.Eventually(t, 30*time.Second, name+": the audit log says so", func() error { // nobody waits for the disk on account of a refusal
			if n := w.auditLines("denied", tc.reason); n != 1 {
				return fmt.Errorf("%d lines", n)
			}
			return nil
		})
	}
	if n := w.auditLines("intent", "PodCertificateRequest"); n != 0 {
		t.Errorf("%d certificates were signed", n)
	}
}

// TestOurTroubleIsNotFailed: while there is no issuer, or one that is about to end, requests stay untouched; then they are met.
func TestOurTroubleIsNotFailed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.pod("web-1")
	good := w.issuer.Load()
	for name, bad := range map[string]*ca.Issuer{"no issuer": nil, "an issuer that ends": good.Until(time.Now().Add(30 * time.Minute))} {
		before := w.auditLines("denied", "NOT_READY")
		w.issuer.Store(bad)
		asked := w.ask(p, stub(newKey()))
		process.Eventually(t, 30*time.Second, name+": it is tried again", func() error {
			if n := w.auditLines("denied", "NOT_READY"); n < before+3 {
				return fmt.Errorf("%d refusals", n-before)
			}
			return nil
		})
		if got := w.get(asked); got.ResourceVersion != asked.ResourceVersion {
			t.Errorf("%s: the request was touched: %+v", name, got.Status)
		}
		w.issuer.Store(good)
		w.chain([]byte(w.settled(asked, "Issued").Status.CertificateChain))
	}
}

// TestRevokedIdentityWaits: an identity that is revoked gets nothing and is not told that it failed; once it is restored it is met.
func TestRevokedIdentityWaits(t *testing.T) {
	t.Parallel()
	var set atomic.Pointer[revocation.Set]
	w := newWorld(t, func(_ *world, _ *Config, c *signers.Config) { c.Revocations = set.Load })
	p := w.pod("web-1")
	set.Store(revocation.NewSet([]string{"spiffe://cluster.local/ns/" + w.namespace + "/sa/web"}, nil, true))
	asked := w.ask(p, stub(newKey()))
	process.Eventually(t, 30*time.Second, "it is refused again and again", func() error {
		if n := w.auditLines("denied", "IDENTITY_REVOKED"); n < 3 {
			return fmt.Errorf("%d refusals", n)
		}
		return nil
	})
	if got := w.get(asked); got.ResourceVersion != asked.ResourceVersion {
		t.Errorf("the request was touched: %+v", got.Status)
	}
	set.Store(nil)
	w.chain([]byte(w.settled(asked, "Issued").Status.CertificateChain))
}

// TestPodThatIsGone gets nothing, though its request is still there.
func TestPodThatIsGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.letGo()
	p := w.pod("web-1")
	asked := w.ask(p, stub(newKey()))
	now := int64(0)
	if err := w.Client.CoreV1().Pods(w.namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	w.drives.Store(true)
	process.Eventually(t, 60*time.Second, "it is refused", func() error {
		if w.auditLines("denied", "POD_GONE") == 0 {
			return fmt.Errorf("not yet")
		}
		return nil
	})
	if got := w.get(asked); len(got.Status.Conditions) != 0 {
		t.Errorf("its status is %+v", got.Status)
	}
	if n := w.auditLines("intent", "PodCertificateRequest"); n != 0 {
		t.Errorf("%d certificates were signed", n)
	}
}
