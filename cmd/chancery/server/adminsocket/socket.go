// Package adminsocket owns both ends of the admin socket (decision D14): who may open it, who is at the other end, and how a
// command reaches a server.
//
// It refuses everybody but root and the server's own user.
package adminsocket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/sds/socket"
)

// Listen opens the admin socket, for root and the server's own user (decision D14).
func Listen(path string) (net.Listener, error) {
	l, err := socket.Listen(path)
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	// Between Listen and here others could connect; each call checks the peer all the same.
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	return l, nil
}

// Serve serves the admin API until ctx ends.
func Serve(ctx context.Context, l net.Listener, admin chanceryv1.AdminServer) error {
	g := grpc.NewServer(grpc.Creds(socket.Credentials{}), grpc.MaxRecvMsgSize(maxRequest))
	chanceryv1.RegisterAdminServer(g, admin)
	stop := context.AfterFunc(ctx, g.Stop)
	defer stop()
	if err := g.Serve(l); err != nil {
		return fmt.Errorf("serving admin socket %s: %w", l.Addr(), err)
	}
	return nil
}

// ActorOf names the Unix user at the other end, if it is root or our own.
func ActorOf(ctx context.Context) (string, error) {
	p, ok := socket.PeerOf(ctx)
	if !ok || p.UID != 0 && int(p.UID) != os.Getuid() {
		return "", status.Error(codes.PermissionDenied, "only root and the server's own user may use the admin socket")
	}
	return process.UserName(p.UID), nil
}

// ErrDown: nobody listens on the socket.
var ErrDown = errors.New("no server answers")

// Probe looks whether a server listens: it tells one that is down (ErrDown) from one that must not be asked, which gRPC does not.
func Probe(ctx context.Context, path string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		return conn.Close()
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w: %w", ErrDown, err)
	}
	return err
}

// With calls f with a connection to a running server, and explains what went wrong.
func With(ctx context.Context, path string, patience time.Duration, f func(context.Context, chanceryv1.AdminClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return fmt.Errorf("connecting to admin socket %s: %w", path, err)
	}
	defer conn.Close()
	return explain(path, f(ctx, chanceryv1.NewAdminClient(conn)))
}

// explain says in words what a call to the server on a socket gave: that it refused, in its own words.
func explain(path string, err error) error {
	st, known := status.FromError(err)
	if err == nil {
		return nil
	}
	if known {
		switch st.Code() {
		case codes.Unavailable:
			if strings.Contains(st.Message(), syscall.EACCES.Error()) {
				return fmt.Errorf("the admin socket %s may be used by root and the server's user only; run this as one of them (%s)", path, st.Message())
			}
			if strings.Contains(st.Message(), "error reading from server") {
				return fmt.Errorf("the server on %s ended, or was restarted, while it was asked: whether it was done is not known; ask again once it runs (%s)", path, st.Message())
			}
			if strings.Contains(st.Message(), "connection error:") {
				return fmt.Errorf("no server answers on the admin socket %s: is it running? (%s)", path, st.Message())
			}
			return errors.New(st.Message()) // the server says so itself
		case codes.InvalidArgument, codes.FailedPrecondition, codes.PermissionDenied:
			return errors.New(st.Message())
		case codes.Unimplemented:
			return fmt.Errorf("what answers on %s is no admin socket of a server, or of one too old for this; the socket is admin.sock in the folder of the state (%s)", path, st.Message())
		}
	}
	return fmt.Errorf("asking the server on admin socket %s: %w", path, err)
}

// maxRequest bounds a request: the bundle of a trust domain has 1 MiB at most.
const maxRequest = 1<<20 + 64<<10

// maxAnswer bounds an answer of the admin API: what is kept of the SVIDs that agents serve has 48 MiB at most.
const maxAnswer = 64 << 20
