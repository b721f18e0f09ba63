// Package revocation owns what revoked certificates are: it finds those that the predicates in the authority document mean,
// keeps a CRL of every issuer that may have live leaves, and answers on the way of each request whether an identity or a
// serial is revoked.
//
// A revocation is stored as a predicate (decision D13) before anything else happens; all else is worked out from document
// and issuance log, after a crash as well as in between. Its effects come in this order: the identity is refused new
// certificates, the certificates are found, the CRLs are signed and published.
//
// A verifier that has CRLs refuses each leaf of an issuer whose CRL it lacks (decision D22). So there is always one of every
// issuer, from the start and when nothing is revoked, or there is none at all: where one issuer cannot sign any, nothing
// is published, and revocation works by refusing renewals only, which every answer says.
//
// It refuses predicates that it could not resolve, since there is no issuance log, and to pass a part for the whole: logs of
// other replicas that it cannot read are named.
package revocation
