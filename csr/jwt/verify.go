package jwt

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
)

const (
	maxToken = 16 << 10
	// leeway is how far the issuer's clock may be ahead of ours; expiry has none.
	leeway = 30 * time.Second
)

// Config says whose tokens are verified, and who vouches for them. Keys, Ask or both are needed.
type Config struct {
	// Issuer is the exact "iss" of the tokens, such as https://kubernetes.default.svc.
	Issuer string
	// Audiences holds what tokens must be meant for; one of them is enough. The issuer itself is refused here: it is
	// the audience of the API server, so every pod's default token would do.
	Audiences []string
	// Keys opens the issuer's JSON Web Key Set, whose size is bounded here. Nil: no keys are used and no verdict is
	// cached; each call asks. Trusted: who can change what it reads can be anybody.
	Keys func(context.Context) (io.ReadCloser, error)
	// Poll is how often Run opens Keys, less up to a fifth at random so that replicas do not do it in step. Needed with
	// Keys.
	Poll time.Duration
	// Ask asks the issuer about a token that no key fits. It is never called for a bad signature, nor for a token that
	// claims another issuer, audience or time than it should. Its errors go to the caller as they are. Nil: such tokens
	// are refused. Trusted like Keys.
	Ask func(ctx context.Context, token string) (Answer, error)
	// Logger is for what happens apart from calls. Nil: nothing is logged.
	Logger *slog.Logger
}

// Answer is what an issuer says of a token that it vouches for.
type Answer struct {
	Caller    csr.Caller // without ID, Method, Cluster and AttestedAt
	Audiences []string
}

// Verifier verifies the tokens of one issuer. It is safe for concurrent use. Until Run runs, keys are fetched as calls
// need them.
type Verifier struct {
	issuer    string
	audiences []string
	keys      *keyring // nil without Config.Keys
	ask       func(context.Context, string) (Answer, error)
	cache     *verdicts

	hits, misses atomic.Uint64
}

// New checks the configuration. It loads no keys yet.
func New(cfg Config) (*Verifier, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	v := &Verifier{issuer: cfg.Issuer, audiences: slices.Clone(cfg.Audiences), ask: cfg.Ask, cache: newVerdicts(maxVerdicts)}
	if cfg.Keys != nil {
		v.keys = &keyring{open: cfg.Keys, poll: cfg.Poll, log: cfg.Logger}
		if cfg.Logger == nil {
			v.keys.log = slog.New(slog.DiscardHandler)
		}
	}
	return v, nil
}

func (cfg *Config) check() error {
	switch {
	case cfg.Issuer == "":
		return errors.New("issuer is empty; it should be the \"iss\" of the cluster's tokens, such as https://kubernetes.default.svc")
	case len(cfg.Audiences) == 0:
		return errors.New("audiences is empty; it should list what tokens are made for, such as istio-ca")
	case slices.Contains(cfg.Audiences, ""):
		return errors.New("audiences has an empty entry")
	case slices.Contains(cfg.Audiences, cfg.Issuer):
		return fmt.Errorf("audiences has the issuer %q, which is the API server's own audience: every pod's default token would be accepted; use an audience of its own, such as istio-ca", cfg.Issuer)
	case cfg.Keys == nil && cfg.Ask == nil:
		return errors.New("neither keys nor an issuer to ask; one is needed to verify tokens")
	case cfg.Keys != nil && cfg.Poll < time.Second:
		return errors.New("poll should be 1 s or more")
	}
	return nil
}

// Run keeps the keys up to date and the cache small. It blocks until ctx ends and returns nil then.
func (v *Verifier) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { v.cache.sweep(ctx) })
	if v.keys != nil {
		wg.Go(func() { v.keys.run(ctx) })
	}
	wg.Wait()
	return nil
}

// Load loads the keys now. On an error the last good ones, if any, stay in force.
func (v *Verifier) Load(ctx context.Context) error {
	if v.keys == nil {
		return nil
	}
	return v.keys.reload(ctx, v.keys.last.Load())
}

// Ready returns nil if keys are loaded or none are used, else why not.
func (v *Verifier) Ready() error {
	if v.keys == nil {
		return nil
	}
	return v.keys.ready()
}

// Stats is what a verifier did so far and has now.
type Stats struct {
	Hits, Misses uint64    // look-ups in the cache
	Keys         int       // keys in force
	Loaded       time.Time // when they were last loaded; zero if never
}

// Stats returns how things stand.
func (v *Verifier) Stats() Stats {
	s := Stats{Hits: v.hits.Load(), Misses: v.misses.Load()}
	if v.keys != nil {
		s.Keys = len(v.keys.current())
		if at := v.keys.loaded.Load(); at != 0 {
			s.Loaded = time.Unix(at, 0)
		}
	}
	return s
}

// Verify returns whom a token is for, as of now. What it leaves for its caller to fill in are ID, Method, Cluster and
// AttestedAt. Errors are of type *csr.Denial, if Ask's are; none quotes the token.
func (v *Verifier) Verify(ctx context.Context, token string, now time.Time) (csr.Caller, error) {
	t, err := v.verdict(ctx, token, now)
	if err != nil {
		return csr.Caller{}, err
	}
	if err := v.checkTimes(t, now); err != nil {
		return csr.Caller{}, err
	}
	caller := t.caller
	caller.Ends = t.expires
	return caller, nil
}

// verdict is what is known of a token whose signature verified, or that its issuer vouched for. It is immutable.
type verdict struct {
	caller    csr.Caller
	audiences []string
	expires   time.Time
	notBefore time.Time // the later of nbf and iat
	key       *key      // nil if the issuer vouched
	until     time.Time // when this verdict ends
}

// verdict verifies a token, or finds that it did so a short while ago.
func (v *Verifier) verdict(ctx context.Context, token string, now time.Time) (*verdict, error) {
	if len(token) > maxToken {
		return nil, refuse(csr.ReasonTokenMalformed, "the token is %d bytes long; at most %d are allowed", len(token), maxToken)
	}
	if v.keys == nil {
		p, err := parseToken(token)
		if err != nil {
			return nil, err
		}
		return v.asked(ctx, p, now)
	}
	d := digest(sha256.Sum256([]byte(token)))
	if t := v.cache.get(&d, now); t != nil {
		v.hits.Add(1)
		return t, nil
	}
	v.misses.Add(1)
	p, err := parseToken(token)
	if err != nil {
		return nil, err
	}
	t, err := v.verify(ctx, p, now)
	if err != nil {
		return nil, err
	}
	v.cache.put(&d, t)
	return t, nil
}

// verify checks a token's signature and claims with the issuer's keys, or where it may, by asking.
func (v *Verifier) verify(ctx context.Context, p *parsedToken, now time.Time) (*verdict, error) {
	k, err := v.findKey(ctx, p)
	if err != nil {
		if v.ask != nil {
			return v.asked(ctx, p, now)
		}
		return nil, err
	}
	payload, err := p.jws.Verify(k.public)
	if err != nil {
		return nil, refuse(csr.ReasonTokenSignature, "the signature does not verify with key %.80q", k.id)
	}
	t, err := v.readClaims(payload)
	if err != nil {
		return nil, err
	}
	t.key = k
	t.until = earlier(t.expires, now.Add(maxCached))
	return t, nil
}

func (v *Verifier) findKey(ctx context.Context, p *parsedToken) (*key, error) {
	if p.jws == nil {
		return nil, refuse(csr.ReasonTokenKey, "no key has the token's algorithm %.40q", p.alg)
	}
	return v.keys.find(ctx, p.kid, p.alg)
}

// asked asks the issuer about a token. What the token claims is only used to refuse it without asking: a token of
// another issuer, for another audience or past its time is not sent anywhere. Who calls is what the answer says.
func (v *Verifier) asked(ctx context.Context, p *parsedToken, now time.Time) (*verdict, error) {
	t, err := v.readClaims(p.payload)
	if err != nil {
		return nil, err
	}
	if err := v.checkTimes(t, now); err != nil {
		return nil, err
	}
	answer, err := v.ask(ctx, p.token)
	if err != nil {
		return nil, err
	}
	t.caller, t.audiences = answer.Caller, answer.Audiences
	t.until = earlier(t.expires, now.Add(maxCached))
	return t, nil
}

// checkTimes checks audience and times, on every call.
func (v *Verifier) checkTimes(t *verdict, now time.Time) error {
	if !slices.ContainsFunc(t.audiences, func(a string) bool { return slices.Contains(v.audiences, a) }) {
		return refuse(csr.ReasonTokenAudience, "the token is for %.200q; one of %q is needed", t.audiences, v.audiences)
	}
	if !now.Before(t.expires) {
		return refuse(csr.ReasonTokenExpired, "the token expired at %s", t.expires.UTC().Format(time.RFC3339))
	}
	if now.Add(leeway).Before(t.notBefore) {
		return refuse(csr.ReasonTokenExpired, "the token is not valid before %s; is a clock wrong?", t.notBefore.UTC().Format(time.RFC3339))
	}
	return nil
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// refuse makes a denial of a token. Its detail must not quote the token.
func refuse(reason, format string, args ...any) error {
	return &csr.Denial{Code: codes.Unauthenticated, Reason: reason, Detail: fmt.Sprintf(format, args...)}
}
