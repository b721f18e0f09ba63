// Package revoking owns what a server does about revocation towards agents and admins: it carries new CRLs, signed roots and
// checkpoints to the agents, and answers the admin calls about revocations and about what agents serve.
//
// It refuses to say that something is revoked before it is stored, and to leave out what it does not reach: logs of other
// replicas, agents that are behind, consumers that do not look at CRLs.
package revoking

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/bundles"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/revocation"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/answers"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/trust"
)

// Config is what a Desk is made of.
type Config struct {
	Domain    trust.Domain
	Authority *authority.Keeper
	Sealer    *keys.Sealer  // opens the bundle key
	Issuance  *issuelog.Log // nil without one
	Board     *board.Board  // where replicas tell each other
	Log       *audit.Log
	Clusters  []string                              // names of those that are configured
	Own       func() string                         // serial of the server's own certificate, hex; empty if it has none
	Leaf      func() *x509.Certificate              // the server's own certificate; nil if it has none. May be nil
	Profile   *ca.Profile                           // of what is issued; nil: one with the default lives
	ActorOf   func(context.Context) (string, error) // who calls, or a refusal
	// Naming says who may serve a service, for agents; nil: they are told nothing. See agents.Config.
	Naming  func(service string) (ids []string, known bool)
	Logger  *slog.Logger
	Metrics prometheus.Registerer
}

// Desk answers.
type Desk struct {
	chanceryv1.UnimplementedAdminServer
	config  Config
	manager *revocation.Manager
	hub     *agents.Hub
	ledger  *evidence.Ledger
	strange *rate.Sometimes // says that a mark is none
	source  *bundles.Source
	bundles *answers.Bundles
	told    *told
}

// told is what agents were told last.
type told struct {
	mu         sync.Mutex // guards all; held while it is passed on
	lists      *revocation.Lists
	signature  []byte // of the bundle; empty if it was sent without one
	federation federation
	foreign    *chanceryv1.SignedFederation // that was sent; nil if none was
}

const (
	// announceTime is how long a new issuer that an admin brings waits for agents to have its CRL, and for other replicas.
	announceTime = 10 * time.Second
	// maxLogs is how many logs agents keep in mind.
	maxLogs = 100
)

// Open makes a desk. What the document says is refused from here on.
func Open(c Config) *Desk {
	d := &Desk{config: c, strange: &rate.Sometimes{Interval: time.Minute}, told: new(told)}
	d.source = bundles.New(bundles.Config{Domain: c.Domain, Authority: c.Authority, Sealer: c.Sealer, Log: c.Log, Logger: c.Logger})
	d.bundles = answers.NewBundles(answers.Config{Bundle: d.source.Bundle, Signer: d.source.Signer})
	d.ledger = evidence.New(d.consumers())
	d.hub = agents.New(agents.Config{Checkpoints: d.Checkpoints, Mark: d.mark, Seen: d.seen, Naming: c.Naming, Logger: c.Logger, Ledger: d.ledger, Metrics: c.Metrics})
	d.manager = revocation.New(revocation.Config{
		Domain: c.Domain, Authority: c.Authority, Issuance: c.Issuance, Board: c.Board, Logger: c.Logger, Metrics: c.Metrics, Publish: d.publish,
		Acknowledge: d.acknowledge,
	})
	c.Authority.Announce(d.announce)
	return d
}

// Revoked returns what is revoked now.
func (d Desk) Revoked() *revocation.Set { return d.manager.Set() }

// Bundles returns the roots as the bundle key signs them.
func (d Desk) Bundles() *answers.Bundles { return d.bundles }

// BundleKey returns the public key that agents pin, and why it signs nothing.
func (d Desk) BundleKey() ([]byte, error) { return d.source.Key() }

// Tainted reports whether a certificate's key is that of an authority that is tainted.
func (d Desk) Tainted(cert *x509.Certificate) bool { return d.source.Tainted(cert) }

// Agents returns who serves Sync.
func (d Desk) Agents() *agents.Hub { return d.hub }

// Checkpoints returns the last checkpoint of each log that is known here: the own one first, as of this moment, then those that other
// replicas told. None if there is no own one.
func (d Desk) Checkpoints() []string {
	if d.config.Issuance == nil {
		return nil
	}
	all := []string{d.config.Issuance.Checkpoint()}
	if d.config.Board != nil {
		for _, n := range d.config.Board.Others() {
			if n.Checkpoint != "" && len(all) < maxLogs {
				all = append(all, n.Checkpoint)
			}
		}
	}
	return all
}

// mark is what agents are told of the document, to bring back to any server (decision D9).
func (d *Desk) mark() *chanceryv1.DocumentMark {
	version, tainted, mac := d.config.Authority.Mark()
	return &chanceryv1.DocumentMark{Version: version, Tainted: tainted, Mac: mac}
}

// seen takes what an agent brought back.
func (d *Desk) seen(_ context.Context, m *chanceryv1.DocumentMark) {
	if err := d.config.Authority.CheckMark(m.GetVersion(), m.GetTainted(), m.GetMac()); err != nil {
		d.strange.Do(func() { // an agent can make up as many as it likes
			d.config.Logger.Warn("an agent brings a mark of the document that is none", "reason", err.Error())
		})
	}
}

// Run keeps CRLs and agents up to date until ctx ends.
func (d Desk) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.manager.Run(ctx) })
	g.Go(func() error { return eachSecond(ctx, func() { d.hub.PushCheckpoints(time.Now()) }) })
	g.Go(func() error { return d.ledger.Run(ctx) })
	g.Go(func() error {
		return eachSecond(ctx, func() {
			d.source.Mind(ctx)
			d.signAnew()
		})
	})
	return g.Wait()
}

func eachSecond(ctx context.Context, do func()) error {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		do()
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// publish sends a new state to the agents.
func (d *Desk) publish(l *revocation.Lists) {
	d.told.mu.Lock()
	defer d.told.mu.Unlock()
	d.told.lists = l
	signed, _ := d.bundles.Signed(l.Bundle) // why it is not, the source says
	d.tell(signed)
}

// signAnew sends what agents have again, once it can be signed that was not before, or is signed by another key; or there is something else
// to say of foreign trust domains.
func (d Desk) signAnew() {
	d.told.mu.Lock()
	defer d.told.mu.Unlock()
	if d.told.lists == nil {
		return
	}
	signed, err := d.bundles.Signed(d.told.lists.Bundle)
	if err == nil && (!bytes.Equal(signed.GetSignature(), d.told.signature) || d.federation() != d.told.foreign) {
		d.tell(signed)
	}
}

// tell sends the lists to the agents. Caller holds told's lock.
func (d Desk) tell(signed *chanceryv1.SignedBundle) {
	l := d.told.lists
	d.told.signature, d.told.foreign = signed.GetSignature(), d.federation()
	m := &chanceryv1.SyncUpdate{Bundle: answers.Roots(l.Bundle), SignedBundle: signed, Crls: inOrder(l.CRLs), Issuers: inOrder(l.Issuers)}
	m.Federation = d.told.foreign
	m.Reissue = d.reissue(l.Leave)
	if err := d.hub.Publish(m); err != nil { // a fault of ours
		d.config.Logger.Error("agents are not told of roots and CRLs", "reason", err.Error())
	}
}

// inOrder sorts, so that the same is the same whichever issuer signs: it need not be sent again then.
func inOrder(all [][]byte) [][]byte { return slices.SortedFunc(slices.Values(all), bytes.Compare) }

// announce returns once the agents that are connected have the CRL of an issuer that waits to sign: without it they would refuse its
// leaves. Of agents elsewhere their replicas know: each of those that live has to say that it has published that CRL, and that it can
// sign with the issuer's key (decision D4); else the error names it.
func (d *Desk) announce(ctx context.Context) error {
	if err := d.manager.Refresh(ctx); err != nil {
		return err
	}
	version := d.config.Authority.Document().Version
	ctx, cancel := context.WithTimeout(ctx, announceTime)
	defer cancel()
	if all, have := d.hub.Wait(ctx); have < all {
		d.config.Logger.Warn("not every agent has the CRL of the new issuer before it signs", "agents", all, "acknowledged", have)
	}
	return d.manager.Acknowledged(ctx, version)
}

// maxWait bounds how long an answer waits for agents.
const maxWait = 30 * time.Second

// Revoke implements chancery.v1.Admin.
func (d Desk) Revoke(ctx context.Context, q *chanceryv1.RevokeRequest) (*chanceryv1.RevokeResponse, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	r := authority.Revocation{Time: time.Now(), Actor: actor}
	if r.Predicate, err = d.predicate(q.GetPredicate()); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	var known bool
	if r.Reason, known = reasons[q.GetReason()]; !known {
		return nil, status.Errorf(codes.InvalidArgument, "reason %.60q is not known; use one of %s", q.GetReason(), strings.Join(Reasons(), ", "))
	}
	if r.Serial != "" && r.Serial == d.config.Own() {
		return nil, status.Errorf(codes.FailedPrecondition, "serial %s is that of the server's own certificate, without which no agent would talk to it: restart the server, "+
			"which makes it use another, and revoke it then", r.Serial)
	}
	if q.GetDryRun() {
		if err := d.config.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "revoke --dry-run " + r.Predicate.String()}); err != nil {
			return nil, status.Error(codes.Unavailable, err.Error())
		}
	}
	// Who asked may go away; what was begun is done.
	result, err := d.manager.Revoke(context.WithoutCancel(ctx), r, q.GetDryRun())
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	resp := &chanceryv1.RevokeResponse{Count: result.Count, Revocation: result.Revocation}
	for _, c := range result.Certificates {
		node := c.Node
		if node != "" {
			node = c.Cluster + "/" + node
		}
		resp.Certificates = append(resp.Certificates, &chanceryv1.RevokedCertificate{
			Serial: c.Serial, SpiffeId: c.SPIFFEID, Node: node, NotAfter: timestamppb.New(c.NotAfter),
		})
	}
	if result.Delayed != nil {
		resp.Delayed = result.Delayed.Error()
	} else if wait := min(q.GetWait().AsDuration(), maxWait); wait > 0 && !q.GetDryRun() {
		ctx, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		d.hub.Wait(ctx)
	}
	all, have := d.hub.Counts()
	resp.Agents, resp.Acknowledged = uint32(all), uint32(have)
	resp.MissingLogs, resp.NotEnforcing = slices.Concat(d.manager.State().MissingLogs, result.Unseen), d.notEnforcing()
	return resp, nil
}

// notEnforcing says who does not enforce CRLs (decision D23).
func (d Desk) notEnforcing() []string {
	s := d.manager.State()
	return slices.Concat(s.Off, s.Stale, d.hub.NotEnforcing(time.Now()))
}

// Status says how revocations and agents are, without waiting for anything. Nil before the first look.
func (d Desk) Status() *chanceryv1.GetStatusResponse_Crls {
	select {
	case <-d.manager.Looked():
	default:
		return nil
	}
	s := d.manager.State()
	all, have := d.hub.Counts()
	out := &chanceryv1.GetStatusResponse_Crls{
		Off: s.Off, Stale: s.Stale, Revocations: uint64(len(s.Revocations)), Agents: uint32(all), Acknowledged: uint32(have),
	}
	for _, n := range s.Counts {
		out.Certificates += n
	}
	if len(s.Revocations) > 0 {
		out.Stale = slices.Concat(s.Stale, s.MissingLogs)
	}
	if s.Err != nil {
		out.Error = s.Err.Error()
	}
	for _, t := range []struct {
		at time.Time
		to **timestamppb.Timestamp
	}{{s.Failing, &out.Failing}, {s.Ends, &out.Ends}, {d.hub.Published(), &out.Published}} {
		if !t.at.IsZero() {
			*t.to = timestamppb.New(t.at)
		}
	}
	return out
}

// predicate reads a predicate.
func (d Desk) predicate(p *chanceryv1.Predicate) (out authority.Predicate, err error) {
	out = authority.Predicate{Serial: p.GetSerial(), SPIFFEID: p.GetSpiffeId()}
	if t := p.GetIssuedBefore(); t != nil {
		if err := t.CheckValid(); err != nil {
			return out, fmt.Errorf("issued_before: %w", err)
		}
		at := t.AsTime()
		out.IssuedBefore = &at
	}
	node := p.GetNode()
	if node == "" {
		return out, nil
	}
	cluster, name, ok := strings.Cut(node, "/")
	switch {
	case !ok && len(d.config.Clusters) == 1:
		cluster, name = d.config.Clusters[0], node
	case !ok:
		return out, fmt.Errorf("node %.80q: several clusters are configured, so name it as CLUSTER/NODE", node)
	}
	if !slices.Contains(d.config.Clusters, cluster) {
		return out, fmt.Errorf("node %.80q: cluster %.80q is not configured here; known are %v", node, cluster, d.config.Clusters)
	}
	out.Cluster, out.Node = cluster, name
	return out, nil
}

// reasons of RFC 5280 section 5.3.1 that a leaf can have; certificateHold is not offered, since nothing lifts it.
var reasons = map[string]int{
	"": 0, "keyCompromise": 1, "affiliationChanged": 3, "superseded": 4, "cessationOfOperation": 5, "privilegeWithdrawn": 9,
}

// Reasons returns the names of the reasons, by number.
func Reasons() []string {
	return []string{"keyCompromise", "affiliationChanged", "superseded", "cessationOfOperation", "privilegeWithdrawn"}
}

func reasonName(n int) string {
	for name, x := range reasons {
		if x == n {
			return name
		}
	}
	return fmt.Sprint(n)
}

// Restore implements chancery.v1.Admin.
func (d Desk) Restore(ctx context.Context, q *chanceryv1.RestoreRequest) (*chanceryv1.RestoreResponse, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	id, err := trust.ParseID(q.GetSpiffeId())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if err := d.manager.Restore(context.WithoutCancel(ctx), actor, id); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &chanceryv1.RestoreResponse{}, nil
}

// ListRevocations implements chancery.v1.Admin.
func (d Desk) ListRevocations(ctx context.Context, _ *chanceryv1.ListRevocationsRequest) (*chanceryv1.ListRevocationsResponse, error) {
	if err := d.reading(ctx, "revoke list"); err != nil {
		return nil, err
	}
	select {
	case <-d.manager.Looked():
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-time.After(maxWait): // a long log, or a key that does not answer: then what is known has to do
	}
	s := d.manager.State()
	all, have := d.hub.Counts()
	resp := &chanceryv1.ListRevocationsResponse{
		Agents: uint32(all), Acknowledged: uint32(have), MissingLogs: s.MissingLogs, NotEnforcing: d.notEnforcing(),
	}
	if s.Err != nil {
		resp.Delayed = s.Err.Error()
	}
	for i, r := range s.Revocations {
		one := &chanceryv1.Revocation{
			Id: r.ID, Reason: reasonName(r.Reason), Time: timestamppb.New(r.Time), Actor: r.Actor, Count: s.Counts[i],
			Predicate: &chanceryv1.Predicate{Serial: r.Serial, SpiffeId: r.SPIFFEID},
		}
		if r.IssuedBefore != nil {
			one.Predicate.IssuedBefore = timestamppb.New(*r.IssuedBefore)
		}
		if r.Node != "" {
			one.Predicate.Node = r.Cluster + "/" + r.Node
		}
		if r.Restored != nil {
			one.Restored = timestamppb.New(*r.Restored)
		}
		resp.Revocations = append(resp.Revocations, one)
	}
	return resp, nil
}

// ListServed implements chancery.v1.Admin.
func (d Desk) ListServed(ctx context.Context, _ *chanceryv1.ListServedRequest) (*chanceryv1.ListServedResponse, error) {
	if err := d.reading(ctx, "log audit --against agents"); err != nil {
		return nil, err
	}
	all, omitted := d.hub.Served()
	return &chanceryv1.ListServedResponse{Agents: all, Omitted: omitted}, nil
}

// reading notes who looked at something.
func (d Desk) reading(ctx context.Context, what string) error {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return err
	}
	if err := d.config.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: what}); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}
