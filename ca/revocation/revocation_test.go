package revocation

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

const (
	web = "spiffe://cluster.local/ns/foo/sa/web"
	db  = "spiffe://cluster.local/ns/foo/sa/db"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

// world is a real authority with its logs in a folder.
type world struct {
	t         *testing.T
	dir       string
	config    authority.Config
	log       *audit.Log
	issuance  *issuelog.Log
	keeper    *authority.Keeper
	manager   *Manager
	published []*Lists
	profile   *ca.Profile
	close     func()
}

// start opens what is in the folder, as a server does; the first time it makes it.
func start(t *testing.T, dir string, withLog bool, changes ...func(*authority.Config)) *world {
	t.Helper()
	w := &world{t: t, dir: dir, profile: must(ca.NewProfile("workload", ca.ProfileConfig{}))}
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	key := filepath.Join(dir, "state.key")
	sealer, err := keys.LoadSealer(key)
	if os.IsNotExist(err) || err != nil && strings.Contains(err.Error(), "no such file") {
		sealer, err = keys.CreateSealer(key)
	}
	if err != nil {
		t.Fatal(err)
	}
	w.log = must(audit.Open(filepath.Join(dir, "audit.jsonl")))
	w.config = authority.Config{
		Domain: td, Store: st, Sealer: sealer, Log: w.log, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Profiles: []*ca.Profile{w.profile, ca.ServerProfile()},
	}
	if withLog {
		logDir := filepath.Join(dir, "log")
		if !issuelog.Exists(logDir) {
			must(issuelog.Create(logDir, "cluster.local/chancery/log/16909060"))
		}
		w.issuance = must(issuelog.Open(issuelog.Config{Dir: logDir, Logger: w.config.Logger}))
		w.log.Mirror(w.issuance.Write)
		w.config.IssuanceLog = authority.LogState{ID: 16909060, Key: w.issuance.PublicKey()}
	}
	for _, f := range changes {
		f(&w.config)
	}
	if _, _, err := st.Load(t.Context()); err != nil {
		must(authority.Init(t.Context(), w.config, "test"))
	}
	w.keeper = must(authority.Open(t.Context(), w.config))
	w.manager = New(Config{
		Domain: td, Authority: w.keeper, Issuance: w.issuance, Logger: w.config.Logger, Publish: func(l *Lists) { w.published = append(w.published, l) },
	})
	closed := false
	w.close = func() {
		if closed {
			return
		}
		closed = true
		w.log.Close()
		if w.issuance != nil {
			w.issuance.Close()
		}
		st.Close()
	}
	t.Cleanup(w.close)
	return w
}

// restart is what a crash and a new start make of it: nothing but the files is left.
func (w *world) restart(changes ...func(*authority.Config)) *world {
	w.close()
	return start(w.t, w.dir, w.issuance != nil, changes...)
}

func newKey() crypto.Signer { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }

// issue gives a certificate to a workload on a node.
func (w *world) issue(id, node string) *x509.Certificate {
	w.t.Helper()
	i := must(w.keeper.Issuer())
	token := must(i.Prepare(w.profile, ca.Request{
		ID: must(trust.ParseID(id)), PublicKey: newKey().Public(), Requester: audit.Requester{Method: "token", Cluster: "east", Node: node},
	}))
	return must(x509.ParseCertificate(must(i.Issue(w.t.Context(), token)).DER))
}

func serial(c *x509.Certificate) string { return fmt.Sprintf("%x", c.SerialNumber.Bytes()) }

func (w *world) refresh() *Lists {
	w.t.Helper()
	if err := w.manager.Refresh(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	return w.last()
}

func (w *world) last() *Lists {
	w.t.Helper()
	if len(w.published) == 0 {
		w.t.Fatal("nothing was published")
	}
	return w.published[len(w.published)-1]
}

func (w *world) revoke(p authority.Predicate) *Result {
	w.t.Helper()
	return must(w.manager.Revoke(w.t.Context(), authority.Revocation{Predicate: p, Time: time.Now(), Actor: "unix:test", Reason: 1}, false))
}

// crls parses and verifies what was published last: one CRL for each issuer, by its key identifier.
func (w *world) crls() map[string]*x509.RevocationList {
	w.t.Helper()
	out := map[string]*x509.RevocationList{}
	l := w.last()
	for _, der := range l.CRLs {
		crl := must(x509.ParseRevocationList(der))
		id := fmt.Sprintf("%x", crl.AuthorityKeyId)
		if out[id] != nil {
			w.t.Errorf("two CRLs of issuer %s", id)
		}
		out[id] = crl
		verified := false
		for _, x := range l.Issuers {
			verified = verified || crl.CheckSignatureFrom(must(x509.ParseCertificate(x))) == nil
		}
		if !verified {
			w.t.Errorf("the CRL of %s is of none of the issuers that are sent along", id)
		}
	}
	return out
}

// listed returns the serials on all CRLs.
func (w *world) listed() map[string]bool {
	out := map[string]bool{}
	for _, crl := range w.crls() {
		for _, e := range crl.RevokedCertificateEntries {
			out[fmt.Sprintf("%x", e.SerialNumber.Bytes())] = true
		}
	}
	return out
}

// expect checks who is on the CRLs and in the set.
func (w *world) expect(what string, revoked, good []*x509.Certificate) {
	w.t.Helper()
	have := w.listed()
	set := w.manager.Set()
	for _, c := range revoked {
		if in, sure := set.Serial(c.SerialNumber); !have[serial(c)] || !in || !sure {
			w.t.Errorf("%s: %s of %s: on a CRL %v, in the set %v (sure %v); want it revoked", what, serial(c), c.URIs[0], have[serial(c)], in, sure)
		}
	}
	for _, c := range good {
		if in, _ := set.Serial(c.SerialNumber); have[serial(c)] || in {
			w.t.Errorf("%s: %s of %s: on a CRL %v, in the set %v; want it good", what, serial(c), c.URIs[0], have[serial(c)], in)
		}
	}
}

// TestD13PredicatesAreResolvedAgainstTheLog: each kind means what it says, now and after a restart.
func TestD13PredicatesAreResolvedAgainstTheLog(t *testing.T) {
	for _, tc := range []struct {
		name      string
		predicate func(first *x509.Certificate, between time.Time) authority.Predicate
		revoked   []int // of the certificates below
	}{
		{"serial", func(c *x509.Certificate, _ time.Time) authority.Predicate {
			return authority.Predicate{Serial: serial(c)}
		}, []int{0}},
		{"identity", func(*x509.Certificate, time.Time) authority.Predicate { return authority.Predicate{SPIFFEID: web} }, []int{0, 2}},
		{"node", func(*x509.Certificate, time.Time) authority.Predicate {
			return authority.Predicate{Cluster: "east", Node: "n1"}
		}, []int{0, 1}},
		{"time", func(_ *x509.Certificate, at time.Time) authority.Predicate {
			return authority.Predicate{IssuedBefore: &at}
		}, []int{0, 1}},
		{"node and time", func(_ *x509.Certificate, at time.Time) authority.Predicate {
			return authority.Predicate{IssuedBefore: &at, Cluster: "east", Node: "n2"}
		}, nil},
		{"another cluster's node", func(*x509.Certificate, time.Time) authority.Predicate {
			return authority.Predicate{Cluster: "west", Node: "n1"}
		}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := start(t, t.TempDir(), true)
			all := []*x509.Certificate{w.issue(web, "n1"), w.issue(db, "n1")}
			between := time.Now()
			all = append(all, w.issue(web, "n2"), w.issue(db, "n2"))
			var revoked, good []*x509.Certificate
			for i, c := range all {
				if len(tc.revoked) > 0 && (tc.revoked[0] == i || len(tc.revoked) > 1 && tc.revoked[1] == i) {
					revoked = append(revoked, c)
				} else {
					good = append(good, c)
				}
			}
			p := tc.predicate(all[0], between)
			dry := must(w.manager.Revoke(t.Context(), authority.Revocation{Predicate: p, Time: time.Now(), Actor: "unix:test"}, true))
			if int(dry.Count) != len(revoked) || dry.Revocation != "" || len(w.keeper.Document().Revocations(td)) > 0 {
				t.Errorf("the dry run says %+v, and the document has %d revocations", dry, len(w.keeper.Document().Revocations(td)))
			}
			if r := w.revoke(p); int(r.Count) != len(revoked) || r.Revocation == "" || r.Delayed != nil {
				t.Errorf("got %+v", r)
			}
			w.expect("at once", revoked, good)
			after := w.issue("spiffe://cluster.local/ns/foo/sa/other", "n1") // a node is not banned for ever
			w = w.restart()
			w.refresh()
			w.expect("after a restart", revoked, append(good, after))
		})
	}
}

// TestKilledBetweenDocumentAndCRL: once the document has it, nothing is lost, wherever the process ends.
func TestKilledBetweenDocumentAndCRL(t *testing.T) {
	w := start(t, t.TempDir(), true)
	bad, good := w.issue(web, "n1"), w.issue(db, "n1")
	w.refresh()
	number := w.crls()[must(w.keeper.Issuer()).SKI()].Number
	must(w.keeper.Revoke(t.Context(), authority.Revocation{Predicate: authority.Predicate{SPIFFEID: web}, Time: time.Now(), Actor: "unix:test"}))

	w = w.restart()
	if !w.manager.Set().Identity(web) || w.manager.Set().Identity(db) {
		t.Error("right after the start the identity is not refused")
	}
	if _, sure := w.manager.Set().Serial(good.SerialNumber); sure {
		t.Error("before the log was read, it says that a serial is good")
	}
	w.refresh()
	w.expect("after the restart", []*x509.Certificate{bad}, []*x509.Certificate{good})
	next := w.crls()[must(w.keeper.Issuer()).SKI()].Number
	if next.Cmp(number) <= 0 {
		t.Errorf("CRL number %v follows %v", next, number)
	}
	// A number that was taken and not used, as by a crash while signing, is not used again.
	if err := w.keeper.TakeCRL(t.Context(), w.keeper.Document(), document.CRL{Time: time.Now(), Until: time.Now().Add(crlLife), Content: "never signed"}); err != nil {
		t.Fatal(err)
	}
	taken := w.keeper.Document().State(td).CRL.Number
	w = w.restart()
	w.refresh()
	if last := w.crls()[must(w.keeper.Issuer()).SKI()].Number; last.Cmp(new(big.Int).SetUint64(taken)) <= 0 {
		t.Errorf("CRL number %v follows %d", last, taken)
	}
}

// TestSignedWhileItWasRevoked: a certificate whose intent was written while the revocation was stored is found afterwards.
func TestSignedWhileItWasRevoked(t *testing.T) {
	w := start(t, t.TempDir(), true)
	w.refresh()
	w.revoke(authority.Predicate{SPIFFEID: web})
	late := w.issue(web, "n1") // its request passed the check before
	if err := w.issuance.Sequence(); err != nil {
		t.Fatal(err)
	}
	w.refresh()
	w.expect("late", []*x509.Certificate{late}, nil)
}

// TestRestore: the identity gets new certificates; the old ones stay revoked, after a restart too.
func TestRestore(t *testing.T) {
	w := start(t, t.TempDir(), true)
	id := must(trust.ParseID(web))
	if err := w.manager.Restore(t.Context(), "unix:test", id); err == nil || !strings.Contains(err.Error(), "is not revoked") {
		t.Errorf("restoring what is not revoked: %v", err)
	}
	old := w.issue(web, "n1")
	w.revoke(authority.Predicate{SPIFFEID: web})
	if err := w.manager.Restore(t.Context(), "unix:test", id); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if w.manager.Set().Identity(web) {
			t.Error("it is still refused")
		}
		again := w.issue(web, "n1")
		if err := w.issuance.Sequence(); err != nil {
			t.Fatal(err)
		}
		w.refresh()
		w.expect("restored", []*x509.Certificate{old}, []*x509.Certificate{again})
		w = w.restart()
		w.refresh()
	}
}

// TestD22OneCRLOfEachIssuer: from the start, also when nothing is revoked, with what Envoy needs; over an issuer's renewal
// the new one's is out before it signs, and the old one's key stays for its CRL.
func TestD22OneCRLOfEachIssuer(t *testing.T) {
	w := start(t, t.TempDir(), true)
	first := must(w.keeper.Issuer())
	w.refresh()
	crl := w.crls()[first.SKI()]
	if len(w.last().CRLs) != 1 || crl == nil {
		t.Fatalf("%d CRLs", len(w.last().CRLs))
	}
	if n := len(crl.RevokedCertificateEntries); n != 0 {
		t.Errorf("%d entries", n)
	}
	idp := ""
	for _, e := range crl.Extensions {
		if e.Id.String() == "2.5.29.28" {
			idp = fmt.Sprintf("%x critical=%v", e.Value, e.Critical)
		}
	}
	if idp != "30038101ff critical=true" { // onlyContainsUserCerts, and no distributionPoint
		t.Errorf("issuing distribution point %q", idp)
	}
	if now := time.Now(); crl.ThisUpdate.After(now.Add(-time.Minute)) || crl.NextUpdate.Before(now.Add(6*24*time.Hour)) || crl.NextUpdate.After(first.NotAfter()) {
		t.Errorf("from %s to %s; the issuer ends %s", crl.ThisUpdate, crl.NextUpdate, first.NotAfter())
	}
	old := w.issue(web, "n1")
	cert, key := w.nextIssuer()
	w = w.prepare(cert, key)
	second := fmt.Sprintf("%x", cert.SubjectKeyId)
	w.refresh()
	if must(w.keeper.Issuer()).SKI() != first.SKI() || w.crls()[second] == nil || w.crls()[first.SKI()] == nil {
		t.Fatal("a prepared issuer should have its CRL out while the other signs")
	}
	w = w.restart() // while it is prepared
	w.refresh()
	if len(w.crls()) != 2 {
		t.Errorf("after a restart there are %d CRLs", len(w.crls()))
	}
	w = w.activate(second)
	fresh := w.issue(web, "n1")
	w.revoke(authority.Predicate{Serial: serial(old)})
	if n := len(w.crls()[first.SKI()].RevokedCertificateEntries); n != 1 {
		t.Errorf("the retired issuer's CRL has %d entries", n)
	}
	if n := len(w.crls()[second].RevokedCertificateEntries); n != 0 {
		t.Errorf("the new issuer's CRL has %d entries of another's", n)
	}
	w.expect("retired", []*x509.Certificate{old}, []*x509.Certificate{fresh})
	w = w.restart()
	w.refresh()
	w.expect("retired, after a restart", []*x509.Certificate{old}, []*x509.Certificate{fresh})
}

// nextIssuer signs an issuer with the root's key.
func (w *world) nextIssuer() (*x509.Certificate, crypto.Signer) {
	w.t.Helper()
	doc := w.keeper.Document()
	root := must(doc.Active(td, authority.KindRoot))
	key := must(root.OpenKey(w.t.Context(), td, w.config.Sealer, nil))
	signer := must(ca.NewIssuer(ca.IssuerConfig{
		Domain: td, Key: key, Chain: []*x509.Certificate{must(root.X509())}, Bundle: must(doc.Bundle(td)), LogID: w.keeper.LogID(), Log: w.log,
	}))
	cert, k, err := signer.NewIssuer(w.t.Context(), ca.DefaultIssuerTTL, audit.Requester{})
	if err != nil {
		w.t.Fatal(err)
	}
	return cert, k
}

// change writes the document as a server does, and starts anew.
func (w *world) change(f func(*authority.Document) error) *world {
	w.t.Helper()
	data, version, err := w.config.Store.Load(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	doc := must(must(authority.DecodeDocument(data, version, w.config.Sealer)).Next(data))
	if err := f(doc); err != nil {
		w.t.Fatal(err)
	}
	if err := w.config.Store.Replace(w.t.Context(), version, version+1, must(doc.Encode(w.config.Sealer))); err != nil {
		w.t.Fatal(err)
	}
	return w.restart()
}

func (w *world) prepare(cert *x509.Certificate, key crypto.Signer) *world {
	return w.change(func(d *authority.Document) error {
		return d.Prepare(td, authority.Key{Signer: key}, w.config.Sealer, cert)
	})
}

func (w *world) activate(id string) *world {
	return w.change(func(d *authority.Document) error { return d.Promote(td, id) })
}

// TestCRLsAreSignedEarly: nothing is signed while nothing changed, and all of it anew at half of its life.
func TestCRLsAreSignedEarly(t *testing.T) {
	w := start(t, t.TempDir(), true)
	w.refresh()
	n, version := len(w.published), w.keeper.Document().Version
	for range 3 {
		w.manager.due = time.Time{} // look again
		w.refresh()
	}
	if len(w.published) != n || w.keeper.Document().Version != version {
		t.Errorf("unchanged CRLs were published %d times more, the document went from version %d to %d", len(w.published)-n, version, w.keeper.Document().Version)
	}
	id := must(w.keeper.Issuer()).SKI()
	before := w.crls()[id]
	w = w.restart() // the same is signed again
	w.refresh()
	if after := w.crls()[id]; !bytes.Equal(after.RawTBSRevocationList, before.RawTBSRevocationList) || w.keeper.Document().Version != version {
		t.Errorf("a restart made CRL %v of %v; the document went from version %d to %d", after.Number, before.Number, version, w.keeper.Document().Version)
	}
	w = w.change(func(d *authority.Document) error {
		c := d.State(td).CRL
		c.Time, c.Until = c.Time.Add(-crlLife/2), c.Until.Add(-crlLife/2)
		return nil
	})
	w.refresh()
	if after := w.crls()[id]; after.Number.Cmp(before.Number) <= 0 || after.NextUpdate.Before(before.NextUpdate) {
		t.Errorf("past half of its life CRL %v was not signed anew: %v, until %s", before.Number, after.Number, after.NextUpdate)
	}
	last := w.keeper.Document().State(td).LastCRL()
	if due(last, time.Now(), crlLife) || !due(last, time.Now(), crlLife+time.Second) {
		t.Error("a CRL that is too short for today's leaves should be signed anew, and no other")
	}
}

// TestNumbersOfFormat1GoOn: a document of an older version knows the last number and no more.
func TestNumbersOfFormat1GoOn(t *testing.T) {
	w := start(t, t.TempDir(), true)
	w = w.change(func(d *authority.Document) error { d.State(td).CRLNumber = 41; return nil })
	l := w.refresh()
	for _, crl := range w.crls() {
		if crl.Number.Int64() != 42 {
			t.Errorf("number %v follows 41", crl.Number)
		}
	}
	if state := w.keeper.Document().State(td); state.CRLNumber != 0 || state.CRL.Number != 42 || len(l.CRLs) != 1 {
		t.Errorf("the document has %+v", state.CRL)
	}
}

// TestWithoutAnIssuanceLog: a serial can be revoked; the others are refused with what to do.
func TestWithoutAnIssuanceLog(t *testing.T) {
	w := start(t, t.TempDir(), false)
	cert, other := w.issue(web, "n1"), w.issue(db, "n1")
	now := time.Now()
	for _, p := range []authority.Predicate{{SPIFFEID: web}, {IssuedBefore: &now}, {Cluster: "east", Node: "n1"}} {
		if _, err := w.manager.Revoke(t.Context(), authority.Revocation{Predicate: p, Time: now, Actor: "a"}, false); err == nil || !strings.Contains(err.Error(), "set `issuanceLog`") {
			t.Errorf("%s: %v", p.String(), err)
		}
	}
	w.revoke(authority.Predicate{Serial: serial(cert)})
	w.expect("serial", []*x509.Certificate{cert}, []*x509.Certificate{other})
	w = w.restart()
	if revoked, sure := w.manager.Set().Serial(cert.SerialNumber); !revoked || !sure {
		t.Error("right after a restart it is not known")
	}
	w.refresh()
	w.expect("serial, after a restart", []*x509.Certificate{cert}, []*x509.Certificate{other})
}

// TestSerialThatNoLogHas goes onto every CRL: somebody may have signed it behind the log's back.
func TestSerialThatNoLogHas(t *testing.T) {
	w := start(t, t.TempDir(), true)
	if r := w.revoke(authority.Predicate{Serial: "abcd"}); r.Count != 0 {
		t.Errorf("%+v", r)
	}
	if !w.listed()["abcd"] {
		t.Error("it is on no CRL")
	}
	if r := w.revoke(authority.Predicate{Serial: "abcd"}); len(w.keeper.Document().Revocations(td)) != 1 || r.Revocation != w.keeper.Document().Revocations(td)[0].ID {
		t.Errorf("revoked twice: %+v, %d in the document", r, len(w.keeper.Document().Revocations(td)))
	}
	issuer := must(w.keeper.Issuer()).Chain()[0]
	_, err := w.manager.Revoke(t.Context(), authority.Revocation{Predicate: authority.Predicate{Serial: serial(issuer)}, Time: time.Now(), Actor: "a"}, false)
	if err == nil || !strings.Contains(err.Error(), "signing certificate") {
		t.Errorf("revoking the issuer's serial: %v", err)
	}
}

// TestD13OtherReplicasLogsAreNamed: what cannot be read is said.
func TestD13OtherReplicasLogsAreNamed(t *testing.T) {
	w := start(t, t.TempDir(), true)
	w = w.change(func(d *authority.Document) error {
		d.Logs = append(d.Logs, authority.LogState{ID: 20000000, Key: "cluster.local/chancery/log/20000000+aabbccdd+key"}, authority.LogState{ID: 20000001})
		return nil
	})
	w.refresh()
	got := strings.Join(w.manager.State().MissingLogs, "; ")
	for _, want := range []string{"log cluster.local/chancery/log/20000000+aabbccdd+key of replica with log ID 20000000 cannot be reached", "log ID 20000001 has no issuance log"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in %q", want, got)
		}
	}
}

// TestIssuerThatSignsNoCRLs: then there are none at all, and that is said; renewals are refused all the same.
func TestD22IssuerThatSignsNoCRLs(t *testing.T) {
	dir := t.TempDir()
	made := plug(t, dir, x509.KeyUsageCertSign)
	w := start(t, dir, true, made)
	cert := w.issue(web, "n1")
	if l := w.refresh(); len(l.CRLs) != 0 || len(l.Issuers) != 0 || l.Bundle == nil {
		t.Errorf("%d CRLs, %d issuers", len(l.CRLs), len(l.Issuers))
	}
	w.revoke(authority.Predicate{SPIFFEID: web})
	off := strings.Join(w.manager.State().Off, "; ")
	if revoked, _ := w.manager.Set().Serial(cert.SerialNumber); !revoked || !w.manager.Set().Identity(web) || !strings.Contains(off, "lacks cRLSign") {
		t.Errorf("revoked %v, state %q", revoked, off)
	}
}

// TestD22PluggedInIssuerIsChanged: its last CRL stays when the key goes, so that who it certified is not cut off; what it
// lacks is said.
func TestD22PluggedInIssuerIsChanged(t *testing.T) {
	dir := t.TempDir()
	with := plug(t, dir, x509.KeyUsageCertSign|x509.KeyUsageCRLSign)
	w := start(t, dir, true, with)
	first := must(w.keeper.Issuer())
	gone, live := w.issue(web, "n1"), w.issue(db, "n1")
	w.revoke(authority.Predicate{Serial: serial(gone)})
	replug(t, dir, x509.KeyUsageCertSign|x509.KeyUsageCRLSign)
	w = w.restart(with)
	if w.keeper.TakeLease(t.Context()) {
		w.keeper.Mind(t.Context())
	}
	if must(w.keeper.Issuer()).SKI() == first.SKI() {
		t.Fatal("the issuer was not changed")
	}
	w.refresh()
	if len(w.crls()) != 2 {
		t.Fatalf("%d CRLs", len(w.crls()))
	}
	w.expect("after the change", []*x509.Certificate{gone}, []*x509.Certificate{live})
	w.revoke(authority.Predicate{Serial: serial(live)})
	if stale := strings.Join(w.manager.State().Stale, "; "); !strings.Contains(stale, "lacks 1 revoked certificates") {
		t.Errorf("what the last CRL lacks is not said: %q", stale)
	}
	if revoked, _ := w.manager.Set().Serial(live.SerialNumber); !revoked {
		t.Error("it may renew itself")
	}
}

// plug makes a CA in files and returns what makes a config use it.
func plug(t *testing.T, dir string, usage x509.KeyUsage) func(*authority.Config) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(dir, "cacerts"), 0o700); err != nil {
		t.Fatal(err)
	}
	key := newKey()
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(1000 * time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, SubjectKeyId: []byte("root"),
	}
	root.Subject.CommonName = "plugged root"
	der := must(x509.CreateCertificate(rand.Reader, root, root, key.Public(), key))
	writePEM(t, filepath.Join(dir, "cacerts/root-cert.pem"), trust.EncodeCertificates(must(x509.ParseCertificate(der))))
	writePEM(t, filepath.Join(dir, "root-key.pem"), must(trust.EncodeKey(key)))
	replug(t, dir, usage)
	return func(c *authority.Config) {
		c.Plugged = &authority.Plugged{Dir: filepath.Join(dir, "cacerts"), Layout: files.CACerts}
	}
}

// replug makes another issuer under the same root.
func replug(t *testing.T, dir string, usage x509.KeyUsage) {
	t.Helper()
	root := must(trust.ParseCertificates(must(os.ReadFile(filepath.Join(dir, "cacerts/root-cert.pem")))))[0]
	rootKey := must(trust.ParseKey(must(os.ReadFile(filepath.Join(dir, "root-key.pem")))))
	key := newKey()
	id := make([]byte, 8)
	rand.Read(id)
	x := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(id), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(500 * time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: usage, SubjectKeyId: id,
	}
	x.Subject.CommonName = fmt.Sprintf("plugged issuer %x", id)
	der := must(x509.CreateCertificate(rand.Reader, x, root, key.Public(), rootKey))
	writePEM(t, filepath.Join(dir, "cacerts/ca-cert.pem"), trust.EncodeCertificates(must(x509.ParseCertificate(der))))
	writePEM(t, filepath.Join(dir, "cacerts/cert-chain.pem"), trust.EncodeCertificates(must(x509.ParseCertificate(der))))
	writePEM(t, filepath.Join(dir, "cacerts/ca-key.pem"), must(trust.EncodeKey(key)))
}

func writePEM(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestStoreThatFails: a revocation that cannot be stored is no revocation, and one that is stored comes into effect once
// it can be signed.
func TestStoreThatFails(t *testing.T) {
	w := start(t, t.TempDir(), true)
	w.refresh()
	cert := w.issue(web, "n1")
	w.log.Close() // invariant 10: no audit, no effect
	if _, err := w.manager.Revoke(t.Context(), authority.Revocation{Predicate: authority.Predicate{SPIFFEID: web}, Time: time.Now(), Actor: "a"}, false); err == nil {
		t.Error("revoked without a line in the audit log")
	}
	if len(w.keeper.Document().Revocations(td)) > 0 || w.manager.Set().Identity(web) {
		t.Error("it came into effect")
	}
	w = w.restart()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.manager.Run(ctx) }()
	must(w.keeper.Revoke(t.Context(), authority.Revocation{Predicate: authority.Predicate{SPIFFEID: web}, Time: time.Now(), Actor: "unix:test"}))
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if revoked, _ := w.manager.Set().Serial(cert.SerialNumber); revoked || time.Now().After(deadline) {
			break
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	w.refresh()
	w.expect("in the background", []*x509.Certificate{cert}, nil)
}
