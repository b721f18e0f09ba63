package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/test/apiserver"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/naming"
)

func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = nil
	os.Exit(m.Run())
}

// bench is an API server, an engine, and a reader between them.
type bench struct {
	t       *testing.T
	server  *apiserver.Server
	dynamic *dynamic.DynamicClient
	engine  *naming.Engine
	reader  *Reader
	log     *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start makes a bench. The reader uses kubeconfig.
func start(t *testing.T, s *apiserver.Server, kubeconfig string) *bench {
	t.Helper()
	td, err := trust.ParseDomain("td")
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, server: s, log: new(lockedBuffer)}
	if b.engine, err = naming.New(naming.Config{RootNamespace: "istio-system", ClusterDomain: "cluster.local", Clusters: []naming.ClusterConfig{{Name: "east", Domain: td}}}); err != nil {
		t.Fatal(err)
	}
	admin, err := clientcmd.BuildConfigFromFlags("", s.AdminKubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	if b.dynamic, err = dynamic.NewForConfig(admin); err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ContentType, cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.reader, err = New(Config{REST: cfg, HTTP: client, Cluster: b.engine.Cluster("east"), Logger: slog.New(slog.NewTextHandler(b.log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.reader.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		if t.Failed() {
			t.Log(b.log)
		}
	})
	return b
}

// wait waits until a service's list is what it should be: "unread", "unknown", or the IDs without spiffe://, joined by spaces.
func (b *bench) wait(service, want string) {
	b.t.Helper()
	eventually(b.t, service+" is "+want, func() (string, bool) {
		ids, standing := b.engine.Naming().Lookup(service)
		got := map[trust.NamingStanding]string{trust.NamingUnread: "unread", trust.NamingUnknown: "unknown"}[standing]
		var all []string
		for _, id := range ids {
			all = append(all, strings.TrimPrefix(id.String(), "spiffe://"))
		}
		got += strings.Join(all, " ")
		return got, got == want
	})
}

func eventually(t *testing.T, what string, look func() (string, bool)) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		got, ok := look()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not so in a minute: %s; it is %s", what, got)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) namespaces(names ...string) {
	for _, name := range names {
		_, err := b.server.Client.CoreV1().Namespaces().Create(b.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		b.must(err)
	}
}

func (b *bench) pod(ns, name, account string, labels map[string]string) *corev1.Pod {
	_, err := b.server.Client.CoreV1().ServiceAccounts(ns).Create(b.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
	if err != nil && !strings.Contains(err.Error(), "already exists") {
		b.t.Fatal(err)
	}
	p, err := b.server.Client.CoreV1().Pods(ns).Create(b.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec:       corev1.PodSpec{ServiceAccountName: account, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}, metav1.CreateOptions{})
	b.must(err)
	return p
}

func (b *bench) service(ns, name string, spec corev1.ServiceSpec, annotations map[string]string) {
	if spec.Type != corev1.ServiceTypeExternalName {
		spec.Ports = []corev1.ServicePort{{Port: 80}}
	}
	_, err := b.server.Client.CoreV1().Services(ns).Create(b.t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}, Spec: spec}, metav1.CreateOptions{})
	b.must(err)
}

func (b *bench) definition(file string) {
	data, err := os.ReadFile("testdata/" + file)
	b.must(err)
	o := new(unstructured.Unstructured)
	b.must(yaml.Unmarshal(data, &o.Object))
	_, err = b.dynamic.Resource(definitions).Create(b.t.Context(), o, metav1.CreateOptions{})
	b.must(err)
}

var definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// put creates or replaces an object of Istio.
func (b *bench) put(kind, ns, name, spec string) {
	b.t.Helper()
	c := b.dynamic.Resource(istio.WithResource(strings.ToLower(strings.TrimSuffix(kind, "y")) + "ies")).Namespace(ns)
	o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": istio.String(), "kind": kind, "metadata": map[string]any{"name": name}}}
	var s any
	b.must(json.Unmarshal([]byte(spec), &s))
	o.Object["spec"] = s
	eventually(b.t, kind+" "+name+" is stored", func() (string, bool) { // a definition takes its time
		if old, err := c.Get(b.t.Context(), name, metav1.GetOptions{}); err == nil {
			o.SetResourceVersion(old.GetResourceVersion())
			_, err = c.Update(b.t.Context(), o, metav1.UpdateOptions{})
			return "not updated", err == nil
		}
		_, err := c.Create(b.t.Context(), o, metav1.CreateOptions{})
		return "not created", err == nil
	})
}

// TestReadsARealCluster: each kind of objects, from a real API server, with Istio's definitions that come later, go, and come again.
func TestReadsARealCluster(t *testing.T) {
	s := apiserver.Start(t, "")
	b := start(t, s, s.AdminKubeconfig)
	b.wait("shop/web", "unknown")
	b.wait("default/kubernetes", "") // the API server's own, without a selector

	b.namespaces("shop", "istio-system")
	web := map[string]string{"app": "web"}
	b.service("shop", "web", corev1.ServiceSpec{Selector: web}, nil)
	b.wait("shop/web", "")
	first := b.pod("shop", "web-1", "front", web)
	b.wait("shop/web", "td/ns/shop/sa/front")
	b.service("shop", "headless", corev1.ServiceSpec{Selector: web, ClusterIP: corev1.ClusterIPNone}, map[string]string{kubernetesAccounts: "vm,", canonicalAccounts: "spiffe://td/x"})
	b.wait("shop/headless", "td/ns/shop/sa/front td/ns/shop/sa/vm td/x")
	b.service("shop", "alias", corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "web.example.com"}, nil)
	b.wait("shop/alias", "")
	b.service("shop", "manual", corev1.ServiceSpec{}, nil)
	_, err := s.Client.DiscoveryV1().EndpointSlices("shop").Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "manual-1", Labels: map[string]string{discoveryv1.LabelServiceName: "manual"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"10.0.0.1"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: "web-1", UID: first.UID}},
			{Addresses: []string{"10.0.0.2"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "istio-system", Name: "web-1"}},
			{Addresses: []string{"10.0.0.3"}},
		},
	}, metav1.CreateOptions{})
	b.must(err)
	b.wait("shop/manual", "td/ns/shop/sa/front")

	// A pod that has ended is as one that is gone; that identity has its grace.
	job := b.pod("shop", "job-1", "job", web)
	b.wait("shop/web", "td/ns/shop/sa/front td/ns/shop/sa/job")
	job.Status.Phase = corev1.PodSucceeded
	_, err = s.Client.CoreV1().Pods("shop").UpdateStatus(t.Context(), job, metav1.UpdateOptions{})
	b.must(err)
	eventually(t, "the job's identity leaves", func() (string, bool) {
		ids := b.engine.Why("shop/web").Identities
		return ids[len(ids)-1].Because[0], len(ids) == 2 && !ids[1].Until.IsZero()
	})

	b.definition("serviceentries.yaml")
	b.definition("workloadentries.yaml")
	b.put("WorkloadEntry", "shop", "vm-1", `{"serviceAccount": "vm-account", "labels": {"app": "db"}, "address": "10.0.0.9"}`)
	b.put("ServiceEntry", "shop", "db", `{"hosts": ["db.example.com"], "subjectAltNames": ["spiffe://td/db", "db.example.com"], "workloadSelector": {"labels": {"app": "db"}}, "location": "MESH_INTERNAL"}`)
	b.wait("shop/db.example.com", "td/db td/ns/shop/sa/vm-account")
	b.put("ServiceEntry", "istio-system", "web", `{"hosts": ["web.shop.svc.cluster.local"], "endpoints": [{"address": "10.1.1.1", "serviceAccount": "mesh"}]}`)
	b.wait("shop/web", "td/ns/istio-system/sa/mesh td/ns/shop/sa/front td/ns/shop/sa/job")
	// One that cannot be read spoils no other, and says what it said before.
	b.put("ServiceEntry", "shop", "db", `{"hosts": "db.example.com"}`)
	b.put("ServiceEntry", "shop", "other", `{"hosts": ["other.example.com"]}`)
	b.wait("shop/other.example.com", "")
	b.wait("shop/db.example.com", "td/db td/ns/shop/sa/vm-account")
	if p := strings.Join(b.engine.Why("shop/db.example.com").Problems, "; "); !strings.Contains(p, "serviceentry shop/db: spec: json: cannot unmarshal string into Go struct field entrySpec.hosts") {
		t.Errorf("problems: %s", p)
	}
	for _, name := range []string{"serviceentries", "workloadentries"} {
		b.must(b.dynamic.Resource(definitions).Delete(t.Context(), name+".networking.istio.io", metav1.DeleteOptions{}))
	}
	eventually(t, "what Istio's objects say is forgotten", func() (string, bool) {
		w := b.engine.Why("shop/db.example.com")
		for _, id := range w.Identities {
			if id.Until.IsZero() {
				return id.ID.String() + " is named", false
			}
		}
		return "", true
	})
	if tr := b.reader.Trouble(0); len(tr) > 0 || strings.Contains(b.log.String(), "WARN") || strings.Contains(b.log.String(), "ERROR") {
		t.Errorf("definitions that are not there are no trouble: %q\n%s", tr, b.log)
	}
}

// TestKeepsWhatItKnows of a cluster that cannot be reached, says so, and catches up.
func TestKeepsWhatItKnows(t *testing.T) {
	s := apiserver.Start(t, "")
	b := start(t, s, s.AdminKubeconfig)
	b.wait("shop/web", "unknown")
	b.namespaces("shop")
	web := map[string]string{"app": "web"}
	b.service("shop", "web", corev1.ServiceSpec{Selector: web}, nil)
	b.pod("shop", "web-1", "front", web)
	b.wait("shop/web", "td/ns/shop/sa/front")
	s.APIServer().Kill()
	eventually(t, "trouble with all kinds is told", func() (string, bool) {
		all := strings.Join(b.reader.Trouble(0), "\n")
		return all, strings.Contains(all, "pods cannot be read since ") && strings.Contains(all, "services cannot") && strings.Contains(all, "endpointslices cannot")
	})
	if all := b.reader.Trouble(time.Hour); len(all) > 0 {
		t.Errorf("for an hour: %q", all)
	}
	b.wait("shop/web", "td/ns/shop/sa/front")
	s.RestartAPIServer(t)
	b.pod("shop", "web-2", "back", web)
	b.wait("shop/web", "td/ns/shop/sa/back td/ns/shop/sa/front")
	eventually(t, "the trouble is over", func() (string, bool) {
		all := strings.Join(b.reader.Trouble(0), "\n")
		return all, all == ""
	})
	if n := strings.Count(b.log.String(), "level=WARN"); n > 10 || !strings.Contains(b.log.String(), "can be followed again") {
		t.Errorf("%d warnings:\n%s", n, b.log)
	}
}

// TestNothingWithoutRights: a reader who may read nothing knows nothing, and says what it lacks. With what deploy/kubernetes/naming/rbac.yaml
// gives it reads all, and with one right less it does not.
func TestNothingWithoutRights(t *testing.T) {
	s := apiserver.Start(t, "")
	_, err := s.Client.CoreV1().ServiceAccounts("default").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "naming"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	token, err := s.RequestToken(t.Context(), "default", "naming", authenticationv1.TokenRequestSpec{})
	if err != nil {
		t.Fatal(err)
	}
	file := t.TempDir() + "/kubeconfig"
	if err := s.WriteKubeconfig(file, &clientcmdapi.AuthInfo{Token: token}); err != nil {
		t.Fatal(err)
	}
	b := start(t, s, file)
	for _, name := range []string{"serviceentries.yaml", "workloadentries.yaml"} {
		b.definition(name)
	}
	lacks := func(resources ...string) {
		eventually(t, strings.Join(resources, " and ")+" cannot be read", func() (string, bool) {
			all := b.reader.Trouble(0)
			ok := len(all) == len(resources)
			for i := range all {
				ok = ok && strings.HasPrefix(all[i], resources[i]+" cannot be read since ") && strings.Contains(all[i], "is forbidden: User")
			}
			return strings.Join(all, "\n"), ok
		})
	}
	lacks("endpointslices", "pods", "serviceentries", "services", "workloadentries")
	b.wait("default/kubernetes", "unread")

	data, err := os.ReadFile("../../../deploy/kubernetes/naming/rbac.yaml")
	b.must(err)
	roleText, bindingText, _ := strings.Cut(string(data), "\n---\n")
	var role rbacv1.ClusterRole
	var binding rbacv1.ClusterRoleBinding
	b.must(yaml.UnmarshalStrict([]byte(roleText), &role))
	b.must(yaml.UnmarshalStrict([]byte(bindingText), &binding))
	binding.Subjects = []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: "naming"}}
	whole := role.DeepCopy()
	role.Rules[0].Resources = []string{"services"}
	_, err = s.Client.RbacV1().ClusterRoles().Create(t.Context(), &role, metav1.CreateOptions{})
	b.must(err)
	_, err = s.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), &binding, metav1.CreateOptions{})
	b.must(err)
	lacks("pods")
	b.wait("default/kubernetes", "unread") // all but one is not enough
	_, err = s.Client.RbacV1().ClusterRoles().Update(t.Context(), whole, metav1.UpdateOptions{})
	b.must(err)
	lacks()
	b.wait("default/kubernetes", "")
}
