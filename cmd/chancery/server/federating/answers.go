package federating

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/foreign"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/federation"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// Standings of a trust domain.
const (
	Own       = "own"
	Kin       = "kin"    // the other end of a migration
	Former    = "former" // was our own
	Federated = "federated"
)

// ListTrust implements chancery.v1.Admin.
func (d *Desk) ListTrust(ctx context.Context, q *chanceryv1.ListTrustRequest) (*chanceryv1.ListTrustResponse, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	td, err := domainOf(q.GetTrustDomain(), true)
	if err != nil {
		return nil, err
	}
	d.config.Note(actor, "trust list")
	all, err := d.domains(td)
	if err != nil {
		return nil, err
	}
	return &chanceryv1.ListTrustResponse{Domains: all, Time: timestamppb.Now()}, nil
}

// RefreshTrust implements chancery.v1.Admin. How it went is in what it returns of each domain.
func (d *Desk) RefreshTrust(ctx context.Context, q *chanceryv1.RefreshTrustRequest) (*chanceryv1.RefreshTrustResponse, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	td, err := domainOf(q.GetTrustDomain(), true)
	switch {
	case err != nil:
		return nil, err
	case td.IsZero() && len(d.relation) == 0:
		return nil, status.Error(codes.FailedPrecondition, "the config names nobody to federate with (`federation`), so there is nothing to fetch")
	case !td.IsZero() && d.relation[td] == nil:
		return nil, status.Errorf(codes.FailedPrecondition, "there is no relationship with trust domain %s in `federation` of the config, so there is nowhere to fetch its bundle; "+
			"`chancery trust import` takes one from a file", td)
	}
	if err := d.config.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: strings.TrimSpace("trust refresh " + td.String())}); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	_ = d.poller.Refresh(ctx, td) // what failed is said with each
	if err := ctx.Err(); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	all, err := d.domains(td)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(x *chanceryv1.TrustedDomain) bool { return x.GetRelationship().GetUrl() == "" })
	return &chanceryv1.RefreshTrustResponse{Domains: all}, nil
}

// ImportTrust implements chancery.v1.Admin. Who asked goes into the audit log first.
func (d *Desk) ImportTrust(ctx context.Context, q *chanceryv1.ImportTrustRequest) (*chanceryv1.ImportTrustResponse, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	td, err := domainOf(q.GetTrustDomain(), false)
	if err != nil {
		return nil, err
	}
	if q.GetForget() {
		return d.forgetFor(ctx, actor, td, q)
	}
	b, err := spiffebundle.Parse(td, q.GetBundle())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	a := d.config.Authority
	if err := d.refuseOurs(a.Document(), td); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	if err := d.allRead(ctx); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	detail := "trust import: " + describe(b)
	if q.GetOlder() {
		detail += ", though it may be older than the one before"
	}
	if err := d.config.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: detail}); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	resp := new(chanceryv1.ImportTrustResponse)
	err = a.Change(ctx, func(next *document.Document) (err error) {
		if err := d.refuses(next, td); err != nil {
			return err
		}
		if next.Foreign, resp.Changed, err = foreign.Take(next.Foreign, b, actor, q.GetOlder(), time.Now()); err == nil && !resp.Changed {
			err = replica.ErrUnchanged
		}
		return err
	})
	if err != nil {
		return nil, refusal(err)
	}
	return resp, nil
}

func (d *Desk) forgetFor(ctx context.Context, actor string, td trust.Domain, q *chanceryv1.ImportTrustRequest) (*chanceryv1.ImportTrustResponse, error) {
	r := d.relation[td]
	switch {
	case len(q.GetBundle()) > 0 || q.GetOlder():
		return nil, status.Error(codes.InvalidArgument, "to forget a trust domain no bundle is given, and no older")
	case r != nil:
		return nil, status.Errorf(codes.FailedPrecondition, "the config federates with %s (%s), so its bundle would be fetched again; take it out of `federation` on each server and restart them", td, r.URL)
	case d.config.Authority.Document().Foreign[td.String()] == nil:
		return nil, status.Errorf(codes.FailedPrecondition, "there is no bundle of a foreign trust domain %s; `chancery trust list` shows those that there are", td)
	}
	err := d.forget(ctx, td, actor, "trust forget "+td.String(), d.config.Authority.Change, func(*foreign.Domain) bool { return true })
	if err != nil {
		return nil, refusal(err)
	}
	return &chanceryv1.ImportTrustResponse{Changed: true}, nil
}

// refusal passes on why something was not done.
func refusal(err error) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.Unavailable, "it was not done in time, and whether it will be is not known: look with `chancery trust list`: "+err.Error())
	case errors.Is(err, context.Canceled):
		return status.FromContextError(err).Err()
	}
	return status.Error(codes.FailedPrecondition, err.Error())
}

func domainOf(name string, maybe bool) (trust.Domain, error) {
	if name == "" && maybe {
		return trust.Domain{}, nil
	}
	td, err := trust.ParseDomain(name)
	if err != nil {
		return td, status.Error(codes.InvalidArgument, err.Error())
	}
	return td, nil
}

// domains describes the trust domains that there are roots of, or shall be: our own first, then its kin, then foreign ones by name. One that
// is asked for must be among them.
func (d *Desk) domains(only trust.Domain) ([]*chanceryv1.TrustedDomain, error) {
	k := d.known()
	if k.ownErr != nil {
		return nil, status.Error(codes.Internal, k.ownErr.Error())
	}
	all, err := d.ours(k)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	relations := map[trust.Domain]federation.Status{}
	for _, s := range d.poller.Status() {
		relations[s.Relationship.Domain] = s
	}
	names := map[trust.Domain]bool{}
	for td := range k.foreign {
		names[td] = true
	}
	for td := range d.relation {
		names[td] = true
	}
	byName := func(x, y trust.Domain) int { return strings.Compare(x.String(), y.String()) }
	for _, td := range slices.SortedFunc(maps.Keys(names), byName) {
		one := &chanceryv1.TrustedDomain{TrustDomain: td.String(), Standing: Federated}
		if f := k.foreign[td]; f != nil {
			one.Bundle, one.Previous, one.Since = f.stored.Bundle, f.stored.Previous, timestamppb.New(f.stored.Since)
			one.Actor = f.stored.Actor
			if f.bundle != nil {
				one.Sequence = f.bundle.Sequence
			}
		}
		if d.relation[td] != nil {
			one.Relationship = d.relationship(relations[td])
		}
		all = append(all, one)
	}
	if only.IsZero() {
		return all, nil
	}
	i := slices.IndexFunc(all, func(x *chanceryv1.TrustedDomain) bool { return x.TrustDomain == only.String() })
	if i < 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "there are no roots of trust domain %s here; `chancery trust list` shows of which there are", only)
	}
	return all[i : i+1], nil
}

// ours describes the trust domains of this authority.
func (d *Desk) ours(k *known) (all []*chanceryv1.TrustedDomain, err error) {
	var since time.Time // the newest root's: when this set of them began, or later
	for _, s := range k.document.Domains {
		for _, a := range s.Authorities {
			if a.Kind == document.KindRoot && a.Created.After(since) {
				since = a.Created
			}
		}
	}
	for i, b := range append([]*trust.Bundle{k.own}, k.own.Kin()...) {
		one := &chanceryv1.TrustedDomain{TrustDomain: b.Domain().String(), Standing: Kin, Sequence: b.Generation(), Since: timestamppb.New(since)}
		switch {
		case i == 0:
			one.Standing = Own
		case len(b.Roots()) == 0:
			one.Standing = Former
		}
		if one.Bundle, err = spiffebundle.FromTrust(b, d.config.Place.hint).Marshal(); err != nil {
			return nil, fmt.Errorf("bundle of %s: %w", b.Domain(), err)
		}
		all = append(all, one)
	}
	return all, nil
}

func (d *Desk) relationship(s federation.Status) *chanceryv1.Relationship {
	r := &chanceryv1.Relationship{
		Url: s.Relationship.URL, Profile: string(s.Relationship.Profile), EndpointSpiffeId: s.Relationship.EndpointID.String(),
		LastSuccess: stamp(s.LastSuccess), LastTry: stamp(s.LastTry), NextTry: stamp(s.Next), Error: s.Error,
	}
	if hint, ok := d.hint(s.Relationship.Domain); ok && hint > 0 {
		r.RefreshHint = durationpb.New(hint)
	}
	return r
}

// stamp leaves out a time that is not known.
func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// Report is what the server's status says of federation.
func (d *Desk) Report() (all []*chanceryv1.GetStatusResponse_Federated, e *chanceryv1.GetStatusResponse_BundleEndpoint) {
	domains, err := d.domains(trust.Domain{})
	if err != nil {
		return nil, nil // the status says so itself
	}
	k := d.known()
	for _, x := range domains {
		if x.GetStanding() != Federated {
			continue
		}
		one := &chanceryv1.GetStatusResponse_Federated{TrustDomain: x.GetTrustDomain(), Since: x.GetSince(), Relationship: x.GetRelationship()}
		if td, err := trust.ParseDomain(x.GetTrustDomain()); err == nil && k.foreign[td] != nil && k.foreign[td].bundle != nil {
			one.Roots = uint32(len(k.foreign[td].bundle.Roots))
		}
		all = append(all, one)
	}
	if d.config.Place.endpoint == nil {
		return all, nil
	}
	e = &chanceryv1.GetStatusResponse_BundleEndpoint{Listen: d.config.Place.endpoint.Listen}
	if d.listener != nil {
		e.Listen = d.listener.Addr().String()
	}
	if d.pair != nil {
		e.NotAfter = timestamppb.New(d.pair.current.Load().Leaf.NotAfter)
		if err := d.pair.err(); err != nil {
			e.Error = err.Error()
		}
	}
	return all, e
}
