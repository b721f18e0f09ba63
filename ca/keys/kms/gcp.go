//go:build gcpkms

package kms

import (
	"context"
	"crypto"
	"fmt"
	"regexp"
	"strings"
	"time"

	cloud "cloud.google.com/go/kms/apiv1"
	"cloud.google.com/go/kms/apiv1/kmspb"
	"go.step.sm/crypto/kms/cloudkms"
	"google.golang.org/api/option"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
)

// gcpPoll is how often a key that is being made is asked for.
const gcpPoll = 500 * time.Millisecond

type gcpService struct {
	client *cloud.KeyManagementClient
	ring   string
	level  kmspb.ProtectionLevel
}

func openGCP(ctx context.Context, u *URI, more ...option.ClientOption) (service, error) {
	if f := u.attrs["credentials-file"]; f != "" {
		more = append(more, option.WithAuthCredentialsFile(option.ServiceAccount, f))
	}
	client, err := cloud.NewKeyManagementClient(ctx, more...)
	if err != nil {
		return nil, err
	}
	s := gcpService{client, u.attrs["ring"], kmspb.ProtectionLevel_SOFTWARE}
	if u.attrs["protection-level"] == "hsm" {
		s.level = kmspb.ProtectionLevel_HSM
	}
	return s, nil
}

func (s gcpService) create(ctx context.Context, kt ca.KeyType) (string, error) {
	algorithm := map[ca.KeyType]kmspb.CryptoKeyVersion_CryptoKeyVersionAlgorithm{
		ca.P256: kmspb.CryptoKeyVersion_EC_SIGN_P256_SHA256, ca.P384: kmspb.CryptoKeyVersion_EC_SIGN_P384_SHA384,
		ca.RSA: kmspb.CryptoKeyVersion_RSA_SIGN_PKCS1_3072_SHA256,
	}[kt]
	key, err := s.client.CreateCryptoKey(ctx, &kmspb.CreateCryptoKeyRequest{
		Parent: s.ring, CryptoKeyId: newName(),
		CryptoKey: &kmspb.CryptoKey{
			Purpose: kmspb.CryptoKey_ASYMMETRIC_SIGN, Labels: map[string]string{"managed-by": managedBy},
			VersionTemplate: &kmspb.CryptoKeyVersionTemplate{ProtectionLevel: s.level, Algorithm: algorithm},
		},
	})
	if err != nil {
		return "", err
	}
	version := key.GetName() + "/cryptoKeyVersions/1"
	for { // keys are made in the background
		v, err := s.client.GetCryptoKeyVersion(ctx, &kmspb.GetCryptoKeyVersionRequest{Name: version})
		switch {
		case err != nil:
			return "", err
		case v.GetState() == kmspb.CryptoKeyVersion_ENABLED:
			return "gcpkms:" + version, nil
		case v.GetState() != kmspb.CryptoKeyVersion_PENDING_GENERATION:
			return "", fmt.Errorf("%s is in state %s", version, v.GetState())
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("waiting until %s can be used: %w", version, ctx.Err())
		case <-time.After(gcpPoll):
		}
	}
}

var gcpRef = regexp.MustCompile(`^/cryptoKeys/[a-zA-Z0-9_-]{1,63}/cryptoKeyVersions/[0-9]{1,9}$`)

func (s gcpService) version(ref string) (string, error) {
	name, _ := strings.CutPrefix(ref, "gcpkms:")
	rest, ok := strings.CutPrefix(name, s.ring)
	if !ok || name == ref || !gcpRef.MatchString(rest) {
		return "", elsewhere("gcpkms:" + s.ring + "/cryptoKeys/NAME/cryptoKeyVersions/N")
	}
	return name, nil
}

func (s gcpService) open(ctx context.Context, ref string) (crypto.Signer, error) {
	name, err := s.version(ref)
	if err != nil {
		return nil, err
	}
	key, err := cloudkms.NewSigner(s.client, name)
	if err != nil {
		return nil, s.gone(ctx, name, err)
	}
	return key, nil
}

func (s gcpService) destroy(ctx context.Context, ref string) error {
	name, err := s.version(ref)
	if err != nil {
		return err
	}
	_, err = s.client.DestroyCryptoKeyVersion(ctx, &kmspb.DestroyCryptoKeyVersionRequest{Name: name})
	return s.gone(ctx, name, err)
}

// gone tells a key that is not there, or will soon be gone, from one that cannot be used for another reason, such as that
// it is disabled.
func (s gcpService) gone(ctx context.Context, name string, err error) error {
	switch status.Code(err) {
	case codes.NotFound:
		return fmt.Errorf("%w: %w", keys.ErrNotFound, err)
	case codes.FailedPrecondition:
		v, again := s.client.GetCryptoKeyVersion(ctx, &kmspb.GetCryptoKeyVersionRequest{Name: name})
		if state := v.GetState(); again == nil && (state == kmspb.CryptoKeyVersion_DESTROYED || state == kmspb.CryptoKeyVersion_DESTROY_SCHEDULED) {
			return fmt.Errorf("%w: %w", keys.ErrNotFound, err)
		}
	}
	return err
}

func (s gcpService) Close() error { return s.client.Close() }
