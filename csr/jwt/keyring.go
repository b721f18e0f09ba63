package jwt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
)

const (
	minReload     = 10 * time.Second // between loads that unknown key IDs cause, and after a failure
	reloadTimeout = 10 * time.Second
)

// keyring holds an issuer's current keys and loads them anew.
type keyring struct {
	open func(context.Context) (io.ReadCloser, error)
	poll time.Duration
	log  *slog.Logger

	set    atomic.Pointer[keySet] // nil before the first load
	loaded atomic.Int64           // Unix seconds of the last good load
	last   atomic.Pointer[attempt]
	flight singleflight.Group // of loads
}

// attempt is how a load ended.
type attempt struct {
	at  time.Time
	err error
}

// run loads the keys now and then, sooner after a failure, until ctx ends.
func (r *keyring) run(ctx context.Context) {
	for {
		wait := r.poll
		if err := r.reload(ctx, r.last.Load()); err != nil {
			wait = min(wait, minReload)
		}
		jitter := time.Duration(rand.Int64N(int64(wait) / 5))
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait - jitter):
		}
	}
}

// reload loads the keys, or waits for the load that runs. One that ended after the caller saw the last attempt will do.
func (r *keyring) reload(ctx context.Context, last *attempt) error {
	ch := r.flight.DoChan("", func() (any, error) {
		if a := r.last.Load(); a != last {
			return nil, a.err
		}
		return nil, r.replace(context.WithoutCancel(ctx))
	})
	select {
	case res := <-ch:
		return res.Err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// replace loads the keys and puts them in force. On an error the last good ones stay. One call runs at a time.
func (r *keyring) replace(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reloadTimeout)
	defer cancel()
	data, err := r.read(ctx)
	var set keySet
	var skipped []string
	if err == nil {
		set, skipped, err = parseKeySet(data)
	}
	if err == nil {
		r.loaded.Store(time.Now().Unix())
		if r.use(set) {
			r.log.Info("token keys loaded", "keys", len(set), "left_out", skipped)
		}
	}
	// Only now: who sees this attempt must see its keys too.
	prev := r.last.Swap(&attempt{time.Now(), err})
	if err != nil && (prev == nil || prev.err == nil || prev.err.Error() != err.Error()) { // else it would fill the log
		r.log.Error("loading token keys failed; the last good keys, if any, stay in force", "error", err)
	}
	return err
}

func (r *keyring) read(ctx context.Context) ([]byte, error) {
	body, err := r.open(ctx)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	data, err := io.ReadAll(io.LimitReader(body, maxKeySet+1)) // one more, so that parseKeySet sees it is too large
	if err != nil {
		return nil, fmt.Errorf("reading the key set: %w", err)
	}
	return data, nil
}

// use puts a set in force. Keys that it has in common with the old one stay the same objects; the others retire, and
// with them the verdicts that rest on them.
func (r *keyring) use(set keySet) (changed bool) {
	var old keySet
	if p := r.set.Load(); p != nil {
		old = *p
	}
	changed = len(old) != len(set)
	for i, k := range set {
		if j := slices.IndexFunc(old, k.same); j >= 0 {
			set[i] = old[j]
		} else {
			changed = true
		}
	}
	r.set.Store(&set)
	for _, k := range old {
		if !slices.Contains(set, k) {
			k.retired.Store(true)
		}
	}
	return changed
}

// find returns the key for a token's key ID and algorithm. If there is none it loads the keys once, unless that was
// just tried: the issuer may have a new key.
func (r *keyring) find(ctx context.Context, kid string, alg jose.SignatureAlgorithm) (*key, error) {
	if k := r.current().find(kid, alg); k != nil {
		return k, nil
	}
	err := r.reloadSome(ctx)
	if k := r.current().find(kid, alg); k != nil {
		return k, nil
	}
	if err != nil { // the key may be one that we could not get
		return nil, &csr.Denial{
			Code: codes.Unavailable, Reason: csr.ReasonNotReady,
			Detail: fmt.Sprintf("no key %.80q for %s, and loading keys failed: %v", kid, alg, err),
		}
	}
	return nil, refuse(csr.ReasonTokenKey, "the cluster has no key %.80q for %s", kid, alg)
}

// reloadSome is reload for whoever can send a token: one load in 10 s. In between it returns how the last one ended.
func (r *keyring) reloadSome(ctx context.Context) error {
	a := r.last.Load()
	if a != nil && time.Since(a.at) < minReload {
		return a.err
	}
	return r.reload(ctx, a)
}

func (r *keyring) current() keySet {
	if p := r.set.Load(); p != nil {
		return *p
	}
	return nil
}

func (r *keyring) ready() error {
	if r.set.Load() != nil {
		return nil
	}
	if a := r.last.Load(); a != nil && a.err != nil {
		return a.err
	}
	return errors.New("not loaded yet")
}
