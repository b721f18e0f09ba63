package revocation

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// shop is the real store that replicas share. It counts versions of the document, and can be out of reach.
type shop struct {
	*store.SQLite
	down   atomic.Bool
	writes atomic.Int64
}

var errDown = errors.New("the store is out of reach")

func (s *shop) Load(ctx context.Context) ([]byte, uint64, error) {
	if s.down.Load() {
		return nil, 0, errDown
	}
	return s.SQLite.Load(ctx)
}

func (s *shop) Replace(ctx context.Context, old, next uint64, data []byte) error {
	if s.down.Load() {
		return errDown
	}
	err := s.SQLite.Replace(ctx, old, next, data)
	if err == nil {
		s.writes.Add(1)
	}
	return err
}

func (s *shop) PutNote(ctx context.Context, replica string, data []byte) error {
	if s.down.Load() {
		return errDown
	}
	return s.SQLite.PutNote(ctx, replica, data)
}

func (s *shop) Notes(ctx context.Context) (map[string][]byte, error) {
	if s.down.Load() {
		return nil, errDown
	}
	return s.SQLite.Notes(ctx)
}

func (s *shop) Hold(ctx context.Context, holder string, life time.Duration) (bool, string, error) {
	if s.down.Load() {
		return false, "", errDown
	}
	return s.SQLite.Hold(ctx, holder, life)
}

// fleet is replicas on one store.
type fleet struct {
	t        *testing.T
	dir      string
	shop     *shop
	sealer   *keys.Sealer
	profile  *ca.Profile
	replicas map[string]*replica
	gather   time.Duration
	config   func(name string, c *authority.Config) // changes it; may be nil
	ids      map[string]uint32                      // of logs, where they are not made from the name

	mu      sync.Mutex
	bodies  map[string][]byte // what the CRL of an issuer and number says
	highest map[string]uint64 // number that a replica has published, over restarts too, by replica and issuer
}

// replica is one server's real parts.
type replica struct {
	*fleet
	name     string
	log      *audit.Log
	issuance *issuelog.Log
	keeper   *authority.Keeper
	board    *board.Board
	manager  *Manager
	last     atomic.Pointer[Lists]
	running  bool
	stop     context.CancelFunc
	wg       sync.WaitGroup
}

func newFleet(t *testing.T, names ...string) *fleet {
	t.Helper()
	f := &fleet{
		t: t, dir: t.TempDir(), profile: must(ca.NewProfile("workload", ca.ProfileConfig{})), replicas: map[string]*replica{}, gather: gather,
		bodies: map[string][]byte{}, highest: map[string]uint64{},
	}
	f.shop = &shop{SQLite: must(store.CreateSQLite(t.Context(), filepath.Join(f.dir, "state.db")))}
	f.sealer = must(keys.CreateSealer(filepath.Join(f.dir, "state.key")))
	t.Cleanup(func() {
		for _, r := range f.replicas {
			r.end()
		}
		f.shop.Close()
	})
	for _, name := range names {
		f.open(name)
	}
	return f
}

// open makes a replica ready, as the start of a server does, and does not run it.
func (f *fleet) open(name string) *replica {
	f.t.Helper()
	r := &replica{fleet: f, name: name}
	logger := slog.New(slog.NewTextHandler(f.t.Output(), nil)).With("replica", name)
	r.log = must(audit.Open(filepath.Join(f.dir, name+".jsonl")))
	dir := filepath.Join(f.dir, name+".log")
	id := uint32(20_000_000)
	for _, c := range name {
		id = id*31%50_000_000 + 20_000_000 + uint32(c)
	}
	if other := f.ids[name]; other != 0 {
		id = other
	}
	if !issuelog.Exists(dir) {
		must(issuelog.Create(dir, fmt.Sprintf("cluster.local/chancery/log/%d", id)))
	}
	r.issuance = must(issuelog.Open(issuelog.Config{Dir: dir, Logger: logger}))
	r.log.Mirror(r.issuance.Write)
	c := authority.Config{
		Domain: td, Store: f.shop, Sealer: f.sealer, Log: r.log, Logger: logger, Profiles: []*ca.Profile{f.profile}, Replica: name,
		IssuanceLog: authority.LogState{ID: id, Key: r.issuance.PublicKey()},
	}
	if f.config != nil {
		f.config(name, &c)
	}
	if _, _, err := f.shop.Load(f.t.Context()); err != nil {
		must(authority.Init(f.t.Context(), c, "test"))
	}
	r.keeper = must(authority.Open(f.t.Context(), c))
	r.board = board.Open(board.Config{Store: f.shop, Sealer: f.sealer, Domain: td, Replica: name, Format: 2, Logger: logger})
	r.manager = New(Config{Domain: td, Authority: r.keeper, Issuance: r.issuance, Board: r.board, Logger: logger, Publish: r.publish})
	r.manager.gather = f.gather
	r.keeper.Announce(func(ctx context.Context) error { // as a server does
		if err := r.manager.Refresh(ctx); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return r.manager.Acknowledged(ctx, r.keeper.Document().Version)
	})
	f.replicas[name] = r
	return r
}

// publish holds what a replica publishes to what must always be true.
func (r *replica) publish(l *Lists) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last.Store(l)
	for _, der := range l.CRLs {
		crl := must(x509.ParseRevocationList(der))
		key := fmt.Sprintf("%x %v", crl.AuthorityKeyId, crl.Number)
		if have := r.bodies[key]; have != nil && !bytes.Equal(have, crl.RawTBSRevocationList) {
			r.t.Errorf("%s: CRL %s says something else than elsewhere", r.name, key)
		}
		r.bodies[key] = crl.RawTBSRevocationList
		of := fmt.Sprintf("%s %x", r.name, crl.AuthorityKeyId)
		if n := crl.Number.Uint64(); n < r.highest[of] {
			r.t.Errorf("%s: CRL %s follows number %d", r.name, key, r.highest[of])
		} else {
			r.highest[of] = n
		}
	}
}

// run starts what a server runs.
func (r *replica) run() {
	ctx, cancel := context.WithCancel(context.Background())
	r.stop, r.running = cancel, true
	for _, f := range []func(context.Context) error{r.keeper.Run, r.board.Run, r.manager.Run, func(ctx context.Context) error {
		return r.shop.Watch(ctx, func() { r.keeper.Wake(); r.board.Wake() })
	}} {
		r.wg.Go(func() {
			if err := f(ctx); err != nil {
				r.t.Errorf("%s: %v", r.name, err)
			}
		})
	}
}

// end ends a replica; its files and its note stay.
func (r *replica) end() {
	if r.running {
		r.stop()
		r.wg.Wait()
		r.running = false
	}
	if r.log != nil {
		r.log.Close()
		r.issuance.Close()
		r.log = nil
	}
	delete(r.replicas, r.name)
}

func (f *fleet) run() {
	for _, r := range f.replicas {
		r.run()
	}
}

// issue gives a certificate to a workload on a node.
func (r *replica) issue(id, node string) *x509.Certificate {
	r.t.Helper()
	i := must(r.keeper.Issuer())
	token := must(i.Prepare(r.profile, ca.Request{
		ID: must(trust.ParseID(id)), PublicKey: newKey().Public(), Requester: audit.Requester{Method: "token", Cluster: "east", Node: node},
	}))
	cert := must(x509.ParseCertificate(must(i.Issue(r.t.Context(), token)).DER))
	if err := r.issuance.Sequence(); err != nil {
		r.t.Fatal(err)
	}
	return cert
}

func (r *replica) revoke(p authority.Predicate) (*Result, error) {
	return r.manager.Revoke(r.t.Context(), authority.Revocation{Predicate: p, Time: time.Now(), Actor: "unix:test", Reason: 1}, false)
}

// listed returns the serials on the CRLs that a replica published last, and their number.
func (r *replica) listed() (serials []string, number uint64) {
	l := r.last.Load()
	if l == nil {
		return nil, 0
	}
	all := map[string]bool{}
	for _, der := range l.CRLs {
		crl := must(x509.ParseRevocationList(der))
		number = crl.Number.Uint64()
		for _, e := range crl.RevokedCertificateEntries {
			all[fmt.Sprintf("%x", e.SerialNumber.Bytes())] = true
		}
	}
	return slices.Sorted(maps.Keys(all)), number
}

func serials(certs ...*x509.Certificate) []string {
	var out []string
	for _, c := range certs {
		out = append(out, serial(c))
	}
	slices.Sort(out)
	return out
}

// wait waits for a condition.
func wait(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: that has not come about", what)
		}
	}
}

// settled waits until all replicas have these on CRLs of one number.
func (f *fleet) settled(what string, revoked ...*x509.Certificate) {
	f.t.Helper()
	want := serials(revoked...)
	wait(f.t, what, func() bool {
		numbers := map[uint64]bool{}
		for _, r := range f.replicas {
			have, number := r.listed()
			numbers[number] = true
			if number == 0 || !slices.Equal(have, want) {
				return false
			}
		}
		return len(numbers) == 1
	})
	for _, r := range f.replicas {
		for _, c := range revoked {
			if in, sure := r.manager.Set().Serial(c.SerialNumber); !in || !sure {
				f.t.Errorf("%s: %s does not know that %s is revoked (sure %v)", what, r.name, serial(c), sure)
			}
		}
	}
}

// TestD13RevokedOnAllReplicas: what one replica issued and another is asked to revoke is on the CRLs of all, which say the same under the
// same number; that takes few versions of the document.
func TestD13RevokedOnAllReplicas(t *testing.T) {
	f := newFleet(t, "a", "b", "c")
	a, b, c := f.replicas["a"], f.replicas["b"], f.replicas["c"]
	a1, b1, b2, c1 := a.issue(web, "n1"), b.issue(web, "n1"), b.issue(db, "n2"), c.issue(db, "n1")
	f.run()
	f.settled("start")
	version := f.shop.writes.Load()
	r, err := a.revoke(authority.Predicate{SPIFFEID: web})
	if err != nil || r.Delayed != nil || r.Count != 2 || len(r.Certificates) != 2 {
		t.Fatalf("got %+v, %v", r, err)
	}
	if missing := a.manager.State().MissingLogs; len(missing) > 0 {
		t.Errorf("missing: %v", missing)
	}
	f.settled("by identity", a1, b1)
	for _, x := range f.replicas {
		if !x.manager.Set().Identity(web) {
			t.Errorf("%s: the identity gets certificates", x.name)
		}
	}
	if n := f.shop.writes.Load() - version; n > 4 {
		t.Errorf("one revocation made %d versions of the document", n)
	}
	if r, err := c.revoke(authority.Predicate{Serial: serial(b2)}); err != nil || r.Count != 1 || r.Delayed != nil {
		t.Errorf("a serial of another replica: %+v, %v", r, err)
	}
	f.settled("by serial", a1, b1, b2)
	if _, err := b.revoke(authority.Predicate{Cluster: "east", Node: "n1"}); err != nil {
		t.Fatal(err)
	}
	f.settled("by node", a1, b1, b2, c1)
	if n := f.shop.writes.Load() - version; n > 12 {
		t.Errorf("three revocations made %d versions of the document", n)
	}
	time.Sleep(1500 * time.Millisecond)
	quiet := f.shop.writes.Load()
	time.Sleep(1500 * time.Millisecond)
	if n := f.shop.writes.Load(); n != quiet {
		t.Errorf("with nothing to do there are %d more versions", n-quiet)
	}
}

// TestD13ReplicaThatIsDown: what it had found stays on the CRLs, also for who starts anew; what it has not looked for is named; once it is
// back, all is on all.
func TestD13ReplicaThatIsDown(t *testing.T) {
	f := newFleet(t, "a", "b", "c")
	a, c := f.replicas["a"], f.replicas["c"]
	a1, c1, c2, c3 := a.issue(web, "n1"), c.issue(web, "n1"), c.issue(db, "n1"), c.issue("spiffe://cluster.local/ns/foo/sa/x", "n1")
	f.run()
	f.settled("start")
	must(a.revoke(authority.Predicate{SPIFFEID: web}))
	f.settled("all are up", a1, c1)
	c.end() // kill -9 would leave the same
	a.end()
	a = f.open("a")
	a.run()
	f.settled("another start", a1, c1)
	began := time.Now()
	r, err := a.revoke(authority.Predicate{SPIFFEID: db})
	if err != nil || r.Delayed != nil || r.Count != 0 {
		t.Errorf("got %+v, %v", r, err)
	}
	t.Logf("with a replica that is down it took %s", time.Since(began))
	for _, x := range f.replicas {
		wait(t, "named by "+x.name, func() bool {
			missing := x.manager.State().MissingLogs
			return len(missing) == 1 && strings.Contains(missing[0], "of replica c, ") && strings.Contains(missing[0], "was not searched for the newest revocations")
		})
	}
	f.settled("one is down", a1, c1)
	for _, x := range f.replicas { // nobody knows its serial, and it renews nothing all the same
		if revoked, sure := x.manager.Set().Certificate(c2); !revoked || !sure {
			t.Errorf("%s: a certificate from the log of who is down: revoked %v, sure %v", x.name, revoked, sure)
		}
		if revoked, sure := x.manager.Set().Certificate(c3); revoked || !sure {
			t.Errorf("%s: a good certificate from the log of who is down: revoked %v, sure %v", x.name, revoked, sure)
		}
	}
	f.open("c").run()
	f.settled("it is back", a1, c1, c2)
	for _, x := range f.replicas {
		wait(t, "nothing is missing at "+x.name, func() bool { return len(x.manager.State().MissingLogs) == 0 })
	}
	if err := a.keeper.Change(t.Context(), func(d *authority.Document) error { _, err := d.Forget("c", time.Now()); return err }); err != nil {
		t.Fatal(err)
	}
	f.replicas["c"].end()
	must(a.revoke(authority.Predicate{Serial: "abcd"}))
	f.settled("forgotten, with certificates that live", a1, c1, c2, &x509.Certificate{SerialNumber: big.NewInt(0xabcd)})
}

// TestD13StoreThatIsDown: nothing is revoked and nothing taken back; when it is here again, all goes on.
func TestD13StoreThatIsDown(t *testing.T) {
	f := newFleet(t, "a", "b")
	a, b := f.replicas["a"], f.replicas["b"]
	a1, b1 := a.issue(web, "n1"), b.issue(db, "n1")
	f.run()
	f.settled("start")
	must(b.revoke(authority.Predicate{SPIFFEID: web}))
	f.settled("before", a1)
	f.shop.down.Store(true)
	if _, err := a.revoke(authority.Predicate{SPIFFEID: db}); !errors.Is(err, errDown) && (err == nil || !strings.Contains(err.Error(), errDown.Error())) {
		t.Errorf("revoked without a store: %v", err)
	}
	late := b.issue(web, "n1") // as if it had been under way
	wait(t, "b knows more than it can tell", func() bool { in, _ := b.manager.Set().Serial(late.SerialNumber); return in })
	wait(t, "b says so", func() bool { return b.manager.State().Err != nil })
	for _, r := range f.replicas {
		if have, n := r.listed(); n == 0 || !slices.Equal(have, serials(a1)) {
			t.Errorf("%s has %v on CRL %d", r.name, have, n)
		}
	}
	f.shop.down.Store(false)
	f.settled("after", a1, late)
	must(a.revoke(authority.Predicate{SPIFFEID: db}))
	f.settled("and on", a1, late, b1)
}

// TestD4AnIssuerWaitsForAllReplicas: all that live have its CRL out and can open its key before it signs.
func TestD4AnIssuerWaitsForAllReplicas(t *testing.T) {
	f := newFleet(t, "a", "b", "c")
	a := f.replicas["a"]
	f.run()
	f.settled("start")
	f.replicas["c"].end()
	prepare := func() uint64 {
		t.Helper()
		doc := a.keeper.Document()
		root := must(doc.Active(td, authority.KindRoot))
		signer := must(ca.NewIssuer(ca.IssuerConfig{
			Domain: td, Key: must(root.OpenKey(t.Context(), td, f.sealer, nil)), Chain: []*x509.Certificate{must(root.X509())}, Bundle: must(doc.Bundle(td)),
			LogID: a.keeper.LogID(), Log: a.log,
		}))
		cert, key, err := signer.NewIssuer(t.Context(), ca.DefaultIssuerTTL, audit.Requester{})
		if err != nil {
			t.Fatal(err)
		}
		if err := a.keeper.Change(t.Context(), func(d *authority.Document) error { return d.Prepare(td, authority.Key{Signer: key}, f.sealer, cert) }); err != nil {
			t.Fatal(err)
		}
		return a.keeper.Document().Version
	}
	version := prepare()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	err := a.manager.Acknowledged(ctx, version)
	cancel()
	if err == nil || !strings.Contains(err.Error(), "replica c, which has version") || strings.Contains(err.Error(), "replica b") || strings.Contains(err.Error(), "this replica") ||
		!strings.Contains(err.Error(), "replica forget") {
		t.Errorf("with c down: %v", err)
	}
	if n := len(f.replicas["b"].last.Load().CRLs); n != 2 {
		t.Errorf("b has published %d CRLs", n)
	}
	f.open("c").run()
	if err := a.manager.Acknowledged(t.Context(), version); err != nil {
		t.Errorf("all are up: %v", err)
	}
	if n := len(f.replicas["c"].last.Load().CRLs); n != 2 {
		t.Errorf("c acknowledged with %d CRLs", n)
	}
	f.replicas["c"].end()
	if err := a.keeper.Change(t.Context(), func(d *authority.Document) error { _, err := d.Forget("c", time.Now()); return err }); err != nil {
		t.Fatal(err)
	}
	version = prepare()
	if err := a.manager.Acknowledged(t.Context(), version); err != nil {
		t.Errorf("c is declared dead: %v", err)
	}
}

// agent keeps the last CRLs that it took, as an agent does that asks any replica.
type agent struct{ last *trust.CRLs }

// visit asks a replica. It reports whether it has older CRLs than the agent.
func (a *agent) visit(r *replica) (behind bool) {
	l := r.last.Load()
	if l == nil {
		return false
	}
	var issuers []*x509.Certificate
	for _, der := range l.Issuers {
		issuers = append(issuers, must(x509.ParseCertificate(der)))
	}
	next, err := trust.NewCRLs(l.Bundle, l.CRLs, issuers, time.Now())
	if err != nil {
		r.t.Fatalf("%s: agents would say: %v", r.name, err)
	}
	if err := next.Follows(a.last); err != nil {
		return true
	}
	a.last = next
	return false
}

// TestD13AnyOrderEndsAlike: whatever comes in whatever order, with restarts in between, a number means one thing, numbers do not go
// back, and in the end all replicas have all on CRLs of one number. An agent that asks any of them is told nothing older in the end.
func TestD13AnyOrderEndsAlike(t *testing.T) {
	rounds := 4
	if testing.Short() {
		rounds = 1
	}
	for range rounds {
		seed := rand.Uint64()
		t.Run(fmt.Sprint(seed), func(t *testing.T) { anyOrder(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

// awaited: who has just started and lacks the note of another waits for it.
func awaited(err error) bool { return strings.Contains(err.Error(), "has left no note") }

// order is one run of TestD13AnyOrderEndsAlike.
type order struct {
	*fleet
	random  *rand.Rand
	names   []string
	issued  map[string][]*x509.Certificate // by identity
	revoked map[string]bool
	roaming agent
}

func (o *order) pick() *replica { return o.replicas[o.names[o.random.IntN(len(o.names))]] }

// step does one thing at one replica.
func (o *order) step() error {
	r, ctx := o.pick(), o.t.Context()
	ids := []string{web, db, "spiffe://cluster.local/ns/foo/sa/x", "spiffe://cluster.local/ns/foo/sa/y"}
	id := ids[o.random.IntN(len(ids))]
	switch o.random.IntN(9) {
	case 0, 1:
		o.issued[id] = append(o.issued[id], r.issue(id, "n1"))
	case 2:
		if o.revoked[id] {
			return nil
		}
		o.revoked[id] = true
		_, err := r.revoke(authority.Predicate{SPIFFEID: id})
		return err
	case 3:
		r.keeper.Follow(ctx)
	case 4:
		return r.board.Read(ctx)
	case 5:
		return r.board.Write(ctx)
	case 6:
		if o.random.IntN(3) == 0 {
			r.end()
			o.open(r.name)
		}
	case 7:
		o.roaming.visit(r)
	default:
		if err := r.manager.Refresh(ctx); err != nil && !awaited(err) {
			return err
		}
	}
	return nil
}

// all has each replica do what it does all the time.
func (o *order) all(rounds int) {
	o.t.Helper()
	for range rounds {
		for _, n := range o.names {
			r := o.replicas[n]
			r.keeper.Follow(o.t.Context())
			r.manager.due = time.Time{}
			if err := errors.Join(r.board.Write(o.t.Context()), r.board.Read(o.t.Context()), r.manager.Refresh(o.t.Context())); err != nil && !awaited(err) {
				o.t.Fatal(err)
			}
		}
	}
}

func anyOrder(t *testing.T, random *rand.Rand) {
	o := &order{fleet: newFleet(t), random: random, names: []string{"a", "b", "c"}, issued: map[string][]*x509.Certificate{}, revoked: map[string]bool{}}
	o.gather = 0 // the worst case: nobody waits for others
	for _, n := range o.names {
		o.open(n)
	}
	for range 60 {
		if err := o.step(); err != nil {
			t.Fatal(err)
		}
	}
	o.all(4)
	var want []*x509.Certificate
	for id := range o.revoked {
		want = append(want, o.issued[id]...)
	}
	versions := o.shop.writes.Load()
	o.settled("in the end", want...)
	for range 10 {
		if r := o.pick(); o.roaming.visit(r) {
			t.Errorf("%s has older CRLs in the end", r.name)
		}
	}
	o.all(2) // and then they rest
	if n := o.shop.writes.Load(); n != versions {
		t.Errorf("with nothing to do there are %d more versions of the document", n-versions)
	}
	certs := 0
	for _, all := range o.issued {
		certs += len(all)
	}
	if limit := int64(10 + 4*len(o.revoked) + certs); versions > limit { // a certificate that is found late takes a number
		t.Errorf("%d revocations of %d certificates made %d versions of the document", len(o.revoked), certs, versions)
	}
}
