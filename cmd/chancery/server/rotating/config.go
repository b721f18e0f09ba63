package rotating

import (
	"fmt"
	"time"

	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// Config says what a rotation of roots and issuers goes by.
type Config struct {
	// RootMaxAge is the age at which the server starts a rotation of its root by itself: at least four times profile.maxTTL
	// and readers together, which a rotation may take, and at most half of lifetimes.root. Default: never, only an admin does. Not beside
	// Issuer or Parent, whose root is kept elsewhere.
	RootMaxAge string `json:"rootMaxAge,omitempty"`
	// Readers is how long those need to get a new set of roots who cannot say that they have it: federated peers, ConfigMaps,
	// ClusterTrustBundles. A rotation waits at least that long before it signs under a new root: max(5 x the refresh hint,
	// 2 x kubelet's sync period + the time after which the client reads its file again). At most 168h. Default 0s: there are none, or,
	// with a bundleEndpoint, five times its refreshHint, which is the least then.
	Readers string `json:"readers,omitempty"`
}

// AtLeast returns the config with Readers of so long at least (decision D3): as long as a bundle endpoint's readers take. What does not
// parse stays as it is, for Parse.
func (c Config) AtLeast(readers time.Duration) Config {
	if have, err := process.Duration("", c.Readers); err == nil && have < readers {
		c.Readers = readers.String()
	}
	return c
}

// Times are a Config that was checked.
type Times struct{ RootMaxAge, Readers time.Duration }

// maxReaders bounds what each rotation waits for in vain.
const maxReaders = 7 * 24 * time.Hour

// Parse checks a config. Leaf is the longest lifetime of a workload's certificate, root that of a root; elsewhere says that the root
// is not the server's own.
func Parse(c Config, leaf, root time.Duration, elsewhere bool) (t Times, err error) {
	if t.RootMaxAge, err = process.Duration("rotation.rootMaxAge", c.RootMaxAge); err != nil {
		return t, err
	}
	if t.Readers, err = process.Duration("rotation.readers", c.Readers); err != nil {
		return t, err
	}
	if t.Readers > maxReaders {
		return t, fmt.Errorf("rotation.readers: %s is above %s; each rotation of a root waits that long", t.Readers, maxReaders)
	}
	switch least := 4 * (leaf + t.Readers); {
	case t.RootMaxAge == 0:
	case elsewhere:
		return t, fmt.Errorf("rotation.rootMaxAge: with a plugged-in issuer or a parent the root is kept elsewhere, and this server cannot replace it; leave it out")
	case t.RootMaxAge < least:
		return t, fmt.Errorf("rotation.rootMaxAge: %s is below %s; it should be at least four times profile.maxTTL and rotation.readers together, as long as a rotation may take", t.RootMaxAge, least)
	case t.RootMaxAge > root/2:
		return t, fmt.Errorf("rotation.rootMaxAge: %s is above %s; it should be at most half of lifetimes.root, so that there is time left if a rotation has to wait", t.RootMaxAge, root/2)
	}
	return t, nil
}
