package authority

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/authority/begin"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/authority/swap"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/replica"
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
	a.swap(ctx, use)
	return nil
}

// TakeFiles takes plugged-in files that changed, or says why they are not used. Run calls it, with what it finds in the folder.
func (a *Keeper) TakeFiles(ctx context.Context, set *files.Set) error {
	if err := a.holdSet(set); err != nil {
		return err
	}
	a.Follow(ctx) // they may have what the document waits for
	a.wakeMind()
	return nil
}

// holdSet checks a set of files, and holds its issuer ready. What would change the roots in more than one step, or too early, is refused; the
// rest of the steps is for who rotates (see Swap).
func (a *Keeper) holdSet(set *files.Set) error {
	c := a.config
	have, err := a.Document().Bundle(c.Domain)
	if err != nil {
		return err
	}
	issuer, err := begin.Config{Domain: c.Domain, Log: c.Log}.IssuerOf(set, have.Generation(), a.LogID())
	if err != nil {
		return err
	}
	seen, now := swap.History{}, time.Now()
	if was := a.seen.Load(); was != nil {
		seen = was.After(a.newest.Load(), set, now)
	}
	if _, err := swap.Judge(a.Document(), c.Domain, set, seen, c.Plugged.Dir, now); err != nil {
		if a.newest.Load() != nil || !a.signsWith(set) {
			return err
		}
		c.Logger.Error("the issuer files are not as they should be; their issuer is in use nevertheless", "reason", err.Error())
	}
	if err := a.held.Check(issuer); err != nil {
		return err
	}
	a.seen.Store(&seen)
	a.newest.Store(set) // before, so that it is not let go
	a.held.Keep(held.Issuer{Issuer: issuer, Key: set.Key})
	return nil
}

// signsWith reports whether a set has the active issuer. Then a start must not fail because one of the roots beside it came or went too
// early: there is no set before it to go on with.
func (a *Keeper) signsWith(set *files.Set) bool {
	x, err := a.Document().Active(a.config.Domain, KindIssuer)
	if err != nil {
		return false
	}
	root := a.stateOf(a.Document()).Get(KindRoot, swap.RootID(set))
	return x.ID == swap.ID(set.Chain[0]) && root != nil
}

// Swap says what the plugged-in files ask for that passed all checks, of the document that there is now. No set: there are none.
func (a *Keeper) Swap(now time.Time) (*files.Set, swap.Step, error) {
	set, seen := a.newest.Load(), a.seen.Load()
	if set == nil || seen == nil {
		return nil, swap.Step{}, nil
	}
	step, err := swap.Judge(a.Document(), a.config.Domain, set, *seen, a.config.Plugged.Dir, now)
	return set, step, err
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
	if current.Equal(cert) || a.rotates(doc, set) {
		return nil
	}
	if r := a.stateOf(doc).Rotation; r != nil && swap.RootID(set) == r.FromRoot && r.Phase != document.PhasePrepare && r.Phase != document.PhaseDistribute {
		return fmt.Errorf("the files in %s have issuer %s, under root %s, which rotation %s replaces; put the files of issuer %s there", c.Plugged.Dir, id, r.FromRoot, r.ID, using.ID)
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

// rotates reports whether the issuer of files is the one that a rotation leads to, and signs when that says so.
func (a *Keeper) rotates(doc *Document, set *files.Set) bool {
	r := a.stateOf(doc).Rotation
	return r != nil && r.ToRoot != "" && (r.Phase == document.PhasePrepare || r.Phase == document.PhaseDistribute) && swap.RootID(set) == r.ToRoot
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
