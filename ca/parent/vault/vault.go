// Package vault owns issuers signed by the PKI secrets engine of Vault or OpenBao: the call to sign-intermediate, with a token
// from a file or by a service account of Kubernetes.
//
// It refuses a token file that others can read, and keeps no token: one that it logged in for is revoked after the call.
package vault

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/parent/https"
	"github.com/chancery-project/chancery/trust"
)

const maxJWT = 16 << 10

// Config says which engine signs, and as whom we come.
type Config struct {
	Address   string // such as https://vault.example:8200
	Roots     string // PEM file; empty: the system's
	Namespace string // empty: none is sent
	Mount     string // of the engine, such as pki
	Issuer    string // ID or name of the issuer in the engine; empty: its default
	// TokenFile holds a token, one line, mode 0600; or Kubernetes is set.
	TokenFile  string
	Kubernetes *Kubernetes
	Domain     trust.Domain
	TTL        time.Duration
}

// Kubernetes logs in with a service account's token.
type Kubernetes struct {
	Role      string
	Mount     string // of the auth method, such as kubernetes
	TokenFile string // read for each login
}

// Parent is an engine that signs issuers.
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
	for field, s := range map[string]string{"mount": c.Mount, "issuer": c.Issuer} {
		if !cleanPath(s) {
			return nil, fmt.Errorf("%s: %q is not a path such as pki or pki/mesh", field, s)
		}
	}
	switch {
	case c.Mount == "":
		return nil, errors.New("mount is missing; it should name the PKI engine, such as pki")
	case (c.TokenFile == "") == (c.Kubernetes == nil):
		return nil, errors.New("set one of tokenFile and kubernetes")
	case c.Kubernetes != nil && (c.Kubernetes.Role == "" || c.Kubernetes.TokenFile == "" || c.Kubernetes.Mount == "" || !cleanPath(c.Kubernetes.Mount)):
		return nil, errors.New("kubernetes: role and tokenFile are needed, and mount should be a path such as kubernetes")
	}
	return &Parent{c, e}, nil
}

// cleanPath holds off what would lead elsewhere than below /v1/.
func cleanPath(s string) bool {
	for seg := range strings.SplitSeq(s, "/") {
		if s != "" && (seg == "" || seg == "." || seg == ".." || strings.ContainsAny(seg, "?#%\\ ")) {
			return false
		}
	}
	return true
}

// request is the body of sign-intermediate. Of the CSR the key is used only (use_csr_values would also take its extensions, in
// encodings of its own): what the issuer should be is said here.
type request struct {
	CSR          string `json:"csr"`
	Format       string `json:"format"`
	CommonName   string `json:"common_name"`
	Organization string `json:"organization,omitempty"`
	NoCNInSANs   bool   `json:"exclude_cn_from_sans"`
	URISANs      string `json:"uri_sans"`
	MaxPath      int    `json:"max_path_length"`
	TTL          string `json:"ttl"`
}

// answer is that of sign-intermediate, as far as it matters.
type answer struct {
	Data struct {
		Certificate string   `json:"certificate"`
		IssuingCA   string   `json:"issuing_ca"`
		Chain       []string `json:"ca_chain"`
	} `json:"data"`
}

// Sign has the engine sign.
func (p *Parent) Sign(ctx context.Context, der []byte) ([]*x509.Certificate, error) {
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("reading our own request: %w", err)
	}
	token, done, err := p.token(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	path := "v1/" + p.config.Mount + "/root/sign-intermediate"
	if p.config.Issuer != "" {
		path = "v1/" + p.config.Mount + "/issuer/" + p.config.Issuer + "/sign-intermediate"
	}
	in := request{
		CSR: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})), Format: "pem", CommonName: csr.Subject.CommonName,
		NoCNInSANs: true, URISANs: p.config.Domain.URI(), TTL: fmt.Sprintf("%ds", int64(p.config.TTL.Seconds())),
	}
	if len(csr.Subject.Organization) == 1 {
		in.Organization = csr.Subject.Organization[0]
	}
	var out answer
	if err := p.call(ctx, path, token, in, &out); err != nil {
		return nil, fmt.Errorf("signing at %s/%s: %w", p.config.Address, path, err)
	}
	return chainOf(&out)
}

// chainOf reads an answer. ca_chain may repeat the certificate itself.
func chainOf(a *answer) ([]*x509.Certificate, error) {
	var chain []*x509.Certificate
	all := append(append([]string{a.Data.Certificate}, a.Data.Chain...), a.Data.IssuingCA)
	if len(all) > trust.MaxCertificates {
		return nil, fmt.Errorf("its answer has %d certificates; at most %d are read", len(all), trust.MaxCertificates)
	}
	for i, text := range all {
		if i > 0 && text == "" {
			continue
		}
		certs, err := trust.ParseCertificates([]byte(text))
		if err != nil {
			return nil, fmt.Errorf("certificate %d of its answer: %w", i+1, err)
		}
		for _, c := range certs {
			if !slices.ContainsFunc(chain, c.Equal) {
				chain = append(chain, c)
			}
		}
		if len(chain) > trust.MaxCertificates {
			return nil, fmt.Errorf("its answer has more than %d certificates", trust.MaxCertificates)
		}
	}
	return chain, nil
}

func (p *Parent) call(ctx context.Context, path, token string, in, out any) error {
	c := https.Call{Path: path, In: in, Header: map[string]string{"X-Vault-Request": "true"}, Secrets: []string{token}}
	if token != "" {
		c.Header["X-Vault-Token"] = token
	}
	if p.config.Namespace != "" {
		c.Header["X-Vault-Namespace"] = p.config.Namespace
	}
	err := p.endpoint.Post(ctx, c, out)
	status, ok := errors.AsType[*https.StatusError](err)
	if !ok {
		return err
	}
	var said struct {
		Errors []string `json:"errors"`
	}
	if json.Unmarshal(status.Body, &said) != nil || len(said.Errors) == 0 {
		return err
	}
	return fmt.Errorf("%w: %s", err, https.Clean(strings.Join(said.Errors, "; "), token))
}

// token returns the token to come with, and what to do once it is not needed any more.
func (p *Parent) token(ctx context.Context) (string, func(), error) {
	if p.config.TokenFile != "" {
		token, err := keys.ReadSecret("Vault token file", p.config.TokenFile)
		return token, func() {}, err
	}
	jwt, err := readJWT(p.config.Kubernetes.TokenFile)
	if err != nil {
		return "", nil, err
	}
	var out struct {
		Auth struct {
			Token string `json:"client_token"`
		} `json:"auth"`
	}
	path := "v1/auth/" + p.config.Kubernetes.Mount + "/login"
	if err := p.login(ctx, path, jwt, &out); err != nil {
		return "", nil, fmt.Errorf("logging in at %s/%s as role %s: %w", p.config.Address, path, p.config.Kubernetes.Role, err)
	}
	if out.Auth.Token == "" {
		return "", nil, fmt.Errorf("logging in at %s/%s: its answer has no token", p.config.Address, path)
	}
	return out.Auth.Token, func() { p.revoke(ctx, out.Auth.Token) }, nil
}

func (p *Parent) login(ctx context.Context, path, jwt string, out any) error {
	err := p.call(ctx, path, "", map[string]string{"role": p.config.Kubernetes.Role, "jwt": jwt}, out)
	if err != nil {
		return errors.New(https.Clean(err.Error(), jwt))
	}
	return nil
}

// revoke ends a token that we logged in for. If that fails it ends by itself.
func (p *Parent) revoke(ctx context.Context, token string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = p.call(ctx, "v1/auth/token/revoke-self", token, struct{}{}, nil)
}

// readJWT reads a projected service-account token. The kubelet sets its mode.
func readJWT(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("reading service-account token: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxJWT+1))
	switch token := strings.TrimSpace(string(data)); {
	case err != nil:
		return "", fmt.Errorf("reading service-account token %s: %w", path, err)
	case token == "" || len(data) > maxJWT || strings.ContainsAny(token, " \r\n"):
		return "", fmt.Errorf("%s should hold one token", path)
	default:
		return token, nil
	}
}
