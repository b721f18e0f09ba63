package ca

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/lint"
	"github.com/chancery-project/chancery/ca/tbs"
)

// CRLRequest asks for one CRL.
type CRLRequest struct {
	Number     *big.Int // above that of every earlier CRL of the issuer (RFC 5280 section 5.2.3); the caller sees to it
	ThisUpdate time.Time
	NextUpdate time.Time
	Revoked    []x509.RevocationListEntry // serial, time and reason are used; none makes an empty CRL
	// UserCertsOnly says so in the CRL (critical, RFC 5280 section 5.2.5): for an issuer below which there are leaves only.
	UserCertsOnly bool
	Requester     audit.Requester
}

// DraftCRL validates the request, writes the CRL and lints it. Draft.Prepare and IssueCRL do the rest, in the two steps
// that certificates take.
func (i *Issuer) DraftCRL(r CRLRequest) (*Draft, error) {
	now := time.Now()
	if r.Number == nil {
		return nil, errors.New("a CRL needs a number")
	}
	c := &tbs.CRL{
		Algorithm: i.algorithm.ID, Issuer: i.name, ThisUpdate: r.ThisUpdate, NextUpdate: r.NextUpdate, Number: r.Number, AKI: i.ski,
		UserCertsOnly: r.UserCertsOnly,
	}
	for _, e := range r.Revoked {
		if e.SerialNumber == nil {
			return nil, errors.New("a revoked certificate has no serial number")
		}
		c.Entries = append(c.Entries, tbs.CRLEntry{Serial: e.SerialNumber, Time: e.RevocationTime, Reason: e.ReasonCode})
	}
	message, err := c.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encoding CRL: %w", err)
	}
	unsigned, err := tbs.Assemble(message, i.algorithm.ID, []byte{0})
	if err != nil {
		return nil, fmt.Errorf("encoding CRL: %w", err)
	}
	crl, err := x509.ParseRevocationList(unsigned)
	if err != nil {
		return nil, fmt.Errorf("the CRL to sign does not parse: %w", err)
	}
	l := lint.CRL{
		CRL: crl, Now: now, IssuerName: i.name, IssuerSKI: i.ski, IssuerNotAfter: i.notAfter, Number: r.Number, Entries: len(r.Revoked),
		UserCertsOnly: r.UserCertsOnly,
	}
	if err := l.Run(); err != nil {
		return nil, err
	}
	sum := sha256.Sum256(message)
	intent := audit.Record{
		Event: audit.Intent, SPIFFEID: i.domain.URI(), Profile: "crl", Issuer: i.SKI(), NotAfter: &crl.NextUpdate,
		TBSHash: hex.EncodeToString(sum[:]), Detail: fmt.Sprintf("CRL %s, %d revoked", r.Number, len(r.Revoked)), Requester: r.Requester,
	}
	return &Draft{issuer: i, message: message, crl: crl, intent: intent, notAfter: crl.NextUpdate, made: now}, nil
}

// IssueCRL redeems the token of a CRL's draft, as Issue does that of a certificate's, and returns the CRL in DER.
func (i *Issuer) IssueCRL(_ context.Context, t *Token) ([]byte, error) {
	if !t.crl {
		return nil, errors.New("the token is for a certificate")
	}
	return i.redeem(t)
}
