package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"google.golang.org/grpc/metadata"
	securityv1alpha1 "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/test/bench/parts"
)

const (
	jwksFile  = "jwks.json"
	tokenFile = "token"
)

// request is one prepared call and what its answer must hold.
type request struct {
	metadata metadata.MD // the bearer token and the cluster
	message  *securityv1alpha1.IstioCertificateRequest
	id       string // the SPIFFE ID that the token stands for
	spki     []byte // the request's public key, DER
}

// prepare makes a service-account key, writes its JWKS and one token (for the agent) to dir, and returns calls with
// distinct keys, ready to be sent, so that under load the client only sends and checks.
func prepare(dir string, tokens, csrs int) ([]request, error) {
	made, err := parts.NewTokens(filepath.Join(dir, jwksFile))
	if err != nil {
		return nil, err
	}
	workloads := make([]parts.Workload, tokens)
	for i := range workloads {
		if workloads[i], err = made.Workload(i, 10); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, tokenFile), []byte(workloads[0].Token), 0o600); err != nil {
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

func newRequest(w parts.Workload) (request, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return request{}, fmt.Errorf("making workload key: %w", err)
	}
	uri, err := url.Parse(w.ID)
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
		metadata: metadata.Pairs("authorization", "Bearer "+w.Token, "clusterid", parts.ClusterName),
		message:  &securityv1alpha1.IstioCertificateRequest{Csr: string(text), ValidityDuration: 3600},
		id:       w.ID,
		spki:     spki,
	}, nil
}
