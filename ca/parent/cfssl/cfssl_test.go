package cfssl

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/parent/parenttest"
	"github.com/chancery-project/chancery/ca/parent/renewal"
	"github.com/chancery-project/chancery/trust"
)

const key = "0123456789abcdef0123456789ABCDEF0123456789abcdef0123456789abcdef"

// multirootca speaks authsign as cfssl's does, with its answers and status codes. The real one is used in test/e2e.
type multirootca struct {
	t     *testing.T
	peer  *parenttest.Peer
	chain string // file that gets what the admin would put there
}

func (m *multirootca) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var outer struct{ Token, Request []byte }
	if err := strict(r, &outer); err != nil || r.URL.Path != "/api/v1/cfssl/authsign" || r.Method != http.MethodPost {
		m.t.Errorf("%s %s: %v", r.Method, r.URL, err)
	}
	var inner struct {
		Request string `json:"certificate_request"`
		Profile string `json:"profile"`
		Label   string `json:"label"`
	}
	dec := json.NewDecoder(strings.NewReader(string(outer.Request)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&inner); err != nil {
		m.t.Error(err)
	}
	secret, _ := hex.DecodeString(key)
	mac := hmac.New(sha256.New, secret)
	mac.Write(outer.Request)
	if !hmac.Equal(mac.Sum(nil), outer.Token) {
		fail(w, "invalid token")
		return
	}
	block, _ := pem.Decode([]byte(inner.Request))
	if block == nil || inner.Profile != "issuer" || inner.Label != "mesh" {
		m.t.Errorf("asked for %+v", inner)
	}
	chain, err := m.peer.Sign(block.Bytes)
	if err != nil {
		fail(w, "bad request: "+err.Error())
		return
	}
	write(m.t, m.chain, string(trust.EncodeCertificates(chain[1:]...)), 0o644)
	json.NewEncoder(w).Encode(map[string]any{
		"success": true, "result": map[string]string{"certificate": string(trust.EncodeCertificates(chain[0]))}, "errors": []any{}, "messages": []any{},
	})
}

func strict(r *http.Request, into any) error {
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	return dec.Decode(into)
}

func fail(w http.ResponseWriter, message string) {
	w.WriteHeader(http.StatusBadRequest)
	json.NewEncoder(w).Encode(map[string]any{"success": false, "result": nil, "errors": []any{map[string]any{"code": 1, "message": message}}, "messages": []any{}})
}

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Error(err)
	}
}

func serve(t *testing.T, p *parenttest.Peer) Config {
	t.Helper()
	dir := t.TempDir()
	m := &multirootca{t, p, filepath.Join(dir, "chain.pem")}
	s := httptest.NewTLSServer(p.Handler(m))
	t.Cleanup(s.Close)
	addr := s.Listener.Addr().String()
	p.Switch(s.Close, func() {
		next := httptest.NewUnstartedServer(p.Handler(m))
		next.Listener.Close()
		next.Listener = parenttest.Listen(t, addr)
		next.StartTLS()
		t.Cleanup(next.Close)
	})
	roots := filepath.Join(dir, "roots.pem")
	write(t, roots, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})), 0o644)
	c := Config{Address: "https://" + addr, Roots: roots, Label: "mesh", Profile: "issuer", KeyFile: filepath.Join(dir, "key"), Chain: m.chain}
	write(t, c.KeyFile, key+"\n", 0o600)
	return c
}

func newParent(t *testing.T, c Config) *Parent {
	t.Helper()
	p, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestContract(t *testing.T) {
	parenttest.Run(t, parenttest.Config{Secrets: []string{key}, Start: func(t *testing.T, p *parenttest.Peer) renewal.Parent { return newParent(t, serve(t, p)) }})
}

// Each trouble with the key, the chain file and the address is named, without the key.
func TestRefusals(t *testing.T) {
	w := parenttest.NewWorld(t)
	other := strings.Repeat("ab", 32)
	for want, change := range map[string]func(*Config){
		"400 Bad Request: invalid token": func(c *Config) { write(t, c.KeyFile, other, 0o600) },
		"it should be 0600":              func(c *Config) { write(t, c.KeyFile, key, 0o644) },
		"should hold the key in hex":     func(c *Config) { write(t, c.KeyFile, "xyz"+key, 0o600) },
		"holds 8 bytes":                  func(c *Config) { write(t, c.KeyFile, key[:16], 0o600) },
		"no such file":                   func(c *Config) { c.KeyFile += "x" },
		"does not lead to a root":        func(c *Config) { c.Chain = "" },
		"reading chainFile":              func(c *Config) { c.Chain += "x" },
		"failed to verify certificate":   func(c *Config) { c.Roots = "" },
		"no PEM block":                   func(c *Config) { c.Roots = c.KeyFile },
	} {
		c := serve(t, parenttest.NewPeer(w))
		change(&c)
		err := w.Renewer(newParent(t, c)).Renew(t.Context())
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), key[:16]) || strings.Contains(err.Error(), other) {
			t.Errorf("%s: %v", want, err)
		}
	}
	for want, c := range map[string]Config{
		"address":                {Address: "ca.example", KeyFile: "k"},
		"authKeyFile is missing": {Address: "https://ca.example"},
	} {
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// An answer with status 200 that is none of success is a refusal too.
func TestSuccessThatIsNone(t *testing.T) {
	w := parenttest.NewWorld(t)
	for body, want := range map[string]string{
		`{"success": false, "errors": [{"code": 1, "message": "no"}]}`: "refused: no",
		`{"success": true}`: "it does not say why",
		`{"success": true, "result": {"certificate": "abc"}}`: "no PEM block",
	} {
		c := serve(t, parenttest.NewPeer(w))
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(body)) }))
		t.Cleanup(s.Close)
		c.Address, c.Roots = s.URL, "" // plain HTTP on loopback
		if err := w.Renewer(newParent(t, c)).Renew(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", body, err)
		}
	}
}
