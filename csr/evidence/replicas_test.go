package evidence_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/csr/evidence"
)

// left joins what two replicas say, as a gate does.
func left(a, b board.Evidence) (n int) {
	settled := map[uint64]bool{}
	for _, e := range []board.Evidence{a, b} {
		for _, x := range e.Settled {
			settled[x] = true
		}
	}
	behind := map[uint64]bool{}
	for _, e := range []board.Evidence{a, b} {
		for _, x := range e.Behind {
			if x.Here || !settled[x.Consumer] {
				behind[x.Consumer] = true
			}
		}
	}
	return len(behind)
}

// TestD2WhoIsBehindHereIsSettledElsewhere: agents that got a certificate here and have their stream there, and clients that call one server
// and then another, are behind until the other one knows better, by what it learnt after it heard of them.
func TestD2WhoIsBehindHereIsSettledElsewhere(t *testing.T) {
	inTown(t, func(w *town) {
		a, b := w.start("a"), w.start("b")
		s := b.open(1)
		b.say(s, state(1, 1, i1))
		a.ToAgent(nameOf(1), agentID(1), leaf(i1, 1, time.Hour))
		a.ToClient(pod(2), leaf(i1, 1, time.Hour))
		b.ToClient(pod(2), leaf(i1, 2, time.Hour)) // b is ahead of a
		sleep(20 * time.Minute)
		b.ToClient(pod(2), leaf(i1, 2, time.Hour)) // the answer before has come, and it may have called a since
		a.acknowledge(5, trusts)
		b.acknowledge(5, trusts)
		sleep(20 * time.Second)
		if n := left(a.expect("at first, a", 2, 0), b.expect("at first, b", 1, 0)); n != 2 {
			t.Errorf("%d are left", n)
		}
		b.say(s, state(1, 2, i1))
		sleep(12 * time.Second)
		if n := left(a.expect("the agent has it, a", 2, 0), b.expect("the agent has it, b", 0, 1)); n != 1 {
			t.Errorf("%d are left", n)
		}
		sleep(20 * time.Minute)
		b.ToClient(pod(2), leaf(i1, 2, time.Hour)) // sent before b heard that a has it as behind
		sleep(20 * time.Minute)
		b.ToClient(pod(2), leaf(i1, 2, time.Hour))
		sleep(12 * time.Second)
		if n := left(a.expect("the client has it, a", 0, 0), b.expect("the client has it, b", 0, 0)); n != 0 { // a's certificates have ended
			t.Errorf("%d are left", n)
		}
	})
}

// TestD2SettledIsNewerThanBehind: what an agent said before the other replica said that it is behind proves nothing; it is asked.
func TestD2SettledIsNewerThanBehind(t *testing.T) {
	inTown(t, func(w *town) {
		a, b := w.start("a"), w.start("b")
		s := b.open(1)
		b.say(s, state(1, 1, i2))
		sleep(time.Minute)
		a.ToAgent(nameOf(1), agentID(1), leaf(i1, 1, time.Hour))
		b.acknowledge(5, leaves)
		a.acknowledge(5, leaves)
		sleep(20 * time.Second)
		if n := left(a.expect("a", 1, 0), b.expect("b", 0, 0)); n != 1 || b.asked.Load() == 0 {
			t.Errorf("%d are left, and it was asked %d times", n, b.asked.Load())
		}
		b.say(s, state(1, 1, i1, i2))
		sleep(12 * time.Second)
		b.expect("it has that certificate", 1, 0)
		b.say(s, state(1, 1, i2))
		sleep(12 * time.Second)
		if n := left(a.expect("a", 1, 0), b.expect("it has replaced it", 0, 1)); n != 0 {
			t.Errorf("%d are left", n)
		}
		asked := b.asked.Load()
		s.Close()
		sleep(12 * time.Second)
		b.expect("it has gone, and cannot go back", 0, 1)
		if sleep(time.Minute); b.asked.Load() != asked {
			t.Error("it is asked, though it has answered")
		}
		again := a.open(1) // at the other one it says something else
		a.say(again, state(1, 1, i1))
		sleep(12 * time.Second)
		if n := left(a.expect("a", 1, 0), b.expect("b", 0, 1)); n != 1 {
			t.Errorf("%d are left: what it says itself is newer", n)
		}
	})
}

// TestD2EvidenceDoesNotVanish: after a kill the sets stand for the goal that they were made for; for another nobody can name who was
// served, so all that was announced has to end. An orderly stop leaves what was signed, and no more.
func TestD2EvidenceDoesNotVanish(t *testing.T) {
	inTown(t, func(w *town) {
		r := w.start("a")
		r.ToAgent(nameOf(1), agentID(1), leaf(i1, 1, time.Hour))
		r.ToClient(pod(2), leaf(i1, 1, time.Hour))
		s := r.open(3)
		r.say(s, state(3, 2, i1))
		r.acknowledge(5, trusts)
		sleep(2 * time.Second)
		before := r.expect("at first", 2, 0)
		r.kill()

		r = w.start("a")
		if e := r.said(); len(e.Behind) != 2 || e.Ahead.Before(before.Ahead) {
			t.Errorf("before it has acknowledged, it says %+v", e)
		}
		if err := r.Acknowledge(w.t.Context(), 6, 5, trusts); err != nil { // the phase is the same
			t.Fatal(err)
		}
		sleep(2 * time.Second)
		e := r.expect("for the same goal", 2, 0)
		if !e.Lost.IsZero() || e.Ahead.Before(before.Ahead) || !named(e, "before this server's last start", "nothing") {
			t.Errorf("for the same goal: %+v", e)
		}
		r.say(r.open(1), state(1, 2, i1))
		r.ToClient(pod(2), leaf(i1, 2, time.Hour)) // may not arrive
		sleep(12 * time.Second)
		r.expect("one has said it", 1, 0)
		r.acknowledge(7, leaves)
		sleep(2 * time.Second)
		if e = r.expect("for another goal", 2, 0); !e.Lost.Equal(before.Ahead) {
			t.Errorf("for another goal, lost until %s; want %s", e.Lost, before.Ahead)
		}
		r.kill()
		r = w.start("a")
		r.acknowledge(7, leaves)
		sleep(2 * time.Second)
		if e = r.expect("killed once more", 2, 0); !e.Lost.Equal(before.Ahead) {
			t.Errorf("killed once more, lost until %s; want %s", e.Lost, before.Ahead)
		}
		r.acknowledge(8, document.Goal{})
		if sleep(12 * time.Second); !r.said().Lost.After(before.Ahead) {
			t.Errorf("with no goal, lost until %s", r.said().Lost)
		}
		sleep(4 * time.Hour)
		if e = r.expect("all has ended", 0, 0); !e.Lost.IsZero() {
			t.Errorf("lost until %s", e.Lost)
		}
		x := leaf(i1, 2, time.Minute)
		r.ToClient(pod(2), x)
		r.stop()
		if _, err := r.Reserve(w.t.Context(), x.NotAfter); err == nil {
			t.Error("a certificate is signed after the last note")
		}
		r = w.start("a")
		r.acknowledge(9, trusts)
		sleep(2 * time.Second)
		if e = r.expect("after an orderly stop", 0, 0); !e.Lost.Equal(x.NotAfter.UTC()) {
			t.Errorf("after an orderly stop, lost until %s; want %s", e.Lost, x.NotAfter)
		}
		r.kill()
		sleep(time.Hour)
		r = w.start("a") // the store may have been away until just before the kill
		r.acknowledge(10, leaves)
		sleep(2 * time.Second)
		if e = r.said(); e.Lost.Before(time.Now().Add(time.Hour)) {
			t.Errorf("after a time of which nobody knows, lost until %s", e.Lost)
		}
		r.stop()
		for _, served := range []bool{false, true} {
			fresh := w.start(fmt.Sprint("b", served), func(c *evidence.Config) { c.Served = served })
			fresh.acknowledge(9, trusts)
			sleep(2 * time.Second)
			if e = fresh.said(); served == e.Lost.IsZero() {
				t.Errorf("without a note, served %v: lost until %s", served, e.Lost)
			}
			fresh.stop()
		}
	})
}

// TestD2EndsAreAnnounced: what is usual waits for nothing and asks the store for nothing; what is unusual waits until others were told,
// once; and without the store nobody waits for long.
func TestD2EndsAreAnnounced(t *testing.T) {
	inTown(t, func(w *town) {
		r := w.start("a", func(c *evidence.Config) { c.Life, c.MaxLife = time.Hour, 24*time.Hour })
		sleep(2 * time.Second)
		reserve := func(life time.Duration) time.Duration {
			t.Helper()
			begun := time.Now()
			until, err := r.Reserve(w.t.Context(), begun.Add(life))
			if err != nil {
				t.Fatal(err)
			}
			if away := w.shop.down.Load(); until.IsZero() == away || away && until.Unix() > max(r.board.Announced(), time.Now().Add(time.Hour).Unix()) {
				t.Errorf("one for %s may end at %s; announced is %s", life, until, r.said().Ahead)
			}
			return time.Since(begun)
		}
		for range 4 * 60 { // over four hours
			puts, reads := w.shop.puts.Load(), w.shop.reads.Load()
			for range 100 {
				if d := reserve(time.Hour); d != 0 {
					t.Fatalf("a usual certificate waits for %s", d)
				}
			}
			if w.shop.puts.Load() != puts || w.shop.reads.Load() != reads {
				t.Fatal("the store is asked for a certificate")
			}
			sleep(time.Minute)
		}
		before := w.shop.puts.Load()
		if d := reserve(5 * time.Hour); d > 1100*time.Millisecond || time.Until(r.said().Ahead) < 5*time.Hour {
			t.Errorf("an unusual one waited for %s, and announced is %s", d, r.said().Ahead)
		}
		for range 60 {
			if d := reserve(5 * time.Hour); d > 0 {
				t.Errorf("another one waits for %s", d)
			}
			sleep(time.Minute)
		}
		if n := w.shop.puts.Load() - before; n > 70 {
			t.Errorf("%d writes in an hour", n)
		}
		w.shop.down.Store(true)
		var waited time.Duration
		slow := 0
		for range 600 {
			d := reserve(10 * time.Hour)
			if waited += d; d > 0 {
				slow++
			}
			sleep(100 * time.Millisecond)
		}
		if slow == 0 || slow > 8 || waited > time.Duration(slow)*2100*time.Millisecond {
			t.Errorf("without the store %d of 600 waited, for %s", slow, waited)
		}
		w.shop.down.Store(false)
		sleep(time.Minute)
		if d := reserve(10 * time.Hour); d > 0 {
			t.Errorf("with the store again it waits for %s", d)
		}
	})
}

// TestD2TenThousandAgentsCostTheStoreTenWritesAMinute: all of them acknowledge over half a minute, at two servers, and go on to acknowledge
// the next phase.
func TestD2TenThousandAgentsCostTheStoreTenWritesAMinute(t *testing.T) {
	inTown(t, func(w *town) {
		const agents = 10_000
		a, b := w.start("a"), w.start("b")
		streams := make([]*evidence.Stream, agents)
		for i := range streams {
			r := []*replica{a, b}[i%2]
			streams[i] = r.open(i)
			r.say(streams[i], state(i, 1, i1))
			a.ToAgent(nameOf(i), agentID(i), leaf(i1, 1, time.Hour))
		}
		sleep(2 * time.Minute)
		begun, before := time.Now(), w.shop.puts.Load()
		for version, phase := range []struct {
			goal       document.Goal
			generation uint64
			issuer     string
		}{{trusts, 2, i1}, {leaves, 2, i2}} {
			a.acknowledge(uint64(5+version), phase.goal)
			b.acknowledge(uint64(5+version), phase.goal)
			sleep(15 * time.Second)
			if n := left(a.said(), b.said()); n != agents {
				t.Errorf("%d of %d are left at first", n, agents)
			}
			for i, s := range streams {
				[]*replica{a, b}[i%2].say(s, state(i, phase.generation, phase.issuer))
				if i%(agents/300) == 0 {
					sleep(100 * time.Millisecond)
				}
			}
			sleep(12 * time.Second)
			if n := left(a.said(), b.said()); n != 0 {
				t.Errorf("%d are left: %d and %d behind, %d and %d settled", n, len(a.said().Behind), len(b.said().Behind), len(a.said().Settled), len(b.said().Settled))
			}
		}
		minutes, writes := time.Since(begun).Minutes(), w.shop.puts.Load()-before
		t.Logf("%d agents, twice, in %.1f minutes: %d writes of 2 replicas, %.1f a minute each", agents, minutes, writes, float64(writes)/2/minutes)
		if float64(writes)/2/minutes >= 10 {
			t.Errorf("%d writes in %.1f minutes", writes, minutes)
		}
	})
}

// TestD2WhatIsOnlyShownIsNoNews: phase issue of a migration may last for weeks, and each certificate of the old trust domain that is renewed
// changes who presents it; nobody waits for them there, so the store is spared. The next phase says at once how it stands.
func TestD2WhatIsOnlyShownIsNoNews(t *testing.T) {
	inTown(t, func(w *town) {
		const agents = 600
		r := w.start("a")
		streams := make([]*evidence.Stream, agents)
		for i := range streams {
			streams[i] = r.open(i)
			r.say(streams[i], state(i, 1, i1))
		}
		shown := document.Goal{Leave: []string{i1}, Shown: true}
		r.acknowledge(5, shown)
		sleep(2 * time.Second)
		r.expect("as issue begins", agents, 0)
		before := w.shop.puts.Load()
		for i, s := range streams { // one renews each second; half of them get the new trust domain
			r.say(s, state(i, 1, []string{i1, i2}[i%2]))
			sleep(time.Second)
		}
		writes := w.shop.puts.Load() - before
		t.Logf("%d writes in %d minutes", writes, agents/60)
		if writes > 2*agents/60 { // a beat a minute, and what is announced
			t.Errorf("%d writes in %d minutes", writes, agents/60)
		}
		sleep(7 * time.Minute)
		r.expect("later", agents/2, 0)
		r.say(streams[0], state(0, 1, i2))
		r.acknowledge(6, leaves)
		sleep(2 * time.Second)
		r.expect("as reissue begins", agents/2-1, 0)
		r.say(streams[2], state(2, 1, i2))
		sleep(12 * time.Second)
		r.expect("in reissue", agents/2-2, 0)
	})
}
