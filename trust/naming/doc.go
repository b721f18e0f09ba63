// Package naming owns secure naming's engine: which identities may serve a service, computed from the objects of Kubernetes and Istio
// that say so and from explicit rules, and kept up to date change by change in a trust.Naming.
//
// A service is "NAMESPACE/NAME"; that of several clusters is one, with the identities of all. An identity joins when a pod is created
// whose labels a Service selects, before any endpoint of it is ready (decision D25), and stays for two minutes after nothing names it any
// more, unless it was revoked or an authority tainted.
//
// It refuses identities from objects that lie neither in the service's own namespace nor in the root namespace, an empty list that would mean
// anyone, and to say anything before each cluster has been read once. It knows no network; trust/naming/kube reads.
package naming
