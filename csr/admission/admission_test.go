package admission

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// acquire asks for a slot, as somebody without an SVID.
func (a *Admission) acquire(ctx context.Context, node, identity string) error {
	return a.Acquire(ctx, Request{Node: node, Identity: identity})
}

func wantState(t testing.TB, a *Admission, inFlight, waiting int) {
	t.Helper()
	if i, q, w := a.State(); i != inFlight || q != waiting || w != waiting {
		t.Errorf("in flight %d, queued %d, in the queue %d; want %d, %d, %d", i, q, w, inFlight, waiting, waiting)
	}
}

// wantIdle checks that nothing is left, in memory neither.
func wantIdle(t testing.TB, a *Admission) {
	t.Helper()
	wantState(t, a, 0, 0)
	if n := a.waiting.Nodes(); n != 0 {
		t.Errorf("%d nodes are left in the queue", n)
	}
}

// arrivals lets callers in one after the other, and tells in which order they were admitted.
type arrivals struct {
	t     *testing.T
	a     *Admission
	mu    sync.Mutex
	order []string
}

// add lets a caller wait; it returns once the caller does.
func (r *arrivals) add(node, identity, name string) {
	go func() {
		if d := r.a.acquire(r.t.Context(), node, identity); d != nil {
			r.t.Errorf("%s: %v", name, d)
			return
		}
		r.mu.Lock()
		r.order = append(r.order, name)
		r.mu.Unlock()
	}()
	synctest.Wait()
}

// drain releases slots until the queue is empty, and gives back the one that was taken first.
func (r *arrivals) drain(n int) []string {
	for range n + 1 {
		r.a.Release()
		synctest.Wait()
	}
	return r.order
}

func TestD19DefaultsBoundConcurrencyAndSetNoRates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Config{})
		c := a.config
		if c.MaxInFlight != DefaultMaxInFlight || c.MaxQueue != DefaultMaxQueue || c.MaxWait != DefaultMaxWait {
			t.Errorf("defaults are %+v", c)
		}
		for range 10_000 { // at one instant, by one identity
			if d := a.acquire(t.Context(), "node-1", "web"); d != nil {
				t.Fatal(d)
			}
			a.Release()
		}
		for range DefaultMaxInFlight {
			if d := a.acquire(t.Context(), "node-1", "web"); d != nil {
				t.Fatal(d)
			}
		}
		wantState(t, a, DefaultMaxInFlight, 0)
		if a.global != nil || a.identity.all != nil || a.node.all != nil {
			t.Error("there are rates though none is set")
		}
	})
}

func TestD19InFlightIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Config{MaxInFlight: 3, MaxWait: time.Hour})
		var now, most atomic.Int32
		for i := range 50 {
			go func() {
				if d := a.acquire(t.Context(), fmt.Sprint("node-", i%7), fmt.Sprint("web-", i%5)); d != nil {
					t.Error(d)
					return
				}
				most.Store(max(most.Load(), now.Add(1)))
				time.Sleep(time.Second)
				now.Add(-1)
				a.Release()
			}()
		}
		synctest.Wait()
		wantState(t, a, 3, 47)
		begun := time.Now()
		for time.Sleep(time.Millisecond); now.Load() > 0; time.Sleep(time.Second) {
		}
		if n, took := most.Load(), time.Since(begun); n != 3 || took > 18*time.Second {
			t.Errorf("at most %d at a time, done after %s; want 3 and 17 s", n, took)
		}
		wantIdle(t, a)
	})
}

func TestD19WaitAndQueueAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Config{MaxInFlight: 1, MaxQueue: 2, MaxWait: 3 * time.Second})
		if d := a.acquire(t.Context(), "node-1", "holder"); d != nil {
			t.Fatal(d)
		}
		var wg sync.WaitGroup
		for i := range 2 {
			wg.Go(func() {
				begun := time.Now()
				d := a.acquire(t.Context(), "node-1", fmt.Sprint("web-", i))
				wantBusy(t, d, 3*time.Second, 6*time.Second) // nothing comes free
				if took := time.Since(begun); took != 3*time.Second {
					t.Errorf("waited %s, want 3 s", took)
				}
			})
		}
		synctest.Wait()
		begun := time.Now()
		wantBusy(t, a.acquire(t.Context(), "node-1", "third"), 3*time.Second, 6*time.Second) // the queue is full
		if took := time.Since(begun); took != 0 {
			t.Errorf("the third waited %s", took)
		}
		wg.Wait()
		wantState(t, a, 1, 0)
		a.Release()
		wantIdle(t, a)
	})
}

// wantBusy checks for a refusal that says to come again after a wait from least to most.
func wantBusy(t testing.TB, err error, least, most time.Duration) {
	t.Helper()
	b, ok := err.(*Busy)
	if !ok || b.RetryAfter < least || b.RetryAfter > most {
		t.Errorf("got %+v, want to be told to come again in %s to %s", err, least, most)
	}
}

func TestD19CallersThatGiveUp(t *testing.T) {
	for _, tc := range []struct {
		name string
		ctx  func(context.Context) (context.Context, context.CancelFunc)
		want error // once he is gone
	}{
		{"cancelled", func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Second, cancel)
			return ctx, cancel
		}, context.Canceled},
		{"deadline", func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, time.Second)
		}, context.DeadlineExceeded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := New(Config{MaxInFlight: 1})
				a.acquire(t.Context(), "node-1", "holder")
				ctx, cancel := tc.ctx(t.Context())
				defer cancel()
				begun := time.Now()
				switch d := a.acquire(ctx, "node-1", "web"); {
				case tc.want == context.Canceled && d != tc.want:
					t.Errorf("got %+v, want %s", d, tc.want)
				case tc.want == context.DeadlineExceeded: // he is told before that, and hears it
					wantBusy(t, d, time.Second, 10*time.Second)
					if took := time.Since(begun); took != 900*time.Millisecond {
						t.Errorf("is told after %s of a second", took)
					}
				}
				<-ctx.Done()
				if d := a.acquire(ctx, "node-1", "web"); d != tc.want { // gone from the start
					t.Errorf("got %+v, want %s", d, tc.want)
				}
				wantState(t, a, 1, 0)
				a.Release()
				if d := a.acquire(ctx, "node-1", "web"); d == nil {
					t.Error("a caller that is gone got a free slot")
				}
				wantIdle(t, a)
			})
		})
	}
}

// While no slot is released, as when the disk of the audit log hangs, callers come and give up. They leave nothing
// behind, or the queue's bound would not bound memory.
func TestD19WaitersThatGiveUpLeaveTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Config{MaxInFlight: 1, MaxQueue: 50, MaxWait: time.Second})
		a.acquire(t.Context(), "node-1", "holder")
		for round := range 20 {
			for i := range 50 {
				go a.acquire(t.Context(), fmt.Sprint("node-", i%3), fmt.Sprint("web-", i%(round+1)))
			}
			synctest.Wait()
			wantState(t, a, 1, 50)
			time.Sleep(2 * time.Second)
			wantState(t, a, 1, 0)
		}
		if n := a.waiting.Nodes(); n != 0 {
			t.Errorf("%d nodes are left", n)
		}
		a.Release()
		wantIdle(t, a)
	})
}

func TestD19TurnsUnderContention(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   string // node/identity of each arrival; their order of arrival is numbered
		want string
	}{
		{"one identity: first come, first served", "a/x a/x a/x", "0 1 2"},
		{"nodes take turns", "a/x a/x a/x b/x b/x c/x", "0 3 5 1 4 2"},
		{"identities on a node take turns", "a/x a/x a/x a/y a/y a/z", "0 3 5 1 4 2"},
		{"nodes first, then identities", "a/x a/x a/y b/x a/x b/z", "0 3 2 5 1 4"},
		{"many identities do not make a node louder", "a/p a/q a/r a/s b/x b/x", "0 4 1 5 2 3"},
		{"callers without a node are nodes of their own", "/x /x /y /y a/z", "0 2 4 1 3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := New(Config{MaxInFlight: 1, MaxWait: time.Hour})
				a.acquire(t.Context(), "holder", "holder")
				r := &arrivals{t: t, a: a}
				in := strings.Fields(tc.in)
				for i, s := range in {
					node, identity, _ := strings.Cut(s, "/")
					r.add(node, identity, fmt.Sprint(i))
				}
				if got := strings.Join(r.drain(len(in)), " "); got != tc.want {
					t.Errorf("admitted in the order %s, want %s", got, tc.want)
				}
				wantIdle(t, a)
			})
		})
	}
}

func TestD19NoisyNodeDoesNotDelayOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Config{MaxInFlight: 1, MaxWait: time.Hour})
		a.acquire(t.Context(), "holder", "holder")
		r := &arrivals{t: t, a: a}
		for i := range 1000 {
			r.add("noisy", fmt.Sprint("web-", i%3), fmt.Sprint("noisy-", i))
		}
		r.add("quiet", "web", "quiet")
		r.add("noisy", "victim", "victim") // on the noisy node, but another identity
		order := r.drain(1002)
		if i := slices.Index(order, "quiet"); i < 0 || i > 1 {
			t.Errorf("the quiet node came %d. of %d", i+1, len(order))
		}
		if i := slices.Index(order, "victim"); i < 0 || i > 4 {
			t.Errorf("the quiet identity on the noisy node came %d. of %d", i+1, len(order))
		}
		wantIdle(t, a)
	})
}

func TestD19Rates(t *testing.T) {
	one := Rate{PerSecond: 0.5, Burst: 2}
	for _, tc := range []struct {
		name   string
		config Config
		other  [2]string // node and identity that are not touched by the limit of node-1 and web
		limit  string    // what the detail names; the same for the other caller if it is touched, too
	}{
		{"identity", Config{PerIdentity: one}, [2]string{"node-1", "db"}, "identity web"},
		{"node", Config{PerNode: one}, [2]string{"node-2", "web"}, "node node-1"},
		{"global", Config{Global: one}, [2]string{}, "the server"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := New(tc.config)
				try := func(node, identity string) error {
					d := a.acquire(t.Context(), node, identity)
					if d == nil {
						a.Release()
					}
					return d
				}
				for range 2 {
					if d := try("node-1", "web"); d != nil {
						t.Fatal(d)
					}
				}
				for range 10 { // refusals do not use the rate up further
					d := try("node-1", "web")
					wantBusy(t, d, 2*time.Second, 2*time.Second)
					if d != nil && !strings.Contains(d.Error(), tc.limit) {
						t.Errorf("detail %q does not name %q", d, tc.limit)
					}
				}
				if tc.other[0] == "" {
					wantBusy(t, try("node-2", "db"), 2*time.Second, 2*time.Second)
				} else if d := try(tc.other[0], tc.other[1]); d != nil {
					t.Errorf("another caller was refused: %v", d)
				}
				time.Sleep(2 * time.Second)
				if d := try("node-1", "web"); d != nil {
					t.Errorf("refused after the time that the refusal named: %v", d)
				}
				wantIdle(t, a)
			})
		})
	}
}

// However many calls cross while a bucket is empty, it has a token again one period later.
func TestD19RefusalsThatCrossDoNotSinkTheRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Rate{PerSecond: 1}.limiter()
		limited(l, "test", "")
		var wg sync.WaitGroup
		for range 32 {
			wg.Go(func() {
				for range 500 {
					limited(l, "test", "")
				}
			})
		}
		wg.Wait()
		if d := limited(l, "test", ""); d == nil || d.RetryAfter > time.Second {
			t.Errorf("after the flood: %+v, want a wait of at most 1 s", d)
		}
		time.Sleep(time.Second)
		if d := limited(l, "test", ""); d != nil {
			t.Errorf("one period later: %v", d)
		}
	})
}

func TestD19RateSaysAWaitThatMakesSense(t *testing.T) {
	for _, r := range []Rate{{PerSecond: 1e-12}, {PerSecond: 1e8, Burst: 1}, {PerSecond: 0.1, Burst: 1}} {
		synctest.Test(t, func(t *testing.T) {
			l := r.limiter()
			limited(l, "test", "")
			if d := limited(l, "test", ""); d == nil || d.RetryAfter <= 0 || d.RetryAfter > time.Hour {
				t.Errorf("%v a second: %+v", r.PerSecond, d)
			}
		})
	}
}

func TestD19RememberedRatesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := limiters{rate: Rate{PerSecond: 1}}
		l.get("used").Allow()
		for i := range maxLimiters {
			l.get(fmt.Sprint(i)) // full
		}
		if l.get("used").Tokens() >= 1 {
			t.Error("a bucket in use was forgotten, full ones were kept")
		}
		for i := range 2 * maxLimiters {
			l.get(fmt.Sprint("b", i)).Allow()
		}
		if n := len(l.all); n > maxLimiters {
			t.Errorf("%d buckets, want at most %d", n, maxLimiters)
		}
	})
}

// Random callers with random patience: in the end nobody waits, no slot is lost, and at no time were there too many.
func TestD19NoSlotIsLostWhateverCallersDo(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { randomCallers(t, seed) })
		})
	}
}

func randomCallers(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	slots := 1 + rnd.IntN(4)
	a := New(Config{MaxInFlight: slots, MaxQueue: 40, MaxWait: 20 * time.Millisecond})
	var now, admitted atomic.Int32
	var wg sync.WaitGroup
	for range 300 {
		node, identity := fmt.Sprint(rnd.IntN(4)), fmt.Sprint(rnd.IntN(3))
		arrives, patience := time.Duration(rnd.IntN(100))*time.Millisecond, time.Duration(rnd.IntN(40))*time.Millisecond
		works := time.Duration(rnd.IntN(4)) * time.Millisecond
		wg.Go(func() {
			time.Sleep(arrives)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if a.acquire(ctx, node, identity) != nil {
				return
			}
			admitted.Add(1)
			if n := int(now.Add(1)); n > slots {
				t.Errorf("%d at a time, want at most %d", n, slots)
			}
			time.Sleep(works)
			now.Add(-1)
			a.Release()
		})
	}
	wg.Wait() // synctest fails the test if anybody is stuck
	wantIdle(t, a)
	if admitted.Load() == 0 {
		t.Error("nobody was admitted")
	}
}

// addEnding lets a caller wait who shows an SVID with some life left, 0 for none.
func (r *arrivals) addEnding(node, identity, name string, left time.Duration) {
	var ends time.Time
	if left != 0 {
		ends = time.Now().Add(left)
	}
	go func() {
		if err := r.a.Acquire(r.t.Context(), Request{Node: node, Identity: identity, Ends: ends}); err != nil {
			r.t.Errorf("%s: %v", name, err)
			return
		}
		r.mu.Lock()
		r.order = append(r.order, name)
		r.mu.Unlock()
	}()
	synctest.Wait()
}

// Each on a node of its own: the SVIDs that end soon first, then those who have none or an ended one, then the rest.
func TestD19WhatEndsFirstComesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Config{MaxInFlight: 1, MaxWait: time.Hour})
		a.acquire(t.Context(), "holder", "holder")
		r := &arrivals{t: t, a: a}
		for i, c := range []struct {
			name string
			left time.Duration
		}{
			{"hour", time.Hour}, {"new", 0}, {"soon", 10 * time.Second}, {"ended", -time.Minute}, {"minute", time.Minute}, {"now", time.Second}, {"new2", 0},
		} {
			r.addEnding(fmt.Sprint("node-", i), "x", c.name, c.left)
		}
		time.Sleep(30 * time.Second)                        // who has waited has not more time than before
		r.addEnding("node-8", "x", "later", 29*time.Second) // 59 s after the first
		r.addEnding("node-9", "x", "new3", 0)               // due 45 s after the first
		if got, want := strings.Join(r.drain(9), " "), "now soon new ended new2 new3 later minute hour"; got != want {
			t.Errorf("admitted in the order %s, want %s", got, want)
		}
		wantIdle(t, a)
	})
}

// Those who show no certificate come before one with an hour left, but not again and again: a flood of them, from one node or
// as many identities without a node, delays him by a turn of each.
func TestD19NobodyWithoutACertificateStarvesOthers(t *testing.T) {
	for _, tc := range []struct {
		name string
		node func(i int) (node, identity string)
		most int // that come before
	}{
		{"one node", func(i int) (string, string) { return "noisy", fmt.Sprint("x", i) }, 1},
		{"twenty identities", func(i int) (string, string) { return "", fmt.Sprint("x", i) }, 20},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := New(Config{MaxInFlight: 1, MaxWait: time.Hour})
				a.acquire(t.Context(), "holder", "holder")
				var ended atomic.Bool
				count, before := 0, 0
				for i := range 20 {
					for range 2 { // so that there is always one that waits
						go func() {
							for !ended.Load() {
								node, identity := tc.node(i)
								if err := a.acquire(t.Context(), node, identity); err != nil {
									t.Error(err)
									return
								}
								count++ // one at a time has the slot
								a.Release()
							}
						}()
					}
				}
				synctest.Wait()
				served := make(chan struct{})
				go func() {
					if err := a.Acquire(t.Context(), Request{Node: "quiet", Identity: "web", Ends: time.Now().Add(time.Hour)}); err != nil {
						t.Error(err)
					}
					before = count
					ended.Store(true)
					close(served)
					a.Release()
				}()
				synctest.Wait()
				a.Release()
				<-served
				if before > tc.most {
					t.Errorf("%d came before; want %d at most", before, tc.most)
				}
				synctest.Wait()
				wantIdle(t, a)
			})
		})
	}
}

// Refusals say to come again at different times, no longer than it takes to serve those that wait and those that were told to come
// before, and never in too far a future.
func TestD19RefusalsSpreadThoseWhoComeAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pace
		ask := func(n, queued int) (all []time.Duration) {
			for range n {
				all = append(all, p.retry(time.Now(), queued, 10*time.Second))
			}
			return all
		}
		within := func(what string, all []time.Duration, least, most time.Duration) {
			t.Helper()
			if a, b := slices.Min(all), slices.Max(all); a < least || b > most || b-a < (most-least)/2 {
				t.Errorf("%s: they come after %s to %s; want %s to %s", what, a, b, least, most)
			}
		}
		within("the pace is not known", ask(1000, 50), 10*time.Second, 20*time.Second)
		p.begin(time.Now())
		for range 500 { // 100 a second
			time.Sleep(10 * time.Millisecond)
			p.served(time.Now())
		}
		within("500 wait, which takes 5 s, and 500 were refused", ask(500, 500), 2500*time.Millisecond, 10*time.Second)
		within("500 more", ask(500, 500), 5*time.Second, 15*time.Second)
		within("too many", ask(5000, 500), 7500*time.Millisecond, 20*time.Second)
		time.Sleep(20 * time.Second)
		p.begin(time.Now())
		within("later, a few", ask(100, 10), time.Second, 2*time.Second)
		time.Sleep(time.Minute) // nothing comes free any more
		within("it hangs", ask(100, 10), 10*time.Second, 20*time.Second)
	})
}

// A slow second does not send everybody away for long; one that is fast counts at once.
func TestD19ThePaceIsBelievedWhenItRises(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pace
		p.begin(time.Now())
		second := func(n int, least, most float64) {
			t.Helper()
			for range n {
				time.Sleep(time.Second / time.Duration(n))
				p.served(time.Now())
			}
			if x, known := p.perSecond(time.Now()); !known || x < least || x > most {
				t.Errorf("%v a second (%v); want %v to %v", x, known, least, most)
			}
		}
		second(100, 99, 101)
		second(1, 79, 81)
		second(1, 63, 65)
		second(200, 199, 201)
		for range 40 {
			second(2, 1.9, 161)
		}
		second(2, 1.9, 2.1)
	})
}

// In a full queue who is due soon takes the place of who has time, and he is told when to come again; who has more time than
// those that wait is refused himself.
func TestD19AFullQueueIsForThoseWhoNeedIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Config{MaxInFlight: 1, MaxQueue: 1, MaxWait: time.Minute})
		a.acquire(t.Context(), "holder", "holder")
		ends := func(d time.Duration) Request { return Request{"node", fmt.Sprint(d), time.Now().Add(d)} }
		results := make(chan error, 3)
		go func() { results <- a.Acquire(t.Context(), ends(time.Hour)) }()
		synctest.Wait()
		wantBusy(t, a.Acquire(t.Context(), ends(2*time.Hour)), time.Second, 2*time.Minute)
		wantState(t, a, 1, 1)
		go func() { results <- a.Acquire(t.Context(), ends(time.Minute)) }()
		synctest.Wait()
		wantBusy(t, <-results, time.Second, 2*time.Minute) // the one with an hour left
		wantState(t, a, 1, 1)
		a.Release()
		if err := <-results; err != nil {
			t.Errorf("the one with a minute left: %v", err)
		}
		a.Release()
		wantIdle(t, a)
	})
}
