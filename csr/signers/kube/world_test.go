package kube

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr/evidence"
	pods2 "github.com/chancery-project/chancery/csr/kube"
	"github.com/chancery-project/chancery/csr/signers"
	"github.com/chancery-project/chancery/test/apiserver"
	"github.com/chancery-project/chancery/test/process"
	"github.com/chancery-project/chancery/trust"
)

const (
	podSigner   = "chancery.dev/workload"
	namedSigner = "chancery.dev/mesh"
	node        = "node-a"
	istiod      = "system:serviceaccount:istio-system:istiod"
)

var td = must(trust.ParseDomain("cluster.local"))

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// shared is the API server of all tests here, with the node authorizer and NodeRestriction: what a node asks for is checked.
var shared struct {
	sync.Mutex // guards the rest
	server     *apiserver.Server
	dir        string
	err        error
}

func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = nil
	code := m.Run()
	if shared.server != nil {
		shared.server.Stop()
	}
	os.RemoveAll(shared.dir)
	os.Exit(code)
}

func server(t testing.TB) *apiserver.Server {
	t.Helper()
	cfg := apiserver.Config{
		APIServer: process.Tool(t, "kube-apiserver"), Etcd: process.Tool(t, "etcd"),
		Args: []string{"--authorization-mode=Node", "--enable-admission-plugins=NodeRestriction"},
	}
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil && shared.err == nil {
		if shared.dir, shared.err = os.MkdirTemp("", "signers-"); shared.err == nil {
			cfg.Dir = shared.dir
			shared.server, shared.err = apiserver.Launch(cfg)
		}
	}
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server
}

// world is a signer for a namespace of its own, with the rights of deploy/kubernetes and no others.
type world struct {
	*apiserver.Server
	t                      testing.TB
	namespace              string
	podSigner, namedSigner string // of this test alone
	kubeconfig             string // of the account chancery/chancery of this test
	made                   *ca.Created
	issuer                 atomic.Pointer[ca.Issuer] // nil: not ready
	drives                 atomic.Bool
	logPath                string
	log                    *audit.Log
	profile                *ca.Profile
	ledger                 *evidence.Ledger
	controller             *Controller
	output                 *bytes.Buffer
}

var errAway = errors.New("opening the key of the issuer: the token is away")

// manifest reads the ClusterRole of a file in deploy/kubernetes.
func clusterRole(t testing.TB, file, name string) *rbacv1.ClusterRole {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../../../deploy/kubernetes", file))
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range strings.Split(string(data), "\n---\n") {
		role := new(rbacv1.ClusterRole)
		if err := yaml.Unmarshal([]byte(text), role); err == nil && role.Kind == "ClusterRole" && role.Name == name {
			return role
		}
	}
	t.Fatalf("%s has no ClusterRole %s", file, name)
	return nil
}

// role is the shipped one for this test's signer names.
func (w *world) role() *rbacv1.ClusterRole {
	role := clusterRole(w.t, "signing/rbac.yaml", "chancery-signing")
	for i := range role.Rules {
		for j, name := range role.Rules[i].ResourceNames {
			role.Rules[i].ResourceNames[j] = map[string]string{podSigner: w.podSigner, namedSigner: w.namedSigner}[name]
		}
	}
	return role
}

// account makes a service account with the given rights and returns a kubeconfig for it.
func account(t testing.TB, s *apiserver.Server, namespace string, roles ...*rbacv1.ClusterRole) string {
	t.Helper()
	ctx := t.Context()
	sa := must(s.Client.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{GenerateName: "server-"}}, metav1.CreateOptions{}))
	for _, r := range roles {
		role := must(s.Client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{GenerateName: r.Name + "-"}, Rules: r.Rules}, metav1.CreateOptions{}))
		must(s.Client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: role.Name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: sa.Name}},
		}, metav1.CreateOptions{}))
	}
	token := must(s.RequestToken(ctx, namespace, sa.Name, authenticationv1.TokenRequestSpec{}))
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := s.WriteKubeconfig(file, &clientcmdapi.AuthInfo{Token: token}); err != nil {
		t.Fatal(err)
	}
	return file
}

type option func(*world, *Config, *signers.Config)

// newWorld starts a controller.
func newWorld(t testing.TB, options ...option) *world {
	t.Helper()
	s := server(t)
	ns := must(s.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "app-"}}, metav1.CreateOptions{}))
	w := &world{Server: s, t: t, namespace: ns.Name, logPath: filepath.Join(t.TempDir(), "audit.jsonl"), output: new(bytes.Buffer)}
	w.podSigner, w.namedSigner = podSigner+"-"+ns.Name, namedSigner+"-"+ns.Name
	w.kubeconfig = account(t, s, ns.Name, clusterRole(t, "rbac.yaml", "chancery-server"), w.role())
	w.log = must(audit.Open(w.logPath))
	t.Cleanup(func() { w.log.Close() })
	w.made = must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID + 1, Log: w.log}))
	w.issuer.Store(w.newIssuer())
	w.drives.Store(true)
	w.profile = must(ca.NewProfile("workload", ca.ProfileConfig{}))
	w.ledger = evidence.New(evidence.Config{Life: w.profile.DefaultTTL(), MaxLife: w.profile.MaxTTL()})
	logger := slog.New(slog.NewTextHandler(t.Output(), nil))
	cluster := must(pods2.New(pods2.Config{
		Name: "Kubernetes", Issuer: s.Issuer, Audiences: []string{"istio-ca"}, Client: must(pods2.NewClient(w.kubeconfig)), Logger: logger, Metrics: prometheus.NewRegistry(),
	}))
	c := Config{Kubeconfig: w.kubeconfig, PodSigner: w.podSigner, NamedSigner: w.namedSigner, Drives: w.drives.Load, Logger: logger, Metrics: prometheus.NewRegistry()}
	sc := signers.Config{
		Domain: td, Profile: w.profile, Cluster: "Kubernetes", Alive: cluster.Alive, PodLife: 24 * time.Hour, Log: w.log, Sampler: &ca.Sampler{}, Ledger: w.ledger, Logger: logger,
		IssuerFor: func(id trust.ID) (*ca.Issuer, trust.ID, error) {
			if i := w.issuer.Load(); i != nil {
				return i, id, nil
			}
			return nil, id, errAway
		},
		IssuerOf: func(trust.ID) (*ca.Issuer, error) {
			if i := w.issuer.Load(); i != nil {
				return i, nil
			}
			return nil, errAway
		},
		Requesters: map[string]*ca.Profile{istiod: must(ca.NewProfile("requester", ca.ProfileConfig{IDPaths: []string{"/ns/" + w.namespace + "/sa/*"}}))},
	}
	for _, f := range options {
		f(w, &c, &sc)
	}
	w.controller = must(New(c, signers.New(sc)))
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = cluster.Run(ctx) })
	running.Go(func() { _ = w.controller.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return w
}

func (w *world) newIssuer() *ca.Issuer {
	return must(ca.NewIssuer(ca.IssuerConfig{
		Domain: td, Key: w.made.IssuerKey, Chain: []*x509.Certificate{w.made.Issuer}, Bundle: must(trust.NewBundle(td, 1, []*x509.Certificate{w.made.Root})), LogID: ca.MinLogID + 1, Log: w.log,
	}))
}

// as returns a client for a user whom the admin impersonates.
func (w *world) as(user string, groups ...string) *kubernetes.Clientset {
	w.t.Helper()
	cfg := must(clientcmd.BuildConfigFromFlags("", w.AdminKubeconfig))
	cfg.QPS, cfg.Burst = 1000, 1000
	cfg.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	return must(kubernetes.NewForConfig(cfg))
}

// pod makes a pod on the node that has a volume for a certificate of the signer.
func (w *world) pod(name string) *corev1.Pod {
	w.t.Helper()
	ctx := w.t.Context()
	if _, err := w.Client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Fatal(err)
	}
	if _, err := w.Client.CoreV1().ServiceAccounts(w.namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "web"}}, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Fatal(err)
	}
	return must(w.Client.CoreV1().Pods(w.namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: "web", AutomountServiceAccountToken: new(bool),
			Containers: []corev1.Container{{Name: "c", Image: "i", VolumeMounts: []corev1.VolumeMount{{Name: "svid", MountPath: "/svid"}}}},
			Volumes: []corev1.Volume{{Name: "svid", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{
				PodCertificate: &corev1.PodCertificateProjection{SignerName: w.podSigner, KeyType: "ECDSAP256", CredentialBundlePath: "svid.pem"},
			}}}}}},
		},
	}, metav1.CreateOptions{}))
}

func newKey() crypto.Signer { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }

func stub(key crypto.Signer, uris ...string) []byte {
	r := &x509.CertificateRequest{}
	for _, u := range uris {
		r.URIs = append(r.URIs, must(url.Parse(u)))
	}
	return must(x509.CreateCertificateRequest(rand.Reader, r, key))
}

// ask asks for a certificate for a pod as the kubelet does, as the user of its node.
func (w *world) ask(p *corev1.Pod, request []byte, change ...func(*certificatesv1.PodCertificateRequest)) *certificatesv1.PodCertificateRequest {
	w.t.Helper()
	ctx := w.t.Context()
	n := must(w.Client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}))
	sa := must(w.Client.CoreV1().ServiceAccounts(w.namespace).Get(ctx, "web", metav1.GetOptions{}))
	pcr := &certificatesv1.PodCertificateRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "req-"},
		Spec: certificatesv1.PodCertificateRequestSpec{
			SignerName: w.podSigner, PodName: p.Name, PodUID: p.UID, ServiceAccountName: "web", ServiceAccountUID: sa.UID, NodeName: node, NodeUID: n.UID, StubPKCS10Request: request,
		},
	}
	for _, f := range change {
		f(pcr)
	}
	kubelet := w.as("system:node:"+node, "system:nodes").CertificatesV1().PodCertificateRequests(w.namespace)
	var out *certificatesv1.PodCertificateRequest
	process.Eventually(w.t, 20*time.Second, "the API server admits the request", func() (err error) { // its informers may lag
		out, err = kubelet.Create(ctx, pcr, metav1.CreateOptions{})
		return err
	})
	return out
}

// get returns a request as it is now.
func (w *world) get(p *certificatesv1.PodCertificateRequest) *certificatesv1.PodCertificateRequest {
	w.t.Helper()
	return must(w.Client.CertificatesV1().PodCertificateRequests(p.Namespace).Get(w.t.Context(), p.Name, metav1.GetOptions{}))
}

// settled waits for a condition.
func (w *world) settled(p *certificatesv1.PodCertificateRequest, condition string) (out *certificatesv1.PodCertificateRequest) {
	w.t.Helper()
	process.Eventually(w.t, 60*time.Second, "the request is "+condition, func() error {
		out = w.get(p)
		if len(out.Status.Conditions) == 0 {
			return errors.New("it has no condition")
		}
		return nil
	})
	if c := out.Status.Conditions[0]; c.Type != condition {
		w.t.Fatalf("%s: %s (%s)", c.Type, c.Message, c.Reason)
	}
	return out
}

// chain reads and verifies a chain as any peer does who has the root alone.
func (w *world) chain(text []byte) *x509.Certificate {
	w.t.Helper()
	certs := must(trust.ParseCertificates(text))
	bundle := must(trust.NewBundle(td, 1, []*x509.Certificate{w.made.Root}))
	if _, _, err := trust.Verify(certs, trust.Only(bundle), time.Now()); err != nil {
		w.t.Fatalf("the chain does not verify: %v", err)
	}
	return certs[0]
}

func (w *world) auditLines(event, word string) (n int) {
	w.t.Helper()
	for _, line := range strings.Split(string(must(os.ReadFile(w.logPath))), "\n") {
		if strings.Contains(line, fmt.Sprintf(`"event":%q`, event)) && strings.Contains(line, word) {
			n++
		}
	}
	return n
}

func pemOf(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}
