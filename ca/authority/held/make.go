package held

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"fmt"
	"log/slog"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// This file makes keys, and issuers with them.

// Generate makes a key in a key store; without one, in memory, to be sealed into the document.
func Generate(ctx context.Context, store keys.Store, kt ca.KeyType) (document.Key, error) {
	if kt == "" {
		kt = ca.P256
	}
	if store == nil {
		signer, err := ca.GenerateKey(kt)
		if err != nil {
			return document.Key{}, fmt.Errorf("making key: %w", err)
		}
		return document.Key{Signer: signer}, nil
	}
	ref, err := store.Generate(ctx, kt)
	if err != nil {
		return document.Key{}, err
	}
	signer, err := store.Open(ctx, ref)
	return document.Key{Signer: signer, Ref: ref}, err
}

// Root returns a root of a document as one that signs, and its key; the active one if there is no id. ErrOffline if the key lies elsewhere.
func (h *Issuers) Root(ctx context.Context, d *document.Document, id string) (*ca.Issuer, crypto.Signer, error) {
	c := h.config
	root, err := d.Active(c.Domain, document.KindRoot)
	if err != nil {
		return nil, nil, err
	}
	if id != "" {
		if root = d.State(c.Domain).Get(document.KindRoot, id); root == nil {
			return nil, nil, fmt.Errorf("the authority document has no root %s", id)
		}
	}
	if h.config.May != nil {
		if err := h.config.May(); err != nil {
			return nil, nil, err
		}
	}
	if !root.HasKey() {
		return nil, nil, ErrOffline
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
	signer, err := ca.NewIssuer(ca.IssuerConfig{Domain: root.DomainOf(bundle.Domain()), Key: key, Chain: []*x509.Certificate{cert}, Bundle: bundle, LogID: c.LogID(), Log: c.Log})
	return signer, key, err
}

// NewIssuer makes a new issuer under a root of a document; the active one if there is no root. It changes nothing: see
// document.ReplaceIssuer. The key's type is the root's.
func (h *Issuers) NewIssuer(ctx context.Context, d *document.Document, root string, ttl time.Duration) (*x509.Certificate, document.Key, error) {
	signer, rootKey, err := h.Root(ctx, d, root)
	if err != nil {
		return nil, document.Key{}, err
	}
	kt, err := ca.TypeOf(rootKey.Public())
	if err != nil {
		return nil, document.Key{}, err
	}
	key, err := Generate(ctx, h.config.Keys, ca.IssuerType(kt))
	if err != nil {
		return nil, document.Key{}, err
	}
	issuer, err := signer.SignIssuer(ctx, key.Signer.Public(), cmp.Or(ttl, ca.DefaultIssuerTTL), audit.Requester{Method: "issuer renewal"})
	return issuer, key, err
}

// Lives are what new authorities are like; zero means ca's defaults.
type Lives struct {
	KeyType      ca.KeyType
	Root, Issuer time.Duration
}

// Successors makes what a rotation leads to: a root and an issuer under it, or an issuer under the root that is there. After an error, made are
// the keys that nobody needs.
func (h *Issuers) Successors(ctx context.Context, d *document.Document, r *document.Rotation, as Lives) (root, issuer *document.Made, made []document.Key, err error) {
	c := h.config
	defer func() {
		if err != nil {
			err = fmt.Errorf("making the successor: %w", err)
		}
	}()
	if r.Kind == document.KindIssuer || r.ToRoot != "" {
		cert, key, err := h.NewIssuer(ctx, d, r.ToRoot, as.Issuer)
		return nil, &document.Made{Key: key, Certificate: cert}, []document.Key{key}, err
	}
	for _, kt := range []ca.KeyType{as.KeyType, ca.IssuerType(as.KeyType)} {
		key, err := Generate(ctx, c.Keys, kt)
		made = append(made, key)
		if err != nil {
			return nil, nil, made, err
		}
	}
	if c.May != nil {
		if err := c.May(); err != nil {
			return nil, nil, made, err
		}
	}
	of, what := d.Present(c.Domain), "rotation "
	if r.Migration != nil {
		if of, err = trust.ParseDomain(r.Migration.To); err != nil {
			return nil, nil, made, err
		}
		what = "migration "
	}
	pair, err := ca.Create(ctx, ca.CreateConfig{
		Domain: of, KeyType: as.KeyType, LogID: c.LogID(), Log: c.Log, Requester: audit.Requester{Method: what + r.ID, User: r.Actor},
		RootKey: made[0].Signer, IssuerKey: made[1].Signer, RootTTL: as.Root, IssuerTTL: as.Issuer,
	})
	if err != nil {
		return nil, nil, made, err
	}
	return &document.Made{Key: made[0], Certificate: pair.Root}, &document.Made{Key: made[1], Certificate: pair.Issuer}, made, nil
}

// DropKeys deletes keys from a key store that were made for nothing.
func DropKeys(ctx context.Context, store keys.Store, logger *slog.Logger, made ...document.Key) {
	for _, key := range made {
		if key.Ref == "" {
			continue
		}
		if err := store.Delete(context.WithoutCancel(ctx), key.Ref); err != nil {
			logger.Warn("key of an authority that was not taken is not deleted", "key", key.Ref, "reason", err.Error())
		}
	}
}
