package csr_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/structpb"
	istio "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/trust"
)

const failure = "request authenticate failure" // what Istio's clients are told, whatever it was

// expect runs a call against both APIs. An empty reason wants a certificate for the ID; otherwise the caller must not
// be authenticated.
func (w *world) expect(t *testing.T, c call, id, reason string) {
	t.Helper()
	resp, err := w.istio(c, ask(""))
	own, nativeErr := w.native(c, askNative(""))
	if reason != "" {
		wantStatus(t, err, codes.Unauthenticated, reason, failure)
		wantStatus(t, nativeErr, codes.Unauthenticated, reason, "the caller could not be authenticated: "+reason)
		return
	}
	if err != nil || nativeErr != nil {
		t.Fatalf("refused: %v; %v", err, nativeErr)
	}
	leafOf(t, resp.GetCertChain(), id)
	if got := own.GetResults()[0].GetCertificate().GetSpiffeId(); got != id {
		t.Errorf("the native API issued %q, want %s; refusal %v", got, id, own.GetResults()[0].GetRefusal())
	}
}

func TestAuthenticateByToken(t *testing.T) {
	w := newWorld(t)
	good := token(claims{})
	for _, tc := range []struct {
		name   string
		call   call
		reason string
	}{
		{"valid", bearer(good), ""},
		{"scheme in small letters", call{headers: []string{"authorization", "bearer " + good}}, ""},
		{"nothing", call{}, csr.ReasonNoCredential},
		{"two tokens", bearer(good, "authorization", "Bearer "+good), csr.ReasonTokenMalformed},
		{"no scheme", call{headers: []string{"authorization", good}}, csr.ReasonTokenMalformed},
		{"another scheme", call{headers: []string{"authorization", "Basic " + good}}, csr.ReasonTokenMalformed},
		{"scheme alone", call{headers: []string{"authorization", "Bearer "}}, csr.ReasonTokenMalformed},
		{"two spaces", call{headers: []string{"authorization", "Bearer  " + good}}, csr.ReasonTokenMalformed},
		{"no token", bearer("x"), csr.ReasonTokenMalformed},
		{"too long", bearer(strings.Repeat("x", 20<<10)), csr.ReasonTokenMalformed},
		{"bad signature", bearer(token(claims{key: "wrong"})), csr.ReasonTokenSignature},
		{"unknown key", bearer(token(claims{kid: "other"})), csr.ReasonTokenKey},
		{"audience of somebody else", bearer(token(claims{audience: "vault"})), csr.ReasonTokenAudience},
		{"expired", bearer(token(claims{expires: -time.Second})), csr.ReasonTokenExpired},
		{"a name that no SPIFFE ID has", bearer(token(claims{namespace: "..", account: "web"})), csr.ReasonTokenMalformed},
	} {
		t.Run(tc.name, func(t *testing.T) { w.expect(t, tc.call, webURI, tc.reason) })
	}
}

func TestD18ClusterComesFromTheHeader(t *testing.T) {
	one := newWorld(t)
	two := newWorld(t, func(w *world, c *csr.Config) {
		c.Clusters["west"] = csr.ClusterConfig{Cluster: newKubeCluster(t, "west")}
	})
	nameless := newWorld(t, func(w *world, c *csr.Config) { c.Clusters[""] = c.Clusters["Kubernetes"] })
	good, west := token(claims{}), token(claims{kid: "west"})
	for _, tc := range []struct {
		name   string
		w      *world
		call   call
		reason string
	}{
		{"absent with one cluster", one, bearer(good), ""},
		{"empty with one cluster", one, bearer(good, "clusterid", ""), ""},
		{"right with one cluster", one, bearer(good, "clusterid", "Kubernetes"), ""},
		{"Istio's agents write it ClusterID", one, bearer(good, "ClusterID", "Kubernetes"), ""},
		{"unknown with one cluster", one, bearer(good, "clusterid", "kubernetes"), csr.ReasonCluster},
		{"twice", one, bearer(good, "clusterid", "Kubernetes", "clusterid", "Kubernetes"), csr.ReasonCluster},
		{"absent with two clusters", two, bearer(good), csr.ReasonCluster},
		{"empty with two clusters", two, bearer(good, "clusterid", ""), csr.ReasonCluster},
		{"first of two", two, bearer(good, "clusterid", "Kubernetes"), ""},
		{"second of two", two, bearer(west, "clusterid", "west"), ""},
		{"absent, and a cluster has no name", nameless, bearer(good), csr.ReasonCluster},
		{"only the named cluster's keys verify", two, bearer(west, "clusterid", "Kubernetes"), csr.ReasonTokenKey},
	} {
		t.Run(tc.name, func(t *testing.T) { tc.w.expect(t, tc.call, webURI, tc.reason) })
	}
}

// ended changes an identity so that it has ended.
func ended(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Second)
}

func TestD16RenewalByCertificate(t *testing.T) {
	w := newWorld(t, func(w *world, c *csr.Config) {
		c.Clusters["west"] = csr.ClusterConfig{Cluster: newKubeCluster(t, "west"), MaxRenewalAge: time.Hour}
	})
	aged := func(cluster string, age time.Duration) *ca.Attestation {
		a := fresh(cluster)
		a.Time = a.Time.Add(-age)
		return a
	}
	good := w.svid(webURI, fresh("Kubernetes"))
	issuer := w.made.IssuerKey
	expired := w.resign(good, issuer, ended)
	foreign := newWorld(t).svid(webURI, fresh("Kubernetes"))
	otherDomain := w.resign(good, issuer, func(c *x509.Certificate) {
		c.URIs[0].Host = "other.test"
		c.ExtraExtensions = withoutSAN(c.Extensions)
	})
	garbled := w.resign(good, issuer, func(c *x509.Certificate) {
		last := &c.ExtraExtensions[len(c.ExtraExtensions)-1]
		last.Value = append(bytes.Clone(last.Value), 0)
	})
	for _, tc := range []struct {
		name   string
		call   call
		reason string
	}{
		{"valid", shows(good), ""},
		{"its cluster named", shows(good, "clusterid", "Kubernetes"), ""},
		{"just young enough", shows(w.svid(webURI, aged("Kubernetes", csr.DefaultMaxRenewalAge-time.Minute))), ""},
		{"another cluster named", shows(good, "clusterid", "west"), csr.ReasonCluster},
		{"an unknown cluster named", shows(good, "clusterid", "east"), csr.ReasonCluster},
		{"its cluster is not configured any more", shows(w.svid(webURI, fresh("east"))), csr.ReasonCluster},
		{"expired", shows(expired), csr.ReasonSVID},
		{"not yet valid", shows(w.resign(good, issuer, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) })), csr.ReasonSVID},
		{"signed by nobody we know", shows(w.resign(good, newKey(), func(*x509.Certificate) {})), csr.ReasonSVID},
		{"of another root", shows(foreign), csr.ReasonSVID},
		{"of a foreign trust domain", shows(otherDomain), csr.ReasonSVID},
		{"D15 the server's own certificate", shows(w.own), csr.ReasonSVID},
		{"not a workload's path", shows(w.svid("spiffe://cluster.local/vm/1", fresh("Kubernetes"))), csr.ReasonSVID},
		{"without an attestation", shows(w.svid(webURI, nil)), csr.ReasonSVID},
		{"with an attestation that does not parse", shows(garbled), csr.ReasonSVID},
		{"attested too long ago", shows(w.svid(webURI, aged("Kubernetes", csr.DefaultMaxRenewalAge+time.Minute))), csr.ReasonAttestationAge},
		{"attested too long ago for its cluster", shows(w.svid(webURI, aged("west", time.Hour+time.Minute))), csr.ReasonAttestationAge},
		{"attested long ago, and a fresh token", call{bearer(token(claims{}), "clusterid", "Kubernetes").headers, w.svid(webURI, aged("Kubernetes", 48*time.Hour))}, ""},

		{"bad token, valid SVID", call{bearer(token(claims{expires: -time.Hour}), "clusterid", "Kubernetes").headers, good}, ""},
		{"token without a cluster among two, valid SVID", call{bearer(token(claims{})).headers, good}, ""},
		{"token that is none, valid SVID", call{bearer("x").headers, good}, ""},
		{"bad token, expired SVID: the token's refusal counts", call{bearer(token(claims{key: "wrong"}), "clusterid", "Kubernetes").headers, expired}, csr.ReasonTokenSignature},
		{"two tokens are no fallback", call{bearer("x", "authorization", "Bearer y").headers, good}, csr.ReasonTokenMalformed},
		{"good token, expired SVID", call{bearer(token(claims{}), "clusterid", "Kubernetes").headers, expired}, ""},
		{"good token, somebody else's SVID: the token counts", call{bearer(token(claims{}), "clusterid", "Kubernetes").headers, w.svid(dbURI, fresh("Kubernetes"))}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) { w.expect(t, tc.call, webURI, tc.reason) })
	}
}

// What is wrong with tokens shows while certificates still stand in for them.
func TestD16TokenThatACertificateStoodInForIsLogged(t *testing.T) {
	w := newWorld(t)
	good := w.svid(webURI, fresh("Kubernetes"))
	w.expect(t, shows(good), webURI, "")
	if log := w.output.String(); strings.Contains(log, "token refused") {
		t.Errorf("without a token the log says\n%s", log)
	}
	w.expect(t, call{bearer(token(claims{expires: -time.Hour})).headers, good}, webURI, "")
	if log := w.output.String(); !strings.Contains(log, "token refused") || !strings.Contains(log, csr.ReasonTokenExpired) || !strings.Contains(log, webURI) {
		t.Errorf("the log does not say which token was refused, and why:\n%s", log)
	}
}

// Renewal keeps the attestation as it was, so that a stolen key ends with it; a token starts it anew.
func TestD16AttestationIsCopiedOnRenewal(t *testing.T) {
	w := newWorld(t, withPods)
	issued := func(c call) (*trust.Identity, *ca.Attestation) {
		t.Helper()
		key := newKey()
		resp, err := w.istio(c, &istio.IstioCertificateRequest{Csr: toPEM(newCSR(key, ""))})
		if err != nil {
			t.Fatal(err)
		}
		leaf := leafOf(t, resp.GetCertChain(), webURI)
		return &trust.Identity{Chain: append([]*x509.Certificate{leaf}, w.made.Issuer), Key: key}, must(ca.AttestationOf(leaf))
	}
	first, att := issued(bearer(token(claims{uid: "uid-web"})))
	if att == nil || att.Cluster != "Kubernetes" || att.Node != "node-1" || !bytes.Equal(att.PodHash, csr.PodHash("Kubernetes", "uid-web")) || time.Since(att.Time) > time.Minute {
		t.Fatalf("attestation is %+v", att)
	}
	att.Time = att.Time.Add(-5 * time.Hour)
	old := w.svid(webURI, att)
	second, copied := issued(shows(old))
	if !copied.Time.Equal(att.Time) || copied.Cluster != att.Cluster || copied.Node != att.Node || !bytes.Equal(copied.PodHash, att.PodHash) {
		t.Errorf("renewed it is %+v, want %+v", copied, att)
	}
	if _, again := issued(call{bearer(token(claims{uid: "uid-web"})).headers, old}); time.Since(again.Time) > time.Minute {
		t.Errorf("a token did not renew it: %+v", again)
	}

	w.pods.remove("uid-web")
	for _, i := range []*trust.Identity{first, second} {
		w.expect(t, shows(i), "", csr.ReasonPodGone)
	}
	w.expect(t, bearer(token(claims{uid: "uid-web"})), "", csr.ReasonPodGone)
}

func TestD16RenewalNeedsItsOwnPod(t *testing.T) {
	w := newWorld(t, withPods)
	att := func(uid, node string) *ca.Attestation {
		return &ca.Attestation{Cluster: "Kubernetes", Node: node, PodHash: csr.PodHash("Kubernetes", uid), Time: time.Now()}
	}
	for _, tc := range []struct {
		name   string
		svid   *trust.Identity
		reason string
	}{
		{"its own", w.svid(webURI, att("uid-web", "node-1")), ""},
		{"another node", w.svid(webURI, att("uid-web", "node-2")), csr.ReasonPodMismatch},
		{"another account's", w.svid(webURI, att("uid-db", "node-1")), csr.ReasonPodMismatch},
		{"gone", w.svid(webURI, att("uid-gone", "node-1")), csr.ReasonPodGone},
		{"none", w.svid(webURI, fresh("Kubernetes")), csr.ReasonPodGone},
	} {
		t.Run(tc.name, func(t *testing.T) { w.expect(t, shows(tc.svid), webURI, tc.reason) })
	}
}

// A refusal that only says "not now" is worth more to a caller with a bad token than the token's: it may come again.
func TestAuthenticateTemporaryRefusalOfTheCertificateCounts(t *testing.T) {
	w := newWorld(t, withBroken("slow", func() error {
		return &csr.Denial{Code: codes.Unavailable, Reason: csr.ReasonPodUnknown, Detail: "the watch is not synced", RetryAfter: 3 * time.Second}
	}))
	c := call{bearer("x", "clusterid", "slow").headers, w.svid(webURI, fresh("slow"))}
	c.headers[1] = "Bearer " + token(claims{expires: -time.Hour})
	c.headers = c.headers[:2] // no cluster: the token is refused for good
	for api, err := range w.both(c) {
		if st, reason, retry := refusal(err); st.Code() != codes.Unavailable || reason != csr.ReasonPodUnknown || retry != 3*time.Second {
			t.Errorf("%s: got %s %s, again after %s", api, st, reason, retry)
		}
	}
}

// A token that cannot be judged now is not refused: the certificate does not stand in for it.
func TestAuthenticateTemporaryRefusalOfTheTokenIsNoFallback(t *testing.T) {
	w := newWorld(t, withPods, func(w *world, c *csr.Config) {
		c.Clusters["Kubernetes"] = csr.ClusterConfig{Cluster: notSynced{w.pods}}
	})
	att := fresh("Kubernetes")
	att.PodHash = csr.PodHash("Kubernetes", "uid-web")
	w.expect(t, shows(w.svid(webURI, att)), webURI, "")
	for api, err := range w.both(call{bearer(token(claims{})).headers, w.svid(webURI, att)}) {
		if st, reason, retry := refusal(err); st.Code() != codes.Unavailable || reason != csr.ReasonPodUnknown || retry <= 0 {
			t.Errorf("%s: got %s %s, again after %s", api, st, reason, retry)
		}
	}
}

// notSynced knows its pods, but cannot judge tokens.
type notSynced struct{ *podCluster }

func (notSynced) Authenticate(context.Context, string) (csr.Caller, error) {
	return csr.Caller{}, &csr.Denial{Code: codes.Unavailable, Reason: csr.ReasonPodUnknown, Detail: "the watch is not synced"}
}

// both calls both APIs for the caller's own identity and returns their errors.
func (w *world) both(c call) map[string]error {
	_, a := w.istio(c, ask(""))
	_, b := w.native(c, askNative(""))
	return map[string]error{"istio": a, "native": b}
}

func TestD17Impersonation(t *testing.T) {
	w := newWorld(t, withPods)
	web := token(claims{uid: "uid-web"})
	renewing := shows(w.svid("spiffe://cluster.local/ns/istio-system/sa/ztunnel", &ca.Attestation{
		Cluster: "Kubernetes", Node: "node-1", PodHash: csr.PodHash("Kubernetes", "uid-zt"), Time: time.Now(),
	}))
	const self = "spiffe://cluster.local/ns/istio-system/sa/ztunnel"
	for _, tc := range []struct {
		name   string
		call   call
		asked  string
		reason string // empty: issued exactly as asked
	}{
		{"a pod on its node", bearer(ztunnel()), webURI, ""},
		{"another pod on its node", bearer(ztunnel()), dbURI, ""},
		{"itself", bearer(ztunnel()), self, ""},
		{"itself, by certificate", renewing, self, ""},
		{"a workload asks for itself", bearer(web), webURI, ""},
		{"a pod on another node", bearer(ztunnel()), "spiffe://cluster.local/ns/foo/sa/far", csr.ReasonNotOnNode},
		{"no pod at all", bearer(ztunnel()), "spiffe://cluster.local/ns/foo/sa/none", csr.ReasonNotOnNode},
		{"not a node agent", bearer(web), dbURI, csr.ReasonNotNodeAgent},
		{"D16 token bound to no pod", bearer(token(claims{namespace: "istio-system", account: "ztunnel"})), webURI, csr.ReasonTokenNoPod},
		{"D16 by certificate", renewing, webURI, csr.ReasonTokenNoPod},
		{"foreign trust domain", bearer(ztunnel()), "spiffe://other.test/ns/foo/sa/web", csr.ReasonIdentity},
		{"D15 the server", bearer(ztunnel()), "spiffe://cluster.local/chancery/server", csr.ReasonIdentity},
		{"D15 reserved", bearer(ztunnel()), "spiffe://cluster.local/chancery", csr.ReasonIdentity},
		{"not a workload", bearer(ztunnel()), "spiffe://cluster.local/vm/1", csr.ReasonIdentity},
		{"a longer path", bearer(ztunnel()), webURI + "/x", csr.ReasonIdentity},
		{"the trust domain", bearer(ztunnel()), "spiffe://cluster.local", csr.ReasonIdentity},
		{"no SPIFFE ID", bearer(ztunnel()), "web", csr.ReasonIdentity},
		{"an empty domain", bearer(ztunnel()), "spiffe:///ns/foo/sa/web", csr.ReasonIdentity},
		{"names behind commas", bearer(ztunnel()), "spiffe://x,istiod.istio-system.svc,y/ns/foo/sa/web", csr.ReasonIdentity},
		{"capitals", bearer(ztunnel()), "spiffe://Cluster.local/ns/foo/sa/web", csr.ReasonIdentity},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := ask("")
			r.Metadata = must(structpb.NewStruct(map[string]any{"ImpersonatedIdentity": tc.asked}))
			resp, err := w.istio(tc.call, r)
			own, nativeErr := w.native(tc.call, askNative(tc.asked))
			if nativeErr != nil {
				t.Fatal(nativeErr)
			}
			result := own.GetResults()[0]
			if tc.reason == "" {
				if err != nil {
					t.Fatal(err)
				}
				leafOf(t, resp.GetCertChain(), tc.asked)
				if got := result.GetCertificate().GetSpiffeId(); got != tc.asked {
					t.Errorf("the native API issued %q", got)
				}
				return
			}
			wantStatus(t, err, codes.Unauthenticated, tc.reason, "request impersonation authentication failure")
			if f := result.GetRefusal(); f.GetReason() != tc.reason || codes.Code(f.GetCode()) != codes.PermissionDenied || f.GetMessage() == "" {
				t.Errorf("the native API said %v", result)
			}
		})
	}
	if !w.service.Idle() {
		t.Error("slots are held")
	}
}

// What ztunnel gets for a pod says nothing of that pod, so nobody can renew it by certificate.
func TestD16ImpersonatedCertificateIsNotRenewed(t *testing.T) {
	w := newWorld(t, withPods)
	key := newKey()
	r := ask(webURI)
	r.Csr = toPEM(newCSR(key, webURI))
	resp, err := w.istio(bearer(ztunnel()), r)
	if err != nil {
		t.Fatal(err)
	}
	leaf := leafOf(t, resp.GetCertChain(), webURI)
	if att := must(ca.AttestationOf(leaf)); att == nil || att.Node != "node-1" || len(att.PodHash) > 0 {
		t.Errorf("attestation is %+v", att)
	}
	w.expect(t, shows(&trust.Identity{Chain: []*x509.Certificate{leaf, w.made.Issuer}, Key: key}), "", csr.ReasonPodGone)
}

func TestD17NamesInTheCSRMustBeTheImpersonatedIdentity(t *testing.T) {
	w := newWorld(t, withPods)
	for _, uri := range []string{dbURI, "spiffe://cluster.local/ns/istio-system/sa/ztunnel"} {
		r := ask(webURI)
		r.Csr = toPEM(newCSR(newKey(), uri))
		_, err := w.istio(bearer(ztunnel()), r)
		wantStatus(t, err, codes.PermissionDenied, csr.ReasonCSRNames, "CSR signing error (the CSR asks for the URI")
	}
}

func TestD18ImpersonationNeedsAPodWatch(t *testing.T) {
	w := newWorld(t)
	_, err := w.istio(bearer(ztunnel()), ask(webURI))
	wantStatus(t, err, codes.Unauthenticated, csr.ReasonNoPodWatch, "request impersonation authentication failure")
}

// D17: what was asked is issued exactly or denied. Metadata of another type than a string must not fall back to the
// caller's own identity.
func TestD17ImpersonatedIdentityOfAnotherType(t *testing.T) {
	w := newWorld(t, withPods)
	for name, value := range map[string]any{"number": 7, "list": []any{webURI}, "object": map[string]any{"id": webURI}, "null": nil, "bool": true} {
		r := ask("")
		r.Metadata = must(structpb.NewStruct(map[string]any{"ImpersonatedIdentity": value}))
		_, err := w.istio(bearer(ztunnel()), r)
		st, reason, _ := refusal(err)
		if st.Code() != codes.Unauthenticated || reason != csr.ReasonIdentity {
			t.Errorf("%s: got %v %s, want Unauthenticated %s", name, st, reason, csr.ReasonIdentity)
		}
	}
	r := ask("")
	r.Metadata = must(structpb.NewStruct(map[string]any{"ImpersonatedIdentity": "", "CertSigner": "x", "WorkloadName": "y"}))
	if _, err := w.istio(bearer(ztunnel()), r); err != nil { // Istio's agents send an empty one for none
		t.Error(err)
	}
}
