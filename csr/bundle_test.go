package csr_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/answers"
	"github.com/chancery-project/chancery/csr/others"
	"github.com/chancery-project/chancery/trust"
)

// signing is a bundle key that can be taken away.
type signing struct {
	signer atomic.Pointer[trust.BundleSigner] // nil: there is none
	bundle atomic.Pointer[trust.Bundle]       // nil: the issuer's
}

func bundleSigner(n byte) *trust.BundleSigner {
	return trust.NewBundleSigner(ed25519.NewKeyFromSeed(bytes.Repeat([]byte{n}, ed25519.SeedSize)))
}

var errNoBundleKey = errors.New("unsealing /var/lib/chancery/secret.db")

func (s *signing) of(w *world) *answers.Bundles {
	s.signer.Store(bundleSigner(1))
	own := w.issuer.Load().Bundle()
	return answers.NewBundles(answers.Config{
		Bundle: func() (*trust.Bundle, error) {
			if b := s.bundle.Load(); b != nil {
				return b, nil
			}
			return own, nil
		},
		Signer: func() (*trust.BundleSigner, error) {
			if x := s.signer.Load(); x != nil {
				return x, nil
			}
			return nil, errNoBundleKey
		},
	})
}

func (s *signing) in(w *world, c *csr.Config) { c.Bundles = s.of(w) }

// read verifies a signed bundle as an agent does that has pinned the key.
func read(t testing.TB, m *chanceryv1.SignedBundle, pinned ed25519.PublicKey) *chanceryv1.Bundle {
	t.Helper()
	if err := (trust.SignedBundle{Bundle: m.GetBundle(), Signature: m.GetSignature(), Key: m.GetKey()}).Verify(pinned); err != nil {
		t.Error(err)
	}
	b := new(chanceryv1.Bundle)
	if err := proto.Unmarshal(m.GetBundle(), b); err != nil {
		t.Error(err)
	}
	return b
}

// TestD6GetBundleIsForAnybody, also while nothing can be issued; who may not ask for it hears no reason of ours.
func TestD6GetBundleIsForAnybody(t *testing.T) {
	var s signing
	w := newWorld(t, s.in)
	pinned := s.signer.Load().Public()
	get := func() (*chanceryv1.SignedBundle, error) {
		return chanceryv1.NewIssuanceClient(w.dial(nil)).GetBundle(w.context(call{}), &chanceryv1.GetBundleRequest{})
	}
	m, err := get()
	if err != nil {
		t.Fatal(err)
	}
	b := read(t, m, pinned)
	if b.GetTrustDomain() != "cluster.local" || b.GetGeneration() != 1 || len(b.GetRoots()) != 1 || !bytes.Equal(b.GetRoots()[0], w.made.Root.Raw) {
		t.Errorf("got %v", b)
	}
	w.issuer.Store(nil)
	s.bundle.Store(must(trust.NewBundle(td, 2, []*x509.Certificate{w.made.Root})))
	if m, err = get(); err != nil || read(t, m, pinned).GetGeneration() != 2 {
		t.Errorf("while nothing can be issued: %v", err)
	}
	s.signer.Store(nil)
	_, err = get()
	wantStatus(t, err, codes.Unavailable, csr.ReasonNotReady, "the server's log says why")
	if strings.Contains(status.Convert(err).Message(), "secret.db") {
		t.Errorf("a stranger is told of our files: %v", err)
	}
	if n := w.metric("chancery_csr_denials_not_logged_total"); n != 0 || len(w.records(audit.Denied)) != 0 {
		t.Errorf("strangers fill the audit log: %v", w.records(audit.Denied))
	}
	without := newWorld(t)
	if _, err := chanceryv1.NewIssuanceClient(without.dial(nil)).GetBundle(t.Context(), &chanceryv1.GetBundleRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("a server that signs nothing: %v", err)
	}
}

// TestD6AnswersCarryTheSignedBundle of the same snapshot as the certificates, and do without when it cannot be signed.
func TestD6AnswersCarryTheSignedBundle(t *testing.T) {
	var s signing
	w := newWorld(t, s.in)
	pinned := s.signer.Load().Public()
	s.bundle.Store(must(trust.NewBundle(td, 7, []*x509.Certificate{w.made.Root}))) // newer than the issuer's
	for range 2 {
		resp, err := w.native(bearer(token(claims{})), askNative(""))
		if err != nil {
			t.Fatal(err)
		}
		if b := read(t, resp.GetSignedBundle(), pinned); !proto.Equal(b, resp.GetBundle()) || b.GetGeneration() != 1 {
			t.Errorf("signed is %v, beside %v", b, resp.GetBundle())
		}
	}
	s.signer.Store(nil)
	resp, err := w.native(bearer(token(claims{})), askNative(""))
	if err != nil || resp.GetResults()[0].GetCertificate() == nil || resp.GetSignedBundle() != nil {
		t.Errorf("without a key: %v, %v", resp.GetResults(), err)
	}
}

// TestBoundOfOpenMethods: strangers' calls of GetBundle are bounded, and keep neither health out nor those who are known.
func TestBoundOfOpenMethods(t *testing.T) {
	held, begun := make(chan struct{}), make(chan struct{}, others.Max)
	var s signing
	w := newWorld(t, s.in, func(w *world, c *csr.Config) {
		own := w.issuer.Load().Bundle()
		signer := s.signer.Load()
		c.Bundles = answers.NewBundles(answers.Config{Signer: func() (*trust.BundleSigner, error) { return signer, nil }, Bundle: func() (*trust.Bundle, error) {
			begun <- struct{}{}
			<-held
			return own, nil
		}})
	})
	conn := w.dial(nil)
	done := make(chan error, others.Max)
	for range others.Max {
		go func() {
			_, err := chanceryv1.NewIssuanceClient(conn).GetBundle(w.t.Context(), &chanceryv1.GetBundleRequest{})
			done <- err
		}()
	}
	for range others.Max {
		<-begun
	}
	if _, err := chanceryv1.NewIssuanceClient(w.dial(nil)).GetBundle(t.Context(), &chanceryv1.GetBundleRequest{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more: %v", err)
	}
	if _, err := w.native(bearer(token(claims{})), askNative("")); err != nil {
		t.Errorf("who is known: %v", err)
	}
	w.server.SetReady(true)
	if err := w.healthy(); err != nil {
		t.Errorf("health: %v", err)
	}
	close(held)
	for range others.Max {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	// Nothing of a stranger's is read: the answer comes though nothing was sent.
	for ctx := t.Context(); ; { // until the server has seen the end of one
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, chanceryv1.Issuance_GetBundle_FullMethodName)
		if err != nil {
			t.Fatal(err)
		}
		m := new(chanceryv1.SignedBundle)
		if err := stream.RecvMsg(m); status.Code(err) == codes.ResourceExhausted {
			continue
		} else if err != nil || len(m.GetSignature()) == 0 {
			t.Errorf("got %v, %v", m, err)
		}
		break
	}
}

// second makes another root, and an issuer of the world's key under it.
func (w *world) second() (root *x509.Certificate, issuer func(generation uint64, roots ...*x509.Certificate) *ca.Issuer) {
	w.t.Helper()
	made := must(ca.Create(w.t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID + 1, Log: w.log}))
	return made.Root, func(generation uint64, roots ...*x509.Certificate) *ca.Issuer {
		bundle := must(trust.NewBundle(td, generation, roots))
		return must(ca.NewIssuer(ca.IssuerConfig{Domain: td, Key: made.IssuerKey, Chain: []*x509.Certificate{made.Issuer}, Bundle: bundle, LogID: ca.MinLogID + 1, Log: w.log}))
	}
}

// TestInvariant6ClientsFollowTheBundle: whose certificate is taken follows the roots of the moment, over the same connection and
// without a restart; under a root that has left the bundle nobody renews.
func TestInvariant6ClientsFollowTheBundle(t *testing.T) {
	w := newWorld(t, withPods)
	root1, first := w.made.Root, w.issuer.Load()
	root2, issuer2 := w.second()
	att := freshPod("uid-web")
	old := w.svid(webURI, att)
	w.issuer.Store(issuer2(2, root1, root2))
	next := w.svid(webURI, att)
	oldConn, nextConn := chanceryv1.NewIssuanceClient(w.dial(old)), chanceryv1.NewIssuanceClient(w.dial(next))
	renew := func(c chanceryv1.IssuanceClient) error {
		_, err := c.Issue(w.context(call{}), &chanceryv1.IssueRequest{Requests: []*chanceryv1.CertificateRequest{askNative("")}})
		return err
	}
	for _, step := range []struct {
		name      string
		issuer    *ca.Issuer
		old, next bool
	}{
		{"before the second root", first, true, false},
		{"both, signed under the first", w.newIssuer(w.log, 2, root1, root2), true, true},
		{"both, signed under the second", issuer2(2, root1, root2), true, true},
		{"the first has retired", issuer2(3, root2), false, true},
	} {
		w.issuer.Store(step.issuer)
		for name, c := range map[string]struct {
			client chanceryv1.IssuanceClient
			ok     bool
		}{"old": {oldConn, step.old}, "next": {nextConn, step.next}} {
			err := renew(c.client)
			if c.ok && err != nil {
				t.Errorf("%s, %s: %v", step.name, name, err)
			}
			if !c.ok {
				wantStatus(t, err, codes.Unauthenticated, csr.ReasonSVID, "")
			}
		}
	}
	if err := renew(chanceryv1.NewIssuanceClient(w.dial(old))); status.Code(err) != codes.Unauthenticated { // on a new connection
		t.Errorf("a certificate of the root that retired: %v", err)
	}
	if _, err := w.native(shows(old, bearer(token(claims{uid: "uid-web"})).headers...), askNative("")); err != nil {
		t.Errorf("with a token beside it: %v", err)
	}
}

// taints are keys of authorities that are tainted.
type taints struct {
	keys atomic.Pointer[[]crypto.PublicKey]
}

func (x *taints) set(certs ...*x509.Certificate) {
	var keys []crypto.PublicKey
	for _, c := range certs {
		keys = append(keys, c.PublicKey)
	}
	x.keys.Store(&keys)
}

func (x *taints) in(_ *world, c *csr.Config) {
	x.set()
	c.Tainted = func(cert *x509.Certificate) bool {
		for _, k := range *x.keys.Load() {
			if trust.SameKey(cert.PublicKey, k) {
				return true
			}
		}
		return false
	}
}

// TestD16TaintedIssuer: whose certificate leads to a root by a tainted key alone may have made it himself. It renews nothing and opens
// no stream, while a token counts, beside it or alone.
func TestD16TaintedIssuer(t *testing.T) {
	var x taints
	w := newWorld(t, withPods, x.in)
	root1, issuer1 := w.made.Root, w.made.Issuer
	root2, issuer2 := w.second()
	att := freshPod("uid-web")
	old := w.svid(webURI, att)
	w.issuer.Store(issuer2(2, root1, root2))
	next := w.svid(webURI, att)
	good := bearer(token(claims{uid: "uid-web"})).headers
	for name, tainted := range map[string][]*x509.Certificate{"the issuer": {issuer1}, "its root": {root1}, "both": {root1, issuer1}} {
		x.set(tainted...)
		_, err := w.native(shows(old), askNative(""))
		wantStatus(t, err, codes.Unauthenticated, csr.ReasonSVIDTainted, "")
		_, err = w.istio(shows(old), ask(""))
		wantStatus(t, err, codes.Unauthenticated, csr.ReasonSVIDTainted, "")
		stream, err := chanceryv1.NewIssuanceClient(w.dial(old)).Sync(w.context(call{}))
		if err == nil {
			_, err = stream.Recv()
		}
		wantStatus(t, err, codes.Unauthenticated, csr.ReasonSVIDTainted, "")
		for what, c := range map[string]call{"of another issuer": shows(next), "with a token": shows(old, good...), "by token": {headers: good}} {
			if resp, err := w.native(c, askNative("")); err != nil || resp.GetResults()[0].GetCertificate() == nil {
				t.Errorf("%s, %s: %v, %v", name, what, err, resp.GetResults())
			}
		}
		_, err = w.native(shows(old, bearer(token(claims{audience: "other"})).headers...), askNative(""))
		wantStatus(t, err, codes.Unauthenticated, csr.ReasonTokenAudience, "")
	}
	x.set()
	if _, err := w.native(shows(old), askNative("")); err != nil {
		t.Errorf("untainted: %v", err)
	}
	n := 0
	for _, r := range w.records(audit.Denied) {
		if r.Reason == csr.ReasonSVIDTainted && strings.Contains(r.Detail, fmt.Sprintf("%x", old.Leaf().SerialNumber)) {
			n++
		}
	}
	if n != 9 {
		t.Errorf("the audit log has %d of 9 refusals", n)
	}
}

// TestD16TaintWhileARequestWaits: it is asked again before each signature.
func TestD16TaintWhileARequestWaits(t *testing.T) {
	var asked atomic.Int32
	w := newWorld(t, withPods, func(_ *world, c *csr.Config) {
		c.Tainted = func(*x509.Certificate) bool { return asked.Add(1) > 2 } // issuer and root, when the caller is known
	})
	resp, err := w.native(shows(w.svid(webURI, freshPod("uid-web"))), askNative(""))
	if err != nil || resp.GetResults()[0].GetRefusal().GetReason() != csr.ReasonSVIDTainted {
		t.Errorf("got %v, %v", resp.GetResults(), err)
	}
}

// TestD4NothingIsSignedForWhoWaits when the server is told of a taint meanwhile.
func TestD4NothingIsSignedForWhoWaits(t *testing.T) {
	var calls atomic.Int32
	w := newWorld(t, func(w *world, c *csr.Config) {
		issuer := c.Issuer
		c.Issuer = func() (*ca.Issuer, error) {
			if calls.Add(1) > 1 {
				return nil, errNotReady
			}
			return issuer()
		}
	})
	resp, err := w.native(bearer(token(claims{})), askNative(""))
	if err != nil || codes.Code(resp.GetResults()[0].GetRefusal().GetCode()) != codes.Unavailable || resp.GetResults()[0].GetRefusal().GetReason() != csr.ReasonNotReady {
		t.Errorf("got %v, %v", resp.GetResults(), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := w.istio(bearer(token(claims{})), ask("")); status.Code(err) != codes.Unavailable || ctx.Err() != nil {
		t.Errorf("got %v", err)
	}
}
