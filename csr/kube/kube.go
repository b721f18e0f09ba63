package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"github.com/chancery-project/chancery/csr"
)

// Mode says when a token goes to the API server's TokenReview.
type Mode int

const (
	// Never verifies tokens with the cluster's keys alone.
	Never Mode = iota
	// Fallback asks the API server about tokens whose key ID or algorithm the cluster's keys do not have, such as
	// those of a signer that publishes no keys. It never asks about a bad signature, audience or expiry.
	Fallback
	// Always asks the API server about each token on each call and uses no keys and no cache.
	Always
)

// ParseMode reads "never" (also ""), "fallback" or "always".
func ParseMode(s string) (Mode, error) {
	switch s {
	case "", "never":
		return Never, nil
	case "fallback":
		return Fallback, nil
	case "always":
		return Always, nil
	}
	return Never, fmt.Errorf("tokenReview is %.40q; it should be never, fallback or always", s)
}

func (m Mode) String() string {
	return [...]string{"never", "fallback", "always"}[m]
}

// Config says what a cluster is and how to ask it.
type Config struct {
	// Name is the cluster's name, as callers send it in the clusterid header.
	Name string
	// Issuer is the exact "iss" of the cluster's tokens, such as https://kubernetes.default.svc.
	Issuer string
	// Audiences holds what tokens must be meant for; one of them is enough. The issuer itself is refused here: it is
	// the audience of the API server, so every pod's default token would do.
	Audiences []string
	// JWKSFile holds the cluster's public keys, a JSON Web Key Set. It is read again every 2 s; a bad one leaves the
	// last good keys in force. Empty: the keys come from Client. Trusted: who can change it can be anybody in the
	// cluster.
	JWKSFile string
	// Client talks to the cluster's API server; see NewClient. With it pods are watched. Nil: nothing is watched, and a
	// token is good until it expires, whatever became of its pod. Trusted like JWKSFile.
	Client kubernetes.Interface
	// TokenReview says when the API server is asked about a token. Fallback and Always need Client.
	TokenReview Mode
	// NodeAgents lists the service accounts, as "namespace/name", that may ask for other pods of their node. Without
	// Client it has no effect, for nobody knows then what runs on a node (decision D18).
	NodeAgents []string
	// AllowUnboundTokens accepts tokens that are bound to no pod, though pods are watched. Such a token outlives
	// whatever it was made for. Without Client they are accepted anyway.
	AllowUnboundTokens bool
	// Logger is for what happens apart from calls. Nil: nothing is logged.
	Logger *slog.Logger
	// Metrics is where the metrics are registered, each with the label cluster. Nil: nowhere.
	Metrics prometheus.Registerer
}

// Cluster vouches for the tokens of one Kubernetes cluster. It implements [csr.Cluster] and is safe for concurrent
// use. Until Run runs, keys from the API server and pods are fetched one by one, as calls need them.
type Cluster struct {
	name      string
	issuer    string
	audiences []string
	mode      Mode
	unbound   bool // tokens without a pod are accepted
	agents    map[string]bool

	client  kubernetes.Interface // nil if the cluster has no API server for us
	keys    *keyring             // nil with Always
	cache   *verdicts
	pods    *podWatch // nil if pods are not watched
	reviews calls[*verdict]
	gets    calls[*pod]
	lists   calls[podList]

	metrics *metrics
	log     *slog.Logger
}

var _ csr.Cluster = (*Cluster)(nil)

// Bounds on what callers can make us ask of an API server at once, and on how long they wait for it.
const (
	maxReviews    = 64
	reviewTimeout = 5 * time.Second
	maxGets       = 16
	maxLists      = 4
	podTimeout    = 2 * time.Second
)

// New checks the configuration and reads the key file, if there is one. Call Run to keep keys and pods up to date.
func New(cfg Config) (*Cluster, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("cluster %.80q: %w", cfg.Name, err)
	}
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	c := &Cluster{
		name:      cfg.Name,
		issuer:    cfg.Issuer,
		audiences: slices.Clone(cfg.Audiences),
		mode:      cfg.TokenReview,
		unbound:   cfg.AllowUnboundTokens || cfg.Client == nil,
		agents:    map[string]bool{},
		client:    cfg.Client,
		cache:     newVerdicts(maxVerdicts),
		reviews:   newCalls[*verdict](maxReviews, reviewTimeout),
		gets:      newCalls[*pod](maxGets, podTimeout),
		lists:     newCalls[podList](maxLists, podTimeout),
		log:       log.With("cluster", cfg.Name),
	}
	for _, a := range cfg.NodeAgents {
		c.agents[a] = true
	}
	if len(c.agents) > 0 && cfg.Client == nil {
		c.log.Warn("node agents are configured, but no pods are watched: their requests for other pods will be denied")
	}
	if cfg.TokenReview != Always {
		c.keys = newKeyring(cfg.JWKSFile, cfg.Client, c.log)
		if cfg.JWKSFile != "" {
			if err := c.keys.reload(context.Background()); err != nil {
				return nil, fmt.Errorf("cluster %.80q: jwksFile: %w", cfg.Name, err)
			}
		}
	}
	if cfg.Client != nil {
		c.pods = newPodWatch(cfg.Name, cfg.Client, c.log)
	}
	var err error
	if c.metrics, err = newMetrics(cfg.Metrics, c); err != nil {
		return nil, fmt.Errorf("cluster %.80q: registering metrics: %w", cfg.Name, err)
	}
	return c, nil
}

func (cfg *Config) check() error {
	switch {
	case cfg.Name == "":
		return errors.New("name is empty; it should be what callers send as clusterid, such as Kubernetes")
	case len(cfg.Name) > 253 || !printable(cfg.Name):
		return errors.New("name should be at most 253 printable ASCII characters without spaces")
	case cfg.Issuer == "":
		return errors.New("issuer is empty; it should be the \"iss\" of the cluster's tokens, such as https://kubernetes.default.svc")
	case len(cfg.Audiences) == 0:
		return errors.New("audiences is empty; it should list what tokens are made for, such as istio-ca")
	case slices.Contains(cfg.Audiences, ""):
		return errors.New("audiences has an empty entry")
	case slices.Contains(cfg.Audiences, cfg.Issuer):
		return fmt.Errorf("audiences has the issuer %q, which is the API server's own audience: every pod's default token would be accepted; use an audience of its own, such as istio-ca", cfg.Issuer)
	case cfg.TokenReview < Never || cfg.TokenReview > Always:
		return errors.New("tokenReview should be never, fallback or always")
	case cfg.JWKSFile == "" && cfg.Client == nil:
		return errors.New("neither jwksFile nor kubeconfig is given; one is needed to verify tokens")
	case cfg.TokenReview != Never && cfg.Client == nil:
		return fmt.Errorf("tokenReview %s needs kubeconfig", cfg.TokenReview)
	case cfg.TokenReview == Always && cfg.JWKSFile != "":
		return errors.New("jwksFile is never used with tokenReview always; leave one of them out")
	case cfg.TokenReview != Always && cfg.JWKSFile == "" && restClient(cfg.Client) == nil:
		return errors.New("the client cannot fetch keys; give a jwksFile")
	}
	for _, a := range cfg.NodeAgents {
		ns, sa, _ := strings.Cut(a, "/")
		if err := checkAccount(ns, sa); err != nil {
			return fmt.Errorf("nodeAgents: %.80q should be namespace/serviceaccount, such as istio-system/ztunnel: %w", a, err)
		}
	}
	return nil
}

// Run keeps the keys and the pods up to date. It blocks until ctx ends and returns nil then.
func (c *Cluster) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { c.cache.sweep(ctx) })
	if c.keys != nil {
		wg.Go(func() { c.keys.run(ctx) })
	}
	if c.pods != nil {
		// Not waited for: client-go's reflector may sleep out its backoff, up to 15 s, before it sees that ctx ended.
		go c.pods.run(ctx)
	}
	wg.Wait()
	return nil
}

// Ready returns nil if keys are loaded and, where pods are watched, the watch is synced; else what is missing.
func (c *Cluster) Ready() error {
	if c.keys != nil {
		if err := c.keys.ready(); err != nil {
			return fmt.Errorf("cluster %s: no keys to verify tokens with: %w", c.name, err)
		}
	}
	if c.pods != nil {
		if why := c.pods.missing(time.Now()); why != "" {
			return fmt.Errorf("cluster %s: pods: %s", c.name, why)
		}
	}
	return nil
}

// Authenticate verifies a token and, where pods are watched, that its pod lives.
func (c *Cluster) Authenticate(ctx context.Context, token string) (csr.Caller, error) {
	caller, err := c.authenticate(ctx, token)
	c.metrics.verified(err)
	return caller, err
}

func (c *Cluster) authenticate(ctx context.Context, token string) (csr.Caller, error) {
	now := time.Now()
	v, err := c.verdict(ctx, token, now)
	if err != nil {
		return csr.Caller{}, err
	}
	if err := c.checkTimes(v, now); err != nil {
		return csr.Caller{}, err
	}
	caller := v.caller
	if err := c.checkPod(ctx, &caller, now); err != nil {
		return csr.Caller{}, err
	}
	caller.AttestedAt = now
	return caller, nil
}

// deny makes a denial. Its detail must not quote a token.
func deny(code codes.Code, reason, format string, args ...any) error {
	return &csr.Denial{Code: code, Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// checkAccount checks the names of a namespace and a service account as the API server does.
func checkAccount(namespace, account string) error {
	if msgs := validation.IsDNS1123Label(namespace); len(msgs) > 0 {
		return fmt.Errorf("namespace %.80q is no DNS-1123 label", namespace)
	}
	if msgs := validation.IsDNS1123Subdomain(account); len(msgs) > 0 {
		return fmt.Errorf("service account %.80q is no DNS-1123 subdomain", account)
	}
	return nil
}

// printable reports whether s has only visible ASCII characters, so that it can go into a log or a header as it is.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
