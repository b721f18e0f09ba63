package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/jwt"
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

// String returns the mode as configs spell it.
func (m Mode) String() string {
	return [...]string{"never", "fallback", "always"}[m]
}

// Config says what a cluster is and how to ask it.
type Config struct {
	// Name is the cluster's name, as callers send it in the clusterid header.
	Name string
	// Issuer and Audiences are those of [jwt.Config].
	Issuer    string
	Audiences []string
	// JWKSFile holds the cluster's public keys, a JSON Web Key Set. It is read again every 2 s; a bad one leaves the
	// last good keys in force. Empty: the keys come from Client. Trusted: who can change it can be anybody in the
	// cluster.
	JWKSFile string
	// Client talks to the cluster's API server; see NewClient. With it pods are watched. Nil: nothing is watched, and a
	// token is good until it expires, whatever became of its pod. Trusted like JWKSFile.
	Client *Client
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
	audiences []string
	mode      Mode
	unbound   bool // tokens without a pod are accepted
	agents    map[string]bool

	tokens  *jwt.Verifier
	client  *Client   // nil if the cluster has no API server for us
	pods    *podWatch // nil if pods are not watched
	reviews calls[jwt.Answer]
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

// How often keys are loaded.
const (
	filePoll = 2 * time.Second
	apiPoll  = 5 * time.Minute
)

// New checks the configuration and reads the key file, if there is one. Call Run to keep keys and pods up to date.
func New(cfg Config) (*Cluster, error) {
	c, err := build(cfg)
	if err != nil {
		return nil, fmt.Errorf("cluster %.80q: %w", cfg.Name, err)
	}
	return c, nil
}

func build(cfg Config) (*Cluster, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	c := &Cluster{
		name:      cfg.Name,
		audiences: slices.Clone(cfg.Audiences),
		mode:      cfg.TokenReview,
		unbound:   cfg.AllowUnboundTokens || cfg.Client == nil,
		agents:    map[string]bool{},
		client:    cfg.Client,
		reviews:   newCalls[jwt.Answer](maxReviews, reviewTimeout),
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
	var err error
	if c.tokens, err = jwt.New(c.tokensConfig(cfg)); err != nil {
		return nil, err
	}
	if cfg.JWKSFile != "" {
		if err := c.tokens.Load(context.Background()); err != nil {
			return nil, fmt.Errorf("jwksFile: %w", err)
		}
	}
	if cfg.Client != nil {
		c.pods = newPodWatch(cfg.Name, cfg.Client, c.log)
	}
	if c.metrics, err = newMetrics(cfg.Metrics, c); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return c, nil
}

// tokensConfig says where the keys come from and who is asked about a token.
func (c *Cluster) tokensConfig(cfg Config) jwt.Config {
	out := jwt.Config{Issuer: cfg.Issuer, Audiences: cfg.Audiences, Logger: c.log}
	switch {
	case c.mode == Always:
	case cfg.JWKSFile != "":
		out.Poll = filePoll
		out.Keys = func(context.Context) (io.ReadCloser, error) { return os.Open(cfg.JWKSFile) }
	default:
		out.Poll, out.Keys = apiPoll, c.client.keySet
	}
	if c.mode != Never {
		out.Ask = c.review
	}
	return out
}

func (cfg *Config) check() error {
	switch {
	case cfg.Name == "":
		return errors.New("name is empty; it should be what callers send as clusterid, such as Kubernetes")
	case len(cfg.Name) > 253 || strings.ContainsFunc(cfg.Name, func(r rune) bool { return r <= ' ' || r > '~' }):
		return errors.New("name should be at most 253 printable ASCII characters without spaces")
	case cfg.TokenReview < Never || cfg.TokenReview > Always:
		return errors.New("tokenReview should be never, fallback or always")
	case cfg.JWKSFile == "" && cfg.Client == nil:
		return errors.New("neither jwksFile nor kubeconfig is given; one is needed to verify tokens")
	case cfg.TokenReview != Never && cfg.Client == nil:
		return fmt.Errorf("tokenReview %s needs kubeconfig", cfg.TokenReview)
	case cfg.TokenReview == Always && cfg.JWKSFile != "":
		return errors.New("jwksFile is never used with tokenReview always; leave one of them out")
	}
	for _, a := range cfg.NodeAgents {
		ns, sa, _ := strings.Cut(a, "/")
		if err := jwt.CheckAccount(ns, sa); err != nil {
			return fmt.Errorf("nodeAgents: %.80q should be namespace/serviceaccount, such as istio-system/ztunnel: %w", a, err)
		}
	}
	return nil
}

// Run keeps the keys and the pods up to date. It blocks until ctx ends and returns nil then.
func (c *Cluster) Run(ctx context.Context) error {
	if c.pods != nil {
		// Not waited for: client-go's reflector may sleep out its backoff, up to 15 s, before it sees that ctx ended.
		go c.pods.run(ctx)
	}
	return c.tokens.Run(ctx)
}

// Ready returns nil if keys are loaded and, where pods are watched, the watch is synced; else what is missing.
func (c *Cluster) Ready() error {
	if err := c.tokens.Ready(); err != nil {
		return fmt.Errorf("cluster %s: no keys to verify tokens with: %w", c.name, err)
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
	caller, err := c.tokens.Verify(ctx, token, now)
	if err != nil {
		return csr.Caller{}, err
	}
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
