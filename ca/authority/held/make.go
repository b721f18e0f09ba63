package held

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
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
		if root = d.Domains[c.Domain.String()].Get(document.KindRoot, id); root == nil {
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
	signer, err := ca.NewIssuer(ca.IssuerConfig{Domain: c.Domain, Key: key, Chain: []*x509.Certificate{cert}, Bundle: bundle, LogID: c.LogID(), Log: c.Log})
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
