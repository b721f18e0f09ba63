// Package replicas owns what a server says of the servers on its store, itself included: those that the authority document lists,
// and what they told of themselves.
//
// It refuses to pass silence for health: what a server told, and when, is said apart from what the document lists.
package replicas

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/cmd/chancery/server/stores"
)

// Config is what a Desk is made of.
type Config struct {
	Place     *stores.Place
	Authority *authority.Keeper
	Board     *board.Board
	Log       *audit.Log
	ActorOf   func(context.Context) (string, error) // who calls, or a refusal
	Metrics   prometheus.Registerer                 // nil: none
}

// Desk answers.
type Desk struct {
	config Config

	mu      sync.Mutex // guards both
	version uint64     // of the document when it was looked at last
	changed time.Time  // when it became that
}

// Open makes a desk.
func Open(c Config) *Desk {
	d := &Desk{config: c}
	if c.Metrics != nil {
		c.Metrics.MustRegister(metrics{d.Status, c.Authority.Document})
	}
	return d
}

// lookEvery is how exactly it is known when the document changed; it is judged in minutes.
const lookEvery = 5 * time.Second

// Run looks after the document's changes until ctx ends.
func (d *Desk) Run(ctx context.Context) error {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		d.note(d.config.Authority.Document().Version)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (d *Desk) note(version uint64) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.version != version {
		d.version, d.changed = version, time.Now()
	}
	return d.changed
}

// List implements chancery.v1.Admin. Who asked goes into the audit log first.
func (d *Desk) List(ctx context.Context, _ *chanceryv1.ListReplicasRequest) (*chanceryv1.ListReplicasResponse, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := d.config.Log.Append(audit.Record{Event: audit.Admin, Actor: actor, Detail: "replica list"}); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return &chanceryv1.ListReplicasResponse{Replicas: d.list(), Version: d.config.Authority.Document().Version}, nil
}

func (d *Desk) list() []*chanceryv1.Replica {
	return List(d.config.Authority.Document(), d.config.Place.Replica(), d.notes(), d.config.Board.Trouble())
}

// notes returns what all told, this server included.
func (d *Desk) notes() []board.Note {
	return append(slices.Clip(d.config.Board.Others()), d.config.Board.Mine()) // the list is of all who ask
}

// Forget implements chancery.v1.Admin. Who asked goes into the audit log.
func (d *Desk) Forget(ctx context.Context, q *chanceryv1.ForgetReplicaRequest) (*chanceryv1.ForgetReplicaResponse, error) {
	actor, err := d.config.ActorOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := d.config.Authority.Forget(ctx, actor, q.GetName()); err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return new(chanceryv1.ForgetReplicaResponse), nil
}

// Status says how the server stands to its store, without waiting for anything.
func (d *Desk) Status() *chanceryv1.GetStatusResponse_Store {
	doc, c := d.config.Authority.Document(), d.config
	confirmed, why := c.Authority.Fresh()
	out := &chanceryv1.GetStatusResponse_Store{
		Kind: c.Place.Kind(), Place: c.Place.String(), Replica: c.Place.Replica(), Changed: timestamppb.New(d.note(doc.Version)), Replicas: d.list(),
	}
	if !confirmed.IsZero() {
		out.Confirmed = timestamppb.New(confirmed)
	}
	if why != nil {
		out.Error = why.Error()
	}
	if doc.Driver != nil {
		out.Driver = doc.Driver.Replica
	}
	if doc.Imported != nil {
		out.Imported, out.ImportedBy = timestamppb.New(doc.Imported.Time), doc.Imported.Actor
	}
	return out
}

// List returns the replicas that a document lists, by name, with what they told of themselves. Own is the name of who asks.
func List(doc *authority.Document, own string, notes []board.Note, trouble map[string]string) []*chanceryv1.Replica {
	var all []*chanceryv1.Replica
	for _, l := range doc.Logs {
		r := &chanceryv1.Replica{Name: l.Replica, LogId: l.ID, LogKey: l.Key, LogSize: -1}
		if l.DeclaredDead != nil {
			r.DeclaredDead = timestamppb.New(*l.DeclaredDead)
		} else {
			r.Own, r.Drives, r.Trouble = l.Replica == own, doc.Driver != nil && doc.Driver.Replica == l.Replica, trouble[l.Replica]
		}
		for i := range notes { // the log says whose a note is: names change, and the last note of a lost log lies elsewhere
			if n := &notes[i]; n.LogID == l.ID && (r.Seen == nil || n.Seen.After(r.Seen.AsTime())) {
				tell(r, n)
			}
		}
		all = append(all, r)
	}
	slices.SortStableFunc(all, func(a, b *chanceryv1.Replica) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.LogId, b.LogId))
	})
	return all
}

// tell adds what a replica told.
func tell(r *chanceryv1.Replica, n *board.Note) {
	r.Acknowledged, r.Format = n.Acknowledged, uint32(n.Format)
	if !n.Seen.IsZero() {
		r.Seen = timestamppb.New(n.Seen)
	}
	if n.Checkpoint == "" || r.LogKey == "" {
		return
	}
	if c, err := issuelog.ParseCheckpoint([]byte(n.Checkpoint), r.LogKey); err == nil {
		r.LogSize = c.Size
	}
}
