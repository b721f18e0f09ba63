// Package kube owns keys in Kubernetes Secrets: each key is one Secret of one namespace, sealed with the server's sealing
// key and named by the key's identifier.
//
// Who can read the Secrets alone learns no key, and who has the server's disk alone, with the sealing key on it, has none
// either: it takes both. Who can write the Secrets can delete keys, and cannot make a server use another one.
//
// It refuses to change a Secret that exists, and to open one that is not as it wrote it: of another type or name,
// mutable, with other data, or sealed with another key. It never lists Secrets: the rights to create, get and delete
// them in that namespace are enough.
package kube

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/kube"
	"github.com/chancery-project/chancery/trust"
)

const (
	refPrefix  = "secret:"
	namePrefix = "chancery-key-"
	// secretType names the layout of the data, so that a later one can tell them apart.
	secretType = "chancery/sealed-key-v1"
	dataKey    = "sealed"
	maxSealed  = 16 << 10
	// patience bounds each request to the API server.
	patience = 10 * time.Second
)

// Config says which Secrets are keys.
type Config struct {
	Namespace  string
	Kubeconfig string       // file; empty means the service account of the pod that we run in
	Sealer     *keys.Sealer // of the server's state
}

// Store is a keys.Store in Secrets. A key is fetched once, when it is first opened, and stays in memory: an API server
// that is away, or a Secret that is deleted, does not stop a server that runs.
type Store struct {
	config Config
	core   rest.Interface
	client interface{ CloseIdleConnections() }
	closed atomic.Bool

	mu     sync.Mutex // guards opened; never held over a request
	opened map[string]crypto.Signer
}

var namespaceForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// CheckNamespace says what is wrong with the name of a namespace.
func CheckNamespace(name string) error {
	if !namespaceForm.MatchString(name) {
		return fmt.Errorf("%.80q is no name of a namespace; give one that exists, such as chancery-keys", name)
	}
	return nil
}

// Open makes a client. It asks the API server nothing.
func Open(c Config) (*Store, error) {
	if err := CheckNamespace(c.Namespace); err != nil {
		return nil, err
	}
	cfg, client, err := kube.Client(c.Kubeconfig)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Secret{})
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	core, err := kube.Group(cfg, client, scheme, corev1.SchemeGroupVersion, "/api")
	if err != nil {
		return nil, fmt.Errorf("making a client from kubeconfig %q: %w", c.Kubeconfig, err)
	}
	return &Store{config: c, core: core, client: client, opened: map[string]crypto.Signer{}}, nil
}

// Generate implements keys.Store. What lies in the cluster is read back before it counts: an admission webhook may have
// changed it, and an answer that was lost may have been a success.
func (s *Store) Generate(ctx context.Context, kt ca.KeyType) (string, error) {
	if err := s.usable(); err != nil {
		return "", err
	}
	key, err := ca.GenerateKey(kt)
	if err != nil {
		return "", fmt.Errorf("making key: %w", err)
	}
	id, err := keys.IDOf(key.Public())
	if err != nil {
		return "", err
	}
	secret, err := s.encode(id, key)
	if err != nil {
		return "", fmt.Errorf("sealing key %s: %w", id, err)
	}
	if err := s.create(ctx, secret); err != nil && !apierrors.IsAlreadyExists(err) {
		return "", s.wrong("creating", id, err)
	}
	stored, err := s.read(ctx, id)
	if err != nil {
		return "", fmt.Errorf("reading back the key that was just made: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened[id] = stored
	return refPrefix + id, nil
}

// Open implements keys.Store.
func (s *Store) Open(ctx context.Context, ref string) (crypto.Signer, error) {
	if err := s.usable(); err != nil {
		return nil, err
	}
	id, err := keyID(ref)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	key, ok := s.opened[id]
	s.mu.Unlock()
	if !ok {
		if key, err = s.read(ctx, id); err != nil {
			return nil, err
		}
		s.mu.Lock()
		s.opened[id] = key
		s.mu.Unlock()
	}
	return keys.Hide(key, s.usable), nil
}

// Delete implements keys.Store.
func (s *Store) Delete(ctx context.Context, ref string) error {
	if err := s.usable(); err != nil {
		return err
	}
	id, err := keyID(ref)
	if err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.opened, id)
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = s.core.Delete().Namespace(s.config.Namespace).Resource("secrets").Name(namePrefix + id).Do(ctx).Error()
	if err != nil && !apierrors.IsNotFound(err) {
		return s.wrong("deleting", id, err)
	}
	return nil
}

func (s *Store) create(ctx context.Context, secret *corev1.Secret) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return s.core.Post().Namespace(s.config.Namespace).Resource("secrets").Body(secret).Do(ctx).Error()
}

func (s *Store) read(ctx context.Context, id string) (crypto.Signer, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	secret := &corev1.Secret{}
	err := s.core.Get().Namespace(s.config.Namespace).Resource("secrets").Name(namePrefix + id).Do(ctx).Into(secret)
	if apierrors.IsNotFound(err) {
		return nil, s.wrong("opening", id, fmt.Errorf("%w: %w", keys.ErrNotFound, err))
	} else if err != nil {
		return nil, s.wrong("opening", id, err)
	}
	key, err := s.decode(id, secret)
	if err != nil {
		return nil, s.wrong("opening", id, err)
	}
	return key, nil
}

// wrong names the key and its Secret, and the rights that are needed if those were what lacked.
func (s *Store) wrong(what, id string, err error) error {
	if apierrors.IsForbidden(err) {
		err = fmt.Errorf("%w; its account should have the rights to create, get and delete secrets in namespace %s", err, s.config.Namespace)
	}
	return fmt.Errorf("%s key %s in Secret %s/%s%s: %w", what, id, s.config.Namespace, namePrefix, id, err)
}

// encode returns the Secret of a key.
func (s *Store) encode(id string, key crypto.Signer) (*corev1.Secret, error) {
	pem, err := trust.EncodeKey(key)
	if err != nil {
		return nil, err
	}
	immutable := true
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Name: namePrefix + id, Namespace: s.config.Namespace,
			Labels: map[string]string{"app.kubernetes.io/managed-by": "chancery", "app.kubernetes.io/component": "authority-key"},
		},
		Type: secretType, Immutable: &immutable, Data: map[string][]byte{dataKey: s.config.Sealer.Seal(pem, sealContext(id))},
	}, nil
}

// decode opens a Secret that should be as encode made it. What an admin may add, labels and annotations, is not looked at.
func (s *Store) decode(id string, secret *corev1.Secret) (crypto.Signer, error) {
	sealed := secret.Data[dataKey]
	switch {
	case secret.Name != namePrefix+id || secret.Namespace != s.config.Namespace:
		return nil, fmt.Errorf("the API server answered with %.80q of namespace %.80q", secret.Name, secret.Namespace)
	case secret.Type != secretType:
		return nil, fmt.Errorf("it has type %.80q; a key of ours has %s", secret.Type, secretType)
	case secret.Immutable == nil || !*secret.Immutable:
		return nil, errors.New("it is not immutable, as a key of ours is")
	case len(secret.Data) != 1 || len(sealed) == 0:
		return nil, fmt.Errorf("its data has %d fields; it should have one, %s", len(secret.Data), dataKey)
	case len(sealed) > maxSealed:
		return nil, fmt.Errorf("%s has %d bytes; at most %d are read", dataKey, len(sealed), maxSealed)
	}
	pem, err := s.config.Sealer.Open(sealed, sealContext(id))
	if err != nil {
		return nil, err
	}
	key, err := trust.ParseKey(pem)
	if err != nil {
		return nil, err
	}
	if have, err := keys.IDOf(key.Public()); err != nil || have != id {
		return nil, fmt.Errorf("it holds another key, %s", have)
	}
	return key, nil
}

// sealContext binds a sealed key to its identifier, so that it does not open under another name.
func sealContext(id string) string { return "key " + id + " in a Secret" }

// keyID returns the identifier in a reference, which is 160 bits in hex.
func keyID(ref string) (string, error) {
	id, ok := strings.CutPrefix(ref, refPrefix)
	if !ok || len(id) != 40 || strings.Trim(id, "0123456789abcdef") != "" {
		return "", fmt.Errorf("opening key %.100q: %w: this store's references are %sHEX", ref, keys.ErrNotFound, refPrefix)
	}
	return id, nil
}

// Close takes every signer of the store out of use.
func (s *Store) Close() error {
	s.closed.Store(true)
	s.client.CloseIdleConnections()
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.opened)
	return nil
}

func (s *Store) usable() error {
	if s.closed.Load() {
		return keys.ErrClosed
	}
	return nil
}
