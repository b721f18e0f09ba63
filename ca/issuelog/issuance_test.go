package issuelog_test

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/trust"
)

// mint issues real certificates with both logs below a folder.
type mint struct {
	t       *testing.T
	domain  trust.Domain
	made    *ca.Created
	bundle  *trust.Bundle
	profile *ca.Profile
	pub     any
}

func newMint(t *testing.T) *mint {
	t.Helper()
	m := &mint{t: t}
	var err error
	if m.domain, err = trust.ParseDomain("cluster.local"); err != nil {
		t.Fatal(err)
	}
	log, err := audit.Open(filepath.Join(t.TempDir(), "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	if m.made, err = ca.Create(t.Context(), ca.CreateConfig{Domain: m.domain, LogID: ca.MinLogID, Log: log}); err != nil {
		t.Fatal(err)
	}
	if m.bundle, err = trust.NewBundle(m.domain, 1, []*x509.Certificate{m.made.Root}); err != nil {
		t.Fatal(err)
	}
	if m.profile, err = ca.NewProfile("workload", ca.ProfileConfig{}); err != nil {
		t.Fatal(err)
	}
	key, err := ca.GenerateKey(ca.P256)
	if err != nil {
		t.Fatal(err)
	}
	m.pub = key.Public()
	return m
}

// run issues some certificates and gives each that was handed out. It goes on after errors, as a server does.
func (m *mint) run(dir string, handedOut func(*x509.Certificate)) (failures int, err error) {
	log, err := audit.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		return 0, err
	}
	defer log.Close()
	l, err := issuelog.Open(faultConfig(dir))
	if err != nil {
		return 0, err
	}
	defer l.Kill()
	log.Mirror(l.Write)
	issuer, err := ca.NewIssuer(ca.IssuerConfig{
		Domain: m.domain, Key: m.made.IssuerKey, Chain: []*x509.Certificate{m.made.Issuer}, Bundle: m.bundle, LogID: ca.MinLogID, Log: log,
	})
	if err != nil {
		m.t.Fatal(err)
	}
	for i := range 6 {
		id, err := trust.ParseID(fmt.Sprintf("spiffe://cluster.local/ns/a/sa/b%d", i))
		if err != nil {
			m.t.Fatal(err)
		}
		token, err := issuer.Prepare(m.profile, ca.Request{ID: id, PublicKey: m.pub})
		if err != nil {
			failures++
			_ = l.Sequence() // as each second
			continue
		}
		c, err := issuer.Issue(m.t.Context(), token)
		if err != nil {
			failures++
			continue
		}
		cert, err := x509.ParseCertificate(c.DER)
		if err != nil {
			m.t.Fatal(err)
		}
		handedOut(cert)
		if i%2 == 1 {
			_ = l.Sequence()
		}
	}
	return failures, nil
}

// audited is the full-state checker: of each certificate that was handed out the audit log has the intent, with the hash of
// what was signed; unless the machine failed, so has the issuance log after the next start, which verifies.
func (m *mint) audited(t *testing.T, name, dir string, certs []*x509.Certificate, machine bool) {
	t.Helper()
	boot := "first"
	if machine {
		boot = "second"
	}
	defer issuelog.SetBootID(boot)()
	log, err := audit.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatalf("%s: the next start fails: %v", name, err)
	}
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	intents := map[string]string{}
	for line := range strings.Lines(string(data)) {
		var r audit.Record
		if json.Unmarshal([]byte(line), &r) == nil && r.Event == audit.Intent {
			intents[r.Serial] = r.TBSHash
		}
	}
	var serials []string
	for _, c := range certs {
		serial, sum := hex.EncodeToString(c.SerialNumber.Bytes()), sha256.Sum256(c.RawTBSCertificate)
		if intents[serial] != hex.EncodeToString(sum[:]) {
			t.Errorf("%s: serial %s was handed out, and the audit log has intent %q", name, serial, intents[serial])
		}
		serials = append(serials, serial)
	}
	l, err := issuelog.Open(faultConfig(dir))
	if err != nil {
		t.Fatalf("%s: the next start fails: %v", name, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if machine {
		serials = nil
	}
	check(t, filepath.Join(dir, "log"), nil, serials)
	if t.Failed() {
		t.Fatal(name)
	}
}

// TestInvariant10NothingIsHandedOutWithoutItsIntent issues real certificates with both logs on, fails each step in each way, and
// has process and machine end after each.
func TestInvariant10NothingIsHandedOutWithoutItsIntent(t *testing.T) {
	defer issuelog.SetBootID("first")()
	m := newMint(t)
	begin := func(t *testing.T) (string, *durabletest.Disk) {
		dir := t.TempDir()
		if _, err := issuelog.Create(faultConfig(dir).Dir, origin); err != nil {
			t.Fatal(err)
		}
		return dir, durabletest.Watch(t, dir)
	}
	one := func(t *testing.T, n int, mode durabletest.Mode) int {
		dir, d := begin(t)
		d.FailAt(n, mode)
		var certs []*x509.Certificate
		failures, err := m.run(dir, func(c *x509.Certificate) { certs = append(certs, c) })
		if err != nil && !d.Dead() {
			failures, err = m.run(dir, func(c *x509.Certificate) { certs = append(certs, c) }) // as the next start does
		}
		if !d.Dead() && (err != nil || failures > 1 || n < 0 && failures > 0) {
			t.Errorf("%s: one fault made %d of 6 requests fail, %v", d.Failed(), failures, err)
		}
		m.audited(t, d.Failed(), d.Copy(), certs, false)
		return d.Steps()
	}
	total := one(t, -1, "")
	if total < 60 {
		t.Errorf("only %d steps were seen", total)
	}
	stride := 1
	if testing.Short() {
		stride = 17
	}
	for n := 0; n < total; n += stride {
		for _, mode := range durabletest.Modes {
			t.Run(fmt.Sprint(n, " ", mode), func(t *testing.T) { one(t, n, mode) })
		}
	}

	dir, d := begin(t)
	if _, err := m.run(dir, func(c *x509.Certificate) { d.Mark(c) }); err != nil {
		t.Fatal(err)
	}
	d.Crashes(stride, func(machine bool, left *durabletest.Left) {
		var certs []*x509.Certificate
		for _, x := range left.Marks {
			certs = append(certs, x.(*x509.Certificate))
		}
		m.audited(t, left.String(), left.Dir, certs, machine)
	})
}

// TestInvariant10IssuanceOnAFullDisk: on a real file system that gets full nothing is handed out, and with room again it goes on.
func TestInvariant10IssuanceOnAFullDisk(t *testing.T) {
	m := newMint(t)
	dir := durabletest.SmallDisk(t, 1<<20)
	if _, err := issuelog.Create(faultConfig(dir).Dir, origin); err != nil {
		t.Fatal(err)
	}
	var certs []*x509.Certificate
	run := func() (failures int) {
		failures, err := m.run(dir, func(c *x509.Certificate) { certs = append(certs, c) })
		if err != nil {
			return 6
		}
		return failures
	}
	if n := run(); n > 0 {
		t.Fatalf("%d of 6 failed on an empty disk", n)
	}
	remove := durabletest.Fill(t, dir)
	failures := 0
	for range 4 {
		failures += run()
	}
	if failures < 12 {
		t.Errorf("only %d of 24 requests failed on a full disk", failures)
	}
	remove()
	if n := run(); n > 0 {
		t.Errorf("with room again %d of 6 failed", n)
	}
	m.audited(t, "full disk", dir, certs, false)
}
