package agent

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/trust"
)

// NewKeeper joins a keeper and a client: the client shows the keeper's SVID, the keeper gets what the client brings.
// Observe is told the outcome of each try.
func NewKeeper(c client.Config, logger *slog.Logger, observe func(error)) *rotate.Keeper {
	var keeper *rotate.Keeper
	c.Current = func() *trust.Identity {
		id, _ := keeper.Current()
		return id
	}
	c.Logger = logger
	issuing := client.New(c)
	keeper = rotate.NewKeeper(rotate.KeeperConfig{
		ID: c.ID, Logger: logger, Observe: observe,
		Issue: func(ctx context.Context, key crypto.Signer) (rotate.Issued, error) {
			chain, bundle, err := issuing.Issue(ctx, key)
			return rotate.Issued{Chain: chain, Bundle: bundle}, err
		},
	})
	return keeper
}

// SourceOf shows one keeper's identity to whoever is let in. The view is made once for each identity.
func SourceOf(k *rotate.Keeper, naming map[string][]trust.ID) sds.Source {
	v := &views{naming: naming, view: &sds.View{Naming: naming}}
	return func() (*sds.View, <-chan struct{}) {
		v.mu.Lock()
		defer v.mu.Unlock()
		id, changed := k.Current() // under the lock, so that generations follow the order of identities
		return v.of(id), changed
	}
}

// views makes a view for each identity.
type views struct {
	naming map[string][]trust.ID

	mu   sync.Mutex // guards both
	id   *trust.Identity
	view *sds.View // of id
}

// of returns the view of an identity, or of none yet. mu is held.
func (v *views) of(id *trust.Identity) *sds.View {
	if id == v.id {
		return v.view
	}
	next := &sds.View{Naming: v.naming, Generation: v.view.Generation + 1}
	if id != nil {
		next.Identities, next.Bundles = []*trust.Identity{id}, []*trust.Bundle{id.Bundle}
	}
	v.id, v.view = id, next
	return next
}

// ready returns nil if the keeper has an identity that has not ended.
func ready(k *rotate.Keeper) error {
	id, _ := k.Current()
	if id == nil {
		return errors.New("no identity yet")
	}
	if time.Now().After(id.NotAfter()) {
		return fmt.Errorf("the identity ended at %s", id.NotAfter().UTC().Format(time.RFC3339))
	}
	return nil
}

// Expiries is a collector of the time that the keepers' SVIDs and roots have left.
func Expiries(keepers func() []*rotate.Keeper) prometheus.Collector {
	return process.Expiries{
		Name: "chancery_agent_svid_expiry_seconds", Help: "Seconds until an SVID or root ends, by certificate.",
		Read: func() map[string]time.Time {
			out := map[string]time.Time{}
			for _, k := range keepers() {
				id, _ := k.Current()
				if id == nil {
					continue
				}
				out[id.ID.String()] = id.NotAfter()
				for _, r := range id.Bundle.Roots() {
					out[fmt.Sprintf("root %x", r.SubjectKeyId)] = r.NotAfter
				}
			}
			return out
		},
	}
}

// CountRenewals returns a function that counts the outcomes of tries to renew, and when one last succeeded.
func CountRenewals(reg prometheus.Registerer) func(error) {
	last := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "chancery_agent_last_renewal_timestamp_seconds", Help: "Unix time of the last successful renewal.",
	})
	tries := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "chancery_agent_renewals_total", Help: "Tries to renew, by result (ok, error).",
	}, []string{"result"})
	reg.MustRegister(last, tries)
	return func(err error) {
		if err != nil {
			tries.WithLabelValues("error").Inc()
			return
		}
		tries.WithLabelValues("ok").Inc()
		last.SetToCurrentTime()
	}
}
