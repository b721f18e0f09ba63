package kube

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net/http"
	"os"
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/test/apiserver"
	"github.com/chancery-project/chancery/test/process"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/publish"
)

const (
	istioMap = "istio-ca-root-cert"
	ownMap   = "chancery-roots"
)

var td = must(trust.ParseDomain("cluster.local"))

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// servers are the API servers of all tests that do them no harm, by flags.
var servers struct {
	sync.Mutex // guards the rest
	all        map[string]*apiserver.Server
	dirs       []string
}

func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = nil
	code := m.Run()
	for _, s := range servers.all {
		s.Stop()
	}
	for _, dir := range servers.dirs {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

func server(t testing.TB, args ...string) *apiserver.Server {
	t.Helper()
	servers.Lock()
	defer servers.Unlock()
	key := strings.Join(args, " ")
	if s := servers.all[key]; s != nil {
		return s
	}
	dir := must(os.MkdirTemp("", "publish-"))
	servers.dirs = append(servers.dirs, dir)
	s, err := apiserver.Launch(apiserver.Config{APIServer: process.Tool(t, "kube-apiserver"), Etcd: process.Tool(t, "etcd"), Dir: dir, Args: args})
	if err != nil {
		t.Fatal(err)
	}
	if servers.all == nil {
		servers.all = map[string]*apiserver.Server{}
	}
	servers.all[key] = s
	return s
}

func newRoot(name string) *x509.Certificate {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	return must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))))
}

func pemOf(roots ...*x509.Certificate) string {
	return string(must(trust.NewBundle(td, 1, roots)).PEM())
}

// world is a publisher with the rights of deploy/kubernetes and no others, and a label of its own for namespaces.
type world struct {
	*apiserver.Server
	t         testing.TB
	signer    string
	label     string
	names     []string // of its ConfigMaps: istio's and our own
	bundle    atomic.Pointer[trust.Bundle]
	drives    atomic.Bool
	publisher *Publisher
	registry  *prometheus.Registry
	stop      func()
}

// role is the shipped one for this test's names, without some verbs.
func (w *world) role(without ...string) []rbacv1.PolicyRule {
	data := must(os.ReadFile("../../../deploy/kubernetes/publishing/rbac.yaml"))
	role := new(rbacv1.ClusterRole)
	if err := yaml.UnmarshalStrict([]byte(strings.Split(string(data), "\n---\n")[0]), role); err != nil {
		w.t.Fatal(err)
	}
	to := map[string]string{
		"chancery.dev/workload": w.signer, "chancery.dev:workload:live": publish.BundleName(w.signer, publish.Live), "chancery.dev:workload:canary": publish.BundleName(w.signer, publish.Canary),
		istioMap: w.names[0], ownMap: w.names[1],
	}
	var rules []rbacv1.PolicyRule
	for _, r := range role.Rules {
		for i, name := range r.ResourceNames {
			if r.ResourceNames[i] = to[name]; to[name] == "" {
				w.t.Fatalf("%s is not known", name)
			}
		}
		var verbs []string
		for _, v := range r.Verbs {
			lacks := false
			for _, x := range without {
				lacks = lacks || x == r.Resources[0]+" "+v
			}
			if !lacks {
				verbs = append(verbs, v)
			}
		}
		if r.Verbs = verbs; len(verbs) > 0 {
			rules = append(rules, r)
		}
	}
	return rules
}

// account returns how the API server is reached by an account with these rights.
func account(t testing.TB, s *apiserver.Server, rules []rbacv1.PolicyRule) (*rest.Config, *http.Client) {
	t.Helper()
	ctx := t.Context()
	ns := must(s.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "chancery-"}}, metav1.CreateOptions{}))
	must(s.Client.CoreV1().ServiceAccounts(ns.Name).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "chancery"}}, metav1.CreateOptions{}))
	role := must(s.Client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{GenerateName: "publishing-"}, Rules: rules}, metav1.CreateOptions{}))
	must(s.Client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: ns.Name, Name: "chancery"}},
	}, metav1.CreateOptions{}))
	cfg := must(clientcmd.BuildConfigFromFlags("", s.AdminKubeconfig))
	cfg.BearerToken = must(s.RequestToken(ctx, ns.Name, "chancery", authenticationv1.TokenRequestSpec{}))
	cfg.ContentType, cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	return cfg, must(rest.HTTPClientFor(cfg))
}

var counter atomic.Int64

type option func(*world, *Config)

// newWorld makes a publisher and runs it.
func newWorld(t testing.TB, s *apiserver.Server, roots []*x509.Certificate, options ...option) *world {
	t.Helper()
	n := counter.Add(1)
	w := &world{
		Server: s, t: t, signer: fmt.Sprintf("chancery.dev/test-%d", n), label: fmt.Sprintf("test-%d", n), registry: prometheus.NewRegistry(),
		names: []string{fmt.Sprintf("%s-%d", istioMap, n), fmt.Sprintf("%s-%d", ownMap, n)},
	}
	w.set(1, roots...)
	w.drives.Store(true)
	c := Config{
		Bundle: func() (*trust.Bundle, error) { return w.bundle.Load(), nil }, Drives: w.drives.Load, Manager: "chancery-cluster.local", Signer: w.signer, Lead: 0,
		ConfigMaps: map[string][]Key{
			w.names[0]: {{"root-cert.pem", func(c publish.Contents) string { return c.Roots }}},
			w.names[1]: {{"roots.pem", func(c publish.Contents) string { return c.Roots }}, {"bundle.json", func(c publish.Contents) string { return c.Bundle }}},
		},
		Namespaces: must(labels.Parse("mesh=" + w.label)), Hint: time.Minute, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Metrics: w.registry,
	}
	for _, f := range options {
		f(w, &c)
	}
	if c.REST == nil {
		c.REST, c.HTTP = account(t, s, w.role())
	}
	w.publisher = must(New(c))
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = w.publisher.Run(ctx) })
	w.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(w.stop)
	return w
}

func (w *world) set(generation uint64, roots ...*x509.Certificate) {
	w.bundle.Store(must(trust.NewBundle(td, generation, roots)))
}

// namespace makes one that is selected, or not.
func (w *world) namespace(selected bool) string {
	w.t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "app-"}}
	if selected {
		ns.Labels = map[string]string{"mesh": w.label}
	}
	return must(w.Client.CoreV1().Namespaces().Create(w.t.Context(), ns, metav1.CreateOptions{})).Name
}

func (w *world) configMap(ns, name string) (*corev1.ConfigMap, error) {
	return w.Client.CoreV1().ConfigMaps(ns).Get(w.t.Context(), name, metav1.GetOptions{})
}

// has waits until a key of a ConfigMap has a value.
func (w *world) has(ns, name, key, value string) *corev1.ConfigMap {
	w.t.Helper()
	var c *corev1.ConfigMap
	process.Eventually(w.t, 40*time.Second, ns+"/"+name+" has what it should", func() (err error) {
		if c, err = w.configMap(ns, name); err != nil {
			return err
		}
		if c.Data[key] != value {
			return fmt.Errorf("%s is %.40q", key, c.Data[key])
		}
		return nil
	})
	return c
}

func (w *world) trusts(version, roots string) *certificatesv1.ClusterTrustBundle {
	w.t.Helper()
	var b *certificatesv1.ClusterTrustBundle
	process.Eventually(w.t, 40*time.Second, version+" has its roots", func() (err error) {
		if b, err = w.Client.CertificatesV1().ClusterTrustBundles().Get(w.t.Context(), publish.BundleName(w.signer, version), metav1.GetOptions{}); err != nil {
			return err
		}
		if b.Spec.TrustBundle != roots {
			return fmt.Errorf("it has %d bytes, want %d", len(b.Spec.TrustBundle), len(roots))
		}
		return nil
	})
	return b
}

// published waits until nothing is unpublished.
func (w *world) published() {
	w.t.Helper()
	process.Eventually(w.t, 40*time.Second, "all is published", func() error {
		if left := w.publisher.Unpublished(); len(left) > 0 {
			return errors.New(strings.Join(left, "; "))
		}
		return nil
	})
}

func (w *world) troubled(words ...string) {
	w.t.Helper()
	process.Eventually(w.t, 40*time.Second, "the trouble is told", func() error {
		err := w.publisher.Trouble()
		for _, x := range words {
			if err == nil || !strings.Contains(err.Error(), x) {
				return fmt.Errorf("%q is not in: %w", x, errors.Join(errors.New("trouble"), err))
			}
		}
		return nil
	})
}
