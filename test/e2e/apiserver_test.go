package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// wantRefusal checks code and reason of a refused call.
func wantRefusal(t *testing.T, conn *grpc.ClientConn, what string, a Ask, code codes.Code, reason string) {
	t.Helper()
	_, err := a.Create(t.Context(), conn)
	if status.Code(err) != code || reasonOf(err) != reason {
		t.Errorf("%s: got %v (%s); want %s, %s", what, err, reasonOf(err), code, reason)
	}
}

func mustIssue(t *testing.T, conn *grpc.ClientConn, what string, a Ask) {
	t.Helper()
	if _, err := a.Create(t.Context(), conn); err != nil {
		t.Errorf("%s: %v (%s)", what, err, reasonOf(err))
	}
}

// TestD18APIServerGone: with the API server dead a running server goes on for the pods that it knows; of others it says that it
// cannot tell, never that they are not who they are.
func TestD18APIServerGone(t *testing.T) {
	t.Parallel()
	k := StartKube(t)
	ns := k.Namespace(t, "outage")
	known, deleted := k.RunPod(t, ns, "web", "web-1", "node-a"), k.RunPod(t, ns, "web", "web-2", "node-a")
	knownToken, deletedToken := k.BoundToken(t, known, time.Hour, audience), k.BoundToken(t, deleted, time.Hour, audience)
	always := k.Cluster(k.ServerKubeconfig(t, reviewTokens))
	always.Name, always.TokenReview = "always", "always"
	kubeconfig := k.ServerKubeconfig(t)
	server := StartServer(t, k.Cluster(kubeconfig), always)
	conn := server.Dial(t)
	local := func(token string) Ask { return Ask{Token: token, Cluster: "Kubernetes"} }
	mustIssue(t, conn, "API server up", local(knownToken))
	mustIssue(t, conn, "API server up, tokenReview always", Ask{Token: knownToken, Cluster: "always"})
	k.DeletePod(t, deleted)
	Eventually(t, 10*time.Second, "the watch has brought the deletion", func() error {
		if _, err := local(deletedToken).Create(t.Context(), conn); reasonOf(err) != "POD_GONE" {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})

	k.APIServer().Kill()
	late := Pod{Namespace: ns, Name: "late", ServiceAccount: "web", Node: "node-a", UID: "8d0c1f3a-6a4e-4a86-9b1e-0d3a9e1f2c55", ServiceAccountUID: known.ServiceAccountUID}
	for range 20 {
		mustIssue(t, conn, "known pod, token of before", local(knownToken))
		mustIssue(t, conn, "known pod, token not seen before", local(k.SignToken(t, k.Claims(known, audience))))
	}
	wantRefusal(t, conn, "pod not seen before", local(k.SignToken(t, k.Claims(late, audience))), codes.Unavailable, "POD_UNKNOWN")
	wantRefusal(t, conn, "pod deleted before", local(deletedToken), codes.Unauthenticated, "POD_GONE")
	wantRefusal(t, conn, "bad token", local(TamperToken(t, knownToken, "system:serviceaccount:kube-system:admin")), codes.Unauthenticated, "TOKEN_SIGNATURE")
	wantRefusal(t, conn, "tokenReview always", Ask{Token: knownToken, Cluster: "always"}, codes.Unavailable, "NOT_READY")

	// A server that is started now knows nothing: it must not be taken for one that refuses.
	blind := NewServer(t, serverYAML{Clusters: []clusterYAML{k.Cluster(kubeconfig)}})
	blind.Start(t)
	blindConn := blind.Dial(t)
	blind.WaitFor(t, 10*time.Second, "answers", func() error {
		_, err := local(knownToken).Create(t.Context(), blindConn)
		if reasonOf(err) != "NOT_READY" {
			return err
		}
		return nil
	})
	wantRefusal(t, blindConn, "server without keys", local(knownToken), codes.Unavailable, "NOT_READY")
	if _, err := httpGet(http.DefaultClient, "http://"+blind.Metrics+"/readyz"); err == nil {
		t.Error("a server that has no token keys says that it is ready")
	}

	k.RestartAPIServer(t)
	fresh := k.RunPod(t, ns, "web", "web-3", "node-a")
	mustIssue(t, conn, "pod made after the API server is back", local(k.BoundToken(t, fresh, time.Hour, audience)))
	mustIssue(t, conn, "tokenReview always, API server back", Ask{Token: knownToken, Cluster: "always"})
	blind.WaitReady(t)
	mustIssue(t, blindConn, "server started during the outage", local(knownToken))
}

// TestD18TokenReview: the API server's word is asked for when it should be, and only then.
func TestD18TokenReview(t *testing.T) {
	t.Parallel()
	k := SharedKube(t)
	ns := k.Namespace(t, "review")
	pod := k.RunPod(t, ns, "web", "web-1", "node-a")
	kubeconfig := k.ServerKubeconfig(t, reviewTokens)
	cluster := func(name, mode, kubeconfig string) clusterYAML {
		c := k.Cluster(kubeconfig)
		c.Name, c.TokenReview = name, mode
		return c
	}
	keyless := cluster("keyless", "fallback", kubeconfig)
	keyless.JWKSFile = otherKeys(t)
	server := StartServer(t, cluster("always", "always", kubeconfig), cluster("fallback", "fallback", kubeconfig), keyless,
		cluster("forbidden", "always", k.ServerKubeconfig(t)))
	conn := server.Dial(t)
	good := k.BoundToken(t, pod, time.Hour, audience)
	foreign := ForeignToken(t, "", k.Claims(pod, audience))
	forged := ForeignToken(t, k.KeyID(t), k.Claims(pod, audience))
	other := k.BoundToken(t, pod, time.Hour, "vault")
	expired := k.SignToken(t, k.Claims(pod, audience).Expired(time.Second))

	for _, c := range []struct {
		cluster, what, token string
		code                 codes.Code
		reason               string
		reviews              int
	}{
		{"always", "good", good, codes.OK, "", 1},
		{"always", "good again: nothing is remembered", good, codes.OK, "", 1},
		{"always", "foreign key", foreign, codes.Unauthenticated, "TOKEN_REVIEW_REFUSED", 1},
		{"always", "forged under the cluster's key ID", forged, codes.Unauthenticated, "TOKEN_REVIEW_REFUSED", 1},
		{"always", "other audience", other, codes.Unauthenticated, "TOKEN_AUDIENCE", 0},
		{"always", "expired", expired, codes.Unauthenticated, "TOKEN_EXPIRED", 0},
		{"always", "unsigned", UnsignedToken(t, k.Claims(pod, audience)), codes.Unauthenticated, "TOKEN_KEY_UNKNOWN", 0},
		{"fallback", "good", good, codes.OK, "", 0},
		{"fallback", "forged under the cluster's key ID", forged, codes.Unauthenticated, "TOKEN_SIGNATURE", 0},
		{"fallback", "other audience", other, codes.Unauthenticated, "TOKEN_AUDIENCE", 0},
		{"fallback", "expired", expired, codes.Unauthenticated, "TOKEN_EXPIRED", 0},
		{"fallback", "foreign key", foreign, codes.Unauthenticated, "TOKEN_REVIEW_REFUSED", 1},
		{"keyless", "good, of a key that the file does not have", good, codes.OK, "", 1},
		{"keyless", "good again: remembered", good, codes.OK, "", 0},
		{"keyless", "foreign key", foreign, codes.Unauthenticated, "TOKEN_REVIEW_REFUSED", 1},
		{"forbidden", "good, but the server may not ask", good, codes.Unavailable, "NOT_READY", 1},
	} {
		before := server.reviews(t, c.cluster)
		_, err := Ask{Token: c.token, Cluster: c.cluster}.Create(t.Context(), conn)
		if status.Code(err) != c.code || reasonOf(err) != c.reason {
			t.Errorf("%s, %s: got %v (%s); want %s %s", c.cluster, c.what, err, reasonOf(err), c.code, c.reason)
		}
		if n := server.reviews(t, c.cluster) - before; n != c.reviews {
			t.Errorf("%s, %s: the API server was asked %d times; want %d", c.cluster, c.what, n, c.reviews)
		}
	}
}

// reviews counts the TokenReviews that the server has asked for in a cluster.
func (s *Server) reviews(t *testing.T, cluster string) int {
	t.Helper()
	sum := 0
	for _, line := range s.Metric(t, "chancery_kube_token_review_seconds_count{") {
		var n int
		if labels, value, ok := strings.Cut(line, "} "); ok && strings.Contains(labels, fmt.Sprintf("cluster=%q", cluster)) {
			fmt.Sscan(value, &n)
			sum += n
		}
	}
	return sum
}

// otherKeys writes a key set that has nothing to do with any cluster here.
func otherKeys(t *testing.T) string {
	t.Helper()
	// The example key of RFC 7517, appendix A.1.
	set, err := json.Marshal(map[string]any{"keys": []any{map[string]string{
		"kty": "EC", "crv": "P-256", "kid": "1", "use": "sig",
		"x": "MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4", "y": "4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM",
	}}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "jwks.json")
	writeFile(t, path, string(set), 0o600)
	return path
}
