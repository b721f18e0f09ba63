package dev

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
	"log/slog"
	"os"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

const (
	tokenIssuer = "https://chancery.dev.local"
	tokenLife   = 10 * time.Minute
)

// tokens signs tokens of the shape that Kubernetes gives its service accounts. The server verifies them as it does
// those of a real cluster: by the JWKS file.
type tokens struct{ signer jose.Signer }

// openTokens reads the signing key, or makes it, and writes its public half as a JWKS.
func openTokens(keyFile, jwksFile string) (*tokens, error) {
	key, err := tokenKey(keyFile)
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
	if err := process.ReplaceFile(jwksFile, set, 0o600); err != nil {
		return nil, err
	}
	opts := (&jose.SignerOptions{}).WithHeader("kid", public.KeyID)
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key}, opts)
	if err != nil {
		return nil, fmt.Errorf("token key: %w", err)
	}
	return &tokens{signer}, nil
}

func tokenKey(path string) (*ecdsa.PrivateKey, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		made, err := ca.GenerateKey(ca.P256)
		if err != nil {
			return nil, fmt.Errorf("making token key: %w", err)
		}
		if data, err = trust.EncodeKey(made); err != nil {
			return nil, err
		}
		if err := process.ReplaceFile(path, data, 0o600); err != nil {
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
type claims struct {
	jwt.Claims
	Kubernetes kubernetesClaim `json:"kubernetes.io"`
}

// kubernetesClaim is the claim kubernetes.io.
type kubernetesClaim struct {
	Namespace      string       `json:"namespace"`
	ServiceAccount accountClaim `json:"serviceaccount"`
}

// accountClaim names the service account in it.
type accountClaim struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// token signs a token for a service account of the dev namespace.
func (t *tokens) token(account string) (string, error) {
	now := time.Now()
	c := claims{
		Claims: jwt.Claims{
			Issuer: tokenIssuer, Subject: "system:serviceaccount:" + namespace + ":" + account, Audience: jwt.Audience{"istio-ca", "chancery"},
			IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(tokenLife)), ID: rand.Text(),
		},
		Kubernetes: kubernetesClaim{Namespace: namespace, ServiceAccount: accountClaim{Name: account, UID: "dev-" + account}},
	}
	signed, err := jwt.Signed(t.signer).Claims(c).Serialize()
	if err != nil {
		return "", fmt.Errorf("signing token: %w", err)
	}
	return signed, nil
}

// keepFile keeps a valid token in a file, for other clients to try the server with. Only the first must succeed: a disk
// that is full later is no reason to end server and agent, which do not need the file.
func (t *tokens) keepFile(ctx context.Context, path, account string, logger *slog.Logger) error {
	ticker := time.NewTicker(tokenLife / 10)
	defer ticker.Stop()
	if err := t.writeFile(path, account); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if err := t.writeFile(path, account); err != nil {
			logger.Warn("token file not renewed", "reason", err.Error())
		}
	}
}

func (t *tokens) writeFile(path, account string) error {
	token, err := t.token(account)
	if err == nil {
		err = process.ReplaceFile(path, []byte(token), 0o600)
	}
	if err != nil {
		return fmt.Errorf("keeping a token in %s: %w", path, err)
	}
	return nil
}
