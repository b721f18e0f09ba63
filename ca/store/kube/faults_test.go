package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/storetest"
	"github.com/chancery-project/chancery/test/apiserver"
	"github.com/chancery-project/chancery/test/process"
)

// load is writers that go on whatever happens.
type load struct {
	history storetest.History
	stop    context.CancelFunc
	writers sync.WaitGroup
}

func startLoad(t *testing.T, c Config, writers int) *load {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	l := &load{stop: stop}
	for i := range writers {
		s := open(t, c)
		l.writers.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				if err := l.history.Write(ctx, s, i, 1); err != nil && ctx.Err() == nil {
					time.Sleep(50 * time.Millisecond)
					if strings.Contains(err.Error(), "ends with") || errors.Is(err, store.ErrMissing) { // what no outage may show
						t.Error(err)
					}
				}
				s.PutNote(ctx, fmt.Sprintf("replica-%d", i), fmt.Append(nil, n))
				s.Hold(ctx, fmt.Sprintf("replica-%d", i), time.Second)
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) end() {
	l.stop()
	l.writers.Wait()
}

// goesOn waits for changes that are confirmed from now on.
func (l *load) goesOn(t *testing.T) {
	t.Helper()
	from := l.history.Confirmed()
	process.Eventually(t, 90*time.Second, "changes are confirmed", func() error {
		if n := l.history.Confirmed() - from; n < 5 {
			return fmt.Errorf("%d so far", n)
		}
		return nil
	})
}

// TestAPIServerKilledUnderLoad: kill -9 of the API server, and a pause of its etcd, while three replicas change the document. What
// was confirmed stays, the document has one history, and who watches sees the end of it.
func TestAPIServerKilledUnderLoad(t *testing.T) {
	t.Parallel()
	k := apiserver.Start(t, "")
	c := namespace(t, k)
	watcher := create(t, c)
	if err := watcher.Create(t.Context(), 1, []byte("[]")); err != nil {
		t.Fatal(err)
	}
	news := make(chan struct{}, 1)
	ctx, stop := context.WithCancel(t.Context())
	watched := make(chan error, 1)
	go func() {
		watched <- watcher.Watch(ctx, func() {
			select {
			case news <- struct{}{}:
			default:
			}
		})
	}()
	l := startLoad(t, c, 3)
	l.goesOn(t)
	for range 2 {
		k.APIServer().Kill()
		if _, _, err := watcher.Load(t.Context()); err == nil || errors.Is(err, store.ErrMissing) {
			t.Errorf("loading without an API server gave %v", err)
		}
		k.RestartAPIServer(t)
		l.goesOn(t)
	}
	if err := k.Etcd().Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var err error
	for range 1000 { // what was under way when the signal came may still be answered
		if _, _, err = watcher.Load(t.Context()); err != nil {
			break
		}
	}
	if err == nil || errors.Is(err, store.ErrMissing) {
		t.Errorf("loading while etcd is paused gave %v", err)
	}
	if err := k.Etcd().Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	l.goesOn(t)
	l.end()
	if err := l.history.Check(t.Context(), watcher, 1); err != nil {
		t.Error(err)
	}
	// A change of now is told: the watch has come back by itself, however often it broke.
	data, v, err := watcher.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := open(t, c).Replace(t.Context(), v, v+1, data); err != nil {
		t.Fatal(err)
	}
	for seen := v; seen != v+1; {
		select {
		case <-news:
			if _, seen, err = watcher.Load(t.Context()); err != nil {
				t.Fatal(err)
			}
		case <-time.After(60 * time.Second):
			t.Fatal("the last change was not told")
		}
	}
	stop()
	if err := <-watched; err != nil {
		t.Error(err)
	}
	t.Logf("%d changes", l.history.Confirmed())
}

// TestObjectsDeletedByHand: what is deleted is an error that names it, to open and to use; what is made again by hand works, and is
// empty.
func TestObjectsDeletedByHand(t *testing.T) {
	t.Parallel()
	k := server(t)
	c := namespace(t, k)
	ctx := t.Context()
	s := create(t, c)
	if err := errors.Join(s.Create(ctx, 7, []byte("seven")), s.PutNote(ctx, "a", []byte("a"))); err != nil {
		t.Fatal(err)
	}
	secrets, leases := k.Client.CoreV1().Secrets(c.Namespace), k.Client.CoordinationV1().Leases(c.Namespace)
	for _, o := range []struct {
		name    string
		remove  func() error
		use     func() error
		missing error
	}{
		{"Secret " + c.Namespace + "/chancery-state", func() error { return secrets.Delete(ctx, "chancery-state", metav1.DeleteOptions{}) },
			func() error { _, _, err := s.Load(ctx); return err }, store.ErrMissing},
		{"Secret " + c.Namespace + "/chancery-state", func() error { return nil },
			func() error { return s.Replace(ctx, 7, 8, []byte("eight")) }, store.ErrMissing},
		{"Secret " + c.Namespace + "/chancery-state-notes", func() error { return secrets.Delete(ctx, "chancery-state-notes", metav1.DeleteOptions{}) },
			func() error { _, err := s.Notes(ctx); return err }, nil},
		{"Secret " + c.Namespace + "/chancery-state-notes", func() error { return nil },
			func() error { return s.PutNote(ctx, "a", []byte("a")) }, nil},
		{"Lease " + c.Namespace + "/chancery-state", func() error { return leases.Delete(ctx, "chancery-state", metav1.DeleteOptions{}) },
			func() error { _, _, err := s.Hold(ctx, "a", time.Second); return err }, nil},
	} {
		if err := o.remove(); err != nil {
			t.Fatal(err)
		}
		err := o.use()
		if err == nil || errors.Is(err, store.ErrMissing) != (o.missing != nil) || !strings.Contains(err.Error(), o.name) || !strings.Contains(err.Error(), "chancery authority init") {
			t.Errorf("without %s: %v", o.name, err)
		}
	}
	_, err := Open(ctx, c, nil)
	if !errors.Is(err, store.ErrMissing) || !strings.Contains(err.Error(), "chancery authority init") {
		t.Errorf("opening a state that is gone: %v", err)
	}
	if all, err := secrets.List(ctx, metav1.ListOptions{}); err != nil || len(all.Items) != 0 {
		t.Errorf("opening made %d Secrets, %v", len(all.Items), err)
	}

	again := create(t, c)
	if _, _, err := s.Load(ctx); !errors.Is(err, store.ErrMissing) {
		t.Errorf("loading what was made again: %v", err)
	}
	if err := s.Replace(ctx, 7, 8, []byte("eight")); !errors.Is(err, store.ErrConflict) {
		t.Errorf("replacing what was made again: %v", err)
	}
	if all, err := s.Notes(ctx); err != nil || len(all) != 0 {
		t.Errorf("notes that were made again: %v, %v", all, err)
	}
	if err := again.Create(ctx, 1<<32, []byte("next epoch")); err != nil {
		t.Error(err)
	}
	if data, v, err := s.Load(ctx); string(data) != "next epoch" || v != 1<<32 || err != nil {
		t.Errorf("%q, version %d, %v", data, v, err)
	}
	// What exists is left as it is.
	create(t, c)
	if data, _, err := s.Load(ctx); string(data) != "next epoch" || err != nil {
		t.Errorf("after making it once more: %q, %v", data, err)
	}
}

// TestMissingOneByOne: each object that lacks is named when the state is opened.
func TestMissingOneByOne(t *testing.T) {
	t.Parallel()
	k := server(t)
	for _, name := range []string{"Secret chancery-state", "Secret chancery-state-notes", "Lease chancery-state"} {
		c := namespace(t, k)
		create(t, c)
		kind, name, _ := strings.Cut(name, " ")
		var err error
		if kind == "Lease" {
			err = k.Client.CoordinationV1().Leases(c.Namespace).Delete(t.Context(), name, metav1.DeleteOptions{})
		} else {
			err = k.Client.CoreV1().Secrets(c.Namespace).Delete(t.Context(), name, metav1.DeleteOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), c, nil); err == nil || !strings.Contains(err.Error(), kind+" "+c.Namespace+"/"+name+": ") {
			t.Errorf("opening without %s %s: %v", kind, name, err)
		}
	}
}

// TestNotOurs: what others made under our names is not touched.
func TestNotOurs(t *testing.T) {
	t.Parallel()
	k := server(t)
	c := namespace(t, k)
	secrets := k.Client.CoreV1().Secrets(c.Namespace)
	theirs := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "chancery-state"}, Data: map[string][]byte{"password": []byte("x")}}
	if _, err := secrets.Create(t.Context(), theirs, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(t.Context(), c, nil); err == nil || !strings.Contains(err.Error(), `type "Opaque"`) {
		t.Errorf("creating: %v", err)
	}
	if _, err := Open(t.Context(), c, nil); err == nil || !strings.Contains(err.Error(), `type "Opaque"`) {
		t.Errorf("opening: %v", err)
	}
	if got, err := secrets.Get(t.Context(), "chancery-state", metav1.GetOptions{}); err != nil || len(got.Data) != 1 {
		t.Errorf("%v, %v", got.Data, err)
	}
}

// TestAnswerLost: a change whose answer never came was made, once, and the caller is told so where it can still be known.
func TestAnswerLost(t *testing.T) {
	t.Parallel()
	c := namespace(t, server(t))
	s := create(t, c)
	ctx := t.Context()
	if err := s.Create(ctx, 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	// What client-go does after an answer of 500 with Retry-After: the same patch once more, though it was done.
	d, err := s.document(ctx)
	if err != nil {
		t.Fatal(err)
	}
	packed, err := pack(2, []byte("two"))
	if err != nil {
		t.Fatal(err)
	}
	patch := map[string]any{"metadata": version{d.resource}, "data": packed}
	if err := s.patch(ctx, s.documentSecret(), patch); err != nil {
		t.Fatal(err)
	}
	if err := s.patch(ctx, s.documentSecret(), patch); err == nil {
		t.Error("a patch for an old resourceVersion was accepted")
	}
	if d, err := s.document(ctx); err != nil || string(d.change) != string(packed[changeField]) || d.version != 2 {
		t.Errorf("the change cannot be known: %+v, %v", d, err)
	}
	// Somebody else's change of the same bytes to the same version is not ours.
	if err := s.Replace(ctx, 1, 2, []byte("two")); !errors.Is(err, store.ErrConflict) {
		t.Errorf("the same change by somebody else: %v", err)
	}
}

// A note that is dropped is null in the patch, which names nothing else.
func TestPatchKeepsWhatItDoesNotName(t *testing.T) {
	var patch map[string]any
	body, err := json.Marshal(notesPatch{Data: map[string]*[]byte{"a": nil}})
	if err == nil {
		err = json.Unmarshal(body, &patch)
	}
	if data, ok := patch["data"].(map[string]any); err != nil || !ok || len(patch) != 1 || data["a"] != nil || len(data) != 1 {
		t.Errorf("%s, %v", body, err)
	}
}
