package parents

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/below"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// lame is a store that takes no change while it is told so.
type lame struct {
	store.Store
	down bool
}

func (l *lame) Replace(ctx context.Context, old, next uint64, data []byte) error {
	if l.down {
		return errors.New("the store is away")
	}
	return l.Store.Replace(ctx, old, next, data)
}

// TestIssuersBelowAreNotedBeforeTheyAreGiven: each is in the document by then, where it outlives this process and is seen by all replicas;
// without the store, or under a root that is not in use any more, none is given.
func TestIssuersBelowAreNotedBeforeTheyAreGiven(t *testing.T) {
	dir, td := t.TempDir(), must(trust.ParseDomain("cluster.local"))
	st := &lame{Store: must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))}
	t.Cleanup(func() { st.Close() })
	c := authority.Config{
		Domain: td, Store: st, Sealer: must(keys.CreateSealer(filepath.Join(dir, "key"))), Logger: slog.New(slog.DiscardHandler), Log: must(audit.Open(filepath.Join(dir, "audit.jsonl"))), KeyType: ca.P256,
		Profiles: []*ca.Profile{must(ca.NewProfile("workload", ca.ProfileConfig{}))}, RootTTL: 10000 * time.Hour, IssuerTTL: 100 * time.Hour,
	}
	t.Cleanup(func() { c.Log.Close() })
	must(authority.Init(t.Context(), c, "test"))
	a := must(authority.Open(t.Context(), c))
	s := signer{td, a}
	who := audit.Requester{SPIFFEID: "spiffe://cluster.local/ns/chancery/sa/east"}
	pub := must(ca.GenerateKey(ca.P256)).Public()
	stored := func() []below.Issuers {
		data, version, err := st.Load(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return must(document.Decode(data, version, c.Sealer)).Domains[td.String()].Below
	}
	chain, err := s.sign(t.Context(), pub, ca.IssuerTerms{TTL: 100 * time.Hour}, who)
	if err != nil {
		t.Fatal(err)
	}
	root := must(a.Document().Active(td, document.KindRoot)).ID
	if got := stored(); len(got) != 1 || got[0].To != who.SPIFFEID || got[0].Root != root || got[0].Until.Before(chain[0].NotAfter) {
		t.Fatalf("the document has %v", got)
	}
	version := a.Document().Version
	for range 5 {
		if _, err := s.sign(t.Context(), pub, ca.IssuerTerms{TTL: 100 * time.Hour}, who); err != nil {
			t.Fatal(err)
		}
	}
	if now := a.Document().Version; now != version {
		t.Errorf("who asks again writes %d versions", now-version)
	}
	migrates := func(m *document.Rotation) {
		t.Helper()
		if err := a.Change(t.Context(), func(next *document.Document) error { next.State(td).Rotation = m; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	migrates(&document.Rotation{ID: "m", Kind: document.KindRoot, FromRoot: root, Phase: document.PhasePrepare, Migration: &document.Migration{From: "cluster.local", To: "new.example"}})
	if _, err := s.sign(t.Context(), pub, ca.IssuerTerms{TTL: 100 * time.Hour}, who); !errors.Is(err, ca.ErrNotReady) || !strings.Contains(err.Error(), "migrates to new.example") {
		t.Errorf("while the trust domain migrates: %v", err)
	}
	migrates(nil)
	st.down = true
	if _, err := s.sign(t.Context(), pub, ca.IssuerTerms{TTL: 1000 * time.Hour}, who); !errors.Is(err, ca.ErrNotReady) {
		t.Errorf("without the store: %v", err)
	}
	st.down = false
	if err := a.Change(t.Context(), func(next *document.Document) error {
		next.State(td).Taint(document.KindRoot, root, time.Now())
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.sign(t.Context(), pub, ca.IssuerTerms{TTL: 2000 * time.Hour}, who); !errors.Is(err, ca.ErrNotReady) {
		t.Errorf("under a tainted root: %v", err)
	}
}
