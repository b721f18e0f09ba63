package authority

import (
	"context"

	"github.com/chancery-project/chancery/ca/replica"
)

// Forget is Hold.Forget where no server runs, which may be the one that is forgotten: one that lost its log or its mark is
// registered anew at its next start.
func Forget(ctx context.Context, c Config, actor, name string) error {
	return replica.Forget(ctx, c.Store, c.Sealer, c.Log, actor, name)
}
