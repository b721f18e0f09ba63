package authority

import (
	"bytes"
	"context"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// beside returns the config of another replica on the same store, with a log of its own.
func beside(t *testing.T, c Config, name string) Config {
	t.Helper()
	log, err := audit.Open(filepath.Join(t.TempDir(), "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	c.Replica, c.Log, c.Mark = name, log, filepath.Join(t.TempDir(), "state.mark")
	return c
}

// recorded is a store that keeps each document that was stored, and counts what is asked of it.
type recorded struct {
	store.Store
	calls atomic.Int64
	down  atomic.Bool
	lose  atomic.Bool // of the next change nobody hears that it was made

	mu   sync.Mutex // guards data, and keeps it in the order of the store
	data [][]byte
}

var errDown = errors.New("the store is down")

func (r *recorded) Load(ctx context.Context) ([]byte, uint64, error) {
	r.calls.Add(1)
	if r.down.Load() {
		return nil, 0, errDown
	}
	return r.Store.Load(ctx)
}

func (r *recorded) Create(ctx context.Context, version uint64, data []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.Store.Create(ctx, version, data)
	if err == nil {
		r.data = append(r.data, bytes.Clone(data))
	}
	return err
}

func (r *recorded) Replace(ctx context.Context, old, next uint64, data []byte) error {
	r.calls.Add(1)
	if r.down.Load() {
		return errDown
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.Store.Replace(ctx, old, next, data)
	if err == nil {
		r.data = append(r.data, bytes.Clone(data))
		if r.lose.Swap(false) {
			err = errDown
		}
	}
	return err
}

func (r *recorded) Hold(ctx context.Context, holder string, life time.Duration) (bool, string, error) {
	r.calls.Add(1)
	if r.down.Load() {
		return false, "", errDown
	}
	return r.Store.Hold(ctx, holder, life)
}

// history decodes all that was stored, and fails the test unless it is one line.
func (r *recorded) history(t *testing.T, c Config) []*Document {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []*Document
	for i, data := range r.data {
		d, err := DecodeDocument(data, uint64(i+1), c.Sealer)
		if err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			if sum := sha256.Sum256(r.data[i-1]); d.Previous != hex.EncodeToString(sum[:]) {
				t.Errorf("version %d does not follow the one before", d.Version)
			}
		}
		all = append(all, d)
	}
	return all
}

func record(c Config) (Config, *recorded) {
	r := &recorded{Store: c.Store}
	c.Store = r
	return c, r
}

// TestEveryChangeIsTriedAgain that another replica came in between of: both are there.
func TestEveryChangeIsTriedAgain(t *testing.T) {
	root, rootCert := parentCA(t)
	who := "unix:test"
	id, err := trust.ParseID("spiffe://cluster.local/ns/a/sa/b")
	if err != nil {
		t.Fatal(err)
	}
	revoke := func(k *Keeper) error {
		_, err := k.Revoke(t.Context(), Revocation{Predicate: Predicate{SPIFFEID: id.String()}, Time: time.Now(), Actor: who})
		return err
	}
	offline := func(c *Config) { c.Roots, c.Parented = []*x509.Certificate{rootCert}, true }
	request := func(k *Keeper) []*x509.Certificate {
		der, err := k.Request(t.Context(), who, false)
		if err != nil {
			t.Fatal(err)
		}
		return []*x509.Certificate{answer(t, root, der, time.Hour)}
	}
	var chain []*x509.Certificate
	for name, tc := range map[string]struct {
		config func(*Config)
		before func(k *Keeper)
		do     func(k *Keeper) error
		done   func(d *Document) bool
	}{
		"revoke":  {do: revoke, done: func(d *Document) bool { return d.Revocations(id.Domain())[1].SPIFFEID == id.String() }},
		"restore": {before: func(k *Keeper) { _ = revoke(k) }, do: func(k *Keeper) error { return k.Restore(t.Context(), who, id, time.Now()) }, done: func(d *Document) bool { return d.Revocations(id.Domain())[0].Restored != nil }},
		"forget":  {do: func(k *Keeper) error { return k.Forget(t.Context(), who, "c") }, done: func(d *Document) bool { return len(d.Live()) == 2 }},
		"prepare": {do: func(k *Keeper) error { return k.prepare(t.Context()) }, done: func(d *Document) bool { return d.Prepared(id.Domain()) != nil }},
		"activate": {before: func(k *Keeper) { _ = k.prepare(t.Context()) }, do: func(k *Keeper) error {
			return k.activate(t.Context(), k.Drive, k.Document().Prepared(id.Domain()).ID)
		}, done: func(d *Document) bool {
			return len(d.State(id.Domain()).Authorities) == 3 && d.Prepared(id.Domain()) == nil
		}},
		"renew":             {do: func(k *Keeper) error { return k.renew(t.Context()) }, done: func(d *Document) bool { return len(d.State(id.Domain()).Authorities) == 3 }},
		"request":           {config: offline, do: func(k *Keeper) error { request(k); return nil }, done: func(d *Document) bool { return d.State(id.Domain()).Requested != nil }},
		"import":            {config: offline, before: func(k *Keeper) { chain = request(k) }, do: func(k *Keeper) error { return k.Import(t.Context(), who, chain) }, done: func(d *Document) bool { return d.State(id.Domain()).Requested == nil }},
		"request by driver": {config: offline, do: func(k *Keeper) error { _, err := k.RequestByDriver(t.Context(), who); return err }, done: func(d *Document) bool { return d.State(id.Domain()).Requested != nil }},
		"import by driver":  {config: offline, before: func(k *Keeper) { chain = request(k) }, do: func(k *Keeper) error { return k.ImportByDriver(t.Context(), who, chain) }, done: func(d *Document) bool { return d.State(id.Domain()).Requested == nil }},
	} {
		t.Run(name, func(t *testing.T) {
			c, r := record(quick(t, t.TempDir()))
			if tc.config != nil {
				tc.config(&c)
			}
			c.Replica = "a"
			if _, err := Init(t.Context(), c, who); err != nil {
				t.Fatal(err)
			}
			a, b := open(t, c), open(t, beside(t, c, "b"))
			open(t, beside(t, c, "c"))
			drive(t, a)
			if tc.before != nil {
				tc.before(a)
			}
			other := Revocation{Predicate: Predicate{Serial: "01"}, Time: time.Now(), Actor: who}
			if _, err := b.Revoke(t.Context(), other); err != nil {
				t.Fatal(err)
			}
			if stale := a.Document().Version; stale >= b.Document().Version {
				t.Fatal("there will be no conflict")
			}
			if err := tc.do(a); err != nil {
				t.Fatal(err)
			}
			d := a.Document()
			kept := false
			for _, r := range d.Revocations(id.Domain()) {
				kept = kept || r.Serial == other.Serial
			}
			if !kept || !tc.done(d) {
				t.Errorf("something is lost: the other's is there %v, ours %v", kept, tc.done(d))
			}
			b.Follow(t.Context())
			if b.Document().Version != d.Version || !strings.HasPrefix(d.By, "a ") {
				t.Errorf("versions %d and %d, by %q", d.Version, b.Document().Version, d.By)
			}
			r.history(t, c)
		})
	}
}

// TestActivatedTwice: an admin's import and the driver may both put an issuer to use that waits; once is enough.
func TestActivatedTwice(t *testing.T) {
	c := quick(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	a, b := driving(t, c), open(t, beside(t, c, "b"))
	if err := a.prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	id := a.Document().Prepared(c.Domain).ID
	for _, err := range []error{a.activate(t.Context(), a.Drive, id), b.activate(t.Context(), b.Change, id)} {
		if err != nil {
			t.Error(err)
		}
	}
	if err := b.activate(t.Context(), b.Change, "ab"); err == nil || !strings.Contains(err.Error(), "is not prepared any more") {
		t.Errorf("one that nobody knows: %v", err)
	}
	if b.issuer.Load().SKI() != id || b.Document().Version != a.Document().Version {
		t.Error("they differ")
	}
}

// TestRequestsAtTheSameTime: one wins, the other is told, and no request is replaced by somebody who did not see it.
func TestRequestsAtTheSameTime(t *testing.T) {
	root, rootCert := parentCA(t)
	c := quick(t, t.TempDir())
	c.Roots, c.Parented = []*x509.Certificate{rootCert}, true
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	a, b := open(t, c), open(t, beside(t, c, "b"))
	der, err := b.Request(t.Context(), "test", false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Request(t.Context(), "test", false); err == nil || !strings.Contains(err.Error(), "at the same time; ask again") {
		t.Errorf("got %v", err)
	}
	if again, err := a.Request(t.Context(), "test", false); err != nil || len(again) == 0 {
		t.Errorf("asked again: %v", err)
	}
	chain := []*x509.Certificate{answer(t, root, der, time.Hour)}
	if err := a.Import(t.Context(), "test", chain); err != nil {
		t.Fatal(err)
	}
	if err := b.Import(t.Context(), "test", chain); err == nil || !strings.Contains(err.Error(), "at the same time") {
		t.Errorf("imported twice: %v", err)
	}
	issue(t, b) // by the conflict it learned of the issuer
}

// TestFollowerSwapsIssuersWithoutAGap: while certificates are issued by both, the driver goes through several issuers; each is signed
// by one that its replica's document calls active, and none fails.
func TestFollowerSwapsIssuersWithoutAGap(t *testing.T) {
	c := quick(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	a, b := driving(t, c), open(t, beside(t, c, "b"))
	go c.Store.Watch(t.Context(), b.Wake)
	done := make(chan struct{})
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	running.Go(func() { b.Hold.Run(ctx) })
	issued := map[string]int{}
	running.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				i, err := b.Issuer()
				if err != nil {
					t.Errorf("a gap: %v", err)
					return
				}
				issued[i.SKI()]++
				issue(t, b)
			}
		}
	})
	for range 4 {
		if err := a.prepare(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := a.activate(t.Context(), a.Drive, a.Document().Prepared(c.Domain).ID); err != nil {
			t.Fatal(err)
		}
		for want := a.issuer.Load().SKI(); b.issuer.Load().SKI() != want; {
			time.Sleep(time.Millisecond)
		}
	}
	close(done)
	cancel()
	running.Wait()
	if len(issued) < 2 {
		t.Errorf("it issued by %v", issued)
	}
}

// TestActiveIssuerThatCannotBeOpened: the replica issues nothing, says why, and goes on once it can; others are not touched.
func TestActiveIssuerThatCannotBeOpened(t *testing.T) {
	c := quick(t, t.TempDir())
	shared := keys.NewMemory()
	c.Keys = shared
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	a := driving(t, c)
	other := beside(t, c, "b")
	locked := &lockable{Memory: shared}
	other.Keys = locked
	b := open(t, other)
	issue(t, b)
	locked.shut.Store(true)
	if err := a.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.Follow(t.Context())
	if _, err := b.Issuer(); err == nil || !strings.Contains(err.Error(), "the token is locked") || b.InUse() != nil {
		t.Errorf("it may sign with something: %v", err)
	}
	if b.Document().Version != a.Document().Version {
		t.Error("it does not take the document over")
	}
	issue(t, a)
	locked.shut.Store(false)
	b.Follow(t.Context())
	issue(t, b)
	if b.issuer.Load().SKI() != a.issuer.Load().SKI() {
		t.Error("another issuer is in use")
	}
}

// TestDriverThatLostItsKeysLeavesThemToOthers: the root's key is needed for the next issuer, and another server can open it.
func TestDriverThatLostItsKeysLeavesThemToOthers(t *testing.T) {
	c := quick(t, t.TempDir())
	shared := keys.NewMemory()
	locked := &lockable{Memory: shared}
	c.Keys = locked
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	a := driving(t, c)
	other := beside(t, c, "b")
	other.Keys = shared
	b := open(t, other)
	a.Follow(t.Context())
	if a.mindIssuer(t.Context(), time.Now()); !a.TakeLease(t.Context()) {
		t.Fatal("one that is well gives the lease up")
	}
	locked.shut.Store(true)
	later := a.InUse().Certificate().NotAfter.Add(-time.Second)
	a.mindIssuer(t.Context(), later)
	if a.Document().Prepared(c.Domain) != nil {
		t.Fatal("there is an issuer without the root's key")
	}
	if a.TakeLease(t.Context()) {
		t.Error("it keeps the lease")
	}
	drive(t, b)
	if b.mindIssuer(t.Context(), later); b.Document().Prepared(c.Domain) == nil {
		t.Error("the other one prepares nothing")
	}
}

// TestIssuersThatAreGoneAreNotHeld: with each goes a private key in memory.
func TestIssuersThatAreGoneAreNotHeld(t *testing.T) {
	c := quick(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	a := driving(t, c)
	for range 3 {
		if err := a.renew(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := a.held.Len(); n != 4 {
		t.Errorf("%d issuers are held, of 4 that have live leaves", n)
	}
	err := a.Change(t.Context(), func(next *Document) error {
		state := next.State(c.Domain)
		state.Authorities = slices.DeleteFunc(state.Authorities, func(x Authority) bool { return x.State == StateRetiring })
		return nil
	})
	if n := a.held.Len(); err != nil || n != 1 {
		t.Errorf("%d issuers are held, of 1 in the document; %v", n, err)
	}
	issue(t, a)
}

// lockable is a key store that can be shut.
type lockable struct {
	*keys.Memory
	shut atomic.Bool
}

var errLocked = errors.New("the token is locked")

func (l *lockable) Open(ctx context.Context, ref string) (crypto.Signer, error) {
	if l.shut.Load() {
		return nil, errLocked
	}
	return l.Memory.Open(ctx, ref)
}

// TestStoreDownAndBack: certificates are issued until the issuer ends, nothing is rotated, though it is due, and it is once the store
// is back.
func TestStoreDownAndBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, r := record(quick(t, t.TempDir()))
		c.Replica = "a"
		if _, err := Init(t.Context(), c, "test"); err != nil {
			t.Fatal(err)
		}
		a, b := open(t, c), open(t, beside(t, c, "b"))
		var running sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		for _, k := range []*Keeper{a, b} {
			running.Go(func() {
				if err := k.Run(ctx); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(time.Minute)
		r.down.Store(true)
		began, stored := time.Now(), len(r.history(t, c))
		first := a.issuer.Load()
		// Half of its week passes, and more: weeks of polls would take long, so the clock is what jumps.
		time.Sleep(20 * time.Minute)
		for _, k := range []*Keeper{a, b} {
			k.mindIssuer(t.Context(), time.Now().Add(4*24*time.Hour))
			issue(t, k)
			at, why := k.Fresh()
			if !errors.Is(why, errDown) || at.After(began) || k.Err() != nil || k.Drives() {
				t.Errorf("confirmed at %s, %v; %v; drives %v", at, why, k.Err(), k.Drives())
			}
			if _, err := k.Revoke(t.Context(), Revocation{Predicate: Predicate{Serial: "01"}, Time: time.Now(), Actor: "test"}); !errors.Is(err, errDown) {
				t.Errorf("a revocation that nobody stored: %v", err)
			}
			if k.issuer.Load().SKI() != first.SKI() {
				t.Error("another issuer is in use")
			}
		}
		if n := len(r.history(t, c)); n != stored {
			t.Errorf("%d documents were stored meanwhile", n-stored)
		}
		r.down.Store(false)
		time.Sleep(30 * time.Second)
		for _, k := range []*Keeper{a, b} {
			if _, why := k.Fresh(); why != nil {
				t.Error(why)
			}
			k.mindIssuer(t.Context(), time.Now().Add(4*24*time.Hour))
		}
		time.Sleep(30 * time.Second)
		if a.Document().Prepared(c.Domain) == nil || b.Document().Version != a.Document().Version {
			t.Error("nothing is prepared after the store is back")
		}
		cancel()
		running.Wait()
		r.history(t, c)
	})
}

// TestNoStoreCallOnTheIssuingPath: certificates are issued without the store being asked for anything.
func TestNoStoreCallOnTheIssuingPath(t *testing.T) {
	c, r := record(quick(t, t.TempDir()))
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	issue(t, k)
	before := r.calls.Load()
	for range 200 {
		issue(t, k)
		_, _ = k.Fresh()
		_, _, _ = k.Mark()
		if k.Err() != nil || k.Document() == nil || !k.Drives() {
			t.Fatal("not well")
		}
	}
	if n := r.calls.Load() - before; n != 0 || before == 0 {
		t.Errorf("%d calls of the store for 200 certificates; %d before", n, before)
	}
}

// TestD7PluggedInFilesOfSeveralReplicas change at other times: the driver prepares what its files have, nobody signs with it until
// each replica holds it, and who lacks the active one's key is not ready.
func TestD7PluggedInFilesOfSeveralReplicas(t *testing.T) {
	c := quick(t, t.TempDir())
	made := newCA(t, c)
	var next ca.Created
	var ks []*Keeper
	var cs []Config
	for i, name := range []string{"a", "b"} {
		own := c
		if i > 0 {
			own = beside(t, c, name)
		}
		own.Replica, own.Plugged = name, &Plugged{Dir: t.TempDir(), Layout: files.CACerts}
		plugged(t, own.Plugged.Dir, made, made.Root)
		if i == 0 {
			if _, err := Init(t.Context(), own, "test"); err != nil {
				t.Fatal(err)
			}
		}
		ks, cs = append(ks, open(t, own)), append(cs, own)
	}
	a, b := ks[0], ks[1]
	issue(t, b)
	drive(t, a)
	a.Announce(func(ctx context.Context) error { b.Follow(ctx); return b.HoldsPrepared(ctx) })
	root, err := ca.NewIssuer(ca.IssuerConfig{Domain: c.Domain, Key: made.RootKey, Chain: []*x509.Certificate{made.Root}, Bundle: a.issuer.Load().Bundle(), LogID: ca.MinLogID, Log: c.Log})
	if err != nil {
		t.Fatal(err)
	}
	next = *made
	if next.Issuer, next.IssuerKey, err = root.NewIssuer(t.Context(), 24*time.Hour, audit.Requester{}); err != nil {
		t.Fatal(err)
	}
	change := func(k *Keeper, made *ca.Created) {
		t.Helper()
		p := k.config.Plugged
		plugged(t, p.Dir, made, made.Root)
		set, err := files.Read(p.Dir, p.Layout)
		if err != nil {
			t.Fatal(err)
		}
		if err := k.TakeFiles(t.Context(), set); err != nil {
			t.Fatal(err)
		}
	}
	first, second := hex.EncodeToString(made.Issuer.SubjectKeyId), hex.EncodeToString(next.Issuer.SubjectKeyId)
	expect := func(when, active string, prepared bool) {
		t.Helper()
		for _, k := range ks {
			k.Follow(t.Context())
			if i, err := k.Issuer(); err != nil || i.SKI() != active || (k.Document().Prepared(c.Domain) != nil) != prepared {
				t.Errorf("%s, %s: %v, %v", when, k.Replica(), err, k.Document().Prepared(c.Domain))
			} else {
				issue(t, k)
			}
		}
	}

	// The other's files change first: nothing happens but that it holds them ready.
	version := a.Document().Version
	change(b, &next)
	b.Mind(t.Context())
	expect("changed at who does not drive", first, false)
	if a.Document().Version != version {
		t.Error("who does not drive changed the document")
	}
	change(b, made)
	// The driver's files change first: it is prepared, and waits for the other.
	b.held.LetGo(func(id string) bool { return id != second })
	change(a, &next)
	a.Mind(t.Context())
	expect("prepared", first, true)
	if err := b.HoldsPrepared(t.Context()); err == nil || !strings.Contains(err.Error(), "lack its key") {
		t.Errorf("it holds what its files do not have: %v", err)
	}
	if all, err := b.CRLSigners(t.Context()); err != nil || len(all) != 2 || all[1].Issuer != nil || !all[1].Retry {
		t.Errorf("for a CRL it can be tried again: %+v, %v", all, err)
	}
	change(b, &next)
	a.Mind(t.Context())
	expect("when both hold it", second, false)

	// One that starts with the former files is not ready, and does not make the other go back.
	plugged(t, cs[1].Plugged.Dir, made, made.Root)
	old := open(t, cs[1])
	if _, err := old.Issuer(); err == nil || !strings.Contains(err.Error(), "names issuer "+second) || !strings.Contains(err.Error(), "they have issuer "+first) {
		t.Errorf("with the former files: %v", err)
	}
	time.Sleep(time.Millisecond)
	if err := c.Store.GiveUp(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	drive(t, old)
	version = old.Document().Version
	old.Mind(t.Context())
	if old.Document().Version != version {
		t.Error("former files brought the former issuer back")
	}
	plugged(t, cs[1].Plugged.Dir, &next, made.Root)
	set, err := files.Read(cs[1].Plugged.Dir, files.CACerts)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.TakeFiles(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	issue(t, old)
}

// TestD4ImportWaitsForReplicas: an issuer that an admin or a parent brings is not used while another replica may lack it. It waits,
// prepared, and is used in time; at the end of the one in use, whatever comes. A server that is the only one does not wait.
func TestD4ImportWaitsForReplicas(t *testing.T) {
	for _, alone := range []bool{false, true} {
		t.Run(fmt.Sprint("alone ", alone), func(t *testing.T) {
			root, rootCert := parentCA(t)
			c := quick(t, t.TempDir())
			c.Roots, c.Parented = []*x509.Certificate{rootCert}, true
			if _, err := Init(t.Context(), c, "test"); err != nil {
				t.Fatal(err)
			}
			a := driving(t, c)
			if !alone {
				open(t, beside(t, c, "b"))
				a.Follow(t.Context())
			}
			ask := func() []*x509.Certificate {
				der, err := a.Request(t.Context(), "test", false)
				if err != nil {
					t.Fatal(err)
				}
				return []*x509.Certificate{answer(t, root, der, 30*24*time.Hour)}
			}
			if err := a.Import(t.Context(), "test", ask()); err != nil { // the first one: nobody waits for it
				t.Fatal(err)
			}
			first := a.issuer.Load().SKI()
			lacks := errors.New("replica b lacks it")
			var why error = lacks
			a.Announce(func(context.Context) error { return why })
			err := a.Import(t.Context(), "test", ask())
			if alone {
				if err != nil || a.issuer.Load().SKI() == first {
					t.Errorf("alone, it waits: %v", err)
				}
				return
			}
			if !errors.Is(err, lacks) || !strings.Contains(err.Error(), "is prepared; it signs once") || a.issuer.Load().SKI() != first {
				t.Errorf("it is used, or nobody is told that it waits: %v", err)
			}
			if err := a.ImportByDriver(t.Context(), "test", ask()); err != nil || a.issuer.Load().SKI() != first {
				t.Errorf("a parent's: %v", err)
			}
			next := a.Document().Prepared(c.Domain).ID
			now := time.Now()
			a.mindIssuer(t.Context(), now.Add(25*time.Hour))
			if a.issuer.Load().SKI() != first {
				t.Error("it is used, though a replica lacks it")
			}
			why = nil
			a.mindIssuer(t.Context(), now.Add(25*time.Hour))
			if a.issuer.Load().SKI() != next {
				t.Error("it is not used, though all have it")
			}
			if err := a.ImportByDriver(t.Context(), "test", ask()); err != nil {
				t.Fatal(err)
			}
			why, last := lacks, a.Document()
			if p := last.Prepared(c.Domain); p != nil { // why was nil: it was used at once
				t.Errorf("prepared %s", p.ID)
			}
			if err := a.ImportByDriver(t.Context(), "test", ask()); err != nil {
				t.Fatal(err)
			}
			next = a.Document().Prepared(c.Domain).ID
			a.mindIssuer(t.Context(), a.issuer.Load().NotAfter().Add(-time.Hour))
			if a.issuer.Load().SKI() != next {
				t.Error("the one in use is about to end, and the next one waits")
			}
		})
	}
}

// TestForget names who asked, and forgets who is gone, not itself.
func TestForget(t *testing.T) {
	dir := t.TempDir()
	c := quick(t, dir)
	c.Replica = "a"
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	a := driving(t, c)
	lost := beside(t, c, "b")
	open(t, lost)
	if err := c.Store.PutNote(t.Context(), "b", []byte("note")); err != nil {
		t.Fatal(err)
	}
	if err := a.Forget(t.Context(), "unix:root", "a"); err == nil || !strings.Contains(err.Error(), "is this server") {
		t.Errorf("itself: %v", err)
	}
	if err := a.Forget(t.Context(), "unix:root", "c"); err == nil || !strings.Contains(err.Error(), "there are a, b") {
		t.Errorf("nobody: %v", err)
	}
	for range 2 { // twice is once
		if err := a.Forget(t.Context(), "unix:root", "b"); err != nil {
			t.Fatal(err)
		}
	}
	version := a.Document().Version
	a.DropDead(t.Context(), time.Now().Add(89*24*time.Hour))
	if a.Document().Version != version || len(a.Document().Logs) != 2 {
		t.Error("it was dropped while certificates of it may live")
	}
	a.DropDead(t.Context(), time.Now().Add(91*24*time.Hour))
	notes, err := c.Store.Notes(t.Context())
	if err != nil || len(notes) != 0 || len(a.Document().Logs) != 1 {
		t.Errorf("notes %v, replicas %+v, %v", notes, a.Document().Logs, err)
	}
	if log, err := os.ReadFile(filepath.Join(dir, "audit.jsonl")); err != nil || !strings.Contains(string(log), `replica forget \"b\"`) || !strings.Contains(string(log), "unix:root") {
		t.Errorf("the audit log does not tell of it: %v", err)
	}
	// Where no server runs it may be the one that is to start.
	if err := os.Remove(c.Mark); c.Mark != "" && err != nil {
		t.Fatal(err)
	}
	lone := beside(t, c, "b")
	open(t, lone)
	if err := os.Remove(lone.Mark); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), lone); err == nil {
		t.Error("a lost mark is not missed")
	}
	if err := replica.Forget(t.Context(), lone.Store, lone.Sealer, lone.Log, "unix:root", "b"); err != nil {
		t.Fatal(err)
	}
	issue(t, open(t, lone))
}

// TestD9MarkOfInit: what a crash leaves of `authority init` is completed by the next one, and a new authority in the place of an old
// one is not held to the old one's mark.
func TestD9MarkOfInit(t *testing.T) {
	dir := t.TempDir()
	c := quick(t, dir)
	c.Mark = filepath.Join(dir, "state.mark")
	if err := replica.WriteMark(c.Mark, c.Domain, c.Sealer, replica.Mark{Version: 77, Hash: "ab"}); err != nil {
		t.Fatal(err)
	}
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	if m, err := replica.ReadMark(c.Mark, c.Domain, c.Sealer); err != nil || m.Version != 0 {
		t.Errorf("%+v, %v", m, err)
	}
	open(t, c)
	if m, err := replica.ReadMark(c.Mark, c.Domain, c.Sealer); err != nil || m.Version != 1 {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := Init(t.Context(), c, "test"); !errors.Is(err, store.ErrConflict) {
		t.Error(err)
	}
	if m, err := replica.ReadMark(c.Mark, c.Domain, c.Sealer); err != nil || m.Version != 1 {
		t.Errorf("an init that made nothing changed the mark: %+v, %v", m, err)
	}
}

// TestFormat1 is a document as the version before wrote it: it is read, issued with, and becomes the one server's that opens it
// first, with what was in it; the next ones register.
func TestFormat1(t *testing.T) {
	c := quick(t, t.TempDir())
	data, err := os.ReadFile("testdata/format1.json")
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile("testdata/format1.key")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state.key")
	if err := os.WriteFile(path, key, 0o600); err != nil {
		t.Fatal(err)
	}
	if c.Sealer, err = keys.LoadSealer(path); err != nil {
		t.Fatal(err)
	}
	if err := c.Store.Create(t.Context(), 5, data); err != nil {
		t.Fatal(err)
	}
	was, err := DecodeDocument(data, 5, c.Sealer)
	if err != nil || was.Format != 1 {
		t.Fatal(was, err)
	}
	ks := make([]*Keeper, 3)
	var wg sync.WaitGroup
	for i := range ks {
		own := beside(t, c, fmt.Sprintf("r%d", i))
		wg.Go(func() { ks[i] = open(t, own) })
	}
	wg.Wait()
	kept := 0
	for _, k := range ks {
		k.Follow(t.Context())
		issue(t, k)
		if k.LogID() == was.Logs[0].ID {
			kept++
		}
	}
	doc := ks[0].Document()
	state := doc.State(c.Domain)
	if doc.Format != 3 || doc.Format != doc.Needs() || doc.Version != 8 || len(doc.Live()) != 3 || kept != 1 {
		t.Errorf("format %d, version %d, %d of them have the log ID that was; %+v", doc.Format, doc.Version, kept, doc.Logs)
	}
	before := was.State(c.Domain)
	if len(state.Authorities) != len(before.Authorities) || state.CRLNumber != before.CRLNumber || len(state.Revocations) != 1 || state.Generation != before.Generation || doc.Prepared(c.Domain) == nil {
		t.Errorf("something of the document is lost: %+v", state)
	}
	drive(t, ks[1])
	if err := ks[1].activate(t.Context(), ks[1].Drive, doc.Prepared(c.Domain).ID); err != nil {
		t.Fatal(err)
	}
	for _, k := range ks {
		k.Follow(t.Context())
		issue(t, k)
	}
}

// TestAnyInterleaving: replicas that are started, killed, paused, follow late, and drive in turn, in an order that is drawn, leave one
// line of versions, and every certificate is of an issuer that its replica's document called active: none signs by an issuer before
// the document has it active, nor after the replica has seen that it is not.
func TestAnyInterleaving(t *testing.T) {
	rounds := 12
	if testing.Short() {
		rounds = 4
	}
	for round := range rounds {
		seed := rand.Uint64()
		t.Run(fmt.Sprint(round, " ", seed), func(t *testing.T) { interleave(t, rand.New(rand.NewPCG(seed, 0))) })
	}
}

func interleave(t *testing.T, rng *rand.Rand) {
	synctest.Test(t, func(t *testing.T) {
		c, r := record(quick(t, t.TempDir()))
		if _, err := Init(t.Context(), c, "test"); err != nil {
			t.Fatal(err)
		}
		names := []string{"a", "b", "c"}
		configs, ks := map[string]Config{}, map[string]*Keeper{}
		for _, name := range names {
			configs[name] = beside(t, c, name)
			ks[name] = open(t, configs[name])
		}
		type signature struct {
			version uint64 // of the signer's document
			ski     string
		}
		var signed []signature
		clock := time.Now()
		step := func(k *Keeper) {
			switch rng.IntN(10) {
			case 9: // the answer to the next change is lost
				r.lose.Store(true)
			case 0, 1:
				k.Follow(t.Context())
			case 2, 3:
				k.TakeLease(t.Context())
			case 4: // paused for a while, with the document and the lease that it has
				time.Sleep(time.Duration(rng.IntN(20)) * time.Second)
			case 5: // killed, and started again
				name := k.Replica()
				ks[name] = open(t, configs[name])
			case 6: // half of an issuer's life is over, or all of it nearly
				clock = time.Now().Add(time.Duration(rng.IntN(7*24)) * time.Hour)
				k.mindIssuer(t.Context(), clock)
			case 7:
				if next := k.Document().Prepared(c.Domain); next != nil {
					err := k.activate(t.Context(), k.Drive, next.ID)
					if err != nil && !errors.Is(err, replica.ErrNotDriver) && !strings.Contains(err.Error(), "is not prepared any more") {
						t.Error(err)
					}
				}
			case 8:
				if err := k.prepare(t.Context()); err != nil && !errors.Is(err, replica.ErrNotDriver) {
					t.Error(err)
				}
			}
		}
		for range 150 {
			step(ks[names[rng.IntN(len(names))]])
			for _, k := range ks {
				i, err := k.Issuer()
				if err != nil {
					t.Fatal(err)
				}
				signed = append(signed, signature{k.Document().Version, i.SKI()})
			}
		}
		history := r.history(t, c)
		active := func(d *Document) (ids []string) {
			for _, x := range d.State(c.Domain).Authorities {
				if x.Kind == KindIssuer && x.State == document.StateActive {
					ids = append(ids, x.ID)
				}
			}
			return ids
		}
		for _, d := range history {
			if ids := active(d); len(ids) != 1 {
				t.Errorf("version %d has %d active issuers", d.Version, len(ids))
			}
		}
		issuers := map[string]bool{}
		for _, s := range signed {
			issuers[s.ski] = true
			if want := active(history[s.version-1])[0]; s.ski != want {
				t.Errorf("at version %d %s signed, and %s is active", s.version, s.ski, want)
			}
		}
		term := uint64(0)
		for _, d := range history {
			if d.Driver == nil {
				continue
			}
			if d.Driver.Term < term {
				t.Errorf("version %d goes back to term %d", d.Version, d.Driver.Term)
			}
			term = d.Driver.Term
		}
		if len(history) < 10 || term < 2 {
			t.Logf("little happened: %d versions, %d terms, %d issuers", len(history), term, len(issuers))
		}
	})
}
