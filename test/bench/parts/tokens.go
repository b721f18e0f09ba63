package parts

import (
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"
)

// What ServerConfig says.
const (
	ClusterName   = "Kubernetes"
	TrustDomain   = "cluster.local"
	TokenIssuer   = "https://kubernetes.default.svc"
	TokenAudience = "istio-ca"
)

// named is Kubernetes' way to point at an object in a token.
type named struct {
	Name string `json:"name"`
	UID  string `json:"uid,omitempty"`
}

// boundClaims are the claims of a pod-bound service-account token.
type boundClaims struct {
	jwt.Claims
	Kubernetes struct {
		Namespace      string `json:"namespace"`
		Node           named  `json:"node"`
		Pod            named  `json:"pod"`
		ServiceAccount named  `json:"serviceaccount"`
	} `json:"kubernetes.io"`
}

// Workload is one identity with its token.
type Workload struct {
	ID    string // SPIFFE
	Token string
}

// Tokens makes tokens as the API server of a cluster does.
type Tokens struct{ signer jose.Signer }

// NewTokens makes the key, and writes the JWKS for servers to a file.
func NewTokens(jwksFile string) (*Tokens, error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("making service-account key: %w", err)
	}
	kid := uuid.NewString()
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: &key.PublicKey, KeyID: kid, Algorithm: string(jose.RS256), Use: "sig"}}}
	text, err := json.Marshal(set)
	if err != nil {
		return nil, fmt.Errorf("encoding JWKS: %w", err)
	}
	if err := os.WriteFile(jwksFile, text, 0o600); err != nil {
		return nil, fmt.Errorf("writing JWKS: %w", err)
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.RS256, Key: jose.JSONWebKey{Key: key, KeyID: kid}}, nil)
	if err != nil {
		return nil, fmt.Errorf("making token signer: %w", err)
	}
	return &Tokens{signer}, nil
}

// Workload makes the i-th identity: a service account of its own, its pod on one of so many nodes.
func (t *Tokens) Workload(i, nodes int) (Workload, error) {
	namespace, account := fmt.Sprintf("bench-%d", i%10), fmt.Sprintf("app-%d", i)
	now := time.Now().Truncate(time.Second)
	var claims boundClaims
	claims.Claims = jwt.Claims{
		Issuer:    TokenIssuer,
		Subject:   "system:serviceaccount:" + namespace + ":" + account,
		Audience:  jwt.Audience{TokenAudience},
		Expiry:    jwt.NewNumericDate(now.Add(time.Hour)),
		NotBefore: jwt.NewNumericDate(now),
		IssuedAt:  jwt.NewNumericDate(now),
		ID:        uuid.NewString(),
	}
	claims.Kubernetes.Namespace = namespace
	claims.Kubernetes.Node = named{Name: fmt.Sprintf("node-%d", i%nodes), UID: uuid.NewString()}
	claims.Kubernetes.Pod = named{Name: account + "-5d9c7b6f4-x2x7k", UID: uuid.NewString()}
	claims.Kubernetes.ServiceAccount = named{Name: account, UID: uuid.NewString()}
	token, err := jwt.Signed(t.signer).Claims(claims).Serialize()
	if err != nil {
		return Workload{}, fmt.Errorf("signing token: %w", err)
	}
	return Workload{ID: "spiffe://" + TrustDomain + "/ns/" + namespace + "/sa/" + account, Token: token}, nil
}
