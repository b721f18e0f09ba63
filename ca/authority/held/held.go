// Package held owns the issuers of an authority document that a server has opened: each with its key, and with the roots of the
// document that it was opened for. It makes keys, and certificates of new authorities with them.
//
// It refuses an issuer whose leaves would fail a profile's lints. It changes no document, and decides nothing about which issuer is
// used: that is package authority.
package held

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// Config says what issuers are made of.
type Config struct {
	Domain   trust.Domain
	Sealer   *keys.Sealer
	Keys     keys.Store // nil: none; keys are sealed into the document
	Log      *audit.Log
	Profiles []*ca.Profile // each issuer is checked against them before use
	LogID    func() uint32
	May      func() error // why nothing may be signed now; nil: nothing is ever in the way
	// Lacks says why an issuer cannot be opened whose key lies neither in the document nor in a key store; Plugged, that files may bring it.
	Lacks   func(x *document.Authority) error
	Plugged bool
}

// Issuer is an issuer with its key, which package ca hides.
type Issuer struct {
	*ca.Issuer
	Key crypto.Signer
}

// Issuers are those that were opened, by ID; of plugged-in files they are nowhere else. All methods are safe for concurrent use.
type Issuers struct {
	config Config
	held   sync.Map // ID -> Issuer
	// See Bounded; of a migration's two issuers each has its own.
	cut, cutSecond atomic.Pointer[cut]
}

// New returns a place for issuers, and nothing in it.
func New(c Config) *Issuers { return &Issuers{config: c} }

// Keep has an issuer at hand from now on.
func (h *Issuers) Keep(i Issuer) { h.held.Store(i.SKI(), i) }

// Get returns an issuer that is at hand.
func (h *Issuers) Get(id string) (Issuer, bool) {
	v, ok := h.held.Load(id)
	if !ok {
		return Issuer{}, false
	}
	return v.(Issuer), true
}

// LetGo forgets the issuers, and with them the keys, that keep does not name.
func (h *Issuers) LetGo(keep func(id string) bool) {
	h.held.Range(func(id, _ any) bool {
		if !keep(id.(string)) {
			h.held.Delete(id)
		}
		return true
	})
}

// Len returns how many are at hand.
func (h *Issuers) Len() int {
	n := 0
	h.held.Range(func(any, any) bool { n++; return true })
	return n
}

// Is reports whether an issuer is what a document has as x, with the same roots.
func (h *Issuers) Is(i *ca.Issuer, doc *document.Document, x *document.Authority) bool {
	cert, err := x.X509()
	if err != nil || !i.Certificate().Equal(cert) {
		return false
	}
	bundle, err := doc.Bundle(h.config.Domain)
	return err == nil && x.DomainOf(bundle.Domain()) == i.Domain() && bundle.SameRoots(i.Bundle()) && bundle.Generation() == i.Bundle().Generation()
}

// Check is done before a document names an issuer: one that fails it must not be what the next start finds.
func (h *Issuers) Check(i *ca.Issuer) error {
	if err := i.SelfCheck(h.config.Profiles...); err != nil {
		return fmt.Errorf("issuer %s is not used: %w", i.SKI(), err)
	}
	return nil
}

// Open returns an issuer of a document, whatever its state. One that was opened before is not opened again; of plugged-in
// files there is no other way.
func (h *Issuers) Open(ctx context.Context, d *document.Document, x *document.Authority) (Issuer, error) {
	c := h.config
	chain, err := x.Certificates()
	if err != nil {
		return Issuer{}, err
	}
	var key crypto.Signer
	if have, ok := h.Get(x.ID); ok {
		if h.Is(have.Issuer, d, x) {
			return have, nil
		}
		if !x.HasKey() && trust.SameKey(chain[0].PublicKey, have.Key.Public()) { // the roots have changed, or the certificate of the key
			key, chain = have.Key, append(chain[:1:1], have.Chain()[min(1, len(have.Chain())):]...)
		}
	}
	if key == nil {
		if !x.HasKey() {
			return Issuer{}, c.Lacks(x)
		}
		if key, err = x.OpenKey(ctx, c.Domain, c.Sealer, c.Keys); err != nil {
			return Issuer{}, err
		}
	}
	bundle, err := d.Bundle(c.Domain)
	if err != nil {
		return Issuer{}, err
	}
	issuer, err := ca.NewIssuer(ca.IssuerConfig{Domain: x.DomainOf(bundle.Domain()), Key: key, Chain: chain, Bundle: bundle, LogID: c.LogID(), Log: c.Log})
	return Issuer{issuer, key}, err
}

// Try opens and checks an issuer of a document that is to be stored. It is then at hand when the document comes into use. A
// crash in between leaves an issuer that has signed nothing.
func (h *Issuers) Try(ctx context.Context, next *document.Document, x *document.Authority) error {
	use, err := h.Open(ctx, next, x)
	if err != nil {
		return err
	}
	if err := h.Check(use.Issuer); err != nil {
		return err
	}
	h.Keep(use)
	return nil
}

// TryOut makes the issuer as a server would, lints what it would sign under each profile, and has its key sign.
func (h *Issuers) TryOut(key crypto.Signer, b *trust.Bundle, chain []*x509.Certificate) error {
	c := h.config
	issuer, err := ca.NewIssuer(ca.IssuerConfig{Domain: b.Domain(), Key: key, Chain: chain, Bundle: b, LogID: c.LogID(), Log: c.Log})
	if err != nil {
		return err
	}
	if err := issuer.SelfCheck(c.Profiles...); err != nil {
		return err
	}
	return keys.Check(key)
}

// MaxTTL is the longest life of a leaf under some profiles.
func MaxTTL(profiles []*ca.Profile) time.Duration {
	longest := ca.DefaultMaxTTL
	for _, p := range profiles {
		longest = max(longest, p.MaxTTL())
	}
	return longest
}

// ErrOffline: issuers cannot be signed here.
var ErrOffline = errors.New("the root's key is kept elsewhere, so this server cannot renew its issuer by itself: " +
	"`chancery authority csr` and `authority import` do, with the root's help, or a `parent` in the config")
