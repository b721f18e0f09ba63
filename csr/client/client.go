// Package client owns the agent's side of the CSR endpoint: one call that turns a key into a certificate, and a stream
// that brings roots, CRLs and the checkpoints of issuance logs.
//
// Each call reads the token and the server's roots again, so that neither can go stale in memory, and opens a
// connection of its own, so that the newest SVID authenticates it: to one of the servers, drawn for each call, and to the
// next one if the first cannot do it. Only where the one server is busy the connection is kept for the next try; and what a server
// asks for over the stream, to replace an SVID before its time, is got over the stream's connection. It refuses a server that is
// not spiffe://TD/chancery/server (decision D15), TD being one of the authority's trust domains, whatever its host name, and CRLs that it cannot verify; and never logs or
// returns a token.
package client

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/csr/client/foreign"
	"github.com/chancery-project/chancery/csr/client/naming"
	"github.com/chancery-project/chancery/csr/client/servers"
	"github.com/chancery-project/chancery/csr/client/source"
	"github.com/chancery-project/chancery/csr/client/standing"
	"github.com/chancery-project/chancery/trust"
)

// bufferSize of reads and writes: little is said on a connection, and gRPC's 64 kB would be for nothing.
const bufferSize = 4 << 10

// window is what a server may send unread; more where a message is larger. gRPC's own grows by a measure for which it sends a ping along
// with nearly each message, which costs a server of thousands of agents as much as what it has to say.
const window = 256 << 10

// Config says whom to ask, and as whom.
type Config struct {
	Servers  []string                                  // host:port each; a name may have several addresses, looked up for each call
	Domain   trust.Domain                              // of the server, before there is a bundle: that may name another one
	Roots    func() ([]*x509.Certificate, error)       // that vouch for the server; called for each connection
	Token    func(ctx context.Context) (string, error) // called for each request; nil or "" = no token
	Cluster  string                                    // sent as clusterid; empty = not sent
	ID       trust.ID                                  // to ask for
	TTL      time.Duration                             // to ask for; 0 = the server's default
	Current  func() *trust.Identity                    // the SVID to show to the server; nil result = none
	Logger   *slog.Logger                              // nil = nothing is logged
	Metrics  *Metrics                                  // nil = nothing is counted
	Anchor   *anchor.Anchor                            // what is kept over restarts; nil = nothing is
	Foreign  *foreign.Domains                          // likewise, of foreign trust domains; nil = they are nobody's business
	Naming   *naming.Table                             // which services are asked for; nil = none
	Agent    []byte                                    // 16 bytes, which name the table of consumers; nil = none is kept
	RootsAt  string                                    // what to call the place of Roots in a message
	Resolver *net.Resolver                             // of the names of Servers; nil = net.DefaultResolver

	behind time.Duration // how long Sync stays with a server that is behind another; 0 = behindTime
}

// Client asks for certificates. It is safe for concurrent use.
type Client struct {
	config  Config
	servers servers.Servers
	line    standing.Line

	mu          sync.Mutex               // guards all below
	last        *trust.Bundle            // with the newest CRLs; nil before the first
	fetched     time.Time                // when a bundle was last asked of a server that could not be verified
	kept        *kept                    // nil for none
	checkpoints logs                     // that were seen last
	mark        *chanceryv1.DocumentMark // the highest that was seen
}

// New returns a client.
func New(c Config) *Client {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Metrics == nil {
		c.Metrics = NewMetrics(nil)
	}
	if c.Anchor == nil {
		c.Anchor, _ = anchor.Open(anchor.Config{Domain: c.Domain, Logger: c.Logger}) // in memory there is nothing to fail
	}
	return &Client{config: c, servers: servers.Servers{Names: c.Servers, Resolver: c.Resolver}, last: c.Anchor.Bundle()}
}

// Refused is the server's refusal of a request.
type Refused struct {
	Code    codes.Code
	Reason  string
	Message string
	After   time.Duration // how long to wait before another try; 0 = not said
}

// Error says that and why the server refused.
func (r *Refused) Error() string {
	return fmt.Sprintf("refused by the server: %s (%s, %s)", r.Message, r.Reason, r.Code)
}

// RetryAfter returns how long the server asked to wait.
func (r *Refused) RetryAfter() time.Duration { return r.After }

// Issue asks for one certificate for the key and returns what the server answered, not yet verified: the chain, leaf
// first, and the bundle.
func (c *Client) Issue(ctx context.Context, key crypto.Signer) ([]*x509.Certificate, *trust.Bundle, error) {
	der, err := c.csr(key)
	if err != nil {
		return nil, nil, err
	}
	req := &chanceryv1.CertificateRequest{Csr: der, SpiffeId: c.config.ID.String()}
	if c.config.TTL > 0 {
		req.Lifetime = durationpb.New(c.config.TTL)
	}
	var chain []*x509.Certificate
	var bundle *trust.Bundle
	ctx, who, err := c.withCredentials(ctx)
	if err != nil {
		return nil, nil, err
	}
	if who.own != nil {
		req.ReplacesUntil = timestamppb.New(who.own.NotAfter())
	}
	do := func(ctx context.Context, conn *grpc.ClientConn, t turn) error {
		ctx, cancel := t.answer(ctx)
		defer cancel()
		known := c.seen()
		resp, err := chanceryv1.NewIssuanceClient(conn).Issue(ctx, &chanceryv1.IssueRequest{Requests: []*chanceryv1.CertificateRequest{req}, Agent: c.config.Agent})
		if err != nil {
			return refusedBy(err)
		}
		c.seeCheckpoints(resp.GetCheckpoints(), known)
		chain, bundle, err = c.read(resp)
		return err
	}
	settled := false
	if s := c.standing(who); s != nil {
		settled, err = c.overStanding(ctx, s, do)
	}
	if !settled {
		err = c.askAll(ctx, who.own, do)
	}
	if err != nil {
		return nil, nil, err
	}
	return chain, bundle, nil
}

// valid returns the SVID to show, if it has not ended.
func (c *Client) valid() *trust.Identity {
	if c.config.Current == nil {
		return nil
	}
	if own := c.config.Current(); own != nil && time.Now().Before(own.NotAfter()) {
		return own
	}
	return nil
}

// token returns the token to send. One that has run out is not sent: with an SVID the call goes by certificate, and
// without one the error says what is wrong with which token, instead of a refusal by the server.
func (c *Client) token(ctx context.Context, haveSVID bool) (string, error) {
	if c.config.Token == nil {
		return "", nil
	}
	token, err := c.config.Token(ctx)
	if err == nil {
		if end, ok := source.Expiry(token); ok && time.Now().After(end) {
			err = fmt.Errorf("the token ended at %s; is it still being refreshed?", end.UTC().Format(time.RFC3339))
		}
	}
	if err != nil && haveSVID {
		// The server will not take the certificate for ever: say so while there is time.
		c.config.Logger.Warn("no token to send; calling by certificate while the server allows it", "spiffe_id", c.config.ID.String(), "reason", err.Error())
		return "", nil
	}
	return token, err
}

func (c *Client) csr(key crypto.Signer) ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{c.config.ID.URL()}}, key)
	if err != nil {
		return nil, fmt.Errorf("making CSR: %w", err)
	}
	return der, nil
}

func (c *Client) read(resp *chanceryv1.IssueResponse) ([]*x509.Certificate, *trust.Bundle, error) {
	if n := len(resp.GetResults()); n != 1 {
		return nil, nil, fmt.Errorf("the server answered one request with %d results", n)
	}
	result := resp.GetResults()[0]
	if r := result.GetRefusal(); r != nil {
		return nil, nil, &Refused{codes.Code(r.GetCode()), r.GetReason(), r.GetMessage(), r.GetRetryAfter().AsDuration()}
	}
	chain, err := anchor.Certificates(result.GetCertificate().GetChain())
	if err != nil {
		return nil, nil, fmt.Errorf("reading certificate: %w", err)
	}
	bundle, err := c.config.Anchor.TakeAnswer(chain, resp.GetBundle(), resp.GetSignedBundle())
	if err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var crls *trust.CRLs // only Sync brings them
	if c.last != nil {
		crls = c.last.CRLs()
	}
	if c.last == nil || bundle.Generation() >= c.last.Generation() || !c.config.Anchor.Pinned() {
		c.last = bundle.WithCRLs(crls)
	}
	return chain, bundle, nil
}

// refusedBy turns a status with our details into a Refused.
func refusedBy(err error) error {
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	r := &Refused{Code: st.Code(), Message: st.Message()}
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			r.Reason = d.GetReason()
		case *errdetails.RetryInfo:
			r.After = d.GetRetryDelay().AsDuration()
		}
	}
	if r.Reason == "" { // not the server's word, but the connection's: its text says what is wrong
		return fmt.Errorf("asking the server: %w", err)
	}
	return r
}
