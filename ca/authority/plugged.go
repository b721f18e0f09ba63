package authority

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/trust"
)

// This file is about an issuer that is plugged in from files (decision D7). Each replica has files of its own, which may change at
// other times than those of the others: it holds what it finds ready. The driver alone changes the document, by its own files; an
// issuer signs once each replica holds its key, and a replica that lacks the active one's is not ready.

var errPlugged = errors.New("the active issuer was plugged in from files; set `issuer` in the config to their folder")

// openPlugged reads the files. Where they have another issuer than the document, Run says what becomes of it.
func (a *Keeper) openPlugged(ctx context.Context) error {
	c := a.config.Plugged
	set, err := files.Read(c.Dir, c.Layout)
	if err != nil {
		return err
	}
	if err := a.holdSet(set); err != nil {
		return err
	}
	use, err := a.activeOf(ctx, a.Document())
	if err != nil {
		a.without.Store(&err)
		return nil
	}
	a.swap(use)
	return nil
}

// hold takes files that changed.
func (a *Keeper) hold(ctx context.Context, set *files.Set) error {
	if err := a.holdSet(set); err != nil {
		return err
	}
	a.Follow(ctx) // they may have what the document waits for
	a.wakeMind()
	return nil
}

// holdSet checks a set of files, and holds its issuer ready. Any change of the roots is refused.
func (a *Keeper) holdSet(set *files.Set) error {
	c := a.config
	have, err := a.Document().Bundle(c.Domain)
	if err != nil {
		return err
	}
	issuer, err := c.issuerOf(set, have.Generation(), a.LogID())
	if err != nil {
		return err
	}
	if !have.SameRoots(issuer.Bundle()) {
		return rootsChanged(c.Plugged.Dir)
	}
	if err := a.held.Check(issuer); err != nil {
		return err
	}
	a.newest.Store(set) // first, so that it is not let go
	a.held.Keep(held.Issuer{Issuer: issuer, Key: set.Key})
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

// lacksKey says that a document names a plugged-in issuer which this server's files do not have.
func (a *Keeper) lacksKey(x *Authority) error {
	if a.config.Plugged == nil {
		return errPlugged
	}
	err := fmt.Errorf("the authority document names issuer %s, and the files in %s lack its key", x.ID, a.config.Plugged.Dir)
	if set := a.newest.Load(); set != nil {
		return fmt.Errorf("%w: they have issuer %x", err, set.Chain[0].SubjectKeyId)
	}
	return err
}

// mindPlugged is mindIssuer for plugged-in files: another issuer than the active one is prepared, and used once each replica holds
// it and its CRL is out. Where there is one server only, that is its admin's wish, and it is used whatever comes.
func (a *Keeper) mindPlugged(ctx context.Context, doc *Document, now time.Time) error {
	c, set := a.config, a.newest.Load()
	cert, id := set.Chain[0], hex.EncodeToString(set.Chain[0].SubjectKeyId)
	using, err := doc.Active(c.Domain, KindIssuer)
	if err != nil {
		return err
	}
	current, err := using.X509()
	if err != nil {
		return err
	}
	alone := len(doc.Live()) <= 1
	if current.Equal(cert) {
		return nil
	}
	if !alone && doc.State(c.Domain).Retired(cert) {
		return fmt.Errorf("the files in %s have issuer %s, which others have replaced already; put the files of issuer %s there", c.Plugged.Dir, id, using.ID)
	}
	if err := a.preparePlugged(ctx, set); err != nil {
		return err
	}
	if !alone || a.issuer.Load() != nil {
		why := a.announce(ctx)
		if why != nil && !alone && current.NotAfter.Sub(now) >= a.lead(current) {
			return fmt.Errorf("issuer %s in %s waits until each replica holds it, and its CRL is out: %w", id, c.Plugged.Dir, why)
		}
		a.warnUnannounced(why)
	}
	return a.activate(ctx, a.Drive, id)
}

// preparePlugged has the document prepare the issuer of files, if it does not yet.
func (a *Keeper) preparePlugged(ctx context.Context, set *files.Set) error {
	c, cert := a.config, set.Chain[0]
	return a.Drive(ctx, func(next *Document) error {
		if p := next.Prepared(c.Domain); p != nil {
			if have, err := p.X509(); err == nil && have.Equal(cert) {
				return replica.ErrUnchanged
			}
		}
		return next.Prepare(c.Domain, Key{}, c.Sealer, cert)
	})
}
