// Package authority owns a server's hold on its authority document: making the first one, loading it, keeping the
// issuer of the moment, renewing the issuer under its root, and taking plugged-in issuer files into use.
//
// It refuses to make a root on its own (invariant 11): Init is called by an explicit command. It refuses a change of
// the root set in plugged-in files, with the steps that would be safe (decision D7).
package authority

import (
	"context"
	"crypto/sha256"
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
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/keys"
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
	Profiles []*ca.Profile // each issuer is checked against them before use
	Plugged  *Plugged      // issuer from files; nil = issuer and root lie in the document
	// IssuanceLog is the issuance log that Log is mirrored to; zero for none. The document must list the same.
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

// Keeper holds the issuer of the moment.
type Keeper struct {
	config   Config
	issuer   atomic.Pointer[ca.Issuer]
	inUse    atomic.Pointer[active]   // the same issuer, with its key
	snapshot atomic.Pointer[Document] // the same as doc, for who must not wait for a slow store or key

	warned  time.Time // when mindIssuer warned last; of Run's goroutine
	running time.Time // since when Run looks; likewise

	mu   sync.Mutex // guards all below; held over store calls, so that changes come one after the other
	doc  *Document
	data []byte     // stored form of doc
	set  *files.Set // plugged-in files in use

	held     sync.Map                    // ID -> *ca.Issuer, those that were opened; of plugged-in files they are nowhere else
	changed  chan struct{}               // see Changed
	announce func(context.Context) error // see Announce
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
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "authority init for trust domain " + c.Domain.String()}); err != nil {
		return nil, err
	}
	var err error
	switch {
	case c.Plugged != nil && len(c.Roots) > 0:
		err = errors.New("a plugged-in issuer brings its roots along; none can be given beside it")
	case c.Plugged != nil:
		err = adopt(doc, c)
	case len(c.Roots) > 0:
		err = adoptRoots(doc, c)
	default:
		err = create(ctx, doc, c, actor)
	}
	if err != nil {
		return nil, err
	}
	data, err := doc.Encode(c.Sealer)
	if err != nil {
		return nil, err
	}
	return doc, c.Store.Create(ctx, doc.Version, data)
}

func create(ctx context.Context, doc *Document, c Config, actor string) error {
	root, err := c.generate(ctx, c.KeyType)
	if err != nil {
		return err
	}
	issuer, err := c.generate(ctx, ca.IssuerType(c.KeyType))
	if err != nil {
		return err
	}
	made, err := ca.Create(ctx, ca.CreateConfig{
		Domain: c.Domain, LogID: doc.LogID(), Log: c.Log, Requester: audit.Requester{Method: "authority init", User: actor},
		RootKey: root.Signer, IssuerKey: issuer.Signer, RootTTL: c.RootTTL, IssuerTTL: c.IssuerTTL,
	})
	if err != nil {
		return err
	}
	if err := doc.Add(c.Domain, KindRoot, root, c.Sealer, made.Root); err != nil {
		return err
	}
	return doc.Add(c.Domain, KindIssuer, issuer, c.Sealer, made.Issuer)
}

// adopt writes a plugged-in issuer and its roots into the document, without keys. A root that has ended is refused here
// only: one that ends later, beside the one in use, must not keep a server from starting, since no root may be taken out.
func adopt(doc *Document, c Config) error {
	set, err := files.Read(c.Plugged.Dir, c.Plugged.Layout)
	if err != nil {
		return err
	}
	if _, err := c.issuerOf(set, 1, doc.LogID()); err != nil {
		return err
	}
	for _, r := range set.Roots {
		if time.Now().After(r.NotAfter) {
			return fmt.Errorf("root certificate %q in %s ended at %s", r.Subject, c.Plugged.Dir, r.NotAfter.UTC().Format(time.RFC3339))
		}
		if err := doc.Add(c.Domain, KindRoot, Key{}, c.Sealer, r); err != nil {
			return err
		}
	}
	return doc.Add(c.Domain, KindIssuer, Key{}, c.Sealer, set.Chain[0])
}

// Open loads the document and makes its issuer ready. A missing document is an error that names the command to run.
func Open(ctx context.Context, c Config) (*Keeper, error) {
	a, err := load(ctx, c)
	if err != nil {
		return nil, err
	}
	if c.Plugged != nil {
		set, err := files.Read(c.Plugged.Dir, c.Plugged.Layout)
		if err != nil {
			return nil, err
		}
		return a, a.use(ctx, set)
	}
	if c.Parented {
		return a, a.openParented(ctx)
	}
	issuer, err := a.doc.Active(c.Domain, KindIssuer)
	if err != nil && a.offline() {
		return nil, fmt.Errorf("%w: %w", err, errOffline)
	} else if err != nil {
		return nil, err
	}
	if !issuer.HasKey() {
		return nil, errors.New("the active issuer was plugged in from files; set `issuer` in the config to their folder")
	}
	use, err := c.issuerIn(ctx, a.doc)
	if err != nil && expired(issuer) {
		return a, a.renew(ctx) // the server was off for longer than its issuer lived; its root may still stand
	} else if err != nil {
		return nil, err
	}
	if err := a.check(use.issuer); err != nil {
		return nil, err
	}
	a.swap(use)
	return a, nil
}

// load reads the document.
func load(ctx context.Context, c Config) (*Keeper, error) {
	a := &Keeper{config: c, changed: make(chan struct{}, 1), announce: func(context.Context) error { return nil }}
	data, version, err := c.Store.Load(ctx)
	if errors.Is(err, store.ErrMissing) {
		return nil, fmt.Errorf("%w: run `chancery authority init -c FILE` once", err)
	} else if err != nil {
		return nil, err
	}
	if a.doc, err = DecodeDocument(data, version, c.Sealer); err != nil {
		return nil, err
	}
	if err := a.doc.CheckLog(c.IssuanceLog); err != nil {
		return nil, err
	}
	a.data = data
	a.snapshot.Store(a.doc)
	return a, nil
}

// offline reports whether the root's key lies elsewhere. Caller holds mu or is alone.
func (a *Keeper) offline() bool {
	root, err := a.doc.Active(a.config.Domain, KindRoot)
	return err == nil && !root.HasKey()
}

func expired(a *Authority) bool {
	cert, err := a.X509()
	return err == nil && time.Now().After(cert.NotAfter)
}

// Issuer returns the issuer of the moment, or why nothing can be issued.
func (a *Keeper) Issuer() (*ca.Issuer, error) {
	i := a.issuer.Load()
	if i == nil {
		return nil, errors.New("no issuer yet")
	}
	if end := i.NotAfter(); time.Now().After(end) {
		return nil, fmt.Errorf("the issuer's chain ended at %s", end.UTC().Format(time.RFC3339))
	}
	return i, nil
}

// InUse returns the issuer of the moment, also one that has ended, for who looks after it. Nil if there is none yet.
func (a *Keeper) InUse() *ca.Issuer { return a.issuer.Load() }

// Document returns the document in use. Callers must not change it.
func (a *Keeper) Document() *Document { return a.snapshot.Load() }

// check is done before the document names an issuer: one that fails it must not be what the next start finds.
func (a *Keeper) check(i *ca.Issuer) error {
	if err := i.SelfCheck(a.config.Profiles...); err != nil {
		return fmt.Errorf("issuer %s is not used: %w", i.SKI(), err)
	}
	return nil
}

// swap puts an issuer to use. Caller holds mu or is alone.
func (a *Keeper) swap(use active) {
	i := use.issuer
	a.held.Store(i.SKI(), i)
	a.inUse.Store(&use)
	a.issuer.Store(i)
	a.config.Logger.Info("issuer in use", "issuer", i.SKI(), "not_after", i.NotAfter().UTC(), "generation", i.Bundle().Generation())
}

// Run renews the issuer at half of its life, or watches the plugged-in files, until ctx ends.
func (a *Keeper) Run(ctx context.Context) error {
	if a.config.Plugged != nil {
		w := files.Watcher{
			Dir: a.config.Plugged.Dir, Layout: a.config.Plugged.Layout, Last: a.set, Logger: a.config.Logger,
			Apply: func(s *files.Set) error { return a.use(ctx, s) },
		}
		return w.Run(ctx)
	}
	ticker := time.NewTicker(time.Minute)
	defer ticker.Stop()
	a.running = time.Now()
	for {
		a.mindIssuer(ctx, time.Now())
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// warnEvery is how often an issuer that only an admin can renew is called to mind.
const warnEvery = time.Hour

// mindIssuer sees to it that an issuer that is past half of its life gets a successor, or, where the root's key lies
// elsewhere, says that somebody should.
func (a *Keeper) mindIssuer(ctx context.Context, now time.Time) {
	i := a.issuer.Load()
	doc := a.snapshot.Load()
	var err error
	next := doc.Prepared(a.config.Domain)
	switch {
	case next != nil && i == nil: // nothing is issued without it, and nobody can be shut out
		err = a.activate(ctx, next.ID)
	case next != nil && a.due(next, i, now):
		if why := a.announce(ctx); why != nil && i.NotAfter().Sub(now) >= a.lead(i) { // there is time for another try
			err = fmt.Errorf("the next one's CRL is not out: %w", why)
			break
		}
		err = a.activate(ctx, next.ID)
	case next != nil || a.config.Parented || !halfOver(i, now): // a parented issuer is renewed by package renewal
		return
	default:
		err = a.prepare(ctx)
	}
	switch {
	case err == nil:
	case !errors.Is(err, errOffline):
		a.config.Logger.Error("issuer not renewed; the old one stays in use", "reason", err.Error())
	case now.Sub(a.warned) >= warnEvery:
		a.warned = now
		a.config.Logger.Warn("issuer is past half of its life", "issuer", i.SKI(), "not_after", i.NotAfter().UTC(),
			"left", i.NotAfter().Sub(now).Truncate(time.Minute).String(), "reason", err.Error())
	}
}

func halfOver(i *ca.Issuer, now time.Time) bool {
	cert := i.Chain()[0]
	return now.Sub(cert.NotBefore) > cert.NotAfter.Sub(cert.NotBefore)/2
}

// renew makes a new issuer under the active root and uses it at once, where there is no other that works: see prepare.
func (a *Keeper) renew(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.config
	cert, key, err := c.newIssuer(ctx, a.doc)
	if err != nil {
		return fmt.Errorf("renewing issuer: %w", err)
	}
	next, err := a.doc.Next(a.data)
	if err != nil {
		return err
	}
	if err := next.ReplaceIssuer(c.Domain, key, c.Sealer, cert); err != nil {
		return err
	}
	return a.take(ctx, next)
}

// take stores a document and puts its active issuer to use, once that passes the checks. The document comes first: a crash in
// between leaves one whose issuer has signed nothing, and the next start uses it. Caller holds mu.
func (a *Keeper) take(ctx context.Context, next *Document) error {
	use, err := a.config.issuerIn(ctx, next)
	if err != nil {
		return err
	}
	if err := a.check(use.issuer); err != nil {
		return err
	}
	if err := a.store(ctx, next); err != nil {
		return err
	}
	a.swap(use)
	return nil
}

// store replaces the stored document by next, and says that it changed. Caller holds mu or is alone.
func (a *Keeper) store(ctx context.Context, next *Document) error {
	if err := a.storeQuietly(ctx, next); err != nil {
		return err
	}
	select {
	case a.changed <- struct{}{}:
	default: // who is told will see this one too
	}
	return nil
}

// storeQuietly is store for changes that only their maker needs to know of. It ends though ctx may not wait: of a write that
// was cut off nobody would know whether it happened.
func (a *Keeper) storeQuietly(ctx context.Context, next *Document) error {
	ctx = context.WithoutCancel(ctx)
	data, err := next.Encode(a.config.Sealer)
	if err != nil {
		return err
	}
	if err := a.config.Store.Replace(ctx, a.doc.Version, next.Version, data); err != nil {
		a.catchUp(ctx)
		return err
	}
	before := a.doc
	a.doc, a.data = next, data
	a.snapshot.Store(next)
	a.dropKeys(ctx, before, next)
	return nil
}

// catchUp looks whether a write that failed happened all the same, now or at an earlier try: then each later one would
// be a conflict. Only a successor of the document that we have is taken. Caller holds mu or is alone.
func (a *Keeper) catchUp(ctx context.Context) {
	data, version, err := a.config.Store.Load(ctx)
	if err != nil || version != a.doc.Version+1 {
		return
	}
	doc, err := DecodeDocument(data, version, a.config.Sealer)
	if sum := sha256.Sum256(a.data); err == nil && doc.Previous == hex.EncodeToString(sum[:]) {
		a.doc, a.data = doc, data
		a.snapshot.Store(doc)
	}
}

// use takes a set of plugged-in files into use: a new issuer under the same roots once its CRL is out, any change of the
// roots not at all.
func (a *Keeper) use(ctx context.Context, set *files.Set) error {
	issuer, isNew, err := a.readyPlugged(ctx, set)
	if err != nil {
		return err
	}
	if isNew {
		a.announceNow(ctx)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.config
	issuing, err := a.doc.Active(c.Domain, KindIssuer)
	if err != nil {
		return err
	}
	if current, err := issuing.X509(); err != nil || !current.Equal(set.Chain[0]) {
		next, err := a.doc.Next(a.data)
		if err != nil {
			return err
		}
		if err := next.ReplaceIssuer(c.Domain, Key{}, c.Sealer, set.Chain[0]); err != nil {
			return err
		}
		if err := a.store(ctx, next); err != nil {
			return err
		}
	}
	a.swap(active{issuer, set.Key})
	a.set = set
	return nil
}

// readyPlugged checks a set of plugged-in files. While another issuer signs, it prepares the new one.
func (a *Keeper) readyPlugged(ctx context.Context, set *files.Set) (_ *ca.Issuer, isNew bool, _ error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.config
	have, err := a.doc.Bundle(c.Domain)
	if err != nil {
		return nil, false, err
	}
	issuer, err := c.issuerOf(set, have.Generation(), a.doc.LogID())
	if err != nil {
		return nil, false, err
	}
	if !have.SameRoots(issuer.Bundle()) {
		return nil, false, rootsChanged(c.Plugged.Dir)
	}
	if err := a.check(issuer); err != nil {
		return nil, false, err
	}
	if now := a.issuer.Load(); now == nil || now.SKI() == issuer.SKI() {
		return issuer, false, nil
	}
	next, err := a.doc.Next(a.data)
	if err != nil {
		return nil, false, err
	}
	if err := next.Prepare(c.Domain, Key{}, c.Sealer, set.Chain[0]); err != nil {
		return nil, false, err
	}
	a.held.Store(issuer.SKI(), issuer)
	return issuer, true, a.store(ctx, next)
}

func rootsChanged(dir string) error {
	return fmt.Errorf("the root certificates in %s differ from those that this trust domain was set up with; a change of "+
		"roots would cut off every proxy that does not know the new ones yet. To change safely: (1) add the new root to the "+
		"root file beside the old one, with the same issuing key; (2) when all proxies have it, change issuing certificate and "+
		"key; (3) take the old root out. This version refuses each of these until staged root rotation is there: put the former files back", dir)
}

// issuerOf checks a set as a whole and returns its issuer.
func (c Config) issuerOf(set *files.Set, generation uint64, logID uint32) (*ca.Issuer, error) {
	bundle, err := trust.NewBundle(c.Domain, generation, set.Roots)
	if err != nil {
		return nil, err
	}
	return ca.NewIssuer(ca.IssuerConfig{
		Domain: c.Domain, Key: set.Key, Chain: set.Chain, Bundle: bundle, LogID: logID, Log: c.Log,
	})
}

// Expiries returns the end of each certificate that the authority's work depends on, by a name for metrics.
func (a *Keeper) Expiries() map[string]time.Time {
	out := map[string]time.Time{}
	i := a.issuer.Load()
	if i == nil {
		return out
	}
	add := func(kind string, certs []*x509.Certificate) {
		for _, x := range certs {
			out[fmt.Sprintf("%s %x", kind, x.SubjectKeyId)] = x.NotAfter
		}
	}
	add("issuer", i.Chain())
	add("root", i.Bundle().Roots())
	return out
}
