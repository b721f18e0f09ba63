package mtls

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// conn is a connection below TLS. It is watched from its handshake until it is closed.
type conn struct {
	net.Conn
	endpoint *Endpoint

	id     trust.ID
	chain  []*x509.Certificate
	role   x509.ExtKeyUsage
	bundle *trust.Bundle // that the chain was verified against last; nil before
	end    time.Time     // of what was verified
	timer  *time.Timer   // for that end
	closed bool          // by its owner: it is watched no more
}

// Listener returns a listener whose connections are watched once a handshake by ServerTLS is through. TLS comes on top of it: by tls.NewListener, by ServeTLS of
// net/http, by the credentials of gRPC.
func (e *Endpoint) Listener(l net.Listener) net.Listener { return listener{l, e} }

type listener struct {
	net.Listener
	endpoint *Endpoint
}

// Accept returns the next connection.
func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, endpoint: l.endpoint}, nil
}

// Client returns a TLS client over a connection, which is watched once the handshake is through. The configuration is one of ClientTLS.
func (e *Endpoint) Client(raw net.Conn, config *tls.Config) *tls.Conn {
	c := &conn{Conn: raw, endpoint: e}
	return tls.Client(c, c.watching(config, x509.ExtKeyUsageServerAuth))
}

// Dial connects to an address and returns once the handshake is through; the connection is watched. It does for DialTLSContext of net/http.
func (e *Endpoint) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	raw, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := e.Client(raw, e.ClientTLS())
	if err := c.HandshakeContext(ctx); err != nil {
		c.NetConn().Close() // not raw: it may be watched already
		return nil, err
	}
	return c, nil
}

// watching returns a configuration for this connection alone.
func (c *conn) watching(config *tls.Config, role x509.ExtKeyUsage) *tls.Config {
	own := config.Clone()
	own.GetConfigForClient = nil
	own.VerifyConnection = func(cs tls.ConnectionState) error { return c.watch(cs.PeerCertificates, role) }
	return own
}

// watch verifies the peer of a handshake, and begins to watch it: before, so that no change of a bundle falls in between.
func (c *conn) watch(chain []*x509.Certificate, role x509.ExtKeyUsage) error {
	if len(chain) == 0 {
		return errors.New("mtls: the peer showed no certificate")
	}
	id, err := trust.LeafID(chain[0])
	if err != nil {
		return err
	}
	e := c.endpoint
	e.mu.Lock()
	closed := c.closed // a handshake may go on for a moment in a connection that is given up
	if !closed {
		c.id, c.chain, c.role = id, chain, role
		e.conns[c] = struct{}{}
	}
	e.mu.Unlock()
	if closed {
		return net.ErrClosed
	}
	if err := e.judge(c); err != nil {
		c.forget()
		return fmt.Errorf("verifying peer: %w", err)
	}
	return nil
}

// Close closes the connection, which is watched no longer.
func (c *conn) Close() error {
	c.endpoint.mu.Lock()
	c.closed = true
	c.endpoint.mu.Unlock()
	c.forget()
	return c.Conn.Close()
}

func (c *conn) forget() bool {
	e := c.endpoint
	e.mu.Lock()
	defer e.mu.Unlock()
	_, watched := e.conns[c]
	delete(e.conns, c)
	if c.timer != nil {
		c.timer.Stop()
	}
	return watched
}

// judge says whether the peer of a connection is still welcome. What was verified against the same roots and CRLs is not verified again before it ends.
func (e *Endpoint) judge(c *conn) error {
	e.mu.Lock()
	last, until := c.bundle, c.end
	e.mu.Unlock()
	bundle := e.config.Bundles(c.id.Domain())
	if last != nil && bundle != nil && !time.Now().After(until) && (bundle == last || bundle.SameRoots(last) && bundle.CRLs().Equal(last.CRLs())) {
		return e.config.Authorize(c.id)
	}
	_, until, err := e.verify(c.chain, c.role)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	c.bundle, c.end = bundle, until
	if c.timer != nil {
		c.timer.Stop()
	}
	if _, open := e.conns[c]; open {
		c.timer = time.AfterFunc(time.Until(until)+time.Millisecond, func() { e.cut(c) }) // at the end itself it is still valid
	}
	return nil
}

// cut closes a connection whose peer is not welcome any more.
func (e *Endpoint) cut(c *conn) {
	err := e.judge(c)
	if err == nil || !c.forget() {
		return
	}
	c.Conn.Close()
	if e.config.Closed != nil {
		e.config.Closed(c.id, c.RemoteAddr(), err)
	}
}

// Recheck judges the peers of all open connections, and closes those that are not welcome any more: to be called when bundles, CRLs or what the
// authorizer goes by have changed.
func (e *Endpoint) Recheck() {
	e.mu.Lock()
	all := make([]*conn, 0, len(e.conns))
	for c := range e.conns {
		all = append(all, c)
	}
	e.mu.Unlock()
	for _, c := range all {
		e.cut(c)
	}
}

// Open returns how many connections are watched.
func (e *Endpoint) Open() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.conns)
}

// Run judges open connections from time to time, for changes that nobody told of, until the context ends. Without it the ends of peers are seen to all the same.
func (e *Endpoint) Run(ctx context.Context) error {
	tick := time.NewTicker(e.config.Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			e.Recheck()
		}
	}
}
