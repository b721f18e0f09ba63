package csr

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	istio "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/ca"
)

// istioService is the face that Istio's agents and ztunnel know: istio.v1.auth.IstioCertificateService.
type istioService struct {
	istio.UnimplementedIstioCertificateServiceServer
	*Service
}

const apiIstio = "istio"

// CreateCertificate signs one CSR. The steps, and the codes where they fail:
//  1. authenticate: Unauthenticated "request authenticate failure".
//  2. metadata ImpersonatedIdentity, if given: Unauthenticated "request impersonation authentication failure".
//  3. CSR and lifetime: InvalidArgument; names that are not the identity's: PermissionDenied.
//  4. admission control: ResourceExhausted with RetryInfo.
//  5. no issuer, or the audit log cannot be written: Unavailable (Istio's own CA says Internal here).
//
// The answer's chain has the leaf first, each intermediate an element, all roots in the last element.
func (s istioService) CreateCertificate(ctx context.Context, r *istio.IstioCertificateRequest) (*istio.IstioCertificateResponse, error) {
	start := time.Now()
	resp, c, d := s.createCertificate(ctx, r)
	s.metrics.observe(apiIstio, c.Method, outcome(d), time.Since(start))
	if d == nil {
		return resp, nil
	}
	asked := impersonated(r)
	s.denied(c, asked, d)
	return nil, istioError(c, asked, d)
}

func (s istioService) createCertificate(ctx context.Context, r *istio.IstioCertificateRequest) (*istio.IstioCertificateResponse, caller, *Denial) {
	issuer, err := s.issuer() // one snapshot for leaf, chain and roots (invariant 6)
	if err != nil {
		return nil, caller{}, notReady(err)
	}
	c, d := s.authenticate(ctx)
	if d != nil {
		return nil, c, d
	}
	ttl, err := ca.Seconds(r.GetValidityDuration())
	if err != nil {
		return nil, c, &Denial{Code: codes.InvalidArgument, Reason: ReasonLifetime, Detail: err.Error()}
	}
	der, d := decodePEM(r.GetCsr())
	if d != nil {
		return nil, c, d
	}
	cert, _, d := s.issue(ctx, issuer, c, ask{der, impersonated(r), ttl})
	if d != nil {
		return nil, c, d
	}
	return &istio.IstioCertificateResponse{CertChain: s.rendered.of(issuer).istioChain(cert.DER)}, c, nil
}

func impersonated(r *istio.IstioCertificateRequest) string {
	return r.GetMetadata().GetFields()["ImpersonatedIdentity"].GetStringValue()
}

// istioError gives the messages that Istio's clients know; the reason is in the details.
func istioError(c caller, asked string, d *Denial) error {
	switch {
	case d.Code == codes.Unauthenticated && c.ID.IsZero():
		return d.status("request authenticate failure")
	case asked != "" && (d.Code == codes.Unauthenticated || d.Code == codes.PermissionDenied) && d.Reason != ReasonCSRNames:
		as := *d
		as.Code = codes.Unauthenticated
		return as.status("request impersonation authentication failure")
	case d.Code == codes.Internal:
		return d.status("CSR signing error (internal error; see the server's log)")
	}
	return d.status(fmt.Sprintf("CSR signing error (%s)", d.Detail))
}
