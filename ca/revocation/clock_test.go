package revocation

import (
	"crypto/x509"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document"
)

// TestClockThatIsAhead: what a replica takes a number for whose clock is a year ahead, the others neither publish, since each verifier
// would refuse it and with it every certificate, nor do they race it for numbers.
func TestClockThatIsAhead(t *testing.T) {
	f := newFleet(t, "a", "b")
	a, b := f.replicas["a"], f.replicas["b"]
	b.manager.gather = 0
	cert := b.issue("spiffe://cluster.local/ns/prod/sa/web", "")
	if _, err := b.revoke(authority.Predicate{Serial: serials(cert)[0]}); err != nil {
		t.Fatal(err)
	}
	ahead := func() {
		a.keeper.Follow(t.Context())
		doc, at := a.keeper.Document(), time.Now().Add(365*24*time.Hour).UTC().Truncate(time.Second)
		c := document.CRL{Time: at, Until: at.Add(crlLife), Content: (&Manager{}).emptyAt(at)}
		if err := a.keeper.TakeCRL(t.Context(), doc, c); err != nil {
			t.Fatal(err)
		}
		b.keeper.Follow(t.Context())
	}
	good := func() uint64 {
		t.Helper()
		var number uint64
		for _, der := range b.last.Load().CRLs {
			crl, err := x509.ParseRevocationList(der)
			if err != nil {
				t.Fatal(err)
			}
			if crl.ThisUpdate.After(time.Now()) || len(crl.RevokedCertificateEntries) != 1 {
				t.Fatalf("a CRL of %s with %d entries is published", crl.ThisUpdate, len(crl.RevokedCertificateEntries))
			}
			number = crl.Number.Uint64()
		}
		return number
	}
	before := good()
	ahead()
	if err := b.manager.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := good(); n != before+2 {
		t.Errorf("number %d follows %d, and one that was taken with a wrong clock", n, before)
	}
	ahead()
	version := b.keeper.Document().Version
	if err := b.manager.Refresh(t.Context()); err == nil || !strings.Contains(err.Error(), "clock") {
		t.Errorf("a clock that is wrong again: %v", err)
	}
	if good(); b.keeper.Document().Version != version {
		t.Error("it takes a number each time that the other one does")
	}
	b.manager.corrected = time.Now().Add(-correctEvery - time.Second)
	if err := b.manager.Refresh(t.Context()); err != nil {
		t.Error(err)
	}
	if n := good(); n != before+4 {
		t.Errorf("number %d follows %d", n, before+3)
	}
}

// emptyAt is the content of CRLs of a time by which all has ended.
func (m *Manager) emptyAt(at time.Time) string {
	m.all = map[string]Certificate{}
	return m.listingOf(nil, document.CRL{Time: at}).sum
}
