package csr

import (
	"context"
	"crypto/sha256"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/trust"
)

// Caller is who asks for a certificate, as its credential proves (invariant 2). It goes into the audit log whole.
type Caller struct {
	ID      trust.ID
	Method  string // MethodToken or MethodMTLS
	Cluster string // name of the cluster that vouches for the caller

	Namespace, ServiceAccount string
	PodName, PodUID           string // empty if the token is not bound to a pod
	Node                      string // empty if not known

	CredentialID string    // "JTI=<uuid>" of a token, as in the API server's own audit log; or the SVID's serial
	AttestedAt   time.Time // when a token last proved this caller (decision D16)
	Ends         time.Time // when the credential ends; zero if not known
}

// The ways a caller can prove who it is.
const (
	MethodToken = "token"
	MethodMTLS  = "mtls"
)

// PodHash returns what stands for a pod in an SVID's attestation (decision D16): the first 16 bytes of a SHA-256 over
// cluster and pod UID, so that a certificate does not tell every peer the UID.
func PodHash(cluster, uid string) []byte {
	sum := sha256.Sum256([]byte("chancery pod\x00" + cluster + "\x00" + uid))
	return sum[:16]
}

// Cluster vouches for the service-account tokens of one Kubernetes cluster, or of something that issues the like.
// All methods are safe for concurrent use and return errors of type *Denial.
type Cluster interface {
	// Authenticate verifies a bearer token and, where pods are watched, that its pod lives. The returned caller's ID,
	// Method and Cluster are left for the caller of this method to fill in.
	Authenticate(ctx context.Context, token string) (Caller, error)

	// Alive checks that a pod that an SVID was issued for still lives: the pod of the namespace whose UID hashes to
	// hash (see PodHash), running as account on node. Where pods are not watched it returns nil.
	Alive(ctx context.Context, namespace, account, node string, hash []byte) error

	// OnNode checks that the caller's node runs a live pod of the namespace and account, so that a node agent may ask
	// for it. Where pods are not watched it is a denial (decision D18).
	OnNode(ctx context.Context, caller Caller, namespace, account string) error
}

// Denial is a refusal with everything that the edge needs: a gRPC code, a stable reason for metrics, audit log and
// status details, and the detail for logs. Detail may go to the caller only after it has authenticated.
type Denial struct {
	Code   codes.Code
	Reason string // one of the Reason constants
	Detail string

	RetryAfter time.Duration // how long to wait before another try; 0 = say nothing of it
}

// Error returns the reason and the detail.
func (d *Denial) Error() string { return d.Reason + ": " + d.Detail }

// Reasons of denials. They are stable: dashboards, audit readers and clients match on them.
const (
	ReasonNoCredential   = "NO_CREDENTIAL"        // neither token nor client certificate
	ReasonTokenMalformed = "TOKEN_MALFORMED"      // not a JWS, too large, or claims missing
	ReasonTokenKey       = "TOKEN_KEY_UNKNOWN"    // no key of the cluster has this key ID and algorithm
	ReasonTokenSignature = "TOKEN_SIGNATURE"      // the signature does not verify
	ReasonTokenIssuer    = "TOKEN_ISSUER"         // issued by somebody else
	ReasonTokenAudience  = "TOKEN_AUDIENCE"       // not meant for us
	ReasonTokenExpired   = "TOKEN_EXPIRED"        // past exp, or before nbf
	ReasonTokenReview    = "TOKEN_REVIEW_REFUSED" // the API server's TokenReview said no
	ReasonTokenNoPod     = "TOKEN_NOT_POD_BOUND"  // a pod-bound token is needed here
	ReasonCluster        = "CLUSTER_UNKNOWN"      // clusterid names no configured cluster
	ReasonPodGone        = "POD_GONE"             // no such pod, or another UID
	ReasonPodMismatch    = "POD_MISMATCH"         // the pod runs elsewhere or as another account
	ReasonPodUnknown     = "POD_UNKNOWN"          // not seen yet; try again
	ReasonNotNodeAgent   = "NOT_A_NODE_AGENT"     // caller may not ask for other pods
	ReasonNotOnNode      = "POD_NOT_ON_NODE"      // no such pod on the caller's node
	ReasonNoPodWatch     = "PODS_NOT_WATCHED"     // what is asked needs a pod watch
	ReasonSVID           = "SVID_INVALID"         // the client certificate does not verify
	ReasonAttestationAge = "ATTESTATION_TOO_OLD"  // renewal by certificate needs a fresh token first
	ReasonIdentity       = "IDENTITY_NOT_ALLOWED" // requested ID is not the caller's, reserved, or malformed
	ReasonDomain         = "TRUST_DOMAIN_NOT_NOW" // requested ID is of a trust domain that is not issued in this phase of a migration
	ReasonRevoked        = "IDENTITY_REVOKED"     // gets nothing until it is restored
	ReasonSVIDRevoked    = "SVID_REVOKED"         // the client certificate is revoked; come with a token
	ReasonSVIDTainted    = "SVID_ISSUER_TAINTED"  // the key of an authority above the client certificate is; come with a token
	ReasonCSR            = "CSR_INVALID"          // does not parse, bad signature, key refused, too large
	ReasonCSRNames       = "CSR_NAMES"            // names in the CSR differ from the identity
	ReasonLifetime       = "LIFETIME_INVALID"     // requested lifetime overflows
	ReasonBusy           = "BUSY"                 // admission control
	ReasonNotReady       = "NOT_READY"            // no issuer, audit log not writable, or a dependency is down
	ReasonInternal       = "INTERNAL"             // a bug; see the log
)
