package csr

import (
	"context"

	"google.golang.org/protobuf/proto"
	istio "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// CreateCertificate is the Istio face without gRPC around it, for the benchmark.
func (s *Service) CreateCertificate(ctx context.Context, r *istio.IstioCertificateRequest) (proto.Message, error) {
	return s.createCertificate(ctx, func(m proto.Message) error { proto.Merge(m, r); return nil })
}

// Issue is our own face without gRPC around it, for the benchmark.
func (s *Service) Issue(ctx context.Context, r *chanceryv1.IssueRequest) (proto.Message, error) {
	return s.issueBatch(ctx, func(m proto.Message) error { proto.Merge(m, r); return nil })
}

// Idle reports whether admission holds no slot and nobody waits for one.
func (s *Service) Idle() bool {
	inFlight, queued, waiting := s.admission.State()
	return inFlight == 0 && queued == 0 && waiting == 0
}

// Waiting returns how many requests wait for a slot.
func (s *Service) Waiting() int {
	_, _, waiting := s.admission.State()
	return waiting
}
