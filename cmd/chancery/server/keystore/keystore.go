// Package keystore owns where a server's config says that keys lie: its `keys` group, and opening what it names.
//
// It refuses a group that could not be followed, such as two places at once, before anything is opened.
package keystore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/kms"
	"github.com/chancery-project/chancery/ca/keys/kube"
	"github.com/chancery-project/chancery/ca/keys/pkcs11"
)

// Config says where new private keys are made and kept: Dir with PassphraseFile, or Secrets, PKCS11 or KMS, or, with none
// of them, sealed in the state. Keys that are there stay where they are.
type Config struct {
	// Dir is a folder of encrypted key files, in the age format. It is made if it does not exist.
	Dir string `json:"dir,omitempty"`
	// PassphraseFile holds the passphrase of the files in Dir: one line of at least 16 bytes, mode 0600. Who can read it
	// and Dir has the CA's keys: keep them apart.
	PassphraseFile string `json:"passphraseFile,omitempty"`
	// Secrets are those of a Kubernetes namespace, sealed with the state's sealing key.
	Secrets *SecretsConfig `json:"secrets,omitempty"`
	// PKCS11 names a token: pkcs11:module-path=FILE;token=LABEL?pin-source=FILE, where FILE is absolute and the PIN's has
	// mode 0600. It works in binaries built with the tag pkcs11.
	PKCS11 string `json:"pkcs11,omitempty"`
	// KMS names a cloud's key management service: awskms:region=REGION, gcpkms:ring=projects/P/locations/L/keyRings/R or
	// azurekms:vault=NAME. It works in binaries built with the tag awskms, gcpkms or azurekms.
	KMS string `json:"kms,omitempty"`
	// Type is that of new keys: p256 (default), p384, rsa, or, but not in a token or a cloud, ed25519 or mldsa65. An issuer
	// made by the server has its root's type, but p256 under an mldsa65 root.
	Type string `json:"type,omitempty"`
}

// SecretsConfig names the Secrets that hold keys. One of Kubeconfig and InCluster is set.
type SecretsConfig struct {
	// Namespace is where the Secrets lie. Required. Who can delete Secrets there can take the CA its keys; who can read them
	// and the sealing key has the keys. It should hold nothing else.
	Namespace string `json:"namespace"`
	// Kubeconfig reaches the API server. Its account needs create, get and delete of secrets in Namespace, and no more.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// InCluster reaches the API server by the service account of the pod that the server runs in, instead of Kubeconfig.
	// Default false.
	InCluster bool `json:"inCluster,omitempty"`
}

// Paths are the fields that name files.
func (c *Config) Paths() []*string {
	paths := []*string{&c.Dir, &c.PassphraseFile}
	if c.Secrets != nil {
		paths = append(paths, &c.Secrets.Kubeconfig)
	}
	return paths
}

// places counts in how many places keys should lie.
func (c *Config) places() (n int) {
	for _, set := range []bool{c.Dir != "", c.Secrets != nil, c.PKCS11 != "", c.KMS != ""} {
		if set {
			n++
		}
	}
	return n
}

// Place is a Config that was checked.
type Place struct {
	config Config
	kind   ca.KeyType
	token  *pkcs11.URI
	cloud  *kms.URI
}

// Store is a key store that this process opened.
type Store interface {
	keys.Store
	io.Closer
}

// Parse checks a config without opening anything. Its paths should be absolute.
func Parse(c Config) (*Place, error) {
	p := &Place{config: c}
	var err error
	if c.Type != "" {
		if p.kind, err = ca.ParseKeyType(c.Type); err != nil {
			return nil, fmt.Errorf("keys.type: %w", err)
		}
	}
	switch {
	case c.places() > 1:
		return nil, errors.New("keys: more than one of dir, secrets, pkcs11 and kms is set; set the one where keys should lie")
	case (c.Dir != "") != (c.PassphraseFile != ""):
		return nil, errors.New("keys: dir and passphraseFile belong together: the folder of the keys, and the file with the passphrase that encrypts them")
	case (c.PKCS11 != "" || c.KMS != "") && (p.kind == ca.Ed25519 || p.kind == ca.MLDSA65):
		return nil, errors.New("keys.type: tokens and clouds make keys of type p256, p384 and rsa")
	case c.PKCS11 != "":
		if p.token, err = pkcs11.ParseURI(c.PKCS11); err != nil {
			return nil, fmt.Errorf("keys.pkcs11: %w", err)
		}
	case c.KMS != "":
		if p.cloud, err = kms.ParseURI(c.KMS); err != nil {
			return nil, fmt.Errorf("keys.kms: %w", err)
		}
	case c.Secrets != nil:
		return p, c.Secrets.check()
	}
	return p, nil
}

func (c *SecretsConfig) check() error {
	if (c.Kubeconfig != "") == c.InCluster {
		return errors.New("keys.secrets: set one of kubeconfig and inCluster, which say how to reach the API server")
	}
	if err := kube.CheckNamespace(c.Namespace); err != nil {
		return fmt.Errorf("keys.secrets.namespace: %w", err)
	}
	return nil
}

// Type returns the type of new keys; empty means the default.
func (p *Place) Type() ca.KeyType { return p.kind }

// Local reports whether new keys would lie where other servers do not reach them.
func (p *Place) Local() bool { return p.config.Dir != "" }

// Open opens the store; nil if keys lie sealed in the state, which sealer is of.
func (p *Place) Open(ctx context.Context, sealer *keys.Sealer, logger *slog.Logger) (store Store, err error) {
	switch {
	case p.config.Secrets != nil:
		store, err = kube.Open(kube.Config{Namespace: p.config.Secrets.Namespace, Kubeconfig: p.config.Secrets.Kubeconfig, Sealer: sealer})
	case p.config.Dir != "":
		store, err = keys.OpenFiles(keys.FilesConfig{Dir: p.config.Dir, PassphraseFile: p.config.PassphraseFile})
	case p.token != nil:
		store, err = pkcs11.Open(ctx, pkcs11.Config{URI: p.token, Logger: logger})
	case p.cloud != nil:
		store, err = kms.Open(ctx, p.cloud)
	}
	if err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	return store, nil
}

// Describe says to an admin where keys lie; sealed is what to say if it is the state.
func (p *Place) Describe(sealed string) string {
	switch {
	case p.config.Dir != "":
		return fmt.Sprintf("Private keys lie in %s, encrypted with the passphrase in %s.", p.config.Dir, p.config.PassphraseFile)
	case p.config.Secrets != nil:
		return fmt.Sprintf("Private keys lie in Secrets of namespace %s, sealed with the sealing key: who has both is the CA.", p.config.Secrets.Namespace)
	case p.token != nil:
		return "Private keys lie in the token, and never leave it."
	case p.cloud != nil:
		return fmt.Sprintf("Private keys lie in %s, and never leave it.", p.cloud)
	}
	return sealed
}
