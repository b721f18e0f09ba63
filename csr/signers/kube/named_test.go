package kube

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr/signers"
	"github.com/chancery-project/chancery/test/process"
	"github.com/chancery-project/chancery/trust"
)

// istioClient does what istiod does as a registration authority (security/pkg/k8s/chiron and pki/ra): it makes a request, approves it itself,
// watches it, and deletes it.
type istioClient struct {
	w      *world
	client *kubernetes.Clientset
}

// asIstiod returns a client with the rights that Istio's chart gives istiod for this.
func (w *world) asIstiod(user string) istioClient {
	w.t.Helper()
	ctx := w.t.Context()
	role := must(w.Client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{GenerateName: "istiod-"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"certificates.k8s.io"}, Resources: []string{"certificatesigningrequests", "certificatesigningrequests/approval", "certificatesigningrequests/status"}, Verbs: []string{"update", "create", "get", "delete", "watch", "list"}},
		{APIGroups: []string{"certificates.k8s.io"}, Resources: []string{"signers"}, ResourceNames: []string{w.namedSigner}, Verbs: []string{"approve"}},
	}}, metav1.CreateOptions{}))
	must(w.Client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: user}},
	}, metav1.CreateOptions{}))
	return istioClient{w, w.as(user, "system:serviceaccounts")}
}

// istioUsages are what istiod asks for.
var istioUsages = []certificatesv1.KeyUsage{"digital signature", "key encipherment", "server auth", "client auth"}

func (c istioClient) submit(request []byte, life time.Duration, usages ...certificatesv1.KeyUsage) *certificatesv1.CertificateSigningRequest {
	c.w.t.Helper()
	o := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-workload-"},
		Spec:       certificatesv1.CertificateSigningRequestSpec{Request: request, Usages: usages, SignerName: c.w.namedSigner},
	}
	if life > 0 {
		seconds := int32(life / time.Second)
		o.Spec.ExpirationSeconds = &seconds
	}
	var out *certificatesv1.CertificateSigningRequest
	process.Eventually(c.w.t, 20*time.Second, "the right to create counts", func() (err error) {
		out, err = c.client.CertificatesV1().CertificateSigningRequests().Create(c.w.t.Context(), o, metav1.CreateOptions{})
		return err
	})
	return out
}

func (c istioClient) approve(o *certificatesv1.CertificateSigningRequest) {
	c.w.t.Helper()
	o.Status.Conditions = append(o.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Reason: "approved", Message: "CSR is approved", Status: corev1.ConditionTrue,
	})
	must(c.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(c.w.t.Context(), o.Name, o, metav1.UpdateOptions{}))
}

// read waits, by a watch, for the certificate or the condition Failed.
func (c istioClient) read(o *certificatesv1.CertificateSigningRequest) ([]byte, error) {
	c.w.t.Helper()
	ctx, cancel := context.WithTimeout(c.w.t.Context(), 60*time.Second)
	defer cancel()
	watch := must(c.client.CertificatesV1().CertificateSigningRequests().Watch(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", o.Name).String()}))
	defer watch.Stop()
	for e := range watch.ResultChan() {
		got, ok := e.Object.(*certificatesv1.CertificateSigningRequest)
		if !ok {
			continue
		}
		if len(got.Status.Certificate) > 0 {
			return got.Status.Certificate, nil
		}
		for _, x := range got.Status.Conditions {
			if x.Type == certificatesv1.CertificateFailed {
				return nil, errors.New(x.Reason + ": " + x.Message)
			}
		}
	}
	return nil, errors.New("no answer")
}

// sign is all of it.
func (c istioClient) sign(request []byte, life time.Duration, usages ...certificatesv1.KeyUsage) ([]byte, error) {
	c.w.t.Helper()
	o := c.submit(request, life, usages...)
	c.approve(o)
	chain, err := c.read(o)
	if err := c.client.CertificatesV1().CertificateSigningRequests().Delete(c.w.t.Context(), o.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		c.w.t.Error(err)
	}
	return chain, err
}

// istioRequest is what Istio's agents send: an organisation with an empty value, and the ID.
func istioRequest(key crypto.Signer, id string) []byte {
	return pemOf(must(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{Organization: []string{""}}, URIs: []*url.URL{must(url.Parse(id))},
	}, key)))
}

// TestD17NamedBySigningRequest: istiod, as a registration authority, gets certificates of the names that it approved, within the paths that
// the config lists for it; nobody else gets any, and it gets no others.
func TestD17NamedBySigningRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *world, _ *Config, c *signers.Config) { c.Root = true })
	istio := w.asIstiod(istiod)
	id := "spiffe://cluster.local/ns/" + w.namespace + "/sa/web"
	chain, err := istio.sign(istioRequest(newKey(), id), 2*time.Hour, istioUsages...)
	if err != nil {
		t.Fatal(err)
	}
	leaf := w.chain(chain)
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != id || leaf.IsCA || leaf.NotAfter.Sub(leaf.NotBefore) != 2*time.Hour+ca.DefaultBackdate {
		t.Errorf("it is of %v, CA %t, from %s to %s", leaf.URIs, leaf.IsCA, leaf.NotBefore, leaf.NotAfter)
	}
	if att, err := ca.AttestationOf(leaf); att != nil || err != nil { // no token has proved anything: it renews nothing by itself (decision D16)
		t.Errorf("attestation %+v, %v", att, err)
	}
	if !strings.HasSuffix(string(chain), string(w.issuer.Load().Bundle().PEM())) { // Istio takes the last one for the root
		t.Error("the root is not the last of the chain")
	}
	other := w.asIstiod("system:serviceaccount:kube-system:other")
	isCA := must(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		URIs: []*url.URL{must(url.Parse(id))}, ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 3, 1, 1, 0xff}}},
	}, newKey()))
	dns := must(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{must(url.Parse(id))}, DNSNames: []string{"istiod.istio-system.svc"}}, newKey()))
	for name, tc := range map[string]struct {
		client  istioClient
		request []byte
		usages  []certificatesv1.KeyUsage
		want    string
	}{
		"another requester":    {other, istioRequest(newKey(), id), istioUsages, "RequesterNotAllowed: user \"system:serviceaccount:kube-system:other\""},
		"another namespace":    {istio, istioRequest(newKey(), "spiffe://cluster.local/ns/kube-system/sa/admin"), istioUsages, "NamesNotAllowed: user"},
		"the server itself":    {istio, istioRequest(newKey(), "spiffe://cluster.local/chancery/server"), istioUsages, "NamesNotAllowed: paths under /chancery/"},
		"another trust domain": {istio, istioRequest(newKey(), "spiffe://other/ns/"+w.namespace+"/sa/web"), istioUsages, "NamesNotAllowed: name refused"},
		"a CA":                 {istio, pemOf(isCA), istioUsages, "InvalidRequest: the request asks for a CA certificate"},
		"a DNS name":           {istio, pemOf(dns), istioUsages, "NamesNotAllowed: the request asks for a name of type 2"},
		"no name":              {istio, pemOf(stub(newKey())), istioUsages, "NamesNotAllowed: the request has 0 URIs"},
		"cert sign":            {istio, istioRequest(newKey(), id), []certificatesv1.KeyUsage{"cert sign"}, "UnsupportedUsages: usage \"cert sign\""},
	} {
		if chain, err := tc.client.sign(tc.request, 0, tc.usages...); err == nil || !strings.HasPrefix(err.Error(), tc.want) {
			t.Errorf("%s: %s, %v", name, chain, err)
		}
	}
	if n := w.auditLines("intent", "CertificateSigningRequest"); n != 1 {
		t.Errorf("%d certificates were signed", n)
	}
}

// TestD17NamesAreNeverSubstituted: a name that the plan of a migration does not have now is a refusal that says which to ask for.
func TestD17NamesAreNeverSubstituted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(w *world, _ *Config, c *signers.Config) {
		c.IssuerOf = func(id trust.ID) (*ca.Issuer, error) {
			return nil, fmt.Errorf("%w: ask for spiffe://new.example%s", ca.ErrName, id.Path())
		}
	})
	_, err := w.asIstiod(istiod).sign(istioRequest(newKey(), "spiffe://cluster.local/ns/"+w.namespace+"/sa/web"), 0, istioUsages...)
	if err == nil || !strings.Contains(err.Error(), "NamesNotAllowed: name refused: ask for spiffe://new.example/ns/") {
		t.Error(err)
	}
}

// TestSigningRequestWaits: what is not approved, or cannot be signed now, is left as it is.
func TestSigningRequestWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	istio := w.asIstiod(istiod)
	id := "spiffe://cluster.local/ns/" + w.namespace + "/sa/web"
	unapproved := istio.submit(istioRequest(newKey(), id), 0, istioUsages...)
	good := w.issuer.Swap(nil)
	o := istio.submit(istioRequest(newKey(), id), 0, istioUsages...)
	istio.approve(o)
	process.Eventually(t, 30*time.Second, "it is tried again", func() error {
		if w.auditLines("denied", "NOT_READY") < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	now := must(w.Client.CertificatesV1().CertificateSigningRequests().Get(t.Context(), o.Name, metav1.GetOptions{}))
	if len(now.Status.Conditions) != 1 || len(now.Status.Certificate) > 0 {
		t.Errorf("its status is %+v", now.Status)
	}
	w.issuer.Store(good)
	chain, err := istio.read(o)
	if err != nil {
		t.Fatal(err)
	}
	w.chain(chain)
	if now := must(w.Client.CertificatesV1().CertificateSigningRequests().Get(t.Context(), unapproved.Name, metav1.GetOptions{})); now.ResourceVersion != unapproved.ResourceVersion {
		t.Errorf("one that nobody approved: %+v", now.Status)
	}
	if n := w.auditLines("intent", "CertificateSigningRequest"); n != 1 {
		t.Errorf("%d certificates were signed", n)
	}
}
