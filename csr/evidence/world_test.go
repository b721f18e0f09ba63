package evidence_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

// Issuers in the tests: the old one and the new.
const (
	i1 = "1111111111111111111111111111111111111111"
	i2 = "2222222222222222222222222222222222222222"
)

var (
	trusts = document.Goal{Generation: 2}
	leaves = document.Goal{Leave: []string{i1}}
)

// shop is a real store that counts, and that can be out of reach.
type shop struct {
	*store.SQLite
	down        atomic.Bool
	puts, reads atomic.Int64
}

func (s *shop) PutNote(ctx context.Context, replica string, data []byte) error {
	s.puts.Add(1)
	if s.down.Load() {
		return errors.New("the store is out of reach")
	}
	return s.SQLite.PutNote(ctx, replica, data)
}

func (s *shop) Notes(ctx context.Context) (map[string][]byte, error) {
	s.reads.Add(1)
	if s.down.Load() {
		return nil, errors.New("the store is out of reach")
	}
	return s.SQLite.Notes(ctx)
}

// words keeps what a ledger logs.
type words struct {
	slog.Handler
	mu  sync.Mutex
	all []string
}

func (w *words) Enabled(context.Context, slog.Level) bool { return true }

func (w *words) Handle(_ context.Context, r slog.Record) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	line := r.Message
	r.Attrs(func(a slog.Attr) bool { line += fmt.Sprintf(" %s=%v", a.Key, a.Value); return true })
	w.all = append(w.all, line)
	return nil
}

func (w *words) count(part string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.all {
		if strings.Contains(l, part) {
			n++
		}
	}
	return n
}

// town is a store with replicas on it.
type town struct {
	t      *testing.T
	shop   *shop
	sealer *keys.Sealer
	wg     sync.WaitGroup
	stops  []func()
}

// inTown runs a test by a clock that jumps.
func inTown(t *testing.T, f func(w *town)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := &town{t: t, sealer: must(keys.CreateSealer(filepath.Join(dir, "k")))}
		w.shop = &shop{SQLite: must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))}
		defer func() {
			for _, stop := range w.stops {
				stop()
			}
			w.wg.Wait()
			w.shop.Close()
		}()
		f(w)
	})
}

// replica is a server as far as it matters here.
type replica struct {
	*evidence.Ledger
	t     *testing.T
	board *board.Board
	words *words
	stop  func() // in order
	kill  func() // without a last note
	asked atomic.Int64
}

func (w *town) start(name string, change ...func(*evidence.Config)) *replica {
	w.t.Helper()
	r := &replica{t: w.t, words: &words{Handler: slog.DiscardHandler}}
	r.board = board.Open(board.Config{Store: w.shop, Sealer: w.sealer, Domain: td, Replica: name, Logger: slog.New(slog.NewTextHandler(w.t.Output(), nil))})
	c := evidence.Config{Board: r.board, Life: time.Hour, MaxLife: 24 * time.Hour, Logger: slog.New(r.words)}
	for _, f := range change {
		f(&c)
	}
	r.Ledger = evidence.New(c)
	r.Ask(func() { r.asked.Add(1) })
	ctx, cancel := context.WithCancel(context.Background())
	var one sync.WaitGroup
	run := func(f func(context.Context) error) {
		one.Add(1)
		w.wg.Go(func() {
			defer one.Done()
			if err := f(ctx); err != nil {
				w.t.Errorf("%s: %v", name, err)
			}
		})
	}
	run(r.board.Run)
	run(r.Run)
	run(func(ctx context.Context) error { return w.shop.Watch(ctx, r.board.Wake) })
	r.stop = sync.OnceFunc(func() { cancel(); one.Wait() })
	r.kill = func() { r.board.Last(func() {}); r.shutOut(w); r.stop(); w.shop.down.Store(false) }
	w.stops = append(w.stops, r.stop)
	r.board.Own(func(n *board.Note) { n.LogID = 1 << 24 })
	sleep(2 * time.Second)
	return r
}

// shutOut keeps the last note from being written.
func (r *replica) shutOut(w *town) { w.shop.down.Store(true) }

// sleep lets time pass.
func sleep(d time.Duration) { time.Sleep(d); synctest.Wait() }

// acknowledge has the replica take over a version of the document.
func (r *replica) acknowledge(version uint64, goal document.Goal) {
	r.t.Helper()
	if err := r.Acknowledge(r.t.Context(), version, version, goal); err != nil {
		r.t.Fatal(err)
	}
}

// said returns the replica's evidence as it lies in the store.
func (r *replica) said() board.Evidence {
	r.t.Helper()
	for _, n := range r.board.All() {
		if n.Replica == r.board.Replica() {
			return n.Evidence
		}
	}
	r.t.Fatalf("%s has written nothing", r.board.Replica())
	return board.Evidence{}
}

// expect holds the sets in the store against how many should be in them.
func (r *replica) expect(when string, behind, settled int) board.Evidence {
	r.t.Helper()
	e := r.said()
	if len(e.Behind) != behind || len(e.Settled) != settled {
		r.t.Errorf("%s: %d behind and %d settled; want %d and %d: %+v", when, len(e.Behind), len(e.Settled), behind, settled, e)
	}
	return e
}

func agentID(n int) []byte { return fmt.Appendf(nil, "agent %010d", n) }

func nameOf(n int) string { return fmt.Sprintf("spiffe://cluster.local/ns/foo/sa/a%d", n) }

// state is what an agent says: the generation, and issuers that are held for an hour.
func state(n int, generation uint64, issuers ...string) *chanceryv1.ConsumersState {
	end := timestamppb.New(time.Now().Add(time.Hour).Truncate(time.Second))
	m := &chanceryv1.ConsumersState{Agent: agentID(n), Generation: generation, Until: end, Consumers: 1}
	for _, i := range issuers {
		m.Held = append(m.Held, &chanceryv1.HeldIssuer{Issuer: unhex(i), Until: end, Consumers: 1})
	}
	return m
}

func unhex(s string) []byte {
	var b []byte
	if _, err := fmt.Sscanf(s, "%x", &b); err != nil {
		panic(err)
	}
	return b
}

// open opens a stream of an agent.
func (r *replica) open(n int) *evidence.Stream {
	return r.Open(nameOf(n), fmt.Sprint("node ", n), fmt.Sprintf("192.0.2.1:%d", n))
}

func (r *replica) say(s *evidence.Stream, m *chanceryv1.ConsumersState) {
	r.t.Helper()
	if err := evidence.Check(m, time.Now()); err != nil {
		r.t.Fatal(err)
	}
	if err := s.Say(m); err != nil {
		r.t.Fatal(err)
	}
}

var serials atomic.Int64

// leaf is a certificate as of now.
func leaf(issuer string, generation uint64, life time.Duration) evidence.Leaf {
	return evidence.Leaf{Issuer: issuer, Generation: generation, Serial: fmt.Sprintf("%040x", serials.Add(1)), NotAfter: time.Now().Add(life).Truncate(time.Second)}
}

func pod(n int) evidence.Client {
	return evidence.Client{Cluster: "east", Pod: fmt.Appendf(nil, "pod %d", n), Identity: nameOf(n), Caller: nameOf(n), Remote: fmt.Sprintf("192.0.2.2:%d", n)}
}

// named reports whether the sample has words for somebody.
func named(e board.Evidence, who, why string) bool {
	return slices.ContainsFunc(e.Sample, func(l board.Laggard) bool { return strings.Contains(l.Name, who) && strings.Contains(l.Why, why) })
}
