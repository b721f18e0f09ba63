package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client/servers"
	"github.com/chancery-project/chancery/trust"
)

const (
	// fetchTime bounds a call of GetBundle, and fetchEvery is how long after one the next may come.
	fetchTime  = 5 * time.Second
	fetchEvery = 5 * time.Second
)

// dial makes a connection to a server that shows what own is. Why a server could not be verified is left in untrusted.
func (c *Client) dial(a servers.Address, own *trust.Identity, untrusted *atomic.Pointer[servers.Untrusted]) (*grpc.ClientConn, error) {
	bundle, err := c.serverBundle()
	if err != nil {
		return nil, err
	}
	config := trust.ClientTLS(trust.SystemID(c.config.Domain, "server"), bundle.Of, func() *trust.Identity { return own })
	config.VerifyConnection = func(cs tls.ConnectionState) error {
		err := servers.Verify(cs.PeerCertificates, bundle)
		if servers.MayBeTrusted(err, cs.PeerCertificates, bundle) {
			untrusted.Store(&servers.Untrusted{Cause: err, File: c.config.RootsAt})
		}
		return err
	}
	return c.open(a, config)
}

func (c *Client) open(a servers.Address, config *tls.Config) (*grpc.ClientConn, error) {
	target, options := "passthrough:///"+a.Addr, []grpc.DialOption{grpc.WithNoProxy(), grpc.WithAuthority(a.Name)}
	if servers.ViaProxy(a.Name) {
		target, options = a.Name, nil
	}
	conn, err := grpc.NewClient(target, append(options, grpc.WithReadBufferSize(bufferSize), grpc.WithWriteBufferSize(bufferSize),
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window), grpc.WithTransportCredentials(credentials.NewTLS(config)),
		// A stream is silent nearly always: a server that is gone without a word would not be missed otherwise.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}))...)
	if err != nil {
		return nil, fmt.Errorf("connecting to server %s: %w", a, err)
	}
	return conn, nil
}

// serverBundle returns the roots that vouch for a server: the configured ones, and those of the newest bundle. The file may lag
// behind a rotation that the answers have followed, or be ahead of one that this agent slept through. What has left the bundle
// vouches for nobody, though the file may have it still: its key may be another's by now (decision D6).
func (c *Client) serverBundle() (*trust.Bundle, error) {
	roots, err := c.config.Roots()
	c.mu.Lock()
	last := c.last
	c.mu.Unlock()
	known := c.config.Anchor.Bundle()
	if err != nil && last == nil && known == nil {
		return nil, err
	}
	roots = slices.DeleteFunc(slices.Clone(roots), c.config.Anchor.HasLeft) // what the source returned stays its own
	var crls *trust.CRLs
	if last != nil {
		crls = last.CRLs() // a server whose certificate was revoked is none
	}
	if known != nil { // then last is no newer
		last = known
	}
	if last == nil {
		return trust.NewBundle(c.config.Domain, 0, roots)
	}
	bundle, err := servers.Join(c.config.Domain, last, roots)
	if err != nil {
		return nil, err
	}
	return bundle.WithCRLs(crls), nil
}

// recover asks a server that could not be verified for the bundle, and reports whether it has brought new roots, by the word of the
// pinned key. Where none is pinned yet the server may be one of another trust domain of the line: see introduce. The server is told nothing:
// neither a token nor a certificate is shown to it.
func (c *Client) recover(ctx context.Context, a servers.Address, cause error) bool {
	pinned := c.config.Anchor.Pinned()
	if _, unknown := errors.AsType[x509.UnknownAuthorityError](cause); unknown && !pinned { // it says that it is of the configured domain
		return false
	}
	c.mu.Lock()
	soon := time.Since(c.fetched) < fetchEvery
	if !soon {
		c.fetched = time.Now()
	}
	c.mu.Unlock()
	if soon {
		return false
	}
	news, err := false, error(nil)
	if !pinned {
		if err = c.introduce(ctx, a); err != nil {
			c.config.Logger.Warn("no bundle key is pinned yet, and this server is not one of the configured trust domain, nor can it show that it has taken its place",
				"server", a.String(), "trust_domain", c.config.Domain.String(), "reason", err.Error())
		}
		return err == nil
	}
	signed, err := c.fetchBundle(ctx, a, nil) // the signature is what counts
	if err == nil {
		news, err = c.config.Anchor.Offer(signed)
	}
	if err != nil {
		c.config.Logger.Warn("a server whose certificate is under no known root brings no roots that could be believed", "server", a.String(), "reason", err.Error())
		return false
	}
	if news {
		c.config.Logger.Info("roots that the pinned bundle key has signed came from a server that could not be verified before",
			"server", a.String(), "generation", c.config.Anchor.Bundle().Generation())
	}
	return news
}

// fetchBundle asks a server for the bundle and tells it nothing.
func (c *Client) fetchBundle(ctx context.Context, a servers.Address, verify func(tls.ConnectionState) error) (*chanceryv1.SignedBundle, error) {
	ctx, cancel := context.WithTimeout(metadata.NewOutgoingContext(ctx, metadata.MD{}), fetchTime)
	defer cancel()
	conn, err := c.open(a, &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, VerifyConnection: verify})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return chanceryv1.NewIssuanceClient(conn).GetBundle(ctx, &chanceryv1.GetBundleRequest{}, grpc.MaxCallRecvMsgSize(trust.MaxSignedBundle+4<<10))
}

// introduce pins the bundle key of a server of another trust domain than the configured one. In a migration servers take the next domain's name
// while agents that come anew may still be told the old one, or have been told the next one already. The configured roots vouch for the server, as
// for one of the configured domain; and its bundle has to say that both domains are of one authority, with roots that vouch for just this server.
func (c *Client) introduce(ctx context.Context, a servers.Address) error {
	roots, err := c.config.Roots()
	if err != nil {
		return err
	}
	var shown atomic.Pointer[tls.ConnectionState]
	signed, err := c.fetchBundle(ctx, a, func(cs tls.ConnectionState) error {
		err := servers.VerifyAny(cs.PeerCertificates, roots)
		if err == nil {
			shown.Store(&cs)
		}
		return err
	})
	if err != nil {
		return err
	}
	return c.config.Anchor.Introduce(signed, func(b *trust.Bundle) error { return servers.Verify(shown.Load().PeerCertificates, b) })
}
