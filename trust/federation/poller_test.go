package federation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// world is a poller with an endpoint for each of some trust domains, in fake time.
type world struct {
	t       *testing.T
	poller  *Poller
	domains []trust.Domain
	begun   time.Time

	mu     sync.Mutex
	polls  bool
	stored map[trust.Domain]*spiffebundle.Bundle
	asked  map[trust.Domain][]time.Duration // when each endpoint was asked, since the beginning
	answer map[trust.Domain]http.HandlerFunc
	take   func(trust.Domain, bool) error // may refuse
}

// newWorld makes endpoints that serve what serveBundle said, and a poller that is not running yet.
func newWorld(t *testing.T, names ...string) *world {
	w := &world{t: t, begun: time.Now(), polls: true, stored: map[trust.Domain]*spiffebundle.Bundle{}, asked: map[trust.Domain][]time.Duration{}, answer: map[trust.Domain]http.HandlerFunc{}}
	var clients []*Client
	for _, name := range names {
		td, root := must(trust.ParseDomain(name)), newCA(name)
		w.domains = append(w.domains, td)
		n := newNetwork(root.leaf(name), func(rw http.ResponseWriter, r *http.Request) {
			w.mu.Lock()
			w.asked[td] = append(w.asked[td], time.Since(w.begun).Truncate(time.Millisecond))
			h := w.answer[td]
			w.mu.Unlock()
			h(rw, r)
		})
		t.Cleanup(n.close)
		c := must(NewClient(ClientConfig{Relationship: Relationship{Domain: td, URL: "https://" + name + "/", Profile: Web}, Roots: root.pool}))
		c.dial = n.dial
		clients = append(clients, c)
		w.serve(td, 1, 2*time.Minute)
	}
	w.poller = NewPoller(PollerConfig{
		Clients: clients, Logger: slog.New(slog.DiscardHandler),
		Polls: func() bool { w.mu.Lock(); defer w.mu.Unlock(); return w.polls },
		Hint: func(td trust.Domain) (time.Duration, bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if b := w.stored[td]; b != nil {
				return b.RefreshHint, true
			}
			return 0, false
		},
		Take: func(_ context.Context, r Relationship, b *spiffebundle.Bundle, polled bool) (bool, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.take != nil {
				if err := w.take(r.Domain, polled); err != nil {
					return false, err
				}
			}
			was := w.stored[r.Domain]
			w.stored[r.Domain] = b
			return was == nil || was.Sequence != b.Sequence, nil
		},
	})
	return w
}

// serve has an endpoint serve a bundle with a number and a hint from now on.
func (w *world) serve(td trust.Domain, n uint64, hint time.Duration) {
	b := &spiffebundle.Bundle{Domain: td, Sequence: n, HasSequence: true, RefreshHint: hint}
	w.set(td, write(must(b.Marshal())))
}

func (w *world) set(td trust.Domain, h http.HandlerFunc) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answer[td] = h
}

// run runs the poller for a while of fake time, with things that happen meanwhile.
func (w *world) run(script func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error)
	go func() { done <- w.poller.Run(ctx) }()
	script()
	cancel()
	if err := <-done; err != nil {
		w.t.Error(err)
	}
}

// times returns when an endpoint was asked.
func (w *world) times(td trust.Domain) []time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]time.Duration{}, w.asked[td]...)
}

// sequence returns the number of the bundle that is stored; 0 for none.
func (w *world) sequence(td trust.Domain) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b := w.stored[td]; b != nil {
		return b.Sequence
	}
	return 0
}

func (w *world) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.stored)
}

// between checks that an endpoint was asked again after so long at the least and the most, each time.
func (w *world) between(td trust.Domain, from int, least, most time.Duration) {
	w.t.Helper()
	at := w.times(td)
	if len(at) < from+3 {
		w.t.Errorf("%s was asked at %v only", td, at)
		return
	}
	for i := from + 1; i < len(at); i++ {
		if gap := at[i] - at[i-1]; gap < least || gap > most {
			w.t.Errorf("%s was asked at %v: %s apart, not between %s and %s", td, at, gap, least, most)
			return
		}
	}
}

func (w *world) status(td trust.Domain) Status {
	for _, s := range w.poller.Status() {
		if s.Relationship.Domain == td {
			return s
		}
	}
	w.t.Fatalf("no status of %s", td)
	return Status{}
}

// TestPollsAtTheRefreshHint: at once where there is nothing yet, then at the hint, with jitter and within bounds, and at 5 minutes without one.
func TestPollsAtTheRefreshHint(t *testing.T) {
	for _, c := range []struct{ hint, least, most time.Duration }{
		{2 * time.Minute, 108 * time.Second, 2 * time.Minute},
		{0, 270 * time.Second, 5 * time.Minute},
		{time.Second, 54 * time.Second, time.Minute},
		{365 * 24 * time.Hour, 54 * time.Minute, time.Hour},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "b.example")
			td := w.domains[0]
			w.serve(td, 1, c.hint)
			w.run(func() { time.Sleep(10 * c.most) })
			if at := w.times(td); at[0] > time.Second {
				t.Errorf("first asked after %s", at[0])
			}
			w.between(td, 0, c.least, c.most)
			gaps := map[time.Duration]bool{}
			at := w.times(td)
			for i := 1; i < len(at); i++ {
				gaps[at[i]-at[i-1]] = true
			}
			if len(gaps) < 3 {
				t.Errorf("no jitter: %v", at)
			}
		})
	}
}

// TestFailureOfOne: the others go on; who fails is asked at its next time, not sooner; its last bundle stays, and its status says all of it.
func TestFailureOfOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "b.example", "c.example", "d.example")
		b, c, d := w.domains[0], w.domains[1], w.domains[2]
		w.run(func() {
			time.Sleep(time.Second)
			w.set(b, http.NotFound)
			w.set(c, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }) // hangs
			for i := range 20 {
				w.serve(d, uint64(i+2), 2*time.Minute)
				time.Sleep(2 * time.Minute)
			}
			s := w.status(b)
			if !strings.Contains(s.Error, "HTTP status 404") || s.Failures < 10 || s.LastSuccess.Sub(w.begun) > time.Second || time.Since(s.LastTry) > 2*time.Minute || !s.Next.After(s.LastTry) {
				t.Errorf("%+v", s)
			}
			if s := w.status(c); !strings.Contains(s.Error, "did not answer within 10s") || s.Failures < 10 {
				t.Errorf("%+v", s)
			}
			if s := w.status(d); s.Error != "" || s.Failures != 0 || time.Since(s.LastSuccess) > 2*time.Minute {
				t.Errorf("%+v", s)
			}
			w.serve(b, 9, 2*time.Minute)
			time.Sleep(2 * time.Minute)
			if s := w.status(b); s.Error != "" || s.Failures < 10 || time.Since(s.LastSuccess) > 2*time.Minute {
				t.Errorf("once it works again: %+v", s)
			}
		})
		w.between(b, 0, 108*time.Second, 2*time.Minute)
		w.between(c, 0, 108*time.Second, 2*time.Minute+Timeout)
		if w.sequence(c) != 1 || w.sequence(b) != 9 || w.sequence(d) < 20 {
			t.Errorf("stored %d, %d, %d", w.sequence(b), w.sequence(c), w.sequence(d))
		}
	})
}

// Where there never was a bundle, the first one is not waited for as long as without a hint.
func TestNothingYet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "b.example")
		w.set(w.domains[0], http.NotFound)
		w.run(func() { time.Sleep(10 * time.Minute) })
		w.between(w.domains[0], 0, 54*time.Second, time.Minute)
	})
}

// What cannot be stored counts as a failure, and is tried again.
func TestBundleThatIsNotTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "b.example")
		w.take = func(trust.Domain, bool) error { return errors.New("the disk is full") }
		w.run(func() { time.Sleep(10 * time.Minute) })
		if s := w.status(w.domains[0]); s.Error != "the disk is full" || !s.LastSuccess.IsZero() || s.Failures < 5 {
			t.Errorf("%+v", s)
		}
	})
}

// TestOnlyWhoDrivesPolls: another one does nothing until it is to, and then soon; nor is it asked in a hurry who stores though it drives no more.
func TestOnlyWhoDrivesPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "b.example")
		td := w.domains[0]
		set := func(polls bool) { w.mu.Lock(); w.polls = polls; w.mu.Unlock() }
		set(false)
		w.run(func() {
			time.Sleep(time.Hour)
			if at := w.times(td); len(at) != 0 || !w.status(td).Next.IsZero() {
				t.Errorf("asked at %v, next %v", at, w.status(td).Next)
			}
			set(true)
			time.Sleep(6 * time.Second)
			if at := w.times(td); len(at) != 1 || w.status(td).Next.IsZero() {
				t.Errorf("asked at %v once it drives", at)
			}
			set(false)
			time.Sleep(time.Hour)
			set(true)
			time.Sleep(16 * time.Second) // there is a bundle to go on with
			if at := w.times(td); len(at) != 2 {
				t.Errorf("asked at %v once it drives again", at)
			}
			w.mu.Lock()
			w.take = func(_ trust.Domain, polled bool) error {
				if !polled {
					t.Error("a poll was stored as if somebody had asked")
				}
				return ErrElsewhere
			}
			w.mu.Unlock()
			time.Sleep(10 * time.Minute)
			if n, s := len(w.times(td)), w.status(td); n < 6 || n > 9 || s.Error != "" || s.Failures != 0 {
				t.Errorf("asked %d times while another one stores; %+v", n, s)
			}
		})
	})
}

// TestUnknownAuthority: a peer's certificate that nothing vouches for brings the next fetch forward, on any server; but no more than once a
// minute, and more and more seldom while that brings nothing new.
func TestUnknownAuthority(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "b.example")
		td := w.domains[0]
		w.polls = false
		w.run(func() {
			w.poller.Unknown(must(trust.ParseDomain("stranger.example")))
			w.serve(td, 1, time.Hour)
			for range 10 {
				w.poller.Unknown(td)
			}
			time.Sleep(time.Second)
			if at := w.times(td); len(at) != 1 {
				t.Fatalf("asked at %v", at)
			}
			w.serve(td, 2, time.Hour)
			w.poller.Unknown(td) // within the minute
			time.Sleep(30 * time.Second)
			if at := w.times(td); len(at) != 1 {
				t.Errorf("asked at %v within a minute", at)
			}
			if next := w.status(td).Next; next.Sub(w.begun) < time.Minute {
				t.Errorf("next at %v", next)
			}
			time.Sleep(40 * time.Second)
			if at := w.times(td); len(at) != 2 || w.sequence(td) != 2 {
				t.Errorf("asked at %v", at)
			}
			for range 3600 { // somebody goes on showing a certificate of his own making
				w.poller.Unknown(td)
				time.Sleep(time.Second)
			}
			n := len(w.times(td))
			if n < 5 || n > 9 {
				t.Errorf("asked %d times within an hour, at %v", n, w.times(td))
			}
			w.serve(td, 3, time.Hour)
			for w.sequence(td) != 3 {
				w.poller.Unknown(td)
				time.Sleep(time.Second)
			}
			w.serve(td, 4, time.Hour)
			time.Sleep(time.Minute)
			w.poller.Unknown(td)
			time.Sleep(time.Second)
			if w.sequence(td) != 4 {
				t.Error("once it brought something new, the next time is not a minute later")
			}
		})
	})
}

// TestRefresh: an admin's word fetches at once, on any server, one domain or all; what fails is in the error and the status.
func TestRefresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		names := []string{}
		for i := range 20 {
			names = append(names, fmt.Sprintf("d%d.example", i))
		}
		w := newWorld(t, names...)
		w.polls = false
		w.take = func(_ trust.Domain, polled bool) error {
			if polled {
				t.Error("what an admin asked for was stored as a poll")
			}
			return nil
		}
		w.run(func() {
			if err := w.poller.Refresh(t.Context(), w.domains[3]); err != nil || w.sequence(w.domains[3]) == 0 || w.count() != 1 {
				t.Errorf("%d, %v", w.count(), err)
			}
			if err := w.poller.Refresh(t.Context(), must(trust.ParseDomain("x.example"))); err == nil || !strings.Contains(err.Error(), "no relationship with trust domain x.example") {
				t.Errorf("%v", err)
			}
			w.set(w.domains[5], http.NotFound)
			w.set(w.domains[6], func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
			err := w.poller.Refresh(t.Context(), trust.Domain{})
			if err == nil || !strings.Contains(err.Error(), "d5.example: ") || !strings.Contains(err.Error(), "d6.example: ") || strings.Contains(err.Error(), "d7.example") || w.count() != 18 {
				t.Errorf("%d stored, %v", w.count(), err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := w.poller.Refresh(ctx, w.domains[6]); err == nil || w.status(w.domains[6]).Failures != 1 {
				t.Errorf("who gives up waiting: %v, %+v", err, w.status(w.domains[6]))
			}
		})
	})
}

// TestManyAtATime: a hundred relationships that hang hold up no more than those that are fetched at a time.
func TestManyAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		names := []string{}
		for i := range MaxRelationships {
			names = append(names, fmt.Sprintf("d%d.example", i))
		}
		w := newWorld(t, names...)
		for _, td := range w.domains[:50] {
			w.set(td, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		}
		w.run(func() { time.Sleep(5 * time.Minute) })
		if w.count() != 50 {
			t.Errorf("%d are stored", w.count())
		}
	})
}
