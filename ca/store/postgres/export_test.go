package postgres

import (
	"context"
	"time"
)

// SetTimes makes calls, and the look at a silent connection of Watch, come to an end sooner.
func (s *Store) SetTimes(call, silent time.Duration) { s.callTimeout, s.keepAlive = call, silent }

// Ask returns what a statement says, on one of the store's connections.
func (s *Store) Ask(ctx context.Context, statement string) (text string, err error) {
	err = s.pool.QueryRow(ctx, statement).Scan(&text)
	return text, err
}

// WithMigrations adds migrations until the function that it returns is called.
func WithMigrations(more ...string) (restore func()) {
	before := migrations
	migrations = append(append([]string{}, before...), more...)
	return func() { migrations = before }
}
