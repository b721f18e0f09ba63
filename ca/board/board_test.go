package board

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
)

// shop is a real store that counts, and that can be out of reach.
type shop struct {
	*store.SQLite
	down        atomic.Bool
	puts, reads atomic.Int64
}

var errDown = errors.New("the store is out of reach")

func (s *shop) PutNote(ctx context.Context, replica string, data []byte) error {
	s.puts.Add(1)
	if s.down.Load() {
		return errDown
	}
	return s.SQLite.PutNote(ctx, replica, data)
}

func (s *shop) Notes(ctx context.Context) (map[string][]byte, error) {
	s.reads.Add(1)
	if s.down.Load() {
		return nil, errDown
	}
	return s.SQLite.Notes(ctx)
}

// yard is a store with some boards on it.
type yard struct {
	t      *testing.T
	shop   *shop
	sealer *keys.Sealer
	ctx    context.Context
	wg     sync.WaitGroup
}

// inYard runs a test by a clock that jumps.
func inYard(t *testing.T, f func(y *yard)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		y := &yard{t: t, sealer: must(keys.CreateSealer(filepath.Join(dir, "k")))}
		y.shop = &shop{SQLite: must(store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db")))}
		ctx, cancel := context.WithCancel(t.Context())
		y.ctx = ctx
		f(y)
		cancel()
		y.wg.Wait()
		y.shop.Close()
	})
}

func (y *yard) open(name string) *Board {
	b := Open(Config{Store: y.shop, Sealer: y.sealer, Domain: td, Replica: name, Format: 2, Logger: slog.New(slog.NewTextHandler(y.t.Output(), nil))})
	b.Own(func(*Note) {})
	return b
}

// TestD2NothingIsUnsaidByAStart: until a replica that starts knows what its log has, the note of its last run stands.
func TestD2NothingIsUnsaidByAStart(t *testing.T) {
	inYard(t, func(y *yard) {
		first := y.open("a")
		first.Own(func(n *Note) { n.Revoked = many(3, 1) })
		y.run(first)()
		second, b := Open(first.config), y.open("b")
		y.run(second)
		y.run(b)
		if sleep(5 * time.Minute); second.Write(y.ctx) != nil || len(b.Others()) != 1 || len(b.Others()[0].Revoked) != 3 || len(second.Others()) != 1 {
			t.Errorf("after the start others have %+v", b.Others())
		}
		second.Own(func(n *Note) { n.Resolved = 3 })
		if sleep(2 * time.Second); len(b.Others()[0].Revoked) != 0 || b.Others()[0].Resolved != 3 {
			t.Errorf("once it knows, others have %+v", b.Others())
		}
	})
}

// run starts a board as a server does, woken by the store; stop ends it.
func (y *yard) run(b *Board) (stop func()) {
	ctx, cancel := context.WithCancel(y.ctx)
	var one sync.WaitGroup
	for _, f := range []func(context.Context) error{b.Run, func(ctx context.Context) error { return y.shop.Watch(ctx, b.Wake) }} {
		one.Add(1)
		y.wg.Go(func() {
			defer one.Done()
			if err := f(ctx); err != nil {
				y.t.Error(err)
			}
		})
	}
	return func() { cancel(); one.Wait() }
}

// sleep lets time pass.
func sleep(d time.Duration) { time.Sleep(d); synctest.Wait() }

// TestD13NotesReachAll: what one replica says all others read, soon, and once it has changed once.
func TestD13NotesReachAll(t *testing.T) {
	inYard(t, func(y *yard) {
		boards := []*Board{y.open("a"), y.open("b"), y.open("c")}
		for _, b := range boards {
			y.run(b)
		}
		sleep(2 * time.Second)
		changed := boards[2].Changed()
		boards[0].Own(func(n *Note) {
			n.LogID, n.Resolved, n.Acknowledged, n.Revoked = 5, 8, 9, many(3, 1)
			n.Replica, n.Instance = "z", 1 // not for others to say
		})
		sleep(time.Second)
		select {
		case <-changed:
		default:
			t.Error("nobody was told")
		}
		for _, b := range boards[1:] {
			all := b.Others()
			if len(all) != 2 || all[0].Replica != "a" || all[0].LogID != 5 || all[0].Resolved != 8 || len(all[0].Revoked) != 3 || all[0].Format != 2 {
				t.Errorf("%s has %+v", b.Replica(), all)
			}
			if err := b.Err(); err != nil || len(b.Trouble()) > 0 {
				t.Error(err, b.Trouble())
			}
		}
	})
}

// narrow is a store that takes less of a note than others do.
type narrow struct{ *shop }

func (narrow) NoteRoom() int { return 64 << 10 }

// TestNoteFitsANarrowStore: what a store has no room for is left out and counted, and what is left is written.
func TestNoteFitsANarrowStore(t *testing.T) {
	inYard(t, func(y *yard) {
		a, b := y.open("a"), y.open("b")
		wide, omitted := a.Fit(many(5000, 3))
		if len(wide) != 5000 || omitted != 0 {
			t.Errorf("%d fit into a note of 1 MiB, %d do not", len(wide), omitted)
		}
		a.config.Store, b.config.Store = narrow{y.shop}, narrow{y.shop}
		y.run(a)
		y.run(b)
		fit, omitted := a.Fit(many(5000, 3))
		if len(fit) < 2500 || len(fit)+omitted != 5000 {
			t.Fatalf("%d fit into a note of 64 KiB, %d do not", len(fit), omitted)
		}
		a.Own(func(note *Note) {
			note.Checkpoint, note.Revoked, note.Omitted = strings.Repeat("x", MaxCheckpoint), fit, uint64(omitted)
		})
		sleep(2 * time.Second)
		if lies := must(y.shop.SQLite.Notes(y.ctx))["a"]; len(lies) > 64<<10 || len(lies) < 58<<10 {
			t.Errorf("the note has %d bytes", len(lies))
		}
		if all := b.Others(); len(all) != 1 || len(all[0].Revoked) != len(fit) || all[0].Omitted != uint64(omitted) {
			t.Errorf("others read %d notes", len(all))
		}
	})
}

// TestWritesAreFew: what changes within a second goes into one write, a checkpoint alone waits for longer, and nothing new is
// said once a minute.
func TestWritesAreFew(t *testing.T) {
	inYard(t, func(y *yard) {
		a, b := y.open("a"), y.open("b")
		y.run(a)
		stop := y.run(b)
		sleep(2 * time.Second)
		stop() // its note stays
		count := func(what string, for_ time.Duration, least, most int64, f func(i int)) {
			t.Helper()
			before := y.shop.puts.Load()
			for i := range int(for_ / (100 * time.Millisecond)) {
				f(i)
				sleep(100 * time.Millisecond)
			}
			if n := y.shop.puts.Load() - before; n < least || n > most {
				t.Errorf("%s: %d writes; want %d to %d", what, n, least, most)
			}
		}
		count("revocations", 10*time.Second, 9, 11, func(i int) { a.Own(func(n *Note) { n.Resolved = uint64(i + 1) }) })
		sleep(time.Minute)
		count("checkpoints", 100*time.Second, 9, 11, func(i int) { a.Own(func(n *Note) { n.Checkpoint = strings.Repeat("x", i) }) })
		sleep(time.Minute)
		count("nothing", 10*time.Minute, 9, 12, func(int) {})
		reads := y.shop.reads.Load()
		sleep(10 * time.Minute)
		if n := y.shop.reads.Load() - reads; n > 80 { // by itself, and at each write
			t.Errorf("%d reads in ten quiet minutes", n)
		}
	})
}

// TestStoreOutOfReach: it is tried again, not too often, and all is said once the store is back.
func TestStoreOutOfReach(t *testing.T) {
	inYard(t, func(y *yard) {
		a, b := y.open("a"), y.open("b")
		y.run(a)
		y.run(b)
		sleep(2 * time.Second)
		y.shop.down.Store(true)
		a.Own(func(n *Note) { n.Resolved = 77 })
		before := y.shop.puts.Load() + y.shop.reads.Load()
		for range 600 {
			a.Wake() // also where the store says so all the time
			sleep(time.Second)
		}
		if n := y.shop.puts.Load() + y.shop.reads.Load() - before; n < 40 || n > 250 {
			t.Errorf("%d calls of a store that is away, by two replicas in ten minutes", n)
		}
		if read, err := a.Fresh(); !errors.Is(err, errDown) || time.Since(read) < 9*time.Minute {
			t.Errorf("it says %v, read at %s", err, read)
		}
		if err := a.Write(y.ctx); !errors.Is(err, errDown) {
			t.Errorf("writing: %v", err)
		}
		if len(a.Others()) != 1 || len(b.Others()) != 1 || a.Err() != nil {
			t.Error("what was known is not known any more")
		}
		y.shop.down.Store(false)
		sleep(time.Minute)
		if all := b.Others(); len(all) != 1 || all[0].Resolved != 77 {
			t.Errorf("got %+v", all)
		}
		if _, err := a.Fresh(); err != nil {
			t.Error(err)
		}
	})
}

// TestTwinIsFound: two processes under one name, such as two pods with one config, both find out; one that follows another of its
// own runs is none.
func TestTwinIsFound(t *testing.T) {
	inYard(t, func(y *yard) {
		first := y.open("a")
		stop := y.run(first)
		sleep(5 * time.Second)
		stop()
		second := y.open("a")
		y.run(second)
		sleep(10 * time.Minute)
		if err := second.Err(); err != nil {
			t.Fatalf("a restart: %v", err)
		}
		third := y.open("a")
		stop = y.run(third)
		sleep(2 * Beat)
		for name, b := range map[string]*Board{"second": second, "third": third} {
			if err := b.Err(); err == nil || !strings.Contains(err.Error(), "replica a") || !strings.Contains(err.Error(), "state.replica") {
				t.Errorf("%s: %v", name, err)
			}
		}
		stop()
		sleep(twinTime + Beat)
		if err := second.Err(); err != nil {
			t.Errorf("the twin is gone: %v", err)
		}
	})
}

// TestD2NotesOutliveTheirReplica: neither a replica that ends nor a note that is taken away, spoilt or put back makes what it said
// unsaid.
func TestD2NotesOutliveTheirReplica(t *testing.T) {
	inYard(t, func(y *yard) {
		a, b := y.open("a"), y.open("b")
		stop := y.run(a)
		y.run(b)
		a.Own(func(n *Note) { n.Revoked = many(3, 1) })
		sleep(2 * time.Second)
		old := must(y.shop.SQLite.Notes(y.ctx))["a"]
		a.Own(func(n *Note) { n.Revoked, n.Checkpoint = many(5, 1), "last words" })
		stop() // what was not written yet is, at the end
		sleep(2 * time.Second)
		knows := func(what, trouble string) {
			t.Helper()
			sleep(2 * time.Second)
			if all := b.Others(); len(all) != 1 || len(all[0].Revoked) != 5 || all[0].Checkpoint != "last words" {
				t.Errorf("%s: got %+v", what, all)
			}
			if got := b.Trouble()["a"]; (got != "") != (trouble != "") || !strings.Contains(got, trouble) {
				t.Errorf("%s: it says %q; want %q", what, got, trouble)
			}
		}
		knows("the replica ended", "")
		good := must(y.shop.SQLite.Notes(y.ctx))["a"]
		for _, c := range []struct {
			what, trouble string
			data          []byte
		}{{"put back", "older", old}, {"spoilt", "changed", append([]byte{1}, good...)}, {"another's", "changed", must(y.shop.SQLite.Notes(y.ctx))["b"]}, {"good again", "", good}} {
			if err := y.shop.SQLite.PutNote(y.ctx, "a", c.data); err != nil {
				t.Fatal(err)
			}
			knows(c.what, c.trouble)
		}
		if err := y.shop.DropNote(y.ctx, "a"); err != nil {
			t.Fatal(err)
		}
		knows("taken away", "gone")
		again := y.open("a") // the next run of the same replica
		again.Own(func(n *Note) { n.Resolved = 4 })
		stop = y.run(again)
		sleep(2 * time.Second)
		if all := b.Others(); len(all) != 1 || all[0].Resolved != 4 || len(b.Trouble()) > 0 {
			t.Errorf("got %+v, %v", all, b.Trouble())
		}
		stop()
		b.Keep(func(name string) bool { return name != "a" })
		if all := b.Others(); len(all) != 1 {
			t.Error("its note lies in the store, and it does not know it")
		}
		if err := y.shop.DropNote(y.ctx, "a"); err != nil {
			t.Fatal(err)
		}
		sleep(2 * time.Second)
		b.Keep(func(name string) bool { return name != "a" })
		if all := b.Others(); len(all) != 0 {
			t.Errorf("forgotten, and there is %+v", all)
		}
	})
}

// TestStrangersNotes: names without a good note take no room for longer than they lie there.
func TestStrangersNotes(t *testing.T) {
	inYard(t, func(y *yard) {
		b := y.open("b")
		y.run(b)
		for _, name := range []string{"x", "y"} {
			if err := y.shop.SQLite.PutNote(y.ctx, name, []byte("rubbish")); err != nil {
				t.Fatal(err)
			}
		}
		sleep(2 * time.Second)
		if len(b.Others()) != 0 || len(b.Trouble()) != 2 {
			t.Errorf("%v, %v", b.Others(), b.Trouble())
		}
		for _, name := range []string{"x", "y"} {
			if err := y.shop.DropNote(y.ctx, name); err != nil {
				t.Fatal(err)
			}
		}
		sleep(2 * time.Second)
		if len(b.Trouble()) != 0 {
			t.Error(b.Trouble())
		}
	})
}

// TestD2NotesThatAreLostArePutBack, by their own replica or by who has read them, while the document lists it: a replica that starts
// then knows what was revoked.
func TestD2NotesThatAreLostArePutBack(t *testing.T) {
	inYard(t, func(y *yard) {
		a, b := y.open("a"), y.open("b")
		a.Own(func(n *Note) { n.Revoked = many(3, 1) })
		stop := y.run(a)
		y.run(b)
		b.Keep(func(name string) bool { return name == "a" || name == "b" })
		sleep(2 * time.Second)
		lose := func(what, name string) {
			t.Helper()
			before := must(y.shop.Notes(y.ctx))[name]
			for _, spoil := range []func() error{
				func() error { return y.shop.DropNote(y.ctx, name) },
				func() error { return y.shop.PutNote(y.ctx, name, before[:len(before)-1]) },
			} {
				if err := spoil(); err != nil {
					t.Fatal(err)
				}
				sleep(5 * time.Second)
				now := must(y.shop.Notes(y.ctx))[name]
				if n, err := decode(now, y.sealer, td, name); err != nil || len(n.Revoked) != 3 {
					t.Errorf("%s: %v, %+v", what, err, n)
				}
				if what == "its replica is gone" {
					break // one that is spoilt may be a newer binary's
				}
			}
			if a.Err() != nil || b.Err() != nil {
				t.Error(a.Err(), b.Err())
			}
		}
		lose("its replica lives", "a")
		stop()
		lose("its replica is gone", "a")
	})
}

// TestD2AnotherLogUnderTheSameName: a replica that lost its disk and was forgotten comes back under its name, with another log; what was
// revoked in the first one stays so.
func TestD2AnotherLogUnderTheSameName(t *testing.T) {
	inYard(t, func(y *yard) {
		first := y.open("a")
		first.Own(func(n *Note) { n.LogID, n.Revoked = 20_000_000, many(3, 1) })
		stop := y.run(first)
		sleep(2 * time.Second)
		stop()
		second, b := y.open("a"), y.open("b")
		second.Own(func(n *Note) { n.LogID = 20_000_001 })
		y.run(second)
		y.run(b)
		sleep(2 * time.Second)
		all := b.Others()
		if len(all) != 2 || all[0].LogID != 20_000_001 || len(all[0].Revoked) != 0 || all[1].Replica != HeirName("a", 20_000_000) || all[1].LogID != 20_000_000 || len(all[1].Revoked) != 3 {
			t.Errorf("got %+v", all)
		}
		old := Note{Replica: "a.20000002", LogID: 20_000_002, Seen: time.Now().Add(-ca.LeafTTLLimit - 2*time.Hour), Revoked: many(1, 1)}
		former := Note{Replica: "former", LogID: 20_000_001, Seen: old.Seen} // a's name before it got another one
		for _, n := range []Note{old, former} {
			if err := y.shop.PutNote(y.ctx, n.Replica, must(n.encode(y.sealer, td))); err != nil {
				t.Fatal(err)
			}
		}
		b.Keep(func(name string) bool { return name == "a" || name == "b" })
		sleep(time.Minute)
		if have := must(y.shop.Notes(y.ctx)); len(have) != 3 || have[old.Replica] != nil || have["former"] != nil {
			t.Errorf("%d notes; those of which all has ended should go, and no others", len(have))
		}
		if n := len(HeirName(strings.Repeat("x", store.MaxName), 20_000_000)); n != store.MaxName {
			t.Errorf("a name of %d bytes", n)
		}
	})
}
