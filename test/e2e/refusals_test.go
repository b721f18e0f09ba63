package e2e

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// What Istio's clients are told when they or whom they ask for are refused.
const (
	noCaller        = "request authenticate failure"
	noImpersonation = "request impersonation authentication failure"
)

// refusal is one bad request and what must become of it.
type refusal struct {
	name    string
	ask     Ask
	code    codes.Code
	message string // exact, or, for CSRs, the beginning
	reason  string // in ErrorInfo, audit log and server log
}

// office is what the tests of this file ask at: a server that watches pods, a pod with a good token, and a node agent.
type office struct {
	*Server
	kube  *Kube
	ns    string
	pod   Pod // on node-a
	agent Pod // ns/ztunnel on node-a, a node agent
	token string
}

func openOffice(t *testing.T) *office {
	t.Helper()
	k := SharedKube(t)
	o := &office{kube: k, ns: k.Namespace(t, "refusals")}
	o.pod, o.agent = k.RunPod(t, o.ns, "web", "web-1", "node-a"), k.RunPod(t, o.ns, "ztunnel", "ztunnel-1", "node-a")
	o.token = o.tokenOf(t, o.pod)
	c := k.Cluster(k.ServerKubeconfig(t))
	c.NodeAgents = []string{o.ns + "/ztunnel"}
	o.Server = StartServer(t, c)
	return o
}

func (o *office) tokenOf(t *testing.T, p Pod) string {
	t.Helper()
	return o.kube.BoundToken(t, p, time.Hour, audience)
}

// id is the SPIFFE ID of a service account in the office's namespace.
func (o *office) id(account string) string {
	return Pod{Namespace: o.ns, ServiceAccount: account}.SPIFFEID(trustDomain)
}

// refused makes each request and checks that it is refused as it should be, that nothing was signed, and that the logs say why.
func (o *office) refused(t *testing.T, cases []refusal) {
	t.Helper()
	conn := o.Dial(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { o.refusedOne(t, conn, c) })
	}
}

func (o *office) refusedOne(t *testing.T, conn *grpc.ClientConn, c refusal) {
	denied := func(a auditLine) bool { return a.Event == "denied" && a.Reason == c.reason }
	signed := o.workloadIntents(t)
	before, _ := o.Audit(t, denied)
	chain, err := c.ask.Create(t.Context(), conn)
	if err == nil {
		t.Fatalf("it was granted: %v", chain)
	}
	st := status.Convert(err)
	exact := c.code == codes.Unauthenticated
	if st.Code() != c.code || exact && st.Message() != c.message || !strings.HasPrefix(st.Message(), c.message) {
		t.Errorf("refused with %s %q; want %s %q", st.Code(), st.Message(), c.code, c.message)
	}
	if got := reasonOf(err); got != c.reason {
		t.Errorf("reason in the details is %q, want %s (%s)", got, c.reason, st.Message())
	}
	Eventually(t, 5*time.Second, "the audit log has the refusal", func() error {
		lines, _ := o.Audit(t, denied)
		if len(lines) <= len(before) {
			return fmt.Errorf("no new line with reason %s", c.reason)
		}
		if last := lines[len(lines)-1]; last.Detail == "" || last.Requester.Remote == "" || last.Serial != "" {
			t.Errorf("the audit log should say why and who, and no serial: %+v", last)
		}
		return nil
	})
	if !strings.Contains(o.Log(), "reason="+c.reason) {
		t.Errorf("the server's log does not say %s", c.reason)
	}
	if n := o.workloadIntents(t) - signed; n != 0 {
		t.Errorf("%d certificates were signed", n)
	}
}

// reasonOf returns the reason in an error's details.
func reasonOf(err error) string {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return ""
}

// granted makes a request that must succeed and returns the certificate.
func (o *office) granted(t *testing.T, a Ask) *x509.Certificate {
	t.Helper()
	cert, err := a.Certificate(t.Context(), o.Dial(t))
	if err != nil {
		t.Fatalf("a good request is refused: %v", err)
	}
	return cert
}

func TestRefusalsOfCredentials(t *testing.T) {
	t.Parallel()
	o := openOffice(t)
	k := o.kube
	o.granted(t, Ask{Token: o.token})
	o.granted(t, Ask{Token: o.token, Cluster: "Kubernetes"})

	deleted := k.RunPod(t, o.ns, "web", "deleted", "node-a")
	deletedToken := o.tokenOf(t, deleted)
	conn := o.Dial(t)
	o.granted(t, Ask{Token: deletedToken}) // so its token's signature is remembered as good
	k.DeletePod(t, deleted)
	replaced := k.RunPod(t, o.ns, "web", "replaced", "node-a")
	replacedToken := o.tokenOf(t, replaced)
	k.DeletePod(t, replaced)
	k.RunPod(t, o.ns, "web", "replaced", "node-a")
	moved := o.pod
	moved.Node = "node-b"
	issuer := k.Claims(o.pod, audience)
	issuer["iss"] = "https://elsewhere.example"
	foreign := ForeignToken(t, "", k.Claims(o.pod, audience)) // as another cluster would give its pod of the same names
	Eventually(t, 10*time.Second, "the watch has brought the later of the deletions", func() error {
		if _, err := (Ask{Token: replacedToken}).Create(t.Context(), conn); err == nil {
			return errors.New("the pod is still served")
		}
		return nil
	})

	bad := func(name, token, reason string) refusal {
		return refusal{name, Ask{Token: token}, codes.Unauthenticated, noCaller, reason}
	}
	o.refused(t, []refusal{
		bad("deleted pod", deletedToken, "POD_GONE"),
		bad("pod replaced by another of its name", replacedToken, "POD_GONE"),
		bad("pod on another node than the token says", k.SignToken(t, k.Claims(moved, audience)), "POD_MISMATCH"),
		bad("wrong audience", k.BoundToken(t, o.pod, time.Hour, "vault"), "TOKEN_AUDIENCE"),
		bad("audience of the API server", k.BoundToken(t, o.pod, time.Hour), "TOKEN_AUDIENCE"),
		bad("expired", k.SignToken(t, k.Claims(o.pod, audience).Expired(time.Second)), "TOKEN_EXPIRED"),
		bad("tampered", TamperToken(t, o.token, "system:serviceaccount:kube-system:admin"), "TOKEN_SIGNATURE"),
		bad("foreign key under the cluster's key ID", ForeignToken(t, k.KeyID(t), k.Claims(o.pod, audience)), "TOKEN_SIGNATURE"),
		bad("token of a foreign cluster", foreign, "TOKEN_KEY_UNKNOWN"),
		bad("right key, other issuer", k.SignToken(t, issuer), "TOKEN_ISSUER"),
		bad("unsigned", UnsignedToken(t, k.Claims(o.pod, audience)), "TOKEN_KEY_UNKNOWN"),
		bad("bound to no pod", k.UnboundToken(t, o.ns, "web", time.Hour, audience), "TOKEN_NOT_POD_BOUND"),
		bad("no token at all", "x", "TOKEN_MALFORMED"),
		{"of a cluster that is not configured", Ask{Token: o.token, Cluster: "elsewhere"}, codes.Unauthenticated, noCaller, "CLUSTER_UNKNOWN"},
		{"no credentials", Ask{}, codes.Unauthenticated, noCaller, "NO_CREDENTIAL"},
		{"two authorization values", Ask{Authorization: []string{"Bearer " + o.token, "Bearer " + o.token}}, codes.Unauthenticated, noCaller, "TOKEN_MALFORMED"},
		{"another scheme", Ask{Authorization: []string{"Basic " + o.token}}, codes.Unauthenticated, noCaller, "TOKEN_MALFORMED"},
	})
	if log := o.Log(); strings.Contains(log, o.token) || strings.Contains(log, foreign) {
		t.Error("a token is in the server's log")
	}
}

// rsa1024CSR was made by `openssl req -new -newkey rsa:1024 -subj /`: today's Go makes no such keys.
const rsa1024CSR = `-----BEGIN CERTIFICATE REQUEST-----
MIIBPzCBqQIBADAAMIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQC7Q/bAj2nj
J+wLTVvu7zmIEmLpvfN9pScUHtVBBD+aJpMB0G0ez+QwDqwmVeRLJ36Kv4GHUtZG
bFfdHHp8wedpeL3eBqnWv3vrILFv8GeOCsAqb9zTyOISwmVlOkyIUUbvu7m4BgPk
zM59rDJeZH99H0fRP5KG8S9YXJLaZG69fQIDAQABoAAwDQYJKoZIhvcNAQELBQAD
gYEAge1h6/EdIfUcvNjqCxKOUP6t4ZAyuiMmQT3JreiEvteHueWn9nwCH+QOisMr
Bit+038WK+/YaFpRsi6eGQIGDcnzDfNqge6mABhrSlmMkLrJDhwvsu0hqOyCwrtI
LVr15MXnnkFyOo6y5Yv6hAjBd8RPlnxt4Ovr/dcwgRCfDFY=
-----END CERTIFICATE REQUEST-----
`

func TestRefusalsOfCSRs(t *testing.T) {
	t.Parallel()
	o := openOffice(t)
	own, err := url.Parse(o.id("web"))
	if err != nil {
		t.Fatal(err)
	}
	csr := func(template x509.CertificateRequest) string {
		text, err := newCSR(&template)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	leaf := o.granted(t, Ask{Token: o.token, CSR: csr(x509.CertificateRequest{URIs: []*url.URL{own}})})
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != own.String() || len(leaf.DNSNames) > 0 || leaf.Subject.String() != "" {
		t.Errorf("the certificate names %v, %v and %q; want %s alone", leaf.URIs, leaf.DNSNames, leaf.Subject, own)
	}
	other := *own
	other.Path += "2"
	good := csr(x509.CertificateRequest{})
	block, _ := pem.Decode([]byte(good))
	unproven := slices.Clone(block.Bytes)
	unproven[len(unproven)-1] ^= 1

	bad := func(name, csr string, code codes.Code, reason string) refusal {
		return refusal{name, Ask{Token: o.token, CSR: csr}, code, "CSR signing error (", reason}
	}
	o.refused(t, []refusal{
		bad("a DNS name", csr(x509.CertificateRequest{URIs: []*url.URL{own}, DNSNames: []string{"web.example"}}), codes.PermissionDenied, "CSR_NAMES"),
		bad("another SPIFFE ID", csr(x509.CertificateRequest{URIs: []*url.URL{&other}}), codes.PermissionDenied, "CSR_NAMES"),
		bad("another SPIFFE ID beside the own", csr(x509.CertificateRequest{URIs: []*url.URL{own, &other}}), codes.PermissionDenied, "CSR_NAMES"),
		bad("RSA 1024", rsa1024CSR, codes.InvalidArgument, "CSR_INVALID"),
		bad("bad signature", csrPEM(unproven), codes.InvalidArgument, "CSR_INVALID"),
		bad("1 MiB", csrPEM(make([]byte, 1<<20*3/4)), codes.InvalidArgument, "CSR_INVALID"),
		bad("not PEM", "hello", codes.InvalidArgument, "CSR_INVALID"),
		bad("a certificate", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Raw})), codes.InvalidArgument, "CSR_INVALID"),
		bad("two in one", good+good, codes.InvalidArgument, "CSR_INVALID"),
		{"a lifetime that overflows", Ask{Token: o.token, Seconds: 1 << 62}, codes.InvalidArgument, "CSR signing error (", "LIFETIME_INVALID"},
	})
}

func TestRefusalsOfImpersonation(t *testing.T) {
	t.Parallel()
	o := openOffice(t)
	k := o.kube
	k.RunPod(t, o.ns, "far", "far-1", "node-b")
	ztunnel := o.tokenOf(t, o.agent)
	leaf := o.granted(t, Ask{Token: ztunnel, Identity: o.id("web")})
	if got := fmt.Sprint(leaf.URIs); got != "["+o.id("web")+"]" {
		t.Errorf("the node agent asked for %s and got %s", o.id("web"), got)
	}
	lines, _ := o.Audit(t, func(a auditLine) bool { return a.Event == "intent" && a.SPIFFEID == o.id("web") })
	if len(lines) != 1 || lines[0].Requester.SPIFFEID != o.id("ztunnel") {
		t.Errorf("the audit log should say that %s asked for %s: %+v", o.id("ztunnel"), o.id("web"), lines)
	}

	bad := func(name, token, identity, reason string) refusal {
		return refusal{name, Ask{Token: token, Identity: identity}, codes.Unauthenticated, noImpersonation, reason}
	}
	o.refused(t, []refusal{
		bad("by one who is no node agent", o.token, o.id("ztunnel"), "NOT_A_NODE_AGENT"),
		bad("pod on another node", ztunnel, o.id("far"), "POD_NOT_ON_NODE"),
		bad("account without a pod", ztunnel, o.id("nobody"), "POD_NOT_ON_NODE"),
		bad("other trust domain", ztunnel, strings.Replace(o.id("web"), trustDomain, "other.example", 1), "IDENTITY_NOT_ALLOWED"),
		bad("reserved path", ztunnel, "spiffe://"+trustDomain+"/chancery/server", "IDENTITY_NOT_ALLOWED"),
		bad("not by the grammar", ztunnel, "SPIFFE://"+trustDomain+"/ns/"+o.ns+"/sa/web/", "IDENTITY_NOT_ALLOWED"),
	})
}
