// Package signers owns what Kubernetes' own requests for certificates get: PodCertificateRequests, whose pod the API server vouches for,
// and approved CertificateSigningRequests of requesters that the config lists, such as istiod as a registration authority. Which objects
// there are, and what is written into them, is csr/signers/kube's.
//
// Each certificate takes the way of all others: Prepare, audit log, token, Issue; with what is revoked or tainted respected, and counted by
// the ledger until it ends (decision D3), since who gets it this way acknowledges nothing.
//
// It refuses to call anything but a request that can never be met a final refusal: our own trouble is never told to Kubernetes, which would
// give up on the pod for good.
package signers
