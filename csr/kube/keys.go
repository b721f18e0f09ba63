package kube

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/json"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/chancery-project/chancery/csr"
)

const (
	maxKeySet  = 1 << 20
	maxKeys    = 100
	minRSABits = 2048

	filePoll      = 2 * time.Second
	apiPoll       = 5 * time.Minute
	minReload     = 10 * time.Second // between loads that unknown key IDs cause, and after a failure
	reloadTimeout = 10 * time.Second
)

// key is one public key. A key that stays in the set over a reload stays the same object, so that verdicts can point
// at it and end with it.
type key struct {
	id      string
	alg     string // if the set says so, the only algorithm
	public  crypto.PublicKey
	retired atomic.Bool // it has left the set
}

// fits reports whether the key can verify the algorithm's signatures.
func (k *key) fits(alg jose.SignatureAlgorithm) bool {
	if k.alg != "" && k.alg != string(alg) {
		return false
	}
	p, _ := k.public.(*ecdsa.PublicKey)
	switch alg {
	case jose.RS256, jose.RS384, jose.RS512, jose.PS256, jose.PS384, jose.PS512:
		_, ok := k.public.(*rsa.PublicKey)
		return ok
	case jose.ES256:
		return p != nil && p.Curve == elliptic.P256()
	case jose.ES384:
		return p != nil && p.Curve == elliptic.P384()
	case jose.ES512:
		return p != nil && p.Curve == elliptic.P521()
	case jose.EdDSA:
		_, ok := k.public.(ed25519.PublicKey)
		return ok
	}
	return false
}

func (k *key) same(o *key) bool {
	p, ok := k.public.(interface{ Equal(crypto.PublicKey) bool })
	return ok && k.id == o.id && k.alg == o.alg && p.Equal(o.public)
}

// keySet is an immutable set of keys.
type keySet []*key

// find returns the key of the ID that fits the algorithm. A token without a key ID gets the only key that fits.
func (s keySet) find(kid string, alg jose.SignatureAlgorithm) *key {
	var found *key
	for _, k := range s {
		switch {
		case !k.fits(alg) || kid != "" && k.id != kid:
		case kid != "":
			return k
		case found != nil:
			return nil
		default:
			found = k
		}
	}
	return found
}

// parseKeySet reads a JSON Web Key Set. A key of a kind that we do not know is left out, as RFC 7517 section 5 wants:
// newer API servers publish post-quantum keys. skipped says which and why. A private or symmetric key spoils the set.
func parseKeySet(data []byte) (set keySet, skipped []string, err error) {
	if len(data) > maxKeySet {
		return nil, nil, fmt.Errorf("the key set is larger than %d bytes", maxKeySet)
	}
	var raw struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(data, &raw); err != nil {
		return nil, nil, errors.New("it is no JSON Web Key Set; it should be like {\"keys\": [...]}")
	}
	if len(raw.Keys) > maxKeys {
		return nil, nil, fmt.Errorf("the key set has %d keys; at most %d are allowed", len(raw.Keys), maxKeys)
	}
	for i, r := range raw.Keys {
		if hasSecret(r) {
			return nil, nil, fmt.Errorf("key %d is a private or symmetric key; the set should hold public keys only, and this one should be replaced, as it may have been read", i)
		}
		k, err := parseKey(r)
		if err == nil && slices.ContainsFunc(set, func(o *key) bool { return o.id == k.id && o.alg == k.alg && sameKind(o, k) }) {
			err = fmt.Errorf("key ID %.80q occurs twice", k.id)
		}
		if err != nil {
			skipped = append(skipped, fmt.Sprintf("key %d: %v", i, err))
			continue
		}
		set = append(set, k)
	}
	if len(set) == 0 {
		return nil, skipped, fmt.Errorf("the key set has no key that can be used; left out: %q", skipped)
	}
	return set, skipped, nil
}

// hasSecret reports whether a JWK has a member that only private and symmetric keys have (RFC 7518 section 6, RFC 9964).
func hasSecret(jwk []byte) bool {
	var members map[string]json.RawMessage
	if json.Unmarshal(jwk, &members) != nil {
		return false
	}
	for _, m := range []string{"d", "p", "q", "dp", "dq", "qi", "oth", "k", "priv"} {
		if _, ok := members[m]; ok {
			return true
		}
	}
	return false
}

func parseKey(raw []byte) (*key, error) {
	var kind struct {
		Type string `json:"kty"`
		Use  string `json:"use"`
		Alg  string `json:"alg"`
	}
	if err := json.Unmarshal(raw, &kind); err != nil {
		return nil, errors.New("it is no JSON Web Key")
	}
	if !slices.Contains([]string{"RSA", "EC", "OKP"}, kind.Type) {
		return nil, fmt.Errorf("its kty is %.40q", kind.Type)
	}
	if kind.Use != "" && kind.Use != "sig" {
		return nil, fmt.Errorf("its use is %.40q, not sig", kind.Use)
	}
	if kind.Alg != "" && !slices.Contains(algorithms, jose.SignatureAlgorithm(kind.Alg)) {
		return nil, fmt.Errorf("its alg is %.40q", kind.Alg)
	}
	var jwk jose.JSONWebKey
	if err := jwk.UnmarshalJSON(raw); err != nil {
		return nil, err
	}
	k := &key{id: jwk.KeyID, alg: jwk.Algorithm, public: jwk.Key}
	if p, ok := jwk.Key.(*rsa.PublicKey); ok && p.N.BitLen() < minRSABits {
		return nil, fmt.Errorf("it has %d bits; at least %d are needed", p.N.BitLen(), minRSABits)
	}
	if !slices.ContainsFunc(algorithms, k.fits) {
		return nil, errors.New("its alg does not fit its type")
	}
	return k, nil
}

func sameKind(a, b *key) bool {
	return slices.ContainsFunc(algorithms, func(alg jose.SignatureAlgorithm) bool { return a.fits(alg) && b.fits(alg) })
}

// keyring holds a cluster's current keys and loads them anew.
type keyring struct {
	load func(context.Context) ([]byte, error)
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

func newKeyring(file string, client kubernetes.Interface, log *slog.Logger) *keyring {
	if file != "" {
		return &keyring{poll: filePoll, log: log, load: func(context.Context) ([]byte, error) { return readFile(file) }}
	}
	return &keyring{poll: apiPoll, log: log, load: func(ctx context.Context) ([]byte, error) { return fetchKeySet(ctx, client) }}
}

func readFile(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readBounded(f, name)
}

func fetchKeySet(ctx context.Context, client kubernetes.Interface) ([]byte, error) {
	const path = "/openid/v1/jwks"
	body, err := restClient(client).Get().AbsPath(path).SetHeader("Accept", "application/jwk-set+json, application/json").Stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("getting %s from the API server: %w", path, err)
	}
	defer body.Close()
	return readBounded(body, path)
}

func readBounded(r io.Reader, name string) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxKeySet+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	return data, nil
}

// restClient returns what can fetch paths outside the API, or nil if the client cannot.
func restClient(client kubernetes.Interface) rest.Interface {
	d := client.Discovery()
	if d == nil {
		return nil
	}
	if r, ok := d.RESTClient().(*rest.RESTClient); ok && r != nil {
		return r
	}
	return nil
}

// run loads the keys now and then, sooner after a failure, until ctx ends.
func (r *keyring) run(ctx context.Context) {
	for {
		wait := r.poll
		if err := r.reload(ctx); err != nil {
			wait = min(wait, minReload)
		}
		jitter := time.Duration(rand.Int64N(int64(wait) / 5)) // so that replicas do not ask in step
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait - jitter):
		}
	}
}

// reload loads the keys, or waits for the load that runs.
func (r *keyring) reload(ctx context.Context) error {
	ch := r.flight.DoChan("", func() (any, error) { return nil, r.replace(context.WithoutCancel(ctx)) })
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
	data, err := r.load(ctx)
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
// just tried: the API server may have a new key.
func (r *keyring) find(ctx context.Context, kid string, alg jose.SignatureAlgorithm) (*key, error) {
	if k := r.current().find(kid, alg); k != nil {
		return k, nil
	}
	err := r.reloadSome(ctx)
	if k := r.current().find(kid, alg); k != nil {
		return k, nil
	}
	if err != nil { // the key may be one that we could not get
		return nil, deny(codes.Unavailable, csr.ReasonNotReady, "no key %.80q for %s, and loading keys failed: %v", kid, alg, err)
	}
	return nil, deny(codes.Unauthenticated, csr.ReasonTokenKey, "the cluster has no key %.80q for %s", kid, alg)
}

// reloadSome is reload for whoever can send a token: one load in 10 s. In between it returns how the last one ended.
func (r *keyring) reloadSome(ctx context.Context) error {
	if a := r.last.Load(); a != nil && time.Since(a.at) < minReload {
		return a.err
	}
	return r.reload(ctx)
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
