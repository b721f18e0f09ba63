package client

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client/servers"
	"github.com/chancery-project/chancery/trust"
)

// maxReissued bounds how many issuers a server may name whose SVIDs are to be replaced.
const maxReissued = 32

// synced is the connection of the Sync stream while that brings something: to a server that was verified and is there.
//
// Renewals that a server asked for go over it. It asks a whole fleet at once, and a TLS handshake for each of them would cost the
// server more than all the certificates, and keep new pods waiting, who need one. All other calls open a connection of their own:
// that spreads them over the servers, and shows the newest SVID.
type synced struct {
	to   servers.Address
	only bool // there is no other server
	conn *grpc.ClientConn
}

// join makes the connection of a Sync stream known, until leave is called.
func (c *Client) join(s *synced) (leave func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.synced = s
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.synced == s {
			c.synced, c.reissued = nil, nil
		}
	}
}

// seeReissue keeps which issuers' SVIDs the server wants to be replaced; nil for none.
func (c *Client) seeReissue(r *chanceryv1.Reissue) {
	ids := r.GetIssuers()
	ids = ids[:min(len(ids), maxReissued)]
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reissued = ids
}

// standing returns the connection of the Sync stream if the server asked over it for the SVID in use to be replaced; else nil.
// Without a token the certificate that a connection shows says who calls: there it may be an older one.
func (c *Client) standing(who showing) *synced {
	if who.own == nil || who.token == "" {
		return nil
	}
	issuer := who.own.Leaf().AuthorityKeyId
	c.mu.Lock()
	s := c.synced
	asked := slices.ContainsFunc(c.reissued, func(id []byte) bool { return slices.Equal(id, issuer) })
	c.mu.Unlock()
	if s == nil || !asked || s.conn.GetState() != connectivity.Ready || !s.only && c.servers.Avoids(s.to) {
		return nil
	}
	return s
}

// overStanding has the server of the Sync stream do something over that connection. It settles the matter if there is an answer that
// another connection would not change; else the call goes on as if nothing had been tried, and that server comes last.
func (c *Client) overStanding(ctx context.Context, s *synced, do func(context.Context, *grpc.ClientConn, turn) error) (settled bool, err error) {
	// Where there are others, a server that hangs holds the call up for no longer than one that takes no connection.
	most := connectTime
	if s.only {
		most = answerTime
	}
	within, cancel := context.WithTimeout(ctx, turn{}.share(ctx, most, 2))
	defer cancel()
	err = do(within, s.conn, turn{last: true, left: 1, all: 1})
	r, refused := errors.AsType[*Refused](err)
	switch {
	case err == nil:
		return true, nil
	case refused && !unable(err) && r.Code != codes.Unauthenticated: // the newest SVID may do where a token does not
		c.servers.Note(s.to, avoids(err))
		return true, err
	case unable(err):
		c.servers.Note(s.to, true)
	}
	c.config.Logger.Debug("no new SVID over the stream's connection; opening another one", "server", s.to.String(), "reason", err.Error())
	return false, err
}

// showing is what a call goes by.
type showing struct {
	own   *trust.Identity // to show; nil for none
	token string          // "" for none
}
