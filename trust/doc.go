// Package trust owns identities and the trust in them: SPIFFE IDs, trust domains, immutable bundles with their CRLs,
// SVIDs with their keys, and the verification of a peer's certificate.
//
// An Identity is one consistent snapshot (DESIGN.md invariant 6): leaf, key, intermediates and the bundle that they
// verify against, checked by NewIdentity before anybody can hold one (invariant 7).
//
// It refuses what the SPIFFE standards say a validator must refuse, also where common libraries let it pass: a leaf
// whose ID has no path, a second URI SAN, a CA certificate used as a leaf, an ID over 2,048 bytes; and a CRL that would
// make a proxy refuse everybody. It never signs, never opens a connection, and knows nothing of Kubernetes.
package trust
