//go:build awskms

package kms

import (
	"errors"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/kms"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/keystest"
)

const awsURI = "awskms:region=eu-central-1"

func TestAWSContract(t *testing.T) {
	keystest.StartLocalKMS(t).Use(t)
	keystest.Run(t, keystest.Config{Open: func(t *testing.T) keystest.Store { return openURI(t, awsURI) }, Types: cloudTypes})
}

// TestAWSContractForReal makes keys in AWS; they are deleted by it or its administrator.
func TestAWSContractForReal(t *testing.T) {
	uri := fromEnv(t, "CHANCERY_TEST_AWSKMS", awsURI)
	keystest.Run(t, keystest.Config{Open: func(t *testing.T) keystest.Store { return openURI(t, uri) }, Types: cloudTypes})
}

// A service that goes away and comes back: errors while it is away, which do not say that the key is gone, and signatures
// afterwards, all with the same signer.
func TestAWSOutage(t *testing.T) {
	k := keystest.StartLocalKMS(t)
	k.Use(t)
	t.Setenv("AWS_MAX_ATTEMPTS", "1")
	s := openURI(t, awsURI)
	ref, key := keystest.New(t, s, ca.P256)
	k.Kill()
	_, opened := openURI(t, awsURI).Open(t.Context(), ref)
	_, generated := s.Generate(t.Context(), ca.P256)
	for what, err := range map[string]error{"signing": keys.Check(key), "opening": opened, "making": generated, "deleting": s.Delete(t.Context(), ref)} {
		if err == nil || errors.Is(err, keys.ErrNotFound) || !strings.Contains(err.Error(), awsURI) || !strings.Contains(err.Error(), "connection refused") {
			t.Errorf("%s without the service: %v", what, err)
		}
	}
	k.Start(t)
	if err := keys.Check(key); err != nil {
		t.Errorf("after the service came back: %v", err)
	}
}

// A key that was disabled is no key that is gone; one that waits for its deletion is.
func TestAWSKeyStates(t *testing.T) {
	keystest.StartLocalKMS(t).Use(t)
	s := openURI(t, awsURI)
	ref, key := keystest.New(t, s, ca.P256)
	id, err := awsKeyID(ref)
	if err != nil {
		t.Fatal(err)
	}
	client := s.service.(awsService).client
	if _, err := client.DisableKey(t.Context(), &kms.DisableKeyInput{KeyId: aws.String(id)}); err != nil {
		t.Fatal(err)
	}
	if err := keys.Check(key); err == nil || errors.Is(err, keys.ErrNotFound) || !strings.Contains(err.Error(), "disabled") {
		t.Errorf("signing with a disabled key: %v", err)
	}
	if _, err := client.EnableKey(t.Context(), &kms.EnableKeyInput{KeyId: aws.String(id)}); err != nil {
		t.Fatal(err)
	}
	if err := keys.Check(key); err != nil {
		t.Errorf("enabled again: %v", err)
	}
	if err := openURI(t, awsURI).Delete(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if err := keys.Check(key); err == nil {
		t.Error("a key that waits for its deletion signs")
	}
	if _, err := openURI(t, awsURI).Open(t.Context(), ref); !errors.Is(err, keys.ErrNotFound) {
		t.Errorf("a key that waits for its deletion: %v", err)
	}
}

func BenchmarkAWS(b *testing.B) {
	keystest.StartLocalKMS(b).Use(b)
	keystest.Benchmark(b, "local-kms p256", openURI(b, awsURI))
}
