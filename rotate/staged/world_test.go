package staged

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
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

var td = must(trust.ParseDomain("cluster.local"))

const leafTTL = time.Hour

// counted is a key store that knows which keys it has.
type counted struct {
	keys.Store
	mu     sync.Mutex
	refs   map[string]bool
	broken error
}

func (c *counted) Generate(ctx context.Context, kt ca.KeyType) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken != nil {
		return "", c.broken
	}
	ref, err := c.Store.Generate(ctx, kt)
	if err == nil {
		c.refs[ref] = true
	}
	return ref, err
}

func (c *counted) Delete(ctx context.Context, ref string) error {
	err := c.Store.Delete(ctx, ref)
	if err == nil {
		c.mu.Lock()
		delete(c.refs, ref)
		c.mu.Unlock()
	}
	return err
}

// failing is a store whose n-th change fails from now on: it is not made, or made, and nobody hears of it.
type failing struct {
	store.Store
	left int // changes until then; below 0: none fails
	made bool
	dead bool // after it, nothing answers
}

var errGone = errors.New("the store is gone")

func (f *failing) Load(ctx context.Context) ([]byte, uint64, error) {
	if f.dead {
		return nil, 0, errGone
	}
	return f.Store.Load(ctx)
}

func (f *failing) Replace(ctx context.Context, old, next uint64, data []byte) error {
	if f.dead {
		return errGone
	}
	if f.left == 0 {
		f.dead = true
		if f.made {
			if err := f.Store.Replace(ctx, old, next, data); err != nil {
				return err
			}
		}
		return errGone
	}
	f.left--
	return f.Store.Replace(ctx, old, next, data)
}

// world is servers on one store, with what they told each other.
type world struct {
	t      *testing.T
	store  store.Store
	config authority.Config // of each, but for name, log and mark
	keys   *counted
	notes  map[string]board.Note
	behind []board.Behind // of whoever acknowledges
	all    map[string]*server
	age    time.Duration // RootMaxAge
	leaf   time.Duration // LeafTTL of servers that start
}

// server is one of them.
type server struct {
	name  string
	k     *authority.Keeper
	m     *Manager
	log   *bytes.Buffer
	audit string
	numb  bool // it does not take over what the document has
	reg   *prometheus.Registry
}

// newWorld makes the authority and some servers; change may change the config before.
func newWorld(t *testing.T, names string, change func(*authority.Config)) *world {
	t.Helper()
	dir := t.TempDir()
	st := must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))
	t.Cleanup(func() { st.Close() })
	w := &world{t: t, leaf: leafTTL, store: st, notes: map[string]board.Note{}, all: map[string]*server{}, keys: &counted{Store: keys.NewMemory(), refs: map[string]bool{}}}
	w.config = authority.Config{
		Domain: td, Store: st, Sealer: must(keys.CreateSealer(filepath.Join(dir, "key"))), Keys: w.keys, KeyType: ca.P256,
		Profiles: []*ca.Profile{must(ca.NewProfile("workload", ca.ProfileConfig{KeyTypes: []string{"p256"}, MaxTTL: leafTTL.String()}))},
		RootTTL:  1000 * time.Hour, IssuerTTL: 100 * time.Hour,
	}
	if change != nil {
		change(&w.config)
	}
	for i, name := range strings.Fields(names) {
		if i == 0 {
			c, _ := w.configOf(name, &bytes.Buffer{})
			must(authority.Init(t.Context(), c, "test"))
			c.Log.Close()
		}
		w.start(name, st)
	}
	return w
}

// configOf is the config of one server, with a log of its own.
func (w *world) configOf(name string, log *bytes.Buffer) (_ authority.Config, auditLog string) {
	w.t.Helper()
	dir := filepath.Join(w.t.TempDir(), name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		w.t.Fatal(err)
	}
	c := w.config
	auditLog = filepath.Join(dir, "audit.jsonl")
	c.Replica, c.Log = name, must(audit.Open(auditLog))
	w.t.Cleanup(func() { c.Log.Close() })
	c.Logger = slog.New(slog.NewTextHandler(log, nil))
	return c, auditLog
}

// start starts a server on a store, in place of the one of its name.
func (w *world) start(name string, st store.Store) *server {
	w.t.Helper()
	s := &server{name: name, log: &bytes.Buffer{}, reg: prometheus.NewRegistry()}
	var c authority.Config
	c, s.audit = w.configOf(name, s.log)
	c.Store = st
	k, err := authority.Open(w.t.Context(), c)
	if err != nil {
		w.t.Fatalf("starting %s: %v", name, err)
	}
	s.k = k
	s.m = New(Config{
		Domain: td, Authority: k, Notes: func() []board.Note { return slices.Collect(maps.Values(w.notes)) }, Changed: func() <-chan struct{} { return nil },
		LeafTTL: w.leaf, RootMaxAge: w.age, Log: c.Log, Logger: c.Logger, Metrics: s.reg,
	})
	w.all[name] = s
	return s
}

// drives makes a server the one that drives.
func (w *world) drives(name string) *server {
	w.t.Helper()
	s := w.all[name]
	for other := range w.all {
		if other != name {
			if err := w.store.GiveUp(w.t.Context(), other); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	if !s.k.TakeLease(w.t.Context()) {
		w.t.Fatalf("%s does not drive:\n%s", name, s.log)
	}
	return s
}

// acknowledge has servers do what package revocation does once all is published, and what their agents say.
func (w *world) acknowledge(names ...string) {
	w.t.Helper()
	for _, name := range names {
		s := w.all[name]
		s.k.Follow(w.t.Context())
		if s.numb || s.k.HoldsPrepared(w.t.Context()) != nil {
			continue
		}
		doc := s.k.Document()
		n := board.Note{Replica: name, Seen: time.Now(), LogID: s.k.LogID(), Acknowledged: doc.Version, Format: document.Format}
		n.Evidence = board.Evidence{Goal: doc.Domains[td.String()].Goal(), Behind: w.behind}
		w.notes[name] = n
	}
}

func (w *world) names() []string { return slices.Sorted(maps.Keys(w.all)) }

// state is what the newest document says.
func (w *world) state() *document.DomainState {
	w.t.Helper()
	data, version, err := w.store.Load(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return must(document.Decode(data, version, w.config.Sealer)).Domains[td.String()]
}

// phase is that of the rotation under way; empty without one.
func (w *world) phase() document.Phase {
	if r := w.state().Rotation; r != nil {
		return r.Phase
	}
	return ""
}

// until has a driver go on, and all acknowledge, until a phase has begun; empty: until the end.
func (w *world) until(driver string, want document.Phase) {
	w.t.Helper()
	for range 200 {
		if w.phase() == want {
			return
		}
		w.drives(driver).m.look(w.t.Context(), time.Now())
		if w.phase() == want {
			return
		}
		w.acknowledge(w.names()...)
		time.Sleep(time.Minute)
	}
	w.t.Fatalf("phase %q was not reached; %q with %+v\n%s", want, w.phase(), w.all[driver].m.Status().Gates, w.all[driver].log)
}

// issues has a server issue a leaf, which everybody with its bundle accepts, and returns its issuer's ID.
func (w *world) issues(s *server) string {
	w.t.Helper()
	issuer, err := s.k.Issuer()
	if err != nil {
		w.t.Fatalf("%s: %v", s.name, err)
	}
	key := must(ca.GenerateKey(ca.P256))
	token, err := issuer.Prepare(w.config.Profiles[0], ca.Request{ID: must(trust.ParseID("spiffe://cluster.local/ns/a/sa/b")), PublicKey: key.Public()})
	if err != nil {
		w.t.Fatal(err)
	}
	made, err := issuer.Issue(w.t.Context(), token)
	if err != nil {
		w.t.Fatal(err)
	}
	leaf := must(x509.ParseCertificate(made.DER))
	bundle := must(s.k.Document().Bundle(td))
	if _, _, err := trust.Verify(append([]*x509.Certificate{leaf}, issuer.Chain()...), trust.Only(bundle), time.Now()); err != nil {
		w.t.Errorf("%s issues what its bundle does not verify: %v", s.name, err)
	}
	return issuer.SKI()
}

// audited fails the test unless a server's audit log has a line with all words.
func (s *server) audited(t *testing.T, words ...string) {
	t.Helper()
	data, err := os.ReadFile(s.audit)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return
		}
	}
	t.Errorf("the audit log of %s has no line with %q", s.name, words)
}

// keysFit fails the test unless the key store has the keys that the document names, and no others.
func (w *world) keysFit() {
	w.t.Helper()
	want := map[string]bool{}
	for _, a := range w.state().Authorities {
		if a.KeyRef != "" {
			want[a.KeyRef] = true
		}
	}
	if !maps.Equal(want, w.keys.refs) {
		w.t.Errorf("the key store has %d keys, and the document names %d", len(w.keys.refs), len(want))
	}
}

func newLog(t *testing.T) (*audit.Log, error) {
	l, err := audit.Open(filepath.Join(t.TempDir(), "audit.jsonl"))
	if err == nil {
		t.Cleanup(func() { l.Close() })
	}
	return l, err
}
