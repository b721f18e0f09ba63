package ca

import (
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/tbs"
	"github.com/chancery-project/chancery/ca/zlint"
	"github.com/chancery-project/chancery/trust"
)

// Draft is a certificate or CRL that was validated, written and linted, and neither logged nor signed yet: what a
// ceremony shows before anything happens. It is good for one Prepare, within a minute.
type Draft struct {
	issuer   *Issuer
	message  []byte            // the to-be-signed bytes
	cert     *x509.Certificate // by Draft only
	crl      *x509.RevocationList
	intent   audit.Record
	notAfter time.Time
	made     time.Time
	used     atomic.Bool
}

// Draft does what Prepare does, but for the log: nothing can be signed with a draft alone.
func (i *Issuer) Draft(p *Profile, r Request) (*Draft, error) {
	d, err := i.draft(p, &r)
	if err != nil {
		return nil, err
	}
	unsigned, err := tbs.Assemble(d.message, i.algorithm.ID, []byte{0})
	if err != nil {
		return nil, fmt.Errorf("encoding certificate: %w", err)
	}
	if d.cert, err = x509.ParseCertificate(unsigned); err != nil {
		return nil, fmt.Errorf("the certificate to sign does not parse: %w", err)
	}
	return d, nil
}

func (i *Issuer) draft(p *Profile, r *Request) (*Draft, error) {
	now := time.Now()
	message, c, kt, err := i.build(p, r, now)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(message)
	intent := audit.Record{
		Event: audit.Intent, Serial: hex.EncodeToString(c.Serial), SPIFFEID: c.URIs[0], Profile: p.name, Issuer: i.SKI(),
		NotAfter: &c.NotAfter, KeyType: string(kt), TBSHash: hex.EncodeToString(sum[:]),
		Clamped: r.TTL > 0 && c.NotAfter.Before(now.Add(r.TTL).Truncate(time.Second)), Requester: r.Requester,
	}
	return &Draft{issuer: i, message: message, intent: intent, notAfter: c.NotAfter, made: now}, nil
}

// Prepare writes the intent to the audit log, durably, and gives the token for the signature.
func (d *Draft) Prepare() (*Token, error) {
	switch {
	case d.used.Swap(true):
		return nil, errors.New("the draft was used before")
	case time.Since(d.made) > tokenLife:
		return nil, fmt.Errorf("the draft is older than %s", tokenLife)
	case d.issuer.log == nil:
		return nil, fmt.Errorf("%w: the issuer has no audit log", ErrNotReady)
	}
	d.intent.Time = time.Now()
	if err := d.issuer.log.Append(d.intent); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	return &Token{issuer: d.issuer, message: d.message, intent: d.intent, notAfter: d.notAfter, made: d.made, crl: d.crl != nil}, nil
}

// Certificate returns the certificate as it will be, but for the signature; nil if the draft is of a CRL.
func (d *Draft) Certificate() *x509.Certificate { return d.cert }

// CRL returns the CRL as it will be, but for the signature; nil if the draft is of a certificate.
func (d *Draft) CRL() *x509.RevocationList { return d.crl }

// Zlint runs zlint's RFC lints on the draft; our own ran when it was made.
func (d *Draft) Zlint() error {
	// zlint looks at the signature's length only, so one without a meaning does.
	der, err := tbs.Assemble(d.message, d.issuer.algorithm.ID, make([]byte, 64))
	if err != nil {
		return err
	}
	if d.crl != nil {
		return zlint.CRL(der)
	}
	return zlint.Certificate(der)
}

// Issuer returns the issuer that the drafted signing certificate makes of a key, so that what it shall sign can be
// drafted before it exists.
func (d *Draft) Issuer(key crypto.Signer) (*Issuer, error) {
	if d.cert == nil || !d.cert.IsCA {
		return nil, errors.New("the draft is not of a signing certificate")
	}
	if !trust.SameKey(d.cert.PublicKey, key.Public()) {
		return nil, fmt.Errorf("the private key does not belong to the drafted certificate %q", d.cert.Subject)
	}
	alg, err := algorithmOf(key.Public())
	if err != nil {
		return nil, err
	}
	i := &Issuer{
		domain: d.issuer.domain, name: d.cert.RawSubject, ski: d.cert.SubjectKeyId, key: key, algorithm: alg,
		notBefore: d.cert.NotBefore, notAfter: d.cert.NotAfter, pathLen: d.cert.MaxPathLen, logID: d.issuer.logID, log: d.issuer.log,
	}
	if d.issuer.notAfter.Before(i.notAfter) {
		i.notAfter = d.issuer.notAfter
	}
	return i, nil
}
