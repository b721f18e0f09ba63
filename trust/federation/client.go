package federation

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// Bounds of a fetch.
const (
	// Timeout is how long a fetch may take, redirects and body included.
	Timeout = 10 * time.Second
	// MaxBody is how large a bundle may be, as it comes.
	MaxBody = 1 << 20

	maxHeader    = 64 << 10
	maxRedirects = 5
)

// ClientConfig is what a Client is made of.
type ClientConfig struct {
	Relationship Relationship
	// Roots returns those by which Web verifies the endpoint; nil, or one that returns nil: the system's. It is asked for each fetch.
	Roots func() (*x509.CertPool, error)
	// Bundle returns the bundle by which SPIFFE verifies an endpoint of a trust domain: of a self-serving one, what it served last, or
	// what it is bootstrapped with. Nil: there is none. It is asked for each fetch.
	Bundle func(trust.Domain) (*trust.Bundle, error)
}

// Client fetches the bundle of one relationship. It may be used by several at a time.
type Client struct {
	config ClientConfig
	dial   func(ctx context.Context, network, address string) (net.Conn, error)

	mu   sync.Mutex // guards both: what the endpoint answered last, so that it may answer that this still holds
	tag  string     // an entity tag; empty for none
	last *spiffebundle.Bundle
}

// NewClient checks the relationship.
func NewClient(c ClientConfig) (*Client, error) {
	if err := c.Relationship.Check(); err != nil {
		return nil, err
	}
	return &Client{config: c, dial: new(net.Dialer).DialContext}, nil
}

// Relationship returns what the client fetches.
func (c *Client) Relationship() Relationship { return c.config.Relationship }

// Fetch returns the bundle as the endpoint serves it now. Of what it costs the endpoint little is asked for: one that has not changed
// need not be sent again, and is returned as it was.
func (c *Client) Fetch(ctx context.Context) (*spiffebundle.Bundle, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	b, err := c.fetch(ctx)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("it did not answer within %s: %w", Timeout, err)
	}
	if err != nil {
		return nil, fmt.Errorf("bundle endpoint of %s: %w", c.config.Relationship.Domain, err)
	}
	return b, nil
}

func (c *Client) fetch(ctx context.Context) (*spiffebundle.Bundle, error) {
	config, err := c.tls()
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.config.Relationship.URL, nil)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	tag, last := c.tag, c.last
	c.mu.Unlock()
	req.Header.Set("Accept", "application/json")
	if tag != "" {
		req.Header.Set("If-None-Match", tag)
	}
	resp, err := c.client(config).Do(req)
	if err != nil {
		return nil, c.explain(err)
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotModified && tag != "":
		return last, nil
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answered with HTTP status %d %s; a bundle comes with 200", resp.Request.URL.Redacted(), resp.StatusCode, http.StatusText(resp.StatusCode))
	}
	b, err := c.read(resp)
	if err != nil {
		return nil, fmt.Errorf("what %s answered: %w", resp.Request.URL.Redacted(), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tag, c.last = resp.Header.Get("ETag"), b; len(c.tag) > maxTag {
		c.tag = ""
	}
	return b, nil
}

// explain names the address that failed, without user information that a redirect may have had, and says what to do about an endpoint that
// nothing vouches for. That is never done here: who answers there may be anybody.
func (c *Client) explain(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		at := c.config.Relationship.URL
		if u, err := url.Parse(e.URL); err == nil && u.Host != "" {
			u.User = nil
			at = u.String()
		}
		err = fmt.Errorf("%s: %w", at, e.Err)
	}
	if _, unknown := errors.AsType[x509.UnknownAuthorityError](err); unknown && c.config.Relationship.SelfServing() {
		return fmt.Errorf("%w; if that trust domain has replaced its roots meanwhile, get its bundle by other means and `chancery trust import` it", err)
	}
	return err
}

// maxTag bounds an entity tag that is sent back.
const maxTag = 1 << 10

func (c *Client) read(resp *http.Response) (*spiffebundle.Bundle, error) {
	data, err := io.ReadAll(io.LimitReader(resp.Body, MaxBody+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading it: %w", err)
	case len(data) > MaxBody:
		return nil, fmt.Errorf("it has more than %d bytes; that is no bundle", MaxBody)
	}
	b, err := spiffebundle.Parse(c.config.Relationship.Domain, data)
	if err != nil {
		if kind := resp.Header.Get("Content-Type"); kind != "" && kind != "application/json" { // such as a page of a proxy
			return nil, fmt.Errorf("%w (its Content-Type is %.80q)", err, kind)
		}
		return nil, err
	}
	return b, nil
}

// client is made for each fetch: they are minutes apart, and trust may have changed.
func (c *Client) client(config *tls.Config) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			TLSClientConfig: config, DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxHeader,
			Proxy: http.ProxyFromEnvironment, DialContext: c.dial, ForceAttemptHTTP2: true,
		},
		// A redirect is temporary, whatever its status says: the next fetch begins at the URL that was configured (section 5.1).
		CheckRedirect: func(r *http.Request, via []*http.Request) error {
			if len(via) > maxRedirects {
				return fmt.Errorf("it redirects more than %d times", maxRedirects)
			}
			if err := checkURL(r.URL); err != nil {
				return fmt.Errorf("it redirects to a URL that is none of an endpoint: %w", err)
			}
			return nil
		},
	}
}

// tls says how the endpoint is verified, and each that it redirects to: by the same profile and, for SPIFFE, as the same ID.
func (c *Client) tls() (*tls.Config, error) {
	r := c.config.Relationship
	if r.Profile == Web {
		config := &tls.Config{MinVersion: tls.VersionTLS12}
		if c.config.Roots == nil {
			return config, nil
		}
		var err error
		config.RootCAs, err = c.config.Roots()
		return config, err
	}
	b, err := c.config.Bundle(r.EndpointID.Domain())
	switch {
	case err != nil:
		return nil, err
	case b == nil && r.SelfServing():
		return nil, fmt.Errorf("there is no bundle of %s yet to verify it by; set bootstrap to a file with one, or `chancery trust import` it", r.Domain)
	case b == nil:
		return nil, fmt.Errorf("there is no bundle of %s to verify it by, whose SVID it is to have; federate with that trust domain, too", r.EndpointID.Domain())
	}
	config := trust.ClientTLS(r.EndpointID, trust.Only(b), func() *trust.Identity { return nil }) // a client has nothing to prove (section 4.1)
	config.MinVersion = tls.VersionTLS12                                                          // other implementations have no more
	return config, nil
}
