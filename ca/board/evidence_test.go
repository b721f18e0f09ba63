package board

import (
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
)

// TestD2TenThousandConsumersInANote: what they need, and that as many as a note may have fit beside a log's worth of revoked certificates, or are
// waited for without a name.
func TestD2TenThousandConsumersInANote(t *testing.T) {
	s := newSealer(t)
	n := Note{Replica: "a", Seen: time.Now()}
	empty := len(must(n.encode(s, td)))
	n.Evidence.Behind = behindOf(10_000)
	size := len(must(n.encode(s, td))) - empty
	t.Logf("10,000 consumers: %d bytes", size)
	if size < 80_000 || size > 120_000 {
		t.Errorf("10,000 consumers need %d bytes", size)
	}
	last := time.Time{}
	full := Evidence{Goal: document.Goal{Generation: 9}, Behind: behindOf(MaxBehind), Settled: settledOf(MaxBehind), Lost: time.Unix(1_700_000_000, 0).UTC()}
	for i := range MaxSample {
		full.Sample = append(full.Sample, Laggard{uint64(i), strings.Repeat("n", MaxName), strings.Repeat("w", MaxWhy)})
	}
	for _, b := range full.Behind {
		if b.Until.After(last) {
			last = b.Until
		}
	}
	for _, room := range []int{1 << 20, 200_000, 100_000, 20_000, 500, 0} {
		e := full.trim(room)
		b := must(e.append(nil))
		if len(b) > max(room, 100) {
			t.Errorf("room for %d: %d bytes", room, len(b))
		}
		whole := len(e.Behind) == MaxBehind
		if whole != (room == 1<<20) || whole != e.Lost.Equal(full.Lost) || !whole && e.Lost.Before(full.Behind[MaxBehind-1].Until) || room == 0 && !e.Lost.Equal(last) {
			t.Errorf("room for %d: %d behind, until %s", room, len(e.Behind), e.Lost)
		}
		if room == 200_000 && (len(e.Behind) < 10_000 || len(e.Settled) > 0 || len(e.Sample) > 0) {
			t.Errorf("room for %d: %d behind, %d settled", room, len(e.Behind), len(e.Settled))
		}
		if room == 0 && len(b) > 60 {
			t.Errorf("evidence of nobody has %d bytes", len(b))
		}
	}
}

// TestD2EvidenceOutlivesItsProcess: what a process said stands until the next one knows more; the note as it was written is what
// gates go by.
func TestD2EvidenceOutlivesItsProcess(t *testing.T) {
	inYard(t, func(y *yard) {
		first, b := Open(y.open("a").config), y.open("b")
		y.run(b)
		ahead := time.Now().Add(time.Hour).Truncate(time.Second).UTC()
		said := Evidence{Goal: document.Goal{Generation: 4}, Behind: behindOf(3), Ahead: ahead}
		stop := y.run(first)
		sleep(time.Second)
		if n, known := first.Former(); n != nil || !known || first.Announced() != 0 || len(first.All()) != 1 {
			t.Errorf("at first: %v, %v, %d, %v", n, known, first.Announced(), first.All())
		}
		first.Own(func(n *Note) { n.Acknowledged, n.Evidence = 7, said })
		sleep(2 * time.Second)
		if all := first.All(); first.Announced() != ahead.Unix() || len(all) != 2 || len(all[1].Evidence.Behind) != 3 || all[1].Replica != "a" {
			t.Errorf("announced is %d, and all are %+v", first.Announced(), all)
		}
		ahead = ahead.Add(-time.Minute)
		first.Last(func() { first.Own(func(n *Note) { n.Evidence.Ahead = ahead }) })
		stop()
		sleep(time.Second)
		if e := b.Others()[0].Evidence; !e.Ahead.Equal(ahead) || !e.Stragglers(said.Goal).IsZero() || !e.Stragglers(document.Goal{Generation: 5}).Equal(ahead) {
			t.Errorf("once it has ended: %+v", e)
		}
		second := Open(first.config)
		stop = y.run(second)
		sleep(time.Second)
		if n, known := second.Former(); !known || n == nil || len(n.Evidence.Behind) != 3 {
			t.Errorf("the second process finds %+v", n)
		}
		second.Own(func(n *Note) { n.LogID = 5 }) // knows nothing of consumers yet
		sleep(2 * time.Second)
		if n := b.Others()[0]; n.Acknowledged != 0 || len(n.Evidence.Behind) != 3 || !n.Evidence.Ahead.Equal(ahead) || !n.Evidence.Goal.Equal(said.Goal) {
			t.Errorf("the second process says %+v", n)
		}
		stop()
		third := y.open("a") // speaks at once, before it has read anything
		if err := third.Write(y.ctx); err != nil {
			t.Fatal(err)
		}
		if n, known := third.Former(); !known || n == nil || !third.Mine().Evidence.Ahead.Equal(ahead) {
			t.Errorf("the third process finds %v and says %+v", n, third.Mine())
		}
	})
}

// TestEvidenceIsWrittenSeldom: each 10 s at most, unless it is urgent; what is announced goes with the next write.
func TestEvidenceIsWrittenSeldom(t *testing.T) {
	inYard(t, func(y *yard) {
		a := y.open("a")
		y.run(a)
		sleep(2 * time.Second)
		before := y.shop.puts.Load()
		all := behindOf(600)
		for i := range 600 {
			a.Own(func(n *Note) { n.Evidence.Behind, n.Evidence.Ahead = all[:600-i], time.Now().Add(time.Hour) })
			sleep(100 * time.Millisecond)
		}
		if n := y.shop.puts.Load() - before; n < 5 || n > 7 {
			t.Errorf("%d writes in a minute", n)
		}
		sleep(20 * time.Second)
		before = y.shop.puts.Load()
		a.Own(func(n *Note) { n.Evidence.Ahead = time.Now().Add(3 * time.Hour) })
		if sleep(2 * time.Second); y.shop.puts.Load() != before {
			t.Error("what is announced was written by itself")
		}
		a.Hurry()
		if sleep(2 * time.Second); y.shop.puts.Load() != before+1 || a.Announced() < time.Now().Add(2*time.Hour).Unix() {
			t.Error("what is urgent was not written")
		}
	})
}

// TestEvidenceFitsANarrowStore: revoked certificates come first.
func TestEvidenceFitsANarrowStore(t *testing.T) {
	inYard(t, func(y *yard) {
		a := y.open("a")
		a.config.Store = narrow{y.shop}
		y.run(a)
		fit, _ := a.Fit(many(2000, 3))
		a.Own(func(n *Note) {
			n.Revoked, n.Evidence.Behind, n.Evidence.Settled = fit, behindOf(10_000), settledOf(10_000)
		})
		sleep(2 * time.Second)
		n := a.All()[0]
		if len(n.Revoked) != 2000 || len(n.Evidence.Behind) < 1000 || n.Evidence.Lost.IsZero() || len(must(y.shop.SQLite.Notes(y.ctx))["a"]) > 64<<10 {
			t.Errorf("%d revoked, %d behind, until %s", len(n.Revoked), len(n.Evidence.Behind), n.Evidence.Lost)
		}
	})
}
