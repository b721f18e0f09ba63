//go:build !awskms && !gcpkms && !azurekms

package kms

import (
	"strings"
	"testing"
)

// A binary without a service says how to get one with it.
func TestNotBuilt(t *testing.T) {
	for tag, uri := range map[string]string{
		"awskms": "awskms:region=eu-central-1", "gcpkms": "gcpkms:ring=projects/my-p/locations/global/keyRings/ca", "azurekms": "azurekms:vault=my-vault",
	} {
		u, err := ParseURI(uri)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), u); err == nil || !strings.Contains(err.Error(), "go build -tags "+tag+" ") || !strings.Contains(err.Error(), uri) {
			t.Errorf("%s: %v", uri, err)
		}
	}
}
