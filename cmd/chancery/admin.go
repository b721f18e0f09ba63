package main

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/sds/socket"
)

// serveAdmin serves the admin API on a Unix socket of mode 0600, to root and the server's own user (decision D14).
func serveAdmin(ctx context.Context, path string, a *authority.Keeper, log *audit.Log) error {
	l, err := socket.Listen(path)
	if err != nil {
		return fmt.Errorf("admin socket: %w", err)
	}
	// Between Listen and here others could connect; each call checks the peer all the same.
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return fmt.Errorf("admin socket: %w", err)
	}
	g := grpc.NewServer(grpc.Creds(socket.Credentials{}), grpc.MaxRecvMsgSize(64<<10))
	chanceryv1.RegisterAdminServer(g, adminService{authority: a, log: log})
	stop := context.AfterFunc(ctx, g.Stop)
	defer stop()
	if err := g.Serve(l); err != nil {
		return fmt.Errorf("serving admin socket %s: %w", path, err)
	}
	return nil
}

type adminService struct {
	chanceryv1.UnimplementedAdminServer
	authority *authority.Keeper
	log       *audit.Log
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
	return userName(p.UID), nil
}

func userName(uid uint32) string {
	n := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(n); err == nil {
		return "unix:" + u.Username
	}
	return "unix:uid-" + n
}

// describe turns a document into its public form, domains by name.
func describe(d *authority.Document) (*chanceryv1.GetAuthoritiesResponse, error) {
	resp := new(chanceryv1.GetAuthoritiesResponse)
	for _, name := range sortedKeys(d.Domains) {
		state := d.Domains[name]
		out := &chanceryv1.DomainAuthorities{TrustDomain: name, Generation: state.Generation}
		for i := range state.Authorities {
			a := &state.Authorities[i]
			cert, err := a.X509()
			if err != nil {
				return nil, err
			}
			out.Authorities = append(out.Authorities, &chanceryv1.Authority{
				Id: a.ID, Kind: string(a.Kind), State: string(a.State), Generation: a.Generation, Certificate: cert.Raw,
			})
		}
		resp.Domains = append(resp.Domains, out)
	}
	return resp, nil
}

func sortedKeys[V any](m map[string]V) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// askAdmin gets the authorities from a running server.
func askAdmin(ctx context.Context, path string) (*chanceryv1.GetAuthoritiesResponse, error) {
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("connecting to admin socket %s: %w", path, err)
	}
	defer conn.Close()
	resp, err := chanceryv1.NewAdminClient(conn).GetAuthorities(ctx, &chanceryv1.GetAuthoritiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("asking the server on admin socket %s: %w", path, err)
	}
	return resp, nil
}
