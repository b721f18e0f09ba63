package agent

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"math/big"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/sds/consumers"
	"github.com/chancery-project/chancery/trust"
)

var (
	domain = must(trust.ParseDomain("td"))
	web    = must(trust.ParseID("spiffe://td/ns/foo/sa/web"))
)

// authority is a root that issues.
type authority struct {
	root *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(name string) authority {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	x := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(1000 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := must(x509.CreateCertificate(rand.Reader, x, x, key.Public(), key))
	return authority{must(x509.ParseCertificate(der)), key}
}

func bundleOf(generation uint64, all ...authority) *trust.Bundle {
	var roots []*x509.Certificate
	for _, a := range all {
		roots = append(roots, a.root)
	}
	return must(trust.NewBundle(domain, generation, roots))
}

// world is a keeper in a bubble, and who issues to it.
type world struct {
	*Keeper
	pinned bool

	mu     sync.Mutex // guards all below
	by     authority
	bundle *trust.Bundle
	fail   error
	n      int64 // SVIDs that were issued
}

func (w *world) set(by authority, b *trust.Bundle, fail error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.by, w.bundle, w.fail = by, b, fail
}

func (w *world) issued() int64 {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.n
}

func (w *world) issue(_ context.Context, key crypto.Signer) (rotate.Issued, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fail != nil {
		return rotate.Issued{}, w.fail
	}
	w.n++
	x := &x509.Certificate{
		SerialNumber: big.NewInt(1 + w.n), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(10 * time.Hour),
		URIs: []*url.URL{web.URL()}, KeyUsage: x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, x, w.by.root, key.Public(), w.by.key)
	if err != nil {
		return rotate.Issued{}, err
	}
	return rotate.Issued{Chain: []*x509.Certificate{must(x509.ParseCertificate(der))}, Bundle: w.bundle}, nil
}

// startWorld runs a keeper that has an SVID of an authority, and the first generation of its bundle.
func startWorld(t *testing.T, by authority) *world {
	t.Helper()
	w := &world{by: by, bundle: bundleOf(1, by)}
	w.Keeper = &Keeper{logger: slog.New(slog.DiscardHandler), Keeper: rotate.NewKeeper(rotate.KeeperConfig{ID: web, Logger: slog.New(slog.DiscardHandler), Issue: w.issue})}
	w.Keeper.pinned = func() bool { return w.pinned }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- w.Keeper.Keeper.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	synctest.Wait()
	if err := w.apply(bundleOf(1, by)); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) shows(t *testing.T, generation uint64, leaf, root authority) {
	t.Helper()
	synctest.Wait()
	id, _ := w.Current()
	if id.Bundle.Generation() != generation || !bytes.Equal(id.Leaf().AuthorityKeyId, leaf.root.SubjectKeyId) || !id.Bundle.Roots()[0].Equal(root.root) {
		t.Errorf("shown are generation %d, an SVID of %q under %q", id.Bundle.Generation(), id.Leaf().Issuer, id.Bundle.Roots()[0].Subject)
	}
}

// TestD6AnAgentThatMissedTheReissue: the root above the SVID in use has left the bundle. Another SVID is asked for at once, and the
// bundle comes with it: a working identity is not taken apart, and the agent is not stuck.
func TestD6AnAgentThatMissedTheReissue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old, next := newAuthority("old"), newAuthority("next")
		w := startWorld(t, old)
		w.set(next, bundleOf(3, next), nil)
		_, changed := w.Current()
		if _, unfit := errors.AsType[*rotate.Unfit](w.apply(bundleOf(3, next))); !unfit {
			t.Error("a bundle that does not vouch for the SVID in use was taken as it stands")
		}
		w.shows(t, 1, old, old)
		time.Sleep(unfitSpread)
		<-changed
		w.shows(t, 1, next, next) // what stands for generation 3 has not come yet
		if err := w.apply(bundleOf(3, next)); err != nil {
			t.Errorf("the bundle with another SVID: %v", err)
		}
		w.shows(t, 3, next, next)
		if n := w.issued(); n != 2 {
			t.Errorf("%d SVIDs were issued", n)
		}
	})
}

// TestD6RootsDoNotWaitForEver: if there is no other SVID, what the pinned key has signed counts after a minute; a server's mere word
// never does (invariant 7).
func TestD6RootsDoNotWaitForEver(t *testing.T) {
	for _, pinned := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			old, next := newAuthority("old"), newAuthority("next")
			w := startWorld(t, old)
			w.pinned = pinned
			w.set(next, nil, errors.New("this issuer is tainted: come with a token"))
			for range 6 { // as Sync does
				if err := w.apply(bundleOf(3, next)); err == nil {
					t.Error("it was taken at once")
				}
				time.Sleep(10 * time.Second)
			}
			w.shows(t, 1, old, old)
			err := w.apply(bundleOf(3, next))
			if pinned != (err == nil) {
				t.Errorf("after a minute, signed %v: %v", pinned, err)
			}
			if !pinned {
				w.shows(t, 1, old, old)
				return
			}
			w.shows(t, 3, old, next)
			w.set(next, bundleOf(3, next), nil)
			time.Sleep(2 * time.Minute)
			w.shows(t, 3, next, next)
		})
	}
}

// TestD6ReissueOnceForEachSVID: of a named issuer's SVIDs each is replaced once, within the time that was given; others stay.
func TestD6ReissueOnceForEachSVID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old, next := newAuthority("old"), newAuthority("next")
		w := startWorld(t, old)
		w.reissue([][]byte{next.root.SubjectKeyId}, time.Second)
		time.Sleep(time.Minute)
		if n := w.issued(); n != 1 {
			t.Errorf("%d SVIDs: one of another issuer was replaced", n)
		}
		w.reissue([][]byte{next.root.SubjectKeyId, old.root.SubjectKeyId}, 2*time.Second)
		for range 5 { // as often as it is said
			w.reissue([][]byte{old.root.SubjectKeyId}, 2*time.Second)
		}
		time.Sleep(2 * time.Second)
		if n := w.issued(); n != 2 {
			t.Errorf("%d SVIDs within the time", n)
		}
		// A server that does not know yet has signed by the old issuer again: that one counts, too.
		w.set(next, bundleOf(2, old, next), nil)
		w.reissue([][]byte{old.root.SubjectKeyId}, 2*time.Second)
		time.Sleep(2 * time.Second)
		w.reissue([][]byte{old.root.SubjectKeyId}, 2*time.Second)
		time.Sleep(time.Minute)
		if n := w.issued(); n != 3 {
			t.Errorf("%d SVIDs at the end", n)
		}
		if id, _ := w.Current(); !bytes.Equal(id.Leaf().AuthorityKeyId, next.root.SubjectKeyId) {
			t.Error("it has one of the old issuer still")
		}
	})
}

// TestD6ReissueDoesNotGoRound: one server asks for SVIDs to be replaced whose issuer another signs with still. The agent goes on asking,
// ever more seldom, and is as quick as before once the new issuer is there.
func TestD6ReissueDoesNotGoRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old, next := newAuthority("old"), newAuthority("next")
		w := startWorld(t, old)
		issuers := [][]byte{old.root.SubjectKeyId}
		for range 600 { // Sync says it whenever the SVID changes
			w.reissue(issuers, 2*time.Second)
			time.Sleep(time.Second)
		}
		if n := w.issued(); n < 3 || n > 20 {
			t.Errorf("%d SVIDs in ten minutes", n)
		}
		w.set(next, bundleOf(2, old, next), nil)
		w.Renew(0)
		time.Sleep(time.Second)
		n := w.issued()
		w.reissue([][]byte{next.root.SubjectKeyId}, 2*time.Second)
		time.Sleep(2 * time.Second)
		if w.issued() != n+1 {
			t.Errorf("%d SVIDs within the time of an issuer that is named for the first time", w.issued()-n)
		}
	})
}

// TestD1WhatIsReported: the lowest generation of the agent and its consumers, and all issuers that one of them may present still.
func TestD1WhatIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := must(consumers.Open(consumers.Config{File: filepath.Join(t.TempDir(), "consumers")}))
		defer table.Close()
		own, other := newAuthority("own"), newAuthority("other")
		w := startWorld(t, own)
		w.table = table
		s, changed := w.evidence()
		id, _ := w.Current()
		if !bytes.Equal(s.GetAgent(), table.ID()) || s.GetGeneration() != 1 || s.GetConsumers() != 0 || len(s.GetHeld()) != 1 || !s.GetUntil().AsTime().Equal(id.NotAfter()) {
			t.Errorf("an agent without consumers says %v", s)
		}
		end := id.NotAfter().Add(time.Hour)
		stream := table.Join(consumers.Process{UID: 1, PID: 2, Start: 3}, "sds_delta")
		if err := stream.Hand(t.Context(), []consumers.SVID{{Name: "default", Version: "v", Issuer: other.root.SubjectKeyId, Serial: "1", NotAfter: end}}); err != nil {
			t.Fatal(err)
		}
		<-changed
		s, changed = w.evidence()
		if s.GetGeneration() != 0 || s.GetConsumers() != 1 || len(s.GetHeld()) != 2 || !s.GetUntil().AsTime().Equal(end) || len(s.GetLagging()) != 1 ||
			!strings.Contains(s.GetLagging()[0].GetWhy(), "no validation context") {
			t.Errorf("with one that trusts nobody knows what it says %v", s)
		}
		stream.See(consumers.Observed{SVIDs: map[string]string{"default": "v"}, Contexts: map[string]uint64{"ROOTCA": 1}})
		<-changed
		if s, _ = w.evidence(); s.GetGeneration() != 1 || len(s.GetLagging()) != 0 {
			t.Errorf("with one that has acknowledged it says %v", s)
		}
		for _, c := range Evidence(func() []*Keeper { return []*Keeper{w.Keeper} }) {
			if c == nil {
				t.Error("no collector")
			}
		}
	})
}
