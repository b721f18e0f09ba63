//go:build awskms

package kms

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/kms"
	"github.com/aws/aws-sdk-go-v2/service/kms/types"
	"go.step.sm/crypto/kms/awskms"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
)

// awsPendingDays is the shortest wait before AWS deletes a key.
const awsPendingDays = 7

type awsService struct{ client *kms.Client }

func openAWS(ctx context.Context, u *URI) (service, error) {
	options := []func(*config.LoadOptions) error{config.WithRegion(u.attrs["region"])}
	if p := u.attrs["profile"]; p != "" {
		options = append(options, config.WithSharedConfigProfile(p))
	}
	if f := u.attrs["credentials-file"]; f != "" {
		options = append(options, config.WithSharedCredentialsFiles([]string{f}))
	}
	cfg, err := config.LoadDefaultConfig(ctx, options...)
	if err != nil {
		return nil, err
	}
	return awsService{kms.NewFromConfig(cfg)}, nil
}

func (s awsService) create(ctx context.Context, kt ca.KeyType) (string, error) {
	spec := map[ca.KeyType]types.KeySpec{ca.P256: types.KeySpecEccNistP256, ca.P384: types.KeySpecEccNistP384, ca.RSA: types.KeySpecRsa3072}[kt]
	out, err := s.client.CreateKey(ctx, &kms.CreateKeyInput{
		KeySpec: spec, KeyUsage: types.KeyUsageTypeSignVerify, Description: aws.String(newName()),
		Tags: []types.Tag{{TagKey: aws.String("managed-by"), TagValue: aws.String(managedBy)}},
	})
	if err != nil {
		return "", err
	}
	return "awskms:key-id=" + aws.ToString(out.KeyMetadata.KeyId), nil
}

var awsRef = regexp.MustCompile(`^awskms:key-id=([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})$`)

func awsKeyID(ref string) (string, error) {
	m := awsRef.FindStringSubmatch(ref)
	if m == nil {
		return "", elsewhere("awskms:key-id=UUID")
	}
	return m[1], nil
}

func (s awsService) open(ctx context.Context, ref string) (crypto.Signer, error) {
	id, err := awsKeyID(ref)
	if err != nil {
		return nil, err
	}
	key, err := awskms.NewSigner(s.client, id)
	if err != nil {
		return nil, awsGone(err)
	}
	return key, nil
}

func (s awsService) destroy(ctx context.Context, ref string) error {
	id, err := awsKeyID(ref)
	if err != nil {
		return err
	}
	_, err = s.client.ScheduleKeyDeletion(ctx, &kms.ScheduleKeyDeletionInput{KeyId: aws.String(id), PendingWindowInDays: aws.Int32(awsPendingDays)})
	return awsGone(err)
}

// awsGone tells a key that is not there, or will soon be gone, from one that cannot be used for another reason, such as
// that it is disabled.
func awsGone(err error) error {
	state, ok := errors.AsType[*types.KMSInvalidStateException](err)
	_, missing := errors.AsType[*types.NotFoundException](err)
	if missing || ok && strings.Contains(state.ErrorMessage(), "pending deletion") {
		return fmt.Errorf("%w: %w", keys.ErrNotFound, err)
	}
	return err
}

func (awsService) Close() error { return nil }
