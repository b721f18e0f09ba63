package server

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/cmd/chancery/server/answering"
	"github.com/chancery-project/chancery/cmd/chancery/server/auditlog"
	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
	"github.com/chancery-project/chancery/cmd/chancery/server/federating"
	"github.com/chancery-project/chancery/cmd/chancery/server/issuance"
	"github.com/chancery-project/chancery/cmd/chancery/server/keystore"
	"github.com/chancery-project/chancery/cmd/chancery/server/naming"
	"github.com/chancery-project/chancery/cmd/chancery/server/parents"
	"github.com/chancery-project/chancery/cmd/chancery/server/publishing"
	"github.com/chancery-project/chancery/cmd/chancery/server/replicas"
	"github.com/chancery-project/chancery/cmd/chancery/server/report"
	"github.com/chancery-project/chancery/cmd/chancery/server/revoking"
	"github.com/chancery-project/chancery/cmd/chancery/server/rotating"
	"github.com/chancery-project/chancery/cmd/chancery/server/signing"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/rotate/staged"
	"github.com/chancery-project/chancery/trust"
)

// Server is all that `chancery server` runs. Open makes it, Listen and Run use it, Close ends it.
type Server struct {
	settings   *Settings
	logger     *slog.Logger
	log        *audit.Log
	issuance   *issuelog.Log // nil without one
	store      store.Store
	sealer     *keys.Sealer
	keys       keystore.Store // nil if keys lie sealed in the state
	health     *keys.Health
	authority  *authority.Keeper
	board      *board.Board // where it tells others on the store how it is
	replicas   *replicas.Desk
	desk       *revoking.Desk
	rotation   *staged.Manager
	rotating   *rotating.Desk
	federation *federating.Desk
	naming     *naming.Desk // nil without
	notes      *adminsocket.Notes
	parent     *parents.Renewer // nil without one
	clusters   []*clusters.Cluster
	signer     *signing.Signer       // of Kubernetes' own requests; nil for none
	publisher  *publishing.Publisher // of roots in Kubernetes; nil for none
	sampler    *ca.Sampler
	requests   *csr.Metrics
	report     *report.Reporter
	keeper     *rotate.Keeper // of the server's own certificate
	grpc       *csr.Server
	registry   *prometheus.Registry
	wasReady   atomic.Bool  // once since the start
	listener   net.Listener // set by Listen
	metrics    net.Listener // set by Listen
	admin      net.Listener // set by Listen
}

// Open puts a server together. What it cannot work without is an error here, before anything listens; what is wrong in
// the config, before the state and the audit log are touched.
func Open(ctx context.Context, settings *Settings, logger *slog.Logger) (_ *Server, err error) {
	s := &Server{settings: settings, logger: logger, registry: process.NewRegistry()}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	var byName map[string]csr.ClusterConfig
	if s.clusters, byName, err = settings.clusters.Open(logger, s.registry); err != nil {
		return nil, settings.wrong(err)
	}
	if err := s.openState(ctx); err != nil {
		return nil, err
	}
	if s.issuance != nil {
		s.registry.MustRegister(issuance.Entries(s.issuance))
	}
	s.health = keys.NewHealth(keys.HealthConfig{Keys: s.authority.Keys, Logger: logger, Metrics: s.registry})
	if err := s.openNaming(); err != nil {
		return nil, settings.wrong(err)
	}
	s.desk = revoking.Open(revoking.Config{
		Domain: settings.domain, Authority: s.authority, Sealer: s.sealer, Issuance: s.issuance, Board: s.board, Log: s.log, Clusters: slices.Collect(maps.Keys(byName)),
		ActorOf: adminsocket.ActorOf, Naming: s.naming.Source(), Own: s.ownSerial, Leaf: s.ownLeaf, Profile: settings.profile, Logger: logger, Metrics: s.registry,
	})
	s.naming.OnChange(s.desk.Agents().NamingChanged)
	s.publisher, err = settings.publishing.Open(publishing.Env{
		Bundle: func() (*trust.Bundle, error) { return s.authority.Document().Bundle(settings.domain) }, Drives: s.authority.Drives, Logger: logger, Metrics: s.registry,
	})
	if err != nil {
		return nil, settings.wrong(err)
	}
	s.openRotation()
	if err := s.openFederation(); err != nil {
		return nil, settings.wrong(err)
	}
	s.replicas = replicas.Open(replicas.Config{Place: settings.place, Authority: s.authority, Board: s.board, Log: s.log, ActorOf: adminsocket.ActorOf, Metrics: s.registry})
	s.sampler = newSampler(s.registry, logger)
	s.requests = csr.NewMetrics(s.registry)
	service, err := csr.NewService(csr.Config{
		Domain: settings.domain, Present: s.authority.Present, Issuers: s.authority.Issuers, Aliases: settings.aliases, Profile: settings.profile, Clusters: byName, Admission: settings.admission,
		Log: s.log, Sampler: s.sampler, Logger: logger, Metrics: s.requests,
		Revocations: s.desk.Revoked, Agents: s.desk.Agents(), Checkpoints: s.desk.Checkpoints, Bundles: s.desk.Bundles(), Tainted: s.desk.Tainted,
		MaxConnectionAge: settings.connections.MaxAge, DrainDelay: settings.connections.DrainDelay,
	})
	if err != nil {
		return nil, err
	}
	s.signer, err = settings.signing.Open(signing.Env{
		Domain: settings.domain, Authority: s.authority, Profile: settings.profile, Clusters: byName, Log: s.log, Sampler: s.sampler, Agents: s.desk.Agents(),
		Revocations: s.desk.Revoked, Logger: logger, Metrics: s.registry,
	})
	if err != nil {
		return nil, settings.wrong(err)
	}
	s.keeper = rotate.NewKeeper(rotate.KeeperConfig{ID: trust.SystemID(s.authority.Present(), "server"), Issue: s.issueOwn, Logger: logger})
	s.authority.OnUse(func() { s.keeper.Renew(0) }) // it has the roots along; and one that ended while there was no issuer need not wait for its next try
	below, err := parents.Below(service, settings.domain, s.authority, settings.grants)
	if err != nil {
		return nil, settings.wrong(err)
	}
	s.grpc = csr.NewServer(service, s.own, below...)
	s.report = s.newReport()
	s.registry.MustRegister(process.Expiries{Help: "Seconds until a certificate of the authority, or the server's own, ends, by certificate.",
		Name: "chancery_ca_certificate_expiry_seconds", Read: s.expiries})
	return s, nil
}

// openNaming comes before the desk that tells agents.
func (s *Server) openNaming() (err error) {
	s.notes = adminsocket.NewNotes(s.log)
	s.naming, err = s.settings.naming.Open(naming.Env{
		Document: s.authority.Document, Domain: s.settings.domain, Aliases: s.settings.aliases, ActorOf: adminsocket.ActorOf, Note: s.notes.Note, Logger: s.logger, Metrics: s.registry,
	})
	return err
}

// former returns what still has to do with a trust domain that a migration leaves.
func (s *Server) former(from trust.Domain) []staged.Use {
	return append(rotating.Former(s.desk.Agents().Former)(from), s.naming.Former(from)...)
}

// openRotation comes after the desk that publishes: a rotation goes by what replicas say that they have published.
func (s *Server) openRotation() {
	c := s.settings
	s.rotation = staged.New(staged.Config{
		Domain: c.domain, Authority: s.authority, Notes: s.board.All, Changed: s.board.Changed, Floor: max(c.rotation.Readers, c.publishing.Floor()), Unpublished: s.publisher.Unpublished, LeafTTL: c.profile.MaxTTL(), Typical: c.profile.DefaultTTL(),
		RootMaxAge: c.rotation.RootMaxAge, Blind: func() []string { return s.desk.Agents().NotEnforcing(time.Now()) }, Former: s.former,
		Refuses: rotating.Refuses(c.aliases, c.federation.Domains()), Log: s.log, Logger: s.logger, Metrics: s.registry,
	})
	s.rotating = rotating.Open(rotating.DeskConfig{Manager: s.rotation, ActorOf: adminsocket.ActorOf, Note: s.notes.Note})
}

// openFederation comes after the notes of who reads what.
func (s *Server) openFederation() (err error) {
	c := s.settings
	s.federation, err = federating.Open(federating.Config{
		Place: c.federation, Domain: c.domain, Aliases: c.aliases, Authority: s.authority, Log: s.log, Own: s.own, ActorOf: adminsocket.ActorOf, Note: s.notes.Note, Notes: s.board.All, Logger: s.logger, Metrics: s.registry,
	})
	if err == nil {
		s.desk.Agents().OnUnknown(s.federation.Unknown)
	}
	return err
}

// rootsFile is for agents that are new: missing on a server that is new on a shared store, and other roots after a rotation.
func (s *Server) rootsFile() rotating.RootsFile {
	return rotating.RootsFile{
		Path: s.settings.rootsFile(), Logger: s.logger, Bundle: func() (*trust.Bundle, error) { return s.authority.Document().Bundle(s.settings.domain) },
		Write: func() error { return s.settings.WriteRoots(s.authority.Document()) },
	}
}

// openState opens store, sealing key, audit log and authority; the caller closes s on error.
func (s *Server) openState(ctx context.Context) (err error) {
	c := s.settings
	if s.store, err = c.place.Open(ctx, s.logger); err != nil {
		return c.explainStore(err)
	}
	if s.sealer, err = keys.LoadSealer(c.State.SealingKey); err != nil {
		return err
	}
	if s.log, err = audit.Open(c.AuditLog); err != nil {
		return err
	}
	if err := s.firstLog(ctx); err != nil {
		return err
	}
	var listed authority.LogState
	if s.issuance, listed, err = issuance.Open(c.IssuanceLog, s.log, s.logger); err != nil {
		return err
	}
	if err := s.log.Append(audit.Record{Event: audit.Started, Detail: "server of trust domain " + c.TrustDomain}); err != nil {
		return err
	}
	if s.keys, err = c.keys.Open(ctx, s.sealer, s.logger); err != nil {
		return c.wrong(err)
	}
	s.authority, err = authority.Open(ctx, authority.Config{
		Domain: c.domain, Store: s.store, Sealer: s.sealer, Log: s.log, Logger: s.logger, Replica: c.place.Replica(), Mark: c.place.Mark(), Plugged: c.Issuer.plugged(), Keys: s.keys, KeyType: c.keys.Type(),
		RootTTL: c.lifetimes.Root, IssuerTTL: c.lifetimes.Issuer, IssuanceLog: listed, Profiles: []*ca.Profile{c.profile, ca.ServerProfile()}, Parented: c.parent != nil,
	})
	if err != nil {
		return err
	}
	s.board = board.Open(board.Config{
		Store: s.store, Sealer: s.sealer, Domain: c.domain, Replica: c.place.Replica(), Format: document.Format, Logger: s.logger,
	})
	s.parent, err = c.parent.Open(parents.Env{
		Domain: c.domain, Authority: s.authority, Log: s.log, Logger: s.logger, Metrics: s.registry, MinLife: c.profile.DefaultTTL(),
	})
	return err
}

// firstLog makes the issuance log of a replica that the document does not list, or not as alive. One that is listed has a log, or had
// one, whose loss must not pass in silence.
func (s *Server) firstLog(ctx context.Context) error {
	c := s.settings
	data, version, err := s.store.Load(ctx)
	if err != nil {
		return c.explainStore(err)
	}
	doc, err := authority.DecodeDocument(data, version, s.sealer)
	if err != nil {
		return err
	}
	c.InLine(doc)
	if now := doc.Present(c.domain).String(); now != c.TrustDomain {
		s.logger.Warn("trustDomain in the config is not what this authority is now, since it migrated or does; it works all the same", "trustDomain", c.TrustDomain, "present", now)
	}
	made, err := issuance.First(c.IssuanceLog, authority.Config{Domain: c.domain, Replica: c.place.Replica()}, doc)
	if made {
		s.logger.Info("issuance log made", "dir", c.IssuanceLog, "replica", c.place.Replica())
	}
	return err
}

func newSampler(reg prometheus.Registerer, logger *slog.Logger) *ca.Sampler {
	found := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "chancery_ca_lint_findings_total", Help: "Issued certificates of the background sample that failed an RFC lint. Each is a bug.",
	})
	reg.MustRegister(found)
	return &ca.Sampler{Logger: logger, Found: found.Inc}
}

// Registry returns where the server's metrics are registered.
func (s *Server) Registry() *prometheus.Registry { return s.registry }

// Bundle returns the roots that the server issues under.
func (s *Server) Bundle() (*trust.Bundle, error) {
	issuer, err := s.authority.Issuer()
	if err != nil {
		return nil, err
	}
	return issuer.Bundle(), nil
}

// issueOwn issues the server's own certificate from its own issuer, by the same two steps as all others.
func (s *Server) issueOwn(ctx context.Context, key crypto.Signer) (rotate.Issued, error) {
	issuer, err := s.authority.Issuer()
	if err != nil {
		return rotate.Issued{}, err
	}
	token, err := issuer.Prepare(ca.ServerProfile(), ca.Request{
		ID: trust.SystemID(issuer.Domain(), "server"), PublicKey: key.Public(), DNSNames: s.settings.dns, IPs: s.settings.ips,
		Requester: audit.Requester{Method: "server certificate"},
	})
	if err != nil {
		return rotate.Issued{}, err
	}
	cert, err := issuer.Issue(ctx, token)
	if err != nil {
		return rotate.Issued{}, err
	}
	leaf, err := x509.ParseCertificate(cert.DER)
	if err != nil {
		return rotate.Issued{}, err
	}
	return rotate.Issued{Chain: append([]*x509.Certificate{leaf}, issuer.Chain()...), Bundle: issuer.Bundle()}, nil
}

func (s *Server) own() *trust.Identity {
	id, _ := s.keeper.Current()
	return id
}

// ownLeaf is asked for before there is a keeper, too.
func (s *Server) ownLeaf() *x509.Certificate {
	if s.keeper == nil {
		return nil
	}
	if own := s.own(); own != nil {
		return own.Leaf()
	}
	return nil
}

func (s *Server) ownSerial() string {
	if own := s.own(); own != nil {
		return own.Serial()
	}
	return ""
}

// expiries returns the end of each certificate that the server's work depends on.
func (s *Server) expiries() map[string]time.Time {
	out := s.authority.Expiries()
	if own := s.own(); own != nil {
		out["server"] = own.NotAfter()
	}
	return out
}

// ready returns nil if certificates can be issued, else what is missing.
func (s *Server) ready() error {
	if _, err := s.authority.Issuer(); err != nil {
		return s.parent.Explain(err)
	}
	own := s.own()
	if own == nil {
		return errors.New("the server has no certificate of its own yet")
	}
	if end := own.NotAfter(); time.Now().After(end) {
		return fmt.Errorf("the server's own certificate ended at %s", end.UTC().Format(time.RFC3339))
	}
	for _, err := range []error{s.health.Err(s.authority.KeyName()), s.authority.Whole(), s.health.Err(s.authority.SecondKey()), s.authority.Err(), s.board.Err()} {
		if err != nil {
			return err
		}
	}
	for _, c := range s.clusters {
		if err := c.Blocks(); err != nil {
			return err
		}
	}
	if s.issuance != nil && s.issuance.Err() != nil {
		return s.issuance.Err()
	}
	return s.log.Err()
}

// wanted returns nil if the server can work and should get requests: not so once it is told to stop, though it serves on.
func (s *Server) wanted() error {
	if s.grpc.Stopping() {
		return errors.New("the server is stopping")
	}
	return s.ready()
}

// Listen opens the two addresses and the admin socket, so that one in use is an error before anything runs.
func (s *Server) Listen() (listen, metrics net.Addr, err error) {
	if s.listener, err = process.Listen("listen", s.settings.Listen); err != nil {
		return nil, nil, s.settings.wrong(err)
	}
	if s.metrics, err = process.Listen("metrics", s.settings.Metrics); err != nil {
		return nil, nil, s.settings.wrong(err)
	}
	if s.admin, err = adminsocket.Listen(s.settings.AdminSocket()); err != nil {
		return nil, nil, err
	}
	if err := s.federation.Listen(); err != nil {
		return nil, nil, s.settings.wrong(err)
	}
	return s.listener.Addr(), s.metrics.Addr(), nil
}

// Run serves until it is told to stop by the end of a context, on what Listen opened. Started, if not nil, is called once the server is ready for the
// first time. What requests need goes on until the last one has been answered, and /readyz says meanwhile that it is over.
func (s *Server) Run(told context.Context, started func()) error {
	rest, answered := context.WithCancel(context.WithoutCancel(told))
	defer answered()
	g, ctx := errgroup.WithContext(rest)
	serving, stop := context.WithCancel(ctx) // until told to stop, or until something else fails
	defer stop()
	defer context.AfterFunc(told, stop)()
	g.Go(func() error { return s.authority.Run(ctx) })
	g.Go(func() error { return s.board.Run(ctx) })
	g.Go(func() error { return s.rotation.Run(ctx) })
	g.Go(func() error { return s.rootsFile().Run(ctx) })
	g.Go(func() error { return s.replicas.Run(ctx) })
	g.Go(func() error { return s.federation.Run(ctx) })
	g.Go(func() error {
		return s.store.Watch(ctx, func() {
			s.authority.Wake()
			s.board.Wake()
		})
	})
	g.Go(func() error { return s.parent.Run(ctx) })
	g.Go(func() error { return s.signer.Run(ctx) })
	g.Go(func() error { return s.publisher.Run(ctx) })
	g.Go(func() error { return s.health.Run(ctx) })
	g.Go(func() error { return s.sampler.Run(ctx) })
	if s.issuance != nil {
		g.Go(func() error { return s.issuance.Run(ctx) })
	}
	g.Go(func() error { return s.desk.Run(ctx) })
	g.Go(func() error { return s.naming.Run(ctx) })
	g.Go(func() error {
		s.parent.Wait(ctx, s.authority)
		return s.keeper.Run(ctx)
	})
	for _, c := range s.clusters {
		g.Go(func() error { return c.Run(ctx) })
	}
	g.Go(func() error { return process.HTTP{Metrics: s.registry, Ready: s.wanted}.Run(ctx, s.metrics) })
	g.Go(func() error {
		return adminsocket.Serve(ctx, s.admin, s.service())
	})
	g.Go(func() error { return auditlog.Reopen(ctx, s.log, s.logger) })
	go auditlog.Retry(ctx, s.log, s.logger) // not waited for: a write to a disk that hangs does not end
	g.Go(func() error { return s.watchReady(serving, started) })
	g.Go(func() error {
		defer answered()
		return s.grpc.Run(serving, s.listener)
	})
	return g.Wait()
}

// service answers admins.
func (s *Server) service() answering.Service {
	return answering.Service{Desk: *s.desk, Rotations: s.rotating, Federation: s.federation, Naming: s.naming, Authority: s.authority, Log: s.log, Report: s.report, Replicas: s.replicas, Export: s.exporter().Export}
}

func (s *Server) exporter() answering.Exporter {
	return answering.Exporter{Store: s.store, Authority: s.authority, Sealer: s.sealer, Replica: s.settings.place.Replica(), Logger: s.logger}
}

// tellAfter is how long a server may be on its way to be ready before the log says what it lacks.
const tellAfter = 10 * time.Second

// reasons decides when the log says why a server is not ready: each reason once, and no more than one in tellAfter, since some
// hold numbers that change.
type reasons struct {
	last string
	next time.Time
}

func (r *reasons) due(err error, now time.Time) bool {
	return err.Error() != r.last && !now.Before(r.next)
}

func (r *reasons) told(err error, now time.Time) { r.last, r.next = err.Error(), now.Add(tellAfter) }

// watchReady keeps gRPC health in step with readiness and writes the address file.
func (s *Server) watchReady(ctx context.Context, started func()) error {
	addrs := fmt.Sprintf("%slisten=%s\nmetrics=%s\n", s.federation.AddrLine(), s.listener.Addr(), s.metrics.Addr())
	if err := process.WriteAddrFile(s.settings.AddrFile, addrs); err != nil {
		return err
	}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	var was error = errors.New("starting")
	why := reasons{next: time.Now().Add(tellAfter)}
	for {
		for _, c := range s.clusters {
			c.Note(s.logger)
		}
		err := s.ready()
		s.grpc.SetReady(err == nil)
		if err == nil {
			s.wasReady.Store(true)
		}
		switch {
		case err == nil && was != nil:
			s.logger.Info("ready", "listen", s.listener.Addr().String(), "metrics", s.metrics.Addr().String())
			ticker.Reset(time.Second)
			if started != nil {
				started()
				started = nil
			}
		case err != nil && was == nil:
			why.told(err, time.Now())
			s.logger.Error("not ready any more", "reason", err.Error())
		case err != nil && why.due(err, time.Now()): // /readyz says it on loopback only
			why.told(err, time.Now())
			s.logger.Warn("not ready", "reason", err.Error())
		}
		was = err
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// Close ends what Open and Listen opened. It works on a server that is only half made.
func (s *Server) Close() {
	for _, l := range []net.Listener{s.listener, s.metrics, s.admin} {
		if l != nil {
			l.Close()
		}
	}
	s.federation.Close()
	if s.log != nil {
		s.log.Close()
	}
	if s.issuance != nil { // after the log that it mirrors
		if err := s.issuance.Close(); err != nil {
			s.logger.Error("closing the issuance log; the next start puts its last entries into the tree", "reason", err.Error())
		}
	}
	if s.keys != nil {
		if err := s.keys.Close(); err != nil {
			s.logger.Warn("key store not closed", "reason", err.Error())
		}
	}
	if s.store != nil {
		s.store.Close()
	}
}
