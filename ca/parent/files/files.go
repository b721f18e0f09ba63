// Package files owns issuers signed by a parent whose certificate and key lie in files, in the layouts of a plugged-in issuer
// (ca/files): the CA in the files then signs short-lived issuers instead of workloads' certificates, and can be swapped for
// another one under the same root.
//
// It refuses to sign but through Prepare and Issue, as every certificate here is signed (invariant 1).
package files

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/trust"
)

// Config says where the parent lies.
type Config struct {
	Dir    string
	Layout files.Layout
	Domain trust.Domain
	TTL    time.Duration
	Log    *audit.Log
	LogID  func() uint32 // that leads serials
}

// Parent is a CA in files.
type Parent struct{ config Config }

// New returns a parent. The files are read for each signature.
func New(c Config) *Parent { return &Parent{c} }

// Sign signs with the CA that lies in the files now. The roots there vouch for the files' own consistency only; the
// authority judges the answer by the roots that it was set up with.
func (p *Parent) Sign(ctx context.Context, der []byte) ([]*x509.Certificate, error) {
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("reading our own request: %w", err)
	}
	c := p.config
	set, err := files.Read(c.Dir, c.Layout)
	if err != nil {
		return nil, err
	}
	bundle, err := trust.NewBundle(c.Domain, 1, set.Roots)
	if err != nil {
		return nil, fmt.Errorf("folder %s: %w", c.Dir, err)
	}
	signer, err := ca.NewIssuer(ca.IssuerConfig{Domain: c.Domain, Key: set.Key, Chain: set.Chain, Bundle: bundle, LogID: c.LogID(), Log: c.Log})
	if err != nil {
		return nil, fmt.Errorf("folder %s: %w", c.Dir, err)
	}
	cert, err := signer.SignIssuer(ctx, csr.PublicKey, c.TTL, audit.Requester{Method: "issuer renewal by parent files"})
	if err != nil {
		return nil, fmt.Errorf("folder %s: %w", c.Dir, err)
	}
	return append([]*x509.Certificate{cert}, signer.Chain()...), nil
}
