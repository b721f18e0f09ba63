//go:build azurekms

package kms

import (
	"net/url"
	"strings"
	"testing"

	"go.step.sm/crypto/kms/uri"

	"github.com/chancery-project/chancery/ca/keys/keystest"
)

// TestAzureContractForReal makes keys in an Azure Key Vault; they are deleted by it or its administrator.
func TestAzureContractForReal(t *testing.T) {
	name := fromEnv(t, "CHANCERY_TEST_AZUREKMS", "azurekms:vault=NAME")
	keystest.Run(t, keystest.Config{Open: func(t *testing.T) keystest.Store { return openURI(t, name) }, Types: cloudTypes})
}

// What go.step.sm/crypto calls a key is what we take for a reference.
func TestAzureReferences(t *testing.T) {
	version := strings.Repeat("0a", 16)
	made := uri.New("azurekms", url.Values{"vault": {"my-vault"}, "name": {newName()}})
	made.RawQuery = url.Values{"version": {version}}.Encode()
	s := azureService{name: "my-vault"}
	if name, err := s.keyName(made.String()); err != nil || !strings.HasPrefix(name, "chancery-") {
		t.Errorf("%s: %q, %v", made, name, err)
	}
	for _, bad := range []string{strings.Replace(made.String(), "my-vault", "other", 1), strings.TrimSuffix(made.String(), version), "azurekms:name=web;vault=my-vault?version=" + version} {
		if _, err := s.keyName(bad); err == nil {
			t.Errorf("%s is taken for a key of ours", bad)
		}
	}
}
