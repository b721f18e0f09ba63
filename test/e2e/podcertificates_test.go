package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/test/apiserver"
	"github.com/chancery-project/chancery/trust"
)

const workloadSigner = "chancery.dev/workload"

// shippedRules are those of a ClusterRole in deploy/kubernetes.
func shippedRules(t *testing.T, file, name string) []rbacv1.PolicyRule {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(repoRoot(t), "deploy", "kubernetes", file))
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range strings.Split(string(data), "\n---\n") {
		role := new(rbacv1.ClusterRole)
		if err := yaml.Unmarshal([]byte(text), role); err == nil && role.Kind == "ClusterRole" && role.Name == name {
			return role.Rules
		}
	}
	t.Fatalf("%s has no ClusterRole %s", file, name)
	return nil
}

// kubelet asks for certificates of pods as the kubelet of a node does, as far as the API server sees.
type kubelet struct {
	k    *Kube
	node *corev1.Node
	api  *kubernetes.Clientset
}

func (k *Kube) kubelet(t *testing.T, name string) *kubelet {
	t.Helper()
	node, err := k.Client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", k.AdminKubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + name, Groups: []string{"system:nodes", "system:authenticated"}}
	api, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &kubelet{k, node, api}
}

// ask asks for a certificate for a pod that has a volume for one.
func (l *kubelet) ask(t *testing.T, pod *corev1.Pod, account string) *certificatesv1.PodCertificateRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	r := &certificatesv1.PodCertificateRequest{ObjectMeta: metav1.ObjectMeta{GenerateName: "req-"}, Spec: certificatesv1.PodCertificateRequestSpec{
		SignerName: workloadSigner, PodName: pod.Name, PodUID: pod.UID, ServiceAccountName: pod.Spec.ServiceAccountName, NodeName: "node-a", NodeUID: l.node.UID, StubPKCS10Request: der,
	}}
	sa, err := l.k.Client.CoreV1().ServiceAccounts(pod.Namespace).Get(t.Context(), account, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.Spec.ServiceAccountUID = sa.UID
	var out *certificatesv1.PodCertificateRequest
	Eventually(t, 20*time.Second, "the API server admits the node's request", func() (err error) { // its informers may lag
		out, err = l.api.CertificatesV1().PodCertificateRequests(pod.Namespace).Create(t.Context(), r, metav1.CreateOptions{})
		return err
	})
	return out
}

func (k *Kube) request(t *testing.T, r *certificatesv1.PodCertificateRequest) *certificatesv1.PodCertificateRequest {
	t.Helper()
	out, err := k.Client.CertificatesV1().PodCertificateRequests(r.Namespace).Get(t.Context(), r.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// issued waits until a request is met, and returns the chain.
func (k *Kube) issued(t *testing.T, r *certificatesv1.PodCertificateRequest) []*x509.Certificate {
	t.Helper()
	var chain []*x509.Certificate
	Eventually(t, 60*time.Second, "the request is met", func() (err error) {
		s := k.request(t, r).Status
		if len(s.Conditions) == 0 || s.Conditions[0].Type != certificatesv1.PodCertificateRequestConditionTypeIssued {
			return fmt.Errorf("its conditions are %+v", s.Conditions)
		}
		chain, err = trust.ParseCertificates([]byte(s.CertificateChain))
		return err
	})
	return chain
}

// trusted returns the roots of a ClusterTrustBundle; none if it is not there.
func (k *Kube) trusted(t *testing.T, version string) []*x509.Certificate {
	t.Helper()
	b, err := k.Client.CertificatesV1().ClusterTrustBundles().Get(t.Context(), "chancery.dev:workload:"+version, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	roots, err := trust.ParseCertificates([]byte(b.Spec.TrustBundle))
	if err != nil {
		t.Fatal(err)
	}
	return roots
}

// verify verifies a chain as a pod does that reads its roots from a ClusterTrustBundle, and returns its ID and root.
func verify(t *testing.T, chain, roots []*x509.Certificate) (string, *x509.Certificate) {
	t.Helper()
	td, err := trust.ParseDomain(trustDomain)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := trust.NewBundle(td, 1, roots)
	if err != nil {
		t.Fatal(err)
	}
	id, paths, err := trust.Verify(chain, trust.Only(bundle), time.Now())
	if err != nil {
		t.Fatalf("the chain does not verify by the published roots: %v", err)
	}
	return id.String(), paths[0][len(paths[0])-1]
}

// rotationOf is what `chancery rotate status` says.
func rotationOf(t *testing.T, s *Server) *rotationJSON {
	t.Helper()
	out := new(rotationStatus)
	if err := json.Unmarshal([]byte(MustRun(t, "rotate", "status", "-c", s.Config, "-o", "json")), out); err != nil {
		t.Fatal(err)
	}
	return out.Rotation
}

// TestD3PodCertificates: a pod of a real cluster, with the rights that deploy/kubernetes gives and no others, gets its SVID by Kubernetes' own
// API, and its roots by a ClusterTrustBundle; an outage of the CA is no failure; and a rotation publishes the new root, to the canary first,
// before anything is signed under it, and waits until certificates have ended that nobody can acknowledge.
func TestD3PodCertificates(t *testing.T) {
	t.Parallel()
	up, err := apiserver.Launch(apiserver.Config{
		Dir: t.TempDir(), APIServer: Tool(t, "kube-apiserver"), Etcd: Tool(t, "etcd"), Args: []string{"--authorization-mode=Node", "--enable-admission-plugins=NodeRestriction"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(up.Stop)
	k := &Kube{up}
	rules := slices.Concat(shippedRules(t, "rbac.yaml", "chancery-server"), shippedRules(t, "signing/rbac.yaml", "chancery-signing"), shippedRules(t, "publishing/rbac.yaml", "chancery-publishing"))
	k.EnsureNamespace(t, "chancery")
	s := NewServer(t, serverYAML{
		Clusters: []clusterYAML{k.Cluster(k.KubeconfigFor(t, "chancery", "chancery", rules...))},
		Signing:  map[string]any{"podCertificates": map[string]any{"signerName": workloadSigner, "lifetime": "1h"}},
		Publishing: map[string]any{
			"clusterTrustBundle": map[string]any{"signerName": workloadSigner, "canaryLead": "6s"}, "kubeletSync": "1s", "reread": "1s",
			"configMaps": map[string]any{"istio": true, "namespaceSelector": "kubernetes.io/metadata.name notin (kube-system)"},
		},
	})
	s.Start(t)
	s.WaitReady(t)
	node := k.kubelet(t, "node-a")
	ns := k.Namespace(t, "app")
	pod := k.podWithVolume(t, ns)
	id := "spiffe://" + trustDomain + "/ns/" + ns + "/sa/web"
	first := k.issued(t, node.ask(t, pod, "web"))
	Eventually(t, 20*time.Second, "the roots are published", func() error {
		if len(k.trusted(t, "live")) != 1 || len(k.trusted(t, "canary")) != 1 {
			return errors.New("not yet")
		}
		return nil
	})
	got, oldRoot := verify(t, first, k.trusted(t, "live"))
	if got != id {
		t.Errorf("the certificate is of %s, want %s", got, id)
	}
	istioHas := func() error {
		for name, key := range map[string]string{"istio-ca-root-cert": "root-cert.pem", "chancery-roots": "roots.pem"} {
			c, err := k.Client.CoreV1().ConfigMaps(ns).Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if roots, err := trust.ParseCertificates([]byte(c.Data[key])); err != nil || len(roots) != len(k.trusted(t, "live")) {
				return fmt.Errorf("%s: %d roots, %w", name, len(roots), errors.Join(err))
			}
		}
		return nil
	}
	Eventually(t, 20*time.Second, "the namespace has the roots", istioHas)

	// The CA is killed: what is asked for meanwhile stays untouched, and is met afterwards.
	s.Kill()
	asked := node.ask(t, pod, "web")
	time.Sleep(2 * time.Second)
	if now := k.request(t, asked); now.ResourceVersion != asked.ResourceVersion {
		t.Errorf("it was touched: %+v", now.Status)
	}
	s.Start(t)
	verify(t, k.issued(t, asked), k.trusted(t, "live"))

	// A rotation of the root: canary, then live, then those who read get their time, and only then may something be signed under it.
	MustRun(t, "rotate", "start", "--root", "-c", s.Config)
	s.WaitFor(t, 60*time.Second, "the canary has the new root", func() error {
		if len(k.trusted(t, "canary")) != 2 {
			return errors.New("not yet")
		}
		return nil
	})
	if len(k.trusted(t, "live")) != 1 {
		t.Error("the live one has it with the canary")
	}
	if g := rotationOf(t, s).gate("readers"); g.Passed || !strings.Contains(strings.Join(g.Waiting, "; "), "ClusterTrustBundle chancery.dev:workload:live does not have the new roots yet") {
		t.Errorf("gate readers: %+v", g)
	}
	s.WaitFor(t, 60*time.Second, "readers have had their time", func() error {
		if r := rotationOf(t, s); !r.gate("readers").Passed {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	if len(k.trusted(t, "live")) != 2 {
		t.Error("readers are said to have what is not published")
	}
	Eventually(t, 20*time.Second, "the namespace has both roots", istioHas)
	r := rotationOf(t, s)
	if g := r.gate("consumers"); r.Phase != "distribute" || g.Passed || !strings.Contains(strings.Join(g.Waiting, "; "), id) {
		t.Errorf("in phase %s gate consumers does not wait for the pod's certificates: %+v", r.Phase, g)
	}
	if _, root := verify(t, k.issued(t, node.ask(t, pod, "web")), k.trusted(t, "live")); !root.Equal(oldRoot) {
		t.Error("something was signed under the new root before its time")
	}
	MustRun(t, "rotate", "override", "consumers", "--because", "the pods are known to read the bundle", "-c", s.Config)
	s.WaitFor(t, 60*time.Second, "the new issuer signs", func() error {
		if r := rotationOf(t, s); r.Phase != "reissue" {
			return fmt.Errorf("phase %s", r.Phase)
		}
		return nil
	})
	if _, root := verify(t, k.issued(t, node.ask(t, pod, "web")), k.trusted(t, "live")); root.Equal(oldRoot) {
		t.Error("the new certificate is under the old root")
	}
	if g := rotationOf(t, s).gate("consumers"); g.Passed {
		t.Errorf("the old root would leave under certificates that have not ended: %+v", g)
	}
	if lines := s.Metric(t, `chancery_publish_objects{resource="configmaps",state="current"}`); len(lines) != 1 {
		t.Errorf("metrics: %v", lines)
	}
}

// podWithVolume makes a pod on node-a with a volume for a certificate.
func (k *Kube) podWithVolume(t *testing.T, ns string) *corev1.Pod {
	t.Helper()
	k.ServiceAccount(t, ns, "web")
	no := false
	pod, err := k.Client.CoreV1().Pods(ns).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web-1"},
		Spec: corev1.PodSpec{
			ServiceAccountName: "web", NodeName: "node-a", AutomountServiceAccountToken: &no,
			Containers: []corev1.Container{{Name: "app", Image: "example.invalid/app", VolumeMounts: []corev1.VolumeMount{{Name: "svid", MountPath: "/svid"}}}},
			Volumes: []corev1.Volume{{Name: "svid", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{PodCertificate: &corev1.PodCertificateProjection{SignerName: workloadSigner, KeyType: "ECDSAP256", CredentialBundlePath: "svid.pem"}},
				{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{SignerName: ptr(workloadSigner), LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"chancery.dev/cluster-trust-bundle-version": "live"}}, Path: "roots.pem"}},
			}}}}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

func ptr[T any](v T) *T { return &v }
