// Package kube owns issuers signed through cert-manager: a CertificateRequest for each, made, waited for and deleted again.
//
// One that is denied or fails is deleted, so that the next try makes a new one; one that waits, such as for an approval, is
// left as it is and found again by the next try. It refuses to approve anything itself.
package kube

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/ca/parent/https"
	"github.com/chancery-project/chancery/trust"
)

var requests = schema.GroupVersionResource{Group: "cert-manager.io", Version: "v1", Resource: "certificaterequests"}

const (
	firstPoll   = 200 * time.Millisecond
	maxPoll     = 5 * time.Second
	callTimeout = 10 * time.Second
	maxAnswer   = 4 << 20 // etcd holds less than 2 MiB of an object
	// maxRecreate bounds how often one call makes a request anew, where somebody else keeps deleting it.
	maxRecreate = 3
)

// Config says whom cert-manager shall have sign.
type Config struct {
	API       *rest.Config
	Namespace string // where requests are made
	Issuer    string // name
	Kind      string // Issuer or ClusterIssuer, or of another group
	Group     string // cert-manager.io, or an external issuer's
	TTL       time.Duration
}

// Parent is an issuer of cert-manager's.
type Parent struct {
	config Config
	client dynamic.ResourceInterface
}

// New makes the client; nobody is called.
func New(c Config) (*Parent, error) {
	cfg := rest.CopyConfig(c.API)
	cfg.UserAgent, cfg.Timeout, cfg.QPS = "chancery", callTimeout, -1
	cfg.ContentType, cfg.AcceptContentTypes = "application/json", "application/json"
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return bounded{next} })
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("making a client for CertificateRequests: %w", err)
	}
	return &Parent{c, client.Resource(requests).Namespace(c.Namespace)}, nil
}

// Sign makes the CertificateRequest for the request's key, or finds it, and waits until it was decided.
func (p *Parent) Sign(ctx context.Context, der []byte) ([]*x509.Certificate, error) {
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("reading our own request: %w", err)
	}
	sum := sha256.Sum256(csr.RawSubjectPublicKeyInfo)
	name := "chancery-issuer-" + hex.EncodeToString(sum[:10])
	where := fmt.Sprintf("CertificateRequest %s/%s", p.config.Namespace, name)
	poll, made := firstPoll, 0
	var last error
	for {
		o, err := p.client.Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err) && made == maxRecreate:
			return nil, fmt.Errorf("%s: somebody deletes it before it is signed", where)
		case apierrors.IsNotFound(err):
			made++
			if _, err = p.client.Create(ctx, p.object(name, der), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
				return nil, p.failed(ctx, where, "making it", err, last)
			}
		case err != nil:
			return nil, p.failed(ctx, where, "reading it", err, last)
		default:
			chain, err := p.decide(ctx, o, csr)
			if chain != nil || err != nil && !errors.Is(err, errPending) {
				return chain, wrap(where, err)
			}
			last = err
		}
		select {
		case <-ctx.Done():
			return nil, p.failed(ctx, where, "waiting for it", ctx.Err(), last)
		case <-time.After(poll):
			poll = min(2*poll, maxPoll)
		}
	}
}

func wrap(where string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", where, err)
}

// failed names what went wrong, and what was known before.
func (p *Parent) failed(ctx context.Context, where, doing string, err, last error) error {
	if last != nil && ctx.Err() != nil {
		return fmt.Errorf("%s: %w; it is left as it is", where, last)
	}
	return fmt.Errorf("%s: %s: %s", where, doing, https.Clean(err.Error()))
}

// errPending: nobody has decided yet.
var errPending = errors.New("not decided yet")

// decide returns the chain of a request that was signed, an error for one that never will be, errPending, or neither for
// one that was deleted to be made anew. What was decided is deleted.
func (p *Parent) decide(ctx context.Context, o *unstructured.Unstructured, csr *x509.CertificateRequest) ([]*x509.Certificate, error) {
	if !p.ours(o, csr) { // of another key or config, left by an earlier life
		return nil, p.remove(ctx, o)
	}
	state := conditions(o)
	if bad, why := state.bad(); bad != "" {
		return nil, errors.Join(fmt.Errorf("%s: %s", bad, why), p.remove(ctx, o))
	}
	if state["Ready"].status != "True" {
		return nil, fmt.Errorf("%w: %s", errPending, state.waitsFor())
	}
	chain, err := signed(o)
	if err := p.remove(ctx, o); err != nil && chain == nil {
		return nil, err
	}
	return chain, err
}

// signed reads status.certificate, the issuer's and those above it, and status.ca, the topmost that the signer knows.
func signed(o *unstructured.Unstructured) ([]*x509.Certificate, error) {
	var chain []*x509.Certificate
	for _, field := range []string{"certificate", "ca"} {
		text, _, err := unstructured.NestedString(o.Object, "status", field)
		if err != nil {
			return nil, fmt.Errorf("status.%s is not text", field)
		}
		if text == "" && field == "ca" {
			break
		}
		pem, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			return nil, fmt.Errorf("status.%s is not base64", field)
		}
		certs, err := trust.ParseCertificates(pem)
		if err != nil {
			return nil, fmt.Errorf("status.%s: %w", field, err)
		}
		for _, c := range certs {
			if !slices.ContainsFunc(chain, c.Equal) {
				chain = append(chain, c)
			}
		}
	}
	return chain, nil
}

// remove deletes exactly this object, not a later one of its name.
func (p *Parent) remove(ctx context.Context, o *unstructured.Unstructured) error {
	uid := o.GetUID()
	err := p.client.Delete(ctx, o.GetName(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting it: %s", https.Clean(err.Error()))
	}
	return nil
}

func (p *Parent) object(name string, der []byte) *unstructured.Unstructured {
	request := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "cert-manager.io/v1", "kind": "CertificateRequest",
		"metadata": map[string]any{
			"name": name, "namespace": p.config.Namespace, "labels": map[string]any{"app.kubernetes.io/managed-by": "chancery"},
		},
		"spec": map[string]any{
			"request": base64.StdEncoding.EncodeToString(request), "isCA": true, "duration": p.config.TTL.String(),
			"usages":    []any{"cert sign", "crl sign"},
			"issuerRef": map[string]any{"name": p.config.Issuer, "kind": p.config.Kind, "group": p.config.Group},
		},
	}}
}

// ours reports whether an object asks what we would ask. The signature in a CSR differs each time, its key does not.
func (p *Parent) ours(o *unstructured.Unstructured, csr *x509.CertificateRequest) bool {
	text, _, _ := unstructured.NestedString(o.Object, "spec", "request")
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return false
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return false
	}
	have, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil || string(have.RawSubjectPublicKeyInfo) != string(csr.RawSubjectPublicKeyInfo) {
		return false
	}
	for field, want := range map[string]string{"name": p.config.Issuer, "kind": p.config.Kind, "group": p.config.Group} {
		if have, _, _ := unstructured.NestedString(o.Object, "spec", "issuerRef", field); have != want {
			return false
		}
	}
	duration, _, _ := unstructured.NestedString(o.Object, "spec", "duration")
	asked, err := time.ParseDuration(duration)
	isCA, _, _ := unstructured.NestedBool(o.Object, "spec", "isCA")
	return err == nil && asked == p.config.TTL && isCA
}

type condition struct{ status, reason, message string }

type conditionsByType map[string]condition

func conditions(o *unstructured.Unstructured) conditionsByType {
	list, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	out := conditionsByType{}
	for _, x := range list {
		m, _ := x.(map[string]any)
		text := func(k string) string { s, _ := m[k].(string); return s }
		out[text("type")] = condition{text("status"), text("reason"), https.Clean(text("message"))}
	}
	return out
}

// bad returns the word for a request that will never be signed, and why.
func (c conditionsByType) bad() (what, why string) {
	switch {
	case c["Denied"].status == "True":
		return "denied", c["Denied"].message
	case c["InvalidRequest"].status == "True":
		return "invalid", c["InvalidRequest"].message
	case c["Ready"].status == "False" && (c["Ready"].reason == "Failed" || c["Ready"].reason == "Denied"):
		return "failed", c["Ready"].message
	}
	return "", ""
}

func (c conditionsByType) waitsFor() string {
	switch {
	case c["Ready"].message != "":
		return c["Ready"].message
	case c["Approved"].status != "True":
		return "it waits for an approval"
	}
	return "cert-manager has not signed it yet"
}

// bounded cuts answers of the API server that no object could have.
type bounded struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.next.RoundTrip(r)
	if err == nil {
		resp.Body = &limited{resp.Body, maxAnswer}
	}
	return resp, err
}

type limited struct {
	io.ReadCloser
	left int
}

// Read implements io.Reader.
func (l *limited) Read(b []byte) (int, error) {
	n, err := l.ReadCloser.Read(b)
	if l.left -= n; l.left < 0 {
		return n, fmt.Errorf("the API server's answer has more than %d bytes", maxAnswer)
	}
	return n, err
}
