package authority

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/authority/swap"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// setup makes a real store, sealing key and audit log in a folder.
func setup(t *testing.T, dir string) Config {
	t.Helper()
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	st, err := store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	sealer, err := keys.LoadSealer(filepath.Join(dir, "state.key"))
	if errors.Is(err, os.ErrNotExist) {
		sealer, err = keys.CreateSealer(filepath.Join(dir, "state.key"))
	}
	if err != nil {
		t.Fatal(err)
	}
	log, err := audit.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	p, err := ca.NewProfile("workload", ca.ProfileConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return Config{Domain: td, Store: st, Sealer: sealer, Log: log, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Profiles: []*ca.Profile{p, ca.ServerProfile()}}
}

// driving is open for a server that drives changes.
func driving(t *testing.T, c Config) *Keeper {
	t.Helper()
	k := open(t, c)
	drive(t, k)
	return k
}

func drive(t *testing.T, k *Keeper) {
	t.Helper()
	if !k.TakeLease(t.Context()) {
		t.Fatalf("replica %s does not drive", k.Replica())
	}
}

func open(t *testing.T, c Config) *Keeper {
	t.Helper()
	k, err := Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestInvariant11NoDocumentIsAnError(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Open(t.Context(), c); !errors.Is(err, store.ErrMissing) || !strings.Contains(err.Error(), "authority init") {
		t.Errorf("opening an empty store gave %v", err)
	}
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	if _, err := Init(t.Context(), c, "test"); !errors.Is(err, store.ErrConflict) {
		t.Errorf("a second init gave %v", err)
	}
	first := open(t, c).Document()
	if again := open(t, c).Document(); again.Version != 1 || len(again.Domains["cluster.local"].Authorities) != 2 || again.Logs[0].ID != first.Logs[0].ID {
		t.Errorf("the document changed by being opened: %+v", again)
	}
}

func TestD9DocumentIsAuthenticated(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	data, version, err := c.Store.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(data), "PRIVATE KEY") {
		t.Error("the stored document holds a key in the clear")
	}
	changed := strings.Replace(string(data), `"active"`, `"active "`, 1)
	for name, tc := range map[string]struct {
		data    string
		version uint64
		want    string
	}{
		"a changed byte":          {changed, version, "changed since"},
		"an old version put back": {string(data), version + 1, "put there from elsewhere"},
		"cut off":                 {string(data[:len(data)/2]), version, "authority document"},
		"a field too many":        {`{"document":{},"mac":"","x":1}`, version, "unknown field"},
	} {
		if _, err := DecodeDocument([]byte(tc.data), tc.version, c.Sealer); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	other, err := keys.CreateSealer(filepath.Join(t.TempDir(), "k"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := DecodeDocument(data, version, other); err == nil {
		t.Error("another sealing key opened the document")
	}
}

func TestNewerFormatIsRefusedWithAClearMessage(t *testing.T) {
	c := setup(t, t.TempDir())
	doc := document.New()
	doc.Format = document.Format + 1
	data, err := doc.Encode(c.Sealer)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := DecodeDocument(data, 1, c.Sealer); err == nil || !strings.Contains(err.Error(), "use a newer one") {
		t.Errorf("got %v", err)
	}
}

// A sealed key cannot be moved to another authority or generation.
func TestD9SealedKeyIsBoundToItsAuthority(t *testing.T) {
	c := setup(t, t.TempDir())
	doc, err := Init(t.Context(), c, "test")
	if err != nil {
		t.Fatal(err)
	}
	as := doc.Domains["cluster.local"].Authorities
	as[1].Key = as[0].Key
	k, err := load(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.held.Open(t.Context(), doc, &as[1]); err == nil || !strings.Contains(err.Error(), "unsealing") {
		t.Errorf("the root's key was taken for the issuer's: %v", err)
	}
}

func TestIssuerIsRenewedUnderItsRoot(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	before, err := k.Issuer()
	if err != nil {
		t.Fatal(err)
	}
	if held.HalfOver(k.Document(), k.config.Domain, time.Now()) {
		t.Error("a new issuer counts as half over")
	}
	if err := k.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	after, err := k.Issuer()
	if err != nil {
		t.Fatal(err)
	}
	if after.SKI() == before.SKI() || !after.Bundle().SameRoots(before.Bundle()) || after.Bundle().Generation() != before.Bundle().Generation() {
		t.Errorf("issuer %s became %s; the roots should be the same", before.SKI(), after.SKI())
	}
	doc := k.Document()
	if doc.Version != 3 || doc.Previous == "" { // the driver, the issuer
		t.Errorf("version %d, previous %q", doc.Version, doc.Previous)
	}
	for _, a := range doc.Domains["cluster.local"].Authorities {
		if a.ID == before.SKI() && (a.State != StateRetiring || a.Key == nil) {
			t.Errorf("the former issuer is %s and its key, which its CRL needs, is kept: %v", a.State, a.Key != nil)
		}
	}
	if again := open(t, c); again.issuer.Load().SKI() != after.SKI() {
		t.Error("after a restart another issuer is in use")
	}
}

func TestIssuerThatFailsItsCheckIsNotStored(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	before := k.issuer.Load()
	bad, err := ca.NewProfile("bad", ca.ProfileConfig{IDPaths: []string{"/" + strings.Repeat("x", trust.MaxIDLen-len("spiffe://td/"))}})
	if err != nil {
		t.Fatal(err)
	}
	k.config.Profiles = []*ca.Profile{bad} // too long in this domain
	k.held = k.nothing()
	if err := k.renew(t.Context()); err == nil || !strings.Contains(err.Error(), "is not used") {
		t.Errorf("got %v", err)
	}
	if again := open(t, c); again.Document().Version != 2 || again.issuer.Load().SKI() != before.SKI() {
		t.Error("an issuer that failed its check is what a restart finds")
	}
}

// plugged writes a plugged-in issuer in Istio's layout and returns its parts.
func plugged(t *testing.T, dir string, made *ca.Created, roots ...*x509.Certificate) {
	t.Helper()
	key, err := trust.EncodeKey(made.IssuerKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"ca-cert.pem": trust.EncodeCertificates(made.Issuer), "ca-key.pem": key,
		"cert-chain.pem": trust.EncodeCertificates(made.Issuer, made.Root), "root-cert.pem": trust.EncodeCertificates(roots...),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func newCA(t *testing.T, c Config) *ca.Created {
	t.Helper()
	made, err := ca.Create(t.Context(), ca.CreateConfig{Domain: c.Domain, LogID: ca.MinLogID, Log: c.Log})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func TestD7PluggedInIssuer(t *testing.T) {
	c := setup(t, t.TempDir())
	dir := t.TempDir()
	c.Plugged = &Plugged{Dir: dir, Layout: files.CACerts}
	made := newCA(t, c)
	plugged(t, dir, made, made.Root)
	doc, err := Init(t.Context(), c, "test")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range doc.Domains["cluster.local"].Authorities {
		if a.Key != nil {
			t.Error("a plugged-in key was copied into the document")
		}
	}
	k := driving(t, c)
	first := k.issuer.Load()

	// A new issuer under the same root is taken: prepared, so that its CRL can go out first, and then active.
	var waiting []document.AuthorityState
	k.Announce(func(context.Context) error {
		for _, a := range k.Document().Domains["cluster.local"].Authorities {
			waiting = append(waiting, a.State)
		}
		return errors.New("an admin's issuer is used all the same")
	})
	second := *made
	root, err := ca.NewIssuer(ca.IssuerConfig{Domain: c.Domain, Key: made.RootKey, Chain: []*x509.Certificate{made.Root}, Bundle: first.Bundle(), LogID: ca.MinLogID, Log: c.Log})
	if err != nil {
		t.Fatal(err)
	}
	if second.Issuer, second.IssuerKey, err = root.NewIssuer(t.Context(), time.Hour, audit.Requester{}); err != nil {
		t.Fatal(err)
	}
	plugged(t, dir, &second, made.Root)
	set, err := files.Read(dir, files.CACerts)
	if err != nil {
		t.Fatal(err)
	}
	if err := k.TakeFiles(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	k.mindIssuer(t.Context(), time.Now())
	if k.issuer.Load().SKI() == first.SKI() || k.Document().Version != 4 {
		t.Error("the new issuer under the same root is not in use")
	}
	if !slices.Equal(waiting, []document.AuthorityState{StateActive, StateActive, StatePrepared}) {
		t.Errorf("while its CRL was to go out the authorities were %v", waiting)
	}

	// A change of the roots by more than one step is refused, with the steps.
	stranger := newCA(t, c)
	read := func(roots ...*x509.Certificate) *files.Set {
		t.Helper()
		plugged(t, dir, &second, roots...)
		set, err := files.Read(dir, files.CACerts)
		if err != nil {
			t.Fatal(err)
		}
		return set
	}
	for name, write := range map[string]func(){
		"another CA":             func() { plugged(t, dir, stranger, stranger.Root) },
		"root and key at once":   func() { plugged(t, dir, stranger, made.Root, stranger.Root) },
		"two roots added":        func() { plugged(t, dir, &second, made.Root, stranger.Root, newCA(t, c).Root) },
		"the own root among new": func() { plugged(t, dir, stranger, stranger.Root, made.Root) },
	} {
		write()
		set, err := files.Read(dir, files.CACerts)
		if err != nil {
			t.Fatal(err)
		}
		if err := k.TakeFiles(t.Context(), set); err == nil || !strings.Contains(err.Error(), "(1) add the new root") {
			t.Errorf("%s: %v", name, err)
		}
	}
	k.mindIssuer(t.Context(), time.Now())
	if k.issuer.Load().SKI() == first.SKI() || k.Document().Version != 4 {
		t.Error("a refused change changed something")
	}

	// The first of the steps is recognised, and left to who rotates.
	if err := k.TakeFiles(t.Context(), read(made.Root, stranger.Root)); err != nil {
		t.Fatal(err)
	}
	k.mindIssuer(t.Context(), time.Now())
	set, step, err := k.Swap(time.Now())
	if err != nil || step.Kind != swap.Add || !step.Root.Equal(stranger.Root) || len(set.Roots) != 2 || k.Document().Version != 4 {
		t.Errorf("a root was added: %+v, %v; version %d", step, err, k.Document().Version)
	}
	issue(t, k)
}

func TestRootThatIssuesItself(t *testing.T) {
	c := setup(t, t.TempDir())
	dir := t.TempDir()
	c.Plugged = &Plugged{Dir: dir, Layout: files.CACerts}
	made := newCA(t, c)
	self := &ca.Created{Root: made.Root, Issuer: made.Root, RootKey: made.RootKey, IssuerKey: made.RootKey}
	plugged(t, dir, self, made.Root)
	if err := os.WriteFile(filepath.Join(dir, "cert-chain.pem"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	i, err := open(t, c).Issuer()
	if err != nil {
		t.Fatal(err)
	}
	if len(i.Chain()) != 0 {
		t.Errorf("the chain of a root that issues has %d certificates besides the root", len(i.Chain()))
	}
}

// No root may be taken out yet, so one that ends beside the one in use must not keep a server from starting.
func TestRootThatEndedBesideTheOneInUse(t *testing.T) {
	c := setup(t, t.TempDir())
	dir := t.TempDir()
	c.Plugged = &Plugged{Dir: dir, Layout: files.CACerts}
	made := newCA(t, c)
	other := newCA(t, c)
	template := *other.Root
	template.NotBefore, template.NotAfter, template.AuthorityKeyId = time.Now().Add(-time.Hour), time.Now().Add(-time.Minute), nil
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, other.RootKey.Public(), other.RootKey)
	if err != nil {
		t.Fatal(err)
	}
	ended, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	plugged(t, dir, made, made.Root, ended)
	if _, err := Init(t.Context(), c, "test"); err == nil || !strings.Contains(err.Error(), "ended at") || !strings.Contains(err.Error(), dir) {
		t.Errorf("adopting a root that has ended gave %v", err)
	}
	doc := document.New() // as it was made while the root lived
	for _, add := range []struct {
		kind document.AuthorityKind
		cert *x509.Certificate
	}{{KindRoot, made.Root}, {KindRoot, ended}, {KindIssuer, made.Issuer}} {
		if err := doc.Add(c.Domain, add.kind, Key{}, c.Sealer, add.cert); err != nil {
			t.Fatal(err)
		}
	}
	data, err := doc.Encode(c.Sealer)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Store.Create(t.Context(), 1, data); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t, c).Issuer(); err != nil {
		t.Error(err)
	}
}
