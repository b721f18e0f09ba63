// Package admission owns what a server's config says of load: its group `admission`.
//
// It refuses bounds that could not be followed. How requests wait is package csr's.
package admission

import (
	"errors"
	"fmt"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/csr/admission"
)

// Config bounds the load. Concurrency and waiting are always bounded; rates apply only where they are set.
type Config struct {
	// MaxInFlight is how many requests are worked on at a time. Default 128.
	MaxInFlight int `json:"maxInFlight,omitempty"`
	// MaxQueue is how many requests wait. Default 10000.
	MaxQueue int `json:"maxQueue,omitempty"`
	// MaxWait is how long a request waits before it is refused. Default 5s.
	MaxWait string `json:"maxWait,omitempty"`
	// PerIdentity bounds the rate of each SPIFFE ID. Default no bound.
	PerIdentity RateConfig `json:"perIdentity,omitzero"`
	// PerNode bounds the rate of each node. Default no bound.
	PerNode RateConfig `json:"perNode,omitzero"`
	// Global bounds the rate of the server. Default no bound.
	Global RateConfig `json:"global,omitzero"`
}

// RateConfig is a token bucket.
type RateConfig struct {
	// PerSecond is how many requests a second are let in over time.
	PerSecond float64 `json:"perSecond"`
	// Burst is how many may come at once. Default PerSecond, at least 1.
	Burst int `json:"burst,omitempty"`
}

// Parse checks a config.
func Parse(c Config) (admission.Config, error) {
	wait, err := process.Duration("admission.maxWait", c.MaxWait)
	if err != nil {
		return admission.Config{}, err
	}
	if c.MaxInFlight < 0 || c.MaxQueue < 0 {
		return admission.Config{}, errors.New("admission: maxInFlight and maxQueue should not be negative; 0 or absent means the default")
	}
	for _, r := range []struct {
		name string
		rate RateConfig
	}{{"perIdentity", c.PerIdentity}, {"perNode", c.PerNode}, {"global", c.Global}} {
		if r.rate != (RateConfig{}) && (r.rate.PerSecond <= 0 || r.rate.Burst < 0) {
			return admission.Config{}, fmt.Errorf("admission.%s: perSecond should be above 0, and burst not negative; leave %[1]s out for no bound", r.name)
		}
	}
	return admission.Config{
		MaxInFlight: c.MaxInFlight, MaxQueue: c.MaxQueue, MaxWait: wait,
		PerIdentity: admission.Rate(c.PerIdentity), PerNode: admission.Rate(c.PerNode), Global: admission.Rate(c.Global),
	}, nil
}
