//go:build awskms || gcpkms || azurekms

package kms

import (
	"os"
	"testing"

	"github.com/chancery-project/chancery/ca"
)

// cloudTypes are the key types that every service makes.
var cloudTypes = []ca.KeyType{ca.P256, ca.P384, ca.RSA}

func openURI(t testing.TB, uri string) *Store {
	t.Helper()
	u, err := ParseURI(uri)
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), u)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// fromEnv returns where the test may make keys in the real service; if nobody says so, it is skipped.
func fromEnv(t *testing.T, name, like string) string {
	t.Helper()
	uri := os.Getenv(name)
	if uri == "" {
		t.Skipf("the real service is not tested: set %s to a URI like %s to make and delete keys there", name, like)
	}
	return uri
}
