// Package lifetimes owns the `lifetimes` group of a server's config: how long the root and issuers live that it makes.
//
// It refuses lifetimes under which certificates would be cut short, or that are longer than a ceremony could give.
package lifetimes

import (
	"cmp"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// Config sets how long signing certificates live, as durations.
type Config struct {
	// Root is the root's, which `authority init` makes: at least twice Issuer, at most 219000h (25 years). Default 87600h (10
	// years). It has no effect on a root that exists, or that is kept elsewhere.
	Root string `json:"root,omitempty"`
	// Issuer is that of each issuer, which the server renews at half of it: at least twice profile.defaultTTL and 10m, at most
	// 87600h. Default 168h (7 days). Certificates of a
	// stolen issuer are good until it ends, so longer is worse.
	Issuer string `json:"issuer,omitempty"`
}

// Lifetimes is a Config that was checked, with defaults.
type Lifetimes struct{ Root, Issuer time.Duration }

// leastIssuer leaves room for a renewal, which is thought of once a minute.
const leastIssuer = 10 * time.Minute

// Parse checks a config; leaf is the lifetime of a workload's certificate that names none.
func Parse(c Config, leaf time.Duration) (*Lifetimes, error) {
	root, err := process.Duration("lifetimes.root", c.Root)
	if err != nil {
		return nil, err
	}
	issuer, err := process.Duration("lifetimes.issuer", c.Issuer)
	if err != nil {
		return nil, err
	}
	l := &Lifetimes{cmp.Or(root, ca.DefaultRootTTL), cmp.Or(issuer, ca.DefaultIssuerTTL)}
	switch least := max(leastIssuer, 2*leaf); {
	case c.Issuer != "" && l.Issuer < least: // the default may cut leaves short, as it did before there was a choice
		return nil, fmt.Errorf("lifetimes.issuer: %s is below %s; it should be at least twice profile.defaultTTL, since an issuer is renewed at half of its life, and %s",
			l.Issuer, least, leastIssuer)
	case l.Issuer > ca.IssuerTTLLimit:
		return nil, fmt.Errorf("lifetimes.issuer: %s is above %s", l.Issuer, ca.IssuerTTLLimit)
	case l.Root < 2*l.Issuer:
		return nil, fmt.Errorf("lifetimes.root: %s is below %s; it should be at least twice lifetimes.issuer", l.Root, 2*l.Issuer)
	case l.Root > ca.RootTTLLimit:
		return nil, fmt.Errorf("lifetimes.root: %s is above %s", l.Root, ca.RootTTLLimit)
	}
	return l, nil
}
