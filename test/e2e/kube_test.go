package e2e

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// kubeIssuer is what every cluster calls itself by default in its tokens.
const kubeIssuer = "https://kubernetes.default.svc"

// Kube is a running API server with its etcd: no controllers, no scheduler, no kubelet. Nobody creates default service
// accounts or removes namespaces, so tests make what they need under names of their own.
type Kube struct {
	URL             string // https://127.0.0.1:PORT
	Issuer          string // "iss" of its tokens
	CAFile          string // root of its TLS certificate
	AdminKubeconfig string // file; member of system:masters by client certificate
	Client          *kubernetes.Clientset

	apiserver, etcd *Process
	apiserverConfig ProcessConfig
	tokenKey        *rsa.PrivateKey // the API server's own key for service-account tokens
}

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
	apiserver, etcd := Tool(t, "kube-apiserver"), Tool(t, "etcd")
	shared.Lock()
	defer shared.Unlock()
	if shared.kube == nil && shared.err == nil {
		started := time.Now()
		shared.kube, shared.err = startKubeRetrying(filepath.Join(sharedDir(), "kube"), apiserver, etcd)
		if shared.err == nil {
			atExit(shared.kube.stop)
			t.Logf("kube-apiserver and etcd ready in %v", time.Since(started).Round(time.Millisecond))
		}
	}
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	k := shared.kube
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("end of the API server's log:\n%s", k.apiserver.LogTail(15))
		}
	})
	return k
}

// StartKube starts an API server for this test alone, which may then pause or kill it, or take it for a foreign
// cluster.
func StartKube(t testing.TB) *Kube {
	t.Helper()
	k, err := startKubeRetrying(t.TempDir(), Tool(t, "kube-apiserver"), Tool(t, "etcd"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.stop)
	return k
}

// startKubeRetrying tries again with other ports, since neither program can be given port 0 and a picked one may be taken.
func startKubeRetrying(dir, apiserver, etcd string) (k *Kube, err error) {
	for try := range 3 {
		sub := filepath.Join(dir, fmt.Sprint(try))
		if err := os.MkdirAll(sub, 0o700); err != nil {
			return nil, err
		}
		if k, err = startKube(sub, apiserver, etcd); err == nil || !strings.Contains(err.Error(), "address already in use") {
			break
		}
	}
	return k, err
}

func startKube(dir, apiserverPath, etcdPath string) (*Kube, error) {
	k := &Kube{Issuer: kubeIssuer}
	etcdURL, err := k.startEtcd(dir, etcdPath)
	if err == nil {
		err = k.startAPIServer(dir, apiserverPath, etcdURL)
	}
	if err != nil {
		k.stop()
		return nil, err
	}
	return k, nil
}

func (k *Kube) startEtcd(dir, path string) (clientURL string, err error) {
	clientPort, err := freePort()
	if err != nil {
		return "", err
	}
	peerPort, err := freePort()
	if err != nil {
		return "", err
	}
	clientURL = fmt.Sprintf("http://127.0.0.1:%d", clientPort)
	peerURL := fmt.Sprintf("http://127.0.0.1:%d", peerPort)
	k.etcd, err = startProcess(ProcessConfig{
		Name: "etcd", Path: path, Log: filepath.Join(dir, "etcd.log"),
		Args: []string{
			"--data-dir=" + filepath.Join(dir, "etcd"), "--unsafe-no-fsync", "--log-level=warn",
			"--listen-client-urls=" + clientURL, "--advertise-client-urls=" + clientURL,
			"--listen-peer-urls=" + peerURL, "--initial-advertise-peer-urls=" + peerURL, "--initial-cluster=default=" + peerURL,
		},
	})
	return clientURL, err
}

func (k *Kube) startAPIServer(dir, path, etcdURL string) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	k.URL = fmt.Sprintf("https://127.0.0.1:%d", port)
	ca, err := newTestCA("kube e2e CA")
	if err != nil {
		return err
	}
	serving, err := ca.issue(dir, "apiserver", pkix.Name{CommonName: "kube-apiserver"}, "127.0.0.1", "localhost", "kubernetes.default.svc")
	if err != nil {
		return err
	}
	k.CAFile = serving.Root
	tokenKeyFile, err := k.writeTokenKey(dir)
	if err != nil {
		return err
	}
	k.apiserverConfig = ProcessConfig{
		Name: "kube-apiserver", Path: path, Log: filepath.Join(dir, "kube-apiserver.log"),
		Args: []string{
			"--etcd-servers=" + etcdURL,
			"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", port),
			// Nobody reads the Service "kubernetes", and its endpoints may not be loopback addresses.
			"--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.0.0.0/24",
			"--tls-cert-file=" + serving.Cert, "--tls-private-key-file=" + serving.Key, "--client-ca-file=" + serving.Root,
			"--service-account-issuer=" + kubeIssuer, "--service-account-jwks-uri=" + k.URL + "/openid/v1/jwks",
			"--service-account-signing-key-file=" + tokenKeyFile, "--service-account-key-file=" + tokenKeyFile,
			"--authorization-mode=RBAC", "--anonymous-auth=false",
			"--feature-gates=ClusterTrustBundle=true,PodCertificateRequest=true",
		},
	}
	if k.apiserver, err = startProcess(k.apiserverConfig); err != nil {
		return err
	}
	return k.connectAdmin(dir, ca)
}

func (k *Kube) writeTokenKey(dir string) (path string, err error) {
	if k.tokenKey, err = rsa.GenerateKey(rand.Reader, 2048); err != nil {
		return "", fmt.Errorf("generating the service-account key: %w", err)
	}
	block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(k.tokenKey)}
	path = filepath.Join(dir, "sa.key")
	return path, os.WriteFile(path, pem.EncodeToMemory(block), 0o600)
}

// connectAdmin writes the admin's kubeconfig, makes the client and waits until the server is ready.
func (k *Kube) connectAdmin(dir string, ca *testCA) error {
	admin, err := ca.issue(dir, "admin", pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}})
	if err != nil {
		return err
	}
	k.AdminKubeconfig = filepath.Join(dir, "admin.kubeconfig")
	user := &clientcmdapi.AuthInfo{ClientCertificate: admin.Cert, ClientKey: admin.Key}
	if err := k.writeKubeconfig(k.AdminKubeconfig, user); err != nil {
		return err
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", k.AdminKubeconfig)
	if err != nil {
		return fmt.Errorf("reading the admin's kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = 1000, 1000 // the defaults (5, 10) are for being polite to a shared cluster
	cfg.WarningHandler = rest.NoWarnings{}
	if k.Client, err = kubernetes.NewForConfig(cfg); err != nil {
		return fmt.Errorf("making the admin's client: %w", err)
	}
	return k.apiserver.waitFor(60*time.Second, "is ready", k.ready)
}

func (k *Kube) ready() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return k.Client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
}

func (k *Kube) writeKubeconfig(path string, user *clientcmdapi.AuthInfo) error {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["e2e"] = &clientcmdapi.Cluster{Server: k.URL, CertificateAuthority: k.CAFile}
	cfg.AuthInfos["e2e"] = user
	cfg.Contexts["e2e"] = &clientcmdapi.Context{Cluster: "e2e", AuthInfo: "e2e"}
	cfg.CurrentContext = "e2e"
	if err := clientcmd.WriteToFile(*cfg, path); err != nil { // mode 0600
		return fmt.Errorf("writing kubeconfig %s: %w", path, err)
	}
	return nil
}

// APIServer returns the API server's process, for tests that pause (SIGSTOP) or kill it; only on a cluster of the test's own.
func (k *Kube) APIServer() *Process { return k.apiserver }

// RestartAPIServer starts a killed API server again, with what it has in etcd, and waits until it is ready.
func (k *Kube) RestartAPIServer(t testing.TB) {
	t.Helper()
	for try := 0; ; try++ {
		var err error
		if k.apiserver, err = startProcess(k.apiserverConfig); err != nil {
			t.Fatal(err)
		}
		err = k.apiserver.waitFor(60*time.Second, "is ready again", k.ready)
		if err == nil {
			return
		}
		// A connection of somebody else may have got the port in between.
		if try == 5 || !strings.Contains(err.Error(), "address already in use") {
			t.Fatal(err)
		}
	}
}

func (k *Kube) stop() {
	for _, p := range []*Process{k.apiserver, k.etcd} {
		if p != nil {
			p.Kill()
		}
	}
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
	token, err := k.requestToken(t.Context(), namespace, name, authenticationv1.TokenRequestSpec{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name+".kubeconfig")
	if err := k.writeKubeconfig(path, &clientcmdapi.AuthInfo{Token: token}); err != nil {
		t.Fatal(err)
	}
	return path
}

func (k *Kube) requestToken(ctx context.Context, namespace, serviceAccount string, spec authenticationv1.TokenRequestSpec) (string, error) {
	req, err := k.Client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, serviceAccount,
		&authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("requesting a token of %s/%s: %w", namespace, serviceAccount, err)
	}
	return req.Status.Token, nil
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
