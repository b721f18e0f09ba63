package rotate

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"log/slog"
	"math/big"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// bundle returns a generation of the roots with a CRL for each of the authorities, which must be roots; revoked serials
// are on the first.
func (a *authority) bundle(generation uint64, life time.Duration, issuers []*authority, revoked ...int64) *trust.Bundle {
	a.t.Helper()
	td, err := trust.ParseDomain("td")
	if err != nil {
		a.t.Fatal(err)
	}
	roots := []*x509.Certificate{a.root}
	for _, i := range issuers {
		if i != a {
			roots = append(roots, i.root)
		}
	}
	b, err := trust.NewBundle(td, generation, roots)
	if err != nil {
		a.t.Fatal(err)
	}
	var ders [][]byte
	for n, i := range issuers {
		l := &x509.RevocationList{Number: big.NewInt(time.Now().Unix()), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(life)}
		for _, serial := range revoked {
			if n == 0 {
				l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: big.NewInt(serial), RevocationTime: time.Now()})
			}
		}
		der, err := x509.CreateRevocationList(rand.Reader, l, i.root, i.key)
		if err != nil {
			a.t.Fatal(err)
		}
		ders = append(ders, der)
	}
	crls, err := trust.NewCRLs(b, ders, nil, time.Now())
	if err != nil {
		a.t.Fatal(err)
	}
	return b.WithCRLs(crls)
}

func adopt(t *testing.T, k *Keeper, b *trust.Bundle) {
	t.Helper()
	if err := k.Adopt(b); err != nil {
		t.Fatal(err)
	}
}

// wantCRLs checks how many CRLs are shown, and what is said of others.
func wantCRLs(t *testing.T, k *Keeper, n int, withheld string) {
	t.Helper()
	id, _ := k.Current()
	if got := len(id.Bundle.CRLs().DER()); got != n {
		t.Errorf("%d CRLs are shown, want %d", got, n)
	}
	if why := k.Withheld(); (why == "") != (withheld == "") || !strings.Contains(why, withheld) {
		t.Errorf("withheld because of %q, want %q", why, withheld)
	}
}

// CRLs without that of the own issuer, or with one that has ended, would make Envoy refuse peers that are not revoked.
func TestD22CRLsThatDoNotFitAreWithheld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuthority(t, 10*time.Hour)
		other := newAuthority(t, time.Hour)
		k := startKeeper(t, a, nil)
		wantCRLs(t, k, 0, "")
		adopt(t, k, a.bundle(2, time.Hour, []*authority{a, other}))
		wantCRLs(t, k, 2, "")
		_, changed := k.Current()
		adopt(t, k, a.bundle(2, time.Hour, []*authority{other}))
		wantCRLs(t, k, 0, "no CRL of the issuer")
		<-changed
		adopt(t, k, a.bundle(2, time.Hour, []*authority{a, other}))
		wantCRLs(t, k, 2, "")

		time.Sleep(58 * time.Minute) // nobody brings newer ones
		wantCRLs(t, k, 2, "")
		time.Sleep(time.Minute + checkEvery)
		wantCRLs(t, k, 0, "ends at")
		adopt(t, k, a.bundle(2, time.Hour, []*authority{a}))
		wantCRLs(t, k, 1, "")
		adopt(t, k, a.bundle(2, time.Hour, nil))
		wantCRLs(t, k, 0, "")
	})
}

func TestAdoptedBundlesAreKeptOverRenewals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuthority(t, time.Hour) // answers with generation 1 and its own root
		other := newAuthority(t, time.Hour)
		a.set(errors.New("not yet"), false)
		k := startKeeper(t, a, nil)
		adopt(t, k, a.bundle(3, 24*time.Hour, []*authority{a, other})) // before there is an SVID
		a.set(nil, false)
		time.Sleep(time.Minute)
		id, changed := k.Current()
		if id == nil {
			t.Fatal("no SVID")
		}
		if id.Bundle.Generation() != 3 || len(id.Bundle.Roots()) != 2 {
			t.Errorf("the first SVID shows generation %d", id.Bundle.Generation())
		}
		wantCRLs(t, k, 2, "")
		<-changed // renewed
		next, _ := k.Current()
		if next.Leaf() == id.Leaf() || next.Bundle.Generation() != 3 {
			t.Errorf("an older answer took generation 3 back to %d", next.Bundle.Generation())
		}
		wantCRLs(t, k, 2, "")

		// The same again changes nothing that anybody would be told of.
		same := a.bundle(3, 24*time.Hour, []*authority{a})
		adopt(t, k, same)
		_, changed = k.Current()
		adopt(t, k, same)
		select {
		case <-changed:
			t.Error("the same bundle again was announced as a change")
		default:
		}
	})
}

// D22: what stands for a generation are its roots and its CRLs. An answer brings newer roots, but no CRLs: it does not count as the
// generation until that has come by Adopt, or a rotation would go on before its new issuer's CRL is there.
func TestD22AnAnswerIsNoGeneration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, other := newAuthority(t, time.Hour), newAuthority(t, time.Hour)
		k := startKeeper(t, a, nil)
		if id, _ := k.Current(); id.Bundle.Generation() != 0 {
			t.Errorf("before anything was adopted generation %d is shown", id.Bundle.Generation())
		}
		adopt(t, k, a.bundle(1, 24*time.Hour, []*authority{a}))
		a.answer(a.bundle(2, 24*time.Hour, []*authority{a, other}).WithCRLs(nil))
		_, changed := k.Current()
		<-changed // renewed
		id, _ := k.Current()
		if id.Bundle.Generation() != 1 || len(id.Bundle.Roots()) != 2 || len(id.Bundle.CRLs().DER()) != 1 {
			t.Errorf("%d roots and %d CRLs are shown as generation %d", len(id.Bundle.Roots()), len(id.Bundle.CRLs().DER()), id.Bundle.Generation())
		}
		if _, is := errors.AsType[*trust.Older](k.Adopt(a.bundle(1, 24*time.Hour, []*authority{a}))); !is {
			t.Error("roots that an answer has replaced were adopted")
		}
		adopt(t, k, a.bundle(2, 24*time.Hour, []*authority{a, other}))
		if id, _ := k.Current(); id.Bundle.Generation() != 2 || len(id.Bundle.CRLs().DER()) != 2 {
			t.Errorf("adopted: generation %d, %d CRLs", id.Bundle.Generation(), len(id.Bundle.CRLs().DER()))
		}
	})
}

// D4: a server that was asleep while the roots changed signs under one that is gone. Its answers are refused, as often as it gives
// any; the SVID in use stays.
func TestD4AnswersOfAServerThatWasAsleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old, next := newAuthority(t, time.Hour), newAuthority(t, time.Hour)
		var mu sync.Mutex // guards both
		sleeps := false
		var refused []error
		sleep := func(is bool) {
			mu.Lock()
			defer mu.Unlock()
			sleeps = is
		}
		k := NewKeeper(KeeperConfig{
			ID: old.id(), Logger: slog.New(slog.DiscardHandler), Observe: func(err error) {
				mu.Lock()
				defer mu.Unlock()
				refused = append(refused, err)
			},
			Issue: func(ctx context.Context, key crypto.Signer) (Issued, error) {
				mu.Lock()
				defer mu.Unlock()
				if sleeps {
					return old.issue(ctx, key) // under generation 1
				}
				return next.issue(ctx, key)
			},
		})
		next.answer(next.bundle(3, time.Hour, []*authority{next}).WithCRLs(nil))
		ctx, cancel := context.WithCancel(t.Context())
		go k.Run(ctx)
		defer cancel()
		synctest.Wait()
		adopt(t, k, next.bundle(3, 48*time.Hour, []*authority{next}))
		first, changed := k.Current()
		sleep(true)
		time.Sleep(45 * time.Minute)
		synctest.Wait()
		if now, _ := k.Current(); now.Leaf() != first.Leaf() {
			t.Error("an SVID that only a root vouches for which has left is served")
		}
		mu.Lock()
		last := refused[len(refused)-1]
		mu.Unlock()
		if err := last; err == nil || !strings.Contains(err.Error(), "generation 3 are there already") {
			t.Errorf("the answer was not refused: %v", err)
		}
		sleep(false)
		<-changed
		if now, _ := k.Current(); now.Leaf() == first.Leaf() {
			t.Error("no other SVID from a server that is awake")
		}
	})
}

// D6: roots that do not vouch for the SVID in use are refused, as a server's word (invariant 7); as the authority's they count.
func TestD6EnforcedRootsCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, other := newAuthority(t, time.Hour), newAuthority(t, time.Hour)
		k := startKeeper(t, a, nil)
		before, changed := k.Current()
		b := other.bundle(9, 48*time.Hour, []*authority{other})
		if _, unfit := errors.AsType[*Unfit](k.Adopt(b)); !unfit {
			t.Error("roots that do not vouch for the SVID in use were taken")
		}
		if err := k.Enforce(b); err != nil {
			t.Fatal(err)
		}
		<-changed
		now, _ := k.Current()
		if now.Leaf() != before.Leaf() || now.Bundle.Generation() != 9 || !now.Bundle.Roots()[0].Equal(other.root) {
			t.Errorf("shown is generation %d", now.Bundle.Generation())
		}
	})
}

func TestInvariant7AdoptRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuthority(t, time.Hour)
		k := startKeeper(t, a, nil)
		before, _ := k.Current()
		other := newAuthority(t, time.Hour)
		if err := k.Adopt(other.bundle(9, time.Hour, []*authority{other})); err == nil || !strings.Contains(err.Error(), "does not verify against the new roots") {
			t.Errorf("another CA's roots: %v", err)
		}
		foreign, err := trust.ParseDomain("other")
		if err != nil {
			t.Fatal(err)
		}
		b, err := trust.NewBundle(foreign, 9, []*x509.Certificate{a.root})
		if err != nil {
			t.Fatal(err)
		}
		if err := k.Adopt(b); err == nil || !strings.Contains(err.Error(), "expected td") {
			t.Errorf("another domain's roots: %v", err)
		}
		if now, _ := k.Current(); now != before {
			t.Error("a refused bundle changed what is shown")
		}
	})
}

// A revoked SVID stays until there is another, and another is asked for at once, not at half of its life.
func TestD6RevokedSVIDIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuthority(t, 24*time.Hour)
		k := startKeeper(t, a, nil)
		first, changed := k.Current() // serial 2
		a.set(errors.New("the identity is revoked"), false)
		adopt(t, k, a.bundle(2, 48*time.Hour, []*authority{a}, 2))
		<-changed
		now, changed := k.Current()
		if now.Leaf() != first.Leaf() || now.Bundle.CRLs().Check(now.Leaf()) == nil {
			t.Error("the revoked SVID should stay, with the CRL that names it")
		}
		time.Sleep(30 * time.Second)
		a.set(nil, false)
		<-changed // tries with backoff, not in 12 hours
		next, _ := k.Current()
		if next.Leaf() == first.Leaf() || time.Since(a.times()[1]) > 2*time.Minute {
			t.Error("no other SVID soon after the identity was restored")
		}
		if n := len(a.times()); n != 2 {
			t.Errorf("%d SVIDs were issued, want 2", n)
		}
		adopt(t, k, a.bundle(2, 48*time.Hour, []*authority{a}, 2)) // names the old one still
		time.Sleep(time.Minute)
		if n := len(a.times()); n != 2 {
			t.Errorf("%d SVIDs were issued because of a CRL that names another", n)
		}

		start := time.Now()
		adopt(t, k, a.bundle(2, 48*time.Hour, []*authority{a}, 2, 3))
		time.Sleep(revokedSpread)
		if times := a.times(); len(times) != 3 || times[2].Sub(start) > revokedSpread {
			t.Errorf("issued at %v; want another within %s", times, revokedSpread)
		}
	})
}
