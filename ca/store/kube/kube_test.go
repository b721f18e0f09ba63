package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/test/process"
)

func TestDocument(t *testing.T) {
	t.Parallel()
	c := namespace(t, server(t))
	s := create(t, c)
	ctx := t.Context()
	if _, _, err := s.Load(ctx); !errors.Is(err, store.ErrMissing) || !strings.Contains(err.Error(), c.Namespace+"/chancery-state") {
		t.Errorf("loading from an empty store gave %v", err)
	}
	if err := s.Replace(ctx, 1, 2, []byte("x")); !errors.Is(err, store.ErrConflict) {
		t.Errorf("replacing nothing gave %v", err)
	}
	if err := s.Create(ctx, 5<<32, []byte("one")); err != nil {
		t.Fatal(err)
	}
	other := open(t, c)
	if err := other.Create(ctx, 1, []byte("other")); !errors.Is(err, store.ErrConflict) {
		t.Errorf("creating twice gave %v", err)
	}
	if err := other.Replace(ctx, 5<<32, 6<<32, []byte("two")); err != nil {
		t.Fatal(err)
	}
	if err := s.Replace(ctx, 5<<32, 5<<32+1, []byte("late")); !errors.Is(err, store.ErrConflict) {
		t.Errorf("replacing an old version gave %v", err)
	}
	if data, v, err := s.Load(ctx); string(data) != "two" || v != 6<<32 || err != nil {
		t.Errorf("loaded %q, version %d, %v", data, v, err)
	}
}

func TestWatchTells(t *testing.T) {
	t.Parallel()
	c := namespace(t, server(t))
	a, b := create(t, c), open(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	told := make(chan struct{}, 1)
	done := make(chan error, 1)
	go func() {
		done <- a.Watch(ctx, func() {
			select {
			case told <- struct{}{}:
			default:
			}
		})
	}()
	// seen waits until the change was told and can be read.
	seen := func(what string, see func() bool) {
		t.Helper()
		for !see() {
			select {
			case <-told:
			case <-time.After(20 * time.Second):
				t.Fatalf("%s was not told", what)
			}
		}
	}
	if err := b.Create(ctx, 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	seen("the document", func() bool { data, _, _ := a.Load(ctx); return string(data) == "one" })
	if err := b.PutNote(ctx, "b", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	seen("a note", func() bool { all, _ := a.Notes(ctx); return string(all["b"]) == "hello" })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestLease(t *testing.T) {
	t.Parallel()
	c := namespace(t, server(t))
	a, b := create(t, c), open(t, c)
	ctx := t.Context()
	want := func(s *Store, holder string, held bool, by string) {
		t.Helper()
		if h, b, err := s.Hold(ctx, holder, time.Second); h != held || b != by || err != nil {
			t.Errorf("%s: held %v, by %q, %v; want %v, %q", holder, h, b, err, held, by)
		}
	}
	want(a, "a", true, "a")
	want(b, "b", false, "a")
	want(a, "a", true, "a")
	if err := b.GiveUp(ctx, "b"); err != nil {
		t.Error(err)
	}
	want(b, "b", false, "a")
	if err := a.GiveUp(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	want(b, "b", true, "b")
	want(a, "a", false, "b")
	process.Eventually(t, 20*time.Second, "the lease ends", func() error {
		if held, by, err := a.Hold(ctx, "a", time.Second); !held {
			return fmt.Errorf("held by %s, %v", by, err)
		}
		return nil
	})
	lease, err := server(t).Client.CoordinationV1().Leases(c.Namespace).Get(ctx, "chancery-state", metav1.GetOptions{})
	if err != nil || *lease.Spec.LeaseTransitions != 3 {
		t.Errorf("%v, %v; want 3 transitions", lease.Spec, err)
	}
}

// Whoever comes first takes a lease that is free, and nobody else has it then.
func TestOneOfManyTakesTheLease(t *testing.T) {
	t.Parallel()
	c := namespace(t, server(t))
	create(t, c)
	var mu sync.Mutex
	held, by := map[string]bool{}, map[string]bool{}
	var wg sync.WaitGroup
	for i := range 8 {
		s := open(t, c)
		wg.Go(func() {
			name := fmt.Sprintf("replica-%d", i)
			h, b, err := s.Hold(t.Context(), name, time.Minute)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			held[name], by[b] = h, true
		})
	}
	wg.Wait()
	for name, h := range held {
		if h && !by[name] || h && len(by) != 1 {
			t.Errorf("held %v, by %v", held, by)
		}
	}
	if len(by) != 1 {
		t.Errorf("held by %v", by)
	}
}

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
	if err := s.PutNote(ctx, "a", noise(600<<10)); err != nil {
		t.Errorf("a note of 600 KiB: %v", err)
	}
	if err := s.PutNote(ctx, "b", noise(500<<10)); err == nil || !strings.Contains(err.Error(), "chancery replica forget") {
		t.Errorf("two notes that are too large together: %v", err)
	}
	if err := s.PutNote(ctx, "a", noise(store.MaxNote)); err != nil {
		t.Errorf("a note of 1 MiB in place of one of 600 KiB: %v", err)
	}
}
