package spiffebundle

import (
	"cmp"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/mldsa"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"math/big"
	"strings"
)

// keyTypes are those that are known; AKP is ML-DSA.
var keyTypes = []string{"RSA", "EC", "OKP", "AKP"}

// entry is a JWK: its members, each read where it matters. An entry to be ignored may have whatever it likes in the others; a root's key ID is
// passed over, since only who makes a bundle may not set it (X509-SVID section 6.1).
type entry map[string]jsontext.Value

// text returns a string; what is none is as good as not there.
func text(v jsontext.Value) string {
	var s string
	if v.Kind() != '"' || json.Unmarshal(v, &s) != nil {
		return ""
	}
	return s
}

// private returns the name of a member that only private keys have (RFC 7518 section 6; "priv" is ML-DSA's).
func (e entry) private() string {
	for _, name := range []string{"d", "p", "q", "dp", "dq", "qi", "oth", "k", "priv"} {
		if _, ok := e[name]; ok {
			return name
		}
	}
	return ""
}

// certificate returns the entry's first certificate, and nil if it has none. The key that the entry shows must be the certificate's
// (RFC 7517 section 4.7).
func (e entry) certificate(kty string) (*x509.Certificate, error) {
	if k := e["x5c"].Kind(); k == 0 || k == 'n' {
		return nil, nil
	}
	var chain []jsontext.Value // what follows the first is ignored, whatever it is (X509-SVID section 6.2)
	if err := json.Unmarshal(e["x5c"], &chain); err != nil {
		return nil, errors.New("x5c should be an array with one certificate in base64")
	}
	if len(chain) == 0 {
		return nil, nil
	}
	der, err := base64.StdEncoding.Strict().DecodeString(text(chain[0]))
	if err != nil || len(der) == 0 {
		return nil, errors.New("x5c[0] should be a certificate in base64")
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("x5c[0]: %w", err)
	}
	want, err := publicKey(cert.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("x5c[0]: %w", err)
	}
	if kty != want.Kty {
		return nil, fmt.Errorf("its key type is %s; that of its certificate %q is %s", kty, cert.Subject, want.Kty)
	}
	for name, value := range want.members() {
		if got, ok := e[name]; ok && text(got) != value {
			return nil, fmt.Errorf("its %s is not that of its certificate %q", name, cert.Subject)
		}
	}
	return cert, nil
}

// jwk is the entry of a root, in the order in which it is written.
type jwk struct {
	Kty string   `json:"kty"`
	Use string   `json:"use"`
	Alg string   `json:"alg,omitempty"`
	Crv string   `json:"crv,omitempty"`
	X   string   `json:"x,omitempty"`
	Y   string   `json:"y,omitempty"`
	N   string   `json:"n,omitempty"`
	E   string   `json:"e,omitempty"`
	Pub string   `json:"pub,omitempty"`
	X5C []string `json:"x5c"`
}

// members returns those that depend on the key.
func (j *jwk) members() map[string]string {
	all := map[string]string{"crv": j.Crv, "x": j.X, "y": j.Y, "n": j.N, "e": j.E, "pub": j.Pub}
	for name, value := range all {
		if value == "" {
			delete(all, name)
		}
	}
	return all
}

func encode(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// publicKey returns a JWK's members for a key (RFC 7518 section 6, RFC 8037; AKP of draft-ietf-cose-dilithium).
func publicKey(key any) (*jwk, error) {
	switch k := key.(type) {
	case *rsa.PublicKey:
		return &jwk{Kty: "RSA", N: encode(k.N.Bytes()), E: encode(big.NewInt(int64(k.E)).Bytes())}, nil
	case *ecdsa.PublicKey:
		point, err := k.Bytes() // 4, X and Y, each with all its bytes
		if err != nil {
			return nil, err
		}
		half := len(point) / 2
		return &jwk{Kty: "EC", Crv: k.Curve.Params().Name, X: encode(point[1 : 1+half]), Y: encode(point[1+half:])}, nil
	case ed25519.PublicKey:
		return &jwk{Kty: "OKP", Crv: "Ed25519", X: encode(k)}, nil
	case *mldsa.PublicKey:
		return &jwk{Kty: "AKP", Alg: k.Parameters().String(), Pub: encode(k.Bytes())}, nil
	}
	return nil, fmt.Errorf("keys of type %T are not known; known are RSA, ECDSA, Ed25519 and ML-DSA", key)
}

// certificateEntry returns the entry of a root.
func certificateEntry(root *x509.Certificate) (jsontext.Value, error) {
	j, err := publicKey(root.PublicKey)
	if err != nil {
		return nil, err
	}
	j.Use, j.X5C = useX509, []string{base64.StdEncoding.EncodeToString(root.Raw)}
	return json.Marshal(j)
}

func (k Key) compare(o Key) int {
	return cmp.Or(strings.Compare(k.Use, o.Use), strings.Compare(k.ID, o.ID), strings.Compare(string(k.JWK), string(o.JWK)))
}
