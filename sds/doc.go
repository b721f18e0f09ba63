// Package sds is the serving side of the node agent: on one Unix socket it hands the identities and trust bundles of
// a View to proxies, as Envoy SDS v3 (state of the world, delta, fetch), and to SPIFFE workloads, as the X.509
// profile of the SPIFFE Workload API; with gRPC health and reflection.
//
// It owns the protocols: names, versions, acknowledgements, who is connected and what each has confirmed (Streams).
// It decides nothing about identity: Config.Attest says who a peer is, and that caller's Source yields Views. Every
// answer is made from one View, so key, chain and bundle always belong together (DESIGN.md invariant 6).
//
// It refuses to end a stream because of an unknown name, to send a validation context that would accept anybody (an
// empty list of roots or of SAN matchers), to read a file outside Config.Files, and to log a key. It issues nothing,
// renews nothing and knows nothing of Kubernetes.
//
// The names that an Envoy may ask for:
//
//	default                   the caller's first identity: chain and key
//	spiffe://TD/PATH          that identity, if it is one of the caller's, in whichever of the authority's trust domains
//	ROOTCA                    validation context with the roots of the authority's own trust domains
//	spiffe://TD               validation context with the roots of that trust domain; nobody's, if it is a former one
//	ALL                       the SPIFFE validator with the roots of every trusted domain, each for its own
//	service:NS/NAME           a SAN matcher for each identity that the service may have, with the roots that vouch for these
//	file-cert:CERT~KEY        chain and key from files
//	file-root:CA              validation context with the roots in a file
package sds
