package postgres

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/chancery-project/chancery/ca/store"
)

// Bounds of the time between two tries to listen.
const (
	firstBackoff = 100 * time.Millisecond
	lastBackoff  = 5 * time.Second
)

// Watch implements store.Store, on a connection of its own. When that is lost it makes another one, and tells of a change, as
// there may have been one.
func (s *Store) Watch(ctx context.Context, changed func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failing := false
	works := func() {
		if failing {
			failing = false
			s.log.Info("watching the state works again", "store", s.target.name)
		}
	}
	for backoff := firstBackoff; ; {
		if s.isClosed() {
			return fmt.Errorf("watching %s: %w", s.target.name, store.ErrClosed)
		}
		if ctx.Err() != nil {
			return nil
		}
		err := s.listen(ctx, func() { works(); backoff = firstBackoff; changed() })
		if err != nil && ctx.Err() == nil && !s.isClosed() && !failing {
			failing = true
			s.log.Warn("watching the state fails; until it works again changes by others are seen later", "reason", explain(err).Error())
		}
		select {
		case <-ctx.Done():
		case <-s.closed:
		case <-time.After(backoff/2 + rand.N(backoff)): // all replicas lost it at the same moment
		}
		backoff = min(2*backoff, lastBackoff)
	}
}

// listen tells of changes, first that it listens, until its connection is lost, ctx ends or the store is closed. An error says why it
// did not listen.
func (s *Store) listen(ctx context.Context, changed func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-s.closed:
			cancel()
		case <-ctx.Done():
		}
	}()
	conn, err := s.dial(ctx)
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", s.target.name, err)
	}
	defer func() {
		lost := ctx.Err() == nil
		goodbye := func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
			defer cancel()
			_ = conn.Close(ctx)
		}
		if lost { // nobody should wait for what may never answer, and the other connections are no better
			s.pool.Reset()
			go goodbye()
			return
		}
		goodbye()
	}()
	if err := s.bounded(ctx, func(ctx context.Context) error { _, err := conn.Exec(ctx, s.sql.listen); return err }); err != nil {
		return fmt.Errorf("listening to %s: %w", s.target.name, err)
	}
	for {
		changed()
		for told := false; !told; {
			wait, cancel := context.WithTimeout(ctx, s.keepAlive)
			_, err := conn.WaitForNotification(wait)
			silent := errors.Is(err, context.DeadlineExceeded)
			cancel()
			if ctx.Err() != nil {
				return nil
			}
			if told = err == nil; told {
				continue
			}
			// Silence can be that of a lost connection.
			if !silent || s.bounded(ctx, conn.Ping) != nil {
				return nil
			}
		}
	}
}

// dial makes a connection outside of the pool.
func (s *Store) dial(ctx context.Context) (conn *pgx.Conn, err error) {
	c, err := s.target.connConfig()
	if err != nil {
		return nil, err
	}
	err = s.bounded(ctx, func(ctx context.Context) (err error) {
		conn, err = pgx.ConnectConfig(ctx, c)
		return err
	})
	return conn, err
}

// bounded runs what has the time of a call.
func (s *Store) bounded(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.callTimeout)
	defer cancel()
	return f(ctx)
}
