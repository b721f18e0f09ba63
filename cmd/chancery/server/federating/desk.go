// Package federating owns what a server does about federation: it keeps the bundles of the foreign trust domains that its config names up to
// date in the authority document, shows its own at a bundle endpoint, and answers the admin calls about roots.
//
// It refuses to federate with what is our own, or an alias of it (decision D24), and to change what is trusted before the audit log says so
// (invariant 10). Only the server that drives polls; who is asked by an admin, or hears of an unknown authority, fetches whether it does or not.
package federating

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/federation"
	"github.com/chancery-project/chancery/trust/federation/endpoint"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// Config is what a Desk is made of.
type Config struct {
	Place     *Place
	Domain    trust.Domain   // the server's
	Aliases   []trust.Domain // trustDomainAliases
	Authority *authority.Keeper
	Log       *audit.Log
	Own       func() *trust.Identity                // the server's own certificate; nil if it has none
	ActorOf   func(context.Context) (string, error) // who calls, or a refusal
	Note      func(actor, detail string)            // notes in the audit log who has read what; not for each call
	Notes     func() []board.Note                   // of all replicas: the first foreign bundle waits until each reads such documents; nil: it does not
	Logger    *slog.Logger
	Metrics   prometheus.Registerer // nil: none
}

// Desk answers.
type Desk struct {
	config   Config
	poller   *federation.Poller
	relation map[trust.Domain]*relation
	pair     *keyPair // nil without an endpoint that has one
	listener net.Listener
	last     atomic.Pointer[known]
}

const (
	// storeTime is how long a bundle that was fetched may take to be stored.
	storeTime = 30 * time.Second
	// A bundle whose relationship has left the config stays for a while after this server has begun to drive: during an update of several
	// servers, who drives may have the old config still, or again.
	leaveAfter = 10 * time.Minute
	leaveEvery = 30 * time.Second
)

// Open makes a desk. What is wrong with files that must be there is an error.
func Open(c Config) (*Desk, error) {
	d := &Desk{config: c, relation: map[trust.Domain]*relation{}}
	var clients []*federation.Client
	for i := range c.Place.relations {
		r := &c.Place.relations[i]
		client, err := federation.NewClient(federation.ClientConfig{
			Relationship: r.Relationship, Roots: r.pool, Bundle: func(of trust.Domain) (*trust.Bundle, error) { return d.verifier(r, of) },
		})
		if err != nil {
			return nil, fmt.Errorf("federation[%d].%w", i, err)
		}
		if err := d.refuseOurs(c.Authority.Document(), r.Domain); err != nil {
			return nil, fmt.Errorf("federation[%d].trustDomain: %w", i, err)
		}
		d.relation[r.Domain], clients = r, append(clients, client)
	}
	for i, a := range c.Aliases {
		if c.Authority.Document().Foreign[a.String()] != nil {
			return nil, fmt.Errorf("trustDomainAliases[%d]: %s is federated, by a bundle that was fetched or imported, and cannot be an alias, too (decision D24); "+
				"leave the alias out, and `chancery trust forget %s` first if it is to be one", i, a, a)
		}
	}
	d.poller = federation.NewPoller(federation.PollerConfig{Clients: clients, Polls: c.Authority.Drives, Hint: d.hint, Take: d.take, Logger: c.Logger})
	if e := c.Place.endpoint; e != nil && e.Certificate != "" {
		d.pair = &keyPair{certificate: e.Certificate, key: e.Key, logger: c.Logger}
		if err := d.pair.read(); err != nil {
			return nil, fmt.Errorf("bundleEndpoint: %w", err)
		}
	}
	if c.Metrics != nil {
		c.Metrics.MustRegister(metrics{d})
	}
	return d, nil
}

// pool returns the roots of the file that is named; nil, for the system's, if none is.
func (r *relation) pool() (*x509.CertPool, error) {
	if r.roots == "" {
		return nil, nil
	}
	data, err := readFile(r.roots)
	if err != nil {
		return nil, fmt.Errorf("roots: %w", err)
	}
	certs, err := trust.ParseCertificates(data)
	if err != nil {
		return nil, fmt.Errorf("roots %s: %w", r.roots, err)
	}
	pool := x509.NewCertPool()
	for _, c := range certs {
		pool.AddCert(c)
	}
	return pool, nil
}

// Listen opens the address of the bundle endpoint, if there is one, so that one in use is an error before anything runs.
func (d *Desk) Listen() (err error) {
	if e := d.config.Place.endpoint; e != nil {
		d.listener, err = process.Listen("bundleEndpoint.listen", e.Listen)
	}
	return err
}

// AddrLine is what the server's address file has of the bundle endpoint.
func (d *Desk) AddrLine() string {
	if d.listener == nil {
		return ""
	}
	return fmt.Sprintf("bundleEndpoint=%s\n", d.listener.Addr())
}

// Close ends what Listen opened. It works on a desk that was never made.
func (d *Desk) Close() {
	if d != nil && d.listener != nil {
		d.listener.Close()
	}
}

// Run polls, and serves the bundle endpoint, until ctx ends.
func (d *Desk) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.poller.Run(ctx) })
	g.Go(func() error { return d.dropLeft(ctx) })
	if d.listener != nil {
		if d.pair != nil {
			g.Go(func() error { d.pair.run(ctx); return nil })
		}
		h := endpoint.New(endpoint.Config{Bundle: d.bundle, RefreshHint: d.config.Place.hint, Logger: d.config.Logger})
		g.Go(func() error { return endpoint.Serve(ctx, d.listener, d.tls(), h, d.config.Logger) })
	}
	return g.Wait()
}

// tls shows the certificate of the moment, and asks for none: anybody may read roots.
func (d *Desk) tls() *tls.Config {
	return &tls.Config{
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			if d.pair != nil {
				return d.pair.current.Load(), nil
			}
			if own := d.config.Own(); own != nil {
				return own.TLSCertificate(), nil
			}
			return nil, errors.New("the server has no certificate of its own yet")
		},
	}
}

// Unknown is told of a trust domain of which a peer showed a certificate that no known root vouches for. Its bundle is fetched soon, if we
// federate with it, and as often as that may be. It does not wait.
func (d *Desk) Unknown(td trust.Domain) { d.poller.Unknown(td) }

// hint returns the refresh hint of the stored bundle of a trust domain.
func (d *Desk) hint(td trust.Domain) (time.Duration, bool) {
	f := d.known().foreign[td]
	if f == nil || f.bundle == nil {
		return 0, false
	}
	return f.bundle.RefreshHint, true
}

// take stores a bundle that was fetched. The audit log has it before the document does.
func (d *Desk) take(ctx context.Context, r federation.Relationship, b *spiffebundle.Bundle, polled bool) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	a := d.config.Authority
	v, err := foreign.Judge(a.Document().Foreign, b)
	if err == nil {
		err = d.refuseOurs(a.Document(), r.Domain)
	}
	if err != nil || !v.Change {
		return false, err
	}
	change := a.Change
	if polled {
		change = a.Drive
		if !a.Drives() {
			return false, federation.ErrElsewhere
		}
	}
	if err := d.allRead(ctx); err != nil {
		return false, err
	}
	detail := fmt.Sprintf("federation: %s, from %s", describe(b), r.URL)
	if err := d.config.Log.Append(audit.Record{Event: audit.Admin, Actor: "server " + a.Replica(), Detail: detail}); err != nil {
		return false, err
	}
	changed := false
	err = change(ctx, func(next *document.Document) (err error) {
		if err := d.refuses(next, r.Domain); err != nil {
			return err
		}
		if next.Foreign, changed, err = foreign.Take(next.Foreign, b, r.URL, false, time.Now()); err == nil && !changed {
			err = replica.ErrUnchanged
		}
		return err
	})
	switch {
	case errors.Is(err, replica.ErrNotDriver):
		return false, federation.ErrElsewhere
	case err != nil:
		return false, err
	}
	if changed {
		d.say(b, v)
	}
	return changed, nil
}

// say tells the log what came, and what is odd about it.
func (d *Desk) say(b *spiffebundle.Bundle, v foreign.Verdict) {
	td := b.Domain.String()
	d.config.Logger.Info("bundle of a federated trust domain taken over", "trust_domain", td, "sequence", b.Sequence, "roots", len(b.Roots))
	if v.Unordered {
		d.config.Logger.Warn("the bundle of a federated trust domain has changed and its spiffe_sequence has not, which it should; which one is newer cannot be told",
			"trust_domain", td, "sequence", b.Sequence)
	}
	if len(b.Roots) == 0 {
		d.config.Logger.Warn("the bundle of a federated trust domain has no root: none of its certificates is accepted any more", "trust_domain", td)
	}
	for _, why := range b.Ignored {
		d.config.Logger.Info("part of the bundle of a federated trust domain passed over", "trust_domain", td, "reason", why)
	}
}

// describe says in a line what a bundle is.
func describe(b *spiffebundle.Bundle) string {
	number := "no sequence"
	if b.HasSequence {
		number = fmt.Sprintf("sequence %d", b.Sequence)
	}
	return fmt.Sprintf("bundle of %s, %s, roots %d", b.Domain, number, len(b.Roots))
}

// dropLeft drops bundles that came from an endpoint and whose relationship the config names no more. What an admin imported stays until an
// admin forgets it.
func (d *Desk) dropLeft(ctx context.Context) error {
	ticker := time.NewTicker(leaveEvery)
	defer ticker.Stop()
	var driving time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		switch {
		case !d.config.Authority.Drives():
			driving = time.Time{}
		case driving.IsZero():
			driving = time.Now()
		case time.Since(driving) >= leaveAfter:
			d.drop(ctx)
		}
	}
}

func (d *Desk) drop(ctx context.Context) {
	for td, f := range d.known().foreign {
		if d.relation[td] != nil || !f.stored.Fetched() {
			continue
		}
		err := d.forget(ctx, td, "server "+d.config.Authority.Replica(), "federation: forget "+td.String()+", with which the config does not federate any more",
			d.config.Authority.Drive, (*foreign.Domain).Fetched)
		if err != nil {
			d.config.Logger.Warn("a foreign trust domain that has left the config is not forgotten yet", "trust_domain", td.String(), "reason", err.Error())
			continue
		}
		d.config.Logger.Info("a foreign trust domain that has left the config is forgotten", "trust_domain", td.String())
	}
}

// forget drops a trust domain that is as it is wanted to be.
func (d *Desk) forget(ctx context.Context, td trust.Domain, actor, detail string, change func(context.Context, func(*document.Document) error) error, wanted func(*foreign.Domain) bool) error {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	if err := d.config.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: detail}); err != nil {
		return err
	}
	return change(ctx, func(next *document.Document) error {
		if f := next.Foreign[td.String()]; f == nil || !wanted(f) {
			return replica.ErrUnchanged
		}
		next.Foreign, _ = foreign.Forget(next.Foreign, td)
		return nil
	})
}
