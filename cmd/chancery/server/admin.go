package server

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/report"
	"github.com/chancery-project/chancery/sds/socket"
)

// listenAdmin opens the admin socket, for root and the server's own user (decision D14).
func listenAdmin(path string) (net.Listener, error) {
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

// serveAdmin serves the admin API until ctx ends.
func serveAdmin(ctx context.Context, l net.Listener, admin adminService) error {
	g := grpc.NewServer(grpc.Creds(socket.Credentials{}), grpc.MaxRecvMsgSize(64<<10))
	chanceryv1.RegisterAdminServer(g, admin)
	stop := context.AfterFunc(ctx, g.Stop)
	defer stop()
	if err := g.Serve(l); err != nil {
		return fmt.Errorf("serving admin socket %s: %w", l.Addr(), err)
	}
	return nil
}

// adminService answers admin calls.
type adminService struct {
	chanceryv1.UnimplementedAdminServer
	authority *authority.Keeper
	log       *audit.Log
	report    *report.Reporter
}

// GetAuthorities returns the document's authorities without keys. Who asked goes into the audit log first.
func (s adminService) GetAuthorities(ctx context.Context, _ *chanceryv1.GetAuthoritiesRequest) (*chanceryv1.GetAuthoritiesResponse, error) {
	actor, err := actorOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "authority show"}); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	resp, err := describe(s.authority.Document())
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return resp, nil
}

// actorOf names the Unix user at the other end, if it is root or our own.
func actorOf(ctx context.Context) (string, error) {
	p, ok := socket.PeerOf(ctx)
	if !ok || p.UID != 0 && int(p.UID) != os.Getuid() {
		return "", status.Error(codes.PermissionDenied, "only root and the server's own user may use the admin socket")
	}
	return process.UserName(p.UID), nil
}

// adminTimeout bounds a call to a running server.
const adminTimeout = 10 * time.Second

// askAdmin gets the authorities from a running server.
func askAdmin(ctx context.Context, path string) (resp *chanceryv1.GetAuthoritiesResponse, err error) {
	err = withAdmin(ctx, path, func(ctx context.Context, c chanceryv1.AdminClient) error {
		resp, err = c.GetAuthorities(ctx, &chanceryv1.GetAuthoritiesRequest{})
		return err
	})
	return resp, err
}

// withAdmin calls f with a connection to a running server.
func withAdmin(ctx context.Context, path string, f func(context.Context, chanceryv1.AdminClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connecting to admin socket %s: %w", path, err)
	}
	defer conn.Close()
	if err := f(ctx, chanceryv1.NewAdminClient(conn)); err != nil {
		return fmt.Errorf("asking the server on admin socket %s: %w", path, err)
	}
	return nil
}
