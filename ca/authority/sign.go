package authority

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// This file makes keys, and issuers with them.

// generate makes a key in the key store; without one, in memory, to be sealed into the document.
func (c Config) generate(ctx context.Context, kt ca.KeyType) (Key, error) {
	if kt == "" {
		kt = ca.P256
	}
	if c.Keys == nil {
		signer, err := ca.GenerateKey(kt)
		if err != nil {
			return Key{}, fmt.Errorf("making key: %w", err)
		}
		return Key{Signer: signer}, nil
	}
	ref, err := c.Keys.Generate(ctx, kt)
	if err != nil {
		return Key{}, err
	}
	signer, err := c.Keys.Open(ctx, ref)
	return Key{Signer: signer, Ref: ref}, err
}

// active is an issuer in use, with its key, which package ca hides.
type active struct {
	issuer *ca.Issuer
	key    crypto.Signer
}

// openHeld returns an issuer of a document, whatever its state. One that was opened before is not opened again; of plugged-in
// files there is no other way.
func (a *Keeper) openHeld(ctx context.Context, d *Document, x *Authority) (active, error) {
	chain, err := x.Certificates()
	if err != nil {
		return active{}, err
	}
	var key crypto.Signer
	if v, ok := a.held.Load(x.ID); ok {
		have := v.(active)
		if a.is(have.issuer, d, x) {
			return have, nil
		}
		if !x.HasKey() && trust.SameKey(chain[0].PublicKey, have.key.Public()) { // the roots have changed, or the certificate of the key
			key, chain = have.key, append(chain[:1:1], have.issuer.Chain()[min(1, len(have.issuer.Chain())):]...)
		}
	}
	if key == nil {
		if !x.HasKey() {
			return active{}, a.lacksKey(x)
		}
		if key, err = x.OpenKey(ctx, a.config.Domain, a.config.Sealer, a.config.Keys); err != nil {
			return active{}, err
		}
	}
	bundle, err := d.Bundle(a.config.Domain)
	if err != nil {
		return active{}, err
	}
	issuer, err := ca.NewIssuer(ca.IssuerConfig{Domain: a.config.Domain, Key: key, Chain: chain, Bundle: bundle, LogID: a.LogID(), Log: a.config.Log})
	return active{issuer, key}, err
}

// errOffline: the issuer cannot be renewed here.
var errOffline = errors.New("the root's key is kept elsewhere, so this server cannot renew its issuer by itself: " +
	"`chancery authority csr` and `authority import` do, with the root's help, or a `parent` in the config")

// rootIn returns the active root of a document as one that signs, and its key.
func (a *Keeper) rootIn(ctx context.Context, d *Document) (*ca.Issuer, crypto.Signer, error) {
	c := a.config
	root, err := d.Active(c.Domain, KindRoot)
	if err = cmp.Or(err, a.MaySign()); err != nil {
		return nil, nil, err
	}
	if !root.HasKey() {
		return nil, nil, errOffline
	}
	cert, err := root.X509()
	if err != nil {
		return nil, nil, err
	}
	key, err := root.OpenKey(ctx, c.Domain, c.Sealer, c.Keys)
	if err != nil {
		return nil, nil, err
	}
	bundle, err := d.Bundle(c.Domain)
	if err != nil {
		return nil, nil, err
	}
	signer, err := ca.NewIssuer(ca.IssuerConfig{Domain: c.Domain, Key: key, Chain: []*x509.Certificate{cert}, Bundle: bundle, LogID: a.LogID(), Log: c.Log})
	return signer, key, err
}

// newIssuer makes a new issuer under the document's active root. It changes nothing: see ReplaceIssuer. The key's type
// is the root's.
func (a *Keeper) newIssuer(ctx context.Context, d *Document) (*x509.Certificate, Key, error) {
	c := a.config
	signer, rootKey, err := a.rootIn(ctx, d)
	if err != nil {
		return nil, Key{}, err
	}
	kt, err := ca.TypeOf(rootKey.Public())
	if err != nil {
		return nil, Key{}, err
	}
	key, err := c.generate(ctx, ca.IssuerType(kt))
	if err != nil {
		return nil, Key{}, err
	}
	issuer, err := signer.SignIssuer(ctx, key.Signer.Public(), cmp.Or(c.IssuerTTL, ca.DefaultIssuerTTL), audit.Requester{Method: "issuer renewal"})
	return issuer, key, err
}

// dropKeys deletes the keys that were before and are not needed any more, after a change of ours.
func (a *Keeper) dropKeys(ctx context.Context, before, after *Document) {
	if a.config.Keys != nil {
		keys.DropUnneeded(ctx, a.config.Keys, before.KeyRefs(), after.KeyRefs(), a.config.Logger)
	}
}

// Keys returns the keys to be checked: the active issuer's, which the server cannot work without, and the active root's,
// where it lies here.
func (a *Keeper) Keys() []keys.Watched {
	out := []keys.Watched{}
	if in := a.inUse.Load(); in != nil {
		out = append(out, keys.Watched{Name: a.KeyName(), Open: func(context.Context) (crypto.Signer, error) { return in.key, nil }})
	}
	doc := a.Document()
	if root, err := doc.Active(a.config.Domain, KindRoot); err == nil && root.HasKey() {
		out = append(out, keys.Watched{Name: "root " + root.ID, Open: func(ctx context.Context) (crypto.Signer, error) {
			return root.OpenKey(ctx, a.config.Domain, a.config.Sealer, a.config.Keys)
		}})
	}
	return out
}

// KeyName names the active issuer's key, as in Keys.
func (a *Keeper) KeyName() string {
	if in := a.inUse.Load(); in != nil {
		return "issuer " + in.issuer.SKI()
	}
	return ""
}
