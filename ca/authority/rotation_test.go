package authority

import (
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
)

// rotating puts a rotation that begins into the document, as package rotate/stages does.
func rotating(t *testing.T, k *Keeper, kind document.AuthorityKind) {
	t.Helper()
	err := k.Change(t.Context(), func(next *Document) error {
		from, err := next.Active(k.config.Domain, KindIssuer)
		if err != nil {
			return err
		}
		r := &document.Rotation{
			ID: "0123456789abcdef", Kind: kind, Reason: document.ReasonAsked, Actor: "test", FromIssuer: from.ID, Phase: document.PhasePrepare,
			Started: time.Now(), Since: time.Now(), Version: next.Version, NotBefore: time.Now().Add(time.Hour),
		}
		if kind == KindRoot {
			r.FromRoot = from.RootID()
		}
		next.State(k.config.Domain).Rotation = r
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestD4UnconfirmedReplicaSignsNothingThatOutlivesItsRoot: a replica that the store has not confirmed for a while signs under a root that
// is to go no leaf that ends later than that; in the end, none.
func TestD4UnconfirmedReplicaSignsNothingThatOutlivesItsRoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, r := record(quick(t, t.TempDir()))
		if _, err := Init(t.Context(), c, "test"); err != nil {
			t.Fatal(err)
		}
		k := driving(t, c)
		rotating(t, k, KindRoot)
		last := k.Document().Domains["cluster.local"].Rotation.NotBefore
		begun := time.Now()
		life := func(want time.Duration) {
			t.Helper()
			k.Follow(t.Context())
			cert := issue(t, k)
			if got := time.Until(cert.NotAfter); got > want || got < want-2*time.Second {
				t.Errorf("after %s a leaf lives for %s, want %s", time.Since(begun), got, want)
			}
		}
		life(time.Hour)
		time.Sleep(10 * time.Minute)
		life(time.Hour) // it was asked, and answered
		r.down.Store(true)
		time.Sleep(30 * time.Second)
		life(time.Hour)
		time.Sleep(time.Second)
		life(time.Until(last))
		if all, err := k.CRLSigners(t.Context()); err != nil || all[0].Issuer == nil {
			t.Errorf("CRLs are signed as ever: %+v, %v", all, err)
		}
		time.Sleep(30 * time.Minute)
		life(time.Until(last))

		time.Sleep(time.Until(last) - time.Minute + time.Second)
		_, err := k.Issuer()
		if !errors.Is(err, ca.ErrNotReady) || !strings.Contains(err.Error(), "has not confirmed since") {
			t.Errorf("with less than a minute left: %v", err)
		}
		time.Sleep(24 * time.Hour) // as a process that was stopped and goes on
		if _, err := k.Issuer(); !errors.Is(err, ca.ErrNotReady) {
			t.Errorf("a day later: %v", err)
		}
		r.down.Store(false)
		life(time.Hour)

		// What is not under that root has nothing to fear.
		for name, change := range map[string]func(*document.Rotation){
			"the rotation of an issuer": func(r *document.Rotation) { r.Kind, r.FromRoot = KindIssuer, "" },
			"another root's":            func(r *document.Rotation) { r.FromRoot = "aa" },
			"one that was activated":    func(r *document.Rotation) { r.Phase = document.PhaseReissue },
		} {
			if err := k.Change(t.Context(), func(next *Document) error { change(next.State(c.Domain).Rotation); return nil }); err != nil {
				t.Fatal(err)
			}
			r.down.Store(true)
			time.Sleep(time.Minute)
			if _, err := k.Issuer(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			r.down.Store(false)
			rotating(t, k, KindRoot)
		}

		// A rotation that was started and that nobody has driven yet does not stop everything when the store goes away just then.
		begun = time.Now()
		if err := k.Change(t.Context(), func(next *Document) error {
			next.State(c.Domain).Rotation.Since, next.State(c.Domain).Rotation.NotBefore = begun, time.Time{}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		r.down.Store(true)
		time.Sleep(10 * time.Minute)
		life(50 * time.Minute)
		time.Sleep(50 * time.Minute)
		if _, err := k.Issuer(); !errors.Is(err, ca.ErrNotReady) {
			t.Errorf("an hour after the start: %v", err)
		}
	})
}

// TestSuccessorsAreMadeOnceAndWait: a root with its issuer, or an issuer, enters the document in one change, with the life and the keys
// that the config says, and signs nothing but CRLs.
func TestSuccessorsAreMadeOnceAndWait(t *testing.T) {
	for name, st := range stores(t) {
		for _, kind := range []document.AuthorityKind{KindRoot, KindIssuer} {
			t.Run(fmt.Sprint(name, " ", kind), func(t *testing.T) {
				c := quick(t, t.TempDir())
				c.Keys, c.KeyType, c.RootTTL, c.IssuerTTL = st, ca.P256, 100*time.Hour, 10*time.Hour
				if _, err := Init(t.Context(), c, "test"); err != nil {
					t.Fatal(err)
				}
				k := driving(t, c)
				old := k.Document()
				rotating(t, k, kind)
				if err := k.MakeSuccessors(t.Context(), "of another"); err != nil || k.Document().Version != old.Version+1 {
					t.Errorf("another rotation's: %v, version %d", err, k.Document().Version)
				}
				for range 2 {
					if err := k.MakeSuccessors(t.Context(), "0123456789abcdef"); err != nil {
						t.Fatal(err)
					}
				}
				doc := k.Document()
				state := doc.Domains["cluster.local"]
				r := state.Rotation
				was, err := old.Bundle(c.Domain)
				if err != nil {
					t.Fatal(err)
				}
				if doc.Version != old.Version+2 || state.Generation != was.Generation()+1 {
					t.Errorf("version %d after %d, generation %d after %d", doc.Version, old.Version, state.Generation, was.Generation())
				}
				issuer := state.Get(KindIssuer, r.ToIssuer)
				if issuer == nil || issuer.State != StatePrepared || !issuer.HasKey() || len(state.Authorities) != map[document.AuthorityKind]int{KindRoot: 4, KindIssuer: 3}[kind] {
					t.Fatalf("issuer %+v of %d authorities", issuer, len(state.Authorities))
				}
				lives := func(x *Authority, want time.Duration) {
					t.Helper()
					cert, err := x.X509()
					if err != nil {
						t.Fatal(err)
					}
					if d := time.Until(cert.NotAfter); d > want || d < want-time.Minute {
						t.Errorf("%s %s lives for %s", x.Kind, x.ID, d)
					}
				}
				lives(issuer, 10*time.Hour)
				if kind == KindRoot {
					root := state.Get(KindRoot, r.ToRoot)
					if root == nil || root.State != StatePrepared || !root.HasKey() || issuer.RootID() != root.ID {
						t.Fatalf("root %+v above %s", root, issuer.RootID())
					}
					lives(root, 100*time.Hour)
				} else if r.ToRoot != "" || issuer.RootID() != state.Get(KindIssuer, r.FromIssuer).RootID() {
					t.Errorf("it is under root %s, and a root was made: %q", issuer.RootID(), r.ToRoot)
				}
				signs, err := k.Issuer()
				if err != nil || signs.SKI() != r.FromIssuer || signs.Bundle().Generation() != state.Generation {
					t.Errorf("issuer %s signs, with generation %d: %v", signs.SKI(), signs.Bundle().Generation(), err)
				}
				issue(t, k)
				if all, err := k.CRLSigners(t.Context()); err != nil || len(all) != 2 || all[1].Issuer == nil || all[1].ID != r.ToIssuer {
					t.Errorf("CRLs are signed by %+v, %v", all, err)
				}
				if doc.Prepared(c.Domain) != nil {
					t.Error("it passes for one that signs as soon as its CRL is out")
				}
				again := open(t, c)
				if err := again.HoldsPrepared(t.Context()); err != nil {
					t.Errorf("after a restart: %v", err)
				}
			})
		}
	}
}

// TestSuccessorsFaultsAtEachStep fails each step of making them, in each way: the document has both or none.
func TestSuccessorsFaultsAtEachStep(t *testing.T) {
	for _, kind := range []document.AuthorityKind{KindRoot, KindIssuer} {
		one := func(t *testing.T, n int, mode durabletest.Mode) int {
			dir := t.TempDir()
			c := quick(t, dir)
			if _, err := Init(t.Context(), c, "test"); err != nil {
				t.Fatal(err)
			}
			k := driving(t, c)
			rotating(t, k, kind)
			d := durabletest.Watch(t, dir)
			d.FailAt(n, mode)
			err := k.MakeSuccessors(t.Context(), "0123456789abcdef")
			steps, name := d.Steps(), fmt.Sprintf("%s: %s (%v)", kind, d.Failed(), err)
			confirmed, before := k.Document().Version, stored(t, k)
			d.FailAt(-1, "")
			if d.Dead() {
				dir = d.Copy()
				c = quick(t, dir)
			}
			whole(t, name, dir, c, confirmed, before)
			if d.Dead() {
				time.Sleep(time.Millisecond)
				k = driving(t, c)
			}
			if err := k.MakeSuccessors(t.Context(), "0123456789abcdef"); err != nil {
				t.Errorf("%s: the next try: %v", name, err)
			}
			state := k.Document().Domains["cluster.local"]
			issuer := state.Get(KindIssuer, state.Rotation.ToIssuer)
			if issuer == nil || issuer.State != StatePrepared || kind == KindRoot && state.Get(KindRoot, issuer.RootID()).State != StatePrepared {
				t.Errorf("%s: there is %+v", name, issuer)
			}
			issue(t, k)
			return steps
		}
		total := one(t, -1, "")
		if total < 3 {
			t.Errorf("%s: only %d steps were seen", kind, total)
		}
		for n := range total + 1 {
			for _, mode := range durabletest.Modes {
				t.Run(fmt.Sprint(kind, " ", n, " ", mode), func(t *testing.T) { one(t, n, mode) })
			}
		}
	}
}

// TestIssuerIsRenewedWhileItsRootRotates: a root's rotation may take longer than an issuer lives. The one in use is followed by another
// under its root meanwhile, by the steps of every renewal, and the successor waits on.
func TestIssuerIsRenewedWhileItsRootRotates(t *testing.T) {
	c := quick(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	k.Staged()
	begin := k.issuer.Load().Certificate().NotBefore
	const day = 24 * time.Hour
	k.mindIssuer(t.Context(), begin.Add(4*day))
	if k.Document().Prepared(c.Domain) != nil {
		t.Error("whoever stages rotations prepares issuers; this one did")
	}
	rotating(t, k, KindRoot)
	if err := k.MakeSuccessors(t.Context(), "0123456789abcdef"); err != nil {
		t.Fatal(err)
	}
	r := k.Document().Domains["cluster.local"].Rotation
	k.mindIssuer(t.Context(), begin.Add(4*day))
	next := k.Document().Prepared(c.Domain)
	if next == nil || next.ID == r.ToIssuer || next.RootID() != r.FromRoot {
		t.Fatalf("past half of its life the issuer has the successor %+v", next)
	}
	if err := k.HoldsPrepared(t.Context()); err != nil {
		t.Error(err)
	}
	if all, err := k.CRLSigners(t.Context()); err != nil || len(all) != 3 {
		t.Errorf("%d issuers sign CRLs, %v", len(all), err)
	}
	k.mindIssuer(t.Context(), begin.Add(6*day+12*time.Hour))
	state := k.Document().Domains["cluster.local"]
	if now := k.issuer.Load().SKI(); now != next.ID || state.Rotation.FromIssuer != next.ID || state.Rotation.ToIssuer != r.ToIssuer {
		t.Errorf("%s signs; the rotation goes from %s to %s", now, state.Rotation.FromIssuer, state.Rotation.ToIssuer)
	}
	if x := state.Get(KindIssuer, r.ToIssuer); x == nil || x.State != StatePrepared {
		t.Errorf("the rotation's successor is %+v", x)
	}
	if leaving := state.Leaving(); len(leaving) != 2 {
		t.Errorf("%v leave", leaving)
	}
	issue(t, k)

	// One that was prepared so, and whose root is not the active one any more, never signs.
	k.mindIssuer(t.Context(), k.issuer.Load().Certificate().NotBefore.Add(4*day))
	if k.Document().Prepared(c.Domain) == nil {
		t.Fatal("nothing is prepared")
	}
	err := k.Change(t.Context(), func(next *Document) error {
		s := next.State(c.Domain)
		for _, x := range []*Authority{s.Get(KindRoot, r.FromRoot), s.Get(KindIssuer, s.Rotation.FromIssuer)} {
			x.State = StateRetiring
		}
		for _, x := range []*Authority{s.Get(KindRoot, r.ToRoot), s.Get(KindIssuer, r.ToIssuer)} {
			x.State = StateActive
		}
		s.Rotation.Phase = document.PhaseActivate
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	k.mindIssuer(t.Context(), k.issuer.Load().Certificate().NotAfter.Add(-time.Minute))
	if now := k.issuer.Load().SKI(); now != r.ToIssuer || k.Document().Prepared(c.Domain) != nil {
		t.Errorf("%s signs, %+v waits", now, k.Document().Prepared(c.Domain))
	}
}

// TestImportWaitsForARotation: what an admin brings does not cut into it, and the answer says so.
func TestImportWaitsForARotation(t *testing.T) {
	root, rootCert := parentCA(t)
	c := quick(t, t.TempDir())
	c.Roots = []*x509.Certificate{rootCert}
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k, err := load(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	bring := func() error {
		der, err := k.Request(t.Context(), "test", false)
		if err != nil {
			return err
		}
		return k.Import(t.Context(), "test", []*x509.Certificate{answer(t, root, der, time.Hour)})
	}
	if err := bring(); err != nil {
		t.Fatal(err)
	}
	rotating(t, k, KindIssuer)
	version := k.Document().Version + 1 // of the request
	if err := bring(); err == nil || !strings.Contains(err.Error(), "rotation 0123456789abcdef is under way, in phase prepare") || k.Document().Version != version {
		t.Errorf("%v; version %d, want %d", err, k.Document().Version, version)
	}
	for kind, want := range map[document.AuthorityKind]string{KindRoot: "chancery ceremony", KindIssuer: "chancery authority csr"} {
		if err := k.Rotatable(kind); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", kind, err)
		}
	}
}
