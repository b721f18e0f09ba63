//go:build awskms

package server

import (
	"strings"
	"testing"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/keystest"
)

// TestAWSServer runs a server whose keys lie in a KMS: made there by init, and of use after it was away.
func TestAWSServer(t *testing.T) {
	kms := keystest.StartLocalKMS(t)
	kms.Use(t)
	t.Setenv("AWS_MAX_ATTEMPTS", "1")
	srv, stop := started(t, "keys: {kms: 'awskms:region=eu-central-1'}\n")
	defer stop()
	check := func() error {
		for _, w := range srv.authority.Keys() {
			key, err := w.Open(t.Context())
			if err == nil {
				err = keys.Check(key)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := check(); err != nil {
		t.Error(err)
	}
	kms.Kill()
	if err := check(); err == nil || !strings.Contains(err.Error(), "awskms:region=eu-central-1") {
		t.Errorf("without the KMS: %v", err)
	}
	kms.Start(t)
	if err := check(); err != nil {
		t.Errorf("with the KMS back: %v", err)
	}
	if err := srv.ready(); err != nil {
		t.Error(err)
	}
}
