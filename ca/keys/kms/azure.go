//go:build azurekms

package kms

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
	"github.com/Azure/azure-sdk-for-go/sdk/security/keyvault/azkeys"
	"go.step.sm/crypto/kms/apiv1"
	"go.step.sm/crypto/kms/azurekms"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
)

// azureService makes keys and signers by go.step.sm/crypto, and deletes keys by a client of its own, which that lacks.
type azureService struct {
	vault  *azurekms.KeyVault
	client *azkeys.Client
	name   string // of the vault
}

func openAzure(ctx context.Context, u *URI) (service, error) {
	name := strings.ToLower(u.attrs["vault"])
	uri := "azurekms:vault=" + name
	if u.attrs["hsm"] == "true" {
		uri += "?hsm=true"
	}
	vault, err := azurekms.New(ctx, apiv1.Options{URI: uri})
	if err != nil {
		return nil, err
	}
	credential, err := azidentity.NewDefaultAzureCredential(nil)
	if err != nil {
		return nil, err
	}
	client, err := azkeys.NewClient("https://"+name+".vault.azure.net/", credential, nil)
	if err != nil {
		return nil, err
	}
	return azureService{vault, client, name}, nil
}

func (s azureService) create(_ context.Context, kt ca.KeyType) (string, error) {
	request := &apiv1.CreateKeyRequest{Name: "azurekms:vault=" + s.name + ";name=" + newName()}
	switch kt {
	case ca.P256:
		request.SignatureAlgorithm = apiv1.ECDSAWithSHA256
	case ca.P384:
		request.SignatureAlgorithm = apiv1.ECDSAWithSHA384
	default:
		request.SignatureAlgorithm, request.Bits = apiv1.SHA256WithRSA, 3072
	}
	made, err := s.vault.CreateKey(request)
	if err != nil {
		return "", err
	}
	_, err = s.keyName(made.Name)
	return made.Name, err
}

// azureRef is what go.step.sm/crypto calls a key.
var azureRef = regexp.MustCompile(`^azurekms:name=(chancery-[0-9a-f]{32});vault=([A-Za-z0-9-]{3,24})\?version=[0-9a-f]{32}$`)

func (s azureService) keyName(ref string) (string, error) {
	m := azureRef.FindStringSubmatch(ref)
	if m == nil || !strings.EqualFold(m[2], s.name) {
		return "", elsewhere("azurekms:name=NAME;vault=" + s.name + "?version=HEX")
	}
	return m[1], nil
}

func (s azureService) open(_ context.Context, ref string) (crypto.Signer, error) {
	if _, err := s.keyName(ref); err != nil {
		return nil, err
	}
	key, err := s.vault.CreateSigner(&apiv1.CreateSignerRequest{SigningKey: ref})
	if err != nil {
		return nil, azureGone(err)
	}
	return key, nil
}

func (s azureService) destroy(ctx context.Context, ref string) error {
	name, err := s.keyName(ref)
	if err != nil {
		return err
	}
	_, err = s.client.DeleteKey(ctx, name, nil)
	return azureGone(err)
}

func azureGone(err error) error {
	if answer, ok := errors.AsType[*azcore.ResponseError](err); ok && answer.StatusCode == http.StatusNotFound {
		return fmt.Errorf("%w: %w", keys.ErrNotFound, err)
	}
	return err
}

func (azureService) Close() error { return nil }
