package authority

import (
	"context"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/parent"
)

// This file is for a root that is kept elsewhere: the roots come with Init, the issuer by Request and Import.

// Request returns a certificate signing request in DER for the next issuer, whose key is made where keys are kept. A
// request that is open is returned again, unless fresh is set: then its key is dropped. No server may hold the store; a
// server uses the Keeper's method.
func Request(ctx context.Context, c Config, actor string, fresh bool) ([]byte, error) {
	a, err := load(ctx, c)
	if err != nil {
		return nil, err
	}
	return a.Request(ctx, actor, fresh)
}

// Request is the function Request in a running server.
func (a *Keeper) Request(ctx context.Context, actor string, fresh bool) ([]byte, error) {
	return a.request(ctx, a.Change, actor, fresh)
}

// RequestByDriver is Request for a parent that is asked by the driver alone.
func (a *Keeper) RequestByDriver(ctx context.Context, actor string) ([]byte, error) {
	return a.request(ctx, a.Drive, actor, false)
}

func (a *Keeper) request(ctx context.Context, change changer, actor string, fresh bool) ([]byte, error) {
	c := a.config
	if err := a.offlineOnly(); err != nil {
		return nil, err
	}
	var key Key
	var err error
	if open := a.stateOf(a.Document()).Requested; open != nil && !fresh {
		key, err = open.Open(ctx, c.Domain, c.Sealer, c.Keys)
	} else {
		key, err = a.newRequest(ctx, change, actor, open)
	}
	if err != nil {
		return nil, fmt.Errorf("requesting issuer: %w", err)
	}
	return parent.Request(c.Domain, key.Signer)
}

func (a *Keeper) offlineOnly() error {
	switch {
	case a.config.Plugged != nil:
		return errors.New("the issuer is plugged in from files (`issuer` in the config); it is renewed by changing the files")
	case a.Document().Of(a.config.Domain) == nil:
		return fmt.Errorf("the authority document has nothing for trust domain %s", a.config.Domain)
	case !a.offline():
		return errors.New("the root's key lies here, so that the server renews its issuer by itself; " +
			"for a root that is kept elsewhere, start with `chancery authority init --root FILE`")
	}
	return nil
}

// newRequest makes the key and stores the request in place of the one that is open, if any.
func (a *Keeper) newRequest(ctx context.Context, change changer, actor string, open *document.RequestedIssuer) (Key, error) {
	c := a.config
	key, err := held.Generate(ctx, c.Keys, ca.IssuerType(c.KeyType))
	if err != nil {
		return Key{}, err
	}
	id, err := keys.IDOf(key.Signer.Public())
	if err != nil {
		return Key{}, err
	}
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "authority csr: issuer with key " + id}); err != nil {
		return Key{}, err
	}
	return key, change(ctx, func(next *Document) error {
		if now := next.State(c.Domain).Requested; !sameRequest(now, open) {
			return errors.New("another issuer was requested, or imported, at the same time; ask again")
		}
		return next.Request(c.Domain, id, key, c.Sealer)
	})
}

func sameRequest(a, b *document.RequestedIssuer) bool {
	return (a == nil) == (b == nil) && (a == nil || a.ID == b.ID)
}

// Import takes the chain that a parent signed for the open request, the issuing certificate first, and makes it the active
// issuer. A chain that fails a check changes nothing. No server may hold the store; a server uses the Keeper's method.
func Import(ctx context.Context, c Config, actor string, chain []*x509.Certificate) error {
	a, err := load(ctx, c)
	if err != nil {
		return err
	}
	return a.Import(ctx, actor, chain)
}

// Import is the function Import in a running server, which signs with the new issuer from then on: at once, or, while another one
// signs, after its CRL is out. Where there are several servers and not all of them have it, an error says that it waits.
func (a *Keeper) Import(ctx context.Context, actor string, chain []*x509.Certificate) error {
	return a.importBy(ctx, a.Change, actor, chain)
}

// ImportByDriver is Import for what a parent gave that is asked by the driver alone. An issuer that waits for other servers is no
// error: it is prepared, and used in time.
func (a *Keeper) ImportByDriver(ctx context.Context, actor string, chain []*x509.Certificate) error {
	err := a.importBy(ctx, a.Drive, actor, chain)
	if waits, ok := errors.AsType[*waitsError](err); ok {
		a.config.Logger.Info("issuer imported", "reason", waits.Error())
		return nil
	}
	return err
}

// waitsError: an issuer was imported, and others do not have it yet.
type waitsError struct {
	id  string
	why error
}

// Error implements error.
func (e *waitsError) Error() string {
	return fmt.Sprintf("issuer %s is prepared; it signs once every server and its agents have its CRL, or when the one in use is about to end: %v", e.id, e.why)
}

// Unwrap returns what it waits for.
func (e *waitsError) Unwrap() error { return e.why }

func (a *Keeper) importBy(ctx context.Context, change changer, actor string, chain []*x509.Certificate) error {
	id, err := a.prepareImport(ctx, change, actor, chain)
	if err != nil || id == "" {
		return err
	}
	why := a.announce(ctx)
	i := a.issuer.Load()
	if others := len(a.Document().Live()) > 1; why != nil && others && i != nil && time.Until(i.NotAfter()) >= a.lead(i.Certificate()) {
		return &waitsError{id, why}
	}
	a.warnUnannounced(why)
	return a.activate(ctx, change, id)
}

// prepareImport does all of Import but the last step, where there is one: then it returns the ID of the prepared issuer.
func (a *Keeper) prepareImport(ctx context.Context, change changer, actor string, chain []*x509.Certificate) (id string, _ error) {
	c := a.config
	requested, between, err := a.checkImport(ctx, chain)
	if err != nil {
		return "", err
	}
	cert := chain[0]
	detail := fmt.Sprintf("authority import: issuer %x until %s", cert.SubjectKeyId, cert.NotAfter.UTC().Format(time.RFC3339))
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: detail}); err != nil {
		return "", err
	}
	return id, change(ctx, func(next *Document) error {
		if !sameRequest(next.State(c.Domain).Requested, requested.open) {
			return errors.New("the request was answered or replaced at the same time; `chancery authority csr` prints the one that is open")
		}
		if next.State(c.Domain).Rotation != nil {
			return errors.New("a rotation was started at the same time; import the issuer after its end")
		}
		next.State(c.Domain).Requested = nil
		if _, err := next.Active(c.Domain, KindIssuer); err == nil {
			id = hex.EncodeToString(cert.SubjectKeyId)
			if err := next.Prepare(c.Domain, requested.key, c.Sealer, cert, between...); err != nil {
				return err
			}
			next.Prepared(c.Domain).Wanted = true
			return nil
		}
		id = ""
		if err := next.Add(c.Domain, KindIssuer, requested.key, c.Sealer, cert, between...); err != nil {
			return err
		}
		x, err := next.Active(c.Domain, KindIssuer)
		if err != nil {
			return err
		}
		return a.held.Try(ctx, next, x)
	})
}

// requested is an open request, with its key.
type requested struct {
	open *document.RequestedIssuer
	key  Key
}

// checkImport checks a chain against the open request, and returns that and the certificates between the issuer and its root.
func (a *Keeper) checkImport(ctx context.Context, chain []*x509.Certificate) (requested, []*x509.Certificate, error) {
	c, doc := a.config, a.Document()
	if err := a.offlineOnly(); err != nil {
		return requested{}, nil, err
	}
	if now := a.stateOf(doc).Rotation; now != nil {
		return requested{}, nil, fmt.Errorf("rotation %s is under way, in phase %s: an issuer cannot be brought in between. Wait for its end (`chancery rotate status`), or abort it", now.ID, now.Phase)
	}
	r := requested{open: a.stateOf(doc).Requested}
	if r.open == nil {
		return r, nil, errors.New("no issuer was requested, or the request was answered; `chancery authority csr` makes one")
	}
	var err error
	if r.key, err = r.open.Open(ctx, c.Domain, c.Sealer, c.Keys); err != nil {
		return r, nil, fmt.Errorf("importing issuer: %w", err)
	}
	bundle, err := doc.Bundle(c.Domain)
	if err != nil {
		return r, nil, err
	}
	between, err := parent.Check(c.Domain, r.key.Signer.Public(), chain, bundle, time.Now())
	if err != nil {
		return r, nil, err
	}
	if err := a.held.TryOut(r.key.Signer, bundle, append([]*x509.Certificate{chain[0]}, between...)); err != nil {
		return r, nil, fmt.Errorf("issuing certificate %q: %w", chain[0].Subject, err)
	}
	return r, between, nil
}
