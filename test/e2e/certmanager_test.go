package e2e

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"
)

// certManager plays the part of cert-manager's controllers on a real API server with the real definition of CertificateRequests:
// it approves, signs with a CA, and sets the status, or does not.
type certManager struct {
	t        *testing.T
	requests dynamic.ResourceInterface
	by, root *testCA
	mode     atomic.Pointer[string] // wait, deny, fail or sign
	seen     atomic.Int64           // requests that were decided
}

func (c *certManager) set(mode string) { c.mode.Store(&mode) }

func startCertManager(t *testing.T, k *Kube, namespace string, by, root *testCA) *certManager {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", k.AdminKubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(Tool(t, "certificaterequests.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	definition := new(unstructured.Unstructured)
	if err := yaml.Unmarshal(data, &definition.Object); err != nil {
		t.Fatal(err)
	}
	definitions := client.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	if _, err := definitions.Create(t.Context(), definition, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c := &certManager{t: t, by: by, root: root, requests: client.Resource(schema.GroupVersionResource{
		Group: "cert-manager.io", Version: "v1", Resource: "certificaterequests"}).Namespace(namespace)}
	c.set("wait")
	Eventually(t, 30*time.Second, "CertificateRequests are served", func() error {
		_, err := c.requests.List(t.Context(), metav1.ListOptions{})
		return err
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			c.round(ctx)
			time.Sleep(pollEvery)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return c
}

// round decides on what is there.
func (c *certManager) round(ctx context.Context) {
	list, err := c.requests.List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	for i := range list.Items {
		o := &list.Items[i]
		if conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions"); len(conditions) > 0 {
			continue
		}
		var status map[string]any
		switch *c.mode.Load() {
		case "deny":
			status = conditionsOf("Denied", "True", "policy.example", "no issuers today", "Ready", "False", "Denied", "denied by policy.example")
		case "fail":
			status = conditionsOf("Approved", "True", "cert-manager.io", "approved", "Ready", "False", "Failed", "the CA's key is gone")
		case "sign":
			if status, err = c.sign(o); err != nil {
				c.t.Error(err)
				continue
			}
		default:
			continue
		}
		o.Object["status"] = status
		if _, err := c.requests.UpdateStatus(ctx, o, metav1.UpdateOptions{}); err == nil {
			c.seen.Add(1)
		}
	}
}

// conditionsOf makes conditions of four texts each.
func conditionsOf(texts ...string) map[string]any {
	var all []any
	for i := 0; i+3 < len(texts); i += 4 {
		all = append(all, map[string]any{"type": texts[i], "status": texts[i+1], "reason": texts[i+2], "message": texts[i+3],
			"lastTransitionTime": time.Now().UTC().Format(time.RFC3339)})
	}
	return map[string]any{"conditions": all}
}

// sign signs as cert-manager's CA issuer does (1.21.2, pki.CertificateTemplateFromCertificateRequest): key, subject and URIs of the
// request, usages and isCA of the object, no path length, from now on.
func (c *certManager) sign(o *unstructured.Unstructured) (map[string]any, error) {
	text, _, _ := unstructured.NestedString(o.Object, "spec", "request")
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, errors.New("spec.request is not PEM")
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	duration, _, _ := unstructured.NestedString(o.Object, "spec", "duration")
	life, err := time.ParseDuration(duration)
	if err != nil {
		return nil, err
	}
	isCA, _, _ := unstructured.NestedBool(o.Object, "spec", "isCA")
	usages, _, _ := unstructured.NestedStringSlice(o.Object, "spec", "usages")
	if user, _, _ := unstructured.NestedString(o.Object, "spec", "issuerRef", "name"); !isCA || user != "mesh-ca" || fmt.Sprint(usages) != "[cert sign crl sign]" {
		return nil, fmt.Errorf("spec is %v", o.Object["spec"])
	}
	template := &x509.Certificate{
		SerialNumber: randomSerial(), RawSubject: csr.RawSubject, URIs: csr.URIs, NotBefore: time.Now(), NotAfter: time.Now().Add(life),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	cert, err := sign(template, c.by.cert, csr.PublicKey, c.by.key)
	if err != nil {
		return nil, err
	}
	status := conditionsOf("Approved", "True", "cert-manager.io", "approved", "Ready", "True", "Issued", "fetched from the issuer")
	status["certificate"] = base64.StdEncoding.EncodeToString([]byte(certsPEM(&testCA{cert: cert}, c.by)))
	status["ca"] = base64.StdEncoding.EncodeToString([]byte(certsPEM(c.root)))
	return status, nil
}

// TestParentCertManager: CertificateRequests on a real API server, waiting, denied, failed and signed; the API server pauses.
func TestParentCertManager(t *testing.T) {
	t.Parallel()
	Tool(t, "certificaterequests.yaml")
	k := StartKube(t)
	ns := k.Namespace(t, "mesh")
	pod := k.RunPod(t, ns, "web", "web-1", "node-a")
	root := authority(t, "e2e root", p256(t), nil)
	manager := startCertManager(t, k, ns, authority(t, "mesh CA", p256(t), root), root)
	var role rbacv1.Role
	if err := yaml.UnmarshalStrict([]byte(parentsDoc(t, "yaml", "kind: Role")), &role); err != nil {
		t.Fatal(err)
	}
	kubeconfig := k.KubeconfigFor(t, ns, "chancery", role.Rules...)
	server := startParented(t, serverYAML{Clusters: []clusterYAML{k.StaticCluster(t)}, Parent: map[string]any{
		"lifetime": "40s", "certManager": map[string]any{"kubeconfig": kubeconfig, "namespace": ns, "issuer": "mesh-ca"},
	}}, root)
	list := func() []unstructured.Unstructured {
		l, err := manager.requests.List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return l.Items
	}
	server.WaitFor(t, 30*time.Second, "has made a request", func() error {
		if n := len(list()); n != 1 {
			return fmt.Errorf("there are %d", n)
		}
		return nil
	})
	first := list()[0].GetUID()
	manager.set("deny")
	server.WaitLog(t, 30*time.Second, "denied: no issuers today")
	manager.set("fail")
	server.WaitLog(t, 30*time.Second, "failed: the CA's key is gone")
	manager.set("sign")
	server.WaitReady(t)
	if n := manager.seen.Load(); n < 3 {
		t.Errorf("%d requests were decided on", n)
	}
	server.WaitFor(t, 10*time.Second, "has deleted its requests", func() error {
		if all := list(); len(all) > 0 {
			return fmt.Errorf("there is %s (the first was %s)", all[0].GetUID(), first)
		}
		return nil
	})
	ask := Ask{Token: k.BoundToken(t, pod, time.Hour, audience)}
	verifiesUnder(t, server, ask, server.Roots)
	outage(t, server, ask, func() { manager.set("fail") }, func() { manager.set("sign") })
	outage(t, server, ask, func() { k.APIServer().Kill() }, func() { k.RestartAPIServer(t) })
}
