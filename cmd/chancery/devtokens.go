package main

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/trust"
)

const (
	devIssuer    = "https://chancery.dev.local"
	devTokenLife = 10 * time.Minute
)

// devTokens signs tokens of the shape that Kubernetes gives its service accounts. The server verifies them as it does
// those of a real cluster: by the JWKS file.
type devTokens struct{ signer jose.Signer }

// openDevTokens reads the signing key, or makes it, and writes its public half as a JWKS.
func openDevTokens(keyFile, jwksFile string) (*devTokens, error) {
	key, err := devKey(keyFile)
	if err != nil {
		return nil, err
	}
	public := jose.JSONWebKey{Key: &key.PublicKey, Algorithm: string(jose.ES256), Use: "sig"}
	thumb, err := public.Thumbprint(crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("token key: %w", err)
	}
	public.KeyID = hex.EncodeToString(thumb[:8])
	set, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{public}})
	if err != nil {
		return nil, fmt.Errorf("token key: %w", err)
	}
	if err := replaceFile(jwksFile, set); err != nil {
		return nil, err
	}
	opts := (&jose.SignerOptions{}).WithHeader("kid", public.KeyID)
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key}, opts)
	if err != nil {
		return nil, fmt.Errorf("token key: %w", err)
	}
	return &devTokens{signer}, nil
}

func devKey(path string) (*ecdsa.PrivateKey, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		made, err := ca.GenerateKey(ca.P256)
		if err != nil {
			return nil, fmt.Errorf("making token key: %w", err)
		}
		if data, err = trust.EncodeKey(made); err != nil {
			return nil, err
		}
		if err := replaceFile(path, data); err != nil {
			return nil, err
		}
	} else if err != nil {
		return nil, fmt.Errorf("reading token key: %w", err)
	}
	signer, err := trust.ParseKey(data)
	if err != nil {
		return nil, fmt.Errorf("reading token key %s: %w", path, err)
	}
	key, ok := signer.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("token key %s is a %T; expected P-256", path, signer)
	}
	return key, nil
}

// claims are those of a service-account token that is bound to no pod.
type devClaims struct {
	jwt.Claims
	Kubernetes devKubernetes `json:"kubernetes.io"`
}

type devKubernetes struct {
	Namespace      string     `json:"namespace"`
	ServiceAccount devAccount `json:"serviceaccount"`
}

type devAccount struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// token signs a token for a service account of the dev namespace.
func (t *devTokens) token(account string) (string, error) {
	now := time.Now()
	c := devClaims{
		Claims: jwt.Claims{
			Issuer: devIssuer, Subject: "system:serviceaccount:" + devNS + ":" + account, Audience: jwt.Audience{"istio-ca", "chancery"},
			IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(devTokenLife)), ID: rand.Text(),
		},
		Kubernetes: devKubernetes{Namespace: devNS, ServiceAccount: devAccount{Name: account, UID: "dev-" + account}},
	}
	signed, err := jwt.Signed(t.signer).Claims(c).Serialize()
	if err != nil {
		return "", fmt.Errorf("signing token: %w", err)
	}
	return signed, nil
}

// keepFile keeps a valid token in a file, for other clients to try the server with.
func (t *devTokens) keepFile(ctx context.Context, path, account string) error {
	ticker := time.NewTicker(devTokenLife / 2)
	defer ticker.Stop()
	for {
		token, err := t.token(account)
		if err == nil {
			err = replaceFile(path, []byte(token))
		}
		if err != nil {
			return fmt.Errorf("keeping a token in %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// replaceFile writes a file of mode 0600, complete or not at all.
func replaceFile(path string, data []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
