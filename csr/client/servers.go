package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/csr/client/servers"
	"github.com/chancery-project/chancery/trust"
)

// How one call goes from server to server. The last one that is left has all the time that there is.
const (
	// connectTime bounds the way to a server: one that is paused still accepts connections, and then says nothing.
	connectTime = 3 * time.Second
	// answerTime bounds the wait for an answer. It is longer than requests wait for a slot, unless the server's config says
	// otherwise.
	answerTime = 8 * time.Second
)

var (
	// errUnconnected: there was no connection in time.
	errUnconnected = errors.New("there was no connection")
	// errSilent: the server took the call, and said nothing.
	errSilent = errors.New("the server has said nothing")
	// errBehind: another server has newer roots or CRLs, and this one does not get them.
	errBehind = errors.New("another server has had newer roots or CRLs for a while")
	// errDisowned: the root above the server's certificate has left, or the certificate was revoked.
	errDisowned = errors.New("nothing vouches for the server any more")
)

// over is how a stream ended that had brought something: no other server is tried in the same breath.
type over struct{ error }

// Unwrap returns what ended it.
func (o *over) Unwrap() error { return o.error }

// ask has one server do something, or the next one if the first cannot: it cannot be reached, does not answer in time, is not
// ready or stops. What it refuses for any other reason is an answer; the others would say the same. A call that got no answer
// may have been worked on: then there are two certificates for one key, both of them logged, and the first is used by nobody.
func (c *Client) ask(ctx context.Context, do func(context.Context, *grpc.ClientConn, turn) error) error {
	ctx, who, err := c.withCredentials(ctx)
	if err != nil {
		return err
	}
	return c.askAll(ctx, who.own, do)
}

// withCredentials returns what a call goes by that begins now, and its context with what is sent along.
func (c *Client) withCredentials(ctx context.Context) (context.Context, showing, error) {
	who := showing{own: c.valid()}
	var err error
	if who.token, err = c.token(ctx, who.own != nil); err != nil {
		return nil, showing{}, err
	}
	if who.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+who.token)
	}
	if c.config.Cluster != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "clusterid", c.config.Cluster)
	}
	return ctx, who, nil
}

// askAll is ask with the credentials of a moment.
func (c *Client) askAll(ctx context.Context, own *trust.Identity, do func(context.Context, *grpc.ClientConn, turn) error) error {
	all, failed := c.servers.Find(ctx)
	if len(all) == 0 {
		return failed
	}
	for i, a := range all {
		err := c.try(ctx, a, own, turn{to: a, last: i == len(all)-1, left: len(all) - i, all: len(all)}, do)
		c.servers.Note(a, avoids(err))
		if err == nil || !elsewhere(err) {
			return err
		}
		failed = append(failed, servers.Failure{Who: a.String(), Err: err})
		if ctx.Err() != nil {
			break
		}
	}
	return failed
}

// turn is the place of a server in a call.
type turn struct {
	to   servers.Address
	last bool
	left int // servers that were not tried, this one included
	all  int // servers
}

// share returns how much time a step may take: no more than most, nor than this server's part of what is left.
func (t turn) share(ctx context.Context, most time.Duration, parts int) time.Duration {
	if end, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(end)/time.Duration(parts))
	}
	return most
}

// answer bounds the wait for an answer, but for the last server's.
func (t turn) answer(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.last {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, t.share(ctx, answerTime, 2))
}

// try has one server do something. If no known root vouches for it, it is asked for roots that do.
func (c *Client) try(ctx context.Context, a servers.Address, own *trust.Identity, t turn, do func(context.Context, *grpc.ClientConn, turn) error) error {
	err := c.tryOnce(ctx, a, own, t, do)
	if u, is := errors.AsType[*servers.Untrusted](err); is && c.recover(ctx, a, u.Cause) {
		err = c.tryOnce(ctx, a, own, t, do)
	}
	return err
}

func (c *Client) tryOnce(ctx context.Context, a servers.Address, own *trust.Identity, t turn, do func(context.Context, *grpc.ClientConn, turn) error) error {
	var untrusted atomic.Pointer[servers.Untrusted]
	conn := c.takeKept(a, own)
	if conn == nil {
		var err error
		if conn, err = c.dial(a, own, &untrusted); err != nil {
			return err
		}
		if err := connect(ctx, conn, t); err != nil {
			conn.Close()
			return err
		}
	}
	err := do(ctx, conn, t)
	if u := untrusted.Load(); u != nil && err != nil {
		conn.Close()
		return &servers.Untrusted{Err: err, Cause: u.Cause, File: u.File}
	}
	if r, ok := errors.AsType[*Refused](err); ok && r.Code == codes.ResourceExhausted && t.last && t.left == t.all {
		c.keep(kept{a, own, conn})
		return err
	}
	conn.Close()
	return err
}

// connect waits for the connection. If there will be none, the call itself says why.
func connect(ctx context.Context, conn *grpc.ClientConn, t turn) error {
	if t.last {
		return nil
	}
	limit := t.share(ctx, connectTime, t.left)
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn.Connect()
	for {
		switch state := conn.GetState(); state {
		case connectivity.Ready, connectivity.TransientFailure:
			return nil
		default:
			if !conn.WaitForStateChange(within, state) {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return fmt.Errorf("%w within %s", errUnconnected, limit.Round(time.Millisecond))
			}
		}
	}
}

// elsewhere reports whether another server should be tried at once.
func elsewhere(err error) bool {
	if _, ok := errors.AsType[*over](err); ok {
		return false
	}
	return unable(err)
}

// unable reports whether another server may do what this one did not.
func unable(err error) bool {
	if r, ok := errors.AsType[*Refused](err); ok {
		return r.Code == codes.Unavailable && r.Reason != reasonMove
	}
	if _, ok := errors.AsType[*trust.Older](err); ok { // a server that was asleep while the roots changed
		return true
	}
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.DeadlineExceeded || errors.Is(err, errUnconnected) || errors.Is(err, errSilent) || errors.Is(err, errBehind)
}

// avoids reports whether the server should come last for a while.
func avoids(err error) bool {
	if r, ok := errors.AsType[*Refused](err); ok && (r.Code == codes.ResourceExhausted || r.Reason == reasonMove) {
		return true
	}
	return err != nil && (unable(err) || toldToGo(err))
}

// reasonMove is how a server ends a stream that should be opened anew elsewhere, for no fault of anybody.
const reasonMove = "MOVE"

// toldToGo reports whether a connection ended after a GOAWAY without an error: a server, or a proxy before it, is about to
// stop or lets no connection grow too old. gRPC says it in these words only.
func toldToGo(err error) bool {
	return strings.Contains(err.Error(), "received prior goaway: code: NO_ERROR")
}
