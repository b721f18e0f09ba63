package e2e

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/chancery-project/chancery/test/apiserver"
)

// Kube is a running API server with its etcd: no controllers, no scheduler, no kubelet. Nobody creates default service
// accounts or removes namespaces, so tests make what they need under names of their own.
type Kube struct{ *apiserver.Server }

// Pod names a pod and what a token for it says.
type Pod struct {
	Namespace, Name, ServiceAccount, Node string
	UID, ServiceAccountUID                string
}

// SPIFFEID is the identity that Chancery derives for the pod.
func (p Pod) SPIFFEID(trustDomain string) string {
	return fmt.Sprintf("spiffe://%s/ns/%s/sa/%s", trustDomain, p.Namespace, p.ServiceAccount)
}

var shared struct {
	sync.Mutex // guards the rest
	kube       *Kube
	err        error
}

// SharedKube returns the API server that all tests of this process share, started by the first that asks.
func SharedKube(t testing.TB) *Kube {
	t.Helper()
	cfg := apiserver.Config{APIServer: Tool(t, "kube-apiserver"), Etcd: Tool(t, "etcd")}
	shared.Lock()
	defer shared.Unlock()
	if shared.kube == nil && shared.err == nil {
		started := time.Now()
		cfg.Dir = filepath.Join(sharedDir(), "kube")
		var server *apiserver.Server
		if server, shared.err = apiserver.Launch(cfg); shared.err == nil {
			shared.kube = &Kube{server}
			atExit(server.Stop)
			t.Logf("kube-apiserver and etcd ready in %v", time.Since(started).Round(time.Millisecond))
		}
	}
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	k := shared.kube
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("end of the API server's log:\n%s", k.APIServer().LogTail(15))
		}
	})
	return k
}

// StartKube starts an API server for this test alone, which may then pause or kill it, or take it for a foreign
// cluster.
func StartKube(t testing.TB) *Kube {
	t.Helper()
	return &Kube{apiserver.Start(t, "")}
}

// Namespace creates a namespace whose name begins with the prefix and is not in use.
func (k *Kube) Namespace(t testing.TB, prefix string) string {
	t.Helper()
	ns, err := k.Client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: prefix + "-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("creating namespace %s-...: %v", prefix, err)
	}
	return ns.Name
}

// EnsureNamespace creates a namespace of a fixed name, such as istio-system, unless it is there.
func (k *Kube) EnsureNamespace(t testing.TB, name string) {
	t.Helper()
	_, err := k.Client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatalf("creating namespace %s: %v", name, err)
	}
}

// ServiceAccount creates a service account unless it is there, and returns its UID.
func (k *Kube) ServiceAccount(t testing.TB, namespace, name string) string {
	t.Helper()
	api := k.Client.CoreV1().ServiceAccounts(namespace)
	sa, err := api.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		sa, err = api.Get(t.Context(), name, metav1.GetOptions{})
	}
	if err != nil {
		t.Fatalf("creating service account %s/%s: %v", namespace, name, err)
	}
	return string(sa.UID)
}

// RunPod creates a pod (and its service account) on a node and reports it as Running, which a kubelet would do.
func (k *Kube) RunPod(t testing.TB, namespace, serviceAccount, name, node string) Pod {
	t.Helper()
	saUID := k.ServiceAccount(t, namespace, serviceAccount)
	pod, err := k.Client.CoreV1().Pods(namespace).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			ServiceAccountName: serviceAccount,
			NodeName:           node,
			Containers:         []corev1.Container{{Name: "app", Image: "example.invalid/app"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("creating pod %s/%s: %v", namespace, name, err)
	}
	p := Pod{
		Namespace: namespace, Name: name, ServiceAccount: serviceAccount, Node: node,
		UID: string(pod.UID), ServiceAccountUID: saUID,
	}
	k.SetPodPhase(t, p, corev1.PodRunning)
	return p
}

// SetPodPhase reports a pod's phase, as a kubelet would.
func (k *Kube) SetPodPhase(t testing.TB, p Pod, phase corev1.PodPhase) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase)
	_, err := k.Client.CoreV1().Pods(p.Namespace).Patch(t.Context(), p.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatalf("setting the phase of pod %s/%s to %s: %v", p.Namespace, p.Name, phase, err)
	}
}

// DeletePod removes a pod at once, as after its kubelet has stopped it.
func (k *Kube) DeletePod(t testing.TB, p Pod) {
	t.Helper()
	now := int64(0)
	err := k.Client.CoreV1().Pods(p.Namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
	if err != nil {
		t.Fatalf("deleting pod %s/%s: %v", p.Namespace, p.Name, err)
	}
}

// KubeconfigFor creates a service account with the cluster-wide rules and writes a kubeconfig that acts as it.
func (k *Kube) KubeconfigFor(t testing.TB, namespace, name string, rules ...rbacv1.PolicyRule) string {
	t.Helper()
	k.ServiceAccount(t, namespace, name)
	role := metav1.ObjectMeta{Name: "e2e:" + namespace + ":" + name}
	_, err := k.Client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: role, Rules: rules}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("creating cluster role %s: %v", role.Name, err)
	}
	_, err = k.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: role,
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("binding cluster role %s: %v", role.Name, err)
	}
	token, err := k.RequestToken(t.Context(), namespace, name, authenticationv1.TokenRequestSpec{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name+".kubeconfig")
	if err := k.WriteKubeconfig(path, &clientcmdapi.AuthInfo{Token: token}); err != nil {
		t.Fatal(err)
	}
	return path
}

// JWKS returns the cluster's token keys as the API server serves them.
func (k *Kube) JWKS(t testing.TB) []byte {
	t.Helper()
	jwks, err := k.Client.RESTClient().Get().AbsPath("/openid/v1/jwks").DoRaw(t.Context())
	if err != nil {
		t.Fatalf("getting the JWKS: %v", err)
	}
	return jwks
}
