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
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/parent"
	"github.com/chancery-project/chancery/trust"
)

// This file is for a root that is kept elsewhere: the roots come with Init, the issuer by Request and Import.

// adoptRoots writes the roots of a CA that is kept elsewhere into the document. They enter as one generation.
func adoptRoots(doc *Document, c Config) error {
	for _, r := range c.Roots {
		if err := checkRoot(r, time.Now()); err != nil {
			return fmt.Errorf("root %q: %w", r.Subject, err)
		}
		if err := doc.Add(c.Domain, KindRoot, Key{}, c.Sealer, r); err != nil {
			return err
		}
	}
	_, err := doc.Bundle(c.Domain)
	return err
}

func checkRoot(r *x509.Certificate, now time.Time) error {
	switch {
	case !r.BasicConstraintsValid || !r.IsCA:
		return errors.New("it is not a CA certificate (basicConstraints cA is not true)")
	case r.KeyUsage != 0 && r.KeyUsage&x509.KeyUsageCertSign == 0:
		return errors.New("its key usage lacks keyCertSign")
	case r.CheckSignatureFrom(r) != nil:
		return errors.New("it is not signed by itself; give the root's certificate, and bring those below it with `authority import`")
	case now.After(r.NotAfter):
		return fmt.Errorf("it ended at %s", r.NotAfter.UTC().Format(time.RFC3339))
	case now.Before(r.NotBefore):
		return fmt.Errorf("it begins at %s, in the future", r.NotBefore.UTC().Format(time.RFC3339))
	case len(r.SubjectKeyId) == 0:
		return errors.New("it has no subject key identifier")
	}
	return nil
}

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
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.config
	if err := a.offlineOnly(); err != nil {
		return nil, err
	}
	state := a.doc.Domains[c.Domain.String()]
	var key Key
	var err error
	if state.Requested != nil && !fresh {
		key, err = state.Requested.Open(ctx, c.Domain, c.Sealer, c.Keys)
	} else {
		key, err = a.request(ctx, actor)
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
	case a.doc.Domains[a.config.Domain.String()] == nil:
		return fmt.Errorf("the authority document has nothing for trust domain %s", a.config.Domain)
	case !a.offline():
		return errors.New("the root's key lies here, so that the server renews its issuer by itself; " +
			"for a root that is kept elsewhere, start with `chancery authority init --root FILE`")
	}
	return nil
}

// request makes the key and stores the request.
func (a *Keeper) request(ctx context.Context, actor string) (Key, error) {
	c := a.config
	key, err := c.generate(ctx, ca.IssuerType(c.KeyType))
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
	next, err := a.doc.Next(a.data)
	if err != nil {
		return Key{}, err
	}
	if err := next.Request(c.Domain, id, key, c.Sealer); err != nil {
		return Key{}, err
	}
	return key, a.store(ctx, next)
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

// Import is the function Import in a running server, which signs with the new issuer from then on: at once, or, while
// another one signs, after its CRL is out.
func (a *Keeper) Import(ctx context.Context, actor string, chain []*x509.Certificate) error {
	id, err := a.prepareImport(ctx, actor, chain)
	if err != nil || id == "" {
		return err
	}
	a.announce(ctx)
	return a.activate(ctx, id)
}

// prepareImport does all of Import but the last step, where there is one: then it returns the ID of the prepared issuer.
func (a *Keeper) prepareImport(ctx context.Context, actor string, chain []*x509.Certificate) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.config
	key, between, err := a.checkImport(ctx, chain)
	if err != nil {
		return "", err
	}
	cert := chain[0]
	detail := fmt.Sprintf("authority import: issuer %x until %s", cert.SubjectKeyId, cert.NotAfter.UTC().Format(time.RFC3339))
	if err := c.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: detail}); err != nil {
		return "", err
	}
	next, err := a.doc.Next(a.data)
	if err != nil {
		return "", err
	}
	next.State(c.Domain).Requested = nil
	if _, err := next.Active(c.Domain, KindIssuer); err == nil {
		if err := next.Prepare(c.Domain, key, c.Sealer, cert, between...); err != nil {
			return "", err
		}
		return hex.EncodeToString(cert.SubjectKeyId), a.store(ctx, next)
	}
	if err := next.Add(c.Domain, KindIssuer, key, c.Sealer, cert, between...); err != nil {
		return "", err
	}
	use, err := c.issuerIn(ctx, next)
	if err != nil {
		return "", err
	}
	if err := a.store(ctx, next); err != nil {
		return "", err
	}
	a.swap(use)
	return "", nil
}

// checkImport checks a chain against the open request, and returns the request's key and the certificates between the
// issuer and its root. Caller holds mu.
func (a *Keeper) checkImport(ctx context.Context, chain []*x509.Certificate) (Key, []*x509.Certificate, error) {
	c := a.config
	if err := a.offlineOnly(); err != nil {
		return Key{}, nil, err
	}
	requested := a.doc.Domains[c.Domain.String()].Requested
	if requested == nil {
		return Key{}, nil, errors.New("no issuer was requested, or the request was answered; `chancery authority csr` makes one")
	}
	key, err := requested.Open(ctx, c.Domain, c.Sealer, c.Keys)
	if err != nil {
		return Key{}, nil, fmt.Errorf("importing issuer: %w", err)
	}
	bundle, err := a.doc.Bundle(c.Domain)
	if err != nil {
		return Key{}, nil, err
	}
	between, err := parent.Check(c.Domain, key.Signer.Public(), chain, bundle, time.Now())
	if err != nil {
		return Key{}, nil, err
	}
	if err := a.tryOut(key, bundle, append([]*x509.Certificate{chain[0]}, between...)); err != nil {
		return Key{}, nil, fmt.Errorf("issuing certificate %q: %w", chain[0].Subject, err)
	}
	return key, between, nil
}

// tryOut makes the issuer as a server would, lints what it would sign under each profile, and has its key sign.
func (a *Keeper) tryOut(key Key, b *trust.Bundle, chain []*x509.Certificate) error {
	c := a.config
	issuer, err := ca.NewIssuer(ca.IssuerConfig{Domain: c.Domain, Key: key.Signer, Chain: chain, Bundle: b, LogID: a.doc.LogID(), Log: c.Log})
	if err != nil {
		return err
	}
	if err := issuer.SelfCheck(c.Profiles...); err != nil {
		return err
	}
	return keys.Check(key.Signer)
}
