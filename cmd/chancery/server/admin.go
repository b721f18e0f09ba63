package server

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
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

// eitherWay does what changes or shows the state: through the server that runs here, or directly while none does (decision
// D14). On a shared store the server is asked first: others may run on it, and it takes no lock that would tell.
func (s *Settings) eitherWay(ctx context.Context, direct func() error, ask func(context.Context, chanceryv1.AdminClient) error) error {
	if s.place.Shared() {
		if err := adminsocket.Probe(ctx, s.AdminSocket()); errors.Is(err, adminsocket.ErrDown) {
			return direct()
		}
	} else if err := direct(); !errors.Is(err, store.ErrLocked) {
		return err
	}
	return adminsocket.With(ctx, s.AdminSocket(), adminTimeout, ask)
}

// Listed returns the public keys of the issuance logs that the authority document lists.
func (s *Settings) Listed(ctx context.Context) (keys []string, err error) {
	err = s.eitherWay(ctx, func() error {
		_, doc, err := s.readDocument(ctx)
		if err != nil {
			return err
		}
		for _, l := range doc.Logs {
			keys = append(keys, l.Key)
		}
		return nil
	}, func(ctx context.Context, c chanceryv1.AdminClient) error {
		resp, err := c.GetStatus(ctx, &chanceryv1.GetStatusRequest{})
		for _, l := range resp.GetDocument().GetLogs() {
			keys = append(keys, l.GetKey())
		}
		return err
	})
	return keys, err
}

// readDocument reads and authenticates the document, and returns its stored form too.
func (s *Settings) readDocument(ctx context.Context) ([]byte, *authority.Document, error) {
	st, err := s.place.Open(ctx, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, nil, s.explainStore(err)
	}
	defer st.Close()
	data, version, err := st.Load(ctx)
	if err != nil {
		return nil, nil, s.explainStore(err)
	}
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if err != nil {
		return nil, nil, err
	}
	doc, err := authority.DecodeDocument(data, version, sealer)
	return data, doc, err
}
