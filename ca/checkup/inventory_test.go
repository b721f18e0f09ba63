package checkup

import (
	"crypto/x509"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// setup is a real authority in a folder.
func setup(t *testing.T) (authority.Config, *authority.Document) {
	t.Helper()
	dir := t.TempDir()
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	st, err := store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	sealer, err := keys.CreateSealer(filepath.Join(dir, "state.key"))
	if err != nil {
		t.Fatal(err)
	}
	log, err := audit.Open(filepath.Join(dir, "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	c := authority.Config{Domain: td, Store: st, Sealer: sealer, Log: log, Logger: slog.New(slog.DiscardHandler)}
	doc, err := authority.Init(t.Context(), c, "test")
	if err != nil {
		t.Fatal(err)
	}
	return c, doc
}

// parts returns the chain and roots of a document.
func parts(t *testing.T, c authority.Config, doc *authority.Document) (chain, roots []*x509.Certificate) {
	t.Helper()
	bundle, err := doc.Bundle(c.Domain)
	if err != nil {
		t.Fatal(err)
	}
	if a, err := doc.Active(c.Domain, authority.KindIssuer); err == nil {
		if chain, err = a.Certificates(); err != nil {
			t.Fatal(err)
		}
	}
	return chain, bundle.Roots()
}

// briefly writes an inventory as "kind state use".
func briefly(inv *Inventory) []string {
	var out []string
	for _, c := range inv.Certs {
		use := ""
		if c.InUse {
			use = " in use"
		}
		out = append(out, c.Kind+" "+c.State+use)
	}
	return out
}

func take(t *testing.T, c authority.Config, doc *authority.Document, plugged bool) *Inventory {
	t.Helper()
	chain, roots := parts(t, c, doc)
	inv, err := Take(doc, c.Domain, chain, roots, plugged, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

func TestTake(t *testing.T) {
	c, doc := setup(t)
	inv := take(t, c, doc, false)
	if got, want := briefly(inv), []string{"root active in use", "issuer active in use"}; !slices.Equal(got, want) {
		t.Errorf("own root and issuer: %v, want %v", got, want)
	}
	for _, x := range inv.Certs {
		if store := inv.Stores[x.Name()]; store != StoreState {
			t.Errorf("the key of %s is %q, want %q", x.Name(), store, StoreState)
		}
	}
	if d := inv.Document; inv.RenewedBy != RenewedByServer || d.Version != 1 || d.Generation != 1 || len(d.Logs) != 1 || d.Logs[0].ID != doc.Logs[0].ID || d.Created == nil {
		t.Errorf("%+v", inv)
	}
	if got := take(t, c, doc, true).RenewedBy; got != RenewedByFiles {
		t.Errorf("a plugged-in issuer is renewed by %s", got)
	}

	// The next issuer, with a key in a store. The former one retires; and there is a root that does not sign.
	made, err := ca.Create(t.Context(), ca.CreateConfig{Domain: c.Domain, LogID: doc.Logs[0].ID, Log: c.Log})
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Add(c.Domain, authority.KindRoot, authority.Key{}, c.Sealer, made.Root); err != nil {
		t.Fatal(err)
	}
	next, err := ca.Create(t.Context(), ca.CreateConfig{Domain: c.Domain, LogID: doc.Logs[0].ID, Log: c.Log})
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.ReplaceIssuer(c.Domain, authority.Key{Ref: "file:ab"}, c.Sealer, made.Issuer, next.Issuer); err != nil {
		t.Fatal(err)
	}
	inv = take(t, c, doc, false)
	got := briefly(inv)
	slices.Sort(got)
	// next.Issuer stands where an intermediate would, so neither root is its parent.
	if want := []string{"intermediate active in use", "issuer active in use", "issuer retiring", "root active", "root active"}; !slices.Equal(got, want) {
		t.Errorf("after a change of the issuer: %v, want %v", got, want)
	}
	for _, x := range inv.Certs {
		if x.Kind == KindIssuer && x.InUse && inv.Stores[x.Name()] != "encrypted file" {
			t.Errorf("its key lies %q", inv.Stores[x.Name()])
		}
	}
	if inv.RenewedBy != RenewedByImport || inv.Document.Generation != 2 {
		t.Errorf("with a root whose key lies elsewhere: renewed by %s, generation %d", inv.RenewedBy, inv.Document.Generation)
	}
}

func TestTakeWithoutAnIssuer(t *testing.T) {
	c, doc := setup(t)
	made, err := ca.Create(t.Context(), ca.CreateConfig{Domain: c.Domain, LogID: doc.Logs[0].ID, Log: c.Log})
	if err != nil {
		t.Fatal(err)
	}
	doc = document.New()
	if err := doc.Add(c.Domain, authority.KindRoot, authority.Key{}, c.Sealer, made.Root); err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	doc.Domains[c.Domain.String()].Requested = &document.RequestedIssuer{Created: at}
	inv := take(t, c, doc, false)
	if got, want := briefly(inv), []string{"root active"}; !slices.Equal(got, want) || inv.RenewedBy != RenewedByImport || !inv.Document.Requested.Equal(at) {
		t.Errorf("a root without an issuer: %v, %+v", got, inv)
	}
	s := &State{Time: time.Now(), TrustDomain: "cluster.local", Document: &inv.Document, Certs: inv.Certs, RenewedBy: inv.RenewedBy}
	if got := judged(t, s); !slices.Equal(got, []string{"critical issuer.missing"}) {
		t.Errorf("it is judged as %v", got)
	}
}

func TestTakeOfARootThatIssues(t *testing.T) {
	c, doc := setup(t)
	_, roots := parts(t, c, doc)
	inv, err := Take(doc, c.Domain, roots, roots, true, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := briefly(inv), []string{"root active in use", "issuer active"}; !slices.Equal(got, want) {
		t.Errorf("a root that issues itself: %v, want %v", got, want)
	}
}

func TestStoreOf(t *testing.T) {
	for want, a := range map[string]authority.Authority{
		StoreElsewhere: {}, StoreState: {Key: []byte{1}}, "encrypted file": {KeyRef: "file:ab"}, "token": {KeyRef: "pkcs11:id=ab"}, "cloud KMS": {KeyRef: "awskms:x"}, "Kubernetes Secret": {KeyRef: "secret:ab"}, "key store other": {KeyRef: "other:x"},
	} {
		if got := StoreOf(&a); got != want {
			t.Errorf("%+v lies %q, want %q", a, got, want)
		}
	}
}
