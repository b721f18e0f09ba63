package kube

import (
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
)

func sealer(t *testing.T) *keys.Sealer {
	t.Helper()
	s, err := keys.CreateSealer(filepath.Join(t.TempDir(), "state.key"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// sealedKey returns a store without an API server, and a key as it would lie in a Secret.
func sealedKey(t *testing.T) (*Store, string, *corev1.Secret) {
	t.Helper()
	s := &Store{config: Config{Namespace: "keys", Sealer: sealer(t)}}
	key, err := ca.GenerateKey(ca.P256)
	if err != nil {
		t.Fatal(err)
	}
	id, err := keys.IDOf(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	secret, err := s.encode(id, key)
	if err != nil {
		t.Fatal(err)
	}
	return s, id, secret
}

// Each way in which a Secret can differ from what was written is named, and the key is not used.
func TestSecretsThatAreRefused(t *testing.T) {
	s, id, good := sealedKey(t)
	if key, err := s.decode(id, good); err != nil || keys.Check(key) != nil {
		t.Fatal(err)
	}
	_, otherID, other := sealedKey(t)
	no := false
	for name, tc := range map[string]struct {
		change func(*corev1.Secret)
		want   string
	}{
		"of another name":         {func(x *corev1.Secret) { x.Name = namePrefix + otherID }, "answered with"},
		"of another namespace":    {func(x *corev1.Secret) { x.Namespace = "default" }, "answered with"},
		"of another type":         {func(x *corev1.Secret) { x.Type = corev1.SecretTypeOpaque }, `type "Opaque"`},
		"mutable":                 {func(x *corev1.Secret) { x.Immutable = &no }, "not immutable"},
		"mutable by default":      {func(x *corev1.Secret) { x.Immutable = nil }, "not immutable"},
		"empty":                   {func(x *corev1.Secret) { x.Data = nil }, "0 fields"},
		"of other data":           {func(x *corev1.Secret) { x.Data = map[string][]byte{"tls.key": {1}} }, "1 fields; it should have one, sealed"},
		"with more data":          {func(x *corev1.Secret) { x.Data["colour"] = []byte("red") }, "2 fields"},
		"huge":                    {func(x *corev1.Secret) { x.Data[dataKey] = make([]byte, maxSealed+1) }, "16385 bytes"},
		"changed":                 {func(x *corev1.Secret) { x.Data[dataKey][30] ^= 1 }, "unsealing key " + id},
		"cut off":                 {func(x *corev1.Secret) { x.Data[dataKey] = x.Data[dataKey][:20] }, "unsealing key " + id},
		"another key's":           {func(x *corev1.Secret) { x.Data = other.Data }, "unsealing key " + id},
		"one that is not sealed":  {func(x *corev1.Secret) { x.Data[dataKey] = []byte("-----BEGIN PRIVATE KEY-----") }, "unsealing key " + id},
		"sealed, and no key":      {func(x *corev1.Secret) { x.Data[dataKey] = s.config.Sealer.Seal([]byte("hello"), sealContext(id)) }, "no PEM block"},
		"sealed, and another key": {func(x *corev1.Secret) { x.Data[dataKey] = s.reseal(t, id) }, "another key"},
	} {
		t.Run(name, func(t *testing.T) {
			changed := good.DeepCopy()
			tc.change(changed)
			if _, err := s.decode(id, changed); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %s", err, tc.want)
			}
		})
	}
	s.config.Sealer = sealer(t)
	if _, err := s.decode(id, good); err == nil || !strings.Contains(err.Error(), "wrong sealing key") {
		t.Errorf("with another sealing key: %v", err)
	}
}

// reseal seals a new key under the identifier of another one, as only who has the sealing key can.
func (s *Store) reseal(t *testing.T, id string) []byte {
	t.Helper()
	key, err := ca.GenerateKey(ca.P256)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := s.encode(id, key)
	if err != nil {
		t.Fatal(err)
	}
	return secret.Data[dataKey]
}

// The largest key that there is fits well into what is read.
func TestSealedKeysAreSmall(t *testing.T) {
	s, id, _ := sealedKey(t)
	for _, kt := range []ca.KeyType{ca.P256, ca.P384, ca.Ed25519, ca.RSA, ca.MLDSA65} {
		key, err := ca.GenerateKey(kt)
		if err != nil {
			t.Fatal(err)
		}
		secret, err := s.encode(id, key)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(secret.Data[dataKey]); n > maxSealed/4 {
			t.Errorf("%s: %d bytes", kt, n)
		}
	}
}

func TestCheckNamespace(t *testing.T) {
	for name, good := range map[string]bool{
		"chancery": true, "a": true, "kube-1": true, strings.Repeat("a", 63): true,
		"": false, "Chancery": false, "a/b": false, "..": false, "-a": false, "a-": false, "a.b": false, strings.Repeat("a", 64): false, "a\n": false,
	} {
		if err := CheckNamespace(name); (err == nil) != good {
			t.Errorf("%q: %v", name, err)
		}
	}
}
