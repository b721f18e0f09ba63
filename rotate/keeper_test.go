package rotate

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"math/big"
	mrand "math/rand/v2"
	"net/url"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509/pkix"

	"github.com/chancery-project/chancery/trust"
)

// authority is a CA in memory whose answers a test can bend.
type authority struct {
	t    *testing.T
	key  crypto.Signer
	root *x509.Certificate
	ttl  time.Duration

	mu     sync.Mutex // guards all below
	fail   error
	other  bool          // answer with a certificate for somebody else
	host   string        // trust domain of the certificates; empty: td
	shown  *trust.Bundle // to answer with; nil: generation 1 of the root alone
	issued []time.Time
	keys   []crypto.PublicKey
}

func newAuthority(t *testing.T, ttl time.Duration) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(100 * 365 * 24 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	root, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{t: t, key: key, root: root, ttl: ttl}
}

func (a *authority) issue(ctx context.Context, key crypto.Signer) (Issued, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fail != nil {
		return Issued{}, a.fail
	}
	path := "/ns/foo/sa/web"
	if a.other {
		path = "/ns/foo/sa/other"
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(int64(len(a.issued) + 2)), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(a.ttl),
		URIs: []*url.URL{{Scheme: "spiffe", Host: cmp.Or(a.host, "td"), Path: path}}, KeyUsage: x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.root, key.Public(), a.key)
	if err != nil {
		return Issued{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return Issued{}, err
	}
	td, _ := trust.ParseDomain("td")
	bundle, err := trust.NewBundle(td, 1, []*x509.Certificate{a.root})
	if err != nil {
		return Issued{}, err
	}
	if a.shown != nil {
		bundle = a.shown
	}
	a.issued = append(a.issued, time.Now())
	a.keys = append(a.keys, key.Public())
	return Issued{Chain: []*x509.Certificate{leaf}, Bundle: bundle}, nil
}

func (a *authority) set(fail error, other bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fail, a.other = fail, other
}

// answer has all answers bring a bundle.
func (a *authority) answer(b *trust.Bundle) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.shown = b
}

func (a *authority) id() trust.ID {
	id, err := trust.ParseID("spiffe://td/ns/foo/sa/web")
	if err != nil {
		a.t.Fatal(err)
	}
	return id
}

func (a *authority) times() []time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.issued)
}

func startKeeper(t *testing.T, a *authority, observe func(error)) *Keeper {
	t.Helper()
	id, err := trust.ParseID("spiffe://td/ns/foo/sa/web")
	if err != nil {
		t.Fatal(err)
	}
	k := NewKeeper(KeeperConfig{ID: id, Issue: a.issue, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Observe: observe})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); k.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	synctest.Wait()
	return k
}

func TestKeeperRenewsAtHalfLifeWithNewKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuthority(t, time.Hour)
		startKeeper(t, a, nil)
		time.Sleep(30 * 24 * time.Hour)
		times := a.times()
		if n := len(times); n < 1300 || n > 1600 { // 720 h at half an hour each
			t.Fatalf("issued %d times in 30 days", n)
		}
		var distinct []time.Duration
		for i := 1; i < len(times); i++ {
			gap := times[i].Sub(times[i-1])
			if least := map[bool]time.Duration{true: 15, false: 21}[i == 1] * time.Minute; gap < least-time.Second || gap > 39*time.Minute+time.Second { // NotAfter has whole seconds
				t.Fatalf("renewal %d came after %s", i, gap)
			}
			if !slices.Contains(distinct, gap) {
				distinct = append(distinct, gap)
			}
		}
		if len(distinct) < 500 {
			t.Errorf("only %d distinct gaps: is the jitter gone?", len(distinct))
		}
		for i, k := range a.keys[1:] {
			if trust.SameKey(k, a.keys[i]) {
				t.Fatal("a key was used for two certificates")
			}
		}
	})
}

// D20: half life counts from receipt; with a lifetime of the size of the backdating it would otherwise be over at once.
func TestD20HalfLifeCountsFromReceipt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuthority(t, 20*time.Second)
		startKeeper(t, a, nil)
		time.Sleep(10 * time.Minute)
		times := a.times()
		for i := 1; i < len(times); i++ {
			if gap := times[i].Sub(times[i-1]); gap < 5*time.Second || gap > 15*time.Second {
				t.Fatalf("renewal %d came after %s; a quarter of the life is the least", i, gap)
			}
		}
	})
}

func TestInvariant7WorkingIdentityStays(t *testing.T) {
	for name, bend := range map[string]func(*authority){
		"server down":   func(a *authority) { a.set(errors.New("down"), false) },
		"wrong answers": func(a *authority) { a.set(nil, true) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAuthority(t, time.Hour)
				failures := 0
				k := startKeeper(t, a, func(err error) {
					if err != nil {
						failures++
					}
				})
				first, changed := k.Current()
				bend(a)
				time.Sleep(59 * time.Minute)
				if now, _ := k.Current(); now != first {
					t.Fatal("the identity was replaced")
				}
				// 23 to 35 minutes of failing at backoffs of up to 72 s.
				if failures < 18 || failures > 60 {
					t.Errorf("%d tries in half an hour", failures)
				}
				a.set(nil, false)
				<-changed
				if now, _ := k.Current(); now == first || now.NotAfter().Before(first.NotAfter()) {
					t.Error("no newer identity after the trouble ended")
				}
			})
		})
	}
}

type askedToWait struct{ d time.Duration }

func (askedToWait) Error() string               { return "busy" }
func (a askedToWait) RetryAfter() time.Duration { return a.d }

func TestKeeperWaitsAsTheServerSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuthority(t, time.Hour)
		a.set(askedToWait{20 * time.Second}, false)
		tries := 0
		startKeeper(t, a, func(error) { tries++ })
		time.Sleep(19 * time.Second)
		synctest.Wait()
		if tries != 1 {
			t.Errorf("%d tries within the time that the server asked for", tries)
		}
	})
}

// An SVID that comes to its end while the servers are away is tried for oftener, and no server's word keeps its keeper from it.
func TestKeeperTriesOftenerNearTheEnd(t *testing.T) {
	for name, fail := range map[string]error{"down": errors.New("down"), "busy": askedToWait{30 * time.Second}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAuthority(t, time.Hour)
				var tries []time.Time
				k := startKeeper(t, a, func(error) { tries = append(tries, time.Now()) })
				id, _ := k.Current()
				a.set(fail, false)
				time.Sleep(time.Until(id.NotAfter()))
				synctest.Wait()
				between := func(from, to time.Duration) (n int) { // before the end
					for _, at := range tries[1:] {
						if left := id.NotAfter().Sub(at); left < from && left >= to {
							n++
						}
					}
					return n
				}
				if n := between(20*time.Minute, 10*time.Minute); n < 8 || n > 20 {
					t.Errorf("%d tries in ten minutes with time left", n)
				}
				if n := between(time.Minute, 10*time.Second); n < 5 || n > 9 { // each a quarter of what is left
					t.Errorf("%d tries in the last minute but ten seconds", n)
				}
				if n := between(10*time.Second, 0); n < 6 || n > 11 {
					t.Errorf("%d tries in the last ten seconds", n)
				}
			})
		})
	}
}

// TestRenewalsSpread: of a fleet that came up at one moment, no more than twice as many renew at a time as on average over a life,
// from the first life on.
func TestRenewalsSpread(t *testing.T) {
	const agents, lives, parts = 20_000, 4, 50
	var begin time.Time
	life := time.Hour
	counts := make([]int, lives*parts)
	for range agents {
		at, together := begin, true
		for {
			at = renewAt(at, at.Add(life), together, mrand.Float64())
			together = false
			i := int(at.Sub(begin) * parts / life)
			if i >= len(counts) {
				break
			}
			counts[i]++
		}
	}
	for i := range lives {
		one, sum := counts[i*parts:(i+1)*parts], 0
		for _, n := range one {
			sum += n
		}
		ratio := float64(slices.Max(one)) * parts / float64(sum)
		t.Logf("life %d: at most %.2f times as many as on average", i+1, ratio)
		if ratio > 2 {
			t.Errorf("in life %d %.2f times as many renew at a time as on average, more than 2", i+1, ratio)
		}
	}
}
