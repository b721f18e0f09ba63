package server

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
)

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
	s.InLine(doc)
	return &Stored{st, sealer, data, doc}, nil
}

// Direct opens the state and calls f with it and the audit log, while no server runs here.
func (s *Settings) Direct(ctx context.Context, f func(*Stored, *audit.Log) error) error {
	st, err := s.OpenState(ctx)
	if err != nil {
		return err
	}
	defer st.Store.Close()
	log, err := audit.Open(s.AuditLog)
	if err != nil {
		return err
	}
	defer log.Close()
	return f(st, log)
}
