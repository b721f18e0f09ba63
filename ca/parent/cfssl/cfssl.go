// Package cfssl owns issuers signed by a remote cfssl: multirootca's authenticated sign, under a key shared by both sides.
//
// It refuses a key file that others can read, and key forms of cfssl that would put the key elsewhere ("env:", "file:").
package cfssl

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/parent/https"
	"github.com/chancery-project/chancery/trust"
)

const minKey = 16 // bytes

// Config says which signer signs. How long an issuer lives, and that it is a CA, is the profile's there.
type Config struct {
	Address string // such as https://ca.example:8888
	Roots   string // PEM file; empty: the system's
	Label   string // of the signer in multirootca; empty: its default
	Profile string // empty: the default one
	KeyFile string // the auth key in hex, one line, mode 0600
	Chain   string // PEM file with the signer's certificate and those up to the root; empty: the signer is the root
}

// Parent is a multirootca that signs issuers.
type Parent struct {
	config   Config
	endpoint *https.Endpoint
}

// New checks a config without calling anybody.
func New(c Config) (*Parent, error) {
	e, err := https.New(c.Address, c.Roots)
	if err != nil {
		return nil, fmt.Errorf("address: %w", err)
	}
	if c.KeyFile == "" {
		return nil, errors.New("authKeyFile is missing; it should hold the auth key of the profile, in hex")
	}
	return &Parent{c, e}, nil
}

// signRequest is cfssl's signer.SignRequest, as far as we say anything.
type signRequest struct {
	Request string `json:"certificate_request"`
	Profile string `json:"profile,omitempty"`
	Label   string `json:"label,omitempty"`
}

// envelope is cfssl's auth.AuthenticatedRequest: the HMAC goes over the very bytes of the request.
type envelope struct {
	Token   []byte `json:"token"`
	Request []byte `json:"request"`
}

// answer is cfssl's api.Response.
type answer struct {
	Success bool `json:"success"`
	Result  *struct {
		Certificate string `json:"certificate"`
	} `json:"result"`
	Errors []struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"errors"`
}

// Sign has multirootca sign.
func (p *Parent) Sign(ctx context.Context, der []byte) ([]*x509.Certificate, error) {
	key, secret, err := p.key()
	if err != nil {
		return nil, err
	}
	inner, err := json.Marshal(signRequest{
		Request: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})), Profile: p.config.Profile, Label: p.config.Label,
	})
	if err != nil {
		return nil, err
	}
	mac := hmac.New(sha256.New, key)
	mac.Write(inner)
	const path = "api/v1/cfssl/authsign"
	var out answer
	err = p.endpoint.Post(ctx, https.Call{Path: path, In: envelope{mac.Sum(nil), inner}, Secrets: []string{secret}}, &out)
	if status, ok := errors.AsType[*https.StatusError](err); ok && json.Unmarshal(status.Body, &out) == nil {
		err = fmt.Errorf("%w: %s", err, out.said(secret))
	} else if err == nil && (!out.Success || out.Result == nil) {
		err = fmt.Errorf("refused: %s", out.said(secret))
	}
	if err != nil {
		return nil, fmt.Errorf("signing at %s/%s: %w", p.config.Address, path, err)
	}
	chain, err := trust.ParseCertificates([]byte(out.Result.Certificate))
	if err != nil {
		return nil, fmt.Errorf("its answer: %w", err)
	}
	if p.config.Chain == "" {
		return chain, nil
	}
	above, err := https.Certificates(p.config.Chain)
	if err != nil {
		return nil, fmt.Errorf("reading chainFile: %w", err)
	}
	return append(chain, above...), nil
}

func (a *answer) said(secret string) string {
	var all []string
	for _, e := range a.Errors {
		all = append(all, e.Message)
	}
	if len(all) == 0 {
		return "it does not say why"
	}
	return https.Clean(strings.Join(all, "; "), secret)
}

// key reads the auth key; secret is how the file spells it.
func (p *Parent) key() (key []byte, secret string, err error) {
	if secret, err = keys.ReadSecret("cfssl auth key file", p.config.KeyFile); err != nil {
		return nil, "", err
	}
	if key, err = hex.DecodeString(secret); err != nil { // whose own error would show a character of it
		return nil, "", fmt.Errorf("cfssl auth key file %s should hold the key in hex", p.config.KeyFile)
	}
	if len(key) < minKey {
		return nil, "", fmt.Errorf("cfssl auth key file %s holds %d bytes; at least %d are needed, such as from `openssl rand -hex 32`", p.config.KeyFile, len(key), minKey)
	}
	return key, secret, nil
}
