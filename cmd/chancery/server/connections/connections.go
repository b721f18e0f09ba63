// Package connections owns what a server's config says of the connections of its callers: its group `connections`.
//
// It refuses times that would wear out callers, or hold up a stop for ever. How connections end is package csr's.
package connections

import (
	"fmt"
	"time"

	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// Config says when connections end.
type Config struct {
	// MaxAge is how old a connection gets before its caller is asked to open another one, to any server, give or take a tenth;
	// calls under way are finished. Sync streams of agents end before, after 7 to 9 tenths of it. From 1m to 24h. Default 30m.
	MaxAge string `json:"maxAge,omitempty"`
	// DrainDelay is how long a server that is to stop serves on while it says that it is not ready: longer than a balancer in
	// front of it takes to notice. At most 5m. Default 0s: agents that know several servers need no delay.
	DrainDelay string `json:"drainDelay,omitempty"`
}

// Bounds of the fields.
const (
	minAge   = time.Minute
	maxAge   = 24 * time.Hour
	maxDelay = 5 * time.Minute
)

// Times are a config that was checked.
type Times struct {
	MaxAge     time.Duration // 0 = the default
	DrainDelay time.Duration
}

// Parse checks a config.
func Parse(c Config) (t Times, err error) {
	if t.MaxAge, err = process.Duration("connections.maxAge", c.MaxAge); err != nil {
		return t, err
	}
	if t.DrainDelay, err = process.Duration("connections.drainDelay", c.DrainDelay); err != nil {
		return t, err
	}
	if t.MaxAge != 0 && (t.MaxAge < minAge || t.MaxAge > maxAge) {
		return t, fmt.Errorf("connections.maxAge: %s should be from %s to %s; leave it out for the default", t.MaxAge, minAge, maxAge)
	}
	if t.DrainDelay > maxDelay {
		return t, fmt.Errorf("connections.drainDelay: %s should be at most %s, by which a stop takes longer", t.DrainDelay, maxDelay)
	}
	return t, nil
}
