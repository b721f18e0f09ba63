package e2e

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"time"
)

// killer kills or stops one part at a time, drawn by the ring's seed, and brings it back after a moment. It runs on the goroutine
// of its test, which calls it between two looks. Proxies and loads are not its victims (decision D8).
type killer struct {
	ring  *ring
	draw  *rand.Rand
	every time.Duration // mean time between two kills; 0: it does not kill
	next  time.Time
	spare map[string]bool // parts that it leaves alone
	did   map[string]int
}

func newKiller(r *ring) *killer {
	return &killer{ring: r, draw: rand.New(rand.NewPCG(r.cfg.Seed, 0)), did: map[string]int{}, spare: map[string]bool{}}
}

// start begins to kill.
func (k *killer) start(every time.Duration) {
	if k.every = every; every > 0 {
		k.plan()
	}
}

func (k *killer) stop() { k.every = 0 }

// soon has the next kill come within two seconds: in each phase somebody is killed, unless it is over sooner.
func (k *killer) soon() { k.next = time.Now().Add(k.between(0, 2*time.Second)) }

func (k *killer) plan() { k.next = time.Now().Add(k.between(k.every/2, k.every*3/2)) }

func (k *killer) between(least, most time.Duration) time.Duration {
	return least + time.Duration(k.draw.Int64N(int64(most-least)))
}

// part is something that can be killed, and how.
type part struct {
	name          string
	kill, start   func()
	pause, resume func()
}

func (k *killer) parts() (all []part) {
	r := k.ring
	add := func(p part) {
		if !k.spare[p.name] {
			all = append(all, p)
		}
	}
	for i, s := range r.servers {
		add(part{
			name: fmt.Sprintf("server %d", i), kill: func() { s.Kill() }, start: func() { s.Start(r.t); s.WaitReady(r.t) },
			pause: func() { r.signal(s.Process, syscall.SIGSTOP) }, resume: func() { r.signal(s.Process, syscall.SIGCONT) },
		})
	}
	agent := func(name string, a *Agent) {
		add(part{
			name: name, kill: func() { a.Kill() }, start: func() { a.Start(r.t) },
			pause: func() { r.signal(a.Process, syscall.SIGSTOP) }, resume: func() { r.signal(a.Process, syscall.SIGCONT) },
		})
	}
	for i, n := range r.nodes {
		agent(fmt.Sprintf("agent %d", i), n.agent)
	}
	agent("agent of go-spiffe", r.probe.agent)
	add(part{name: "store", kill: r.store.crash, start: r.store.restart, pause: r.store.postgres.Pause, resume: r.store.postgres.Resume})
	return all
}

func (r *ring) signal(p *Process, sig syscall.Signal) {
	r.t.Helper()
	if err := p.Signal(sig); err != nil {
		r.t.Errorf("signal %v to %s: %v", sig, p.Name, err)
	}
}

// tick kills somebody if it is time for that. It returns once all are back.
func (k *killer) tick() {
	if k.every == 0 || time.Now().Before(k.next) {
		return
	}
	k.strike()
	k.plan()
}

// strike kills, or stops, one part.
func (k *killer) strike() {
	r := k.ring
	r.t.Helper()
	all := k.parts()
	p, away := all[k.draw.IntN(len(all))], k.between(200*time.Millisecond, 2500*time.Millisecond)
	if k.draw.IntN(3) == 0 {
		k.did["SIGSTOP "+p.name]++
		r.t.Logf("%s: SIGSTOP of %s for %v", r.at(), p.name, away.Round(time.Millisecond))
		p.pause()
		time.Sleep(away) // the moment that it is away is drawn, not waited for
		p.resume()
		return
	}
	k.did["kill -9 "+p.name]++
	r.t.Logf("%s: kill -9 of %s for %v", r.at(), p.name, away.Round(time.Millisecond))
	p.kill()
	time.Sleep(away) // as above
	p.start()
}

// at is the time since the ring began.
func (r *ring) at() time.Duration { return time.Since(r.started).Round(10 * time.Millisecond) }
