package kube

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/chancery-project/chancery/ca/store"
)

// Fields of the document's Secret.
const (
	versionField  = "version"     // decimal
	documentField = "document.gz" // gzip
	changeField   = "change"      // random: which call of Create or Replace wrote it
)

// errEmpty: the Secret is there as it was made, with no document in it.
var errEmpty = fmt.Errorf("%w in it", store.ErrMissing)

// Load implements store.Document. The API server answers from etcd, not from its cache, as no resourceVersion is given.
func (s *Store) Load(ctx context.Context) (data []byte, version uint64, err error) {
	err = s.do(ctx, "loading document from", s.documentSecret(), func(ctx context.Context) error {
		d, err := s.document(ctx)
		data, version = d.data, d.version
		return err
	})
	return data, version, err
}

// Create implements store.Document. The Secret is there already: package-level Create made it.
func (s *Store) Create(ctx context.Context, version uint64, data []byte) error {
	return s.do(ctx, "creating document in", s.documentSecret(), func(ctx context.Context) error {
		return s.swap(ctx, 0, version, data)
	})
}

// Replace implements store.Document.
func (s *Store) Replace(ctx context.Context, old, next uint64, data []byte) error {
	return s.do(ctx, "replacing document in", s.documentSecret(), func(ctx context.Context) error {
		if old == 0 {
			return errors.New("there is no version 0")
		}
		return s.swap(ctx, old, next, data)
	})
}

// swap stores data as version next if the stored version is old, 0 for none.
func (s *Store) swap(ctx context.Context, old, next uint64, data []byte) error {
	if err := store.CheckDocument(old, next, data); err != nil {
		return err
	}
	packed, err := pack(next, data)
	if err != nil {
		return err
	}
	for n := 0; ; n++ {
		d, err := s.document(ctx)
		switch {
		case err != nil && !errors.Is(err, errEmpty):
			return err
		case d.version != old:
			return fmt.Errorf("it holds version %d: %w", d.version, store.ErrConflict)
		}
		err = s.patch(ctx, s.documentSecret(), struct {
			Metadata version           `json:"metadata"`
			Data     map[string][]byte `json:"data"`
		}{version{d.resource}, packed})
		if err == nil {
			return nil
		}
		// A request whose answer was lost, or that client-go sent again, may have been done: then the change is ours. Of one
		// that is still on its way nobody can say.
		if d, loadErr := s.document(ctx); loadErr == nil && bytes.Equal(d.change, packed[changeField]) {
			return nil
		}
		// A conflict may be about its labels only.
		if !apierrors.IsConflict(err) || !pause(ctx, n, retryFirst, retryMost) {
			return err
		}
	}
}

// stored is what the Secret holds.
type stored struct {
	data     []byte
	version  uint64 // 0: there is no document in it
	change   []byte
	resource string // its resourceVersion
}

// document reads the Secret. With errEmpty the resource is right too.
func (s *Store) document(ctx context.Context) (stored, error) {
	secret := &corev1.Secret{}
	err := s.get(ctx, s.documentSecret(), secret)
	if apierrors.IsNotFound(err) {
		return stored{}, fmt.Errorf("%w: %w", store.ErrMissing, err)
	} else if err != nil {
		return stored{}, err
	}
	return unpack(secret)
}

// pack returns the data of the document's Secret.
func pack(version uint64, data []byte) (map[string][]byte, error) {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, err := z.Write(data)
	if err = errors.Join(err, z.Close()); err != nil {
		return nil, err
	}
	fields := map[string][]byte{
		versionField: strconv.AppendUint(nil, version, 10), documentField: out.Bytes(), changeField: []byte(rand.Text()),
	}
	n := 0
	for _, value := range fields {
		n += len(value)
	}
	if n > corev1.MaxSecretSize {
		return nil, fmt.Errorf("the document has %d bytes, %d of them after gzip; a Secret of Kubernetes holds at most %d: revoke by identity and not each certificate, or keep the state in PostgreSQL",
			len(data), n, corev1.MaxSecretSize)
	}
	return fields, nil
}

// unpack reads what pack wrote, from a Secret that anybody may have written since.
func unpack(secret *corev1.Secret) (d stored, err error) {
	d.resource = secret.ResourceVersion
	if err := checkSecret(secret, documentType); err != nil {
		return d, err
	}
	if len(secret.Data) == 0 {
		return d, errEmpty
	}
	number, packed, change := string(secret.Data[versionField]), secret.Data[documentField], secret.Data[changeField]
	version, err := strconv.ParseUint(number, 10, 63)
	switch {
	case len(secret.Data) != 3 || packed == nil || change == nil:
		return d, fmt.Errorf("its data has %d fields; it should have three, %s, %s and %s", len(secret.Data), versionField, documentField, changeField)
	case err != nil || version == 0 || version > store.MaxVersion || strconv.FormatUint(version, 10) != number:
		return d, fmt.Errorf("%s is %.40q; it should be a number from 1 to %d", versionField, number, uint64(store.MaxVersion))
	case len(packed) > corev1.MaxSecretSize:
		return d, fmt.Errorf("%s has %d bytes; at most %d are read", documentField, len(packed), corev1.MaxSecretSize)
	}
	data, err := gunzip(packed)
	if err != nil {
		return d, fmt.Errorf("%s: %w", documentField, err)
	}
	return stored{data, version, change, d.resource}, nil
}

// gunzip stops at the bound: what is 1 MiB may be 1 GiB after it.
func gunzip(packed []byte) ([]byte, error) {
	in := bytes.NewReader(packed)
	z, err := gzip.NewReader(in)
	if err != nil {
		return nil, fmt.Errorf("unpacking: %w", err)
	}
	z.Multistream(false)
	data, err := io.ReadAll(io.LimitReader(z, store.MaxDocument+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("unpacking: %w", err)
	case len(data) > store.MaxDocument:
		return nil, fmt.Errorf("it has more than %d bytes after unpacking, which is the most that is read", store.MaxDocument)
	case in.Len() > 0:
		return nil, fmt.Errorf("%d bytes follow the document", in.Len())
	}
	return data, nil
}

// checkSecret: who made it meant it to be this.
func checkSecret(secret *corev1.Secret, kind corev1.SecretType) error {
	switch {
	case secret.Type != kind:
		return fmt.Errorf("it has type %.80q; one of ours has %s", secret.Type, kind)
	case secret.Immutable != nil && *secret.Immutable:
		return errors.New("it is immutable, so it can never be changed; delete it and make it again with its data and without that")
	}
	return nil
}
