package ca

import (
	"context"
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/tbs"
	"github.com/chancery-project/chancery/trust"
)

// Lifetimes of what Create makes.
const (
	DefaultRootTTL   = 10 * 365 * 24 * time.Hour
	DefaultIssuerTTL = 7 * 24 * time.Hour
)

// CreateConfig says what Create shall make.
type CreateConfig struct {
	Domain    trust.Domain
	KeyType   KeyType       // of both keys; default p256. Below an mldsa65 root the issuer is p256
	RootTTL   time.Duration // default 10 years
	IssuerTTL time.Duration // default 7 days
	LogID     uint32
	Log       *audit.Log
	Requester audit.Requester
	// RootKey and IssuerKey are used if they are set; else new keys are made in memory.
	RootKey, IssuerKey crypto.Signer
}

// Created is a new root and an issuer under it, with their private keys.
type Created struct {
	Root, Issuer       *x509.Certificate
	RootKey, IssuerKey crypto.Signer
}

// Create makes a self-signed root and an issuer under it. It is called by explicit commands only, never because a
// store was found empty (invariant 11, decision D11). Both go through Prepare and Issue as every certificate does.
func Create(ctx context.Context, c CreateConfig) (*Created, error) {
	if c.KeyType == "" {
		c.KeyType = P256
	}
	if c.RootTTL == 0 {
		c.RootTTL = DefaultRootTTL
	}
	if c.IssuerTTL == 0 {
		c.IssuerTTL = DefaultIssuerTTL
	}
	if c.IssuerTTL > c.RootTTL {
		return nil, fmt.Errorf("issuer lifetime %s is above the root's %s", c.IssuerTTL, c.RootTTL)
	}
	rootKey, err := keyOr(c.RootKey, c.KeyType)
	if err != nil {
		return nil, fmt.Errorf("making root key: %w", err)
	}
	issuerKey, err := keyOr(c.IssuerKey, IssuerType(c.KeyType))
	if err != nil {
		return nil, fmt.Errorf("making issuer key: %w", err)
	}
	now := time.Now()
	self, err := NewSelfIssuer(SelfConfig{
		Domain: c.Domain, Key: rootKey, CommonName: "root", NotBefore: now.Add(-DefaultBackdate),
		NotAfter: now.Add(c.RootTTL).Truncate(time.Second), LogID: c.LogID, Log: c.Log,
	})
	if err != nil {
		return nil, err
	}
	root, err := self.issueCA(ctx, rootProfile(c.RootTTL), rootKey.Public(), "root", -1, c.Requester)
	if err != nil {
		return nil, fmt.Errorf("making root: %w", err)
	}
	issuer, err := self.SignIssuer(ctx, issuerKey.Public(), c.IssuerTTL, c.Requester)
	if err != nil {
		return nil, err
	}
	return &Created{Root: root, Issuer: issuer, RootKey: rootKey, IssuerKey: issuerKey}, nil
}

func keyOr(key crypto.Signer, kt KeyType) (crypto.Signer, error) {
	if key != nil {
		return key, nil
	}
	return GenerateKey(kt)
}

// SelfConfig says what the root shall be that does not exist yet.
type SelfConfig struct {
	Domain              trust.Domain
	Key                 crypto.Signer
	CommonName          string // as in CARequest
	NotBefore, NotAfter time.Time
	LogID               uint32
	Log                 *audit.Log // nil for one that only drafts
}

// NewSelfIssuer returns an issuer for a root that does not exist yet: it signs its own certificate first.
func NewSelfIssuer(c SelfConfig) (*Issuer, error) {
	alg, err := algorithmOf(c.Key.Public())
	if err != nil {
		return nil, err
	}
	spki, err := x509.MarshalPKIXPublicKey(c.Key.Public())
	if err != nil {
		return nil, fmt.Errorf("encoding root key: %w", err)
	}
	ski, err := tbs.KeyID(spki)
	if err != nil {
		return nil, err
	}
	name, err := signingName(&CARequest{Domain: c.Domain, CommonName: c.CommonName}, ski)
	if err != nil {
		return nil, err
	}
	return &Issuer{
		domain: c.Domain, name: name, ski: ski, key: c.Key, algorithm: alg, notBefore: c.NotBefore, notAfter: c.NotAfter,
		pathLen: -1, logID: c.LogID, log: c.Log,
	}, nil
}

// IssuerType returns the type of key for an issuer under a root: the same, but P-256 under ML-DSA, since each handshake
// carries a signature of the issuer, and one of ML-DSA has 3,309 bytes.
func IssuerType(root KeyType) KeyType {
	if root == MLDSA65 {
		return P256
	}
	return root
}

// NewIssuer makes an issuer under i, which is a root, with a new key of IssuerType.
func (i *Issuer) NewIssuer(ctx context.Context, ttl time.Duration, who audit.Requester) (*x509.Certificate, crypto.Signer, error) {
	kt, err := TypeOf(i.key.Public())
	if err != nil {
		return nil, nil, err
	}
	key, err := GenerateKey(IssuerType(kt))
	if err != nil {
		return nil, nil, fmt.Errorf("making issuer key: %w", err)
	}
	cert, err := i.SignIssuer(ctx, key.Public(), ttl, who)
	if err != nil {
		return nil, nil, err
	}
	return cert, key, nil
}

// SignIssuer makes the certificate of an issuer under i, which is a root, for a key that lies elsewhere. It signs leaves only.
func (i *Issuer) SignIssuer(ctx context.Context, pub crypto.PublicKey, ttl time.Duration, who audit.Requester) (*x509.Certificate, error) {
	return i.SignSubordinate(ctx, pub, IssuerTerms{TTL: ttl}, who)
}

// IssuerTerms say what an issuer gets.
type IssuerTerms struct {
	TTL     time.Duration // cut to the end of the signer's chain
	PathLen int           // how many CAs may follow; 0 = it signs leaves only
}

// SignSubordinate is SignIssuer for an issuer that may have CAs below it.
func (i *Issuer) SignSubordinate(ctx context.Context, pub crypto.PublicKey, terms IssuerTerms, who audit.Requester) (*x509.Certificate, error) {
	cert, err := i.issueCA(ctx, issuerProfile(terms.TTL), pub, "issuer", terms.PathLen, who)
	if err != nil {
		return nil, fmt.Errorf("making issuer: %w", err)
	}
	return cert, nil
}

func (i *Issuer) issueCA(ctx context.Context, p *Profile, pub crypto.PublicKey, name string, pathLen int, who audit.Requester) (*x509.Certificate, error) {
	token, err := i.Prepare(p, Request{
		PublicKey: pub, Requester: who, CA: &CARequest{Domain: i.domain, CommonName: name, PathLen: pathLen},
	})
	if err != nil {
		return nil, err
	}
	cert, err := i.Issue(ctx, token)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(cert.DER)
}

// signing turns a leaf template into one of a signing certificate.
func signing(t *tbs.Template, r *CARequest) (err error) {
	t.CA, t.PathLen, t.URI = true, r.PathLen, r.Domain.URI()
	t.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	if r.Existing != nil {
		t.Subject, t.SKI = r.Existing.RawSubject, r.Existing.SubjectKeyId
		return r.crossable()
	}
	t.Subject, err = signingName(r, t.SKI)
	return err
}

// within returns the dates that were asked for, if they lie within the issuer's.
func (r *CARequest) within(i *Issuer, notBefore time.Time) (time.Time, time.Time, error) {
	if !r.NotBefore.IsZero() {
		notBefore = r.NotBefore
	}
	switch {
	case notBefore.Before(i.notBefore):
		return notBefore, r.NotAfter, fmt.Errorf("it would begin at %s, before its issuer at %s", stamp(notBefore), stamp(i.notBefore))
	case r.NotAfter.After(i.notAfter):
		return notBefore, r.NotAfter, fmt.Errorf("it would end at %s, after its issuer's chain at %s", stamp(r.NotAfter), stamp(i.notAfter))
	}
	return notBefore, r.NotAfter, nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// crossable says why an existing authority cannot be certified by another one.
func (r *CARequest) crossable() error {
	c := r.Existing
	if err := checkSigningCertificate(c); err != nil {
		return fmt.Errorf("certificate %q: %w", c.Subject, err)
	}
	for _, u := range c.URIs {
		if u.String() != r.Domain.URI() {
			return fmt.Errorf("certificate %q is of %s, not of trust domain %s; authorities are never shared between domains (D10)", c.Subject, u, r.Domain)
		}
	}
	for _, e := range c.Extensions {
		if e.Id.Equal(oidNameConstraints) {
			return fmt.Errorf("certificate %q has name constraints, which a cross-certificate would lift", c.Subject)
		}
	}
	if c.MaxPathLen >= 0 && (r.PathLen < 0 || r.PathLen > c.MaxPathLen) {
		return fmt.Errorf("certificate %q has path length %d, which a cross-certificate should not widen", c.Subject, c.MaxPathLen)
	}
	return nil
}

var oidNameConstraints = asn1.ObjectIdentifier{2, 5, 29, 30}

// signingName returns a subject that no other signing certificate has: path building among many roots of one name
// tries them all, and common verifiers give up after a hundred signatures.
func signingName(r *CARequest, ski []byte) ([]byte, error) {
	name := pkix.Name{
		Organization: []string{r.Domain.String()},
		CommonName:   fmt.Sprintf("chancery %s %s", r.CommonName, hex.EncodeToString(ski[:6])),
	}
	if len(r.Domain.String()) > 64 { // RFC 5280 appendix A.1, ub-organization-name
		name.Organization = nil
	}
	der, err := asn1.Marshal(name.ToRDNSequence())
	if err != nil {
		return nil, fmt.Errorf("encoding subject: %w", err)
	}
	return der, nil
}
