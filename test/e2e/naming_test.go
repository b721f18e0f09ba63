package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// network stands for what leads a client to a server: routes, DNS, ARP. Whoever controls it decides where connections go.
type network struct {
	Addr string // HOST:PORT that clients know
	to   atomic.Pointer[string]
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &network{Addr: l.Addr().String()}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go n.carry(c)
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return n
}

func (n *network) lead(to *Envoy) { n.to.Store(&to.Listen) }

func (n *network) carry(c net.Conn) {
	defer c.Close()
	up, err := net.Dial("tcp", *n.to.Load())
	if err != nil {
		return
	}
	defer up.Close()
	go func() {
		io.Copy(up, c)
		up.(*net.TCPConn).CloseWrite()
	}()
	io.Copy(c, up)
}

// namingRights are those of deploy/kubernetes/naming/rbac.yaml.
func namingRights(t *testing.T) []rbacv1.PolicyRule {
	t.Helper()
	text, _, _ := strings.Cut(readFile(t, filepath.Join(repoRoot(t), "deploy", "kubernetes", "naming", "rbac.yaml")), "\n---\n")
	var role rbacv1.ClusterRole
	if err := yaml.UnmarshalStrict([]byte(text), &role); err != nil {
		t.Fatal(err)
	}
	return role.Rules
}

// labelled creates a pod with a label, as RunPod does.
func (k *Kube) labelled(t *testing.T, namespace, account, name, app string) Pod {
	t.Helper()
	uid := k.ServiceAccount(t, namespace, account)
	pod, err := k.Client.CoreV1().Pods(namespace).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": app}},
		Spec:       corev1.PodSpec{ServiceAccountName: account, NodeName: "node-a", Containers: []corev1.Container{{Name: "app", Image: "example.invalid/app"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return Pod{Namespace: namespace, Name: name, ServiceAccount: account, Node: "node-a", UID: string(pod.UID), ServiceAccountUID: uid}
}

// service creates a Service that selects by the label.
func (k *Kube) service(t *testing.T, namespace, name, app string) {
	t.Helper()
	_, err := k.Client.CoreV1().Services(namespace).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Selector: map[string]string{"app": app}, Ports: []corev1.ServicePort{{Port: 443}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// names asks a server who may serve a service; the second are those that nothing names any more.
func (s *Server) names(t *testing.T, service string) (stay, leave []string, err error) {
	t.Helper()
	out, says, err := Run(t, "", "naming", "show", service, "--why", "-o", "json", "-c", s.Config)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %s", err, says)
	}
	var answer struct {
		Identities []struct {
			ID      string     `json:"id"`
			Because []string   `json:"because"`
			Until   *time.Time `json:"until"`
		} `json:"identities"`
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		t.Fatal(err)
	}
	for _, id := range answer.Identities {
		if len(id.Because) == 0 {
			t.Errorf("nothing is said of why %s may serve %s", id.ID, service)
		}
		if id.Until != nil {
			leave = append(leave, id.ID)
		} else {
			stay = append(stay, id.ID)
		}
	}
	return stay, leave, nil
}

func (s *Server) waitNames(t *testing.T, service string, stay, leave []string) {
	t.Helper()
	Eventually(t, 30*time.Second, fmt.Sprintf("%s may serve %s, and %s leaves", stay, service, leave), func() error {
		a, b, err := s.names(t, service)
		if err == nil && (!slices.Equal(a, stay) || !slices.Equal(b, leave)) {
			err = fmt.Errorf("it is %s and %s", a, b)
		}
		return err
	})
}

// serves checks that requests get to the server with that certificate.
func serves(t *testing.T, client *Envoy, pod Pod, what string) {
	t.Helper()
	Eventually(t, 30*time.Second, what, func() error {
		p, err := Request(client.Listen, true)
		if err != nil {
			return err
		}
		if len(p.Server.URIs) != 1 || p.Server.URIs[0].String() != pod.SPIFFEID(trustDomain) {
			return fmt.Errorf("%v answered", p.Server.URIs)
		}
		return nil
	})
}

// refuses checks that no request gets through, since the server is not one that may serve.
func refuses(t *testing.T, client *Envoy, stat, what string) {
	t.Helper()
	stat = "cluster.fresh.ssl." + stat
	before := client.Stats(t, "fail_verify")[stat]
	for range 5 {
		p, err := Request(client.Listen, true)
		if err == nil || !strings.Contains(err.Error(), "503") {
			t.Errorf("%s: got %+v, %v; want 503", what, p, err)
		}
	}
	if after := client.Stats(t, "fail_verify"); after[stat] < before+5 {
		t.Errorf("%s: %s is not counted: %v", what, stat, after)
	}
}

// TestSecureNaming is the example of seed 004: the service datastore is run by the infra team; the test team has a certificate that is as valid as any, and
// a network that leads to its server. Nobody but the infra team's servers gets a request, also while the service changes its account.
func TestSecureNaming(t *testing.T) {
	Tool(t, "envoy")
	k := SharedKube(t)
	infraNS, testNS, clientNS := k.Namespace(t, "infra"), k.Namespace(t, "test"), k.Namespace(t, "client")
	datastore, empty := infraNS+"/datastore", infraNS+"/empty"
	k.service(t, infraNS, "datastore", "datastore")
	k.service(t, infraNS, "empty", "nobody")
	k.service(t, testNS, "datastore", "datastore") // a service of this name in one's own namespace gives no right to another
	infra, forged := k.labelled(t, infraNS, "infra-team", "datastore-1", "datastore"), k.labelled(t, testNS, "test-team", "datastore-1", "datastore")
	app := k.RunPod(t, clientNS, "app", "app-1", "node-a")

	server := NewServer(t, serverYAML{
		IssuanceLog: "log", Clusters: []clusterYAML{k.Cluster(k.ServerKubeconfig(t, namingRights(t)...))}, Naming: map[string]any{"clusters": []any{map[string]any{"name": "Kubernetes"}}},
	})
	server.Start(t)
	server.WaitReady(t)
	agentOf := func(pod Pod) *Agent {
		return StartAgent(t, server, AgentConfig{Pod: pod, Token: k.BoundToken(t, pod, time.Hour, audience), TTL: time.Hour})
	}
	appAgent := agentOf(app)
	echo := StartEcho(t)
	serve := func(name string, pod Pod) *Envoy {
		e := StartServerEnvoy(t, EnvoyConfig{Name: name, SDSSocket: agentOf(pod).Socket, PeerURI: app.SPIFFEID(trustDomain), Upstream: echo})
		e.WaitReady(t, 20*time.Second)
		return e
	}
	legitimate, forger := serve("infra", infra), serve("forged", forged)
	road := newNetwork(t)
	client := func(name, context string) *Envoy {
		e := StartClientEnvoy(t, EnvoyConfig{Name: name, SDSSocket: appAgent.Socket, RootName: context, Upstream: road.Addr})
		e.WaitReady(t, 20*time.Second)
		return e
	}
	road.lead(legitimate)
	named, anyone, nobody := client("named", "service:"+datastore), client("anyone", "ROOTCA"), client("nobody", "service:"+empty)

	server.waitNames(t, datastore, []string{infra.SPIFFEID(trustDomain)}, nil)
	serves(t, named, infra, "the infra team's server serves datastore")
	road.lead(forger)
	serves(t, anyone, forged, "the test team's certificate is valid: who asks for no service in particular accepts it")
	refuses(t, named, "fail_verify_san", "the test team's server passes for datastore")
	road.lead(legitimate)
	serves(t, named, infra, "the infra team's server serves datastore again")
	refuses(t, nobody, "fail_verify_error", "a service that nobody may serve is served by the infra team's server")

	// The service changes its account: the new one may serve as soon as its pod is created, and the old one for a while after its last pod.
	next := k.labelled(t, infraNS, "infra-team-2", "datastore-2", "datastore")
	server.waitNames(t, datastore, []string{infra.SPIFFEID(trustDomain), next.SPIFFEID(trustDomain)}, nil)
	successor := serve("infra-2", next)
	load := StartLoad(t, LoadConfig{Addr: named.Listen, Rate: 50})
	Eventually(t, 20*time.Second, "requests are served", func() error {
		if r := load.Report(); r.OK < 20 {
			return errors.New(r.String())
		}
		return nil
	})
	road.lead(successor)
	serves(t, named, next, "the new account serves while the old one does")
	k.DeletePod(t, infra)
	server.waitNames(t, datastore, []string{next.SPIFFEID(trustDomain)}, []string{infra.SPIFFEID(trustDomain)})
	road.lead(legitimate)
	serves(t, named, infra, "the old account's server, which nothing names any more, serves in its grace")
	road.lead(successor)
	load.Stop()
	noneLost(t, load, "while the service changed its account")

	// Revoked, it has no grace. (Its certificate is on the CRL, too; so it is the list that is looked at.)
	MustRun(t, "revoke", infra.SPIFFEID(trustDomain), "-c", server.Config)
	server.waitNames(t, datastore, []string{next.SPIFFEID(trustDomain)}, nil)

	// Without a server agents go by what they were told.
	server.Kill()
	road.lead(forger)
	refuses(t, named, "fail_verify_san", "the test team's server passes for datastore while no server answers")
	road.lead(successor)
	serves(t, named, next, "the service's server serves while no server answers")
}
