package revocation

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/trust"
)

// TestD22BothDomainsOfAMigrationAreRevoked: while two trust domains sign there is a CRL of each issuer; who revokes an identity by one of its
// names means the certificates of both, before and after; a peer that has the bundle refuses them all, and nobody else.
func TestD22BothDomainsOfAMigrationAreRevoked(t *testing.T) {
	w := start(t, t.TempDir(), true)
	if !w.keeper.TakeLease(t.Context()) {
		t.Fatal("it does not drive")
	}
	to := must(trust.ParseDomain("new.example"))
	change := func(f func(s *document.DomainState)) {
		t.Helper()
		if err := w.keeper.Change(t.Context(), func(next *authority.Document) error { f(next.State(td)); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	change(func(s *document.DomainState) {
		s.Rotation = &document.Rotation{
			ID: "m", Kind: document.KindRoot, FromRoot: s.Authorities[0].ID, FromIssuer: s.Authorities[1].ID, Phase: document.PhasePrepare,
			Started: time.Now(), Since: time.Now(), Migration: &document.Migration{From: "cluster.local", To: "new.example"},
		}
	})
	if err := w.keeper.MakeSuccessors(t.Context(), "m"); err != nil {
		t.Fatal(err)
	}
	change(func(s *document.DomainState) { s.Rotation.Phase = document.PhaseIssue })
	chains := map[*x509.Certificate][]*x509.Certificate{}
	issue := func(id string) *x509.Certificate {
		t.Helper()
		p := must(w.keeper.Issuers())
		i := must(p.As(must(trust.ParseID(id))))
		token := must(i.Prepare(w.profile, ca.Request{ID: must(trust.ParseID(id)), PublicKey: newKey().Public()}))
		leaf := must(x509.ParseCertificate(must(i.Issue(t.Context(), token)).DER))
		chains[leaf] = append([]*x509.Certificate{leaf}, i.Chain()...)
		return leaf
	}
	oldWeb, newWeb, oldDB, newDB := issue(web), issue("spiffe://new.example/ns/foo/sa/web"), issue(db), issue("spiffe://new.example/ns/foo/sa/db")
	check := func(what string, revoked, good []*x509.Certificate) {
		t.Helper()
		l := w.refresh()
		w.expect(what, revoked, good)
		var issuers []*x509.Certificate
		for _, der := range l.Issuers {
			issuers = append(issuers, must(x509.ParseCertificate(der)))
		}
		b := l.Bundle.WithCRLs(must(trust.NewCRLs(l.Bundle, l.CRLs, issuers, time.Now())))
		for _, leaf := range append(revoked, good...) {
			_, _, err := trust.Verify(chains[leaf], trust.Only(b), time.Now())
			if refused := err != nil; refused != (leaf == oldWeb || leaf == newWeb) {
				t.Errorf("%s: a peer on %s: %v", what, leaf.URIs[0], err)
			}
			if err := b.Of(must(trust.LeafID(leaf)).Domain()).CRLs().Covers(leaf, time.Now()); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	all := []*x509.Certificate{oldDB, newDB}
	l := w.refresh()
	if len(l.CRLs) != 2 || l.Bundle.Of(to) == nil {
		t.Fatalf("%d CRLs, and a bundle of %s with kin %v", len(l.CRLs), l.Bundle.Domain(), l.Bundle.Kin())
	}
	if r := w.revoke(authority.Predicate{SPIFFEID: "spiffe://new.example/ns/foo/sa/web"}); r.Count != 2 {
		t.Errorf("it means %d certificates, want both", r.Count)
	}
	check("by the new name", []*x509.Certificate{oldWeb, newWeb}, all)
	for _, id := range []string{web, "spiffe://new.example/ns/foo/sa/web"} {
		if !w.manager.Set().Identity(id) {
			t.Errorf("%s may have certificates", id)
		}
	}
	// The old root leaves; what the new one signed stays revoked, by either name.
	change(func(s *document.DomainState) {
		s.Activate(document.KindRoot, s.Rotation.ToRoot, time.Now())
		s.Activate(document.KindIssuer, s.Rotation.ToIssuer, time.Now())
		s.Become(td, to)
		s.DropRoot(s.Rotation.FromRoot)
		s.EndRotation("done", time.Now())
	})
	check("in the end", []*x509.Certificate{newWeb}, []*x509.Certificate{newDB})
	if err := w.keeper.Restore(t.Context(), "unix:test", must(trust.ParseID(web)), time.Now()); err != nil {
		t.Error(err)
	}
	w.refresh()
	if w.manager.Set().Identity(web) {
		t.Error("it was restored by its old name, and is still refused")
	}
}
