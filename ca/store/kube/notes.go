package kube

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/chancery-project/chancery/ca/store"
)

// How long is waited before a change that met another one is made anew.
const (
	retryFirst = 10 * time.Millisecond
	retryMost  = time.Second
)

// notesPatch sets a note, or drops one: nil is null then, as in RFC 7396.
type notesPatch struct {
	Metadata *version           `json:"metadata,omitempty"`
	Data     map[string]*[]byte `json:"data"`
}

// PutNote implements store.Notes. A replica that has a note changes its own field only, whatever others do at the same time;
// only the first note of a replica must not meet another change, so that the bound on their number holds.
func (s *Store) PutNote(ctx context.Context, replica string, data []byte) error {
	if err := s.putNote(ctx, replica, data); err != nil {
		return fmt.Errorf("writing the note of replica %s: %w", excerpt(replica), err)
	}
	return nil
}

func (s *Store) putNote(ctx context.Context, replica string, data []byte) error {
	if err := store.CheckNote(replica, data); err != nil {
		return err
	}
	if data == nil {
		data = []byte{}
	}
	for n := range tries {
		all, resource, err := s.notes(ctx)
		if err != nil {
			return err
		}
		patch := notesPatch{Data: map[string]*[]byte{replica: &data}}
		_, has := all[replica]
		if !has && len(all) >= store.MaxNotes {
			return store.ErrTooManyNotes
		}
		if !has {
			patch.Metadata = &version{resource}
		}
		if err := s.fits(all, replica, data); err != nil {
			return err
		}
		err = s.patch(ctx, s.notesSecret(), patch)
		if err == nil || !apierrors.IsConflict(err) {
			return err
		}
		if !pause(ctx, n, retryFirst, retryMost) {
			return ctx.Err()
		}
	}
	return fmt.Errorf("Secret %s/%s was changed by others each of %d times", s.namespace, s.notesName(), tries)
}

// fits says so before the API server refuses, whose message would not say what to do.
func (s *Store) fits(all map[string][]byte, replica string, data []byte) error {
	others := 0
	for name, note := range all {
		if name != replica {
			others += len(note)
		}
	}
	if others+len(data) > corev1.MaxSecretSize {
		return fmt.Errorf("it has %d bytes and those of others %d; Secret %s/%s holds at most %d together: `chancery replica forget NAME` drops those of replicas that are gone; else keep the state in PostgreSQL",
			len(data), others, s.namespace, s.notesName(), corev1.MaxSecretSize)
	}
	return nil
}

// Notes implements store.Notes.
func (s *Store) Notes(ctx context.Context) (map[string][]byte, error) {
	all, _, err := s.notes(ctx)
	return all, err
}

// DropNote implements store.Notes.
func (s *Store) DropNote(ctx context.Context, replica string) error {
	err := store.CheckNote(replica, nil)
	if err == nil {
		err = s.patch(ctx, s.notesSecret(), notesPatch{Data: map[string]*[]byte{replica: nil}})
	}
	if err != nil {
		return fmt.Errorf("deleting the note of replica %s: %w", excerpt(replica), err)
	}
	return nil
}

// notes reads the Secret, which anybody may have written.
func (s *Store) notes(ctx context.Context) (all map[string][]byte, resource string, err error) {
	secret := &corev1.Secret{}
	o := s.notesSecret()
	if err := s.get(ctx, o, secret); err != nil {
		return nil, "", err
	}
	all, err = readNotes(secret)
	return all, secret.ResourceVersion, s.wrong("reading", o, err)
}

func readNotes(secret *corev1.Secret) (map[string][]byte, error) {
	if err := checkSecret(secret, notesType); err != nil {
		return nil, err
	}
	if len(secret.Data) > store.MaxNotes {
		return nil, fmt.Errorf("it holds %d notes; at most %d are read", len(secret.Data), store.MaxNotes)
	}
	all := make(map[string][]byte, len(secret.Data))
	for name, note := range secret.Data {
		if err := store.CheckNote(name, note); err != nil {
			return nil, fmt.Errorf("field %.80q is none of ours: %w", name, err)
		}
		all[name] = note
	}
	return all, nil
}
