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
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// Config says where an authority has its parts.
type Config struct {
	Domain   trust.Domain
	Store    *store.SQLite
	Sealer   *keys.Sealer
	Log      *audit.Log
	Logger   *slog.Logger
	Profiles []*ca.Profile // each issuer is checked against them before use
	Plugged  *Plugged      // issuer from files; nil = issuer and root lie in the document
}

// Plugged names the folder of a plugged-in issuer.
type Plugged struct {
	Dir    string
	Layout files.Layout
}

// Keeper holds the issuer of the moment.
type Keeper struct {
	config Config
	issuer atomic.Pointer[ca.Issuer]

	mu   sync.Mutex // guards all below; held over store calls, so that changes come one after the other
	doc  *Document
	data []byte     // stored form of doc
	set  *files.Set // plugged-in files in use
}

// Init makes the first document: with a new root and issuer, or adopting plugged-in files. store.ErrConflict if
// there is a document already. A crash on the way leaves the store without a document, and Init can be called again.
func Init(ctx context.Context, c Config, actor string) (*Document, error) {
	if _, _, err := c.Store.Load(ctx); err == nil {
		return nil, fmt.Errorf("making authorities: %w: there is a document already; `authority show` prints it", store.ErrConflict)
	} else if !errors.Is(err, store.ErrMissing) {
		return nil, err
	}
	doc := NewDocument()
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "authority init for trust domain " + c.Domain.String()}); err != nil {
		return nil, err
	}
	var err error
	if c.Plugged != nil {
		err = adopt(doc, c)
	} else {
		err = create(ctx, doc, c, actor)
	}
	if err != nil {
		return nil, err
	}
	data, err := doc.Encode(c.Sealer)
	if err != nil {
		return nil, err
	}
	return doc, c.Store.Create(ctx, data)
}

func create(ctx context.Context, doc *Document, c Config, actor string) error {
	made, err := ca.Create(ctx, ca.CreateConfig{
		Domain: c.Domain, LogID: doc.LogID(), Log: c.Log, Requester: audit.Requester{Method: "authority init", User: actor},
	})
	if err != nil {
		return err
	}
	if err := doc.Add(c.Domain, KindRoot, made.Root, made.RootKey, c.Sealer); err != nil {
		return err
	}
	return doc.Add(c.Domain, KindIssuer, made.Issuer, made.IssuerKey, c.Sealer)
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
		if err := doc.Add(c.Domain, KindRoot, r, nil, c.Sealer); err != nil {
			return err
		}
	}
	return doc.Add(c.Domain, KindIssuer, set.Chain[0], nil, c.Sealer)
}

// Open loads the document and makes its issuer ready. A missing document is an error that names the command to run.
func Open(ctx context.Context, c Config) (*Keeper, error) {
	a := &Keeper{config: c}
	data, version, err := c.Store.Load(ctx)
	if errors.Is(err, store.ErrMissing) {
		return nil, fmt.Errorf("%w: run `chancery authority init -c FILE` once", err)
	} else if err != nil {
		return nil, err
	}
	if a.doc, err = DecodeDocument(data, version, c.Sealer); err != nil {
		return nil, err
	}
	a.data = data
	if c.Plugged != nil {
		set, err := files.Read(c.Plugged.Dir, c.Plugged.Layout)
		if err != nil {
			return nil, err
		}
		return a, a.use(ctx, set)
	}
	active, err := a.doc.Active(c.Domain, KindIssuer)
	if err != nil {
		return nil, err
	}
	if len(active.Key) == 0 {
		return nil, errors.New("the active issuer was plugged in from files; set `issuer` in the config to their folder")
	}
	issuer, err := a.doc.Issuer(c.Domain, c.Sealer, c.Log)
	if err != nil && expired(active) {
		return a, a.renew(ctx) // the server was off for longer than its issuer lived; its root still stands
	} else if err != nil {
		return nil, err
	}
	if err := a.check(issuer); err != nil {
		return nil, err
	}
	a.swap(issuer)
	return a, nil
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

// Document returns the document in use. Callers must not change it.
func (a *Keeper) Document() *Document {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.doc
}

// check is done before the document names an issuer: one that fails it must not be what the next start finds.
func (a *Keeper) check(i *ca.Issuer) error {
	if err := i.SelfCheck(a.config.Profiles...); err != nil {
		return fmt.Errorf("issuer %s is not used: %w", i.SKI(), err)
	}
	return nil
}

// swap puts an issuer to use.
func (a *Keeper) swap(i *ca.Issuer) {
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
	for {
		if halfOver(a.issuer.Load()) {
			if err := a.renew(ctx); err != nil {
				a.config.Logger.Error("issuer not renewed; the old one stays in use", "reason", err.Error())
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func halfOver(i *ca.Issuer) bool {
	cert := i.Chain()[0]
	return time.Since(cert.NotBefore) > cert.NotAfter.Sub(cert.NotBefore)/2
}

// renew makes a new issuer under the active root. Nobody needs to learn of it first: each leaf is sent with its
// issuer, and verifiers know roots only. The document is stored before the issuer signs: a crash in between leaves a
// document whose issuer has signed nothing, and the next start uses it.
func (a *Keeper) renew(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.config
	cert, key, err := a.doc.NewIssuer(ctx, c.Domain, c.Sealer, c.Log)
	if err != nil {
		return fmt.Errorf("renewing issuer: %w", err)
	}
	next, err := a.doc.Next(a.data)
	if err != nil {
		return err
	}
	if err := next.ReplaceIssuer(c.Domain, cert, key, c.Sealer); err != nil {
		return err
	}
	issuer, err := next.Issuer(c.Domain, c.Sealer, c.Log)
	if err != nil {
		return err
	}
	if err := a.check(issuer); err != nil {
		return err
	}
	if err := a.store(ctx, next); err != nil {
		return err
	}
	a.swap(issuer)
	return nil
}

// store replaces the stored document by next. Caller holds mu or is alone.
func (a *Keeper) store(ctx context.Context, next *Document) error {
	data, err := next.Encode(a.config.Sealer)
	if err != nil {
		return err
	}
	if err := a.config.Store.Replace(ctx, a.doc.Version, data); err != nil {
		a.catchUp(ctx)
		return err
	}
	a.doc, a.data = next, data
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
	}
}

// use takes a set of plugged-in files into use: a new issuer under the same roots at once, any change of the roots
// not at all.
func (a *Keeper) use(ctx context.Context, set *files.Set) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.config
	have, err := a.doc.Bundle(c.Domain)
	if err != nil {
		return err
	}
	issuer, err := c.issuerOf(set, have.Generation(), a.doc.LogID())
	if err != nil {
		return err
	}
	if !have.SameRoots(issuer.Bundle()) {
		return rootsChanged(c.Plugged.Dir)
	}
	if err := a.check(issuer); err != nil {
		return err
	}
	active, err := a.doc.Active(c.Domain, KindIssuer)
	if err != nil {
		return err
	}
	if current, err := active.X509(); err != nil || !current.Equal(set.Chain[0]) {
		next, err := a.doc.Next(a.data)
		if err != nil {
			return err
		}
		if err := next.ReplaceIssuer(c.Domain, set.Chain[0], nil, c.Sealer); err != nil {
			return err
		}
		if err := a.store(ctx, next); err != nil {
			return err
		}
	}
	a.swap(issuer)
	a.set = set
	return nil
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
