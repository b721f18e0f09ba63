package csr

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

	"google.golang.org/grpc/codes"
)

// state returns the counters and the number of waiters that are really in the queue.
func (a *admission) state() (inFlight, queued, waiting int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for ids := range a.turns.All() {
		for range ids.All() {
			waiting++
		}
	}
	return a.inFlight, a.queued, waiting
}

func wantState(t testing.TB, a *admission, inFlight, waiting int) {
	t.Helper()
	if i, q, w := a.state(); i != inFlight || q != waiting || w != waiting {
		t.Errorf("in flight %d, queued %d, in the queue %d; want %d, %d, %d", i, q, w, inFlight, waiting, waiting)
	}
}

// wantIdle checks that nothing is left, in memory neither.
func wantIdle(t testing.TB, a *admission) {
	t.Helper()
	wantState(t, a, 0, 0)
	if n := a.turns.Keys(); n != 0 {
		t.Errorf("%d nodes are left in the queue", n)
	}
}

// arrivals lets callers in one after the other, and tells in which order they were admitted.
type arrivals struct {
	t     *testing.T
	a     *admission
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
		r.a.release()
		synctest.Wait()
	}
	return r.order
}

func TestD19DefaultsBoundConcurrencyAndSetNoRates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAdmission(AdmissionConfig{})
		c := a.config
		if c.MaxInFlight != DefaultMaxInFlight || c.MaxQueue != DefaultMaxQueue || c.MaxWait != DefaultMaxWait {
			t.Errorf("defaults are %+v", c)
		}
		for range 10_000 { // at one instant, by one identity
			if d := a.acquire(t.Context(), "node-1", "web"); d != nil {
				t.Fatal(d)
			}
			a.release()
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
		a := newAdmission(AdmissionConfig{MaxInFlight: 3, MaxWait: time.Hour})
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
				a.release()
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
		a := newAdmission(AdmissionConfig{MaxInFlight: 1, MaxQueue: 2, MaxWait: 3 * time.Second})
		if d := a.acquire(t.Context(), "node-1", "holder"); d != nil {
			t.Fatal(d)
		}
		var wg sync.WaitGroup
		for i := range 2 {
			wg.Go(func() {
				begun := time.Now()
				d := a.acquire(t.Context(), "node-1", fmt.Sprint("web-", i))
				wantBusy(t, d, 3*time.Second)
				if took := time.Since(begun); took != 3*time.Second {
					t.Errorf("waited %s, want 3 s", took)
				}
			})
		}
		synctest.Wait()
		begun := time.Now()
		wantBusy(t, a.acquire(t.Context(), "node-2", "third"), 3*time.Second) // the queue is full
		if took := time.Since(begun); took != 0 {
			t.Errorf("the third waited %s", took)
		}
		wg.Wait()
		wantState(t, a, 1, 0)
		a.release()
		wantIdle(t, a)
	})
}

func wantBusy(t testing.TB, d *Denial, retry time.Duration) {
	t.Helper()
	if d == nil || d.Code != codes.ResourceExhausted || d.Reason != ReasonBusy || d.RetryAfter != retry {
		t.Errorf("got %+v, want ResourceExhausted %s after %s", d, ReasonBusy, retry)
	}
}

func TestD19CallersThatGiveUp(t *testing.T) {
	for _, tc := range []struct {
		name string
		ctx  func(context.Context) (context.Context, context.CancelFunc)
		want codes.Code
	}{
		{"cancelled", func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Second, cancel)
			return ctx, cancel
		}, codes.Canceled},
		{"deadline", func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, time.Second)
		}, codes.DeadlineExceeded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAdmission(AdmissionConfig{MaxInFlight: 1})
				a.acquire(t.Context(), "node-1", "holder")
				ctx, cancel := tc.ctx(t.Context())
				defer cancel()
				for range 2 { // the second time the caller is gone from the start
					if d := a.acquire(ctx, "node-1", "web"); d == nil || d.Code != tc.want || d.Reason != ReasonBusy {
						t.Errorf("got %+v, want %s", d, tc.want)
					}
				}
				wantState(t, a, 1, 0)
				a.release()
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
		a := newAdmission(AdmissionConfig{MaxInFlight: 1, MaxQueue: 50, MaxWait: time.Second})
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
		if n := a.turns.Keys(); n != 0 {
			t.Errorf("%d nodes are left", n)
		}
		a.release()
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
				a := newAdmission(AdmissionConfig{MaxInFlight: 1, MaxWait: time.Hour})
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
		a := newAdmission(AdmissionConfig{MaxInFlight: 1, MaxWait: time.Hour})
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

// Nodes of two clusters may have one name; what is noisy in one must not count against the other.
func TestD19NodesOfTwoClustersAreNotOne(t *testing.T) {
	one := caller{Caller: Caller{Cluster: "one", Node: "worker"}}
	two := caller{Caller: Caller{Cluster: "two", Node: "worker"}}
	if one.place() == two.place() {
		t.Errorf("both are %q", one.place())
	}
	if unknown := (caller{Caller: Caller{Cluster: "one"}}); unknown.place() != "" {
		t.Errorf("a caller without a node is on %q", unknown.place())
	}
}

func TestD19Rates(t *testing.T) {
	one := Rate{PerSecond: 0.5, Burst: 2}
	for _, tc := range []struct {
		name   string
		config AdmissionConfig
		other  [2]string // node and identity that are not touched by the limit of node-1 and web
		limit  string    // what the detail names; the same for the other caller if it is touched, too
	}{
		{"identity", AdmissionConfig{PerIdentity: one}, [2]string{"node-1", "db"}, "identity web"},
		{"node", AdmissionConfig{PerNode: one}, [2]string{"node-2", "web"}, "node node-1"},
		{"global", AdmissionConfig{Global: one}, [2]string{}, "the server"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAdmission(tc.config)
				try := func(node, identity string) *Denial {
					d := a.acquire(t.Context(), node, identity)
					if d == nil {
						a.release()
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
					wantBusy(t, d, 2*time.Second)
					if d != nil && !strings.Contains(d.Detail, tc.limit) {
						t.Errorf("detail %q does not name %q", d.Detail, tc.limit)
					}
				}
				if tc.other[0] == "" {
					wantBusy(t, try("node-2", "db"), 2*time.Second)
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
		limited(l, "test")
		var wg sync.WaitGroup
		for range 32 {
			wg.Go(func() {
				for range 500 {
					limited(l, "test")
				}
			})
		}
		wg.Wait()
		if d := limited(l, "test"); d == nil || d.RetryAfter > time.Second {
			t.Errorf("after the flood: %+v, want a wait of at most 1 s", d)
		}
		time.Sleep(time.Second)
		if d := limited(l, "test"); d != nil {
			t.Errorf("one period later: %v", d)
		}
	})
}

func TestD19RateSaysAWaitThatMakesSense(t *testing.T) {
	for _, r := range []Rate{{PerSecond: 1e-12}, {PerSecond: 1e8, Burst: 1}, {PerSecond: 0.1, Burst: 1}} {
		synctest.Test(t, func(t *testing.T) {
			l := r.limiter()
			limited(l, "test")
			if d := limited(l, "test"); d == nil || d.RetryAfter <= 0 || d.RetryAfter > time.Hour {
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
	a := newAdmission(AdmissionConfig{MaxInFlight: slots, MaxQueue: 40, MaxWait: 20 * time.Millisecond})
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
			a.release()
		})
	}
	wg.Wait() // synctest fails the test if anybody is stuck
	wantIdle(t, a)
	if admitted.Load() == 0 {
		t.Error("nobody was admitted")
	}
}
