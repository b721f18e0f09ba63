package signers

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/revocation"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/answers"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/trust"
)

// The API's bounds on certificates of pods (decision D20), and on when they begin to be refreshed.
const (
	leastLife    = time.Hour
	refreshClear = 10 * time.Minute // of either end
)

// Config is what a Signer is made of.
type Config struct {
	Domain trust.Domain
	// IssuerFor returns the issuer of an identity and the name that it has there; an error means not ready.
	IssuerFor func(trust.ID) (*ca.Issuer, trust.ID, error)
	// IssuerOf returns the issuer of an identity exactly as it is; an error that wraps ca.ErrName means that the plan does not allow it.
	IssuerOf func(trust.ID) (*ca.Issuer, error)
	Profile  *ca.Profile
	// Cluster is the name of the cluster whose API server is asked, and Alive whether a pod lives there, as csr.Cluster has it.
	Cluster string
	Alive   func(ctx context.Context, namespace, account, node string, hash []byte) error
	// PodLife is how long certificates of pods live, backdating included, unless the request wants less.
	PodLife time.Duration
	// Requesters says which paths of IDs each user may have by CertificateSigningRequest.
	Requesters map[string]*ca.Profile
	// Root appends the root to chains of CertificateSigningRequests.
	Root        bool
	Log         *audit.Log
	Sampler     *ca.Sampler
	Ledger      *evidence.Ledger
	Issued      func(api, id string, notAfter time.Time) // told of each certificate; may be nil
	Revocations func() *revocation.Set                   // nil: nothing is ever revoked
	Logger      *slog.Logger
}

// Signer signs. Its methods are safe for concurrent use.
type Signer struct {
	config  Config
	chains  answers.Cache
	denials *rate.Limiter // of audit records that requests can cause
}

// New returns a signer.
func New(c Config) *Signer { return &Signer{config: c, denials: rate.NewLimiter(10, 200)} }

// API is what certificates count as that are issued here, beside the two APIs of csr.
const API = "kubernetes"

// Signed is a certificate as a request's status has it.
type Signed struct {
	Chain                        []byte // PEM, the leaf first
	NotBefore, NotAfter, Refresh time.Time
	ID                           string
}

// Refusal is why nothing was signed.
type Refusal struct {
	Final  bool   // the request can never be met; else another try may
	Reason string // stable; one of the API's for conditions, or of csr
	Detail string
}

// Error returns reason and detail.
func (r *Refusal) Error() string { return r.Reason + ": " + r.Detail }

// Reasons of final refusals, as conditions have them. The first two are the API's.
const (
	ReasonKeyType     = "UnsupportedKeyType"
	ReasonAnnotations = "InvalidUnverifiedUserAnnotations"
	ReasonRequest     = "InvalidRequest"
	ReasonRequester   = "RequesterNotAllowed"
	ReasonNames       = "NamesNotAllowed"
	ReasonUsages      = "UnsupportedUsages"
)

func never(reason, format string, args ...any) *Refusal {
	return &Refusal{Final: true, Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

func later(reason, format string, args ...any) *Refusal {
	return &Refusal{Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// order is one certificate that is asked for.
type order struct {
	id          trust.ID
	exact       bool // this very name or none, also during a migration
	key         crypto.PublicKey
	attestation *ca.Attestation
	ttl         time.Duration // if life is not bounded
	least, most time.Duration // of NotAfter - NotBefore; 0: not bounded
	root        bool          // in the chain
	requester   audit.Requester
	node        string
}

// sign has an order signed.
func (s *Signer) sign(ctx context.Context, o order) (*Signed, *Refusal) {
	var id trust.ID
	var err error
	shared := evidence.Enter(s.config.Ledger, func() (*answers.Chains, *evidence.Calls) {
		var issuer *ca.Issuer
		if id = o.id; o.exact {
			issuer, err = s.config.IssuerOf(id)
		} else {
			issuer, id, err = s.config.IssuerFor(id)
		}
		if err != nil {
			return nil, nil
		}
		r := s.chains.Of(issuer, s.config.Ledger)
		return r, r.Calls()
	})
	defer shared.Leave()
	switch {
	case errors.Is(err, ca.ErrName):
		return nil, refusal(err)
	case err != nil:
		return nil, later(csr.ReasonNotReady, "%v", err)
	}
	if s.revoked(o.id) || s.revoked(id) {
		return nil, later(csr.ReasonRevoked, "%s is revoked; it gets no certificate before an admin restores it", id)
	}
	issuer := shared.Issuer()
	draft, err := s.draft(issuer, o, id)
	if err != nil {
		return nil, refusal(err)
	}
	switch until, err := s.config.Ledger.Reserve(ctx, draft.Certificate().NotAfter); {
	case err != nil:
		return nil, later(csr.ReasonNotReady, "%v", err)
	case !until.IsZero(): // others could not be told of it
		issuer = issuer.Until(until)
		if draft, err = s.draft(issuer, o, id); err != nil {
			return nil, refusal(err)
		}
	}
	leaf := draft.Certificate()
	token, err := draft.Prepare()
	if err != nil {
		return nil, refusal(err)
	}
	cert, err := issuer.Issue(ctx, token)
	if err != nil {
		return nil, refusal(err)
	}
	s.count(o, id, cert, shared)
	return s.answer(o, id, cert, leaf, shared.Issuer()), nil
}

func (s *Signer) revoked(id trust.ID) bool {
	return s.config.Revocations != nil && s.config.Revocations().Identity(id.String())
}

// count tells all who count certificates. Each of these counts until it ends: nobody knows whether a pod uses the next one (decision D3).
func (s *Signer) count(o order, id trust.ID, cert *ca.Certificate, shared *answers.Chains) {
	s.config.Sampler.Offer(cert)
	if s.config.Issued != nil {
		s.config.Issued(API, id.String(), cert.NotAfter)
	}
	name := id.String()
	s.config.Ledger.ToClient(evidence.Client{
		Cluster: s.config.Cluster, Identity: name, Caller: name, Place: o.node, Remote: o.requester.CredentialID,
	}, shared.Leaf(cert))
}

// draft drafts the certificate. Where its life is bounded, backdating included, the draft shows what that comes to, and the next one has the
// difference made up for.
func (s *Signer) draft(i *ca.Issuer, o order, id trust.ID) (*ca.Draft, error) {
	r := ca.Request{ID: id, PublicKey: o.key, TTL: o.ttl, Attestation: o.attestation, Requester: o.requester}
	if o.most == 0 {
		return i.Draft(s.config.Profile, r)
	}
	r.TTL = o.most
	for range 4 { // the seconds may have changed in between
		d, err := i.Draft(s.config.Profile, r)
		if err != nil {
			return nil, err
		}
		switch life := d.Certificate().NotAfter.Sub(d.Certificate().NotBefore); {
		case life <= o.most && life >= o.least:
			return d, nil
		case life < o.least && !d.Certificate().NotAfter.Before(i.NotAfter()):
			return nil, tooShort(i, o.least)
		default: // longer by what it is backdated, or shorter since the issuer is younger than that
			r.TTL += o.most - life
		}
	}
	return nil, fmt.Errorf("%w: no lifetime between %s and %s comes out of profile %s", ca.ErrNotReady, o.least, o.most, s.config.Profile.Name())
}

func tooShort(i *ca.Issuer, least time.Duration) error {
	return fmt.Errorf("%w: the issuer's chain ends at %s, and certificates of pods live for %s at least", ca.ErrNotReady, i.NotAfter().UTC().Format(time.RFC3339), least)
}

func (s *Signer) answer(o order, id trust.ID, cert *ca.Certificate, leaf *x509.Certificate, i *ca.Issuer) *Signed {
	chain := trust.EncodeCertificates(&x509.Certificate{Raw: cert.DER})
	chain = append(chain, trust.EncodeCertificates(i.Chain()...)...)
	if o.root {
		chain = append(chain, trust.EncodeCertificates(i.Bundle().All()...)...) // with those of a migration's other domain
	}
	return &Signed{Chain: chain, NotBefore: leaf.NotBefore, NotAfter: leaf.NotAfter, Refresh: refreshAt(leaf.NotBefore, leaf.NotAfter, time.Now()), ID: id.String()}
}

// refreshAt is when half of the life is over that is left, give or take a tenth, so that pods which started together do not come together
// again.
func refreshAt(notBefore, notAfter, now time.Time) time.Time {
	left := notAfter.Sub(now)
	at := now.Add(left*2/5 + rand.N(left/5+1)).Truncate(time.Second)
	if least := notBefore.Add(refreshClear); at.Before(least) {
		at = least
	}
	if most := notAfter.Add(-refreshClear); at.After(most) {
		at = most
	}
	return at
}

// refusal maps the errors of package ca. What depends on the config is no final refusal.
func refusal(err error) *Refusal {
	switch {
	case errors.Is(err, ca.ErrKey):
		return never(ReasonKeyType, "%v", err)
	case errors.Is(err, ca.ErrName):
		return later(csr.ReasonIdentity, "%v", err)
	case errors.Is(err, ca.ErrNotReady):
		return later(csr.ReasonNotReady, "%v", err)
	}
	return later(csr.ReasonInternal, "%v", err)
}

// denied puts a refusal into the audit log. Nothing was signed, so nobody waits for the disk.
func (s *Signer) denied(r *Refusal, asked string, who audit.Requester) {
	if !s.denials.Allow() {
		return
	}
	const most = 500
	detail := r.Detail
	if len(detail) > most {
		detail = strings.ToValidUTF8(detail[:most], "") + "..."
	}
	err := s.config.Log.Note(audit.Record{Event: audit.Denied, SPIFFEID: asked, Reason: r.Reason, Detail: detail, Requester: who})
	if err != nil {
		s.config.Logger.Error("refusal not written to the audit log", "reason", err.Error())
	}
}
