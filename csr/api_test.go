package csr_test

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
	istio "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/admission"
	"github.com/chancery-project/chancery/trust"
)

func TestIstioRefusals(t *testing.T) {
	w := newWorld(t, func(w *world, c *csr.Config) {
		c.Profile = must(ca.NewProfile("workload", ca.ProfileConfig{KeyTypes: []string{"p256"}, IDPaths: []string{"/ns/foo/sa/*"}}))
	})
	good := bearer(token(claims{}))
	request := func(pem string, seconds int64) *istio.IstioCertificateRequest {
		return &istio.IstioCertificateRequest{Csr: pem, ValidityDuration: seconds}
	}
	pem := toPEM(newCSR(newKey(), ""))
	ed := must(ca.GenerateKey(ca.Ed25519))
	for _, tc := range []struct {
		name    string
		call    call
		request *istio.IstioCertificateRequest
		code    codes.Code
		reason  string
		message string
	}{
		{"no credential", call{}, request(pem, 0), codes.Unauthenticated, csr.ReasonNoCredential, "request authenticate failure"},
		{"no CSR", good, request("", 0), codes.InvalidArgument, csr.ReasonCSR, "CSR signing error (the CSR is not PEM"},
		{"CSR without content", good, request("-----BEGIN CERTIFICATE REQUEST-----\n-----END CERTIFICATE REQUEST-----\n", 0), codes.InvalidArgument, csr.ReasonCSR, "CSR signing error (the CSR has 0 bytes"},
		{"CSR of 1 MB", good, request(strings.Repeat("x", 1<<20), 0), codes.InvalidArgument, csr.ReasonCSR, "at most 32768 are read"},
		{"names of somebody else", good, request(toPEM(newCSR(newKey(), dbURI)), 0), codes.PermissionDenied, csr.ReasonCSRNames, "the identity is " + webURI},
		{"a key type that the profile has not", good, request(toPEM(newCSR(ed, "")), 0), codes.InvalidArgument, csr.ReasonCSR, "does not accept ed25519 keys"},
		{"an identity that the profile has not", bearer(token(claims{namespace: "bar"})), request(pem, 0), codes.PermissionDenied, csr.ReasonIdentity, "/ns/bar/sa/web"},
		{"D20 overflow", good, request(pem, math.MaxInt64), codes.InvalidArgument, csr.ReasonLifetime, "out of range"},
		{"D20 overflow by one", good, request(pem, math.MaxInt64/int64(time.Second)+1), codes.InvalidArgument, csr.ReasonLifetime, "out of range"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			resp, err := w.istio(tc.call, tc.request)
			wantStatus(t, err, tc.code, tc.reason, tc.message)
			if len(resp.GetCertChain()) > 0 {
				t.Error("there are certificates with the refusal")
			}
			if n := w.metric("chancery_csr_request_seconds", "istio", tc.reason); n == 0 {
				t.Errorf("no metric has the outcome %s", tc.reason)
			}
		})
	}
	denied := w.records(audit.Denied)
	if len(denied) != 9 {
		t.Errorf("%d refusals are in the audit log, want 9", len(denied))
	}
	for _, r := range denied {
		if r.Reason == "" || r.Detail == "" || r.Requester.Remote == "" {
			t.Errorf("refusal without reason, detail or remote: %+v", r)
		}
	}
	if n := len(w.records(audit.Intent)); n != 3 { // root, issuer, server
		t.Errorf("%d intents are in the audit log, want none for a refusal", n-3)
	}
}

// want checks lifetime and start of a certificate that was asked for now.
func wantLifetime(t *testing.T, cert *x509.Certificate, want time.Duration) {
	t.Helper()
	if got := time.Until(cert.NotAfter); got > want || got < want-10*time.Second {
		t.Errorf("it ends in %s, want %s", got, want)
	}
	if cert.NotBefore.After(time.Now()) {
		t.Errorf("it begins at %s", cert.NotBefore)
	}
}

func TestD20Lifetimes(t *testing.T) {
	w := newWorld(t, func(w *world, c *csr.Config) {
		c.Profile = must(ca.NewProfile("workload", ca.ProfileConfig{DefaultTTL: "2h", MaxTTL: "4h"}))
	})
	for _, tc := range []struct {
		name string
		ask  time.Duration
		want time.Duration
	}{
		{"none", 0, 2 * time.Hour},
		{"negative", -time.Hour, 2 * time.Hour},
		{"the least there is", math.MinInt64, 2 * time.Hour},
		{"as asked", 30 * time.Minute, 30 * time.Minute},
		{"too short to arrive", time.Second, ca.MinTTL},
		{"clamped", 48 * time.Hour, 4 * time.Hour},
		{"the most there is", math.MaxInt64, 4 * time.Hour},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := ask("")
			r.ValidityDuration = int64(tc.ask / time.Second)
			resp, err := w.istio(bearer(token(claims{})), r)
			if err != nil {
				t.Fatal(err)
			}
			wantLifetime(t, leafOf(t, resp.GetCertChain(), webURI), tc.want)

			n := askNative("")
			n.Lifetime = durationpb.New(tc.ask)
			own, err := w.native(bearer(token(claims{})), n)
			if err != nil {
				t.Fatal(err)
			}
			c := own.GetResults()[0].GetCertificate()
			leaf := must(x509.ParseCertificate(c.GetChain()[0]))
			wantLifetime(t, leaf, tc.want)
			if !c.GetNotAfter().AsTime().Equal(leaf.NotAfter) {
				t.Errorf("not_after is %s, the leaf ends at %s", c.GetNotAfter().AsTime(), leaf.NotAfter)
			}
		})
	}
	clamped := 0
	for _, r := range w.records(audit.Intent) {
		if r.Clamped {
			clamped++
		}
	}
	if clamped != 4 {
		t.Errorf("%d intents say that they were clamped, want 4", clamped)
	}
}

// chainOf makes an issuer with two intermediates above it, under a bundle with two more roots.
func chainOf(t *testing.T, w *world) (*ca.Issuer, []*x509.Certificate) {
	t.Helper()
	roots := []*x509.Certificate{w.made.Root}
	for range 2 {
		roots = append(roots, must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID + 1, Log: w.log})).Root)
	}
	parent, parentKey := *w.made.Root, w.made.RootKey
	var chain []*x509.Certificate
	for i := range 3 {
		key := newKey()
		c := *w.made.Issuer
		c.MaxPathLen, c.MaxPathLenZero, c.ExtraExtensions = -1, false, nil
		c.SubjectKeyId, c.RawSubject, c.Subject.CommonName = []byte{byte(i), 1, 2, 3}, nil, fmt.Sprint("level ", i)
		der := must(x509.CreateCertificate(rand.Reader, &c, &parent, key.Public(), parentKey))
		cert := must(x509.ParseCertificate(der))
		chain = append([]*x509.Certificate{cert}, chain...)
		parent, parentKey = *cert, key
	}
	i, err := ca.NewIssuer(ca.IssuerConfig{
		Domain: td, Key: parentKey, Chain: chain, Bundle: must(trust.NewBundle(td, 9, roots)), LogID: ca.MinLogID + 1, Log: w.log,
	})
	if err != nil {
		t.Fatal(err)
	}
	return i, roots
}

func TestResponseShape(t *testing.T) {
	w := newWorld(t)
	long, roots := chainOf(t, w)
	w.issuer.Store(long)
	resp, err := w.istio(bearer(token(claims{})), ask(""))
	if err != nil {
		t.Fatal(err)
	}
	chain := resp.GetCertChain()
	leafOf(t, chain, webURI)
	if len(chain) != 5 { // leaf, three intermediates, roots
		t.Fatalf("the chain has %d elements, want 5", len(chain))
	}
	for i, c := range long.Chain() {
		if chain[i+1] != string(trust.EncodeCertificates(c)) {
			t.Errorf("element %d is not intermediate %q", i+1, c.Subject)
		}
	}
	got := must(trust.ParseCertificates([]byte(chain[4])))
	if len(got) != 3 {
		t.Errorf("the last element has %d roots, want 3", len(got))
	}
	for _, r := range roots {
		if !slices.ContainsFunc(got, r.Equal) {
			t.Errorf("root %q is missing", r.Subject)
		}
	}

	own, err := w.native(bearer(token(claims{})), askNative(""))
	if err != nil {
		t.Fatal(err)
	}
	b := own.GetBundle()
	if b.GetTrustDomain() != "cluster.local" || b.GetGeneration() != 9 || len(b.GetRoots()) != 3 {
		t.Errorf("the bundle is %s, generation %d, %d roots", b.GetTrustDomain(), b.GetGeneration(), len(b.GetRoots()))
	}
	if n := len(own.GetResults()[0].GetCertificate().GetChain()); n != 4 {
		t.Errorf("the native chain has %d certificates, want 4 without the root", n)
	}
	verifyNative(t, own, 0, webURI)
}

// verifyNative verifies one result against the bundle of the same response.
func verifyNative(t testing.TB, r *chanceryv1.IssueResponse, i int, want string) *x509.Certificate {
	t.Helper()
	parse := func(ders [][]byte) (out []*x509.Certificate) {
		for _, der := range ders {
			out = append(out, must(x509.ParseCertificate(der)))
		}
		return out
	}
	c := r.GetResults()[i].GetCertificate()
	if c == nil {
		t.Fatalf("result %d is %v", i, r.GetResults()[i])
	}
	chain := parse(c.GetChain())
	bundle := must(trust.NewBundle(td, r.GetBundle().GetGeneration(), parse(r.GetBundle().GetRoots())))
	id, _, err := trust.Verify(chain, trust.Only(bundle), time.Now())
	if err != nil || id.String() != want || c.GetSpiffeId() != want {
		t.Fatalf("verified as %q, said to be %q, error %v; want %s", id, c.GetSpiffeId(), err, want)
	}
	return chain[0]
}

func TestNativeBatchSizes(t *testing.T) {
	w := newWorld(t)
	one := askNative("")
	for _, n := range []int{0, 1, 100, 101} {
		resp, err := w.native(bearer(token(claims{})), slices.Repeat([]*chanceryv1.CertificateRequest{one}, n)...)
		if n < 1 || n > 100 {
			wantStatus(t, err, codes.InvalidArgument, csr.ReasonCSR, fmt.Sprintf("the batch has %d requests", n))
			continue
		}
		if err != nil || len(resp.GetResults()) != n {
			t.Fatalf("%d requests: %d results, %v", n, len(resp.GetResults()), err)
		}
		serials := map[string]bool{}
		for i := range n {
			serials[verifyNative(t, resp, i, webURI).SerialNumber.String()] = true
		}
		if len(serials) != n {
			t.Errorf("%d serials for %d certificates", len(serials), n)
		}
	}
	if _, err := w.native(call{}, slices.Repeat([]*chanceryv1.CertificateRequest{one}, 101)...); err != nil {
		wantStatus(t, err, codes.Unauthenticated, csr.ReasonNoCredential, "") // nobody learns the limit without a credential
	}
}

func TestNativeOneBadRequestDoesNotTouchTheOthers(t *testing.T) {
	w := newWorld(t, withPods)
	overflow := askNative(webURI)
	overflow.Lifetime = &durationpb.Duration{Seconds: math.MaxInt64}
	badNanos := askNative(webURI)
	badNanos.Lifetime = &durationpb.Duration{Seconds: 1, Nanos: -1}
	requests := []*chanceryv1.CertificateRequest{
		askNative(webURI),
		{Csr: []byte("x"), SpiffeId: webURI},
		nil,
		overflow,
		{Csr: newCSR(newKey(), dbURI), SpiffeId: webURI},
		askNative("spiffe://cluster.local/ns/foo/sa/far"),
		askNative("nonsense"),
		badNanos,
		askNative(dbURI),
		askNative(""),
	}
	want := []string{"", csr.ReasonCSR, csr.ReasonCSR, csr.ReasonLifetime, csr.ReasonCSRNames, csr.ReasonNotOnNode, csr.ReasonIdentity, csr.ReasonLifetime, "", ""}
	resp, err := w.native(bearer(ztunnel()), requests...)
	if err != nil {
		t.Fatal(err)
	}
	ids := map[int]string{0: webURI, 8: dbURI, 9: "spiffe://cluster.local/ns/istio-system/sa/ztunnel"}
	for i, reason := range want {
		f := resp.GetResults()[i].GetRefusal()
		if f.GetReason() != reason {
			t.Errorf("result %d: %v, want %q", i, resp.GetResults()[i], reason)
		} else if reason == "" {
			leaf := verifyNative(t, resp, i, ids[i])
			req := must(x509.ParseCertificateRequest(requests[i].GetCsr()))
			if !trust.SameKey(leaf.PublicKey, req.PublicKey) {
				t.Errorf("result %d is for another key", i)
			}
		} else if codes.Code(f.GetCode()) == codes.OK || f.GetMessage() == "" || f.GetRetryAfter() != nil {
			t.Errorf("result %d: refusal %v", i, f)
		}
	}
	if n := len(w.records(audit.Denied)); n != 7 {
		t.Errorf("%d refusals are in the audit log, want 7", n)
	}
}

func TestD19RefusalsSayWhenToTryAgain(t *testing.T) {
	w := newWorld(t, func(w *world, c *csr.Config) {
		c.Admission = admission.Config{PerIdentity: admission.Rate{PerSecond: 0.001, Burst: 2}}
	})
	me, other := bearer(token(claims{})), bearer(token(claims{account: "db"}))
	resp, err := w.native(me, askNative(""), askNative(""), askNative(""))
	if err != nil {
		t.Fatal(err)
	}
	verifyNative(t, resp, 1, webURI)
	if f := resp.GetResults()[2].GetRefusal(); codes.Code(f.GetCode()) != codes.ResourceExhausted || f.GetReason() != csr.ReasonBusy || f.GetRetryAfter().AsDuration() < 900*time.Second {
		t.Errorf("the third result is %v", resp.GetResults()[2])
	}
	_, err = w.istio(me, ask(""))
	wantStatus(t, err, codes.ResourceExhausted, csr.ReasonBusy, "CSR signing error (the rate of identity "+webURI)
	if _, _, retry := refusal(err); retry < 900*time.Second || retry > 1000*time.Second {
		t.Errorf("RetryInfo says %s, want nearly 1,000 s", retry)
	}
	if _, err := w.istio(other, ask("")); err != nil {
		t.Errorf("another identity was refused: %v", err)
	}
}

// What is our own fault is told as such, to strangers and known callers alike; why is in the server's log.
func TestInternalDetailsDoNotLeak(t *testing.T) {
	const secret = "dial tcp 10.96.0.1:443: /etc/chancery/kubeconfig"
	unavailable := &csr.Denial{Code: codes.Unavailable, Reason: csr.ReasonPodUnknown, Detail: secret}
	w := newWorld(t,
		withBroken("internal", func() error { return errors.New(secret) }),
		withBroken("unavailable", func() error { return unavailable }),
		withBroken("forbidden", func() error {
			return &csr.Denial{Code: codes.PermissionDenied, Reason: csr.ReasonNotNodeAgent, Detail: secret}
		}))
	for _, tc := range []struct {
		name     string
		call     call
		code     codes.Code
		reason   string
		notReady bool
	}{
		{"an error that is no denial", bearer("x", "clusterid", "internal"), codes.Internal, csr.ReasonInternal, false},
		{"cluster not reachable", bearer("x", "clusterid", "unavailable"), codes.Unavailable, csr.ReasonPodUnknown, false},
		{"a denial before authentication", bearer("x", "clusterid", "forbidden"), codes.PermissionDenied, csr.ReasonNotNodeAgent, false},
		{"cluster not reachable, by certificate", shows(w.svid(webURI, fresh("unavailable"))), codes.Unavailable, csr.ReasonPodUnknown, false},
		{"no issuer", call{}, codes.Unavailable, csr.ReasonNotReady, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.notReady {
				i := w.issuer.Swap(nil)
				defer w.issuer.Store(i)
			}
			for api, err := range w.both(tc.call) {
				st, reason, retry := refusal(err)
				if st.Code() != tc.code || reason != tc.reason || st.Message() == "" {
					t.Errorf("%s: got %v %s, want %s %s", api, st, reason, tc.code, tc.reason)
				}
				if s := st.Proto().String(); strings.Contains(s, "10.96") || strings.Contains(s, "/etc/") || strings.Contains(s, "secret.db") {
					t.Errorf("%s: the status tells %q", api, s)
				}
				if (tc.code == codes.Unavailable) != (retry > 0) {
					t.Errorf("%s: RetryInfo says %s", api, retry)
				}
			}
		})
	}
	if unavailable.RetryAfter != 0 {
		t.Error("the cluster's own denial was changed")
	}
	if log := w.output.String(); !strings.Contains(log, "10.96") || !strings.Contains(log, "secret.db") {
		t.Errorf("the server's log does not say why:\n%s", log)
	}
}

// The answers' parts that all share are not changed by anybody.
func TestSharedPartsStayAsTheyAre(t *testing.T) {
	w := newWorld(t)
	first, err := w.native(bearer(token(claims{})), askNative(""), askNative(""))
	if err != nil {
		t.Fatal(err)
	}
	again, err := w.native(bearer(token(claims{})), askNative(""))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first.GetBundle().GetRoots()[0], again.GetBundle().GetRoots()[0]) {
		t.Error("the bundles differ")
	}
	a, b, c := first.GetResults()[0].GetCertificate(), first.GetResults()[1].GetCertificate(), again.GetResults()[0].GetCertificate()
	if bytes.Equal(a.GetChain()[0], b.GetChain()[0]) || !bytes.Equal(a.GetChain()[1], c.GetChain()[1]) {
		t.Error("leaves are the same, or intermediates differ")
	}
}
