package vault

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/parent/parenttest"
	"github.com/chancery-project/chancery/ca/parent/renewal"
	"github.com/chancery-project/chancery/trust"
)

const (
	token      = "hvs.CAESIJ-root-of-all-evil"
	loginToken = "hvs.of-a-login-0123456789"
	jwt        = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"
)

// engine speaks the part of the API that is used, strictly. The real OpenBao is used in test/e2e.
type engine struct {
	t       *testing.T
	peer    *parenttest.Peer
	path    string // of sign-intermediate
	valid   map[string]bool
	revoked []string
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Role, JWT string // of a login
		request
	}
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&in); err != nil || r.Method != http.MethodPost || r.Header.Get("X-Vault-Request") != "true" || r.Header.Get("X-Vault-Namespace") != "team" {
		e.t.Errorf("%s %s %v: %v", r.Method, r.URL, r.Header, err)
	}
	from := r.Header.Get("X-Vault-Token")
	switch {
	case r.URL.Path == "/v1/auth/k8s/login" && in.Role == "chancery" && in.JWT == jwt:
		e.valid[loginToken] = true
		fmt.Fprintf(w, `{"auth": {"client_token": %q, "lease_duration": 3600}}`, loginToken)
	case r.URL.Path == "/v1/auth/k8s/login": // a server that shows what it got
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, `{"errors": ["no role %s for %s"]}`, in.Role, in.JWT)
	case !e.valid[from]:
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, `{"errors": ["permission denied for %s"]}`, from)
	case r.URL.Path == "/v1/auth/token/revoke-self":
		e.revoked = append(e.revoked, from)
		delete(e.valid, from)
		w.WriteHeader(http.StatusNoContent)
	case r.URL.Path == e.path:
		e.sign(w, in.request)
	default:
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"errors": []}`)
	}
}

func (e *engine) sign(w http.ResponseWriter, in request) {
	block, _ := pem.Decode([]byte(in.CSR))
	if block == nil || in.Format != "pem" || in.URISANs != "spiffe://cluster.local" || in.TTL != "86400s" || !in.NoCNInSANs || in.MaxPath != 0 ||
		in.Organization != "cluster.local" || !strings.HasPrefix(in.CommonName, "chancery issuer ") {
		e.t.Errorf("asked for %+v", in)
	}
	chain, err := e.peer.Sign(block.Bytes)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprintf(w, `{"errors": [%q]}`, err.Error())
		return
	}
	out := map[string]any{"certificate": string(trust.EncodeCertificates(chain[0])), "issuing_ca": string(trust.EncodeCertificates(chain[1])), "expiration": 1}
	var all []string
	for _, c := range chain { // OpenBao's begins with the certificate itself
		all = append(all, string(trust.EncodeCertificates(c)))
	}
	out["ca_chain"] = all
	json.NewEncoder(w).Encode(map[string]any{"request_id": "x", "data": out, "warnings": nil})
}

// serve serves an engine over TLS and returns the config to reach it by.
func serve(t *testing.T, p *parenttest.Peer, e *engine) Config {
	t.Helper()
	e.t, e.peer = t, p
	s := httptest.NewTLSServer(p.Handler(e))
	t.Cleanup(func() { s.Close() })
	addr := s.Listener.Addr().String()
	p.Switch(s.Close, func() {
		next := httptest.NewUnstartedServer(p.Handler(e))
		next.Listener.Close()
		next.Listener = parenttest.Listen(t, addr)
		next.StartTLS()
		t.Cleanup(next.Close)
	})
	roots := filepath.Join(t.TempDir(), "roots.pem")
	write(t, roots, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})), 0o644)
	return Config{Address: "https://" + addr, Roots: roots, Namespace: "team", Mount: "pki/mesh", Domain: p.World.Domain, TTL: parenttest.Lifetime}
}

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func newParent(t *testing.T, c Config) *Parent {
	t.Helper()
	p, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestContractToken(t *testing.T) {
	parenttest.Run(t, parenttest.Config{Secrets: []string{token}, Start: func(t *testing.T, p *parenttest.Peer) renewal.Parent {
		c := serve(t, p, &engine{path: "/v1/pki/mesh/root/sign-intermediate", valid: map[string]bool{token: true}})
		c.TokenFile = filepath.Join(t.TempDir(), "token")
		write(t, c.TokenFile, token+"\n", 0o600)
		return newParent(t, c)
	}})
}

func TestContractKubernetesLoginAndNamedIssuer(t *testing.T) {
	var e *engine
	parenttest.Run(t, parenttest.Config{Secrets: []string{loginToken, jwt}, Start: func(t *testing.T, p *parenttest.Peer) renewal.Parent {
		e = &engine{path: "/v1/pki/mesh/issuer/mesh-2026/sign-intermediate", valid: map[string]bool{}}
		c := serve(t, p, e)
		c.Issuer, c.Kubernetes = "mesh-2026", &Kubernetes{Role: "chancery", Mount: "k8s", TokenFile: filepath.Join(t.TempDir(), "jwt")}
		write(t, c.Kubernetes.TokenFile, jwt, 0o644)
		return newParent(t, c)
	}})
	if len(e.valid) > 0 || !slices.Contains(e.revoked, loginToken) {
		t.Errorf("tokens of logins stay valid: %v, revoked %v", e.valid, e.revoked)
	}
}

// A credential that is refused is in the error in no form, even if the other side repeats it.
func TestSecretsStayOutOfErrors(t *testing.T) {
	w := parenttest.NewWorld(t)
	p := parenttest.NewPeer(w)
	c := serve(t, p, &engine{path: "/v1/pki/mesh/root/sign-intermediate", valid: map[string]bool{}})
	c.TokenFile = filepath.Join(t.TempDir(), "token")
	write(t, c.TokenFile, token, 0o600)
	err := w.Renewer(newParent(t, c)).Renew(t.Context())
	if err == nil || strings.Contains(err.Error(), token) || !strings.Contains(err.Error(), "403 Forbidden: permission denied for [secret]") {
		t.Errorf("got %v", err)
	}
	c.TokenFile, c.Kubernetes = "", &Kubernetes{Role: "other", Mount: "k8s", TokenFile: filepath.Join(t.TempDir(), "jwt")}
	write(t, c.Kubernetes.TokenFile, jwt, 0o600)
	err = w.Renewer(newParent(t, c)).Renew(t.Context())
	if err == nil || strings.Contains(err.Error(), jwt) || !strings.Contains(err.Error(), "no role other for [secret]") {
		t.Errorf("got %v", err)
	}
}

// What is wrong with a token file is said before anybody is called.
func TestTokenFiles(t *testing.T) {
	w := parenttest.NewWorld(t)
	dir := t.TempDir()
	c := Config{Address: "https://vault.invalid", Mount: "pki", Domain: w.Domain, TTL: parenttest.Lifetime, TokenFile: filepath.Join(dir, "token")}
	for want, make := range map[string]func(){
		"no such file":                    func() {},
		"it should be 0600":               func() { write(t, c.TokenFile, token, 0o640) },
		"should be one line":              func() { write(t, c.TokenFile, token+"\n"+token, 0o600) },
		"Vault token file " + c.TokenFile: func() { write(t, c.TokenFile, "", 0o600) },
	} {
		os.Remove(c.TokenFile)
		make()
		if err := w.Renewer(newParent(t, c)).Renew(t.Context()); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), token) {
			t.Errorf("%s: %v", want, err)
		}
	}
	c.TokenFile, c.Kubernetes = "", &Kubernetes{Role: "a", Mount: "k8s", TokenFile: filepath.Join(dir, "jwt")}
	for _, text := range []string{"", "two words", strings.Repeat("a", maxJWT+1)} {
		write(t, c.Kubernetes.TokenFile, text, 0o600)
		if err := w.Renewer(newParent(t, c)).Renew(t.Context()); err == nil || !strings.Contains(err.Error(), "should hold one token") {
			t.Errorf("a token of %d bytes: %v", len(text), err)
		}
	}
}

func TestConfigErrors(t *testing.T) {
	good := Config{Address: "https://vault.example:8200", Mount: "pki", TokenFile: "token"}
	if _, err := New(good); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Config){
		"should begin with https":        func(c *Config) { c.Address = "http://vault.example:8200" },
		"is not an address":              func(c *Config) { c.Address = "vault.example:8200" },
		"roots would not be used":        func(c *Config) { c.Address, c.Roots = "http://127.0.0.1:8200", "roots.pem" },
		"mount: \"../sys\"":              func(c *Config) { c.Mount = "../sys" },
		"mount: \"pki?a\"":               func(c *Config) { c.Mount = "pki?a" },
		"issuer: \"a//b\"":               func(c *Config) { c.Issuer = "a//b" },
		"mount is missing":               func(c *Config) { c.Mount = "" },
		"set one of tokenFile":           func(c *Config) { c.TokenFile = "" },
		"set one of":                     func(c *Config) { c.Kubernetes = &Kubernetes{} },
		"kubernetes: role and tokenFile": func(c *Config) { c.TokenFile, c.Kubernetes = "", &Kubernetes{Mount: "kubernetes"} },
	} {
		c := good
		change(&c)
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
