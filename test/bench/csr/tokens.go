package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"
	"google.golang.org/grpc/metadata"
	securityv1alpha1 "istio.io/api/security/v1alpha1"
)

const (
	clusterName   = "Kubernetes"
	trustDomain   = "cluster.local"
	tokenIssuer   = "https://kubernetes.default.svc"
	tokenAudience = "istio-ca"
	jwksFile      = "jwks.json"
	tokenFile     = "token"
)

// request is one prepared call and what its answer must hold.
type request struct {
	metadata metadata.MD // the bearer token and the cluster
	message  *securityv1alpha1.IstioCertificateRequest
	id       string // the SPIFFE ID that the token stands for
	spki     []byte // the request's public key, DER
}

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

// workload is one identity with its token.
type workload struct {
	id    string
	token string
}

// prepare makes a service-account key, writes its JWKS and one token (for the agent) to dir, and returns calls with
// distinct keys, ready to be sent, so that under load the client only sends and checks.
func prepare(dir string, tokens, csrs int) ([]request, error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("making service-account key: %w", err)
	}
	kid := uuid.NewString()
	if err := writeJWKS(dir, kid, &key.PublicKey); err != nil {
		return nil, err
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.RS256, Key: jose.JSONWebKey{Key: key, KeyID: kid}}, nil)
	if err != nil {
		return nil, fmt.Errorf("making token signer: %w", err)
	}
	workloads := make([]workload, tokens)
	for i := range workloads {
		if workloads[i], err = newWorkload(signer, i); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, tokenFile), []byte(workloads[0].token), 0o600); err != nil {
		return nil, fmt.Errorf("writing token for the agent: %w", err)
	}
	requests := make([]request, csrs)
	for i := range requests {
		if requests[i], err = newRequest(workloads[i%tokens]); err != nil {
			return nil, err
		}
	}
	return requests, nil
}

func writeJWKS(dir, kid string, key *rsa.PublicKey) error {
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key, KeyID: kid, Algorithm: string(jose.RS256), Use: "sig"}}}
	text, err := json.Marshal(set)
	if err != nil {
		return fmt.Errorf("encoding JWKS: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, jwksFile), text, 0o600); err != nil {
		return fmt.Errorf("writing JWKS: %w", err)
	}
	return nil
}

// newWorkload makes the i-th identity: a service account of its own, its pod on one of ten nodes.
func newWorkload(signer jose.Signer, i int) (workload, error) {
	namespace, account := fmt.Sprintf("bench-%d", i%10), fmt.Sprintf("app-%d", i)
	now := time.Now().Truncate(time.Second)
	var claims boundClaims
	claims.Claims = jwt.Claims{
		Issuer:    tokenIssuer,
		Subject:   "system:serviceaccount:" + namespace + ":" + account,
		Audience:  jwt.Audience{tokenAudience},
		Expiry:    jwt.NewNumericDate(now.Add(time.Hour)),
		NotBefore: jwt.NewNumericDate(now),
		IssuedAt:  jwt.NewNumericDate(now),
		ID:        uuid.NewString(),
	}
	claims.Kubernetes.Namespace = namespace
	claims.Kubernetes.Node = named{Name: fmt.Sprintf("node-%d", i%10), UID: uuid.NewString()}
	claims.Kubernetes.Pod = named{Name: account + "-5d9c7b6f4-x2x7k", UID: uuid.NewString()}
	claims.Kubernetes.ServiceAccount = named{Name: account, UID: uuid.NewString()}
	token, err := jwt.Signed(signer).Claims(claims).Serialize()
	if err != nil {
		return workload{}, fmt.Errorf("signing token: %w", err)
	}
	return workload{id: "spiffe://" + trustDomain + "/ns/" + namespace + "/sa/" + account, token: token}, nil
}

func newRequest(w workload) (request, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return request{}, fmt.Errorf("making workload key: %w", err)
	}
	uri, err := url.Parse(w.id)
	if err != nil {
		return request{}, fmt.Errorf("parsing SPIFFE ID: %w", err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{uri}}, key)
	if err != nil {
		return request{}, fmt.Errorf("making certificate request: %w", err)
	}
	spki, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return request{}, fmt.Errorf("encoding workload key: %w", err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr})
	return request{
		metadata: metadata.Pairs("authorization", "Bearer "+w.token, "clusterid", clusterName),
		message:  &securityv1alpha1.IstioCertificateRequest{Csr: string(text), ValidityDuration: 3600},
		id:       w.id,
		spki:     spki,
	}, nil
}
