package naming

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/document"
	api "github.com/chancery-project/chancery/ca/kube"
	"github.com/chancery-project/chancery/rotate/staged"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/naming"
	"github.com/chancery-project/chancery/trust/naming/kube"
	"github.com/chancery-project/chancery/trust/naming/names"
)

// Env is what a Desk needs of its server.
type Env struct {
	Document func() *document.Document // the newest one
	Domain   trust.Domain
	Aliases  []trust.Domain // trust domains that count as ours, by the config
	ActorOf  func(context.Context) (string, error)
	Note     func(actor, detail string)
	Logger   *slog.Logger
	Metrics  prometheus.Registerer
}

// Desk keeps naming up to date and answers who may serve what. Nil where the config has no naming.
type Desk struct {
	env     Env
	engine  *naming.Engine
	readers []reader
	changed func(services ...string)
	counted prometheus.Counter
	word    atomic.Pointer[word]
}

type reader struct {
	name    string
	cluster *naming.Cluster
	*kube.Reader
}

// Open makes a desk. It asks no API server anything before Run.
func (p *Place) Open(env Env) (*Desk, error) {
	if p == nil {
		return nil, nil
	}
	d := &Desk{env: env, changed: func(...string) {}, counted: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "chancery_naming_changes_total", Help: "Changes of who may serve a service.",
	})}
	d.bring()
	c := naming.Config{
		Naming: trust.NewNaming(), Rules: p.rules, RootNamespace: p.root, ClusterDomain: p.clusterDomain, Aliases: d.aliases, Revoked: d.revoked,
		Changed: func(services []string) {
			d.counted.Add(float64(len(services)))
			d.changed(services...)
		},
	}
	for _, one := range p.clusters {
		c.Clusters = append(c.Clusters, naming.ClusterConfig{Name: one.name, Domain: one.domain})
	}
	var err error
	if d.engine, err = naming.New(c); err != nil {
		return nil, fmt.Errorf("naming: %w", err)
	}
	for i, one := range p.clusters {
		cfg, client, err := api.Client(one.kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("naming.clusters[%d]: %w", i, err)
		}
		r, err := kube.New(kube.Config{REST: cfg, HTTP: client, Cluster: d.engine.Cluster(one.name), Logger: env.Logger.With("cluster", one.name)})
		if err != nil {
			return nil, fmt.Errorf("naming.clusters[%d]: %w", i, err)
		}
		d.readers = append(d.readers, reader{one.name, d.engine.Cluster(one.name), r})
	}
	d.register()
	return d, nil
}

// OnChange is told which services' lists have changed; without names, that all is known from now on. It is set before Run.
func (d *Desk) OnChange(f func(services ...string)) {
	if d != nil {
		d.changed = f
	}
}

// Source says who may serve a service, for agents; nil where the config has no naming.
func (d *Desk) Source() func(service string) (ids []string, known bool) {
	if d == nil {
		return nil
	}
	return func(service string) ([]string, bool) {
		list, standing := d.engine.Naming().Lookup(service)
		ids := make([]string, 0, len(list))
		for _, id := range list {
			ids = append(ids, id.String())
		}
		return ids, standing == trust.NamingKnown
	}
}

// Run keeps naming up to date until ctx ends.
func (d *Desk) Run(ctx context.Context) error {
	if d == nil {
		return nil
	}
	if _, standing := d.engine.Naming().Lookup(""); standing != trust.NamingUnread {
		d.changed() // rules alone are known from the start
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.engine.Run(ctx) })
	g.Go(func() error { return d.follow(ctx) })
	for _, r := range d.readers {
		g.Go(func() error { return r.Run(ctx) })
	}
	return g.Wait()
}

// lookEvery is how soon naming follows the authority document.
const lookEvery = time.Second

// follow looks for what changes aliases and revocations: a new version of the document.
func (d *Desk) follow(ctx context.Context) error {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	var seen uint64
	for {
		if v := d.env.Document().Version; v != seen {
			seen = v
			if d.bring() { // each list is made anew: not for versions that say nothing of this
				d.engine.Refresh()
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// word is what one version of the document says.
type word struct {
	aliases trust.Aliases
	tainted bool              // an authority of ours is,
	before  time.Time         // or all that was issued before some time is revoked, until then,
	revoked map[trust.ID]bool // or these identities are
}

// bring takes a new version of the document: which trust domains count as ours (its own, with its kin, and those of the config), and who has no
// grace. It reports whether that is something else than before.
func (d *Desk) bring() (news bool) {
	doc := d.env.Document()
	others := slices.Clone(d.env.Aliases)
	if b, err := doc.Bundle(d.env.Domain); err == nil {
		others = append(others, b.Domain())
		for _, k := range b.Kin() {
			others = append(others, k.Domain())
		}
	}
	w := &word{revoked: map[trust.ID]bool{}}
	var err error
	if w.aliases, err = trust.NewAliases(d.env.Domain, others...); err != nil {
		d.env.Logger.Error("naming goes by the trust domain of the config alone", "reason", err.Error())
		w.aliases, _ = trust.NewAliases(d.env.Domain)
	}
	if state := doc.Of(d.env.Domain); state != nil {
		w.tainted = slices.ContainsFunc(state.Authorities, func(a document.Authority) bool { return a.Tainted != nil })
		for i := range state.Revocations {
			w.take(&state.Revocations[i])
		}
	}
	was := d.word.Swap(w)
	return was == nil || !was.equal(w)
}

func (w *word) equal(o *word) bool {
	return w.tainted == o.tainted && w.before.Equal(o.before) && maps.Equal(w.revoked, o.revoked) && slices.Equal(w.aliases.All(), o.aliases.All())
}

// forever is when a revocation without an end ends.
var forever = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// take takes a revocation. One of a certificate or a node says nothing of an identity.
func (w *word) take(r *document.Revocation) {
	switch {
	case r.SPIFFEID != "" && r.Restored == nil:
		if id, err := trust.ParseID(r.SPIFFEID); err == nil {
			for _, other := range w.aliases.Equivalent(id) {
				w.revoked[other] = true
			}
		}
	case r.SPIFFEID == "" && r.IssuedBefore != nil && r.Node == "":
		until := forever
		if r.Until != nil {
			until = *r.Until
		}
		if until.After(w.before) {
			w.before = until
		}
	}
}

func (d *Desk) aliases(id trust.ID) []trust.ID { return d.word.Load().aliases.Equivalent(id) }

// revoked reports whether an identity has no grace (decision D25): an authority of ours is tainted, so that anybody might be it; or it, or all that
// was issued before some time, is revoked.
func (d *Desk) revoked(id trust.ID) bool {
	w := d.word.Load()
	return w.aliases.Has(id.Domain()) && (w.tainted || w.revoked[id] || time.Now().Before(w.before))
}

// maxFormer bounds what is said of those who name a former trust domain.
const maxFormer = 20

// Former returns who names identities of a trust domain in so many words, for a migration that leaves it. Accounts follow by themselves.
func (d *Desk) Former(from trust.Domain) (uses []staged.Use) {
	if d == nil {
		return nil
	}
	objects, ids, all := d.engine.Saying(from, maxFormer)
	for i, o := range objects {
		uses = append(uses, staged.Use{Kind: "names", Who: o, Detail: ids[i].String()})
	}
	if all > len(uses) {
		uses = append(uses, staged.Use{Kind: "names", Who: "objects and rules of secure naming", Detail: "in all", Count: uint64(all)})
	}
	return uses
}

// troubling is how long something cannot be read before that is trouble: an API server that starts anew is none.
const troubling = time.Minute

// Trouble says what cannot be read for long, for people, and whether nothing is said of any service for that; empty if nothing is wrong.
func (d *Desk) Trouble() (trouble string, unread bool) {
	if d == nil {
		return "", false
	}
	_, standing := d.engine.Naming().Lookup("")
	if unread = standing == trust.NamingUnread; unread {
		return strings.Join(d.trouble(0), "; "), true
	}
	return strings.Join(d.trouble(troubling), "; "), false
}

// trouble says what cannot be read now, and could not for so long, and what has not been read yet.
func (d *Desk) trouble(long time.Duration) (all []string) {
	for _, r := range d.readers {
		trouble := r.Trouble(long)
		for _, t := range trouble {
			all = append(all, "cluster "+r.name+": "+t)
		}
		if unread := r.cluster.Unread(); len(unread) > 0 && len(trouble) == 0 {
			all = append(all, fmt.Sprintf("cluster %s: not read yet: %v", r.name, unread))
		}
	}
	return all
}

func (d *Desk) register() {
	gauge := func(name, help string, labels prometheus.Labels, value func() float64) {
		d.env.Metrics.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, value))
	}
	d.env.Metrics.MustRegister(d.counted)
	gauge("chancery_naming_services", "Services of which it is known who may serve them.", nil, func() float64 {
		n, _ := d.engine.Size()
		return float64(n)
	})
	gauge("chancery_naming_leaving", "Identities that may still serve a service though nothing names them any more.", nil, func() float64 {
		_, n := d.engine.Size()
		return float64(n)
	})
	for _, r := range d.readers {
		labels := prometheus.Labels{"cluster": r.name}
		gauge("chancery_naming_cluster_unread", "Kinds of objects of the cluster that have never been read: while there are any, nothing is said of any service.", labels, func() float64 {
			return float64(len(r.cluster.Unread()))
		})
		gauge("chancery_naming_cluster_failing", "Kinds of objects of the cluster that cannot be read now: what was last read of them counts.", labels, func() float64 {
			return float64(len(r.Trouble(0)))
		})
	}
}

// maxShown bounds the services of an answer.
const maxShown = 1000

// ShowNaming implements chancery.v1.Admin.
func (d *Desk) ShowNaming(ctx context.Context, q *chanceryv1.ShowNamingRequest) (*chanceryv1.ShowNamingResponse, error) {
	if d == nil {
		return nil, status.Error(codes.FailedPrecondition, "this server knows of no services: its config has no `naming`")
	}
	actor, err := d.env.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	service := q.GetService()
	if service != "" {
		if err := names.Check(service); err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
	}
	d.env.Note(actor, "naming show")
	resp := &chanceryv1.ShowNamingResponse{Trouble: d.trouble(0)}
	if _, standing := d.engine.Naming().Lookup(service); standing == trust.NamingUnread {
		return nil, status.Error(codes.FailedPrecondition, "who may serve what is not known yet: each cluster has to be read once first; "+strings.Join(resp.Trouble, "; "))
	}
	if service != "" {
		resp.Services = []*chanceryv1.NamedService{explain(d.engine.Why(service))}
		return resp, nil
	}
	all := d.engine.Naming().Services()
	if n := len(all); n > maxShown {
		all, resp.Omitted = all[:maxShown], uint64(n-maxShown)
	}
	for _, name := range all {
		one := &chanceryv1.NamedService{Service: name}
		for _, id := range d.engine.Naming().Allowed(name) {
			one.Identities = append(one.Identities, &chanceryv1.NamedIdentity{SpiffeId: id.String()})
		}
		resp.Services = append(resp.Services, one)
	}
	return resp, nil
}

func explain(w naming.Explanation) *chanceryv1.NamedService {
	out := &chanceryv1.NamedService{Service: w.Service, Unknown: w.Standing != trust.NamingKnown, Problems: w.Problems}
	for _, r := range w.Identities {
		one := &chanceryv1.NamedIdentity{SpiffeId: r.ID.String(), Because: r.Because, More: uint64(r.More)}
		if !r.Until.IsZero() {
			one.Until = timestamppb.New(r.Until)
		}
		out.Identities = append(out.Identities, one)
	}
	return out
}
