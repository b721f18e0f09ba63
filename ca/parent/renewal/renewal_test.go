package renewal_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/parent/parenttest"
	"github.com/chancery-project/chancery/ca/parent/renewal"
)

// caller is a parent that signs itself, or fails as it is told, and notes when it was asked.
type caller struct {
	w    *parenttest.World
	life time.Duration

	mu    sync.Mutex // guards all below
	fails error
	hangs bool
	skew  time.Duration // of the parent's clock
	asked []time.Time
}

func (c *caller) Sign(ctx context.Context, der []byte) ([]*x509.Certificate, error) {
	c.mu.Lock()
	c.asked = append(c.asked, time.Now())
	fails, hangs, skew := c.fails, c.hangs, c.skew
	c.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if fails != nil {
		return nil, fails
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, err
	}
	template := parenttest.Template("", c.life)
	template.RawSubject, template.URIs, template.MaxPathLen, template.MaxPathLenZero = csr.RawSubject, []*url.URL{csr.URIs[0]}, 0, true
	if skew > 0 {
		template.NotBefore, template.NotAfter = time.Now().Add(skew), time.Now().Add(skew+c.life)
	}
	cert, err := c.w.Above.Sign(template, csr.PublicKey)
	return []*x509.Certificate{cert, c.w.Above.Cert}, err
}

func (c *caller) set(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

func (c *caller) times() []time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]time.Time(nil), c.asked...)
}

// run starts a renewer; stop ends it.
func run(t *testing.T, c *caller) (r *renewal.Renewer, stop func()) {
	t.Helper()
	r = c.w.Renewer(c)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	return r, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// The first issuer is asked for at once, each next one at half of the life that was left, give or take a tenth.
func TestD20RenewsAtHalfOfLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{w: parenttest.NewWorld(t), life: parenttest.Lifetime}
		_, stop := run(t, c)
		defer stop()
		time.Sleep(5 * parenttest.Lifetime)
		at := c.times()
		if len(at) < 8 || len(at) > 13 {
			t.Fatalf("asked %d times in five lifetimes", len(at))
		}
		for i, next := range at[1:] {
			if d := next.Sub(at[i]); d < parenttest.Lifetime*39/100 || d > parenttest.Lifetime*61/100 {
				t.Errorf("renewal %d came %s after the one before", i+1, d)
			}
		}
		c.w.Issue(t)
	})
}

// An outage of any length shorter than the issuer's life changes nothing but logs and metrics; tries are backed off, and come
// no further apart than five minutes, or an eighth of what is left.
func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{w: parenttest.NewWorld(t), life: parenttest.Lifetime}
		r, stop := run(t, c)
		defer stop()
		time.Sleep(time.Minute)
		first, err := c.w.Keeper.Issuer()
		if err != nil {
			t.Fatal(err)
		}
		c.set(func() { c.fails = errors.New("the parent is down") })
		time.Sleep(parenttest.Lifetime * 9 / 10)
		c.w.Issue(t)
		if now, err := c.w.Keeper.Issuer(); err != nil || now.SKI() != first.SKI() {
			t.Errorf("the issuer in use is another one: %v", err)
		}
		at := c.times()[1:]
		if n := len(at); n < 70 || n > 200 {
			t.Errorf("%d tries in four tenths of a lifetime", n)
		}
		for i := range at[1:] {
			if d := at[i+1].Sub(at[i]); d > 6*time.Minute || i > 12 && d < 3*time.Minute {
				t.Errorf("try %d came %s after the one before", i+1, d)
			}
		}
		if r.Err() == nil || c.w.Metric(t, "chancery_ca_parent_up") != 0 || c.w.Metric(t, "chancery_ca_parent_renewal_seconds") > 0 {
			t.Error("the metrics say that all is well")
		}
		log := c.w.Logged.String()
		if !strings.Contains(log, "the old one stays in use") || !strings.Contains(log, "the parent is down") || !strings.Contains(log, "level=ERROR") {
			t.Errorf("it is not logged:\n%s", log)
		}
		c.set(func() { c.fails = nil })
		time.Sleep(6 * time.Minute)
		if now, err := c.w.Keeper.Issuer(); err != nil || now.SKI() == first.SKI() || r.Err() != nil {
			t.Errorf("not renewed after the outage: %v, %v", err, r.Err())
		}
	})
}

// A server that does not drive changes any more does not go on to name a fault that was the parent's once, or that it does not drive.
func TestFaultOfWhoDroveBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{w: parenttest.NewWorld(t), life: parenttest.Lifetime, fails: errors.New("the parent is down")}
		r, stop := run(t, c)
		defer stop()
		time.Sleep(10 * time.Second)
		if r.Err() == nil {
			t.Fatal("the parent's fault is not told")
		}
		if err := c.w.Store.GiveUp(t.Context(), c.w.Keeper.Replica()); err != nil {
			t.Fatal(err)
		}
		if held, by, err := c.w.Store.Hold(t.Context(), "other", time.Minute); !held || err != nil {
			t.Fatalf("%s has the lease, %v", by, err)
		}
		time.Sleep(45 * time.Second)
		if c.w.Keeper.Drives() || r.Err() != nil {
			t.Errorf("it drives: %v; its fault: %v", c.w.Keeper.Drives(), r.Err())
		}
	})
}

// An outage that is longer than the issuer's life ends issuing, and the parent is asked often from then on.
func TestOutageBeyondTheIssuersLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{w: parenttest.NewWorld(t), life: parenttest.Lifetime}
		_, stop := run(t, c)
		defer stop()
		time.Sleep(time.Minute)
		c.set(func() { c.fails = errors.New("the parent is down") })
		time.Sleep(parenttest.Lifetime + time.Hour)
		if _, err := c.w.Keeper.Issuer(); err == nil {
			t.Error("an issuer that has ended is given out")
		}
		if !strings.Contains(c.w.Logged.String(), "nothing can be issued") {
			t.Error("it is not logged")
		}
		c.set(func() { c.fails = nil })
		time.Sleep(20 * time.Second)
		c.w.Issue(t)
	})
}

// A parent that hangs is given up on after a minute, and asked again.
func TestHangingParentIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{w: parenttest.NewWorld(t), life: parenttest.Lifetime, hangs: true}
		r, stop := run(t, c)
		time.Sleep(5 * time.Minute)
		if n := len(c.times()); n < 3 || r.Err() == nil {
			t.Errorf("asked %d times, %v", n, r.Err())
		}
		c.set(func() { c.hangs = false })
		time.Sleep(2 * time.Minute)
		c.w.Issue(t)
		c.set(func() { c.hangs = true })
		time.Sleep(parenttest.Lifetime * 7 / 10)
		stop() // while a call hangs
	})
}

// busy is an error that says when to come again.
type busy struct{ after time.Duration }

func (b busy) Error() string             { return "busy" }
func (b busy) RetryAfter() time.Duration { return b.after }

func TestRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{w: parenttest.NewWorld(t), life: parenttest.Lifetime}
		_, stop := run(t, c)
		defer stop()
		time.Sleep(time.Minute)
		c.set(func() { c.fails = fmt.Errorf("asking: %w", busy{4 * time.Minute}) })
		time.Sleep(parenttest.Lifetime * 65 / 100)
		at := c.times()[1:]
		for i := range at[1:] {
			if d := at[i+1].Sub(at[i]); d < 3*time.Minute {
				t.Errorf("try %d came %s after the one before; it was asked to wait 4m", i+1, d)
			}
		}
	})
}

// A parent's clock that is seconds ahead holds an issuer up for those seconds.
func TestParentsClockAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{w: parenttest.NewWorld(t), life: parenttest.Lifetime, skew: 20 * time.Second}
		_, stop := run(t, c)
		defer stop()
		time.Sleep(15 * time.Second)
		if _, err := c.w.Keeper.Issuer(); err == nil {
			t.Error("an issuer that has not begun is in use")
		}
		time.Sleep(10 * time.Second)
		c.w.Issue(t)
		if n := len(c.times()); n != 1 {
			t.Errorf("asked %d times", n)
		}
	})
}

// Towards the end of the parent's own certificate the issuers get shorter; each is taken that lives longer than the one before, and
// the parent is not asked in a loop.
func TestParentNearItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := parenttest.NewWorld(t)
		end := time.Now().Add(30 * time.Hour)
		w.Above = parenttest.NewCA(t, "above", w.Root, func(c *x509.Certificate) { c.NotAfter = end })
		c := &caller{w: w, life: parenttest.Lifetime}
		_, stop := run(t, c)
		defer stop()
		time.Sleep(28 * time.Hour)
		in, err := w.Keeper.Issuer()
		if err != nil || !in.NotAfter().Equal(end.UTC().Truncate(time.Second)) {
			t.Fatalf("the issuer ends at %v, its parent at %v: %v", in.NotAfter(), end, err)
		}
		if n := len(c.times()); n > 200 {
			t.Errorf("asked %d times", n)
		}
		if log := w.Logged.String(); !strings.Contains(log, `nothing would be gained`) || !strings.Contains(log, "CN=above") {
			t.Errorf("it is not logged:\n%s", log)
		}
		w.Issue(t)
	})
}

// A parent that gives less than half of what it is asked for is taken at its word, and warned of.
func TestShorterThanAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{w: parenttest.NewWorld(t), life: parenttest.Lifetime / 3}
		_, stop := run(t, c)
		defer stop()
		time.Sleep(2 * parenttest.Lifetime)
		c.w.Issue(t)
		if n := len(c.times()); n < 9 || n > 16 || !strings.Contains(c.w.Logged.String(), "the parent gives a shorter life than it was asked for") {
			t.Errorf("asked %d times:\n%s", n, c.w.Logged.String())
		}
	})
}

// counting tells how many keys there are.
type counting struct {
	*keys.Memory
	made, deleted int
}

func (c *counting) Generate(ctx context.Context, kt ca.KeyType) (string, error) {
	c.made++
	return c.Memory.Generate(ctx, kt)
}

func (c *counting) Delete(ctx context.Context, ref string) error {
	c.deleted++
	return c.Memory.Delete(ctx, ref)
}

// Each issuer's key is made in the key store, once however often the parent fails, and deleted when its issuer has ended.
func TestKeysLieInTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &counting{Memory: keys.NewMemory()}
		c := &caller{w: parenttest.NewWorldWith(t, store), life: parenttest.Lifetime, fails: errors.New("down")}
		_, stop := run(t, c)
		time.Sleep(time.Hour)
		if store.made != 1 {
			t.Errorf("%d keys were made while the parent was down", store.made)
		}
		c.set(func() { c.fails = nil })
		time.Sleep(4 * parenttest.Lifetime)
		stop()
		c.w.Issue(t)
		for _, a := range c.w.Keeper.Document().Domains[c.w.Domain.String()].Authorities {
			if len(a.Key) > 0 || a.Kind == authority.KindIssuer && a.KeyRef == "" {
				t.Errorf("the key of %s %s is not in the store", a.Kind, a.ID)
			}
		}
		if kept := store.made - store.deleted; store.made < 6 || kept > 4 {
			t.Errorf("%d keys were made, %d are kept", store.made, kept)
		}
	})
}

// What an admin imports by hand counts as what the parent would have given.
func TestImportByHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &caller{w: parenttest.NewWorld(t), life: parenttest.Lifetime, fails: errors.New("down")}
		_, stop := run(t, c)
		defer stop()
		time.Sleep(5 * time.Second)
		der, err := c.w.Keeper.Request(t.Context(), "admin", false)
		if err != nil {
			t.Fatal(err)
		}
		chain, err := (&caller{w: c.w, life: parenttest.Lifetime}).Sign(t.Context(), der)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.w.Keeper.Import(t.Context(), "admin", chain); err != nil {
			t.Fatal(err)
		}
		c.w.Issue(t)
		before := len(c.times())
		time.Sleep(time.Hour)
		if n := len(c.times()); n > before+1 { // one may have been under way
			t.Errorf("asked %d times though there is an issuer", n-before)
		}
	})
}

// What fails here before the parent is asked is no fault of the parent's; and an error without end does not fill the log.
func TestOwnFaultsAndLongReasons(t *testing.T) {
	w := parenttest.NewWorld(t)
	c := &caller{w: w, life: parenttest.Lifetime, fails: errors.New(strings.Repeat("x", 100_000))}
	r := w.Renewer(c)
	err := r.Renew(t.Context())
	if n := len(renewal.Shorten(err)); n > 1100 || w.Metric(t, "chancery_ca_parent_requests_total", "outcome=failed") != 1 {
		t.Errorf("the reason has %d bytes", n)
	}
	c.fails = nil
	if err := r.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.Log.Close() // the next request cannot be logged
	before := len(c.times())
	if err := r.Renew(t.Context()); err == nil || r.Err() == nil || len(c.times()) != before {
		t.Errorf("without an audit log: %v", err)
	}
	if w.Metric(t, "chancery_ca_parent_up") != 1 || w.Metric(t, "chancery_ca_parent_requests_total", "outcome=failed") != 1 {
		t.Error("it is blamed on the parent")
	}
}
