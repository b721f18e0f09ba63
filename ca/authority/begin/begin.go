// Package begin owns what the first document of an authority has: a root and an issuer that are made, or what is kept elsewhere and adopted.
//
// It refuses roots that have ended or may not sign. It makes a root for `authority init` alone (decision D11).
package begin

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/parent"
	"github.com/chancery-project/chancery/trust"
)

// Config says what it is made of; see authority.Config.
type Config struct {
	Domain             trust.Domain
	Sealer             *keys.Sealer
	Log                *audit.Log
	Keys               keys.Store
	KeyType            ca.KeyType
	RootTTL, IssuerTTL time.Duration
}

// Create makes a root and an issuer under it.
func (c Config) Create(ctx context.Context, doc *document.Document, actor string) error {
	root, err := held.Generate(ctx, c.Keys, c.KeyType)
	if err != nil {
		return err
	}
	issuer, err := held.Generate(ctx, c.Keys, ca.IssuerType(c.KeyType))
	if err != nil {
		return err
	}
	made, err := ca.Create(ctx, ca.CreateConfig{
		Domain: c.Domain, LogID: doc.Logs[0].ID, Log: c.Log, Requester: audit.Requester{Method: "authority init", User: actor},
		RootKey: root.Signer, IssuerKey: issuer.Signer, RootTTL: c.RootTTL, IssuerTTL: c.IssuerTTL,
	})
	if err != nil {
		return err
	}
	if err := doc.Add(c.Domain, document.KindRoot, root, c.Sealer, made.Root); err != nil {
		return err
	}
	return doc.Add(c.Domain, document.KindIssuer, issuer, c.Sealer, made.Issuer)
}

// Adopt writes a plugged-in issuer and its roots into the document, without keys. A root that has ended is refused here
// only: one that ends later, beside the one in use, must not keep a server from starting, since no root may be taken out.
func (c Config) Adopt(doc *document.Document, dir string, layout files.Layout) error {
	set, err := files.Read(dir, layout)
	if err != nil {
		return err
	}
	if _, err := c.IssuerOf(set, 1, doc.Logs[0].ID); err != nil {
		return err
	}
	for _, r := range set.Roots {
		if time.Now().After(r.NotAfter) {
			return fmt.Errorf("root certificate %q in %s ended at %s", r.Subject, dir, r.NotAfter.UTC().Format(time.RFC3339))
		}
		if err := doc.Add(c.Domain, document.KindRoot, document.Key{}, c.Sealer, r); err != nil {
			return err
		}
	}
	return doc.Add(c.Domain, document.KindIssuer, document.Key{}, c.Sealer, set.Chain[0])
}

// AdoptRoots writes the roots of a CA that is kept elsewhere into the document. They enter as one generation.
func (c Config) AdoptRoots(doc *document.Document, roots []*x509.Certificate) error {
	for _, r := range roots {
		if err := parent.CheckRoot(r, time.Now()); err != nil {
			return fmt.Errorf("root %q: %w", r.Subject, err)
		}
		if err := doc.Add(c.Domain, document.KindRoot, document.Key{}, c.Sealer, r); err != nil {
			return err
		}
	}
	_, err := doc.Bundle(c.Domain)
	return err
}

// IssuerOf checks a set as a whole and returns its issuer.
func (c Config) IssuerOf(set *files.Set, generation uint64, logID uint32) (*ca.Issuer, error) {
	bundle, err := trust.NewBundle(c.Domain, generation, set.Roots)
	if err != nil {
		return nil, err
	}
	return ca.NewIssuer(ca.IssuerConfig{
		Domain: c.Domain, Key: set.Key, Chain: set.Chain, Bundle: bundle, LogID: logID, Log: c.Log,
	})
}
