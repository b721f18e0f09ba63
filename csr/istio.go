package csr

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	istio "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/lines"
)

const apiIstio = agents.Istio

// istioService describes the face that Istio's agents and ztunnel know: istio.v1.auth.IstioCertificateService.
func (s *Service) istioService() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: istio.IstioCertificateService_ServiceDesc.ServiceName, Metadata: istio.IstioCertificateService_ServiceDesc.Metadata,
		HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{method("CreateCertificate", s.createCertificate)},
	}
}

// createCertificate signs one CSR. The steps, and the codes where they fail:
//  1. authenticate: Unauthenticated "request authenticate failure".
//  2. lifetime and PEM: InvalidArgument.
//  3. admission control: ResourceExhausted with RetryInfo.
//  4. metadata ImpersonatedIdentity, if given: Unauthenticated "request impersonation authentication failure".
//  5. CSR: InvalidArgument; names that are not the identity's: PermissionDenied.
//
// Without an issuer, or if the audit log cannot be written, it is Unavailable (Istio's own CA says Internal here).
//
// The answer's chain has the leaf first, each intermediate an element, all roots in the last element.
func (s *Service) createCertificate(ctx context.Context, read func(proto.Message) error) (proto.Message, error) {
	start := time.Now()
	call, c, d := s.begin(ctx)
	defer call.Leave()
	r := new(istio.IstioCertificateRequest)
	if d == nil {
		if err := read(r); err != nil {
			return nil, err
		}
	}
	var chain []string
	if d == nil {
		chain, d = s.istioChain(ctx, call, c, r)
	}
	s.metrics.observe(apiIstio, c.Method, outcome(d), time.Since(start))
	if d == nil {
		return &istio.IstioCertificateResponse{CertChain: chain}, nil
	}
	asked := impersonated(r)
	s.denied(c, asked, d)
	return nil, istioError(c, asked, d)
}

func (s *Service) istioChain(ctx context.Context, call *lines.Call, c caller, r *istio.IstioCertificateRequest) ([]string, *Denial) {
	ttl, err := ca.Seconds(r.GetValidityDuration())
	if err != nil {
		return nil, &Denial{Code: codes.InvalidArgument, Reason: ReasonLifetime, Detail: err.Error()}
	}
	der, d := decodePEM(r.GetCsr())
	if d != nil {
		return nil, d
	}
	shared, cert, _, d := s.issue(ctx, call, c, ask{csr: der, identity: impersonated(r), lifetime: ttl, api: apiIstio})
	if d != nil {
		return nil, d
	}
	return shared.Istio(cert.DER), nil
}

// impersonated returns the identity asked for, empty for the caller's own. What is no string comes out as something
// that is refused: falling back to the caller's own identity would be a substitution (decision D17).
func impersonated(r *istio.IstioCertificateRequest) string {
	switch v := r.GetMetadata().GetFields()["ImpersonatedIdentity"].GetKind().(type) {
	case nil:
		return ""
	case *structpb.Value_StringValue:
		return v.StringValue
	}
	return "(a value that is not a string)"
}

// istioError gives the messages that Istio's clients know; the reason is in the details.
func istioError(c caller, asked string, d *Denial) error {
	switch {
	case d.Code == codes.Unauthenticated && c.ID.IsZero():
		return d.status("request authenticate failure")
	case asked != "" && (d.Code == codes.Unauthenticated || d.Code == codes.PermissionDenied) && d.Reason != ReasonCSRNames && d.Reason != ReasonDomain: // these say what to ask for
		as := *d
		as.Code = codes.Unauthenticated
		return as.status("request impersonation authentication failure")
	}
	return d.status("CSR signing error (" + d.message(c) + ")")
}
