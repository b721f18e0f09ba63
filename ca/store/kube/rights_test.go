package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/chancery-project/chancery/test/process"
)

// TestRightsThatLack: each call that is forbidden says which rights there should be; a watch that is forbidden says so once, and
// begins when it is allowed. What the rights are that do, test/e2e holds.
func TestRightsThatLack(t *testing.T) {
	t.Parallel()
	k := server(t)
	c := namespace(t, k)
	admin := create(t, c)
	ctx := t.Context()
	if _, err := k.Client.CoreV1().ServiceAccounts(c.Namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "server"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token, err := k.RequestToken(ctx, c.Namespace, "server", authenticationv1.TokenRequestSpec{})
	if err != nil {
		t.Fatal(err)
	}
	limited := c
	limited.Kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := k.WriteKubeconfig(limited.Kubeconfig, &clientcmdapi.AuthInfo{Token: token}); err != nil {
		t.Fatal(err)
	}
	const hint = "rights to get, watch and patch secrets chancery-state and chancery-state-notes and lease chancery-state in namespace "
	if _, err := Open(ctx, limited, nil); err == nil || !strings.Contains(err.Error(), hint+c.Namespace) {
		t.Errorf("opening without any right: %v", err)
	}
	roles := k.Client.RbacV1().Roles(c.Namespace)
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "server"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{"chancery-state", "chancery-state-notes"}, Verbs: []string{"get"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{"chancery-state"}, Verbs: []string{"get"}},
	}}
	if _, err := roles.Create(ctx, role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Client.RbacV1().RoleBindings(c.Namespace).Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "server"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "server"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: c.Namespace, Name: "server"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var s *Store
	process.Eventually(t, 20*time.Second, "the right to read counts", func() (err error) {
		s, err = Open(ctx, limited, logger(t))
		return err
	})
	defer s.Close()
	// Who may not create anything can still `create` what is all there.
	if again, err := Create(ctx, limited, nil); err != nil {
		t.Error(err)
	} else {
		again.Close()
	}
	for what, call := range map[string]func() error{
		"Create":   func() error { return s.Create(ctx, 1, []byte("x")) },
		"PutNote":  func() error { return s.PutNote(ctx, "a", []byte("x")) },
		"DropNote": func() error { return s.DropNote(ctx, "a") },
		"Hold":     func() error { _, _, err := s.Hold(ctx, "a", time.Second); return err },
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), hint) {
			t.Errorf("%s without the right to patch: %v", what, err)
		}
	}

	watched := newFile(t)
	s.log = watched.logger
	seen := make(chan struct{}, 1)
	go s.Watch(ctx, func() {
		if data, _, _ := s.Load(ctx); string(data) == "x" {
			select {
			case seen <- struct{}{}:
			default:
			}
		}
	})
	process.Eventually(t, 20*time.Second, "the watch fails", func() error { return watched.has(t, "watching the state fails", 2) })
	role.Rules[0].Verbs = append(role.Rules[0].Verbs, "watch")
	if _, err := roles.Update(ctx, role, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	process.Eventually(t, 60*time.Second, "the watch works", func() error { return watched.has(t, "watching the state works again", 2) })
	if err := watched.has(t, "watching the state fails", 2); err != nil {
		t.Errorf("it is said again and again: %v", err)
	}
	if err := admin.Create(ctx, 1, []byte("x")); err != nil {
		t.Fatal(err)
	}
	select {
	case <-seen:
	case <-time.After(30 * time.Second):
		t.Error("a change was not told")
	}
	if text, err := os.ReadFile(watched.path); err != nil || strings.Contains(string(text), token) {
		t.Errorf("the log has the token, or %v", err)
	}
}
