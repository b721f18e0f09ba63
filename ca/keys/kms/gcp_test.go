//go:build gcpkms

package kms

import (
	"errors"
	"os"
	"testing"

	"cloud.google.com/go/kms/apiv1/kmspb"
	"google.golang.org/api/option"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/keystest"
)

const gcpURI = "gcpkms:ring=projects/PROJECT/locations/LOCATION/keyRings/RING"

// TestGCPContractForReal makes keys in Google Cloud KMS; they are destroyed by it or its administrator.
func TestGCPContractForReal(t *testing.T) {
	uri := fromEnv(t, "CHANCERY_TEST_GCPKMS", gcpURI)
	keystest.Run(t, keystest.Config{Open: func(t *testing.T) keystest.Store { return openURI(t, uri) }, Types: cloudTypes})
}

// openFake opens a ring in the fake KMS of GoogleCloudPlatform/kms-integrations, which speaks the service's protocol without
// TLS; CHANCERY_TEST_FAKEKMS is its HOST:PORT.
func openFake(t *testing.T) *Store {
	t.Helper()
	addr := os.Getenv("CHANCERY_TEST_FAKEKMS")
	if addr == "" {
		t.Skip("set CHANCERY_TEST_FAKEKMS to the HOST:PORT of a fakekms of github.com/GoogleCloudPlatform/kms-integrations to run this")
	}
	u, err := ParseURI("gcpkms:ring=projects/test/locations/global/keyRings/chancery")
	if err != nil {
		t.Fatal(err)
	}
	s, err := openGCP(t.Context(), u, option.WithEndpoint(addr), option.WithoutAuthentication(),
		option.WithGRPCDialOption(grpc.WithTransportCredentials(insecure.NewCredentials())))
	if err != nil {
		t.Fatal(err)
	}
	// There is the ring, or it is made.
	s.(gcpService).client.CreateKeyRing(t.Context(), &kmspb.CreateKeyRingRequest{Parent: "projects/test/locations/global", KeyRingId: "chancery"})
	store := newStore(u, s)
	t.Cleanup(func() { store.Close() })
	return store
}

func TestGCPContract(t *testing.T) {
	openFake(t)
	keystest.Run(t, keystest.Config{Open: func(t *testing.T) keystest.Store { return openFake(t) }, Types: cloudTypes})
}

// A key that was disabled is no key that is gone; one that waits for its destruction is.
func TestGCPKeyStates(t *testing.T) {
	s := openFake(t)
	ref, key := keystest.New(t, s, ca.P256)
	name, err := s.service.(gcpService).version(ref)
	if err != nil {
		t.Fatal(err)
	}
	set := func(state kmspb.CryptoKeyVersion_CryptoKeyVersionState) {
		t.Helper()
		_, err := s.service.(gcpService).client.UpdateCryptoKeyVersion(t.Context(), &kmspb.UpdateCryptoKeyVersionRequest{
			CryptoKeyVersion: &kmspb.CryptoKeyVersion{Name: name, State: state}, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"state"}},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	set(kmspb.CryptoKeyVersion_DISABLED)
	if _, err := openFake(t).Open(t.Context(), ref); err == nil || errors.Is(err, keys.ErrNotFound) {
		t.Errorf("opening a disabled key: %v", err)
	}
	if err := keys.Check(key); err == nil {
		t.Error("a disabled key signs")
	}
	set(kmspb.CryptoKeyVersion_ENABLED)
	if err := keys.Check(key); err != nil {
		t.Errorf("enabled again: %v", err)
	}
	if err := openFake(t).Delete(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if _, err := openFake(t).Open(t.Context(), ref); !errors.Is(err, keys.ErrNotFound) {
		t.Errorf("a key that waits for its destruction: %v", err)
	}
}
