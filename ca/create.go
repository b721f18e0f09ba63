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
	KeyType   KeyType       // of both keys; default p256
	RootTTL   time.Duration // default 10 years
	IssuerTTL time.Duration // default 7 days
	LogID     uint32
	Log       *audit.Log
	Requester audit.Requester
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
	rootKey, err := GenerateKey(c.KeyType)
	if err != nil {
		return nil, fmt.Errorf("making root key: %w", err)
	}
	self, err := selfIssuer(c, rootKey)
	if err != nil {
		return nil, err
	}
	root, err := self.issueCA(ctx, rootProfile(c.RootTTL), rootKey.Public(), "root", -1, c.Requester)
	if err != nil {
		return nil, fmt.Errorf("making root: %w", err)
	}
	issuer, issuerKey, err := self.NewIssuer(ctx, c.IssuerTTL, c.Requester)
	if err != nil {
		return nil, err
	}
	return &Created{Root: root, Issuer: issuer, RootKey: rootKey, IssuerKey: issuerKey}, nil
}

// selfIssuer returns an issuer for a root that does not exist yet: it signs its own certificate first.
func selfIssuer(c CreateConfig, key crypto.Signer) (*Issuer, error) {
	alg, err := algorithmOf(key.Public())
	if err != nil {
		return nil, err
	}
	spki, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, fmt.Errorf("encoding root key: %w", err)
	}
	ski, err := keyID(spki)
	if err != nil {
		return nil, err
	}
	name, err := signingName(&CARequest{Domain: c.Domain, CommonName: "root"}, ski)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &Issuer{
		domain: c.Domain, name: name, ski: ski, key: key, algorithm: alg, notBefore: now.Add(-DefaultBackdate),
		notAfter: now.Add(c.RootTTL).Truncate(time.Second), logID: c.LogID, log: c.Log,
	}, nil
}

// NewIssuer makes an issuer under i, which is a root, with a new key of the root's type.
func (i *Issuer) NewIssuer(ctx context.Context, ttl time.Duration, who audit.Requester) (*x509.Certificate, crypto.Signer, error) {
	kt, err := TypeOf(i.key.Public())
	if err != nil {
		return nil, nil, err
	}
	key, err := GenerateKey(kt)
	if err != nil {
		return nil, nil, fmt.Errorf("making issuer key: %w", err)
	}
	cert, err := i.issueCA(ctx, issuerProfile(ttl), key.Public(), "issuer", 0, who)
	if err != nil {
		return nil, nil, fmt.Errorf("making issuer: %w", err)
	}
	return cert, key, nil
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
func (t *template) signing(r *CARequest) (err error) {
	t.ca, t.pathLen, t.uri = true, r.PathLen, r.Domain.URI()
	t.keyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	t.subject, err = signingName(r, t.ski)
	return err
}

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
