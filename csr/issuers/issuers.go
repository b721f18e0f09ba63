// Package issuers owns the API by which a server signs issuers of other servers of its trust domain: chancery.v1.Issuers.
//
// It refuses everyone whom the config does not list, and who comes with a certificate alone: what it gives outlives the caller
// and can sign any identity. Path length and longest lifetime are the config's; of a CSR only the key is used (invariant 2).
package issuers

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/trust"
)

// maxCSR bounds a CSR in DER; one of an ML-DSA-65 key has under 6 kB.
const maxCSR = 16 << 10

// Grant is what one caller may have.
type Grant struct {
	MaxLifetime time.Duration
	PathLen     int // how many CAs may stand below its issuer
}

// Config says who may have what, and who signs.
type Config struct {
	Domain  trust.Domain
	Present func() trust.Domain // what the line of Domain is now; nil: that
	Grants  map[trust.ID]Grant  // identities in Domain
	Sign    func(context.Context, crypto.PublicKey, ca.IssuerTerms, audit.Requester) ([]*x509.Certificate, error)
}

// Describe describes the API for csr.NewServer; callers are those of s.
func Describe(s *csr.Service, c Config) *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: chanceryv1.Issuers_ServiceDesc.ServiceName, Metadata: chanceryv1.Issuers_ServiceDesc.Metadata,
		HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{s.Method("issuers", "SignIssuer", c.sign)},
	}
}

func (c Config) sign(ctx context.Context, call csr.Call) (proto.Message, *csr.Denial) {
	grant, ok := c.Grants[call.ID.WithDomain(c.Domain)] // the caller's identity is the same in each domain of the line
	switch {
	case !ok:
		return nil, denied(codes.PermissionDenied, csr.ReasonIdentity, "%s may not have an issuer: it is not listed in issuers of the server's config", call.ID)
	case call.Method != csr.MethodToken:
		return nil, denied(codes.PermissionDenied, csr.ReasonNoCredential, "%s should come with a token: for an issuer a certificate is not enough", call.ID)
	}
	r := new(chanceryv1.SignIssuerRequest)
	if err := call.Read(r); err != nil {
		return nil, denied(codes.InvalidArgument, csr.ReasonCSR, "the request does not parse: %v", err)
	}
	ttl, d := lifetimeOf(r, grant)
	if d != nil {
		return nil, d
	}
	td := c.Domain
	if c.Present != nil {
		td = c.Present()
	}
	pub, err := parseCSR(r.GetCsr(), td)
	if err != nil {
		return nil, denied(codes.InvalidArgument, csr.ReasonCSR, "%v", err)
	}
	chain, err := c.Sign(ctx, pub, ca.IssuerTerms{TTL: ttl, PathLen: grant.PathLen}, call.Requester)
	switch {
	case errors.Is(err, ca.ErrKey):
		return nil, denied(codes.InvalidArgument, csr.ReasonCSR, "%v", err)
	case errors.Is(err, ca.ErrNotReady):
		return nil, &csr.Denial{Code: codes.Unavailable, Reason: csr.ReasonNotReady, Detail: err.Error(), RetryAfter: time.Second}
	case err != nil:
		return nil, denied(codes.Internal, csr.ReasonInternal, "%v", err)
	}
	resp := new(chanceryv1.SignIssuerResponse)
	for _, x := range chain {
		resp.Chain = append(resp.Chain, x.Raw)
	}
	return resp, nil
}

func denied(code codes.Code, reason, format string, args ...any) *csr.Denial {
	return &csr.Denial{Code: code, Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// lifetimeOf clamps what is asked for to what the caller may have; what overflows is an error (decision D20).
func lifetimeOf(r *chanceryv1.SignIssuerRequest, g Grant) (time.Duration, *csr.Denial) {
	l := r.GetLifetime()
	if l == nil {
		return g.MaxLifetime, nil
	}
	_, err := ca.Seconds(l.GetSeconds())
	if err == nil {
		err = l.CheckValid()
	}
	if err != nil {
		return 0, denied(codes.InvalidArgument, csr.ReasonLifetime, "%v", err)
	}
	if asked := l.AsDuration(); asked > 0 && asked < g.MaxLifetime {
		return max(asked, ca.MinTTL), nil
	}
	return g.MaxLifetime, nil
}

// parseCSR returns the key of a request that proves possession of it. The subject is not looked at: issuers are named by us.
func parseCSR(der []byte, td trust.Domain) (crypto.PublicKey, error) {
	if len(der) == 0 || len(der) > maxCSR {
		return nil, fmt.Errorf("the CSR has %d bytes of DER; 1 to %d are read", len(der), maxCSR)
	}
	req, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("the CSR does not parse: %w", err)
	}
	if _, err := ca.TypeOf(req.PublicKey); err != nil {
		return nil, fmt.Errorf("the CSR's key: %w", err)
	}
	if err := req.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the CSR's signature does not prove possession of its key: %w", err)
	}
	if len(req.DNSNames)+len(req.EmailAddresses)+len(req.IPAddresses) > 0 || len(req.URIs) > 1 || len(req.URIs) == 1 && req.URIs[0].String() != td.URI() {
		return nil, fmt.Errorf("the CSR asks for names; an issuer of this trust domain may have the URI %s only", td.URI())
	}
	return req.PublicKey, nil
}
