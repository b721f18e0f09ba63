package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
)

// This file finds out whether servers work on a store that several may work on.

// askServer refuses while a server runs here.
func (r *restoring) askServer(ctx context.Context) error {
	socket := r.settings.AdminSocket()
	if err := adminsocket.Probe(ctx, socket); err == nil {
		return fmt.Errorf("a server answers on %s: stop it, and all others on this store", socket)
	} else if !errors.Is(err, adminsocket.ErrDown) {
		return fmt.Errorf("whether a server runs here cannot be seen: %w", err)
	}
	return nil
}

// quiet is for how long a replica must not have been seen: they write each minute.
const quiet = board.Beat + 30*time.Second

// readBoard refuses while replicas write notes.
func (r *restoring) readBoard(ctx context.Context) error {
	b := board.Open(board.Config{
		Store: r.store, Sealer: r.sealer, Domain: r.settings.Domain(), Replica: "state-import", Format: document.Format, Logger: slog.New(slog.DiscardHandler),
	})
	if err := b.Read(ctx); err != nil {
		return err
	}
	for _, n := range b.Others() {
		if since := time.Since(n.Seen); since < quiet && !slices.Contains(r.ask.stopped, n.Replica) {
			return fmt.Errorf("replica %s wrote into the store %d s ago: stop all servers on it, and try again in %d s, or, if it is stopped, say so with --stopped %[1]s",
				process.Printable(n.Replica), int(since.Seconds()), int((quiet-since).Seconds())+1)
		}
	}
	return nil
}

// marked returns the highest version that this server has seen; 0 if it keeps no mark.
func (r *restoring) marked() (uint64, error) {
	m, err := replica.ReadMark(r.settings.Place().Mark(), r.settings.Domain(), r.sealer)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, fmt.Errorf("%w; move it away, and give the highest version that is known as --above", err)
	}
	return m.Version, nil
}
