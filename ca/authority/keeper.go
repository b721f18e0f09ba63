// Package authority owns a server's hold on its authority document: making the first one, loading it, keeping the
// issuer of the moment, renewing the issuer under its root, and taking plugged-in issuer files into use.
//
// It refuses to make a root on its own (invariant 11): Init is called by an explicit command, and MakeSuccessors for a rotation that was
// asked for. It refuses a change of the roots in plugged-in files by more than one step (decision D7).
package authority

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority/begin"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/authority/swap"
	"github.com/chancery-project/chancery/ca/bundlekey"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// Config says where an authority has its parts.
type Config struct {
	Domain   trust.Domain
	Store    store.Store
	Sealer   *keys.Sealer
	Log      *audit.Log
	Logger   *slog.Logger
	Replica  string        // name of this server among those that share the store; "server" if empty
	Mark     string        // file that notes which document this server has seen (decision D9); empty for none
	Profiles []*ca.Profile // each issuer is checked against them before use
	Plugged  *Plugged      // issuer from files; nil = issuer and root lie in the document
	// IssuanceLog is the issuance log that Log is mirrored to; zero for none. The document must list the same for this server.
	IssuanceLog LogState
	Keys        keys.Store // where new keys are made; nil = in memory, to be sealed into the document
	KeyType     ca.KeyType // of new keys; default p256. See ca.IssuerType for issuers
	// RootTTL and IssuerTTL are the lifetimes of what is made here; zero means ca's defaults.
	RootTTL, IssuerTTL time.Duration
	// Roots are those of a CA kept elsewhere: Init takes them and makes no key. The issuer comes by Request and Import.
	Roots []*x509.Certificate
	// Parented is set where a parent CA renews the issuer (package parent/renewal): Open does without one, and Run renews none.
	Parented bool
}

// Plugged names the folder of a plugged-in issuer.
type Plugged struct {
	Dir    string
	Layout files.Layout
}

// name is that of this replica.
func (c Config) name() string { return cmp.Or(c.Replica, "server") }

// Own returns the entry of this server in a document; nil if it is not registered there.
func (c Config) Own(d *Document) *LogState { return d.Own(c.name(), c.IssuanceLog.Key) }

// Keeper holds the issuer of the moment: the one that the newest document calls active, and no other.
type Keeper struct {
	*replica.Hold // of the document
	config        Config
	issuer        atomic.Pointer[ca.Issuer]
	inUse         atomic.Pointer[held.Issuer] // the same issuer, with its key
	pair          atomic.Pointer[held.Pair]   // the same issuer, with that of a migration's other trust domain
	without       atomic.Pointer[error]       // why there is no issuer
	failed        atomic.Pointer[error]       // of the last try to look after the issuer; nil if it did not fail
	newest        atomic.Pointer[files.Set]   // plugged-in files that passed all checks

	warned  time.Time // when mindIssuer warned last; of Run's goroutine
	running time.Time // since when Run looks; likewise

	taken    uint64 // version that take saw last; guarded by the lock of changes
	held     *held.Issuers
	announce func(context.Context) error  // see Announce
	mind     chan struct{}                // wakes who minds the issuer
	used     func()                       // see OnUse
	seen     atomic.Pointer[swap.History] // what became of plugged-in files
	staged   bool                         // see Staged
	making   atomic.Pointer[error]        // of the last try to make a rotation's successor; nil if it did not fail
}

// Init makes the first document: with a new root and issuer, or adopting plugged-in files. store.ErrConflict if
// there is a document already. A crash on the way leaves the store without a document, and Init can be called again.
func Init(ctx context.Context, c Config, actor string) (*Document, error) {
	if _, _, err := c.Store.Load(ctx); err == nil {
		return nil, fmt.Errorf("making authorities: %w: there is a document already; `authority show` prints it", store.ErrConflict)
	} else if !errors.Is(err, store.ErrMissing) {
		return nil, err
	}
	doc := document.New()
	if c.IssuanceLog.Key != "" {
		doc.Logs[0] = c.IssuanceLog
	}
	if err := doc.Register(c.name(), doc.Logs[0]); err != nil {
		return nil, err
	}
	if c.Mark != "" { // before the document lists this server: from then on a missing mark is an error
		if err := replica.WriteMark(c.Mark, c.Domain, c.Sealer, replica.Mark{}); err != nil {
			return nil, err
		}
	}
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "authority init for trust domain " + c.Domain.String()}); err != nil {
		return nil, err
	}
	var err error
	first := begin.Config{Domain: c.Domain, Sealer: c.Sealer, Log: c.Log, Keys: c.Keys, KeyType: c.KeyType, RootTTL: c.RootTTL, IssuerTTL: c.IssuerTTL}
	switch {
	case c.Plugged != nil && len(c.Roots) > 0:
		err = errors.New("a plugged-in issuer brings its roots along; none can be given beside it")
	case c.Plugged != nil:
		err = first.Adopt(doc, c.Plugged.Dir, c.Plugged.Layout)
	case len(c.Roots) > 0:
		err = first.AdoptRoots(doc, c.Roots)
	default:
		err = first.Create(ctx, doc, actor)
	}
	if err != nil {
		return nil, err
	}
	if _, err := bundlekey.Make(doc, c.Domain, c.Sealer); err != nil {
		return nil, err
	}
	data, err := doc.Encode(c.Sealer)
	if err != nil {
		return nil, err
	}
	return doc, c.Store.Create(ctx, doc.Version, data)
}

// Open loads the document, registers this server in it, and makes the active issuer ready. A missing document is an error that
// names the command to run. One whose issuer has ended is left to Run.
func Open(ctx context.Context, c Config) (*Keeper, error) {
	a, err := load(ctx, c)
	if err != nil {
		return nil, err
	}
	c = a.config
	switch {
	case c.Plugged != nil:
		return a, a.openPlugged(ctx)
	case c.Parented:
		return a, a.openParented(ctx)
	}
	issuer, err := a.Document().Active(c.Domain, KindIssuer)
	if err != nil && a.offline() {
		return nil, fmt.Errorf("%w: %w", err, held.ErrOffline)
	} else if err != nil {
		return nil, err
	}
	if !issuer.HasKey() {
		return nil, errPlugged
	}
	use, err := a.activeOf(ctx, a.Document())
	switch {
	case err != nil && issuer.Ended(time.Now()) && a.offline():
		return nil, fmt.Errorf("%w: %w", err, held.ErrOffline)
	case err != nil && issuer.Ended(time.Now()):
		a.without.Store(&err) // the server was off for longer than its issuer lived; its root may still stand
		return a, nil
	case err != nil:
		return nil, err
	}
	a.swap(ctx, use)
	return a, nil
}

// load gets hold of the document.
func load(ctx context.Context, c Config) (*Keeper, error) {
	a := &Keeper{config: c, announce: func(context.Context) error { return nil }, mind: make(chan struct{}, 1), used: func() {}}
	var err error
	a.Hold, err = replica.Open(ctx, replica.Config{
		Name: c.name(), Domain: c.Domain, Store: c.Store, Sealer: c.Sealer, Logger: c.Logger, Log: c.Log, Mark: c.Mark, Issuance: c.IssuanceLog,
	})
	if err != nil {
		return nil, err
	}
	a.config.Domain = a.Hold.Domain()
	a.held = a.nothing()
	a.OnTake(a.take)
	a.OnWrite(a.dropKeys)
	a.OnDrive(a.unfit)
	return a, nil
}

// nothing returns a place for issuers that are opened.
func (a *Keeper) nothing() *held.Issuers {
	c := a.config
	return held.New(held.Config{
		Domain: c.Domain, Sealer: c.Sealer, Keys: c.Keys, Log: c.Log, Profiles: c.Profiles, LogID: func() uint32 { return a.LogID() }, May: func() error { return a.MaySign() },
		Lacks: a.lacksKey, Plugged: c.Plugged != nil,
	})
}

// offline reports whether the root's key lies elsewhere.
func (a *Keeper) offline() bool {
	root, err := a.Document().Active(a.config.Domain, KindRoot)
	return err == nil && !root.HasKey()
}

// Issuer returns the issuer of the moment, or why nothing can be issued.
func (a *Keeper) Issuer() (*ca.Issuer, error) { return a.usable(a.issuer.Load(), nil) }

// usable returns an issuer as it may be used now; err is why there is none.
func (a *Keeper) usable(i *ca.Issuer, err error) (*ca.Issuer, error) {
	if why := a.MaySign(); why != nil {
		return nil, why
	}
	switch why := a.without.Load(); {
	case err != nil:
		return nil, err
	case i == nil && why != nil:
		return nil, *why
	case i == nil:
		return nil, errors.New("no issuer yet")
	}
	if end := i.NotAfter(); time.Now().After(end) {
		return nil, fmt.Errorf("the issuer's chain ended at %s", end.UTC().Format(time.RFC3339))
	}
	return a.bounded(i, time.Now())
}

// InUse returns the issuer of the moment, also one that has ended, for who looks after it. Nil if there is none yet.
func (a *Keeper) InUse() *ca.Issuer { return a.issuer.Load() }

// swap puts an issuer to use. Caller has the lock of changes or is alone.
func (a *Keeper) swap(ctx context.Context, use held.Issuer) {
	i := use.Issuer
	a.held.Keep(use)
	a.inUse.Store(&use)
	a.issuer.Store(i)
	a.pairUp(ctx)
	a.config.Logger.Info("issuer in use", "issuer", i.SKI(), "not_after", i.NotAfter().UTC(), "generation", i.Bundle().Generation())
	a.used()
}

// OnUse sets what is called each time that another issuer, or one with other roots, comes into use; it must not block. It is called
// before Run.
func (a *Keeper) OnUse(f func()) { a.used = f }

// take puts the active issuer of a document to use that came into use, whoever wrote it. Where it cannot be opened here, nothing
// is issued: another issuer is not for this server to choose.
func (a *Keeper) take(ctx context.Context, doc *Document) {
	if a.taken != doc.Version {
		defer a.wakeMind()
		a.letGo(doc)
	}
	a.taken = doc.Version
	use, err := a.activeOf(ctx, doc)
	was := a.inUse.Load()
	switch {
	case err == nil && was != nil && was.Issuer == use.Issuer:
		a.pairUp(ctx)
	case err == nil:
		a.swap(ctx, use)
	default:
		why := a.without.Swap(&err)
		a.inUse.Store(nil)
		a.pair.Store(nil)
		if had := a.issuer.Swap(nil) != nil; had || why == nil || (*why).Error() != err.Error() {
			a.config.Logger.Error("nothing is issued: the active issuer cannot be used here", "reason", err.Error())
		}
	}
}

// letGo forgets the issuers, and with them the keys, that a document has no more and that plugged-in files do not bring next.
func (a *Keeper) letGo(doc *Document) {
	keep := map[string]bool{}
	for _, state := range doc.Domains {
		for i := range state.Authorities {
			keep[state.Authorities[i].ID] = true
		}
	}
	if set := a.newest.Load(); set != nil {
		keep[hex.EncodeToString(set.Chain[0].SubjectKeyId)] = true
	}
	a.held.LetGo(func(id string) bool { return keep[id] })
}

// activeOf returns the active issuer of a document, checked: the one in use, if it is that.
func (a *Keeper) activeOf(ctx context.Context, doc *Document) (held.Issuer, error) {
	x, err := doc.Active(a.config.Domain, KindIssuer)
	if err == nil {
		err = a.Ours(doc)
	}
	if err != nil {
		return held.Issuer{}, err
	}
	if was := a.inUse.Load(); was != nil && a.held.Is(was.Issuer, doc, x) {
		return *was, nil
	}
	use, err := a.held.Open(ctx, doc, x)
	if err != nil {
		return held.Issuer{}, err
	}
	return use, a.held.Check(use.Issuer)
}

// Run follows the document, and, while this server is the one that drives changes, renews the issuer at half of its life or takes
// plugged-in files into use, until ctx ends.
func (a *Keeper) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { a.mindAll(ctx) })
	if set := a.newest.Load(); set != nil {
		w := files.Watcher{
			Dir: a.config.Plugged.Dir, Layout: a.config.Plugged.Layout, Last: set, Logger: a.config.Logger,
			Apply: func(s *files.Set) error { return a.TakeFiles(ctx, s) },
		}
		wg.Go(func() { w.Run(ctx) })
	}
	return a.Hold.Run(ctx)
}

// mindEvery is how often the driver looks whether there is something to do; sooner where issuers live for minutes.
const mindEvery = time.Minute

func (a *Keeper) mindAll(ctx context.Context) {
	a.running = time.Now()
	for {
		a.Mind(ctx)
		wait := mindEvery
		if i := a.issuer.Load(); i != nil {
			cert := i.Certificate()
			wait = min(wait, max(cert.NotAfter.Sub(cert.NotBefore)/20, time.Second))
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-a.Driving():
		case <-a.mind:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// Mind does once what is the driver's to do; nothing, if another one drives. Run calls it again and again.
func (a *Keeper) Mind(ctx context.Context) {
	if a.Drives() {
		a.DropDead(ctx, time.Now())
		a.mindIssuer(ctx, time.Now())
		a.mindSecond(ctx, time.Now())
	}
}

func (a *Keeper) wakeMind() {
	select {
	case a.mind <- struct{}{}:
	default:
	}
}

// warnEvery is how often an issuer that only an admin can renew is called to mind.
const warnEvery = time.Hour

// mindIssuer sees to it that an issuer that is past half of its life gets a successor, or, where the root's key lies
// elsewhere, says that somebody should. It is for the driver.
func (a *Keeper) mindIssuer(ctx context.Context, now time.Time) {
	i, doc := a.issuer.Load(), a.Document()
	next, over := doc.Prepared(a.config.Domain), held.Over(doc, a.config.Domain, now)
	a.failed.Store(nil) // a try may take longer than it takes to ask whether this server is fit
	var err error
	switch {
	case a.config.Plugged != nil:
		err = a.mindPlugged(ctx, doc, now)
	case next != nil && a.isStray(doc, next):
		err = a.dropStray(ctx)
	case next != nil && over: // nothing is issued without it, and nobody can be shut out
		err = a.activate(ctx, a.Drive, next.ID)
	case i == nil && !over: // other replicas may sign with it; why this one cannot was logged
		return
	case next != nil && (next.Wanted || a.due(next, i.Certificate(), now)):
		if err = a.announced(ctx, next, i.Certificate(), now); err == nil {
			err = a.activate(ctx, a.Drive, next.ID)
		}
	case next != nil || a.config.Parented: // a parented issuer is renewed by package renewal
		return
	case over:
		err = a.renew(ctx)
	case !held.HalfOver(doc, a.config.Domain, now) || a.leaves(doc) && i.NotAfter().Sub(now) >= a.lead(i.Certificate())/2: // else its rotation does not get on
		return
	default:
		err = a.prepare(ctx)
	}
	a.tell(err, i, now)
}

// tell logs what became of minding.
func (a *Keeper) tell(err error, i *ca.Issuer, now time.Time) {
	waits, isWaiting := errors.AsType[*waitsError](err)
	switch {
	case err == nil || errors.Is(err, replica.ErrNotDriver): // another one does it
	case isWaiting && now.Sub(a.warned) < warnEvery:
	case isWaiting:
		a.warned = now
		a.config.Logger.Warn("the next issuer waits", "reason", waits.Error())
	case !errors.Is(err, held.ErrOffline) || i == nil:
		a.failed.Store(&err)
		a.config.Logger.Error("issuer not renewed; the old one stays in use", "reason", err.Error())
	case now.Sub(a.warned) >= warnEvery:
		a.warned = now
		a.config.Logger.Warn("issuer is past half of its life", "issuer", i.SKI(), "not_after", i.NotAfter().UTC(),
			"left", i.NotAfter().Sub(now).Truncate(time.Minute).String(), "reason", err.Error())
	}
}

// unfit returns why this server could not look after the issuer if it drove: it cannot open the active one, or the last try failed, as
// where the root's key cannot be opened here. Plugged-in files may lack the active issuer's key, and bring the next one.
func (a *Keeper) unfit() error {
	if a.config.Plugged == nil && a.issuer.Load() == nil && !held.Over(a.Document(), a.config.Domain, time.Now()) {
		_, err := a.Issuer()
		return err
	}
	if err := a.Whole(); err != nil {
		return err
	}
	if failed := a.failed.Load(); failed != nil {
		return *failed
	}
	state := a.stateOf(a.Document())
	if failed := a.making.Load(); failed != nil && state.Rotation != nil && state.LacksSuccessor(state.Rotation.ID, time.Now()) {
		return *failed
	}
	return nil
}

// renew makes a new issuer under the active root and has it used at once, where there is no other that works: see prepare.
func (a *Keeper) renew(ctx context.Context) error {
	return a.succeed(ctx, func(next *Document, key Key, cert *x509.Certificate) (*Authority, error) {
		old, err := next.Active(a.config.Domain, KindIssuer)
		if err != nil {
			return nil, err
		}
		was := old.ID
		if err := next.ReplaceIssuer(a.config.Domain, key, a.config.Sealer, cert); err != nil {
			return nil, err
		}
		x, err := next.Active(a.config.Domain, KindIssuer)
		if err == nil {
			next.State(a.config.Domain).Renewed(was, x.ID)
		}
		return x, err
	})
}

// succeed makes an issuer to follow the active one, and has put bring it into the document. It passes the checks before: one that
// does not must not be what the next start finds.
func (a *Keeper) succeed(ctx context.Context, put func(next *Document, key Key, cert *x509.Certificate) (*Authority, error)) error {
	c, doc := a.config, a.Document()
	before, err := doc.Active(c.Domain, KindIssuer)
	if err != nil {
		return err
	}
	cert, key, err := a.held.NewIssuer(ctx, doc, "", c.IssuerTTL)
	if err != nil {
		return fmt.Errorf("making the next issuer: %w", err)
	}
	tried := false
	err = a.Drive(ctx, func(next *Document) error {
		now, err := next.Active(c.Domain, KindIssuer)
		if err != nil || now.ID != before.ID || next.Prepared(c.Domain) != nil || a.isOther(next, cert) {
			return cmp.Or(err, replica.ErrUnchanged) // another one was made meanwhile
		}
		x, err := put(next, key, cert)
		if err != nil {
			return err
		}
		tried, err = true, a.held.Try(ctx, next, x)
		return err
	})
	if !tried { // no document can name it
		a.dropMade(ctx, key)
	}
	return err
}

// Expiries returns the end of each certificate that the authority's work depends on, by a name for metrics.
func (a *Keeper) Expiries() map[string]time.Time { return a.pair.Load().Expiries() }
