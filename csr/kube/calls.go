package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/singleflight"
)

// calls bounds how many requests of one sort run at once and how long each may take, its wait for a slot included.
type calls[T any] struct {
	slots   chan struct{}
	timeout time.Duration
	flight  *singleflight.Group
}

func newCalls[T any](limit int, timeout time.Duration) calls[T] {
	return calls[T]{make(chan struct{}, limit), timeout, new(singleflight.Group)}
}

// run calls f.
func (c calls[T]) run(ctx context.Context, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
		// The calls before may have ended because their time was over, and so is ours, whether or not its timer has fired: a
		// server that hangs is not asked once more for nothing.
		if deadline, _ := ctx.Deadline(); time.Now().Before(deadline) {
			return f(ctx)
		}
	case <-ctx.Done():
	}
	var zero T
	return zero, fmt.Errorf("waiting for one of %d calls to end: %w", cap(c.slots), cmp.Or(ctx.Err(), context.DeadlineExceeded))
}

// shared is run, except that calls with the same key share one call of f. A caller that goes away does not end it for
// the others.
func (c calls[T]) shared(ctx context.Context, key string, f func(context.Context) (T, error)) (T, error) {
	ch := c.flight.DoChan(key, func() (any, error) { return c.run(context.WithoutCancel(ctx), f) })
	select {
	case r := <-ch:
		v, ok := r.Val.(T)
		if !ok && r.Err == nil {
			r.Err = errors.New("no answer")
		}
		return v, r.Err
	case <-ctx.Done():
		var zero T
		return zero, ctx.Err()
	}
}
