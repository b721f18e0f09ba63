package csr_test

import (
	"crypto/x509"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/revocation"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/trust"
)

var newDomain = must(trust.ParseDomain("new.example"))

// moving is a world whose authority lies in a real store, and migrates from cluster.local to new.example.
type moving struct {
	*world
	keeper  *authority.Keeper
	ledger  *evidence.Ledger
	revoked *revocation.Set
}

func newMoving(t *testing.T) *moving {
	t.Helper()
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	log := must(audit.Open(filepath.Join(dir, "audit.jsonl")))
	t.Cleanup(func() { log.Close() })
	c := authority.Config{
		Domain: td, Store: st, Sealer: must(keys.CreateSealer(filepath.Join(dir, "k"))), Log: log, Logger: slog.New(slog.DiscardHandler),
		Profiles: []*ca.Profile{must(ca.NewProfile("workload", ca.ProfileConfig{}))},
	}
	must(authority.Init(t.Context(), c, "test"))
	m := &moving{keeper: must(authority.Open(t.Context(), c)), ledger: evidence.New(evidence.Config{Life: ca.DefaultTTL, MaxLife: ca.DefaultMaxTTL, Line: td})}
	if !m.keeper.TakeLease(t.Context()) {
		t.Fatal("it does not drive")
	}
	m.world = newWorld(t, withPods, func(_ *world, c *csr.Config) {
		c.Issuer, c.Issuers, c.Present = nil, m.keeper.Issuers, m.keeper.Present
		c.Aliases = []trust.Domain{must(trust.ParseDomain("legacy.example"))}
		c.Agents = agents.New(agents.Config{Ledger: m.ledger})
		c.Revocations = func() *revocation.Set { return m.revoked }
	})
	m.change(func(_ *document.Document, s *document.DomainState) {
		root, issuer := s.Authorities[0].ID, s.Authorities[1].ID
		s.Rotation = &document.Rotation{
			ID: "m", Kind: document.KindRoot, FromRoot: root, FromIssuer: issuer, Phase: document.PhasePrepare, Started: time.Now(), Since: time.Now(),
			Migration: &document.Migration{From: "cluster.local", To: "new.example"},
		}
	})
	if err := m.keeper.MakeSuccessors(t.Context(), "m"); err != nil {
		t.Fatal(err)
	}
	m.phase(document.PhaseDistribute)
	return m
}

func (m *moving) change(f func(d *document.Document, s *document.DomainState)) {
	m.t.Helper()
	err := m.keeper.Change(m.t.Context(), func(next *document.Document) error { f(next, next.State(td)); return nil })
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *moving) phase(p document.Phase, namespaces ...string) {
	m.t.Helper()
	m.change(func(_ *document.Document, s *document.DomainState) {
		if s.Rotation.Phase = p; p == document.PhaseActivate {
			s.Activate(document.KindRoot, s.Rotation.ToRoot, time.Now())
			s.Activate(document.KindIssuer, s.Rotation.ToIssuer, time.Now())
		}
		s.Rotation.Migration.Namespaces = namespaces
	})
}

// read verifies a chain as a peer does that has the bundle, and as one that only knows the roots of the leaf's own trust domain.
func (m *moving) read(chain []*x509.Certificate) *trust.Identity {
	m.t.Helper()
	b := must(m.keeper.Document().Bundle(td))
	id, _, err := trust.Verify(chain, trust.Only(b), time.Now())
	if err != nil {
		m.t.Fatal(err)
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	for _, of := range append(b.Kin(), b) {
		roots := x509.NewCertPool()
		for _, r := range of.Roots() {
			roots.AddCert(r)
		}
		_, err := chain[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		if (err == nil) != (of.Domain() == id.Domain()) {
			m.t.Errorf("%s by the roots of %s: %v", id, of.Domain(), err)
		}
	}
	return &trust.Identity{ID: id, Chain: chain}
}

// has asks over our own API and returns the SVID.
func (m *moving) has(c call, want string, asked *chanceryv1.CertificateRequest) *trust.Identity {
	m.t.Helper()
	key := newKey()
	asked.Csr = newCSR(key, "")
	resp, err := m.native(c, asked)
	if err != nil {
		m.t.Fatal(err)
	}
	one := resp.GetResults()[0].GetCertificate()
	if one == nil {
		m.t.Fatalf("%v", resp.GetResults()[0])
	}
	var chain []*x509.Certificate
	for _, der := range one.GetChain() {
		chain = append(chain, must(x509.ParseCertificate(der)))
	}
	i := m.read(chain)
	if i.Key = key; i.ID.String() != want || one.GetSpiffeId() != want {
		m.t.Fatalf("got %s, said %s, want %s", i.ID, one.GetSpiffeId(), want)
	}
	return i
}

// istioHas asks over Istio's API and returns the SVID's ID; the answer ends with all roots of the authority.
func (m *moving) istioHas(c call, asked, want string) {
	m.t.Helper()
	resp, err := m.istio(c, ask(asked))
	if err != nil {
		m.t.Errorf("%q: %v", asked, err)
		return
	}
	var chain []*x509.Certificate
	all := resp.GetCertChain()
	for _, text := range all[:len(all)-1] {
		chain = append(chain, must(trust.ParseCertificates([]byte(text)))...)
	}
	if got := m.read(chain).ID.String(); got != want {
		m.t.Errorf("%q: got %s, want %s", asked, got, want)
	}
	roots, b := must(trust.ParseCertificates([]byte(all[len(all)-1]))), must(m.keeper.Document().Bundle(td))
	if !slices.EqualFunc(roots, b.All(), (*x509.Certificate).Equal) {
		m.t.Errorf("%q: the answer has %d roots, the authority %d", asked, len(roots), len(b.All()))
	}
}

// refused asks over Istio's API.
func (m *moving) refused(c call, asked, reason, message string) {
	m.t.Helper()
	_, err := m.istio(c, ask(asked))
	wantStatus(m.t, err, codes.PermissionDenied, reason, message)
}

func in(d trust.Domain, uri string) string { return must(trust.ParseID(uri)).WithDomain(d).String() }

// TestD17MigrationIssuesByThePlanOrExactly: who asks for its own identity gets it in the trust domain of the plan, who asks for one by name gets
// exactly that or is told what to ask for; by token and by certificate, over both APIs.
func TestD17MigrationIssuesByThePlanOrExactly(t *testing.T) {
	m := newMoving(t)
	web, zt := bearer(token(claims{uid: "uid-web"})), bearer(ztunnel())
	newWeb, newDB := in(newDomain, webURI), in(newDomain, dbURI)

	// Everybody is to trust the new trust domain; nobody gets it.
	m.istioHas(web, "", webURI)
	old := m.has(web, webURI, askNative(newWeb))
	m.refused(zt, newDB, csr.ReasonDomain, "ask for "+dbURI)
	m.istioHas(zt, dbURI, dbURI)
	_, err := m.istio(web, ask(in(must(trust.ParseDomain("stranger.example")), webURI)))
	wantStatus(t, err, codes.Unauthenticated, csr.ReasonIdentity, "impersonation")

	m.phase(document.PhaseIssue, "foo")
	m.istioHas(web, "", newWeb)
	m.istioHas(web, webURI, webURI) // by name
	m.istioHas(web, newWeb, newWeb)
	m.istioHas(zt, dbURI, dbURI)
	m.istioHas(zt, newDB, newDB)
	next := m.has(web, newWeb, askNative(webURI))
	if got := m.has(shows(old), newWeb, askNative("")); must(ca.AttestationOf(got.Leaf())) == nil {
		t.Error("a renewal in the other trust domain loses its attestation")
	}
	m.phase(document.PhaseIssue)
	m.has(shows(next), webURI, askNative("")) // the share was made smaller
	m.has(shows(next), webURI, askNative(newWeb))

	m.phase(document.PhaseActivate)
	m.istioHas(web, "", newWeb)
	m.has(shows(old), newWeb, askNative(""))
	m.has(shows(next), newWeb, askNative(webURI))
	m.refused(web, webURI, csr.ReasonDomain, "ask for "+newWeb)
	m.refused(zt, dbURI, csr.ReasonDomain, "ask for "+newDB)

	m.change(func(_ *document.Document, s *document.DomainState) {
		s.Become(td, newDomain)
		s.DropRoot(s.Rotation.FromRoot)
		s.EndRotation("done", time.Now())
	})
	m.istioHas(web, "", newWeb)
	m.has(shows(next), newWeb, askNative(webURI)) // an agent that does not know yet what it is now
	m.refused(zt, dbURI, csr.ReasonDomain, "ask for "+newDB)
	if _, err := m.native(shows(old), askNative("")); err == nil {
		t.Error("a certificate whose root is gone renews itself")
	}
	if _, n := m.ledger.Goal(); n != 4 { // foo/web, and foo/db for the node agent; and each by its new name, since who asks by name may use both
		t.Errorf("%d clients are known; a client that leaves its trust domain to the plan is one", n)
	}
	domains := map[string]bool{}
	for _, r := range m.records(audit.Denied) {
		domains[r.Reason] = true
	}
	if !domains[csr.ReasonDomain] || !domains[csr.ReasonIdentity] {
		t.Errorf("refusals that were logged: %v", domains)
	}
}

// TestD17NamesInACSRMayBeOfAnotherDomainOfOurs: the pair of a migration, and an alias, and no stranger; the certificate has the identity's own.
func TestD17NamesInACSRMayBeOfAnotherDomainOfOurs(t *testing.T) {
	m := newMoving(t)
	m.phase(document.PhaseIssue, "foo")
	web := bearer(token(claims{uid: "uid-web"}))
	for uri, ok := range map[string]bool{
		webURI: true, in(newDomain, webURI): true, "spiffe://legacy.example/ns/foo/sa/web": true, "spiffe://stranger.example/ns/foo/sa/web": false,
		"spiffe://legacy.example/ns/foo/sa/db": false, dbURI: false, "spiffe://LEGACY.example/ns/foo/sa/web": false, "https://legacy.example/ns/foo/sa/web": false,
	} {
		r := askNative("")
		r.Csr = newCSR(newKey(), uri)
		resp, err := m.native(web, r)
		if err != nil {
			t.Fatal(err)
		}
		got := resp.GetResults()[0]
		if ok != (got.GetCertificate().GetSpiffeId() == in(newDomain, webURI)) || !ok && got.GetRefusal().GetReason() != csr.ReasonCSRNames {
			t.Errorf("%s: %v", uri, got)
		}
	}
	asked := askNative("spiffe://legacy.example/ns/foo/sa/web")
	if resp, err := m.native(web, asked); err != nil || resp.GetResults()[0].GetRefusal().GetReason() != csr.ReasonIdentity {
		t.Errorf("an alias is issued: %v, %v", resp, err)
	}
}

// TestRevokedInOneTrustDomainGetsNothingInTheOther.
func TestRevokedInOneTrustDomainGetsNothingInTheOther(t *testing.T) {
	m := newMoving(t)
	m.phase(document.PhaseIssue, "foo")
	for _, uri := range []string{webURI, in(newDomain, webURI)} {
		m.revoked = revocation.NewSet([]string{uri}, nil, true)
		for _, asked := range []string{"", webURI, in(newDomain, webURI)} {
			if _, err := m.istio(bearer(token(claims{uid: "uid-web"})), ask(asked)); err == nil || !strings.Contains(err.Error(), "is revoked") && asked == "" {
				t.Errorf("%s is revoked, and %q: %v", uri, asked, err)
			}
		}
		m.istioHas(bearer(token(claims{uid: "uid-db", account: "db"})), "", in(newDomain, dbURI))
	}
}
