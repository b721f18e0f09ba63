package e2e

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/types"
)

// BoundToken asks the API server for a token of the pod's service account, bound to the pod: what a kubelet projects into it.
// The API server refuses less than 10 minutes.
func (k *Kube) BoundToken(t testing.TB, p Pod, life time.Duration, audiences ...string) string {
	t.Helper()
	seconds := int64(life.Seconds())
	token, err := k.RequestToken(t.Context(), p.Namespace, p.ServiceAccount, authenticationv1.TokenRequestSpec{
		Audiences:         audiences,
		ExpirationSeconds: &seconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: p.Name, UID: types.UID(p.UID)},
	})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// UnboundToken asks for a token of a service account that is bound to no pod.
func (k *Kube) UnboundToken(t testing.TB, namespace, serviceAccount string, life time.Duration, audiences ...string) string {
	t.Helper()
	seconds := int64(life.Seconds())
	token, err := k.RequestToken(t.Context(), namespace, serviceAccount,
		authenticationv1.TokenRequestSpec{Audiences: audiences, ExpirationSeconds: &seconds})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// Claims are the claims of a token, for tests to change before they sign.
type Claims map[string]any

// Claims returns what a good bound token of the pod says, valid for an hour.
func (k *Kube) Claims(p Pod, audiences ...string) Claims {
	now := time.Now()
	return Claims{
		"iss": k.Issuer,
		"sub": "system:serviceaccount:" + p.Namespace + ":" + p.ServiceAccount,
		"aud": audiences,
		"iat": now.Unix(), "nbf": now.Unix(), "exp": now.Add(time.Hour).Unix(),
		"jti": rand.Text(),
		"kubernetes.io": map[string]any{
			"namespace":      p.Namespace,
			"node":           map[string]any{"name": p.Node},
			"pod":            map[string]any{"name": p.Name, "uid": p.UID},
			"serviceaccount": map[string]any{"name": p.ServiceAccount, "uid": p.ServiceAccountUID},
		},
	}
}

// Expired moves the claims' times so that the token ended the given time ago.
func (c Claims) Expired(ago time.Duration) Claims {
	end := time.Now().Add(-ago)
	c["iat"], c["nbf"], c["exp"] = end.Add(-time.Hour).Unix(), end.Add(-time.Hour).Unix(), end.Unix()
	return c
}

// SignToken signs any claims with the API server's own key, under the key id that the API server uses.
func (k *Kube) SignToken(t testing.TB, claims Claims) string {
	t.Helper()
	return signRS256(t, k.TokenKey, k.KeyID(t), claims)
}

// KeyID is the "kid" of the API server's token key: the hash of the public key, as Kubernetes derives it.
func (k *Kube) KeyID(t testing.TB) string {
	t.Helper()
	return keyID(t, &k.TokenKey.PublicKey)
}

// ForeignToken signs claims with a key that the cluster does not know. With a key id it claims to be signed by that key; with an
// empty one it names its own.
func ForeignToken(t testing.TB, kid string, claims Claims) string {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	if kid == "" {
		kid = keyID(t, &key.PublicKey)
	}
	return signRS256(t, key, kid, claims)
}

// UnsignedToken is a token of the algorithm "none".
func UnsignedToken(t testing.TB, claims Claims) string {
	t.Helper()
	return segment(t, map[string]any{"alg": "none", "typ": "JWT"}) + "." + segment(t, claims) + "."
}

// TamperToken gives the token another service account and keeps the signature.
func TamperToken(t testing.TB, token, subject string) string {
	t.Helper()
	parts := strings.Split(token, ".")
	claims := TokenClaims(t, token)
	claims["sub"] = subject
	return parts[0] + "." + segment(t, claims) + "." + parts[2]
}

// TokenClaims reads a token's claims without verifying it.
func TokenClaims(t testing.TB, token string) Claims {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("a token of %d parts instead of 3", len(parts))
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		t.Fatalf("decoding the token's claims: %v", err)
	}
	decoder := json.NewDecoder(bytes.NewReader(payload))
	decoder.UseNumber() // times stay whole numbers when they are written again
	var claims Claims
	if err := decoder.Decode(&claims); err != nil {
		t.Fatalf("decoding the token's claims: %v", err)
	}
	return claims
}

// WriteToken replaces a token file in one step, mode 0600, as a kubelet does.
func WriteToken(t testing.TB, path, token string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		t.Fatal(err)
	}
}

func signRS256(t testing.TB, key *rsa.PrivateKey, kid string, claims Claims) string {
	t.Helper()
	input := segment(t, map[string]any{"alg": "RS256", "kid": kid}) + "." + segment(t, claims)
	digest := sha256.Sum256([]byte(input))
	sig, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, digest[:])
	if err != nil {
		t.Fatalf("signing a token: %v", err)
	}
	return input + "." + base64.RawURLEncoding.EncodeToString(sig)
}

func segment(t testing.TB, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(data)
}

func keyID(t testing.TB, pub *rsa.PublicKey) string {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(der)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}
