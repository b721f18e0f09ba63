package held

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/document"
)

// This file opens issuers for their CRLs.

// CRLSigner is an issuer that may have live leaves, or will have.
type CRLSigner struct {
	ID       string
	Chain    []*x509.Certificate // its own, and those between it and the root
	Issuer   *ca.Issuer          // nil if it cannot sign a CRL; Why says why
	Why      error
	Retry    bool   // its key is somewhere, and may open another time
	CRL      []byte // its last one, where one is kept
	KeepCRL  bool   // its key lies outside: the last CRL should be kept
	MaxTTL   time.Duration
	NotAfter time.Time // of its certificate
}

// CRLSigners returns the issuers whose CRLs verifiers need, one for each name and key.
func (h *Issuers) CRLSigners(ctx context.Context, doc *document.Document) ([]CRLSigner, error) {
	c := h.config
	state := doc.Of(c.Domain)
	if state == nil {
		return nil, fmt.Errorf("the authority document has nothing for trust domain %s", c.Domain)
	}
	if c.May != nil {
		if err := c.May(); err != nil {
			return nil, err
		}
	}
	var out []CRLSigner
	now, maxTTL := time.Now(), MaxTTL(c.Profiles)
	for _, want := range []document.AuthorityState{document.StateActive, document.StatePrepared, document.StateRetiring} {
		for i := range state.Authorities {
			x := &state.Authorities[i]
			if x.Kind != document.KindIssuer || x.State != want {
				continue
			}
			chain, err := x.Certificates()
			if err != nil {
				return nil, err
			}
			live := ca.LeafTTLLimit // whatever the profile was
			if !x.HasKey() {        // no longer than needed: one that cannot sign ends the CRLs of all
				live = maxTTL + time.Minute
			}
			if now.After(chain[0].NotAfter) || now.After(state.LastSigned(x).Add(live)) || signsAlready(out, chain[0]) {
				continue
			}
			s := CRLSigner{ID: x.ID, Chain: chain, CRL: x.CRL, KeepCRL: !x.HasKey(), MaxTTL: maxTTL, NotAfter: chain[0].NotAfter}
			s.Issuer, s.Retry, s.Why = h.crlIssuer(ctx, doc, x, chain[0])
			out = append(out, s)
		}
	}
	return out, nil
}

func signsAlready(all []CRLSigner, cert *x509.Certificate) bool {
	for _, s := range all {
		if bytes.Equal(s.Chain[0].RawSubject, cert.RawSubject) && bytes.Equal(s.Chain[0].SubjectKeyId, cert.SubjectKeyId) {
			return true
		}
	}
	return false
}

// crlIssuer opens an issuer once. After an error, retry says whether it may work another time.
func (h *Issuers) crlIssuer(ctx context.Context, doc *document.Document, x *document.Authority, cert *x509.Certificate) (_ *ca.Issuer, retry bool, _ error) {
	if cert.KeyUsage&x509.KeyUsageCRLSign == 0 {
		return nil, false, errors.New("its certificate's key usage lacks cRLSign, so no verifier takes a CRL of it")
	}
	if have, ok := h.Get(x.ID); ok && bytes.Equal(have.Certificate().RawSubject, cert.RawSubject) { // one key may have been certified under two names
		return have.Issuer, false, nil
	}
	if !x.HasKey() {
		if h.config.Plugged && x.State != document.StateRetiring {
			return nil, true, h.config.Lacks(x) // the files may get it
		}
		return nil, false, errors.New("its key is not here any more")
	}
	use, err := h.Open(ctx, doc, x)
	if err != nil {
		return nil, true, err
	}
	h.Keep(use)
	return use.Issuer, false, nil
}
