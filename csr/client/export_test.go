package client

import (
	"context"
	"net"
	"time"

	"github.com/chancery-project/chancery/csr/client/servers"
)

// Find returns the addresses that a call tries which knows nothing of any server.
func Find(ctx context.Context, r *net.Resolver, name string) (all []string) {
	found, _ := (&servers.Servers{Names: []string{name}, Resolver: r}).Find(ctx)
	for _, a := range found {
		all = append(all, a.Addr)
	}
	return all
}

// Behind returns a config with which Sync stays that long with a server that is behind another.
func Behind(c Config, d time.Duration) Config {
	c.behind = d
	return c
}
