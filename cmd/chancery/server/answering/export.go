package answering

import (
	"context"
	"log/slog"
	"time"

	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/backup"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
)

// exportPatience is how long an export waits for the store: the server knows the document, too.
const exportPatience = 5 * time.Second

// Exporter exports the authority document.
type Exporter struct {
	Store     store.Store
	Authority *authority.Keeper
	Sealer    *keys.Sealer
	Replica   string // name of this server
	Logger    *slog.Logger
}

// Export makes an export of the document as the store has it; where the store does not answer, or has one that this server
// refuses, as this server has it.
func (e Exporter) Export(ctx context.Context) ([]byte, error) {
	waiting, cancel := context.WithTimeout(ctx, exportPatience)
	defer cancel()
	source := backup.FromStore
	data, version, err := e.Store.Load(waiting)
	if err == nil {
		err = e.Authority.CheckStored(ctx, data, version)
	}
	if err != nil {
		e.Logger.Warn("the state is exported from memory: the store does not give the newest document", "reason", err.Error())
		known := e.Authority.Document()
		source, version = backup.FromServer, known.Version
		if data, err = known.Encode(e.Sealer); err != nil {
			return nil, err
		}
	}
	out, _, err := backup.Make(data, version, e.Sealer, e.Replica, source, time.Now())
	return out, err
}
