package checkup

// Kubernetes is what keeps a server that drives from what it does in Kubernetes beside answering calls; empty if nothing does.
type Kubernetes struct {
	Signing    string `json:"signingError,omitempty"`    // of PodCertificateRequests and CertificateSigningRequests
	Publishing string `json:"publishingError,omitempty"` // of roots
}

func (s *State) judgeKubernetes() (all []Finding) {
	if e := s.Kubernetes.Signing; e != "" {
		all = append(all, Found("signing.failing", s.unlessStarting(Critical), "signer of trust domain "+s.TrustDomain, "does not sign requests in Kubernetes: %s", e))
	}
	if e := s.Kubernetes.Publishing; e != "" {
		all = append(all, Found("publishing.failing", Warning, "roots of trust domain "+s.TrustDomain, "are not published everywhere in Kubernetes: %s", e))
	}
	return all
}
