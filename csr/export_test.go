package csr

import istio "istio.io/api/security/v1alpha1"

// IstioAPI returns the Istio face without gRPC around it, for the benchmark.
func (s *Service) IstioAPI() istio.IstioCertificateServiceServer { return istioService{Service: s} }

// Idle reports whether admission holds no slot and nobody waits for one.
func (s *Service) Idle() bool {
	inFlight, queued, waiting := s.admission.state()
	return inFlight == 0 && queued == 0 && waiting == 0
}
