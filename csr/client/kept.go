package client

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/chancery-project/chancery/csr/client/servers"
	"github.com/chancery-project/chancery/trust"
)

// keepTime bounds how long a connection is kept for the next try: a little longer than keepers wait for one.
const keepTime = 90 * time.Second

// kept is the connection to the only server there is, while that is busy and has asked to come again. A new one would cost the
// server a TLS handshake for each time that it has no room, which is more than what is asked for. Where there are several
// servers, the next try goes to another one.
type kept struct {
	to   servers.Address
	own  *trust.Identity // that the connection shows; nil for none
	conn *grpc.ClientConn
}

// keep keeps a connection, in place of another one.
func (c *Client) keep(k kept) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kept != nil {
		c.kept.conn.Close()
	}
	mine := &k
	c.kept = mine
	time.AfterFunc(keepTime, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.kept == mine {
			c.kept.conn.Close()
			c.kept = nil
		}
	})
}

// takeKept returns the connection that was kept, if it is to that server, shows that SVID and still stands; else nil.
func (c *Client) takeKept(to servers.Address, own *trust.Identity) *grpc.ClientConn {
	c.mu.Lock()
	k := c.kept
	c.kept = nil
	c.mu.Unlock()
	if k == nil {
		return nil
	}
	if k.to != to || k.own != own || k.conn.GetState() != connectivity.Ready {
		k.conn.Close()
		return nil
	}
	return k.conn
}
