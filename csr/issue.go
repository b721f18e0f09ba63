package csr

import (
	"context"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/revocation"
	"github.com/chancery-project/chancery/csr/admission"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/answers"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/csr/lines"
	"github.com/chancery-project/chancery/trust"
)

// Config is what a Service is made of.
type Config struct {
	Domain  trust.Domain
	Present func() trust.Domain // the domain of callers by token, where a migration may change it; nil: Domain
	// Issuers returns what signs at the moment; an error means not ready. Issuer is for who has one trust domain; one of both is set.
	Issuers   func() (*held.Pair, error)
	Issuer    func() (*ca.Issuer, error)
	Aliases   []trust.Domain           // identities of which count as ours where a request names one; none is ever issued
	Profile   *ca.Profile              // of workload certificates
	Clusters  map[string]ClusterConfig // by name, as in the metadata clusterid
	Admission admission.Config
	Log       *audit.Log
	Sampler   *ca.Sampler
	Logger    *slog.Logger
	Metrics   *Metrics
	// Revocations returns what is revoked at the moment; nil for nothing, ever.
	Revocations func() *revocation.Set
	Agents      *agents.Hub     // whom Sync serves; nil for one that never has anything to send
	Checkpoints func() []string // of the issuance logs, sent along with native answers (decision D21); nil for none
	// Bundles are what GetBundle answers with, and what native answers carry (decision D6); nil for none.
	Bundles *answers.Bundles
	// Tainted reports whether the key of a root or an issuer is tainted (decision D16); nil if none ever is.
	Tainted func(*x509.Certificate) bool
	// MaxConnectionAge is how old a connection gets before its caller is asked to open another one, give or take a tenth; Sync
	// streams end before. 0 = agents.DefaultMaxAge.
	MaxConnectionAge time.Duration
	// DrainDelay is how long a server that is to stop serves on as before, while it says that it is not ready: so long balancers
	// may take to notice. 0 = not at all.
	DrainDelay time.Duration
}

// Service answers certificate requests. Its methods are safe for concurrent use.
type Service struct {
	present     func() trust.Domain
	issuers     func() (*held.Pair, error)
	aliases     []trust.Domain
	profile     *ca.Profile
	clusters    map[string]ClusterConfig
	admission   *admission.Admission
	log         *audit.Log
	sampler     *ca.Sampler
	logger      *slog.Logger
	metrics     *Metrics
	denials     *rate.Limiter // of audit records that anybody on the network can cause
	faults      *rate.Limiter // of audit records on faults of ours
	chains      lines.Cache
	bundles     *answers.Bundles
	tainted     func(*x509.Certificate) bool
	revocations func() *revocation.Set
	agents      *agents.Hub
	ledger      *evidence.Ledger
	checkpoints func() []string
	maxAge      time.Duration // of connections
	drainDelay  time.Duration
}

// NewService returns a service.
func NewService(c Config) (*Service, error) {
	if len(c.Clusters) == 0 {
		return nil, errors.New("no clusters configured: nobody could ask for a certificate")
	}
	if c.Present == nil {
		c.Present = func() trust.Domain { return c.Domain }
	}
	if c.Issuers == nil {
		c.Issuers = alone(c.Issuer)
	}
	if c.Revocations == nil {
		c.Revocations = func() *revocation.Set { return nil }
	}
	if c.Checkpoints == nil {
		c.Checkpoints = func() []string { return nil }
	}
	if c.Tainted == nil {
		c.Tainted = func(*x509.Certificate) bool { return false }
	}
	if c.Agents == nil {
		c.Agents = agents.New(agents.Config{})
	}
	if c.MaxConnectionAge <= 0 {
		c.MaxConnectionAge = agents.DefaultMaxAge
	}
	return &Service{
		maxAge: c.MaxConnectionAge, drainDelay: c.DrainDelay,
		revocations: c.Revocations, agents: c.Agents, ledger: c.Agents.Ledger(), checkpoints: c.Checkpoints, bundles: c.Bundles, tainted: c.Tainted,
		present: c.Present, issuers: c.Issuers, aliases: c.Aliases, profile: c.Profile, clusters: c.Clusters, admission: admission.New(c.Admission),
		log: c.Log, sampler: c.Sampler, logger: c.Logger, metrics: c.Metrics, denials: rate.NewLimiter(100, 1000), faults: rate.NewLimiter(100, 1000),
	}, nil
}

// alone makes what signs of one issuer.
func alone(issuer func() (*ca.Issuer, error)) func() (*held.Pair, error) {
	var last atomic.Pointer[held.Pair]
	return func() (*held.Pair, error) {
		i, err := issuer()
		if err != nil {
			return nil, err
		}
		p := last.Load()
		if p == nil || p.First.Issuer != i {
			p = held.Alone(i)
			last.Store(p)
		}
		return p, nil
	}
}

// requester is what the audit log says of who asked.
func (c caller) requester() audit.Requester {
	return audit.Requester{
		Remote: c.remote, Method: c.Method, SPIFFEID: c.ID.String(), Cluster: c.Cluster, Namespace: c.Namespace,
		ServiceAccount: c.ServiceAccount, Pod: c.PodName, PodUID: c.PodUID, Node: c.Node, CredentialID: c.CredentialID,
	}
}

// place names the caller's node for admission; nodes of two clusters may have one name. Empty if the node is not known.
func (c caller) place() string {
	if c.Node == "" {
		return ""
	}
	return c.Cluster + "/" + c.Node
}

// ask is one certificate asked for, whatever the API.
type ask struct {
	csr      []byte // DER
	identity string // empty: the caller's own
	lifetime time.Duration
	api      string
	agent    []byte // whose table the certificate will be in; empty for a client that keeps none
}

// issue decides on one request of an authenticated caller and has it signed, by the issuer of the call.
func (s *Service) issue(ctx context.Context, call *lines.Call, c caller, a ask) (*answers.Chains, *ca.Certificate, trust.ID, *Denial) {
	if d := s.admit(ctx, c); d != nil {
		return nil, nil, trust.ID{}, d
	}
	defer s.admission.Release()
	g, d := s.identity(ctx, call, c, a)
	if d != nil {
		return nil, nil, trust.ID{}, d
	}
	id := g.id
	if d := s.stillAllowed(id, c); d != nil {
		return nil, nil, id, d
	}
	pub, d := parseCSR(a.csr, id, func(name string) bool { return call.Says(name, id, s.aliases) })
	if d != nil {
		return nil, nil, id, d
	}
	issuer, err := s.reserve(ctx, g.by.Issuer(), a.lifetime)
	if err != nil {
		return nil, nil, id, notReady(err)
	}
	token, err := issuer.Prepare(s.profile, ca.Request{
		ID: id, PublicKey: pub, TTL: a.lifetime, Attestation: g.att, Requester: c.requester(),
	})
	if err != nil {
		return nil, nil, id, refusal(err)
	}
	cert, err := issuer.Issue(ctx, token)
	if err != nil {
		return nil, nil, id, refusal(err)
	}
	s.sampler.Offer(cert)
	s.agents.Issued(a.api, id.String(), cert.NotAfter)
	s.note(c, g, a.agent, g.by.Leaf(cert))
	return g.by, cert, id, nil
}

// reserve has other servers told of the life that a certificate will have, or returns an issuer with which it is shorter.
func (s *Service) reserve(ctx context.Context, i *ca.Issuer, asked time.Duration) (*ca.Issuer, error) {
	end := time.Now().Add(s.profile.Lifetime(asked) + time.Second) // it is signed in a moment
	if i.NotAfter().Before(end) {
		end = i.NotAfter()
	}
	until, err := s.ledger.Reserve(ctx, end)
	if err == nil && !until.IsZero() {
		i = i.Until(until)
	}
	return i, err
}

// note tells the ledger who was given a certificate (decisions D1 and D3).
func (s *Service) note(c caller, g grant, agent []byte, leaf evidence.Leaf) {
	if len(agent) > 0 {
		s.ledger.ToAgent(c.ID.String(), agent, leaf)
		return
	}
	who := evidence.Client{Cluster: c.Cluster, Pod: c.attestation.PodHash, Identity: g.id.String(), Caller: c.ID.String(), Place: c.place(), Remote: c.remote, Exact: g.exact}
	if c.shown != nil {
		who.Shown = hex.EncodeToString(c.shown.SerialNumber.Bytes())
	}
	s.ledger.ToClient(who, leaf)
}

func revoked(id trust.ID) *Denial {
	return &Denial{Code: codes.PermissionDenied, Reason: ReasonRevoked, Detail: fmt.Sprintf("%s is revoked; it gets no certificate before an admin restores it", id)}
}

// refusal maps the errors of package ca.
func refusal(err error) *Denial {
	switch {
	case errors.Is(err, ca.ErrKey):
		return badCSR("%v", err)
	case errors.Is(err, ca.ErrName):
		return notAllowed("%v", err)
	case errors.Is(err, ca.ErrNotReady):
		return notReady(err)
	}
	return &Denial{Code: codes.Internal, Reason: ReasonInternal, Detail: err.Error()}
}

// denied puts a refusal into audit log and server log. Nothing was signed, so nobody waits for the disk; and since
// anybody can cause refusals, their number in the log is bounded: the metrics count them all. Faults of ours have a
// bound of their own, so that strangers cannot hide them.
func (s *Service) denied(c caller, asked string, d *Denial) {
	bound, level := s.denials, slog.LevelInfo
	if d.Code == codes.Internal || d.Code == codes.Unavailable {
		bound, level = s.faults, slog.LevelError
	}
	if !bound.Allow() {
		s.metrics.deniedUnlogged.Inc()
		return
	}
	who := c.requester()
	err := s.log.Note(audit.Record{
		Event: audit.Denied, SPIFFEID: shorten(asked), Reason: d.Reason, Detail: shorten(d.Detail), Requester: who,
	})
	if err != nil {
		s.logger.Error("refusal not written to the audit log", "reason", err.Error())
	}
	s.logger.Log(context.Background(), level, "certificate request refused", "reason", d.Reason, "detail", shorten(d.Detail),
		"remote", who.Remote, "spiffe_id", who.SPIFFEID, "asked", shorten(asked))
}

// shorten bounds text that came from the network before it goes into a log.
func shorten(s string) string {
	const most = 500
	if len(s) <= most {
		return s
	}
	return s[:most] + "..."
}

// outcome is the metric label of a result.
func outcome(d *Denial) string {
	if d == nil {
		return "ok"
	}
	return d.Reason
}

// status makes the gRPC status of a refusal: the message, the stable reason, and when to try again.
func (d *Denial) status(message string) error {
	st, err := status.New(d.Code, message).WithDetails(d.details()...)
	if err != nil { // only for code OK, which no denial has
		return status.Error(d.Code, message)
	}
	return st.Err()
}
