// Package entry owns what an authority document has of one root or issuer: certificate, key, state and what follows from them.
//
// It refuses keys that another sealing key sealed, or that were sealed for another authority (decision D9). It knows of no other authority.
package entry

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

// Authority is a root or an issuer.
type Authority struct {
	ID          string     `json:"id"` // subject key identifier in hex
	Kind        Kind       `json:"kind"`
	State       State      `json:"state"`
	Generation  uint64     `json:"generation"` // of the domain's when it was added
	Certificate string     `json:"certificate"`
	Chain       string     `json:"chain,omitempty"`  // certificates between this one and its root, in PEM
	Key         []byte     `json:"key,omitempty"`    // sealed PKCS#8; empty for keys that lie elsewhere
	KeyRef      string     `json:"keyRef,omitempty"` // of a key in a key store; see keys.Store
	Created     time.Time  `json:"created"`
	Retired     *time.Time `json:"retired,omitempty"` // when it stopped signing certificates
	Wanted      bool       `json:"wanted,omitempty"`  // prepared, to sign as soon as everybody has its CRL: an admin or a parent brought it
	CRL         []byte     `json:"crl,omitempty"`     // its last CRL, where no key to sign another may be at hand
	Root        string     `json:"root,omitempty"`    // ID of the root above an issuer; see RootID
	Tainted     *time.Time `json:"tainted,omitempty"` // since when its key is thought to be known to others
	Domain      string     `json:"domain,omitempty"`  // that it vouches for, if that is another one than the line's; see DomainState
}

// Kind tells roots from issuers.
type Kind string

// State is where an authority stands in its life.
type State string

// Kinds and states.
const (
	KindRoot   Kind = "root"
	KindIssuer Kind = "issuer"

	StatePrepared State = "prepared" // trusted, signing CRLs only so far
	StateActive   State = "active"   // signs, or, for a root, vouches for the active issuer
	StateRetiring State = "retiring" // trusted until what it signed has ended
)

// Key is an authority's key as it enters the document: by reference if a key store holds it, else itself, to be sealed.
// The zero Key lies outside, such as that of a plugged-in issuer or of a root that is kept offline.
type Key struct {
	Signer crypto.Signer
	Ref    string
}

func seal(key crypto.Signer, context string, s *keys.Sealer) ([]byte, error) {
	pem, err := trust.EncodeKey(key)
	if err != nil {
		return nil, err
	}
	return s.Seal(pem, context), nil
}

// Seal keeps a key in the authority, sealed. Line is the name of its line of trust domains.
func (a *Authority) Seal(key Key, line trust.Domain, s *keys.Sealer) (err error) {
	a.Key, err = seal(key.Signer, a.sealContext(line), s)
	return err
}

func unseal(sealed []byte, context string, s *keys.Sealer) (crypto.Signer, error) {
	pem, err := s.Open(sealed, context)
	if err != nil {
		return nil, err
	}
	return trust.ParseKey(pem)
}

func (a *Authority) sealContext(td trust.Domain) string {
	return fmt.Sprintf("key of %s %s of %s, generation %d", a.Kind, a.ID, td, a.Generation)
}

// X509 returns the authority's certificate.
func (a *Authority) X509() (*x509.Certificate, error) {
	certs, err := trust.ParseCertificates([]byte(a.Certificate))
	if err != nil || len(certs) != 1 {
		return nil, fmt.Errorf("authority %s: its certificate does not parse: %w", a.ID, err)
	}
	return certs[0], nil
}

// Certificates returns the authority's certificate and those between it and its root.
func (a *Authority) Certificates() ([]*x509.Certificate, error) {
	cert, err := a.X509()
	if err != nil || a.Chain == "" {
		return []*x509.Certificate{cert}, err
	}
	chain, err := trust.ParseCertificates([]byte(a.Chain))
	if err != nil {
		return nil, fmt.Errorf("authority %s: its chain does not parse: %w", a.ID, err)
	}
	return append([]*x509.Certificate{cert}, chain...), nil
}

// HasKey reports whether the document or a key store has the authority's key.
func (a *Authority) HasKey() bool { return len(a.Key) > 0 || a.KeyRef != "" }

// OpenKey returns a signer with the authority's private key: unsealed, or from the key store.
func (a *Authority) OpenKey(ctx context.Context, td trust.Domain, s *keys.Sealer, store keys.Store) (crypto.Signer, error) {
	switch {
	case a.KeyRef != "" && store == nil:
		return nil, fmt.Errorf("the key of %s %s lies in a key store, as %s; set `keys` in the config to that store", a.Kind, a.ID, a.KeyRef)
	case a.KeyRef != "":
		return store.Open(ctx, a.KeyRef)
	case len(a.Key) == 0:
		return nil, fmt.Errorf("the key of %s %s does not lie in the document", a.Kind, a.ID)
	}
	return unseal(a.Key, a.sealContext(td), s)
}

// DomainOf returns the trust domain that an authority vouches for. Present is its line's.
func (a *Authority) DomainOf(present trust.Domain) trust.Domain {
	if a.Domain == "" {
		return present
	}
	if x, err := trust.ParseDomain(a.Domain); err == nil {
		return x
	}
	return present
}

// Life returns since when an authority has been there, and how long it is of use from then on. Certificates are backdated: the life of a
// short one would be half over when it begins (decision D20).
func (a *Authority) Life() (begin time.Time, life time.Duration, _ error) {
	cert, err := a.X509()
	if err != nil {
		return time.Time{}, 0, err
	}
	if begin = cert.NotBefore; a.Created.After(begin) && a.Created.Before(cert.NotAfter) {
		begin = a.Created
	}
	return begin, cert.NotAfter.Sub(begin), nil
}

// Ended reports whether any certificate between an issuer and its root has ended, itself included. An ended root is another matter.
func (a *Authority) Ended(now time.Time) bool {
	chain, err := a.Certificates()
	return err == nil && slices.ContainsFunc(chain, func(c *x509.Certificate) bool { return now.After(c.NotAfter) })
}

// RootID returns the ID of the root that an issuer is under; that of a root itself; empty if it cannot be told.
func (a *Authority) RootID() string {
	switch {
	case a.Kind == KindRoot:
		return a.ID
	case a.Root != "":
		return a.Root
	}
	chain, err := a.Certificates()
	if err != nil { // of a version that did not note it
		return ""
	}
	return RootOf(chain)
}

// RootOf returns the ID of the root above a chain, as its last certificate names it. One that names nobody and is its own issuer is the
// root itself.
func RootOf(chain []*x509.Certificate) string {
	last := chain[len(chain)-1]
	if len(last.AuthorityKeyId) == 0 && bytes.Equal(last.RawSubject, last.RawIssuer) {
		return hex.EncodeToString(last.SubjectKeyId)
	}
	return hex.EncodeToString(last.AuthorityKeyId)
}

// KeepCRL keeps a CRL of the authority's, and reports whether there was not as good a one.
func (a *Authority) KeepCRL(crl []byte) bool {
	if !isOf(crl, a) || laterThan(a.CRL, crl) {
		return false
	}
	a.CRL = crl
	return true
}

// laterThan reports whether a stored CRL has the number of another, or a higher one.
func laterThan(stored, crl []byte) bool {
	have, err := x509.ParseRevocationList(stored)
	if err != nil {
		return false
	}
	list, err := x509.ParseRevocationList(crl)
	return err == nil && bytes.Equal(have.RawIssuer, list.RawIssuer) && have.Number != nil && have.Number.Cmp(list.Number) >= 0
}

// isOf reports whether a CRL is of an issuer by this name; one key may have been certified under several.
func isOf(crl []byte, x *Authority) bool {
	cert, err := x.X509()
	if err != nil {
		return false
	}
	list, err := x509.ParseRevocationList(crl)
	return err == nil && bytes.Equal(list.RawIssuer, cert.RawSubject)
}

// Requested is an issuer that has a key and no certificate yet.
type Requested struct {
	ID      string    `json:"id"`               // of the key
	Key     []byte    `json:"key,omitempty"`    // sealed PKCS#8
	KeyRef  string    `json:"keyRef,omitempty"` // or where it lies in a key store
	Created time.Time `json:"created"`
}

func (r *Requested) sealContext(td trust.Domain) string {
	return fmt.Sprintf("key %s of the requested issuer of %s", r.ID, td)
}

// Open returns the key, as Add takes it.
func (r *Requested) Open(ctx context.Context, td trust.Domain, s *keys.Sealer, store keys.Store) (Key, error) {
	var signer crypto.Signer
	var err error
	switch {
	case r.KeyRef == "":
		signer, err = unseal(r.Key, r.sealContext(td), s)
	case store == nil:
		err = fmt.Errorf("the key of the requested issuer lies in a key store, as %s; set `keys` in the config to that store", r.KeyRef)
	default:
		signer, err = store.Open(ctx, r.KeyRef)
	}
	return Key{signer, r.KeyRef}, err
}

// NewRequested returns an issuer with this key that is to be requested. Its ID is id.
func NewRequested(line trust.Domain, id string, key Key, s *keys.Sealer) (_ *Requested, err error) {
	r := &Requested{ID: id, KeyRef: key.Ref, Created: time.Now().UTC().Truncate(time.Second)}
	if key.Ref == "" {
		r.Key, err = seal(key.Signer, r.sealContext(line), s)
	}
	return r, err
}
