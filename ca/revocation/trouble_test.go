package revocation

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/revocation/match"
	"github.com/chancery-project/chancery/trust"
)

// retire gives the world a second issuer, while the first lives on for its CRL.
func (w *world) retire() (_ *world, first, second string) {
	first = must(w.keeper.Issuer()).SKI()
	cert, key := w.nextIssuer()
	w = w.prepare(cert, key)
	second = fmt.Sprintf("%x", cert.SubjectKeyId)
	return w.activate(second), first, second
}

// TestD22KeyThatDoesNotOpenTakesNoCRLBack: the key of a retired issuer that does not open when a server starts (a key store
// that is away) must not make agents drop the CRLs that they have: what is revoked would pass. After a while there are none, so
// that issuers to come are not held up.
func TestD22KeyThatDoesNotOpenTakesNoCRLBack(t *testing.T) {
	w, first, _ := start(t, t.TempDir(), true).retire()
	w = w.change(func(d *authority.Document) error {
		for i := range d.State(td).Authorities {
			if a := &d.State(td).Authorities[i]; a.ID == first {
				a.Key = []byte("of another sealing key")
			}
		}
		return nil
	})
	err := w.manager.Refresh(t.Context())
	if err == nil || !strings.Contains(err.Error(), "signing the CRL of issuer "+first) || len(w.published) > 0 {
		t.Fatalf("%v; published %d times", err, len(w.published))
	}
	version := w.keeper.Document().Version
	if err := w.manager.Refresh(t.Context()); err == nil || w.keeper.Document().Version != version {
		t.Errorf("another try with nothing new to sign: %v, document %d -> %d", err, version, w.keeper.Document().Version)
	}
	w.manager.without = time.Now().Add(-patience)
	if err := w.manager.Refresh(t.Context()); err == nil || len(w.last().CRLs) > 0 {
		t.Errorf("after %s: %v, %d CRLs", patience, err, len(w.last().CRLs))
	}
	if off := strings.Join(w.manager.State().Off, "; "); !strings.Contains(off, first) || !strings.Contains(off, "no CRL is published") {
		t.Errorf("it is not said: %q", off)
	}
}

// TestD22IssuerThatFailsHoldsUpNoOther: where one issuer's CRL cannot be signed anew, its last one stands, and those of others
// get what is revoked.
func TestD22IssuerThatFailsHoldsUpNoOther(t *testing.T) {
	w, first, second := start(t, t.TempDir(), true).retire()
	w.refresh()
	bad := w.issue(web, "n1")
	signers := must(w.keeper.CRLSigners(t.Context()))
	for i := range signers {
		if signers[i].ID == first {
			signers[i].Issuer, signers[i].Retry, signers[i].Why = nil, true, os.ErrDeadlineExceeded
		}
	}
	w.revoke(authority.Predicate{Serial: serial(bad)})
	before := w.crls()
	w.manager.mu.Lock()
	defer w.manager.mu.Unlock()
	w.manager.at.Number++ // as if each had to be signed anew
	lists, off, late, err := w.manager.crls(t.Context(), signers, time.Now())
	if err != nil || late == nil || !strings.Contains(late.Error(), first) || !strings.Contains(late.Error(), "its last CRL stands until") || len(off) > 0 || len(lists) != 2 {
		t.Fatalf("%d CRLs, off %v, late %v, error %v", len(lists), off, late, err)
	}
	for _, der := range lists {
		crl := must(x509.ParseRevocationList(der))
		switch id := fmt.Sprintf("%x", crl.AuthorityKeyId); id {
		case first:
			if !bytes.Equal(crl.Raw, before[first].Raw) {
				t.Error("the retired issuer's CRL is another")
			}
		case second:
			if crl.Number.Cmp(before[second].Number) <= 0 || len(crl.RevokedCertificateEntries) != 1 {
				t.Errorf("CRL %v with %d entries", crl.Number, len(crl.RevokedCertificateEntries))
			}
		}
	}
}

// TestEndedCertificatesStayOnTheCRL until one is signed anyway, an hour after their end at the earliest: clocks of verifiers
// are behind, and RFC 5280 section 5.1.2 wants it.
func TestEndedCertificatesStayOnTheCRL(t *testing.T) {
	w := start(t, t.TempDir(), true)
	bad, other := w.issue(web, "n1"), w.issue(db, "n1")
	w.revoke(authority.Predicate{SPIFFEID: web})
	since := func(ago time.Duration) map[string]bool { // the CRLs of a number that is taken so long after its end
		w.manager.mu.Lock()
		defer w.manager.mu.Unlock()
		out := map[string]bool{}
		for _, e := range w.manager.listingOf(w.keeper.Document(), document.CRL{Time: bad.NotAfter.Add(ago)}).entries {
			out[e.serial] = true
		}
		return out
	}
	for _, ago := range []time.Duration{-time.Minute, time.Second, endedStays - time.Second, endedStays} {
		if !since(ago)[serial(bad)] {
			t.Errorf("%s after its end it left the CRL before clocks that are behind can know that it has ended", ago)
		}
	}
	if since(endedStays + time.Second)[serial(bad)] {
		t.Error("it stays for ever")
	}
	// Time alone makes no new CRL.
	n, version := len(w.published), w.keeper.Document().Version
	w.manager.at.Time = bad.NotAfter.Add(2 * endedStays)
	w.manager.prune(w.manager.at.Time)
	if len(w.manager.found) != 0 {
		t.Error("it is kept for ever")
	}
	w = w.restart()
	w.manager.due = time.Time{}
	w.refresh()
	if w.keeper.Document().Version != version || !w.listed()[serial(bad)] {
		t.Errorf("published %d times, document %d -> %d; listed %v", n, version, w.keeper.Document().Version, w.listed()[serial(bad)])
	}
	w.revoke(authority.Predicate{Serial: serial(other)})
	if have := w.listed(); !have[serial(bad)] || !have[serial(other)] {
		t.Errorf("listed: %v", have)
	}
}

// TestForgottenEntriesComeBack: what had left the CRLs is found again where the document's time lies earlier than before, as after a
// clock was set right.
func TestForgottenEntriesComeBack(t *testing.T) {
	w := start(t, t.TempDir(), true)
	bad := w.issue(web, "n1")
	w.revoke(authority.Predicate{SPIFFEID: web})
	w.manager.prune(bad.NotAfter.Add(2 * endedStays))
	if len(w.manager.found) != 0 {
		t.Fatal("it was not forgotten")
	}
	w.revoke(authority.Predicate{Serial: "abcd"})
	w.expect("again", []*x509.Certificate{bad}, nil)
}

// TestJustEndedIsFoundAfterARestart: the first CRL of a start lists it too.
func TestJustEndedIsFoundAfterARestart(t *testing.T) {
	w := start(t, t.TempDir(), true)
	bad := w.issue(web, "n1")
	p := match.Arrange([]trust.Domain{td}, []authority.Revocation{{Predicate: authority.Predicate{SPIFFEID: web}}})
	if err := w.issuance.Sequence(); err != nil {
		t.Fatal(err)
	}
	found := 0
	if _, err := w.manager.scan(t.Context(), p, 0, time.Now(), func(c Certificate) error {
		found++
		for _, x := range []struct {
			at   time.Time
			gone bool
		}{{c.NotAfter.Add(endedStays - time.Second), false}, {c.NotAfter.Add(endedStays + time.Second), true}} {
			if c.gone(x.at) != x.gone {
				t.Errorf("gone at %s: %v", x.at, !x.gone)
			}
		}
		return nil
	}); err != nil || found != 1 {
		t.Errorf("%d found of %s (%v)", found, serial(bad), err)
	}
}

// TestFoundAsAnotherEnds: a certificate that is found in the same moment in which another leaves is not overlooked.
func TestFoundAsAnotherEnds(t *testing.T) {
	w := start(t, t.TempDir(), true)
	first := w.issue(web, "n1")
	w.revoke(authority.Predicate{SPIFFEID: web})
	c := w.manager.found[serial(first)]
	c.NotAfter = time.Now().Add(-2 * endedStays)
	w.manager.found[serial(first)], w.manager.all = c, nil
	second := w.issue(web, "n1") // its request passed the check before
	if err := w.issuance.Sequence(); err != nil {
		t.Fatal(err)
	}
	w.refresh()
	w.expect("found as another ended", []*x509.Certificate{second}, nil)
}

// TestD16UnresolvedPredicateIsNoLicence: between storing what was revoked by node and finding its certificates, none renews
// another.
func TestD16UnresolvedPredicateIsNoLicence(t *testing.T) {
	w := start(t, t.TempDir(), true)
	bad := w.issue(web, "n1")
	w.refresh()
	must(w.keeper.Revoke(t.Context(), authority.Revocation{Predicate: authority.Predicate{Cluster: "east", Node: "n1"}, Time: time.Now(), Actor: "unix:test"}))
	w.manager.mu.Lock()
	w.manager.look(w.keeper.Document())
	w.manager.mu.Unlock()
	if revoked, sure := w.manager.Set().Serial(bad.SerialNumber); revoked || sure {
		t.Errorf("revoked %v, sure %v; want neither while the log is not read", revoked, sure)
	}
	if err := w.issuance.Sequence(); err != nil {
		t.Fatal(err)
	}
	w.refresh()
	w.expect("once the log is read", []*x509.Certificate{bad}, nil)
}

// TestD22OneKeyUnderTwoNames: each name has its own CRL, also after the first look.
func TestD22OneKeyUnderTwoNames(t *testing.T) {
	dir := t.TempDir()
	with := plug(t, dir, x509.KeyUsageCertSign|x509.KeyUsageCRLSign)
	w := start(t, dir, true, with)
	w.refresh()
	root := must(trust.ParseCertificates(must(os.ReadFile(filepath.Join(dir, "cacerts/root-cert.pem")))))[0]
	rootKey := must(trust.ParseKey(must(os.ReadFile(filepath.Join(dir, "root-key.pem")))))
	x := *must(w.keeper.Issuer()).Chain()[0]
	x.SerialNumber, x.RawSubject = big.NewInt(77), nil
	x.Subject.CommonName = "the same key under another name"
	der := must(x509.CreateCertificate(rand.Reader, &x, root, x.PublicKey, rootKey))
	for _, name := range []string{"ca-cert.pem", "cert-chain.pem"} {
		writePEM(t, filepath.Join(dir, "cacerts", name), trust.EncodeCertificates(must(x509.ParseCertificate(der))))
	}
	w = w.restart(with)
	if w.keeper.TakeLease(t.Context()) {
		w.keeper.Mind(t.Context())
	}
	for range 3 {
		w.manager.due = time.Time{}
		l := w.refresh()
		var issuers []*x509.Certificate
		for _, der := range l.Issuers {
			issuers = append(issuers, must(x509.ParseCertificate(der)))
		}
		if crls, err := trust.NewCRLs(l.Bundle, l.CRLs, issuers, time.Now()); err != nil || len(crls.DER()) != 2 {
			t.Fatalf("agents would say: %v; %d CRLs", err, len(l.CRLs))
		}
	}
}

// TestCRLEntriesAreBounded: a revocation that would go beyond is refused as a whole; what has ended takes no room.
func TestCRLEntriesAreBounded(t *testing.T) {
	w := start(t, t.TempDir(), true)
	w.issue(web, "n1")
	w.refresh()
	fill := func(ends time.Time) {
		for i := range MaxEntries {
			s := fmt.Sprintf("%040x", i+1)
			w.manager.found[s] = Certificate{Serial: s, NotAfter: ends}
		}
		w.manager.all = nil
	}
	r := authority.Revocation{Predicate: authority.Predicate{SPIFFEID: web}, Time: time.Now(), Actor: "unix:test"}
	fill(time.Now().Add(time.Hour))
	if _, err := w.manager.Revoke(t.Context(), r, true); err == nil || !strings.Contains(err.Error(), "at most 50000 fit") {
		t.Errorf("one more than fits: %v", err)
	}
	// Of two at the same time, each of which fits, the later is refused.
	delete(w.manager.found, fmt.Sprintf("%040x", 1))
	w.manager.all = nil
	p := must(w.manager.preview(t.Context(), r))
	fill(time.Now().Add(time.Hour))
	if _, err := w.manager.store(t.Context(), r, p); err == nil || len(w.keeper.Document().Revocations(td)) > 0 {
		t.Errorf("two at once: %v", err)
	}
	fill(time.Now().Add(-2 * endedStays))
	if got, err := w.manager.Revoke(t.Context(), r, true); err != nil || got.Count != 1 {
		t.Errorf("when all others have ended: %+v, %v", got, err)
	}
	if maxListed != 1000 {
		t.Error("docs/security.md says that 1,000 are listed")
	}
}

// TestBoundsHoldRightAfterAStart: what is on the CRLs is found before it is said how much fits.
func TestBoundsHoldRightAfterAStart(t *testing.T) {
	w := start(t, t.TempDir(), true)
	w.issue(web, "n1")
	w.revoke(authority.Predicate{SPIFFEID: web})
	w = w.restart()
	if room := must(w.manager.room(t.Context(), time.Now())); room != MaxEntries-1 {
		t.Errorf("room for %d", room)
	}
}
