package rotate

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// lineOf is a bundle of a domain with kin.
func lineOf(t *testing.T, generation uint64, domain string, root *authority, kin map[string]*authority) *trust.Bundle {
	t.Helper()
	one := func(name string, a *authority) *trust.Bundle {
		td, err := trust.ParseDomain(name)
		if err != nil {
			t.Fatal(err)
		}
		var roots []*x509.Certificate
		if a != nil {
			roots = append(roots, a.root)
		}
		b, err := trust.NewBundle(td, generation, roots)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var all []*trust.Bundle
	for name, a := range kin {
		all = append(all, one(name, a))
	}
	b, err := one(domain, root).WithKin(all...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestD10AKeeperFollowsItsLine: the bundle of a migration has two domains, answers may be of either for the same path, and in the end the
// other domain comes first; and back. What is of another authority, or vouches for nobody any more, is refused as ever.
func TestD10AKeeperFollowsItsLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old, next := newAuthority(t, time.Hour), newAuthority(t, time.Hour)
		next.host = "new"
		var by atomic.Pointer[authority]
		by.Store(old)
		var failed atomic.Pointer[error]
		k := NewKeeper(KeeperConfig{
			ID: old.id(), Logger: slog.New(slog.DiscardHandler), Observe: func(err error) { failed.Store(&err) },
			Issue: func(ctx context.Context, key crypto.Signer) (Issued, error) { return by.Load().issue(ctx, key) },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); k.Run(ctx) }()
		t.Cleanup(func() { cancel(); <-done })
		synctest.Wait()
		shows := func(what, id string, generation uint64) {
			t.Helper()
			now, _ := k.Current()
			if now.ID.String() != id || now.Bundle.Generation() != generation {
				t.Errorf("%s: shown is %s with generation %d; want %s, %d", what, now.ID, now.Bundle.Generation(), id, generation)
			}
		}
		renew := func() error {
			k.Renew(0)
			time.Sleep(time.Second)
			return *failed.Load()
		}
		shows("at first", "spiffe://td/ns/foo/sa/web", 0)
		next.answer(lineOf(t, 1, "new", next, nil))
		by.Store(next)
		if err := renew(); err == nil || !strings.Contains(err.Error(), "asked for") {
			t.Errorf("an answer of a domain that nobody has named: %v", err)
		}
		by.Store(old)
		both := lineOf(t, 2, "td", old, map[string]*authority{"new": next})
		adopt(t, k, both)
		shows("accepted", "spiffe://td/ns/foo/sa/web", 2)

		next.answer(both)
		next.set(nil, true)
		by.Store(next)
		if err := renew(); err == nil || !strings.Contains(err.Error(), "/sa/other") {
			t.Errorf("an answer for another path: %v", err)
		}
		next.set(nil, false)
		if err := renew(); err != nil {
			t.Fatal(err)
		}
		shows("moved", "spiffe://new/ns/foo/sa/web", 2)

		over := lineOf(t, 3, "new", next, map[string]*authority{"td": nil})
		adopt(t, k, over)
		shows("over", "spiffe://new/ns/foo/sa/web", 3)
		if now, _ := k.Current(); now.Bundle.Domain().String() != "new" {
			t.Errorf("the bundle is of %s", now.Bundle.Domain())
		}
		older, err := (*trust.Older)(nil), k.Adopt(both)
		if !errors.As(err, &older) {
			t.Errorf("the bundle before: %v", err)
		}
		if err := k.Adopt(lineOf(t, 4, "new", next, nil)); err == nil || !strings.Contains(err.Error(), "expected td") {
			t.Errorf("a bundle that has forgotten the own domain: %v", err)
		}
		unfit, err := (*Unfit)(nil), k.Adopt(lineOf(t, 4, "td", old, map[string]*authority{"new": nil}))
		if !errors.As(err, &unfit) {
			t.Errorf("roots that do not vouch for the SVID in use: %v", err)
		}
		next.answer(over)
		if err := renew(); err != nil {
			t.Fatal(err)
		}
		shows("renewed", "spiffe://new/ns/foo/sa/web", 3)

		// And back.
		back := lineOf(t, 4, "new", next, map[string]*authority{"td": old})
		adopt(t, k, back)
		old.answer(back)
		by.Store(old)
		if err := renew(); err != nil {
			t.Fatal(err)
		}
		adopt(t, k, lineOf(t, 5, "td", old, map[string]*authority{"new": nil}))
		shows("back", "spiffe://td/ns/foo/sa/web", 5)
	})
}
