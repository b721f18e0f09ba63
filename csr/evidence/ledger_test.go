package evidence_test

import (
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/csr/evidence"
)

// TestD1SilenceIsNoAcknowledgement: who was given a certificate is behind until it says otherwise, or the certificate ends; so is who keeps
// no table, and who is gone. It is named when nobody waits for it any more.
func TestD1SilenceIsNoAcknowledgement(t *testing.T) {
	inTown(t, func(w *town) {
		r := w.start("a")
		given, old, gone, blind := r.open(1), r.open(2), r.open(3), r.open(4)
		for i := 1; i <= 3; i++ {
			r.ToAgent(nameOf(i), agentID(i), leaf(i1, 1, time.Hour))
		}
		r.say(old, state(2, 1, i1))
		r.say(gone, state(3, 1, i1))
		r.say(blind, nil)
		gone.Close()
		r.acknowledge(5, trusts)
		sleep(2 * time.Second)
		e := r.expect("at first", 4, 0)
		for who, why := range map[string]string{nameOf(1): "it was given a certificate", nameOf(2): "generation 1", nameOf(3): "silent since", nameOf(4): "does not say who uses"} {
			if !named(e, who, why) {
				t.Errorf("nobody says of %s that %s: %+v", who, why, e.Sample)
			}
		}
		here := 0
		for _, b := range e.Behind {
			if b.Here {
				here++
			}
		}
		if here != 2 || e.Total != 4 {
			t.Errorf("%d of %d are here and say so", here, e.Total)
		}
		m := state(2, 1, i1)
		m.Lagging = []*chanceryv1.LaggingConsumer{{Name: "envoy 17", Generation: 1, Why: "Failed to load trusted CA certificates"}}
		r.say(old, m)
		if sleep(12 * time.Second); !named(r.said(), nameOf(2), "envoy 17: Failed to load trusted CA certificates") {
			t.Errorf("a proxy's own words are lost: %+v", r.said().Sample)
		}
		r.say(given, state(1, 2, i1))
		r.say(old, state(2, 3, i1))
		sleep(12 * time.Second)
		r.expect("two have it", 2, 0)
		sleep(time.Hour)
		e = r.expect("the one that is gone has no certificate any more", 1, 0)
		if !named(e, nameOf(4), "does not say") || r.words.count("does not wait for it any more") != 1 || r.words.count(nameOf(3)) != 1 {
			t.Errorf("left is %+v; logged was %q", e.Sample, r.words.all)
		}
		blind.Close()
		sleep(23 * time.Hour)
		r.expect("nobody knows what it serves", 1, 0)
		sleep(2 * time.Hour)
		r.expect("whatever that is, it has ended", 0, 0)
	})
}

// TestD1WhoCannotReadKin is behind for as long as the bundle has a second trust domain, whatever it says: it passed over that, and would
// refuse certificates of it.
func TestD1WhoCannotReadKin(t *testing.T) {
	inTown(t, func(w *town) {
		var kin atomic.Bool
		r := w.start("a", func(c *evidence.Config) { c.Kin = kin.Load })
		reads, old := r.open(1), r.open(2)
		reads.Reads(evidence.ReadsKin)
		r.say(reads, state(1, 2, i2))
		r.say(old, state(2, 2, i2))
		r.acknowledge(5, trusts)
		sleep(2 * time.Second)
		r.expect("as long as there is no kin", 0, 0)
		kin.Store(true)
		r.acknowledge(6, document.Goal{Generation: 2, Leave: []string{i1}})
		sleep(2 * time.Second)
		if e := r.expect("with kin", 1, 0); !named(e, nameOf(2), "knows no second trust domain") || named(e, nameOf(1), "") {
			t.Errorf("behind is %+v", e.Sample)
		}
		old.Close()
		again := r.open(2) // it was updated
		again.Reads(evidence.ReadsKin | 6)
		r.say(again, state(2, 2, i2))
		sleep(12 * time.Second)
		r.expect("once it can", 0, 0)
		r.say(r.open(3), nil)
		sleep(12 * time.Second)
		if e := r.expect("one without a table", 1, 0); !named(e, nameOf(3), "does not say who uses") {
			t.Errorf("behind is %+v", e.Sample)
		}
		r.acknowledge(7, document.Goal{})
		sleep(12 * time.Second)
		r.expect("where nothing is asked for", 0, 0)
	})
}

// TestD3ClientsCountByTheirNextCall: an answer counts once the call after it comes, or when its certificate ends. A call that comes too soon
// is one for an answer that was lost. Each identity that a node agent asks for counts apart.
func TestD3ClientsCountByTheirNextCall(t *testing.T) {
	inTown(t, func(w *town) {
		r := w.start("a")
		for i := 1; i <= 3; i++ {
			r.ToClient(pod(i), leaf(i1, 1, time.Hour))
		}
		node := evidence.Client{Cluster: "east", Pod: []byte("ztunnel"), Identity: nameOf(7), Caller: nameOf(0), Place: "east/n1"}
		r.ToClient(node, leaf(i1, 1, time.Hour))
		node.Identity = nameOf(8)
		r.ToClient(node, leaf(i1, 1, time.Hour))
		r.acknowledge(5, trusts)
		sleep(2 * time.Second)
		e := r.expect("at first", 5, 0)
		if !named(e, nameOf(8)+" for "+nameOf(0)+" on east/n1", "has not called again since 2000-01-01T00:00:02Z; its certificate ends at 2000-01-01T01:00:02Z") {
			t.Errorf("it says %+v", e.Sample)
		}
		r.ToClient(pod(9), leaf(i1, 2, time.Hour)) // a new one has what it is given, or nothing
		r.ToClient(pod(1), leaf(i1, 2, time.Hour))
		r.ToClient(pod(2), leaf(i1, 2, time.Hour))
		sleep(time.Minute)
		r.expect("two have called once", 5, 0)
		r.ToClient(pod(1), leaf(i1, 2, time.Hour)) // too soon: it may have got nothing
		sleep(30 * time.Minute)
		r.expect("one has called again at once", 5, 0)
		r.ToClient(pod(1), leaf(i1, 2, time.Hour))
		r.ToClient(pod(2), leaf(i1, 2, time.Hour))
		sleep(12 * time.Second)
		r.expect("two have called again", 3, 0)
		sleep(30 * time.Minute)
		if e := r.expect("the others' certificates have ended", 0, 0); e.Total != 2 { // and the new one's
			t.Errorf("%d are known", e.Total)
		}
	})
}

// TestD3LeavesAreReplacedByTheirSuccessor: a client holds an issuer's leaf until the call after the successor's answer; one that shows the
// successor has it, however soon. Callers without a pod are told apart by what they show.
func TestD3LeavesAreReplacedByTheirSuccessor(t *testing.T) {
	inTown(t, func(w *town) {
		r := w.start("a")
		vm := func(shown string) evidence.Client {
			return evidence.Client{Cluster: "vms", Identity: nameOf(5), Caller: nameOf(5), Shown: shown}
		}
		mtls, first, second := pod(2), leaf(i1, 1, time.Hour), leaf(i1, 1, time.Hour)
		r.ToClient(pod(1), leaf(i1, 1, time.Hour))
		r.ToClient(mtls, leaf(i1, 1, time.Hour))
		r.ToClient(vm(""), first)
		r.ToClient(vm(""), second) // another machine with the same name
		r.acknowledge(5, leaves)
		sleep(2 * time.Second)
		r.expect("at first", 4, 0)
		next, own := leaf(i2, 1, time.Hour), leaf(i2, 1, time.Hour)
		r.ToClient(pod(1), leaf(i2, 1, time.Hour))
		r.ToClient(mtls, next)
		r.ToClient(vm(first.Serial), own)
		sleep(12 * time.Second)
		r.expect("three have been answered", 4, 0)
		mtls.Shown = next.Serial
		r.ToClient(mtls, leaf(i2, 1, time.Hour))
		r.ToClient(vm(own.Serial), leaf(i2, 1, time.Hour))
		sleep(12 * time.Second)
		r.expect("two have shown it", 2, 0)
		sleep(20 * time.Minute)
		r.ToClient(pod(1), leaf(i2, 1, time.Hour))
		sleep(12 * time.Second)
		e := r.expect("and one has come again", 1, 0)
		if !e.Behind[0].Until.Equal(second.NotAfter.UTC()) {
			t.Errorf("the other machine counts until %s, and its certificate ends at %s", e.Behind[0].Until, second.NotAfter)
		}
	})
}

// TestLeaveGoalOfAgents: what an agent was given counts until it says that it has it, or has replaced it; it is asked if nothing else makes it
// speak. Answers under way and the server's own certificate count, too.
func TestLeaveGoalOfAgents(t *testing.T) {
	inTown(t, func(w *town) {
		var own atomic.Value
		own.Store(i1)
		r := w.start("a", func(c *evidence.Config) {
			c.Own = func() (string, time.Time) { return own.Load().(string), time.Now().Add(time.Hour) }
		})
		s := r.open(1)
		r.say(s, state(1, 1, i1))
		r.ToAgent(nameOf(1), agentID(1), leaf(i1, 1, time.Hour))
		r.say(s, state(1, 1, i2)) // may have been sent before the answer came
		call := r.Calls(i1, 2)
		evidence.Enter(r.Ledger, func() (int, *evidence.Calls) { return 0, call })
		r.acknowledge(5, leaves)
		sleep(2 * time.Second)
		e := r.expect("at first", 3, 0)
		if !named(e, "being signed", i1) || !named(e, "own certificate", i1) {
			t.Errorf("it says %+v", e.Sample)
		}
		call.Leave()
		own.Store(i2)
		sleep(12 * time.Second)
		r.expect("nothing is under way", 1, 0)
		if sleep(12 * time.Second); r.asked.Load() == 0 || r.asked.Load() > 3 {
			t.Errorf("it was asked %d times", r.asked.Load())
		}
		r.say(s, state(1, 1, i2))
		sleep(12 * time.Second)
		r.expect("it has said so again", 0, 0)
		r.say(s, state(1, 1, i1, i2))
		sleep(12 * time.Second)
		r.expect("it still has one", 1, 0)
	})
}

// TestTwoWithOneTable: a stream that is left behind does not count, but two agents with a copied table both do, and each alone.
func TestTwoWithOneTable(t *testing.T) {
	inTown(t, func(w *town) {
		r := w.start("a")
		before := r.open(1)
		r.say(before, state(1, 1))
		r.acknowledge(5, trusts)
		sleep(time.Millisecond)
		after := r.open(1)
		r.say(after, state(1, 2))
		sleep(2 * time.Second)
		r.expect("the connection may live", 1, 0)
		before.Close()
		sleep(12 * time.Second)
		r.expect("it was the old connection", 0, 0)
		sleep(time.Millisecond)
		copied := r.open(1)
		r.say(copied, state(1, 1))
		r.say(after, state(1, 2))
		copied.Close()
		r.say(after, state(1, 2))
		sleep(12 * time.Second)
		r.expect("the copy is gone, and what it served is not", 1, 0)
		if r.words.count("two agents use one table") != 1 {
			t.Errorf("logged was %q", r.words.all)
		}
		sleep(time.Hour)
		r.expect("it has ended", 0, 0)
		var many []*evidence.Stream
		var err error
		for range 20 {
			s := r.open(1)
			if err = s.Say(state(1, 2)); err != nil {
				break
			}
			many = append(many, s)
		}
		if err == nil || len(many) > 10 || !strings.Contains(err.Error(), "table of its own") {
			t.Errorf("%d streams are one agent: %v", len(many), err)
		}
		stranger := r.Open(nameOf(2), "", "") // knows the ID, and is somebody else
		r.say(stranger, state(1, 0))
		sleep(12 * time.Second)
		if e := r.expect("a stranger speaks for itself", 1, 0); !named(e, nameOf(2), "generation 0") {
			t.Errorf("it says %+v", e.Sample)
		}
	})
}

// TestD2ConsumersBeyondTheBound: who does not fit is waited for without a name, until the certificate ends.
func TestD2ConsumersBeyondTheBound(t *testing.T) {
	inTown(t, func(w *town) {
		r := w.start("a")
		last := time.Time{}
		for i := range 40_100 {
			x := leaf(i1, 1, time.Minute+time.Duration(i)*time.Millisecond)
			r.ToClient(pod(i), x)
			last = x.NotAfter
		}
		r.acknowledge(5, trusts)
		sleep(2 * time.Second)
		e := r.expect("at first", board.MaxBehind, 0)
		if !e.Lost.Equal(last.UTC()) || e.Total != 40_000 || len(e.Sample) != board.MaxSample {
			t.Errorf("lost until %s, want %s; %d known, %d named", e.Lost, last, e.Total, len(e.Sample))
		}
		sleep(2 * time.Minute)
		if e = r.expect("all have ended", 0, 0); !e.Lost.IsZero() || e.Total != 0 {
			t.Errorf("lost until %s, %d known", e.Lost, e.Total)
		}
	})
}

// TestBoundsOfWhatAgentsSay: what is not as the API says is refused, in words that name the field.
func TestBoundsOfWhatAgentsSay(t *testing.T) {
	now := time.Now()
	many := func(n int) []*chanceryv1.HeldIssuer {
		out := make([]*chanceryv1.HeldIssuer, n)
		for i := range out {
			out[i] = &chanceryv1.HeldIssuer{Issuer: []byte{1}, Until: timestamppb.New(now)}
		}
		return out
	}
	for name, c := range map[string]struct {
		change func(*chanceryv1.ConsumersState)
		want   string
	}{
		"no ID":        {func(m *chanceryv1.ConsumersState) { m.Agent = nil }, "ID has 0 bytes"},
		"long ID":      {func(m *chanceryv1.ConsumersState) { m.Agent = make([]byte, 17) }, "ID has 17 bytes"},
		"for ever":     {func(m *chanceryv1.ConsumersState) { m.Until = timestamppb.New(now.AddDate(1, 0, 0)) }, "no SVID of this server ends"},
		"no time":      {func(m *chanceryv1.ConsumersState) { m.Until = &timestamppb.Timestamp{Nanos: -1} }, "no SVID of this server ends"},
		"many issuers": {func(m *chanceryv1.ConsumersState) { m.Held = many(33) }, "33 issuers"},
		"no issuer":    {func(m *chanceryv1.ConsumersState) { m.Held = many(1); m.Held[0].Issuer = nil }, "0 bytes"},
		"long issuer":  {func(m *chanceryv1.ConsumersState) { m.Held = many(1); m.Held[0].Issuer = make([]byte, 65) }, "65 bytes"},
		"issuer's end": {func(m *chanceryv1.ConsumersState) { m.Held = many(1); m.Held[0].Until = nil }, "issuer 01"},
		"issuer for ever": {func(m *chanceryv1.ConsumersState) {
			m.Held = many(1)
			m.Held[0].Until = timestamppb.New(now.AddDate(1, 0, 0))
		}, "issuer 01"},
		"many lag": {func(m *chanceryv1.ConsumersState) { m.Lagging = make([]*chanceryv1.LaggingConsumer, 6) }, "6 are named"},
		"long name": {func(m *chanceryv1.ConsumersState) {
			m.Lagging = []*chanceryv1.LaggingConsumer{{Name: strings.Repeat("x", 201)}}
		}, "201 and 0"},
		"long words": {func(m *chanceryv1.ConsumersState) {
			m.Lagging = []*chanceryv1.LaggingConsumer{{Why: strings.Repeat("x", 301)}}
		}, "0 and 301"},
	} {
		m := state(1, 1, i1)
		if err := evidence.Check(m, now); err != nil {
			t.Fatal(err)
		}
		c.change(m)
		if err := evidence.Check(m, now); err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "consumers: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if evidence.Check(nil, now) != nil {
		t.Error("an agent without a table is refused")
	}
}

// TestTwentyThousandConsumers: what they cost in memory, and that the sets are made in milliseconds.
func TestTwentyThousandConsumers(t *testing.T) {
	inUse := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	const n = 20_000
	before := inUse()
	b := board.Open(board.Config{Replica: "a", Store: must(store.CreateSQLite(t.Context(), filepath.Join(t.TempDir(), "state.db"))), Logger: slog.New(slog.DiscardHandler),
		Domain: td, Sealer: must(keys.CreateSealer(filepath.Join(t.TempDir(), "k")))})
	l := evidence.New(evidence.Config{Board: b})
	streams := make([]*evidence.Stream, 0, n)
	for i := range n {
		s := l.Open(nameOf(i), "node", "192.0.2.1:1")
		if err := s.Say(state(i, 1, i1)); err != nil {
			t.Fatal(err)
		}
		l.ToAgent(nameOf(i), agentID(i), leaf(i1, 1, time.Hour))
		streams = append(streams, s)
	}
	each := (inUse() - before) / n
	t.Logf("%d bytes an agent", each)
	if each > 1000 {
		t.Errorf("an agent takes %d bytes", each)
	}
	for i, goal := range []document.Goal{trusts, leaves} {
		begun := time.Now()
		if err := l.Acknowledge(t.Context(), uint64(i+1), uint64(i+1), goal); err != nil {
			t.Fatal(err)
		}
		t.Logf("%d are behind %+v; found in %s", len(b.Mine().Evidence.Behind), goal, time.Since(begun))
		if len(b.Mine().Evidence.Behind) != n {
			t.Errorf("%d are behind", len(b.Mine().Evidence.Behind))
		}
	}
	runtime.KeepAlive(streams)
}

// TestAnswersUnderWayByAnOlderBundleCount: a call that began before this replica took over the bundle may end long after it has said so in
// its note: its client has old roots then, and nobody knew of it. One that began after waits for nobody.
func TestAnswersUnderWayByAnOlderBundleCount(t *testing.T) {
	inTown(t, func(w *town) {
		r := w.start("a")
		before := evidence.Enter(r.Ledger, func() (*evidence.Calls, *evidence.Calls) { c := r.Calls(i1, 1); return c, c })
		now := evidence.Enter(r.Ledger, func() (*evidence.Calls, *evidence.Calls) { c := r.Calls(i1, 2); return c, c })
		r.acknowledge(5, trusts)
		sleep(2 * time.Second)
		if e := r.expect("an answer with the old roots is under way", 1, 0); !named(e, "being signed", "generation 1") {
			t.Errorf("it says %+v", e.Sample)
		}
		r.ToClient(pod(1), leaf(i1, 1, time.Hour))
		before.Leave()
		sleep(12 * time.Second)
		if e := r.expect("it was given", 1, 0); !named(e, nameOf(1), "has not called") {
			t.Errorf("it says %+v", e.Sample)
		}
		now.Leave()
	})
}

// TestD3TwoNamesOfOneIdentity: who asks for an identity by its very name in each trust domain of a migration may use both certificates: the
// new one's renewal says nothing of the old one, which counts until it ends. Whose domain the plan chooses has one at a time.
func TestD3TwoNamesOfOneIdentity(t *testing.T) {
	inTown(t, func(w *town) {
		r := w.start("a", func(c *evidence.Config) { c.Line = td })
		for i, exact := range []bool{false, true} {
			c := pod(i + 1)
			c.Exact = exact
			moved := c
			moved.Identity = strings.Replace(c.Identity, "cluster.local", "new.example", 1)
			r.ToClient(c, leaf(i1, 1, 4*time.Hour))
			for range 3 {
				r.ToClient(moved, leaf(i2, 1, time.Hour))
				sleep(20 * time.Minute)
			}
		}
		r.acknowledge(5, leaves)
		sleep(12 * time.Second)
		r.expect("the old name's certificate is valid still", 1, 0)
		sleep(4 * time.Hour)
		r.expect("it has ended", 0, 0)
	})
}
