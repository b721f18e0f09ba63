package bundles

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

// world is an authority in a real store, for several replicas.
type world struct {
	t      *testing.T
	sealer *keys.Sealer
	store  *cut
	logs   bytes.Buffer
}

// cut is a store that does not answer while it is cut off.
type cut struct {
	store.Store
	off atomic.Bool
}

var errCut = errors.New("the network is down")

func (c *cut) Load(ctx context.Context) ([]byte, uint64, error) {
	if c.off.Load() {
		return nil, 0, errCut
	}
	return c.Store.Load(ctx)
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, sealer: must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))}
	st := must(store.CreateSQLite(t.Context(), filepath.Join(t.TempDir(), "state.db")))
	t.Cleanup(func() { st.Close() })
	w.store = &cut{Store: st}
	must(authority.Init(t.Context(), w.config("a", st), "test"))
	return w
}

func (w *world) config(name string, st store.Store) authority.Config {
	w.t.Helper()
	log := must(audit.Open(filepath.Join(w.t.TempDir(), "audit.jsonl")))
	w.t.Cleanup(func() { log.Close() })
	return authority.Config{
		Domain: td, Store: st, Sealer: w.sealer, Log: log, Logger: slog.New(slog.DiscardHandler), Replica: name,
		Profiles: []*ca.Profile{must(ca.NewProfile("workload", ca.ProfileConfig{})), ca.ServerProfile()},
	}
}

// server is a replica, and where its audit log lies.
type server struct {
	*authority.Keeper
	source *Source
	log    string
}

func (w *world) server(name string, st store.Store) *server {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), "audit.jsonl")
	c := w.config(name, st)
	c.Log = must(audit.Open(path))
	w.t.Cleanup(func() { c.Log.Close() })
	k := must(authority.Open(w.t.Context(), c))
	return &server{k, New(Config{Domain: td, Authority: k, Sealer: w.sealer, Log: c.Log, Logger: slog.New(slog.NewTextHandler(&w.logs, nil))}), path}
}

// taint taints the root.
func taint(next *authority.Document) error {
	root, err := next.Active(td, authority.KindRoot)
	if err == nil {
		now := time.Now().UTC()
		root.Tainted = &now
	}
	return err
}

// TestD6BundleKeyOfAnInit: there is one from the start, and it stays.
func TestD6BundleKeyOfAnInit(t *testing.T) {
	w := newWorld(t)
	s := w.server("a", w.store)
	first := must(s.source.Signer())
	b := must(s.source.Bundle())
	if err := first.Sign(b.DER()).Verify(first.Public()); err != nil || len(b.Roots()) != 1 || b.Generation() != 1 {
		t.Errorf("%v, %d roots", err, len(b.Roots()))
	}
	if err := s.Change(t.Context(), func(next *authority.Document) error { next.State(td).CRLNumber++; return nil }); err != nil {
		t.Fatal(err)
	}
	if must(s.source.Signer()) != first || must(s.source.Bundle()) != b {
		t.Error("what did not change is another one after a change of the document")
	}
	if err := s.Change(t.Context(), func(next *authority.Document) error { next.State(td).Generation++; return nil }); err != nil {
		t.Fatal(err)
	}
	if must(s.source.Bundle()).Generation() != 2 {
		t.Error("another generation is not seen")
	}
	s.source.Mind(t.Context())
	if data := must(os.ReadFile(s.log)); bytes.Contains(data, []byte("bundle key")) {
		t.Errorf("one was made: %s", data)
	}
}

// TestD6BundleKeyOfAnOlderAuthority is made by whoever drives, once, and is in audit log and log.
func TestD6BundleKeyOfAnOlderAuthority(t *testing.T) {
	w := newWorld(t)
	a, b := w.server("a", w.store), w.server("b", w.store)
	if err := a.Change(t.Context(), func(next *authority.Document) error { next.State(td).BundleKey = nil; return nil }); err != nil {
		t.Fatal(err)
	}
	b.Follow(t.Context())
	for _, s := range []*server{a, b} {
		s.source.Mind(t.Context()) // nobody drives
		if _, err := s.source.Signer(); !errors.Is(err, ErrNoKey) {
			t.Fatalf("got %v", err)
		}
		if _, err := s.source.Bundle(); err != nil {
			t.Error(err)
		}
	}
	if n := strings.Count(w.logs.String(), "bundles are not signed yet"); n != 2 {
		t.Errorf("it is said %d times", n)
	}
	if !a.TakeLease(t.Context()) {
		t.Fatal("nobody drives")
	}
	b.source.Mind(t.Context())
	if a.Follow(t.Context()); a.Document().State(td).BundleKey != nil {
		t.Fatal("it was made by who does not drive")
	}
	a.source.Mind(t.Context())
	a.source.Mind(t.Context())
	b.Follow(t.Context())
	b.source.Mind(t.Context())
	made, other := must(a.source.Signer()), must(b.source.Signer())
	if !made.Public().Equal(other.Public()) {
		t.Error("two servers sign by two keys")
	}
	if n := bytes.Count(must(os.ReadFile(a.log)), []byte("making the bundle key")); n != 1 {
		t.Errorf("%d lines in the audit log", n)
	}
	if !strings.Contains(w.logs.String(), "bundle key made") || !strings.Contains(w.logs.String(), trust.KeyFingerprint(made.Public())) {
		t.Errorf("the log does not say it: %s", &w.logs)
	}
}

// TestD6BundleKeyIsNotMadeUnaudited: without the audit log nothing is changed, and it is not tried all the time.
func TestD6BundleKeyIsNotMadeUnaudited(t *testing.T) {
	w := newWorld(t)
	a := w.server("a", w.store)
	if err := a.Change(t.Context(), func(next *authority.Document) error { next.State(td).BundleKey = nil; return nil }); err != nil {
		t.Fatal(err)
	}
	if !a.TakeLease(t.Context()) {
		t.Fatal("nobody drives")
	}
	if err := a.source.config.Log.Close(); err != nil {
		t.Fatal(err)
	}
	a.source.Mind(t.Context())
	if a.Document().State(td).BundleKey != nil {
		t.Error("it was made")
	}
	if !strings.Contains(w.logs.String(), "audit") {
		t.Errorf("the log does not say why: %s", &w.logs)
	}
}

// TestD6BundleKeyThatDoesNotOpen is no reason to make another, which agents would refuse; it is said what that means.
func TestD6BundleKeyThatDoesNotOpen(t *testing.T) {
	w := newWorld(t)
	a := w.server("a", w.store)
	if err := a.Change(t.Context(), func(next *authority.Document) error { next.State(td).BundleKey.Key[20] ^= 1; return nil }); err != nil {
		t.Fatal(err)
	}
	if !a.TakeLease(t.Context()) {
		t.Fatal("nobody drives")
	}
	version := a.Document().Version
	for range 3 {
		a.source.Mind(t.Context())
	}
	if _, err := a.source.Signer(); err == nil || !strings.Contains(err.Error(), "unsealing bundle key") {
		t.Errorf("got %v", err)
	}
	if a.Document().Version != version {
		t.Error("another one was made")
	}
	if n := strings.Count(w.logs.String(), "take no roots and no CRLs from this server"); n != 1 {
		t.Errorf("said %d times: %s", n, &w.logs)
	}
	if _, err := a.Issuer(); err != nil {
		t.Errorf("nothing is issued: %v", err)
	}
}

// TestD4TaintOfTwoKeepers on one store, of which one is cut off: once an agent has told it, it signs nothing, neither certificates nor
// CRLs nor bundles, until it has the document; whom it had, it serves.
func TestD4TaintOfTwoKeepers(t *testing.T) {
	w := newWorld(t)
	a, b := w.server("a", w.store.Store), w.server("b", w.store)
	signs := func(s *server) []error {
		_, issuer := s.Issuer()
		_, crls := s.CRLSigners(t.Context())
		_, bundle := s.source.Signer()
		_, below := s.SignIssuer(t.Context(), must(ca.GenerateKey(ca.P256)).Public(), ca.IssuerTerms{TTL: time.Hour}, audit.Requester{Method: "test"})
		return []error{issuer, crls, bundle, below}
	}
	if err := errors.Join(signs(b)...); err != nil {
		t.Fatal(err)
	}
	w.store.off.Store(true)
	if err := a.Change(t.Context(), taint); err != nil {
		t.Fatal(err)
	}
	if b.Follow(t.Context()); errors.Join(signs(b)...) != nil {
		t.Error("it cannot know yet, and signs nothing")
	}
	if err := b.CheckMark(a.Mark()); err != nil {
		t.Fatal(err)
	}
	for i, err := range signs(b) {
		if !errors.Is(err, replica.ErrTainted) {
			t.Errorf("%d: %v", i, err)
		}
	}
	if err := errors.Join(signs(a)...); err != nil { // who has the document knows what to do
		t.Errorf("who has the document: %v", err)
	}
	if _, err := b.source.Bundle(); err != nil {
		t.Errorf("the bundle, which was signed before: %v", err)
	}
	if b.Follow(t.Context()); !errors.Is(b.Err(), replica.ErrTainted) {
		t.Errorf("not ready for another reason: %v", b.Err())
	}
	w.store.off.Store(false)
	b.Follow(t.Context())
	if err := errors.Join(signs(b)...); err != nil || b.Err() != nil {
		t.Errorf("once it has the document: %v, %v", err, b.Err())
	}
}

// TestD16Tainted: an authority counts by its key, from the document that taints it on.
func TestD16Tainted(t *testing.T) {
	w := newWorld(t)
	a := w.server("a", w.store)
	root, issuer := must(a.source.Bundle()).Roots()[0], must(a.Issuer()).Certificate()
	check := func(cert *x509.Certificate, want bool) {
		t.Helper()
		if got := a.source.Tainted(cert); got != want {
			t.Errorf("%s: %v", cert.Subject, got)
		}
	}
	check(root, false)
	check(issuer, false)
	if err := a.Change(t.Context(), taint); err != nil {
		t.Fatal(err)
	}
	check(root, true)
	check(issuer, false)
	renamed := *issuer // its key, under the name of another certificate
	renamed.RawSubjectPublicKeyInfo = root.RawSubjectPublicKeyInfo
	check(&renamed, true)
}
