package client

import (
	"context"
	"crypto/tls"
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
// pinned key. The server is told nothing: neither a token nor a certificate is shown to it.
func (c *Client) recover(ctx context.Context, a servers.Address) bool {
	if !c.config.Anchor.Pinned() {
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
	ctx, cancel := context.WithTimeout(metadata.NewOutgoingContext(ctx, metadata.MD{}), fetchTime)
	defer cancel()
	conn, err := c.open(a, &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}) // the signature is what counts
	if err != nil {
		return false
	}
	defer conn.Close()
	signed, err := chanceryv1.NewIssuanceClient(conn).GetBundle(ctx, &chanceryv1.GetBundleRequest{}, grpc.MaxCallRecvMsgSize(trust.MaxSignedBundle+4<<10))
	news := false
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
