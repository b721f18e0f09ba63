// Package mtls owns mutual TLS between workloads that hold SPIFFE identities, for programs in Go: configurations for both sides, who may be the peer, and
// the end of connections whose peer may no longer be one.
//
// Whom to trust is asked at each handshake, also where a session is resumed, and again while a connection lasts: a peer whose certificate ends, is
// revoked, or whose root has left the bundle of its trust domain is cut off, however long its stream. Bundles are looked up at that moment, so a rotation
// or a new federation needs no new configuration. Nobody is let in for want of a rule: without an authorizer there is no endpoint, and an authorizer
// that names nobody admits nobody.
//
// It opens no socket but by Dial, and knows nothing of where identities and bundles come from.
package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// Config is what an endpoint is made of.
type Config struct {
	// Own gives the SVID of the moment; nil while there is none.
	Own func() *trust.Identity

	// Bundles gives the bundle of a trust domain, nil for one that is not trusted. An ID is vouched for by the roots of its own trust domain alone.
	Bundles func(trust.Domain) *trust.Bundle

	// Authorize says which peers are welcome.
	Authorize Authorizer

	// Every is how often open connections are judged again besides at their peers' ends and by Recheck (default 30 s).
	Every time.Duration

	// Closed is told of each connection that was closed, and why. It must not block. Nil: nobody is told.
	Closed func(peer trust.ID, remote net.Addr, why error)
}

// Endpoint is a workload as a party of mutual TLS.
type Endpoint struct {
	config Config

	mu    sync.Mutex // guards conns and, of each, what it knows of its peer
	conns map[*conn]struct{}
}

// New returns an endpoint.
func New(c Config) (*Endpoint, error) {
	switch {
	case c.Own == nil:
		return nil, errors.New("mtls: no Own is set, which gives our SVID")
	case c.Bundles == nil:
		return nil, errors.New("mtls: no Bundles is set, which gives the bundles of trust domains")
	case c.Authorize == nil:
		return nil, errors.New("mtls: no Authorize is set; Anyone welcomes each peer of a trusted domain")
	case c.Every < 0:
		return nil, fmt.Errorf("mtls: Every is %s; it should be above 0", c.Every)
	case c.Every == 0:
		c.Every = 30 * time.Second
	}
	return &Endpoint{config: c, conns: map[*conn]struct{}{}}, nil
}

// verify judges a peer's chain in its role, and returns until when the verdict holds.
func (e *Endpoint) verify(chain []*x509.Certificate, role x509.ExtKeyUsage) (trust.ID, time.Time, error) {
	id, paths, err := trust.Verify(chain, e.config.Bundles, time.Now())
	if err != nil {
		return trust.ID{}, time.Time{}, err
	}
	if !trust.ForTLS(chain[0], role) {
		return trust.ID{}, time.Time{}, fmt.Errorf("certificate of %s is not for this role (its extended key usage lacks %s)", id, role.OID())
	}
	if err := e.config.Authorize(id); err != nil {
		return trust.ID{}, time.Time{}, err
	}
	return id, end(paths), nil
}

// end returns when the last of the paths ends, with the first of its certificates.
func end(paths [][]*x509.Certificate) time.Time {
	var last time.Time
	for _, path := range paths {
		first := path[0].NotAfter
		for _, c := range path[1:] {
			if c.NotAfter.Before(first) {
				first = c.NotAfter
			}
		}
		if first.After(last) {
			last = first
		}
	}
	return last
}

// ClientTLS returns a configuration for clients, TLS 1.3 or newer. Host names play no part; ServerName may be set for who routes by it, ClientSessionCache
// for resumption.
func (e *Endpoint) ClientTLS() *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // replaced by VerifyConnection, which knows SPIFFE IDs, and also runs when a session is resumed
		VerifyConnection: func(cs tls.ConnectionState) error {
			if _, _, err := e.verify(cs.PeerCertificates, x509.ExtKeyUsageServerAuth); err != nil {
				return fmt.Errorf("verifying server: %w", err)
			}
			return nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return e.certificate() },
	}
}

// ServerTLS returns a configuration for servers, TLS 1.3 or newer. Protocols (NextProtos) and keys of session tickets are to be set on what is returned, not
// on copies of it. Connections that come through Listener are watched.
func (e *Endpoint) ServerTLS() *tls.Config {
	c := &tls.Config{
		MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAnyClientCert,
		VerifyConnection: func(cs tls.ConnectionState) error {
			if _, _, err := e.verify(cs.PeerCertificates, x509.ExtKeyUsageClientAuth); err != nil {
				return fmt.Errorf("verifying client: %w", err)
			}
			return nil
		},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return e.certificate() },
	}
	// A ticket of a peer that is no longer welcome is passed over, so that the peer must show what it has now. Refused once the session is resumed, a client
	// that has renewed long ago would come with the same ticket again and again.
	c.WrapSession = func(cs tls.ConnectionState, s *tls.SessionState) ([]byte, error) {
		s.Extra = append(s.Extra, append([]byte(ticketPrefix), trust.ConcatDER(cs.PeerCertificates)...))
		return c.EncryptTicket(cs, s)
	}
	c.UnwrapSession = func(ticket []byte, cs tls.ConnectionState) (*tls.SessionState, error) {
		s, err := c.DecryptTicket(ticket, cs)
		if err != nil || s == nil {
			return nil, nil // not one of ours
		}
		if _, _, err := e.verify(ticketChain(s), x509.ExtKeyUsageClientAuth); err != nil {
			return nil, nil
		}
		return s, nil
	}
	c.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if watched, ok := hello.Conn.(*conn); ok && watched.endpoint == e {
			return watched.watching(c, x509.ExtKeyUsageClientAuth), nil
		}
		return nil, nil
	}
	return c
}

// ticketPrefix begins what a session ticket holds of ours: the peer's chain, which crypto/tls keeps to itself.
const ticketPrefix = "chancery peer v1\n"

func ticketChain(s *tls.SessionState) []*x509.Certificate {
	for _, extra := range s.Extra {
		if len(extra) > len(ticketPrefix) && string(extra[:len(ticketPrefix)]) == ticketPrefix {
			chain, err := x509.ParseCertificates(extra[len(ticketPrefix):])
			if err == nil {
				return chain
			}
		}
	}
	return nil // which does not verify
}

func (e *Endpoint) certificate() (*tls.Certificate, error) {
	own := e.config.Own()
	if own == nil {
		return nil, errors.New("mtls: there is no SVID yet")
	}
	return own.TLSCertificate(), nil
}

// Peer returns the ID that the peer of a connection showed.
func Peer(cs tls.ConnectionState) (trust.ID, error) {
	if len(cs.PeerCertificates) == 0 {
		return trust.ID{}, errors.New("mtls: the peer showed no certificate")
	}
	return trust.LeafID(cs.PeerCertificates[0])
}
