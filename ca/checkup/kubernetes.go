package checkup

// Kubernetes is what keeps a server from what it does in Kubernetes beside answering calls, most of it where it drives; empty if nothing does.
type Kubernetes struct {
	Signing    string `json:"signingError,omitempty"`    // of PodCertificateRequests and CertificateSigningRequests
	Publishing string `json:"publishingError,omitempty"` // of roots
	Naming     string `json:"namingError,omitempty"`     // of who may serve what: what cannot be read, by any server that has naming
	Unread     bool   `json:"namingUnread,omitempty"`    // nothing was ever read, so nothing is said
}

func (s *State) judgeKubernetes() (all []Finding) {
	if e := s.Kubernetes.Signing; e != "" {
		all = append(all, Found("signing.failing", s.unlessStarting(Critical), "signer of trust domain "+s.TrustDomain, "does not sign requests in Kubernetes: %s", e))
	}
	if e := s.Kubernetes.Publishing; e != "" {
		all = append(all, Found("publishing.failing", Warning, "roots of trust domain "+s.TrustDomain, "are not published everywhere in Kubernetes: %s", e))
	}
	switch e := s.Kubernetes.Naming; {
	case e == "":
	case !s.Kubernetes.Unread:
		all = append(all, Found("naming.failing", Warning, "secure naming of trust domain "+s.TrustDomain, "goes by what was last read: %s", e))
	case !s.young():
		all = append(all, Found("naming.failing", Critical, "secure naming of trust domain "+s.TrustDomain, "says of no service who may serve it: %s", e))
	}
	return all
}
