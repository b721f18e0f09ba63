// Package renewal owns the renewal of an issuer by a parent CA: when it is due, what of a parent's answer is worth taking, and
// how often to ask again.
//
// It refuses to put anything to use itself: the request is the authority's, and so is the import, which holds every answer
// against the roots that were given at init. The parent's trouble is logged and counted, and never touches the issuer in use.
package renewal

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/trust"
)

// How renewals are spaced.
const (
	// SignTimeout bounds one request to a parent.
	SignTimeout = time.Minute

	firstBackoff = time.Second
	maxBackoff   = 5 * time.Minute
	// emptyBackoff is the longest pause while nothing can be issued.
	emptyBackoff = 15 * time.Second
	// spacing is the least time between two renewals that worked, whatever lifetimes a parent gives.
	spacing = 5 * time.Second
	// checkEvery bounds a sleep: timers stop while a machine is suspended, the wall clock does not. And an admin may have
	// imported an issuer meanwhile.
	checkEvery = 10 * time.Second
	// lookEvery is how often a server that does not drive changes looks whether it does.
	lookEvery = time.Second
	// spread is the half width of the window in which renewals fall, as a part of the lifetime.
	spread = 0.1
	// maxAhead is how far a parent's clock may be ahead: an issuer that begins later than this is refused.
	maxAhead = time.Minute
)

// Parent signs issuers.
type Parent interface {
	// Sign has a request (PKCS#10, DER) signed, and returns the issuing certificate first, then those between it and the root,
	// as far as the parent tells them. It returns soon after ctx ends, and may be called again for the same key. What it returns
	// is bounded in size and not checked otherwise. Its errors hold no secret.
	Sign(ctx context.Context, csr []byte) ([]*x509.Certificate, error)
}

// Config says what is renewed, and by whom.
type Config struct {
	Name      string // of the kind of parent, for logs and metrics
	Parent    Parent
	Authority *authority.Keeper // opened with Parented
	Domain    trust.Domain
	Asked     time.Duration // lifetime that the parent is asked for; 0 if that is the parent's to say
	// MinLife is the least that a first issuer must live, but half of Asked is enough. One that succeeds another must outlive it,
	// and that is all: the last weeks of a parent are no reason to stop sooner.
	MinLife time.Duration
	Logger  *slog.Logger
	Metrics prometheus.Registerer
}

// Renewer renews an issuer by a parent: at half of the life that was left when it came, moved by up to a tenth.
type Renewer struct {
	config   Config
	up       *prometheus.GaugeVec
	requests *prometheus.CounterVec

	mu    sync.Mutex // guards all below
	err   error      // of the last try
	known string     // ID of the issuer that the rest is of
	end   time.Time  // of its chain
	draw  float64    // from [0, 1), for when it is renewed
}

// New returns a renewer and registers its metrics.
func New(c Config) *Renewer {
	if c.Asked > 0 {
		c.MinLife = min(c.MinLife, c.Asked/2)
	}
	r := &Renewer{
		config: c,
		up: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "chancery_ca_parent_up", Help: "1 if the last request to the parent CA gave an issuer, else 0. There is none before the first request.",
		}, []string{"parent"}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "chancery_ca_parent_requests_total", Help: "Requests to the parent CA, by outcome: ok, failed (no answer, or a refusal), refused (by us: the answer failed a check).",
		}, []string{"parent", "outcome"}),
	}
	due := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "chancery_ca_parent_renewal_seconds", Help: "Seconds until the parent CA is asked for the next issuer; negative while that is overdue.",
		ConstLabels: prometheus.Labels{"parent": c.Name},
	}, func() float64 { return time.Until(r.due(time.Now())).Seconds() })
	for _, outcome := range []string{"ok", "failed", "refused"} {
		r.requests.WithLabelValues(c.Name, outcome)
	}
	c.Metrics.MustRegister(r.up, r.requests, due)
	return r
}

// Err returns why the last request gave no issuer; nil if it did, or there was none yet.
func (r *Renewer) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// Run renews until ctx ends.
func (r *Renewer) Run(ctx context.Context) error {
	backoff := firstBackoff
	for ctx.Err() == nil {
		if !r.config.Authority.Drives() { // another server asks, and what we heard last is old
			r.note(nil)
			sleep(ctx, lookEvery)
			continue
		}
		if left := time.Until(r.due(time.Now())); left > 0 {
			sleep(ctx, min(left, checkEvery))
			continue
		}
		err := r.Renew(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			r.config.Logger.Info("issuer signed by the parent", "parent", r.config.Name, "renew_at", r.due(time.Now()).UTC().Truncate(time.Second))
			backoff = firstBackoff
			sleep(ctx, spacing)
			continue
		}
		wait := r.pause(err, backoff)
		r.logFailure(err, wait)
		backoff = min(2*backoff, maxBackoff)
		sleep(ctx, wait)
	}
	return nil
}

// due returns when to ask the parent: at once if there is no issuer of use.
func (r *Renewer) due(now time.Time) time.Time {
	newest := r.newest()
	if newest == nil {
		return now
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known != newest.ID {
		end, err := r.endOf(newest)
		if err != nil {
			return now
		}
		r.known, r.end, r.draw = newest.ID, end, rand.Float64()
	}
	if now.After(r.end) {
		return now
	}
	life := r.end.Sub(newest.Created) // from receipt, not from the backdated begin (decision D20)
	return newest.Created.Add(time.Duration(float64(life) * (0.5 + spread*(2*r.draw-1))))
}

// newest returns the issuer that came last; nil if there is none. One that was plugged in from files before there was a parent
// does not count.
func (r *Renewer) newest() (newest *authority.Authority) {
	state := r.config.Authority.Document().Domains[r.config.Domain.String()]
	if state == nil {
		return nil
	}
	for i := range state.Authorities {
		a := &state.Authorities[i]
		signs := a.State == authority.StateActive || a.State == authority.StatePrepared
		if a.Kind == authority.KindIssuer && signs && len(a.Key)+len(a.KeyRef) > 0 && (newest == nil || !a.Created.Before(newest.Created)) {
			newest = a
		}
	}
	return newest
}

// endOf returns when an issuer's chain ends, root included; an error if a part of it has ended.
func (r *Renewer) endOf(a *authority.Authority) (time.Time, error) {
	bundle, err := r.config.Authority.Document().Bundle(r.config.Domain)
	if err != nil {
		return time.Time{}, err
	}
	chain, err := a.Certificates()
	if err != nil {
		return time.Time{}, err
	}
	first, err := firstToEnd(bundle, chain, time.Now())
	if err != nil {
		return time.Time{}, err
	}
	return first.NotAfter, nil
}

// firstToEnd returns that certificate of a chain's path to its root, both included, which ends first.
func firstToEnd(b *trust.Bundle, chain []*x509.Certificate, now time.Time) (*x509.Certificate, error) {
	path, err := b.PathTo(chain, now)
	if err != nil {
		return nil, err
	}
	first := path[0]
	for _, c := range path {
		if c.NotAfter.Before(first.NotAfter) {
			first = c
		}
	}
	return first, nil
}

// errUnfit marks answers that failed a check of ours, errOurs what failed before anybody was asked.
type (
	errUnfit struct{ error }
	errOurs  struct{ error }
)

func (e errUnfit) Unwrap() error { return e.error }
func (e errOurs) Unwrap() error  { return e.error }

// maxReason bounds what a parent can put into the log and /readyz.
const maxReason = 1000

// Shorten returns the text of an error of a parent's, bounded.
func Shorten(err error) string {
	text := err.Error()
	if len(text) <= maxReason {
		return text
	}
	return strings.ToValidUTF8(text[:maxReason], "") + "..."
}

// Renew asks the parent once. On an error everything is as before.
func (r *Renewer) Renew(ctx context.Context) error {
	err := r.renew(ctx)
	if ctx.Err() != nil {
		return err // the server stops: that says nothing of the parent
	}
	r.count(err)
	r.note(err)
	return err
}

func (r *Renewer) note(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

func (r *Renewer) count(err error) {
	outcome, up := "ok", 1.0
	if _, ours := errors.AsType[errOurs](err); ours {
		return
	} else if _, unfit := errors.AsType[errUnfit](err); unfit {
		outcome, up = "refused", 0
	} else if err != nil {
		outcome, up = "failed", 0
	}
	r.requests.WithLabelValues(r.config.Name, outcome).Inc()
	r.up.WithLabelValues(r.config.Name).Set(up)
}

func (r *Renewer) renew(ctx context.Context) error {
	a, actor := r.config.Authority, "server, by its parent "+r.config.Name
	der, err := a.RequestByDriver(ctx, actor)
	if err != nil {
		return errOurs{err}
	}
	chain, err := r.sign(ctx, der)
	if err != nil {
		return fmt.Errorf("parent %s: %w", r.config.Name, err)
	}
	if len(chain) == 0 {
		return errUnfit{fmt.Errorf("parent %s: its answer has no certificate", r.config.Name)}
	}
	// Clocks differ by seconds, and not every parent backdates.
	if ahead := time.Until(chain[0].NotBefore); ahead > 0 && ahead <= maxAhead {
		sleep(ctx, ahead+time.Second)
	}
	if err := r.worthTaking(chain, time.Now()); err != nil {
		return errUnfit{fmt.Errorf("parent %s: issuing certificate %q: %w", r.config.Name, chain[0].Subject, err)}
	}
	if err := a.ImportByDriver(ctx, actor, chain); errors.Is(err, replica.ErrNotDriver) {
		return errOurs{err}
	} else if err != nil {
		return errUnfit{fmt.Errorf("parent %s: %w", r.config.Name, err)}
	}
	return nil
}

func (r *Renewer) sign(ctx context.Context, der []byte) ([]*x509.Certificate, error) {
	ctx, cancel := context.WithTimeout(ctx, SignTimeout)
	defer cancel()
	return r.config.Parent.Sign(ctx, der)
}

// worthTaking refuses an issuer that would be no gain. A chain that does not verify is for Import to explain.
func (r *Renewer) worthTaking(chain []*x509.Certificate, now time.Time) error {
	bundle, err := r.config.Authority.Document().Bundle(r.config.Domain)
	if err != nil {
		return err
	}
	first, err := firstToEnd(bundle, chain, now)
	if err != nil {
		return nil
	}
	end, left := first.NotAfter.UTC(), first.NotAfter.Sub(now).Truncate(time.Second)
	in, err := r.config.Authority.Issuer()
	switch {
	case err == nil && !end.After(in.NotAfter()):
		return fmt.Errorf("its chain ends at %s (%q), and that of the issuer in use at %s: nothing would be gained", end.Format(time.RFC3339),
			first.Subject, in.NotAfter().UTC().Format(time.RFC3339))
	case err != nil && left < r.config.MinLife:
		return fmt.Errorf("its chain ends in %s (%q); it should live %s at least, as long as what it will sign", left, first.Subject, r.config.MinLife)
	case left < max(r.config.MinLife, r.config.Asked/2):
		r.config.Logger.Warn("the parent gives a shorter life than it was asked for", "parent", r.config.Name, "not_after", end,
			"left", left.String(), "asked", r.config.Asked.String(), "subject", first.Subject.String())
	}
	return nil
}

// pause returns how long to wait after an error: the backoff, give or take a fifth, or longer if the parent says so; but while
// the issuer's life runs out, never more than an eighth of what is left.
func (r *Renewer) pause(err error, backoff time.Duration) time.Duration {
	most := emptyBackoff
	if in, err := r.config.Authority.Issuer(); err == nil {
		most = min(max(time.Until(in.NotAfter())/8, firstBackoff), maxBackoff)
	}
	var asked interface {
		error
		RetryAfter() time.Duration
	}
	if errors.As(err, &asked) {
		backoff = max(backoff, asked.RetryAfter())
	}
	return time.Duration(float64(min(backoff, most)) * (0.8 + 0.4*rand.Float64()))
}

func (r *Renewer) logFailure(err error, wait time.Duration) {
	args := []any{"parent", r.config.Name, "reason", Shorten(err), "retry_in", wait.Round(time.Millisecond).String()}
	in, none := r.config.Authority.Issuer()
	if none != nil {
		r.config.Logger.Error("no issuer, and the parent gives none: nothing can be issued", args...)
		return
	}
	args = append(args, "not_after", in.NotAfter().UTC(), "left", time.Until(in.NotAfter()).Truncate(time.Second).String())
	level := slog.LevelWarn
	if time.Until(in.NotAfter()) < in.NotAfter().Sub(in.Chain()[0].NotBefore)/4 {
		level = slog.LevelError
	}
	r.config.Logger.Log(context.Background(), level, "issuer not renewed by its parent; the old one stays in use", args...)
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
