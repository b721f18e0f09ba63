package kube

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/chancery-project/chancery/ca/store"
)

const (
	// watchLife is how long one watch lasts at least; up to as much again is added. Each begins with the object as it is now,
	// so this is also how often a change that was missed for whatever reason is found.
	watchLife = 5 * time.Minute
	// maxSilent is how long an open watch may say nothing. The API server sends a bookmark every minute, so a longer silence is
	// a connection that only looks open.
	maxSilent = 3 * time.Minute
	// backoffFirst and backoffMost bound the time between two tries of a watch.
	backoffFirst = 200 * time.Millisecond
	backoffMost  = 10 * time.Second
	// metadataOnly asks for events without the Secrets' data: that something changed is all that is to be told.
	metadataOnly = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
)

// Watch implements store.Store. Errors are logged once, and tried again: even a right that lacks may be given later.
func (s *Store) Watch(ctx context.Context, changed func()) error {
	ctx, cancel := context.WithCancel(ctx)
	news := make(chan struct{}, 1) // one that waits stands for all
	tell := func() {
		select {
		case news <- struct{}{}:
		default:
		}
	}
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	for _, o := range []object{s.documentSecret(), s.notesSecret()} {
		following.Go(func() { s.follow(ctx, o, tell) })
	}
	for tell(); ; {
		select {
		case <-s.life.Done():
			return fmt.Errorf("watching Secret %s/%s: %w", s.namespace, s.name, store.ErrClosed)
		case <-ctx.Done():
			return nil
		case <-news:
			changed()
		}
	}
}

// follow watches one object until ctx ends.
func (s *Store) follow(ctx context.Context, o object, tell func()) {
	failures, failing := 0, false
	for {
		started := time.Now()
		err := s.watchOnce(ctx, o, func() {
			if failing {
				failing = false
				s.log.Info("watching the state works again", "secret", s.namespace+"/"+o.name)
			}
			tell()
		})
		if ctx.Err() != nil {
			return
		}
		if err != nil && !failing {
			failing = true
			s.log.Warn("watching the state fails; until it works again changes by others are seen later", "secret", s.namespace+"/"+o.name, "error", err)
		}
		// A watch that ends as soon as it is open has not worked either, whatever it says.
		failures++
		if time.Since(started) > backoffMost {
			failures = 0
		}
		if !pause(ctx, failures, backoffFirst, backoffMost) {
			return
		}
	}
}

// watchOnce opens a watch and reads it to its end. It calls tell when the watch is open and at each change. It gives no
// resourceVersion: the API server then sends the object as it is at first, so nothing between two watches is missed, and no
// version can be too old. A nil error is a watch that ended as it should.
func (s *Store) watchOnce(ctx context.Context, o object, tell func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	seconds := int64((watchLife + rand.N(watchLife)) / time.Second)
	options := metav1.ListOptions{
		FieldSelector: "metadata.name=" + o.name, Watch: true, AllowWatchBookmarks: true, TimeoutSeconds: &seconds,
	}
	opening := time.AfterFunc(patience, cancel) // a deadline would end the watch as well
	w, err := o.group.Get().Namespace(s.namespace).Resource(o.resource).SetHeader("Accept", metadataOnly).VersionedParams(&options, s.params).Watch(ctx)
	if !opening.Stop() {
		if err == nil {
			w.Stop()
		}
		err = fmt.Errorf("no answer in %s", patience)
	}
	if err != nil {
		return s.hint(err)
	}
	defer w.Stop()
	tell()
	silence := time.NewTimer(maxSilent)
	defer silence.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-silence.C:
			return fmt.Errorf("nothing was heard for %s, not even a bookmark", maxSilent)
		case e, ok := <-w.ResultChan():
			if !ok {
				return nil
			}
			silence.Reset(maxSilent)
			switch e.Type {
			case watch.Bookmark:
			case watch.Error:
				return fmt.Errorf("the API server ended the watch: %w", apierrors.FromObject(e.Object))
			default:
				tell()
			}
		}
	}
}
