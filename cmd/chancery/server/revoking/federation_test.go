package revoking

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// TestD24AgentsAreToldOfForeignDomains: of their roots, signed by the bundle key, as soon as the document has them or has lost them; and what
// cannot be read stays as it was. That none of them is one of the own sees the document to.
func TestD24AgentsAreToldOfForeignDomains(t *testing.T) {
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	a := start(t, dir, st, must(keys.CreateSealer(filepath.Join(dir, "k"))), "a", 20_000_000)
	stream := a.connect(t)
	key := a.keeper.Document().State(td).BundleKey.Public
	root := must(a.source.Bundle()).Roots()[0] // any certificate of a CA
	set := func(all map[string]uint64) {
		t.Helper()
		next := map[string]*foreign.Domain{}
		for name, sequence := range all {
			b := &spiffebundle.Bundle{Domain: must(trust.ParseDomain(name)), Sequence: sequence, HasSequence: true}
			if sequence > 1 {
				b.Roots = append(b.Roots, root)
			}
			next[name] = &foreign.Domain{Bundle: must(b.Marshal()), Since: time.Now().UTC().Truncate(time.Second), Actor: "test"}
		}
		if err := a.keeper.Change(t.Context(), func(d *authority.Document) error { d.Foreign = next; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	var last uint64
	update := func(want string) {
		t.Helper()
		for {
			u := must(stream.Recv())
			m, f := u.GetFederation(), new(chanceryv1.Federation)
			if m == nil {
				t.Fatal("an update says nothing of foreign domains")
			}
			if err := (trust.SignedFederation{Federation: m.GetFederation(), Signature: m.GetSignature(), Key: m.GetKey()}).Verify(key); err != nil {
				t.Fatal(err)
			}
			if err := proto.Unmarshal(m.GetFederation(), f); err != nil {
				t.Fatal(err)
			}
			if u.GetBundle() == nil || f.GetTrustDomain() != td.String() || f.GetVersion() < last || f.GetVersion() > a.keeper.Document().Version {
				t.Fatalf("after version %d it is %v", last, u)
			}
			last = f.GetVersion()
			var out []string
			for _, b := range f.GetBundles() {
				out = append(out, fmt.Sprintf("%s/%d/%d", b.GetTrustDomain(), b.GetSequence(), len(b.GetRoots())))
			}
			if strings.Join(out, " ") == want {
				return
			}
		}
	}
	update("")
	set(map[string]uint64{"b.test": 7, "a.test": 1})
	update("a.test/1/0 b.test/7/1")
	set(map[string]uint64{"b.test": 8})
	update("b.test/8/1")
	before := last
	if err := a.keeper.Change(t.Context(), func(d *authority.Document) error {
		d.Foreign["c.test"] = &foreign.Domain{Bundle: []byte("{}")}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	a.told.mu.Lock()
	m := a.federation()
	trouble := a.told.federation.trouble
	a.told.mu.Unlock()
	if m == nil || trouble == "" {
		t.Errorf("of a bundle that cannot be read it says %q", trouble)
	}
	set(nil)
	update("")
	if last <= before {
		t.Errorf("version %d takes back what version %d said", last, before)
	}
}

// TestD1WithASecondDomain: agents that cannot read it are behind as long as the bundle has one.
func TestD1WithASecondDomain(t *testing.T) {
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	a := start(t, dir, st, must(keys.CreateSealer(filepath.Join(dir, "k"))), "a", 20_000_000)
	kin := a.consumers().Kin
	if kin() {
		t.Error("there is one from the start")
	}
	if err := a.keeper.Change(t.Context(), func(d *authority.Document) error { d.State(td).Former = []string{"former.test"}; return nil }); err != nil {
		t.Fatal(err)
	}
	if !kin() {
		t.Error("a former domain is none")
	}
}
