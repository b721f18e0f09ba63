package client

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr/client/standing"
	"github.com/chancery-project/chancery/trust"
)

// showing is what a call goes by.
type showing struct {
	own   *trust.Identity // nil for none
	token string          // "" for none
}

// standing returns the connection of the stream, if the server asked over it for the SVID in use to be replaced; else nil. Without a
// token the certificate that a connection shows says who calls: there it may be an older one.
func (c *Client) standing(who showing) *standing.Connection {
	if who.own == nil || who.token == "" {
		return nil
	}
	s := c.line.For(who.own.Leaf())
	if s == nil || !s.Only && c.servers.Avoids(s.To) {
		return nil
	}
	return s
}

// overStanding has the server of the stream do something over that connection. It settles the matter if there is an answer that
// another connection would not change; else the call goes on as if nothing had been tried, and that server comes last.
func (c *Client) overStanding(ctx context.Context, s *standing.Connection, do func(context.Context, *grpc.ClientConn, turn) error) (settled bool, err error) {
	// Where there are others, a server that hangs holds the call up for no longer than one that takes no connection.
	most := connectTime
	if s.Only {
		most = answerTime
	}
	within, cancel := context.WithTimeout(ctx, turn{}.share(ctx, most, 2))
	defer cancel()
	err = do(within, s.Conn, turn{last: true, left: 1, all: 1})
	r, refused := errors.AsType[*Refused](err)
	switch {
	case err == nil:
		return true, nil
	case refused && !unable(err) && r.Code != codes.Unauthenticated: // the newest SVID may do where a token does not
		c.servers.Note(s.To, avoids(err))
		return true, err
	case unable(err):
		c.servers.Note(s.To, true)
	}
	c.config.Logger.Debug("no new SVID over the stream's connection; opening another one", "server", s.To.String(), "reason", err.Error())
	return false, err
}
