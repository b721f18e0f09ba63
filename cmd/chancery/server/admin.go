package server

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/backup"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/cmd/chancery/server/replicas"
	"github.com/chancery-project/chancery/cmd/chancery/server/report"
	"github.com/chancery-project/chancery/cmd/chancery/server/revoking"
)

// adminService answers admin calls.
type adminService struct {
	revoking.Desk // answers what is about revocation and agents
	authority     *authority.Keeper
	log           *audit.Log
	report        *report.Reporter
	replicas      *replicas.Desk
	export        func(context.Context) ([]byte, error)
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

// ListReplicas returns the servers on the store.
func (s adminService) ListReplicas(ctx context.Context, q *chanceryv1.ListReplicasRequest) (*chanceryv1.ListReplicasResponse, error) {
	return s.replicas.List(ctx, q)
}

// ForgetReplica declares one of them dead.
func (s adminService) ForgetReplica(ctx context.Context, q *chanceryv1.ForgetReplicaRequest) (*chanceryv1.ForgetReplicaResponse, error) {
	return s.replicas.Forget(ctx, q)
}

// ExportState returns an export of the document. Who asked goes into the audit log first.
func (s adminService) ExportState(ctx context.Context, _ *chanceryv1.ExportStateRequest) (*chanceryv1.ExportStateResponse, error) {
	actor, err := adminsocket.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "state export"}); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	data, err := s.export(ctx)
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return &chanceryv1.ExportStateResponse{Export: data}, nil
}

// exportPatience is how long an export waits for the store: the server knows the document, too.
const exportPatience = 5 * time.Second

// exportState makes an export of the document as the store has it; where the store does not answer, or has one that this server
// refuses, as this server has it.
func (s *Server) exportState(ctx context.Context) ([]byte, error) {
	waiting, cancel := context.WithTimeout(ctx, exportPatience)
	defer cancel()
	source := backup.FromStore
	data, version, err := s.store.Load(waiting)
	if err == nil {
		err = s.authority.CheckStored(ctx, data, version)
	}
	if err != nil {
		s.logger.Warn("the state is exported from memory: the store does not give the newest document", "reason", err.Error())
		known := s.authority.Document()
		source, version = backup.FromServer, known.Version
		if data, err = known.Encode(s.sealer); err != nil {
			return nil, err
		}
	}
	out, _, err := backup.Make(data, version, s.sealer, s.settings.place.Replica(), source, time.Now())
	return out, err
}

// adminTimeout bounds a call to a running server: an import may wait 10 s for agents.
const adminTimeout = 30 * time.Second

// EitherWay does what changes or shows the state: through the server that runs here, or directly while none does (decision
// D14). On a shared store the server is asked first: others may run on it, and it takes no lock that would tell.
func (s *Settings) EitherWay(ctx context.Context, direct func() error, ask func(context.Context, chanceryv1.AdminClient) error) error {
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
	err = s.EitherWay(ctx, func() error {
		st, err := s.OpenState(ctx)
		if err != nil {
			return err
		}
		defer st.Store.Close()
		for _, l := range st.Document.Logs {
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

// Stored is a store that was opened, and the document in it.
type Stored struct {
	Store    store.Store
	Sealer   *keys.Sealer
	Data     []byte // as it is stored
	Document *authority.Document
}

// OpenState opens the store, which the caller closes, and reads and authenticates the document.
func (s *Settings) OpenState(ctx context.Context) (*Stored, error) {
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // else it is said first that there is no state
		return nil, err
	}
	st, openErr := s.place.Open(ctx, slog.New(slog.DiscardHandler))
	if openErr != nil {
		return nil, s.explainStore(openErr)
	}
	data, version, loadErr := st.Load(ctx)
	if loadErr != nil {
		err = s.explainStore(loadErr)
	}
	var doc *authority.Document
	if err == nil {
		doc, err = authority.DecodeDocument(data, version, sealer)
	}
	if err != nil {
		st.Close()
		return nil, err
	}
	return &Stored{st, sealer, data, doc}, nil
}
