package ca

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/mldsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/lint"
	"github.com/chancery-project/chancery/ca/tbs"
	"github.com/chancery-project/chancery/trust"
)

// Errors that callers tell apart. All others are faults of ours.
var (
	// ErrKey: the public key is of a kind that is not certified.
	ErrKey = errors.New("key refused")
	// ErrName: the identity may not be issued under this profile or by this issuer.
	ErrName = errors.New("name refused")
	// ErrNotReady: nothing can be issued at the moment, because the issuer has expired or the log cannot be written.
	ErrNotReady = errors.New("not ready to issue")
)

// Log IDs are 31 bits with the top byte in use, so that every serial has exactly 20 octets (decision D13).
const (
	MinLogID = 1 << 24
	MaxLogID = 1<<31 - 1
)

// tokenLife bounds the time between Prepare and Issue; what was validated then should still hold.
const tokenLife = time.Minute

// Issuer signs certificates of one trust domain with one key. It is immutable; a rotation makes a new one.
type Issuer struct {
	domain    trust.Domain
	name      []byte // DER of the issuing certificate's subject
	ski       []byte
	key       crypto.Signer
	algorithm tbs.Algorithm
	cert      *x509.Certificate
	chain     []*x509.Certificate
	bundle    *trust.Bundle
	notBefore time.Time
	notAfter  time.Time // the earliest end in the chain, root included (invariant 3)
	pathLen   int       // how many signing certificates may stand between it and a leaf; below 0: no bound
	logID     uint32
	log       *audit.Log
}

// IssuerConfig holds what an issuer is made of.
type IssuerConfig struct {
	Domain trust.Domain
	Key    crypto.Signer
	Chain  []*x509.Certificate // the issuing certificate first, then others up to the root, which may be left out
	Bundle *trust.Bundle       // the roots that verifiers have
	LogID  uint32              // MinLogID to MaxLogID, leads every serial
	Log    *audit.Log
}

// NewIssuer checks the parts against each other: the key is the certificate's, the certificate may sign, the chain
// verifies against the bundle at this time. Errors say which part is wrong.
func NewIssuer(c IssuerConfig) (*Issuer, error) {
	if len(c.Chain) == 0 {
		return nil, errors.New("no issuing certificate")
	}
	if c.LogID < MinLogID || c.LogID > MaxLogID {
		return nil, fmt.Errorf("log ID %d is not between %d and %d", c.LogID, MinLogID, MaxLogID)
	}
	cert := c.Chain[0]
	if !trust.SameKey(cert.PublicKey, c.Key.Public()) {
		return nil, fmt.Errorf("the private key does not belong to the issuing certificate %q", cert.Subject)
	}
	alg, err := algorithmOf(cert.PublicKey)
	if err != nil {
		return nil, err
	}
	if err := checkSigningCertificate(cert); err != nil {
		return nil, fmt.Errorf("issuing certificate %q: %w", cert.Subject, err)
	}
	path, err := verifySigningChain(c.Chain, c.Bundle, time.Now())
	if err != nil {
		return nil, fmt.Errorf("issuing certificate %q: %w", cert.Subject, err)
	}
	if of := c.Bundle.Of(c.Domain); of == nil || !slices.ContainsFunc(of.Roots(), path[len(path)-1].Equal) { // nobody would take its leaves (decision D10)
		return nil, fmt.Errorf("issuing certificate %q: its root %q is not one of trust domain %s", cert.Subject, path[len(path)-1].Subject, c.Domain)
	}
	i := &Issuer{
		domain: c.Domain, name: cert.RawSubject, ski: cert.SubjectKeyId, key: c.Key, algorithm: alg, cert: cert, bundle: c.Bundle,
		chain: path[:len(path)-1], notBefore: cert.NotBefore, notAfter: cert.NotAfter, pathLen: -1, logID: c.LogID, log: c.Log,
	}
	for above, x := range path {
		if x.NotAfter.Before(i.notAfter) {
			i.notAfter = x.NotAfter
		}
		if x.MaxPathLen >= 0 && (i.pathLen < 0 || x.MaxPathLen-above < i.pathLen) {
			i.pathLen = x.MaxPathLen - above
		}
	}
	return i, nil
}

func checkSigningCertificate(cert *x509.Certificate) error {
	switch {
	case !cert.BasicConstraintsValid || !cert.IsCA:
		return errors.New("it is not a CA certificate (basicConstraints cA is not true)")
	case cert.KeyUsage&x509.KeyUsageCertSign == 0:
		return errors.New("its key usage lacks keyCertSign")
	case len(cert.RawSubject) <= 2:
		return errors.New("its subject is empty; verifiers could not find it")
	case len(cert.SubjectKeyId) == 0:
		return errors.New("it has no subject key identifier")
	}
	return nil
}

// verifySigningChain returns the path from the issuing certificate to a root of the bundle.
func verifySigningChain(chain []*x509.Certificate, b *trust.Bundle, now time.Time) ([]*x509.Certificate, error) {
	path, err := b.PathTo(chain, now)
	if err != nil {
		return nil, fmt.Errorf("it does not verify against the roots: %w", err)
	}
	// PathTo took the issuing certificate for the leaf; under it there is one more.
	for below, c := range path {
		if c.MaxPathLen >= 0 && below > c.MaxPathLen { // -1 if there is no limit
			return nil, fmt.Errorf("%q allows %d signing certificates below it (path length), and there are %d: nothing it issues would verify", c.Subject, c.MaxPathLen, below)
		}
	}
	return path, nil
}

// Domain returns the trust domain whose identities the issuer signs.
func (i *Issuer) Domain() trust.Domain { return i.domain }

// Chain returns the issuing certificate and its intermediates, without the root; empty if the root itself issues.
// Together with Bundle it is what a client needs next to its leaf, of one snapshot (invariant 6).
func (i *Issuer) Chain() []*x509.Certificate { return i.chain }

// Certificate returns the issuing certificate, also where it is a root.
func (i *Issuer) Certificate() *x509.Certificate { return i.cert }

// Bundle returns the roots that verify what the issuer signs.
func (i *Issuer) Bundle() *trust.Bundle { return i.bundle }

// NotAfter returns the earliest end in the issuer's chain, root included.
func (i *Issuer) NotAfter() time.Time { return i.notAfter }

// Until returns an issuer that is i in all but that what it signs ends by a time, if its chain does not end before.
func (i *Issuer) Until(end time.Time) *Issuer {
	bounded := *i
	if end = end.Truncate(time.Second); end.Before(i.notAfter) {
		bounded.notAfter = end
	}
	return &bounded
}

// SKI returns the issuing certificate's subject key identifier in hex; the authority document names issuers by it.
func (i *Issuer) SKI() string { return hex.EncodeToString(i.ski) }

// Token is the right to one signature, given by Prepare after validation, lint and log. It can be redeemed once, at
// the issuer that gave it, within a minute.
type Token struct {
	issuer   *Issuer
	message  []byte // the to-be-signed bytes
	intent   audit.Record
	notAfter time.Time
	made     time.Time
	crl      bool // for a CRL, not a certificate
	used     atomic.Bool
}

// NotAfter returns when the certificate ends that the token is for.
func (t *Token) NotAfter() time.Time { return t.notAfter }

// check verifies a certificate against its issuer, as a peer would.
func (c *Certificate) check() error {
	cert, err := x509.ParseCertificate(c.DER)
	if err != nil {
		return err
	}
	return c.Issuer.algorithm.Check(c.Issuer.key.Public(), cert.RawTBSCertificate, cert.Signature)
}

// Certificate is an issued certificate with the issuer that signed it.
type Certificate struct {
	DER      []byte
	Serial   string // hex
	NotAfter time.Time
	Issuer   *Issuer
}

// Prepare validates the request, builds and lints the certificate and writes the intent to the audit log, durably.
// Errors wrap ErrKey, ErrName or ErrNotReady where the cause is the request's or the moment's.
func (i *Issuer) Prepare(p *Profile, r Request) (*Token, error) {
	d, err := i.draft(p, &r)
	if err != nil {
		return nil, err
	}
	return d.Prepare()
}

// Issue redeems a token: it signs the very bytes that Prepare linted and logs the result. A crash between the
// signature and the log of the result leaves an intent alone: readers must count it as issued.
func (i *Issuer) Issue(_ context.Context, t *Token) (*Certificate, error) {
	if t.crl {
		return nil, errors.New("the token is for a CRL")
	}
	der, err := i.redeem(t)
	if err != nil {
		return nil, err
	}
	return &Certificate{DER: der, Serial: t.intent.Serial, NotAfter: t.notAfter, Issuer: i}, nil
}

// redeem makes the one signature that a token is the right to.
func (i *Issuer) redeem(t *Token) ([]byte, error) {
	switch {
	case t.issuer != i:
		return nil, errors.New("the token is of another issuer")
	case t.used.Swap(true):
		return nil, errors.New("the token was used before")
	case time.Since(t.made) > tokenLife:
		return nil, fmt.Errorf("the token is older than %s", tokenLife)
	}
	result := audit.Record{Event: audit.Issued, Serial: t.intent.Serial, SPIFFEID: t.intent.SPIFFEID}
	what := "certificate " + t.intent.Serial
	if t.crl {
		what, result.Profile, result.Issuer, result.Detail = t.intent.Detail, t.intent.Profile, t.intent.Issuer, t.intent.Detail
	}
	der, err := i.sign(t.message)
	if err != nil {
		result.Event, result.Reason, result.Detail = audit.Failed, "SIGNING_FAILED", err.Error()
		return nil, errors.Join(fmt.Errorf("signing %s: %w", what, err), i.log.Note(result))
	}
	sum := sha256.Sum256(der)
	result.CertHash = hex.EncodeToString(sum[:])
	if !t.crl {
		result.Certificate = der
	}
	if err := i.log.Note(result); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	return der, nil
}

func (i *Issuer) sign(message []byte) ([]byte, error) {
	sig, err := crypto.SignMessage(i.key, rand.Reader, message, i.algorithm.Hash)
	if err != nil {
		return nil, err
	}
	if !inProcess(i.key) {
		if err := i.algorithm.Check(i.key.Public(), message, sig); err != nil {
			return nil, err
		}
	}
	return tbs.Assemble(message, i.algorithm.ID, sig)
}

// inProcess reports whether a key is one of Go's own in this process's memory, also behind a type that hides it (package
// keys). Their signatures are checked on a sample in the background (Sampler), and by every agent before use: a check of
// each would cost a fifth of the whole request.
// What another program or device signs is checked each time, before anybody sees it.
func inProcess(key crypto.Signer) bool {
	switch k := key.(type) {
	case *ecdsa.PrivateKey, ed25519.PrivateKey, *rsa.PrivateKey, *mldsa.PrivateKey:
		return true
	case interface{ InProcess() bool }:
		return k.InProcess()
	}
	return false
}

// build returns the to-be-signed bytes for a request, what they say, linted, and the key's type.
func (i *Issuer) build(p *Profile, r *Request, now time.Time) ([]byte, *lint.Contents, KeyType, error) {
	kt, err := TypeOf(r.PublicKey)
	if err != nil {
		return nil, nil, "", fmt.Errorf("%w: %w", ErrKey, err)
	}
	t, err := i.template(p, r, kt, now)
	if err != nil {
		return nil, nil, "", err
	}
	message, err := t.Marshal()
	if err != nil {
		return nil, nil, "", fmt.Errorf("encoding certificate: %w", err)
	}
	contents, err := lint.Read(message)
	if err != nil {
		return nil, nil, "", fmt.Errorf("the certificate to sign does not parse: %w", err)
	}
	if err := i.subject(contents, p, r, t.SPKI, now).Run(); err != nil {
		return nil, nil, "", err
	}
	return message, contents, kt, nil
}

// subject says what our lints hold a certificate against.
func (i *Issuer) subject(c *lint.Contents, p *Profile, r *Request, spki []byte, now time.Time) *lint.Subject {
	s := &lint.Subject{
		Contents: c, Now: now, CA: p.ca, MaxTTL: p.maxTTL, IssuerName: i.name, IssuerSKI: i.ski, IssuerAlgorithm: i.algorithm.ID,
		IssuerNotAfter: i.notAfter, IssuerPathLen: i.pathLen,
		AskedID: r.ID.String(), AskedSPKI: spki, AskedDNS: len(r.DNSNames), AskedIPs: len(r.IPs),
	}
	if r.CA != nil {
		s.AskedID, s.Existing = r.CA.Domain.URI(), r.CA.Existing
	}
	return s
}

func (i *Issuer) template(p *Profile, r *Request, kt KeyType, now time.Time) (*tbs.Template, error) {
	if err := p.allows(r, kt); err != nil {
		return nil, err
	}
	if r.CA == nil && r.ID.Domain() != i.domain {
		return nil, fmt.Errorf("%w: %s is not in trust domain %s", ErrName, r.ID, i.domain)
	}
	notBefore, notAfter, err := i.validity(p, r, now)
	if err != nil {
		return nil, err
	}
	spki, err := tbs.Key(r.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	ski, err := tbs.KeyID(spki)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	t := &tbs.Template{
		Serial: i.serial(), Algorithm: i.algorithm.ID, Issuer: i.name, Subject: tbs.EmptyName,
		NotBefore: notBefore, NotAfter: notAfter, SPKI: spki, SKI: ski, AKI: i.ski,
		KeyUsage: x509.KeyUsageDigitalSignature, URI: r.ID.String(), DNS: r.DNSNames, IPs: r.IPs,
	}
	if kt == RSA && p.keyEncipherment {
		t.KeyUsage |= x509.KeyUsageKeyEncipherment
	}
	if r.CA != nil {
		err = signing(t, r.CA)
	}
	if r.Attestation != nil && err == nil {
		t.Attestation, err = r.Attestation.marshal()
	}
	return t, err
}

// validity returns when a certificate begins and ends: cut to the issuer's chain for those whose lifetime was asked for,
// exact for signing certificates whose dates were.
func (i *Issuer) validity(p *Profile, r *Request, now time.Time) (notBefore, notAfter time.Time, err error) {
	notBefore = now.Add(-p.backdate).Truncate(time.Second)
	if notBefore.Before(i.notBefore) && r.CA == nil {
		notBefore = i.notBefore
	}
	notAfter = now.Add(p.Lifetime(r.TTL)).Truncate(time.Second)
	if r.CA != nil && !r.CA.NotAfter.IsZero() {
		return r.CA.within(i, notBefore)
	}
	if notAfter.After(i.notAfter) {
		notAfter = i.notAfter
	}
	if notAfter.Sub(now) < time.Second {
		err = fmt.Errorf("%w: the issuer's chain ends at %s", ErrNotReady, i.notAfter.UTC().Format(time.RFC3339))
	}
	return notBefore, notAfter, err
}

// serial returns 31 bits of log ID and 128 random bits (decision D13).
func (i *Issuer) serial() []byte {
	s := binary.BigEndian.AppendUint32(make([]byte, 0, 20), i.logID)
	s = s[:20]
	rand.Read(s[4:]) // never fails: the runtime ends the process if the system has no randomness
	return s
}
