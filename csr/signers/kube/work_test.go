package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/csr/signers"
	"github.com/chancery-project/chancery/test/process"
)

// TestRightsThatLack: each right of the shipped role is needed, and what lacks is named. (This API server streams what there is with the watch;
// list is for those that do not.)
func TestRightsThatLack(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		resource string
		keep     []string // verbs
		asks     bool
	}{
		{"podcertificaterequests", []string{"list"}, false}, {"podcertificaterequests/status", nil, true}, {"signers", nil, true},
		{"certificatesigningrequests", []string{"list"}, false},
	} {
		t.Run(fmt.Sprintf("%s %v", tc.resource, tc.keep), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(w *world, c *Config, _ *signers.Config) {
				role := w.role()
				var rules []rbacv1.PolicyRule
				for _, r := range role.Rules {
					if r.Resources[0] == tc.resource {
						r.Verbs = tc.keep
					}
					if len(r.Verbs) > 0 {
						rules = append(rules, r)
					}
				}
				role.Rules = rules
				c.Kubeconfig = account(w.t, w.Server, w.namespace, role)
			})
			var asked *certificatesv1.PodCertificateRequest
			if tc.asks {
				asked = w.ask(w.pod("web-1"), stub(newKey()))
			}
			process.Eventually(t, 30*time.Second, "what lacks is named", func() error {
				for _, l := range w.controller.lines {
					l.mu.Lock()
					errs := []error{}
					for _, r := range l.requests {
						errs = append(errs, r.err)
					}
					l.mu.Unlock()
					if !tc.asks {
						errs = append(errs, l.watch.Err())
					}
					if err := errors.Join(errs...); err != nil && strings.Contains(err.Error(), "should have the rights to list and watch "+strings.TrimSuffix(tc.resource, "/status")) ||
						err != nil && tc.resource == "signers" && strings.Contains(err.Error(), "the verb sign on signers "+w.podSigner) {
						return nil
					}
				}
				return errors.New("not named")
			})
			if asked != nil {
				if got := w.get(asked); len(got.Status.Conditions) > 0 {
					t.Errorf("its status is %+v", got.Status)
				}
				if n := w.auditLines("intent", "PodCertificateRequest"); n != 1 { // signed once, and written again and again
					t.Errorf("%d certificates were signed for a status that cannot be written", n)
				}
			}
		})
	}
}

// TestOnlyTheDriverSigns: who does not drive does nothing and keeps nothing; who takes over signs what waits, and what was signed by the one
// before and not written is signed anew, once.
func TestOnlyTheDriverSigns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.letGo()
	p := w.pod("web-1")
	asked := w.ask(p, stub(newKey()))
	time.Sleep(2 * time.Second) // it looks once a second whether it drives
	if got := w.get(asked); len(got.Status.Conditions) > 0 || w.auditLines("intent", "PodCertificateRequest") > 0 {
		t.Errorf("it was signed: %+v", got.Status)
	}
	for _, l := range w.controller.lines {
		if l.watch.Err() == nil {
			t.Error("it follows requests")
		}
	}
	w.drives.Store(true)
	w.settled(asked, "Issued")
	w.letGo()
}

// TestSignedAndNotWritten: what was signed by a server that ended before it wrote the status is signed anew by the next one, once.
func TestSignedAndNotWritten(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(w *world, c *Config, _ *signers.Config) {
		role := w.role()
		role.Rules = slices.DeleteFunc(role.Rules, func(r rbacv1.PolicyRule) bool { return r.Resources[0] == "podcertificaterequests/status" })
		role.Name = "crash-" + w.namespace
		c.Kubeconfig = account(w.t, w.Server, w.namespace, role)
	})
	asked := w.ask(w.pod("web-1"), stub(newKey()))
	process.Eventually(t, 30*time.Second, "it is signed", func() error {
		if w.auditLines("issued", "") == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	w.letGo()
	before := w.auditLines("intent", "PodCertificateRequest")
	roles := w.Client.RbacV1().ClusterRoles()
	for _, r := range must(roles.List(t.Context(), metav1.ListOptions{})).Items {
		if strings.HasPrefix(r.Name, "crash-"+w.namespace) {
			r.Rules = w.role().Rules
			must(roles.Update(t.Context(), &r, metav1.UpdateOptions{}))
		}
	}
	w.drives.Store(true)
	w.chain([]byte(w.settled(asked, "Issued").Status.CertificateChain))
	if n := w.auditLines("intent", "PodCertificateRequest"); n != before+1 {
		t.Errorf("%d certificates were signed by the first, %d in all", before, n)
	}
}

// letGo ends this replica's driving, and waits until it works on nothing.
func (w *world) letGo() {
	w.t.Helper()
	w.drives.Store(false)
	process.Eventually(w.t, 20*time.Second, "it lets go", func() error {
		for _, l := range w.controller.lines {
			if l.watch.Err() == nil {
				return errors.New("it follows requests")
			}
		}
		return nil
	})
}

// TestD3PodCertificatesCountUntilTheyEnd: each is a consumer of its own for as long as it lives, whatever its pod asks for later: nobody
// knows whether the pod's processes use the next one, or which roots they read.
func TestD3PodCertificatesCountUntilTheyEnd(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	b := board.Open(board.Config{Store: st, Sealer: must(keys.CreateSealer(filepath.Join(dir, "k"))), Domain: td, Replica: "a", Logger: slog.New(slog.DiscardHandler)})
	b.Own(func(n *board.Note) { n.LogID = ca.MinLogID + 1 })
	l := evidence.New(evidence.Config{Board: b, Life: ca.DefaultTTL, MaxLife: ca.DefaultMaxTTL})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = b.Run(ctx) })
	wg.Go(func() { _ = l.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait(); st.Close() })
	w := newWorld(t, func(_ *world, _ *Config, c *signers.Config) { c.Ledger = l })
	p := w.pod("web-1")
	hour := int32(3600)
	ends := map[int64]bool{}
	for range 3 {
		got := w.settled(w.ask(p, stub(newKey()), func(r *certificatesv1.PodCertificateRequest) { r.Spec.MaxExpirationSeconds = &hour }), "Issued")
		ends[got.Status.NotAfter.Unix()] = true
	}
	for version, goal := range map[uint64]document.Goal{5: {Generation: 2}, 6: {Leave: []string{w.issuer.Load().SKI()}}} {
		if err := l.Acknowledge(t.Context(), version, version, goal); err != nil {
			t.Fatal(err)
		}
		behind := b.Mine().Evidence.Behind
		if len(behind) != 3 {
			t.Errorf("%+v: %d are behind, want each certificate", goal, len(behind))
		}
		for _, x := range behind {
			if !ends[x.Until.Unix()] {
				t.Errorf("%+v: one counts until %s; the certificates end at %v", goal, x.Until, ends)
			}
		}
	}
	if ahead := b.Mine().Evidence.Ahead; ahead.Before(time.Now().Add(time.Hour - 5*time.Minute)) {
		t.Errorf("announced is %s only", ahead)
	}
}

// TestBurstOfANode: a kubelet that restarts asks for all of its pods at once; all are met, and each is signed once.
func TestBurstOfANode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.pod("web-1")
	w.letGo()
	const many = 110
	var asked []*certificatesv1.PodCertificateRequest
	for range many {
		asked = append(asked, w.ask(p, stub(newKey())))
	}
	w.drives.Store(true)
	process.Eventually(t, 60*time.Second, "some are met", func() error {
		if w.auditLines("issued", "") < 10 {
			return errors.New("not yet")
		}
		return nil
	})
	for _, a := range asked {
		w.settled(a, "Issued")
	}
	if n := w.auditLines("intent", "PodCertificateRequest "+w.namespace); n != many {
		t.Errorf("%d certificates were signed for %d requests", n, many)
	}
}
