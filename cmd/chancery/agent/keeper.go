package agent

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/foreign"
	"github.com/chancery-project/chancery/csr/client/naming"
	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/sds"
	"github.com/chancery-project/chancery/sds/consumers"
	"github.com/chancery-project/chancery/trust"
)

// Keeper is a keeper of one identity with the client that renews it and keeps its roots and CRLs up to date.
type Keeper struct {
	*rotate.Keeper
	client       *client.Client
	logger       *slog.Logger
	notEnforcing func() []string
	table        *consumers.Table // nil: none is kept
	pinned       func() bool
	foreign      *foreign.Domains          // nil: nothing is known of foreign trust domains
	naming       *naming.Table             // nil: nothing is asked for
	streams      func() []sds.StreamStatus // of whoever is served; nil: they name nothing

	mu    sync.Mutex        // guards all below
	urged *x509.Certificate // that was to be replaced before its time last
	calm  time.Duration     // the least time that the next gets, if it is of the same issuer
	unfit uint64            // generation of the roots that the SVID in use does not verify against, as they came last
	since time.Time         // when they first came
}

// KeeperConfig is what a Keeper is made of.
type KeeperConfig struct {
	Client       client.Config // but for Current, and Logger
	Logger       *slog.Logger
	Observe      func(error)               // told the outcome of each try to renew; nil = nobody
	NotEnforcing func() []string           // as in client.SyncConfig
	Table        *consumers.Table          // of those whom the identity is served to; nil: none is kept
	Streams      func() []sds.StreamStatus // of these, for what they name; nil: nothing is said of that
}

// NewKeeper joins a keeper and a client: the client shows the keeper's SVID, the keeper gets what the client brings.
func NewKeeper(c KeeperConfig) *Keeper {
	k := &Keeper{notEnforcing: c.NotEnforcing, logger: c.Logger, table: c.Table, pinned: func() bool { return c.Client.Anchor != nil && c.Client.Anchor.Pinned() },
		foreign: c.Client.Foreign, naming: c.Client.Naming, streams: c.Streams}
	if c.Table != nil {
		c.Client.Agent = c.Table.ID()
	}
	c.Client.Current = func() *trust.Identity {
		id, _ := k.Current()
		return id
	}
	c.Client.Logger = c.Logger
	k.client = client.New(c.Client)
	k.Keeper = rotate.NewKeeper(rotate.KeeperConfig{
		ID: c.Client.ID, Logger: c.Logger, Observe: c.Observe,
		Issue: func(ctx context.Context, key crypto.Signer) (rotate.Issued, error) {
			chain, bundle, err := k.client.Issue(ctx, key)
			return rotate.Issued{Chain: chain, Bundle: bundle}, err
		},
	})
	return k
}

// Run keeps the identity fresh, and its roots and CRLs, until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return k.Keeper.Run(ctx) })
	g.Go(func() error {
		s := client.SyncConfig{Served: k.served, Apply: k.apply, NotEnforcing: k.notices, Reissue: k.reissue, Names: k.names}
		if k.table != nil {
			s.Consumers = k.evidence
		}
		return k.client.Sync(ctx, s)
	})
	if k.table != nil {
		g.Go(func() error { return k.table.Run(ctx) })
	}
	if k.naming != nil {
		g.Go(func() error { return k.naming.Run(ctx) })
	}
	return g.Wait()
}

// checkpoints returns the last checkpoint of each issuance log, one after the other.
func (k *Keeper) checkpoints() string { return strings.Join(k.client.Checkpoints(), "\n") }

func (k *Keeper) served() ([]*trust.Identity, <-chan struct{}) {
	id, changed := k.Current()
	if id == nil {
		return nil, changed
	}
	return []*trust.Identity{id}, changed
}

// ready returns nil if the keeper has an identity that has not ended.
func ready(k *Keeper) error {
	id, _ := k.Current()
	if id == nil {
		return errors.New("no identity yet")
	}
	if time.Now().After(id.NotAfter()) {
		return fmt.Errorf("the identity ended at %s", id.NotAfter().UTC().Format(time.RFC3339))
	}
	return nil
}

// Expiries are collectors of the time that the keepers' SVIDs, roots and CRLs have left.
func Expiries(keepers func() []*Keeper) []prometheus.Collector {
	crls := process.Expiries{
		Name: "chancery_agent_crl_expiry_seconds", Help: "Seconds until a CRL that is served ends, by its issuer's key.",
		Read: func() map[string]time.Time {
			out := map[string]time.Time{}
			for _, k := range keepers() {
				if id, _ := k.Current(); id != nil {
					maps.Copy(out, id.Bundle.CRLs().Ends())
				}
			}
			return out
		},
	}
	withheld := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "chancery_agent_crls_withheld", Help: "Identities whose proxies get no CRLs, because those that there are would cut off peers that are not revoked.",
	}, func() float64 {
		n := 0
		for _, k := range keepers() {
			if k.Withheld() != "" {
				n++
			}
		}
		return float64(n)
	})
	return []prometheus.Collector{svidExpiries(keepers), crls, withheld}
}

func svidExpiries(keepers func() []*Keeper) prometheus.Collector {
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
				for _, r := range id.Bundle.All() {
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
