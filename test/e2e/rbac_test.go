package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/test/apiserver"
)

// auditPolicy has the API server write down what our two accounts ask for, and what became of it.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: ["system:serviceaccount:chancery:chancery", "system:serviceaccount:chancery:chancery-init"]
- level: None
`

// TestDeployKubernetes: what lies in deploy/kubernetes is what it says, with a real API server. The manifests apply as they stand and
// have no field that Kubernetes does not know; their pods are such as the strictest pod security admits; and a server, and
// `authority init`, need each right that rbac.yaml gives them, and no other.
func TestDeployKubernetes(t *testing.T) {
	t.Parallel()
	k := &Kube{apiserver.Start(t, auditPolicy)}
	all := manifests(t)
	for _, o := range all {
		k.apply(t, o)
	}
	t.Run("strictness", func(t *testing.T) { k.misspelt(t, all) })
	t.Run("pod security", func(t *testing.T) { k.restricted(t, all) })
	t.Run("rights", func(t *testing.T) { k.rights(t, all) })
}

// manifests reads all objects of deploy/kubernetes, namespaces first.
func manifests(t *testing.T) (all []*unstructured.Unstructured) {
	t.Helper()
	dir := filepath.Join(repoRoot(t), "deploy", "kubernetes")
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{"init", "publishing", "signing"} { // none of these gives a right that rbac.yaml has
		more, err := filepath.Glob(filepath.Join(dir, folder, "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, more...)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for i, text := range strings.Split(string(data), "\n---\n") {
			o := new(unstructured.Unstructured)
			if err := yaml.UnmarshalStrict([]byte(text), &o.Object); err != nil {
				t.Fatalf("%s, object %d: %v", file, i, err)
			}
			all = append(all, o)
		}
	}
	slices.SortStableFunc(all, func(a, b *unstructured.Unstructured) int {
		return strings.Compare(fmt.Sprint(a.GetKind() != "Namespace"), fmt.Sprint(b.GetKind() != "Namespace"))
	})
	if len(all) < 15 {
		t.Fatalf("only %d objects in %s", len(all), dir)
	}
	return all
}

// one returns the object of a kind and name.
func one(t *testing.T, all []*unstructured.Unstructured, kind, name string, into any) {
	t.Helper()
	for _, o := range all {
		if o.GetKind() == kind && o.GetName() == name {
			data, err := json.Marshal(o.Object)
			if err == nil {
				err = json.Unmarshal(data, into)
			}
			if err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("there is no %s %s", kind, name)
}

func (k *Kube) resource(t *testing.T, o *unstructured.Unstructured) dynamic.ResourceInterface {
	t.Helper()
	groups, err := restmapper.GetAPIGroupResources(k.Client.Discovery())
	if err != nil {
		t.Fatal(err)
	}
	gvk := o.GroupVersionKind()
	mapping, err := restmapper.NewDiscoveryRESTMapper(groups).RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", k.AdminKubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if mapping.Scope.Name() == meta.RESTScopeNameRoot {
		return client.Resource(mapping.Resource)
	}
	return client.Resource(mapping.Resource).Namespace(o.GetNamespace())
}

// tryApply is `kubectl apply --server-side --validate=strict`.
func (k *Kube) tryApply(t *testing.T, o *unstructured.Unstructured, dryRun ...string) error {
	t.Helper()
	data, err := json.Marshal(o.Object)
	if err != nil {
		t.Fatal(err)
	}
	_, err = k.resource(t, o).Patch(t.Context(), o.GetName(), types.ApplyPatchType, data,
		metav1.PatchOptions{FieldManager: "e2e", FieldValidation: "Strict", DryRun: dryRun})
	return err
}

func (k *Kube) apply(t *testing.T, o *unstructured.Unstructured) {
	t.Helper()
	for _, dryRun := range [][]string{{metav1.DryRunAll}, nil, nil} { // the last time as for who applies it again
		if err := k.tryApply(t, o, dryRun...); err != nil {
			t.Fatalf("applying %s %s/%s: %v", o.GetKind(), o.GetNamespace(), o.GetName(), err)
		}
	}
}

// misspelt: a field that is misspelt would have been found.
func (k *Kube) misspelt(t *testing.T, all []*unstructured.Unstructured) {
	for _, o := range all {
		if o.GetKind() == "StatefulSet" {
			o = o.DeepCopy()
			if err := unstructured.SetNestedField(o.Object, true, "spec", "template", "spec", "hostNetwrk"); err != nil {
				t.Fatal(err)
			}
			if err := k.tryApply(t, o, metav1.DryRunAll); err == nil || !strings.Contains(err.Error(), "hostNetwrk") {
				t.Errorf("a misspelt field: %v", err)
			}
		}
	}
}

// restricted: the pods of StatefulSet and Job are admitted where restricted pod security is enforced, and would not be with less.
func (k *Kube) restricted(t *testing.T, all []*unstructured.Unstructured) {
	for _, of := range [][2]string{{"StatefulSet", "chancery"}, {"Job", "chancery-init"}} {
		var owner struct {
			Spec struct{ Template corev1.PodTemplateSpec }
		}
		one(t, all, of[0], of[1], &owner)
		spec := owner.Spec.Template.Spec
		try := func(spec corev1.PodSpec) error {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "try"}, Spec: spec}
			_, err := k.Client.CoreV1().Pods("chancery").Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err
		}
		if !*spec.Containers[0].SecurityContext.ReadOnlyRootFilesystem || len(spec.Containers) != 1 {
			t.Errorf("%s: the root filesystem can be written", of)
		}
		if of[0] == "StatefulSet" { // whose controller adds it
			spec.Volumes = append(spec.Volumes, corev1.Volume{Name: "data"})
		}
		if err := try(spec); err != nil {
			t.Errorf("%s: %v", of, err)
		}
		spec.SecurityContext.SeccompProfile = nil
		if err := try(spec); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `violates PodSecurity "restricted`) {
			t.Errorf("%s without a seccomp profile: %v", of, err)
		}
	}
}

// pod is a folder with what a pod of the StatefulSet has, and its user: owners and modes as the kubelet sets them, where the test may.
type pod struct {
	dir, config, binary string
	as                  *syscall.Credential // nil: the test's own
}

func newPod(t *testing.T) *pod {
	t.Helper()
	dir := SocketDir(t)
	p := &pod{dir: dir, config: filepath.Join(dir, "config", "server.yaml"), binary: ChanceryBinary(t)}
	key := filepath.Join(dir, "sealing", "state.key")
	writeFile(t, key, "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=\n", 0o400)
	if err := os.Mkdir(filepath.Join(dir, "data"), 0o700); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() != 0 {
		return p
	}
	const user = 65532
	p.as = &syscall.Credential{Uid: user, Gid: user, Groups: []uint32{user}}
	p.binary = copyTo(t, p.binary, filepath.Join(dir, "chancery"))
	writeFile(t, p.config, "", 0o644)
	for path, mode := range map[string]os.FileMode{
		filepath.Dir(dir): 0o711, dir: 0o755, filepath.Dir(p.config): 0o755,
		filepath.Dir(key): 0o750, key: 0o440, filepath.Join(dir, "data"): 0o770 | os.ModeSetgid,
	} {
		group := 0
		if path == key || path == filepath.Dir(key) || mode&os.ModeSetgid != 0 {
			group = user
		}
		if err := errors.Join(os.Chown(path, 0, group), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// run runs a command in the pod.
func (p *pod) run(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), p.binary, append(args, "-c", p.config)...)
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: p.as}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("chancery %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// configure writes the shipped config, for this machine and a service account.
func (p *pod) configure(t *testing.T, k *Kube, shipped, account string) {
	t.Helper()
	token, err := k.RequestToken(t.Context(), "chancery", account, authenticationv1.TokenRequestSpec{})
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(p.dir, account+".kubeconfig")
	if err := k.WriteKubeconfig(kubeconfig, &clientcmdapi.AuthInfo{Token: token}); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(p.dir, "apiserver.crt"), readFile(t, k.CAFile), 0o644)
	writeFile(t, kubeconfig, strings.ReplaceAll(readFile(t, kubeconfig), k.CAFile, filepath.Join(p.dir, "apiserver.crt")), 0o600)
	if p.as != nil {
		if err := os.Chown(kubeconfig, int(p.as.Uid), int(p.as.Gid)); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, p.config, deployedConfig(t, shipped, k.Issuer, kubeconfig, p.dir), 0o644)
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// rights runs `authority init` and a server with the rights of rbac.yaml, and looks into the API server's audit log for what
// they used of them.
func (k *Kube) rights(t *testing.T, all []*unstructured.Unstructured) {
	var shipped corev1.ConfigMap
	one(t, all, "ConfigMap", "chancery", &shipped)
	p := newPod(t)
	p.configure(t, k, shipped.Data["server.yaml"], "chancery-init")
	p.run(t, "authority", "init")
	k.uses(t, "chancery-init", grantsOf(t, all, "Role", "chancery-init"))

	p.configure(t, k, shipped.Data["server.yaml"], "chancery")
	config := p.config
	server := &Server{Dir: filepath.Join(p.dir, "data"), Config: config, Roots: filepath.Join(p.dir, "data", "roots.pem")}
	server.Process = StartProcess(t, ProcessConfig{Name: "server", Path: p.binary, Args: []string{"server", "-c", config}, Dir: "/", As: p.as})
	addrs := WaitAddrs(t, server.Process, filepath.Join(server.Dir, "addrs"))
	server.Listen, server.Metrics = addrs["listen"], addrs["metrics"]
	server.WaitReady(t)
	const ns = "app"
	k.EnsureNamespace(t, ns)
	pod := k.RunPod(t, ns, "web", "web-1", "node-a")
	ztunnel := k.RunPod(t, ns, "ztunnel", "ztunnel-1", "node-a")
	conn := server.Dial(t)
	token := k.BoundToken(t, pod, time.Hour, audience)
	server.WaitFor(t, 20*time.Second, "issues", func() error {
		_, err := Ask{Token: token}.Create(t.Context(), conn)
		return err
	})
	// What the watch does not vouch for is asked for: a pod that is not there, and what runs on an agent's node.
	gone := pod
	gone.Name, gone.UID = "gone", "8d0c1f3a-6a4e-4a86-9b1e-0d3a9e1f2c55"
	wantRefusal(t, conn, "a pod that is not there", Ask{Token: k.SignToken(t, k.Claims(gone, audience))}, codes.Unauthenticated, "POD_GONE")
	wantRefusal(t, conn, "an account that runs nowhere", Ask{
		Token: k.BoundToken(t, ztunnel, time.Hour, audience), Identity: fmt.Sprintf("spiffe://%s/ns/%s/sa/nobody", trustDomain, ns),
	}, codes.Unauthenticated, "POD_NOT_ON_NODE")
	MustRun(t, "revoke", "-c", config, pod.SPIFFEID(trustDomain), "--reason", "keyCompromise")
	server.WaitFor(t, 20*time.Second, "refuses the revoked identity", func() error {
		if _, err := (Ask{Token: token}).Create(t.Context(), conn); err == nil {
			return fmt.Errorf("issued")
		}
		return nil
	})
	p.healthy(t)
	grants := grantsOf(t, all, "Role", "chancery-server")
	maps.Copy(grants, grantsOf(t, all, "ClusterRole", "chancery-server"))
	k.uses(t, "chancery", grants)
	if err := server.Stop(t, 20*time.Second); err != nil {
		t.Errorf("the server ended with %v", err)
	}
	k.uses(t, "chancery", grants) // also on its way out
}

// deployedConfig is the shipped config, for this machine.
func deployedConfig(t *testing.T, shipped, issuer, kubeconfig, dir string) string {
	t.Helper()
	var c map[string]any
	if err := yaml.UnmarshalStrict([]byte(shipped), &c); err != nil {
		t.Fatal(err)
	}
	c["listen"], c["metrics"], c["addrFile"], c["serverNames"] = "127.0.0.1:0", "127.0.0.1:0", filepath.Join(dir, "data", "addrs"), []string{"localhost", "127.0.0.1"}
	for _, field := range []string{"auditLog", "issuanceLog"} {
		c[field] = strings.Replace(c[field].(string), "/var/lib/chancery", dir, 1)
	}
	state := c["state"].(map[string]any)
	state["sealingKey"] = strings.Replace(state["sealingKey"].(string), "/etc/chancery", dir, 1)
	state["replica"] = "chancery-0" // the pod's host name
	cluster := c["clusters"].([]any)[0].(map[string]any)
	cluster["issuer"], cluster["nodeAgents"] = issuer, []string{"app/ztunnel"}
	for _, c := range []map[string]any{state["kubernetes"].(map[string]any), cluster} {
		if c["inCluster"] != true {
			t.Fatalf("%v is not inCluster", c)
		}
		delete(c, "inCluster")
		c["kubeconfig"] = kubeconfig
	}
	data, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// healthy: doctor, in the pod, finds nothing wrong with how it is mounted.
func (p *pod) healthy(t *testing.T) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), p.binary, "doctor", "-c", p.config, "-o", "json")
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: p.as}
	out, _ := cmd.Output() // the exit code is that of the worst finding
	h := new(health)
	if err := json.Unmarshal(out, h); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, f := range h.Findings {
		if f.ID != "disk.low" && f.ID != "place.volatile" {
			t.Errorf("doctor: %+v", f)
		}
	}
}

// grant is one right: a verb on a resource, of one name or, where it is empty, any.
type grant struct{ role, group, resource, name, verb string }

func grantsOf(t *testing.T, all []*unstructured.Unstructured, kind, name string) map[grant]bool {
	t.Helper()
	var role struct{ Rules []rbacv1.PolicyRule }
	one(t, all, kind, name, &role)
	grants := map[grant]bool{}
	for _, r := range role.Rules {
		names := r.ResourceNames
		if names == nil {
			names = []string{""}
		}
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				for _, object := range names {
					for _, verb := range r.Verbs {
						grants[grant{fmt.Sprintf("%s %q", kind, name), group, resource, object, verb}] = true
					}
				}
			}
		}
	}
	return grants
}

// uses fails the test unless, according to the API server's audit log, an account was never refused anything, and has used each of
// its grants. It waits for the latter, since a server does some things now and then only.
func (k *Kube) uses(t *testing.T, account string, grants map[grant]bool) {
	t.Helper()
	Eventually(t, 60*time.Second, "all rights of "+account+" were used", func() error {
		unused := maps.Clone(grants)
		for _, e := range k.audited(t, account) {
			if e.Annotations["authorization.k8s.io/decision"] != "allow" || e.ResponseStatus.Code == 403 {
				t.Fatalf("%s was refused: %+v", account, e)
			}
			for g := range unused {
				if e.used(g) {
					delete(unused, g)
				}
			}
		}
		if len(unused) > 0 {
			return fmt.Errorf("not used: %v", slices.Collect(maps.Keys(unused)))
		}
		return nil
	})
}

// auditEvent is what we read of a line of the audit log.
type auditEvent struct {
	Verb       string
	RequestURI string
	User       struct{ Username string }
	ObjectRef  struct{ Resource, Namespace, Name, APIGroup, Subresource string }
	// ResponseStatus is that of the whole call.
	ResponseStatus struct{ Code int }
	Annotations    map[string]string
}

// used reports whether the API server allowed the call by this grant: it names the role that did.
func (e auditEvent) used(g grant) bool {
	o := e.ObjectRef
	return e.Verb == g.verb && o.APIGroup == g.group && o.Resource == g.resource && o.Subresource == "" && (g.name == "" || g.name == o.Name) &&
		strings.Contains(e.Annotations["authorization.k8s.io/reason"], " of "+g.role+" ")
}

func (k *Kube) audited(t *testing.T, account string) (all []auditEvent) {
	t.Helper()
	f, err := os.Open(k.AuditFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewReader(f); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil { // the last line may not be whole yet
			return all
		}
		var e auditEvent
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		if e.User.Username == "system:serviceaccount:chancery:"+account {
			all = append(all, e)
		}
	}
}
