package rotate

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	mrand "math/rand/v2"
	"sync"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// How a keeper spaces its tries.
const (
	firstBackoff = 500 * time.Millisecond
	maxBackoff   = time.Minute
	callTimeout  = 15 * time.Second
	// checkEvery bounds a sleep. Timers stop while a machine is suspended; the wall clock, read at each check, does not.
	checkEvery = 10 * time.Second
	// Renewals fall between these parts of an SVID's life. One that many may have got at the same moment, since it is a keeper's
	// first or was asked for in a hurry, may be renewed sooner: so that no more than twice as many come at a time as on average.
	earliest, soonest, latest = 0.25, 0.35, 0.65
	// revokedSpread bounds how long a keeper whose SVID was revoked waits before it asks for another: a revocation can
	// meet a whole fleet at once.
	revokedSpread = 5 * time.Second

	// patient and urgent are the parts of an SVID's life that a keeper waits at the least, where a server asks for patience, and
	// at the most in any case; but shortest is the least that it may be urged to.
	patient, urgent = 50, 4
	shortest        = time.Second
)

// Issued is a certificate as it was answered, not yet verified.
type Issued struct {
	Chain  []*x509.Certificate // leaf first, no root
	Bundle *trust.Bundle
}

// KeeperConfig says what a keeper keeps.
type KeeperConfig struct {
	ID trust.ID
	// Issue gets a certificate for the key. It is called with a deadline. An error that has a method
	// RetryAfter() time.Duration postpones the next try by at least that long.
	Issue  func(ctx context.Context, key crypto.Signer) (Issued, error)
	Logger *slog.Logger
	// Observe is told the outcome of each try, for metrics; may be nil.
	Observe func(error)
}

// Keeper holds an identity and renews it: with a new P-256 key each time, at half of its life, give or take a seventh
// drawn once for each certificate so that a fleet does not renew in step.
type Keeper struct {
	config KeeperConfig

	revoked chan struct{}      // full once the SVID in use is found to be revoked
	hurry   chan time.Duration // what Renew asked for and Run has not taken up

	mu       sync.Mutex // guards all below; they change together
	current  *trust.Identity
	changed  chan struct{}     // closed when current is replaced
	adopted  *trust.Bundle     // the newest roots, with the CRLs and under the generation that Adopt took last; nil before the first
	roots    uint64            // the generation that those roots are of
	reported *x509.Certificate // leaf that was found to be revoked last
	withheld string            // why the adopted CRLs are not in current's bundle; "" if they are, or there are none
}

// NewKeeper returns a keeper that holds nothing yet; Run fetches.
func NewKeeper(c KeeperConfig) *Keeper {
	return &Keeper{config: c, changed: make(chan struct{}), revoked: make(chan struct{}, 1), hurry: make(chan time.Duration, 1)}
}

// Renew has Run renew at a moment within a time from now, unless it does so sooner by itself: because what may issue has changed,
// so that a try that failed may succeed, or because the SVID in use is to be replaced. Of several calls that Run has not taken up
// yet the first counts. It does not block.
func (k *Keeper) Renew(within time.Duration) {
	select {
	case k.hurry <- within:
	default:
	}
}

// Current returns the identity, nil before the first, and a channel that is closed when there is a newer one. It
// never blocks. What it returns may have ended, if nothing newer could be had: callers that authenticate look at NotAfter.
func (k *Keeper) Current() (*trust.Identity, <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.current, k.changed
}

// Run fetches and renews until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	var tries Tries
	together := true // others may have got an SVID at the same moment
	for ctx.Err() == nil {
		next, err := k.renew(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if k.config.Observe != nil {
			k.config.Observe(err)
		}
		if err != nil {
			wait := tries.Pause(err, k.left())
			k.logFailure(err, wait)
			if k.sleepUntil(ctx, time.Now().Add(wait)) {
				tries, together = Tries{}, true // things are not as they were
			}
			continue
		}
		tries = Tries{}
		at := renewAt(next.ReceivedAt, next.NotAfter(), together, mrand.Float64())
		k.config.Logger.Info("identity renewed", "spiffe_id", k.config.ID.String(), "serial", next.Serial(),
			"not_after", next.NotAfter().UTC(), "renew_at", at.UTC().Truncate(time.Second))
		together = k.sleepUntil(ctx, at)
	}
	return nil
}

// renew gets one certificate for a new key, verifies it as a whole and swaps it in at one stroke (invariants 6, 7).
func (k *Keeper) renew(ctx context.Context) (*trust.Identity, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making key: %w", err)
	}
	got, err := k.config.Issue(ctx, key)
	if err != nil {
		return nil, err
	}
	if got.Bundle == nil {
		return nil, errors.New("the answer has no bundle")
	}
	next, err := trust.NewIdentity(k.config.ID, got.Chain, key, got.Bundle, time.Now())
	if err != nil {
		return nil, fmt.Errorf("the answer is refused: %w", err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	b, err := k.newest(next)
	if err != nil {
		return nil, err
	}
	select {
	case <-k.revoked: // that was the one before
	default:
	}
	return k.swap(next, b), nil
}

func (k *Keeper) logFailure(err error, wait time.Duration) {
	args := []any{"spiffe_id", k.config.ID.String(), "reason", err.Error(), "retry_in", wait.Round(time.Millisecond).String()}
	current, _ := k.Current()
	switch {
	case current == nil:
		k.config.Logger.Warn("no identity yet", args...)
	case time.Now().After(current.NotAfter()):
		k.config.Logger.Error("identity has ended and cannot be renewed", args...)
	default:
		k.config.Logger.Warn("identity not renewed; the old one stays in use", append(args, "not_after", current.NotAfter().UTC())...)
	}
}

// renewAt returns when to renew: around half of the life that was left on receipt, not of the backdated validity (decision
// D20), at a moment drawn once for each SVID; draw is from [0, 1).
func renewAt(received, notAfter time.Time, together bool, draw float64) time.Time {
	from := soonest
	if together {
		from = earliest
	}
	return received.Add(time.Duration(float64(notAfter.Sub(received)) * (from + (latest-from)*draw)))
}

// left returns the life that the identity has left; none if there is none, or a revoked one.
func (k *Keeper) left() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil || k.reported == k.current.Leaf() {
		return 0
	}
	return time.Until(k.current.NotAfter())
}

// Tries spaces tries that fail. The zero value is for the first.
type Tries struct {
	backoff time.Duration // after the last failure; 0 before any
	asked   bool          // the last failure was a server that said when to come again
}

// patience is an error of a server that says when to come again.
type patience interface {
	error
	RetryAfter() time.Duration
}

// Pause returns how long to wait after an error, where left is the life of the SVID in use: the backoff, which doubles; or what
// a server asked for, if that is more. A server that asks for patience after none had answered is back: then the backoff begins
// anew, or an outage would last a minute longer for those that have waited longest.
func (t *Tries) Pause(err error, left time.Duration) time.Duration {
	var p patience
	asked := errors.As(err, &p) && p.RetryAfter() > 0
	if t.backoff == 0 || asked && !t.asked {
		t.backoff = firstBackoff
	} else {
		t.backoff = min(2*t.backoff, maxBackoff)
	}
	t.asked = asked
	return pause(p, t.backoff, left)
}

// pause returns how long to wait after an error: the backoff, give or take a fifth; or, if the server says when to come again,
// no less than that. A server that asks for patience is left in peace the longer, the more life the SVID in use has left, for
// those that need it now; and whoever comes to the end of it comes oftener, whatever the server says: a quarter of what is left,
// but not more than once a second.
func pause(asked patience, backoff, left time.Duration) time.Duration {
	wait := backoff
	if asked != nil && asked.RetryAfter() > 0 {
		// At most a minute: the old identity may not have longer.
		wait = min(max(wait, asked.RetryAfter(), left/patient), maxBackoff)
		wait += time.Duration(0.2 * mrand.Float64() * float64(wait)) // so that those refused together do not come back together
	} else {
		wait = time.Duration(float64(wait) * (0.8 + 0.4*mrand.Float64()))
	}
	if left > 0 {
		wait = min(wait, max(left/urgent, shortest))
	}
	return wait
}

// sleepUntil waits for a point of the wall clock; or, urged by Renew or because the SVID in use is found to be revoked, for one
// drawn at random that is sooner. Meanwhile it sees to CRLs that have come to their end.
func (k *Keeper) sleepUntil(ctx context.Context, at time.Time) (urged bool) {
	at = at.Round(0) // compare by wall clock
	for {
		left := at.Sub(time.Now().Round(0))
		if left <= 0 {
			return urged
		}
		within := time.Duration(-1)
		timer := time.NewTimer(min(left, checkEvery))
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-k.revoked:
			within = revokedSpread
		case within = <-k.hurry:
		case <-timer.C:
		}
		timer.Stop()
		if within >= 0 {
			urged = true
			if sooner := time.Now().Add(mrand.N(within + 1)).Round(0); sooner.Before(at) {
				at = sooner
			}
		}
		k.look()
	}
}
