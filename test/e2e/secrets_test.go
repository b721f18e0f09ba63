package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/keystest"
	keyskube "github.com/chancery-project/chancery/ca/keys/kube"
)

// documented is an object that docs/keys.md shows: what a server is said to need is what it has here.
func documented(t *testing.T, kind string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(repoRoot(t), "docs", "keys.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, block := range strings.Split(string(data), "```") {
		if text, ok := strings.CutPrefix(block, "yaml\n"); ok && strings.Contains(text, "\nkind: "+kind+"\n") {
			if err := yaml.UnmarshalStrict([]byte(text), into); err != nil {
				t.Fatalf("the %s in docs/keys.md: %v", kind, err)
			}
			return
		}
	}
	t.Fatalf("docs/keys.md shows no %s", kind)
}

// keysKubeconfig makes the account that docs/keys.md describes, for keys in the given namespace, and writes a kubeconfig
// that acts as it.
func (k *Kube) keysKubeconfig(t *testing.T, namespace string) string {
	t.Helper()
	var role rbacv1.Role
	var binding rbacv1.RoleBinding
	documented(t, "Role", &role)
	documented(t, "RoleBinding", &binding)
	role.Namespace, binding.Namespace = namespace, namespace
	server := &binding.Subjects[0]
	server.Namespace = k.Namespace(t, server.Namespace)
	k.ServiceAccount(t, server.Namespace, server.Name)
	if _, err := k.Client.RbacV1().Roles(namespace).Create(t.Context(), &role, metav1.CreateOptions{}); err != nil {
		t.Fatalf("creating the Role of docs/keys.md: %v", err)
	}
	if _, err := k.Client.RbacV1().RoleBindings(namespace).Create(t.Context(), &binding, metav1.CreateOptions{}); err != nil {
		t.Fatalf("creating the RoleBinding of docs/keys.md: %v", err)
	}
	return k.accountKubeconfig(t, server.Namespace, server.Name)
}

// NamespaceKubeconfig creates a service account with the rules in its own namespace only, and writes a kubeconfig that acts
// as it.
func (k *Kube) NamespaceKubeconfig(t testing.TB, namespace, name string, rules ...rbacv1.PolicyRule) string {
	t.Helper()
	k.ServiceAccount(t, namespace, name)
	meta := metav1.ObjectMeta{Name: name, Namespace: namespace}
	if _, err := k.Client.RbacV1().Roles(namespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{}); err != nil {
		t.Fatalf("creating role %s/%s: %v", namespace, name, err)
	}
	_, err := k.Client.RbacV1().RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: meta,
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("binding role %s/%s: %v", namespace, name, err)
	}
	return k.accountKubeconfig(t, namespace, name)
}

func (k *Kube) accountKubeconfig(t testing.TB, namespace, name string) string {
	t.Helper()
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

func newSealer(t *testing.T) *keys.Sealer {
	t.Helper()
	s, err := keys.CreateSealer(filepath.Join(t.TempDir(), "state.key"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func openSecrets(t *testing.T, c keyskube.Config) *keyskube.Store {
	t.Helper()
	s, err := keyskube.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// secretOf returns the Secret of a key, as an admin sees it.
func (k *Kube) secretOf(t *testing.T, namespace, ref string) *corev1.Secret {
	t.Helper()
	s, err := k.Client.CoreV1().Secrets(namespace).Get(t.Context(), "chancery-key-"+strings.TrimPrefix(ref, "secret:"), metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// replace deletes a Secret and makes another one in its place, which is all that anybody can do to an immutable one.
func (k *Kube) replace(t *testing.T, s *corev1.Secret) {
	t.Helper()
	api := k.Client.CoreV1().Secrets(s.Namespace)
	if err := api.Delete(t.Context(), s.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.ResourceVersion, s.UID = "", ""
	if _, err := api.Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// TestSecretKeysContract runs the contract of all key stores against a real API server, with the rights that docs/keys.md
// gives and no others.
func TestSecretKeysContract(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	ns := k.Namespace(t, "keys")
	c := keyskube.Config{Namespace: ns, Kubeconfig: k.keysKubeconfig(t, ns), Sealer: newSealer(t)}
	keystest.Run(t, keystest.Config{
		Open: func(t *testing.T) keystest.Store { return openSecrets(t, c) }, Types: []ca.KeyType{ca.P256, ca.P384, ca.Ed25519, ca.RSA, ca.MLDSA65},
	})
}

// TestSecretKeysAtRest: what lies in the cluster is sealed, immutable and says whose it is.
func TestSecretKeysAtRest(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	ns := k.Namespace(t, "keys")
	c := keyskube.Config{Namespace: ns, Kubeconfig: k.keysKubeconfig(t, ns), Sealer: newSealer(t)}
	ref, _ := keystest.New(t, openSecrets(t, c), ca.P256)
	s := k.secretOf(t, ns, ref)
	if s.Immutable == nil || !*s.Immutable || s.Labels["app.kubernetes.io/managed-by"] != "chancery" {
		t.Errorf("immutable %v, labels %v", s.Immutable, s.Labels)
	}
	for field, v := range s.Data {
		if strings.Contains(string(v), "PRIVATE KEY") || field != "sealed" {
			t.Errorf("field %s holds a key in the clear", field)
		}
	}
	patch := []byte(`{"data":{"sealed":"AAAA"}}`)
	if _, err := k.Client.CoreV1().Secrets(ns).Patch(t.Context(), s.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}); err == nil {
		t.Error("an admin could change the Secret in place")
	}
	foreign := c
	foreign.Sealer = newSealer(t)
	if _, err := openSecrets(t, foreign).Open(t.Context(), ref); err == nil || !strings.Contains(err.Error(), "wrong sealing key") {
		t.Errorf("a server with another sealing key: %v", err)
	}
}

// TestSecretKeysPutThereByOthers: who can write Secrets cannot make a server use a key of theirs, nor one of its own under
// another name. What a backup puts back is used.
func TestSecretKeysPutThereByOthers(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	ns := k.Namespace(t, "keys")
	c := keyskube.Config{Namespace: ns, Kubeconfig: k.keysKubeconfig(t, ns), Sealer: newSealer(t)}
	first := openSecrets(t, c)
	ref, key := keystest.New(t, first, ca.P256)
	otherRef, _ := keystest.New(t, first, ca.P256)
	theirs := c
	theirs.Sealer = newSealer(t)
	theirRef, _ := keystest.New(t, openSecrets(t, theirs), ca.P256)
	k.replace(t, k.secretOf(t, ns, ref))
	if again, err := openSecrets(t, c).Open(t.Context(), ref); err != nil || keys.Check(again) != nil {
		t.Errorf("put back from a backup: %v", err)
	}
	for name, from := range map[string]string{"another key of ours": otherRef, "a key sealed by others": theirRef} {
		s := k.secretOf(t, ns, ref)
		s.Data = k.secretOf(t, ns, from).Data
		k.replace(t, s)
		if _, err := openSecrets(t, c).Open(t.Context(), ref); err == nil || !strings.Contains(err.Error(), ns+"/"+s.Name) || errors.Is(err, keys.ErrNotFound) {
			t.Errorf("%s under its name: %v", name, err)
		}
	}
	if err := keys.Check(key); err != nil {
		t.Errorf("the signer that was opened before: %v", err)
	}
}

// TestSecretKeysRights: what lacks is named, and a right of less than docs/keys.md gives is enough for what it allows.
func TestSecretKeysRights(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	ns := k.Namespace(t, "keys")
	sealer := newSealer(t)
	full := k.keysKubeconfig(t, ns)
	store := openSecrets(t, keyskube.Config{Namespace: ns, Kubeconfig: full, Sealer: sealer})
	ref, _ := keystest.New(t, store, ca.P256)
	other, _ := keystest.New(t, store, ca.P256)
	reader := openSecrets(t, keyskube.Config{Namespace: ns, Sealer: sealer, Kubeconfig: k.NamespaceKubeconfig(t, ns, "reader", rbacv1.PolicyRule{
		APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}, ResourceNames: []string{k.secretOf(t, ns, ref).Name},
	})})
	if key, err := reader.Open(t.Context(), ref); err != nil || keys.Check(key) != nil {
		t.Errorf("with the right to get this Secret only: %v", err)
	}
	_, opened := reader.Open(t.Context(), other)
	_, generated := reader.Generate(t.Context(), ca.P256)
	elsewhere := openSecrets(t, keyskube.Config{Namespace: "default", Kubeconfig: full, Sealer: sealer})
	_, outside := elsewhere.Generate(t.Context(), ca.P256)
	for what, err := range map[string]error{"opening": opened, "creating": generated, "deleting": reader.Delete(t.Context(), ref), "in another namespace, creating": outside} {
		if err == nil || errors.Is(err, keys.ErrNotFound) || !strings.Contains(err.Error(), "create, get and delete secrets in namespace") ||
			!strings.Contains(err.Error(), what[strings.LastIndex(what, " ")+1:]+" key ") {
			t.Errorf("%s without the right: %v", what, err)
		}
	}
	gone := openSecrets(t, keyskube.Config{Namespace: ns + "-gone", Kubeconfig: k.KubeconfigFor(t, ns, "everywhere", rbacv1.PolicyRule{
		APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"create"},
	}), Sealer: sealer})
	if _, err := gone.Generate(t.Context(), ca.P256); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("namespaces %q not found", ns+"-gone")) {
		t.Errorf("a namespace that is not there: %v", err)
	}
}

// TestServerWithKeysInSecrets: a server whose keys lie in Secrets starts with them, and goes on while the API server is away; one
// that is started meanwhile says what it waits for, and does not make another root.
func TestServerWithKeysInSecrets(t *testing.T) {
	t.Parallel()
	k := StartKube(t)
	ns := k.Namespace(t, "keys")
	kubeconfig := k.keysKubeconfig(t, ns)
	pod := k.RunPod(t, k.Namespace(t, "apps"), "web", "web-1", "node-a")
	ask := Ask{Token: k.BoundToken(t, pod, time.Hour, audience)}
	server := NewServer(t, serverYAML{
		Keys: map[string]any{"secrets": map[string]any{"namespace": ns, "kubeconfig": kubeconfig}}, Clusters: []clusterYAML{k.StaticCluster(t)},
	})
	list, err := k.Client.CoreV1().Secrets(ns).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/managed-by=chancery"})
	if err != nil || len(list.Items) != 2 {
		t.Fatalf("%d keys in the cluster after init: %v", len(list.Items), err)
	}
	server.Start(t)
	server.WaitReady(t)
	mustIssue(t, server.Dial(t), "first start", ask)
	server.Kill()
	server.Start(t)
	server.WaitReady(t)
	conn := server.Dial(t)
	mustIssue(t, conn, "started again", ask)

	k.APIServer().Kill()
	for range 20 {
		mustIssue(t, conn, "API server gone", ask)
	}
	server.Kill()
	_, stderr, err := Run(t, "", "server", "-c", server.Config)
	if err == nil || !strings.Contains(stderr, "in Secret "+ns+"/chancery-key-") || !strings.Contains(stderr, "connection refused") {
		t.Errorf("started without the API server: %v\n%s", err, stderr)
	}
	k.RestartAPIServer(t)
	server.Start(t)
	server.WaitReady(t)
	mustIssue(t, server.Dial(t), "API server back", ask)

	for _, s := range list.Items {
		if err := k.Client.CoreV1().Secrets(ns).Delete(t.Context(), s.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	server.Kill()
	if _, stderr, err = Run(t, "", "server", "-c", server.Config); err == nil || !strings.Contains(stderr, "there is no such key in the store") {
		t.Errorf("started without its keys (invariant 11): %v\n%s", err, stderr)
	}
}
