// Package answering owns the answers of a running server to admins: it joins the desks of its parts, and answers itself what is
// about the authority document as a whole.
//
// It refuses to answer before who asks is known (decision D14), and, but for the status, before that is in the audit log.
package answering

import (
	"context"
	"crypto/x509"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/cmd/chancery/server/federating"
	"github.com/chancery-project/chancery/cmd/chancery/server/naming"
	"github.com/chancery-project/chancery/cmd/chancery/server/replicas"
	"github.com/chancery-project/chancery/cmd/chancery/server/report"
	"github.com/chancery-project/chancery/cmd/chancery/server/revoking"
	"github.com/chancery-project/chancery/cmd/chancery/server/rotating"
	"github.com/chancery-project/chancery/trust"
)

// Service answers admin calls.
type Service struct {
	revoking.Desk // answers what is about revocation and agents
	Rotations     *rotating.Desk
	Naming        *naming.Desk // nil without
	Federation    *federating.Desk
	Authority     *authority.Keeper
	Log           *audit.Log
	Report        *report.Reporter
	Replicas      *replicas.Desk
	Export        func(context.Context) ([]byte, error) // see Exporter
}

// GetAuthorities returns the document's authorities without keys. Who asked goes into the audit log first.
func (s Service) GetAuthorities(ctx context.Context, _ *chanceryv1.GetAuthoritiesRequest) (*chanceryv1.GetAuthoritiesResponse, error) {
	actor, err := adminsocket.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "authority show"}); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	resp, err := Describe(s.Authority.Document())
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return resp, nil
}

// ListReplicas returns the servers on the store.
func (s Service) ListReplicas(ctx context.Context, q *chanceryv1.ListReplicasRequest) (*chanceryv1.ListReplicasResponse, error) {
	return s.Replicas.List(ctx, q)
}

// ForgetReplica declares one of them dead.
func (s Service) ForgetReplica(ctx context.Context, q *chanceryv1.ForgetReplicaRequest) (*chanceryv1.ForgetReplicaResponse, error) {
	return s.Replicas.Forget(ctx, q)
}

// PlanRotation says what a rotation would do.
func (s Service) PlanRotation(ctx context.Context, q *chanceryv1.StartRotationRequest) (*chanceryv1.PlanRotationResponse, error) {
	return s.Rotations.PlanRotation(ctx, q)
}

// StartRotation starts one.
func (s Service) StartRotation(ctx context.Context, q *chanceryv1.StartRotationRequest) (*chanceryv1.RotationStatus, error) {
	return s.Rotations.StartRotation(ctx, q)
}

// GetRotation shows the one under way.
func (s Service) GetRotation(ctx context.Context, q *chanceryv1.GetRotationRequest) (*chanceryv1.RotationStatus, error) {
	return s.Rotations.GetRotation(ctx, q)
}

// ChangeRotation changes it.
func (s Service) ChangeRotation(ctx context.Context, q *chanceryv1.ChangeRotationRequest) (*chanceryv1.RotationStatus, error) {
	return s.Rotations.ChangeRotation(ctx, q)
}

// ShowNaming says who may serve a service.
func (s Service) ShowNaming(ctx context.Context, q *chanceryv1.ShowNamingRequest) (*chanceryv1.ShowNamingResponse, error) {
	return s.Naming.ShowNaming(ctx, q)
}

// ListTrust shows the trust domains whose roots are known.
func (s Service) ListTrust(ctx context.Context, q *chanceryv1.ListTrustRequest) (*chanceryv1.ListTrustResponse, error) {
	return s.Federation.ListTrust(ctx, q)
}

// ImportTrust takes a foreign one's bundle, or forgets one.
func (s Service) ImportTrust(ctx context.Context, q *chanceryv1.ImportTrustRequest) (*chanceryv1.ImportTrustResponse, error) {
	return s.Federation.ImportTrust(ctx, q)
}

// RefreshTrust fetches it.
func (s Service) RefreshTrust(ctx context.Context, q *chanceryv1.RefreshTrustRequest) (*chanceryv1.RefreshTrustResponse, error) {
	return s.Federation.RefreshTrust(ctx, q)
}

// ExportState returns an export of the document. Who asked goes into the audit log first.
func (s Service) ExportState(ctx context.Context, _ *chanceryv1.ExportStateRequest) (*chanceryv1.ExportStateResponse, error) {
	actor, err := adminsocket.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "state export"}); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	data, err := s.Export(ctx)
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return &chanceryv1.ExportStateResponse{Export: data}, nil
}

// GetStatus returns what the server knows of its health.
func (s Service) GetStatus(ctx context.Context, _ *chanceryv1.GetStatusRequest) (*chanceryv1.GetStatusResponse, error) {
	actor, err := adminsocket.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	return s.Report.Status(actor)
}

// RequestIssuer makes the next issuer's key and request. Who asked goes into the audit log.
func (s Service) RequestIssuer(ctx context.Context, r *chanceryv1.RequestIssuerRequest) (*chanceryv1.RequestIssuerResponse, error) {
	actor, err := adminsocket.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	der, err := s.Authority.Request(ctx, actor, r.GetFresh())
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &chanceryv1.RequestIssuerResponse{Request: der}, nil
}

// ImportIssuer takes the answer to a request into use. Who asked goes into the audit log.
func (s Service) ImportIssuer(ctx context.Context, r *chanceryv1.ImportIssuerRequest) (*chanceryv1.ImportIssuerResponse, error) {
	actor, err := adminsocket.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	if n := len(r.GetCertificates()); n > trust.MaxCertificates {
		return nil, status.Errorf(codes.InvalidArgument, "%d certificates; at most %d are read", n, trust.MaxCertificates)
	}
	var chain []*x509.Certificate
	for i, der := range r.GetCertificates() {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "certificate %d does not parse: %v", i, err)
		}
		chain = append(chain, cert)
	}
	if err := s.Authority.Import(ctx, actor, chain); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &chanceryv1.ImportIssuerResponse{}, nil
}
