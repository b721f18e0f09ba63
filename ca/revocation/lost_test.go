package revocation

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/trust"
)

// TestD2WhatANoteSaidIsWaitedFor: who starts while the note of another is gone, and nobody is there who had read it, keeps to what agents
// have for a while, and then says what its CRLs may lack.
func TestD2WhatANoteSaidIsWaitedFor(t *testing.T) {
	f := newFleet(t, "a", "b")
	b1, a1 := f.replicas["b"].issue(web, "n1"), f.replicas["a"].issue(db, "n1")
	f.run()
	f.settled("start")
	must(f.replicas["a"].revoke(authority.Predicate{SPIFFEID: web}))
	f.settled("all are up", b1)
	f.replicas["b"].end()
	f.replicas["a"].end()
	if err := f.shop.DropNote(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	a := f.open("a")
	r, err := a.revoke(authority.Predicate{SPIFFEID: db})
	if err != nil || r.Delayed == nil || !strings.Contains(r.Delayed.Error(), "replica b") || a.last.Load() != nil {
		t.Errorf("got %+v, %v, %v", r, err, a.last.Load())
	}
	if in, _ := a.manager.Set().Serial(a1.SerialNumber); !in || !a.manager.Set().Identity(db) {
		t.Error("it may renew itself meanwhile")
	}
	a.manager.started = time.Now().Add(-patience)
	if err := a.manager.Refresh(t.Context()); err != nil {
		t.Error(err)
	}
	if have, _ := a.listed(); !slices.Equal(have, serials(a1)) {
		t.Errorf("after %s it lists %v", patience, have)
	}
	if missing := strings.Join(a.manager.State().MissingLogs, "; "); !strings.Contains(missing, "replica b cannot be reached from here, and the replica has left no note") {
		t.Errorf("it says %q", missing)
	}
	f.open("b")
	f.run()
	f.settled("b is back", a1, b1)
}

// TestD2WhatALostLogHadStaysRevoked: a replica whose disk is lost, and that comes back under its name with another log, leaves what
// it had found in the first.
func TestD2WhatALostLogHadStaysRevoked(t *testing.T) {
	f := newFleet(t, "a", "b")
	a, b1 := f.replicas["a"], f.replicas["b"].issue(web, "n1")
	f.run()
	f.settled("start")
	must(a.revoke(authority.Predicate{SPIFFEID: web}))
	f.settled("all are up", b1)
	f.replicas["b"].end()
	if err := a.keeper.Change(t.Context(), func(d *authority.Document) error { _, err := d.Forget("b", time.Now()); return err }); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(f.dir, "b.log")); err != nil {
		t.Fatal(err)
	}
	f.ids = map[string]uint32{"b": 80_000_000}
	b := f.open("b")
	b.run()
	b2 := b.issue(db, "n1")
	must(a.revoke(authority.Predicate{SPIFFEID: db}))
	f.settled("with another log", b1, b2)
	for _, name := range []string{"a", "b"} { // nobody has it in memory any more
		f.replicas[name].end()
	}
	f.open("a")
	f.open("b")
	f.run()
	f.settled("all anew", b1, b2)
	if missing := f.replicas["a"].manager.State().MissingLogs; len(missing) > 0 && !strings.Contains(missing[0], "was not searched for the newest") {
		t.Errorf("it says %q", missing)
	}
}

// TestD13AllAtOnce: replicas that find out in the same moment take one number, for what is revoked and for what is signed early.
func TestD13AllAtOnce(t *testing.T) {
	f := newFleet(t, "a", "b", "c", "d")
	var certs []*x509.Certificate
	refresh := func() {
		t.Helper()
		var wg sync.WaitGroup
		for _, r := range f.replicas {
			wg.Go(func() {
				for range 20 { // as Run does
					r.keeper.Follow(t.Context())
					if err := r.manager.Refresh(t.Context()); err != nil && !awaited(err) {
						t.Errorf("%s: %v", r.name, err)
					}
					if err := r.board.Read(t.Context()); err != nil {
						t.Error(err)
					}
					_ = r.board.Write(t.Context())
				}
			})
		}
		wg.Wait()
	}
	for _, r := range f.replicas {
		certs = append(certs, r.issue(web, "n1"))
	}
	refresh()
	f.settled("start")
	began := f.shop.writes.Load()
	must(f.replicas["a"].keeper.Revoke(t.Context(), authority.Revocation{Predicate: authority.Predicate{SPIFFEID: web}, Time: time.Now(), Actor: "x"}))
	refresh()
	f.settled("revoked", certs...)
	if n := f.shop.writes.Load() - began; n > 3 {
		t.Errorf("a revocation made %d versions", n)
	}
	began = f.shop.writes.Load()
	if err := f.replicas["a"].keeper.Change(t.Context(), func(d *authority.Document) error {
		c := *d.State(td).CRL
		c.Time, c.Until = c.Time.Add(-crlLife/2), c.Until.Add(-crlLife/2)
		d.State(td).NextCRL(c)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	refresh()
	f.settled("signed early", certs...)
	if n := f.shop.writes.Load() - began; n > 3 {
		t.Errorf("signing early made %d versions", n)
	}
}

// TestD13MoreThanFits: what all replicas revoked together may be more than the CRLs take. Then all leave out the same, what was revoked last,
// and say so.
func TestD13MoreThanFits(t *testing.T) {
	if testing.Short() {
		t.Skip("signs CRLs of 50,000 entries")
	}
	f := newFleet(t, "a", "b")
	a := f.replicas["a"]
	a1 := a.issue(db, "n1")
	const other = 90_000_000
	if err := a.keeper.Change(t.Context(), func(d *authority.Document) error {
		d.Logs = append(d.Logs, authority.LogState{ID: other, Key: "cluster.local/chancery/log/90000000+aabbccdd+key", Replica: "c"})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	first := must(a.keeper.Revoke(t.Context(), authority.Revocation{Predicate: authority.Predicate{SPIFFEID: web}, Time: time.Now(), Actor: "x"}))
	issuer := must(a.keeper.Issuer()).SKI()
	third := board.Open(board.Config{Store: f.shop, Sealer: f.sealer, Domain: td, Replica: "c", Logger: slog.New(slog.DiscardHandler)})
	third.Own(func(n *board.Note) {
		n.LogID, n.Resolved, n.Omitted = other, 1<<40, 7
		for i := range board.MaxRevoked {
			n.Revoked = append(n.Revoked, board.Revoked{Serial: fmt.Sprintf("055d4a80%032x", i), NotAfter: time.Now().Add(time.Hour).Truncate(time.Second), Revocation: first.ID, Issuer: issuer})
		}
	})
	if err := third.Write(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.run()
	wait(t, "the full number", func() bool { have, _ := a.listed(); return len(have) == MaxEntries })
	if _, err := a.revoke(authority.Predicate{SPIFFEID: db}); err == nil || !strings.Contains(err.Error(), "at most 50000 fit") {
		t.Errorf("one more, knowingly: %v", err)
	}
	must(f.replicas["b"].keeper.Revoke(t.Context(), authority.Revocation{Predicate: authority.Predicate{SPIFFEID: db}, Time: time.Now(), Actor: "x"}))
	for _, r := range f.replicas {
		wait(t, r.name+" says so", func() bool {
			missing := strings.Join(r.manager.State().MissingLogs, "; ")
			return strings.Contains(missing, "1 revoked certificates, those revoked last, are on no CRL") && strings.Contains(missing, "replica c has 7 more revoked certificates than it can tell others")
		})
		if in, _ := r.manager.Set().Serial(a1.SerialNumber); !in {
			t.Errorf("%s would renew it", r.name)
		}
		if have, _ := r.listed(); slices.Contains(have, serial(a1)) || len(have) != MaxEntries {
			t.Errorf("%s lists %d", r.name, len(have))
		}
	}
}

// TestD13PluggedInIssuerThatOneReplicaLacks: whose files are not there yet has its CRL from another, and does not acknowledge it (decisions D4
// and D7).
func TestD13PluggedInIssuerThatOneReplicaLacks(t *testing.T) {
	dir := t.TempDir()
	plug(t, dir, x509.KeyUsageCertSign|x509.KeyUsageCRLSign)
	dirs := map[string]string{"a": filepath.Join(dir, "cacerts"), "b": filepath.Join(dir, "cacerts of b")}
	if err := os.Mkdir(dirs["b"], 0o700); err != nil {
		t.Fatal(err)
	}
	copied := func(names ...string) {
		for _, name := range names {
			writePEM(t, filepath.Join(dirs["b"], name), must(os.ReadFile(filepath.Join(dirs["a"], name))))
		}
	}
	copied("root-cert.pem", "ca-cert.pem", "cert-chain.pem", "ca-key.pem")
	f := newFleet(t)
	f.config = func(name string, c *authority.Config) {
		c.Plugged = &authority.Plugged{Dir: dirs[name], Layout: files.CACerts}
	}
	a := f.open("a")
	a.run()
	wait(t, "a drives", a.keeper.Drives)
	b := f.open("b")
	b.run()
	f.settled("start")
	replug(t, dir, x509.KeyUsageCertSign|x509.KeyUsageCRLSign)
	wait(t, "the driver prepares it", func() bool { return a.keeper.Document().Prepared(td) != nil || b.keeper.Document().Prepared(td) != nil })
	version := max(a.keeper.Document().Version, b.keeper.Document().Version)
	for _, r := range f.replicas {
		wait(t, r.name+" has the CRL of the next issuer", func() bool { l := r.last.Load(); return l != nil && len(l.CRLs) == 2 })
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := a.manager.Acknowledged(ctx, version); err == nil || !strings.Contains(err.Error(), "replica b") {
		t.Errorf("acknowledged without the key: %v", err)
	}
	if err := b.manager.State().Blocked; err == nil || !strings.Contains(err.Error(), "lack its key") {
		t.Errorf("b says %v", err)
	}
	copied("ca-cert.pem", "cert-chain.pem", "ca-key.pem")
	if err := a.manager.Acknowledged(t.Context(), version); err != nil {
		t.Errorf("once b has it: %v", err)
	}
}

// TestD16CertificateOfALogThatIsBehind: by identity, node and time a certificate is judged by what it says, where nobody has told its serial.
func TestD16CertificateOfALogThatIsBehind(t *testing.T) {
	f := newFleet(t, "a", "b")
	a, b := f.replicas["a"], f.replicas["b"]
	i := must(b.keeper.Issuer())
	token := must(i.Prepare(b.profile, ca.Request{
		ID: must(trust.ParseID(web)), PublicKey: newKey().Public(), Attestation: &ca.Attestation{Cluster: "east", Node: "n1", Time: time.Now()},
	}))
	cert := must(x509.ParseCertificate(must(i.Issue(t.Context(), token)).DER))
	own := a.issue(web, "n1")
	for _, r := range []*replica{b, a} {
		r.keeper.Follow(t.Context())
		if err := r.manager.Refresh(t.Context()); err != nil && !awaited(err) {
			t.Fatal(err)
		}
	}
	check := func(what string, want bool) {
		t.Helper()
		if revoked, _ := a.manager.Set().Certificate(cert); revoked != want {
			t.Errorf("%s: revoked %v", what, revoked)
		}
	}
	check("nothing", false)
	now := time.Now()
	for _, p := range []authority.Predicate{{Cluster: "west", Node: "n1"}, {SPIFFEID: db}} {
		must(a.keeper.Revoke(t.Context(), authority.Revocation{Predicate: p, Time: now, Actor: "x"}))
		_ = a.manager.Refresh(t.Context())
		check(p.String(), false)
	}
	must(a.keeper.Revoke(t.Context(), authority.Revocation{Predicate: authority.Predicate{Cluster: "east", Node: "n1"}, Time: now, Actor: "x"}))
	_ = a.manager.Refresh(t.Context())
	check("its node", true)
	if revoked, sure := (*Set)(nil).Certificate(own); revoked || !sure {
		t.Error("the nil set is not empty")
	}
}
