package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/chancery-project/chancery/ca/store"
)

// notesPatch sets a note, or drops one: nil is null then, as in RFC 7396.
type notesPatch struct {
	Metadata *version           `json:"metadata,omitempty"`
	Data     map[string]*[]byte `json:"data"`
}

// PutNote implements store.Notes. A replica that has a note changes its own field only, whatever others do at the same time;
// only the first note of a replica must not meet another change, so that the bound on their number holds.
func (s *Store) PutNote(ctx context.Context, replica string, data []byte) error {
	return s.do(ctx, fmt.Sprintf("writing the note of replica %.300q into", replica), s.notesSecret(), func(ctx context.Context) error {
		if err := checkNote(replica, data); err != nil {
			return err
		}
		for n := 0; ; n++ {
			err := s.putNote(ctx, replica, data)
			if !apierrors.IsConflict(err) || !pause(ctx, n, retryFirst, retryMost) {
				return err
			}
		}
	})
}

// NoteRoom is what store.NoteRoom asks for.
func (s *Store) NoteRoom() int { return MaxNote }

func checkNote(replica string, data []byte) error {
	if err := store.CheckNote(replica, data); err != nil {
		return err
	}
	if len(data) > MaxNote {
		return fmt.Errorf("the note has %d bytes; in Kubernetes at most %d are stored", len(data), MaxNote)
	}
	return nil
}

func (s *Store) putNote(ctx context.Context, replica string, data []byte) error {
	all, resource, err := s.notes(ctx)
	if err != nil {
		return err
	}
	if data == nil {
		data = []byte{} // null would drop it
	}
	patch := notesPatch{Data: map[string]*[]byte{replica: &data}}
	if _, has := all[replica]; !has {
		if len(all) >= store.MaxNotes {
			return store.ErrTooManyNotes
		}
		patch.Metadata = &version{resource}
	}
	if err := fits(all, replica, data); err != nil {
		return err
	}
	return s.patch(ctx, s.notesSecret(), patch)
}

// fits says so before the API server refuses, whose message would not say what to do.
func fits(all map[string][]byte, replica string, data []byte) error {
	others := 0
	for name, note := range all {
		if name != replica {
			others += len(note)
		}
	}
	if others+len(data) > corev1.MaxSecretSize {
		return fmt.Errorf("the note has %d bytes and those of others %d; the Secret holds at most %d together: `chancery replica forget NAME` drops those of replicas that are gone; else keep the state in PostgreSQL",
			len(data), others, corev1.MaxSecretSize)
	}
	return nil
}

// Notes implements store.Notes.
func (s *Store) Notes(ctx context.Context) (all map[string][]byte, err error) {
	err = s.do(ctx, "reading notes from", s.notesSecret(), func(ctx context.Context) (err error) {
		all, _, err = s.notes(ctx)
		return err
	})
	return all, err
}

// DropNote implements store.Notes.
func (s *Store) DropNote(ctx context.Context, replica string) error {
	return s.do(ctx, fmt.Sprintf("deleting the note of replica %.300q from", replica), s.notesSecret(), func(ctx context.Context) error {
		if err := store.CheckNote(replica, nil); err != nil {
			return err
		}
		return s.patch(ctx, s.notesSecret(), notesPatch{Data: map[string]*[]byte{replica: nil}})
	})
}

// notes reads the Secret, which anybody may have written.
func (s *Store) notes(ctx context.Context) (all map[string][]byte, resource string, err error) {
	secret := &corev1.Secret{}
	if err := s.get(ctx, s.notesSecret(), secret); err != nil {
		return nil, "", err
	}
	all, err = readNotes(secret)
	return all, secret.ResourceVersion, err
}

func readNotes(secret *corev1.Secret) (map[string][]byte, error) {
	if err := checkSecret(secret, notesType); err != nil {
		return nil, err
	}
	all := make(map[string][]byte, min(len(secret.Data), store.MaxNotes))
	for name, note := range secret.Data {
		if err := store.CheckReadNote(name, int64(len(note)), len(all)); err != nil {
			return nil, err
		}
		if err := store.CheckNote(name, note); err != nil {
			return nil, fmt.Errorf("field %.300q is no note of ours: %w", name, err)
		}
		all[name] = note
	}
	return all, nil
}
