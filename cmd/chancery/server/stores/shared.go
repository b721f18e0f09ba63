package stores

import (
	"context"
	"log/slog"
	"net/url"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/kube"
	"github.com/chancery-project/chancery/ca/store/postgres"
)

// openShared opens a store that several servers work on.
func (p *Place) openShared(ctx context.Context, logger *slog.Logger, create bool) (store.Store, error) {
	if c := p.config.Kubernetes; c != nil {
		open := kube.Open
		if create {
			open = kube.Create
		}
		st, err := open(ctx, *c, logger)
		if err != nil {
			return nil, err // not st: it would be an interface that holds nil
		}
		return st, nil
	}
	open := postgres.Open
	if create {
		open = postgres.Create
	}
	st, err := open(ctx, *p.config.Postgres)
	if err != nil {
		return nil, err
	}
	return st, nil
}

// withoutPassword is a database's URL for messages.
func withoutPassword(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "a PostgreSQL database"
	}
	u.RawQuery = ""
	return u.Redacted()
}
