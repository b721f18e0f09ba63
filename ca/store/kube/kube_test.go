package kube

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/chancery-project/chancery/ca/store"
)

// Replicas write their notes at the same time; none is lost, and none has to be tried again by the caller.
func TestNotesOfManyAtOnce(t *testing.T) {
	t.Parallel()
	c := namespace(t, server(t))
	create(t, c)
	const replicas, rounds = 6, 8
	var wg sync.WaitGroup
	for i := range replicas {
		s := open(t, c)
		wg.Go(func() {
			for n := range rounds {
				if err := s.PutNote(t.Context(), fmt.Sprintf("replica-%d", i), fmt.Append(nil, n)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	s := open(t, c)
	all, err := s.Notes(t.Context())
	if err != nil || len(all) != replicas {
		t.Fatalf("%d notes, %v", len(all), err)
	}
	for name, note := range all {
		if string(note) != fmt.Sprint(rounds-1) {
			t.Errorf("%s: %q", name, note)
		}
	}
	if err := errors.Join(s.DropNote(t.Context(), "replica-0"), s.DropNote(t.Context(), "replica-0"), s.PutNote(t.Context(), "replica-1", nil)); err != nil {
		t.Error(err)
	}
	all, err = s.Notes(t.Context())
	if _, there := all["replica-1"]; len(all) != replicas-1 || err != nil || !there {
		t.Errorf("%v, %v", all, err)
	}
}

// Others may label our objects, at any time, and their labels stay.
func TestLabelsOfOthersStay(t *testing.T) {
	t.Parallel()
	k := server(t)
	c := namespace(t, k)
	s := create(t, c)
	ctx := t.Context()
	if err := s.Create(ctx, 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	labelled := 0
	wg.Go(func() {
		for {
			patch := fmt.Appendf(nil, `{"metadata":{"labels":{"example.com/n":"%d"},"annotations":{"example.com/of":"backup"}}}`, labelled+1)
			for _, name := range []string{"chancery-state", "chancery-state-notes"} {
				if _, err := k.Client.CoreV1().Secrets(c.Namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
					t.Error(err)
				}
			}
			if _, err := k.Client.CoordinationV1().Leases(c.Namespace).Patch(ctx, "chancery-state", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
				t.Error(err)
			}
			labelled++
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	for v := range uint64(20) {
		if err := s.Replace(ctx, v+1, v+2, fmt.Append(nil, v)); err != nil {
			t.Error(err)
		}
		if held, _, err := s.Hold(ctx, "a", time.Second); !held || err != nil {
			t.Error(held, err)
		}
		if err := s.PutNote(ctx, "a", fmt.Append(nil, v)); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
	for _, name := range []string{"chancery-state", "chancery-state-notes"} {
		secret, err := k.Client.CoreV1().Secrets(c.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if secret.Labels["example.com/n"] != fmt.Sprint(labelled) || secret.Annotations["example.com/of"] != "backup" || secret.Labels["app.kubernetes.io/managed-by"] != "chancery" {
			t.Errorf("%s: labels %v, annotations %v", name, secret.Labels, secret.Annotations)
		}
	}
	lease, err := k.Client.CoordinationV1().Leases(c.Namespace).Get(ctx, "chancery-state", metav1.GetOptions{})
	if err != nil || lease.Labels["example.com/n"] != fmt.Sprint(labelled) {
		t.Errorf("%v, %v", lease.Labels, err)
	}
}

// What Kubernetes would refuse is refused before, in words that say what to do.
func TestSizes(t *testing.T) {
	t.Parallel()
	s := create(t, namespace(t, server(t)))
	ctx := t.Context()
	fits, grows := noise(1<<20-600), noise(1<<20)
	if err := s.Create(ctx, 1, bytes.Repeat([]byte("x"), store.MaxDocument)); err != nil {
		t.Errorf("16 MiB that gzip makes small: %v", err)
	}
	if err := s.Replace(ctx, 1, 2, fits); err != nil {
		t.Errorf("just below the limit: %v", err)
	}
	if data, _, err := s.Load(ctx); err != nil || !bytes.Equal(data, fits) {
		t.Errorf("loaded %d bytes, %v", len(data), err)
	}
	if err := s.Replace(ctx, 2, 3, grows); err == nil || !strings.Contains(err.Error(), "holds at most 1048576") || !strings.Contains(err.Error(), "PostgreSQL") {
		t.Errorf("just above the limit: %v", err)
	}
	if err := s.Replace(ctx, 2, 3, make([]byte, store.MaxDocument+1)); err == nil || !strings.Contains(err.Error(), "at most 16777216 are stored") {
		t.Errorf("too large: %v", err)
	}
	for _, replica := range []string{"a", "b", "c", "d"} {
		if err := s.PutNote(ctx, replica, noise(MaxNote)); err != nil {
			t.Errorf("a note of 256 KiB: %v", err)
		}
	}
	if err := s.PutNote(ctx, "e", []byte("x")); err == nil || !strings.Contains(err.Error(), "chancery replica forget") {
		t.Errorf("notes that are too large together: %v", err)
	}
	if err := s.PutNote(ctx, "b", noise(MaxNote)); err != nil {
		t.Errorf("a note of 256 KiB in place of another: %v", err)
	}
}
