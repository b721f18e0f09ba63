package server

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/cmd/chancery/server/report"
	"github.com/chancery-project/chancery/cmd/chancery/server/revoking"
)

// adminService answers admin calls.
type adminService struct {
	revoking.Desk // answers what is about revocation and agents
	authority     *authority.Keeper
	log           *audit.Log
	report        *report.Reporter
}

// GetAuthorities returns the document's authorities without keys. Who asked goes into the audit log first.
func (s adminService) GetAuthorities(ctx context.Context, _ *chanceryv1.GetAuthoritiesRequest) (*chanceryv1.GetAuthoritiesResponse, error) {
	actor, err := adminsocket.ActorOf(ctx)
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

// adminTimeout bounds a call to a running server: an import may wait 10 s for agents.
const adminTimeout = 30 * time.Second

// askAdmin gets the authorities from a running server.
func askAdmin(ctx context.Context, path string) (resp *chanceryv1.GetAuthoritiesResponse, err error) {
	err = adminsocket.With(ctx, path, adminTimeout, func(ctx context.Context, c chanceryv1.AdminClient) error {
		resp, err = c.GetAuthorities(ctx, &chanceryv1.GetAuthoritiesRequest{})
		return err
	})
	return resp, err
}
