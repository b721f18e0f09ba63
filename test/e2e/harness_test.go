package e2e

import (
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// The tests of this file check the harness itself: a test bench that is not what it seems proves nothing.

func TestHarnessProcessEndsWithItsGroup(t *testing.T) {
	p := StartProcess(t, ProcessConfig{Name: "sh", Path: "/bin/sh", Args: []string{"-c", "sleep 300 & echo child=$!; wait"}})
	p.WaitLog(t, 10*time.Second, "child=")
	p.Kill()
	if exited, err := p.Exited(); !exited || err == nil {
		t.Errorf("after Kill: exited %v, %v; want true and the signal", exited, err)
	}
	if err := p.Signal(syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signal to an ended process: %v, want %v", err, os.ErrProcessDone)
	}
	Eventually(t, 10*time.Second, "the group is gone", func() error {
		if err := syscall.Kill(-p.PID(), 0); err == nil {
			return errors.New("a member is left")
		}
		return nil
	})
}

func TestHarnessKubeTokens(t *testing.T) {
	k := SharedKube(t)
	pod := k.RunPod(t, k.Namespace(t, "tokens"), "web", "web-1", "node-a")
	good := k.BoundToken(t, pod, time.Hour, "istio-ca")
	if !strings.Contains(string(k.JWKS(t)), k.KeyID(t)) {
		t.Errorf("JWKS %s does not list key id %s", k.JWKS(t), k.KeyID(t))
	}
	// A token that the harness signs must look like a real one, or tests with bad ones would prove little.
	real, own := TokenClaims(t, good), k.Claims(pod, "istio-ca")
	for _, claim := range []string{"iss", "sub", "aud", "kubernetes.io"} {
		want, _ := json.Marshal(real[claim])
		if got, _ := json.Marshal(own[claim]); string(got) != string(want) {
			t.Errorf("claim %s is %s, in a real token %s", claim, got, want)
		}
	}

	for _, c := range []struct {
		name, token string
		ok          bool
	}{
		{"from TokenRequest", good, true},
		{"signed by the harness", k.SignToken(t, own), true},
		{"expired", k.SignToken(t, k.Claims(pod, "istio-ca").Expired(time.Minute)), false},
		{"other audience", k.SignToken(t, k.Claims(pod, "other")), false},
		{"tampered", TamperToken(t, good, "system:serviceaccount:kube-system:admin"), false},
		{"foreign key under the cluster's key id", ForeignToken(t, k.KeyID(t), own), false},
		{"foreign key", ForeignToken(t, "", own), false},
		{"unsigned", UnsignedToken(t, own), false},
	} {
		if ok, why := k.review(t, c.token, "istio-ca"); ok != c.ok {
			t.Errorf("%s: the API server says authenticated=%v (%s), want %v", c.name, ok, why, c.ok)
		}
	}

	k.DeletePod(t, pod)
	// A token not seen before: the API server remembers its verdict on a token for 10 s.
	if ok, _ := k.review(t, k.SignToken(t, k.Claims(pod, "istio-ca")), "istio-ca"); ok {
		t.Error("a token of a deleted pod is accepted")
	}
}

// review asks the API server what it thinks of a token.
func (k *Kube) review(t testing.TB, token, audience string) (ok bool, why string) {
	t.Helper()
	r, err := k.Client.AuthenticationV1().TokenReviews().Create(t.Context(), &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("reviewing a token: %v", err)
	}
	return r.Status.Authenticated, r.Status.Error
}

func TestHarnessKubeconfigHoldsItsRulesOnly(t *testing.T) {
	k := SharedKube(t)
	ns := k.Namespace(t, "rbac")
	pod := k.RunPod(t, ns, "web", "web-1", "node-a")
	path := k.KubeconfigFor(t, ns, "reader", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}})
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Pods(ns).Get(t.Context(), pod.Name, metav1.GetOptions{}); err != nil {
		t.Errorf("reading a pod: %v", err)
	}
	if _, err := client.CoreV1().Secrets(ns).List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("reading secrets: %v, want Forbidden", err)
	}
}

// TestHarnessEnvoyPair proves with certificates from files that the pair of Envoys talks mTLS, shows both certificates, and
// refuses a peer under another SPIFFE ID on either side.
func TestHarnessEnvoyPair(t *testing.T) {
	const web, api, other = "spiffe://cluster.local/ns/foo/sa/web", "spiffe://cluster.local/ns/foo/sa/api", "spiffe://cluster.local/ns/foo/sa/other"
	Tool(t, "envoy")
	ca, err := newTestCA("envoy e2e CA")
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]*certFiles{}
	for name, id := range map[string]string{"web": web, "api": api, "other": other} {
		f, err := ca.issue(t.TempDir(), name, pkix.Name{}, id)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = &f
	}
	server := StartServerEnvoy(t, EnvoyConfig{Name: "server", Files: files["api"], PeerURI: web, Upstream: StartEcho(t)})
	server.WaitReady(t, 20*time.Second)
	client := func(name, cert, peer string) *Envoy {
		e := StartClientEnvoy(t, EnvoyConfig{Name: name, Files: files[cert], PeerURI: peer, Upstream: server.Listen})
		e.WaitReady(t, 20*time.Second)
		return e
	}

	good := client("client", "web", api)
	load := StartLoad(t, LoadConfig{Addr: good.Listen})
	Eventually(t, 20*time.Second, "100 requests have passed on kept and on fresh connections", func() error {
		if r := load.Report(); r.KeptOK < 100 || r.FreshOK < 50 {
			return errors.New(r.String())
		}
		return nil
	})
	report := load.Stop()
	t.Log(report)
	if report.Failed > 0 || len(report.ClientSerials) != 1 || len(report.ServerSerials) != 1 {
		t.Errorf("want no failed request and one serial on each side: %v", report)
	}
	passage, err := Request(good.Listen, true)
	if err != nil || !strings.Contains(passage.XFCC, "URI="+web) {
		t.Errorf("echo saw %q, %v; want URI=%s", passage.XFCC, err, web)
	}
	for e, serial := range map[*Envoy]string{good: passage.ClientSerial, server: passage.ServerSerial} {
		chains, roots := e.Certs(t)
		if len(chains) == 0 || len(roots) == 0 || chains[0].Serial != serial {
			t.Errorf("Envoy %s holds %+v, roots %+v; on the wire was serial %s", e.Name, chains, roots, serial)
		}
	}
	handshakes, fresh := server.Stats(t, "ssl.handshake")["listener.127.0.0.1_0.ssl.handshake"], uint64(report.FreshOK)
	if handshakes < fresh || handshakes > fresh+20 {
		t.Errorf("%d handshakes for %d fresh connections; want each its own and few more: %v", handshakes, fresh, server.Stats(t, "handshake"))
	}

	if _, err := Request(client("wrong-server", "web", other).Listen, false); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("a server under another ID than expected: %v, want 503", err)
	}
	if _, err := Request(client("wrong-client", "other", api).Listen, false); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("a client under an ID that the server does not admit: %v, want 503", err)
	}
	if n := server.Stats(t, "ssl.fail_verify_san"); n["listener.127.0.0.1_0.ssl.fail_verify_san"] == 0 {
		t.Errorf("the server counts no refused SAN: %v", n)
	}
}
