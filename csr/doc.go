// Package csr owns the CSR endpoint: it finds out who asks, what they may have, and gets it issued.
//
// The story of one request, by file: authenticate.go turns a token or client certificate into a Caller; identity.go
// derives the SPIFFE ID that the caller may have; admission.go decides when; request.go reads the CSR; issue.go
// prepares and issues; istio.go and native.go are the two gRPC faces, method.go what
// they share; server.go serves them.
//
// It refuses to take an identity from the CSR (invariant 2): of a CSR only the public key is used, and names in it
// that differ from the derived identity are a denial. Every refusal has a stable reason that is the same in the audit
// log, the metrics and the status details. Kubernetes is known only to csr/kube, and the shape of its tokens to csr/jwt,
// behind the interface Cluster.
package csr
