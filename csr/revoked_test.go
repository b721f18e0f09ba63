package csr_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/revocation"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/trust"
)

// revoking lets a test say what is revoked.
type revoking struct {
	set atomic.Pointer[revocation.Set]
}

func (r *revoking) in(_ *world, c *csr.Config) { c.Revocations = r.set.Load }

func serialOf(i *trust.Identity) string { return fmt.Sprintf("%x", i.Leaf().SerialNumber.Bytes()) }

// TestRevokedIdentityGetsNothing: on both APIs, by token and by certificate, for itself and through a node agent; all
// others do, and so does it once it is restored.
func TestRevokedIdentityGetsNothing(t *testing.T) {
	var r revoking
	w := newWorld(t, withPods, r.in)
	own := w.svid(webURI, freshPod("uid-web"))
	calls := map[string]struct {
		call  call
		asked string
	}{
		"token": {bearer(token(claims{uid: "uid-web"})), ""}, "certificate": {shows(own), ""}, "node agent": {bearer(ztunnel()), webURI},
	}
	r.set.Store(revocation.NewSet([]string{webURI}, nil, true))
	for name, c := range calls {
		_, err := w.istio(c.call, ask(c.asked))
		if _, reason, _ := refusal(err); reason != csr.ReasonRevoked {
			t.Errorf("%s, Istio: %v", name, err)
		}
		resp, err := w.native(c.call, askNative(c.asked))
		if err == nil { // the batch's caller is fine, the request is not
			x := resp.GetResults()[0].GetRefusal()
			if x.GetReason() != csr.ReasonRevoked || codes.Code(x.GetCode()) != codes.PermissionDenied || !strings.Contains(x.GetMessage(), "restores") {
				t.Errorf("%s, native: %v", name, resp)
			}
		} else if st, reason, _ := refusal(err); reason != csr.ReasonRevoked || st.Code() != codes.PermissionDenied {
			t.Errorf("%s, native: %v", name, err)
		}
	}
	for id, c := range map[string]call{dbURI: bearer(token(claims{account: "db", uid: "uid-db"})), "spiffe://cluster.local/ns/istio-system/sa/ztunnel": bearer(ztunnel())} {
		w.expect(t, c, id, "")
	}
	r.set.Store(revocation.NewSet(nil, []string{serialOf(own)}, true)) // restored
	w.expect(t, calls["token"].call, webURI, "")
}

// freshPod is the attestation of a pod whose token was just seen.
func freshPod(uid string) *ca.Attestation {
	a := fresh("Kubernetes")
	a.PodHash = csr.PodHash("Kubernetes", uid)
	return a
}

// TestD16RevokedCertificateRenewsNothing: whoever holds its key; a good token does, also beside it.
func TestD16RevokedCertificateRenewsNothing(t *testing.T) {
	var r revoking
	w := newWorld(t, withPods, r.in)
	stolen, other := w.svid(webURI, freshPod("uid-web")), w.svid(webURI, freshPod("uid-web"))
	r.set.Store(revocation.NewSet(nil, []string{serialOf(stolen)}, true))
	w.expect(t, shows(stolen), "", csr.ReasonSVIDRevoked)
	w.expect(t, shows(other), webURI, "")
	good, bad := token(claims{uid: "uid-web"}), token(claims{uid: "uid-web", audience: "other"})
	w.expect(t, shows(stolen, "authorization", "Bearer "+good), webURI, "")
	w.expect(t, shows(stolen, "authorization", "Bearer "+bad), "", csr.ReasonTokenAudience) // the token's reason says more; it is refused

	// Until the log was read after a start it is not known which certificates are revoked.
	r.set.Store(revocation.NewSet(nil, []string{serialOf(stolen)}, false))
	w.expect(t, shows(stolen), "", csr.ReasonSVIDRevoked)
	for _, err := range w.both(shows(other)) {
		wantStatus(t, err, codes.Unavailable, csr.ReasonNotReady, "")
	}
	w.expect(t, bearer(good), webURI, "")
}

// TestD21NativeAnswersCarryCheckpoints of that moment.
func TestD21NativeAnswersCarryCheckpoints(t *testing.T) {
	var n atomic.Int32
	w := newWorld(t, func(_ *world, c *csr.Config) {
		c.Checkpoints = func() []string { return []string{fmt.Sprintf("checkpoint %d", n.Add(1))} }
	})
	for i := range 2 {
		resp, err := w.native(bearer(token(claims{})), askNative(""))
		if err != nil || len(resp.GetCheckpoints()) != 1 || resp.GetCheckpoints()[0] != fmt.Sprintf("checkpoint %d", i+1) {
			t.Errorf("%v, %v", resp.GetCheckpoints(), err)
		}
	}
}

// TestSyncIsForKnownCallers: who cannot prove who he is is not read; who is revoked still gets CRLs by his token.
func TestSyncIsForKnownCallers(t *testing.T) {
	var r revoking
	hub := agents.New(agents.Config{})
	w := newWorld(t, withPods, r.in, func(_ *world, c *csr.Config) { c.Agents = hub })
	hub.Publish(&chanceryv1.SyncUpdate{Crls: [][]byte{[]byte("crl")}})
	stolen := w.svid(webURI, freshPod("uid-web"))
	r.set.Store(revocation.NewSet([]string{dbURI}, []string{serialOf(stolen)}, true))
	for name, tc := range map[string]struct {
		call   call
		reason string // empty: an update comes
	}{
		"token":               {bearer(token(claims{uid: "uid-web"})), ""},
		"certificate":         {shows(w.svid(webURI, freshPod("uid-web"))), ""},
		"revoked, with token": {bearer(token(claims{account: "db", uid: "uid-db"})), ""},
		"revoked certificate": {shows(stolen), csr.ReasonSVIDRevoked},
		"nothing":             {call{}, csr.ReasonNoCredential},
		"bad token":           {bearer(token(claims{audience: "other"})), csr.ReasonTokenAudience},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(w.context(tc.call), 20*time.Second)
			defer cancel()
			s, err := chanceryv1.NewIssuanceClient(w.dial(tc.call.show)).Sync(ctx)
			if err != nil {
				t.Fatal(err)
			}
			u, err := s.Recv()
			if tc.reason != "" {
				if _, reason, _ := refusal(err); reason != tc.reason {
					t.Errorf("got %v, %v; want %s", u, err, tc.reason)
				}
				return
			}
			if err != nil || len(u.GetCrls()) != 1 || u.GetVersion() == 0 {
				t.Fatalf("got %v, %v", u, err)
			}
			if err := s.CloseSend(); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("after the agent's end: %v", err)
			}
		})
	}
}

// TestD23WhoGetsNoCRLIsNamed: identities with certificates by Istio's API, and by ours where no agent says it serves them.
func TestD23WhoGetsNoCRLIsNamed(t *testing.T) {
	hub := agents.New(agents.Config{})
	w := newWorld(t, func(_ *world, c *csr.Config) { c.Agents = hub })
	if got := hub.NotEnforcing(time.Now()); len(got) != 0 {
		t.Errorf("at the start: %q", got)
	}
	if _, err := w.istio(bearer(token(claims{})), ask("")); err != nil {
		t.Fatal(err)
	}
	if _, err := w.native(bearer(token(claims{account: "db"})), askNative("")); err != nil {
		t.Fatal(err)
	}
	got := strings.Join(hub.NotEnforcing(time.Now()), "\n")
	if !strings.Contains(got, webURI+" have certificates by the Istio API") || !strings.Contains(got, dbURI+" have certificates, and no agent") {
		t.Errorf("got %q", got)
	}
	if got := hub.NotEnforcing(time.Now().Add(48 * time.Hour)); len(got) != 0 {
		t.Errorf("once the certificates have ended: %q", got)
	}
}

// TestSyncEndsWithTheServer at once, and not when the time for calls under way is over.
func TestSyncEndsWithTheServer(t *testing.T) {
	hub := agents.New(agents.Config{})
	w := newWorld(t, func(_ *world, c *csr.Config) { c.Agents = hub })
	hub.Publish(&chanceryv1.SyncUpdate{})
	s, err := chanceryv1.NewIssuanceClient(w.dial(nil)).Sync(w.context(bearer(token(claims{}))))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	if _, err := s.Recv(); err == nil || !strings.Contains(err.Error(), "the server is stopping") {
		t.Errorf("got %v", err)
	}
}
