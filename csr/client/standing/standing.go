// Package standing owns which connection stands: that of the Sync stream, to a server that was verified and is there, as long as the
// stream brings something; and for which SVIDs it is used. Renewals that the server asked for go over it. It asks a whole fleet at
// once, and a TLS handshake for each of them would cost the server more than all the certificates, and keep new pods waiting, who
// need one.
//
// It refuses all other calls. They open a connection of their own: that spreads them over the servers, and shows the newest SVID.
package standing

import (
	"bytes"
	"crypto/x509"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client/servers"
)

// maxIssuers bounds how many issuers a server may name whose SVIDs are to be replaced.
const maxIssuers = 32

// Connection is one that stands.
type Connection struct {
	To   servers.Address
	Only bool // there is no other server
	Conn *grpc.ClientConn
}

// Line is where to find it. The zero value has none. It is safe for concurrent use.
type Line struct {
	mu      sync.Mutex // guards all
	current *Connection
	issuers [][]byte // key IDs of those whose SVIDs the server wants to be replaced
}

// Join makes the connection of a stream known, until leave is called.
func (l *Line) Join(c *Connection) (leave func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.current, l.issuers = c, nil
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.current == c {
			l.current, l.issuers = nil, nil
		}
	}
}

// Ask notes which SVIDs the server of the stream wants to be replaced; nil for none.
func (l *Line) Ask(r *chanceryv1.Reissue) {
	all := r.GetIssuers()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.issuers = all[:min(len(all), maxIssuers)]
}

// For returns the connection to replace an SVID over; nil if none stands, or it was not asked for.
func (l *Line) For(leaf *x509.Certificate) *Connection {
	l.mu.Lock()
	defer l.mu.Unlock()
	asked := slices.ContainsFunc(l.issuers, func(id []byte) bool { return bytes.Equal(id, leaf.AuthorityKeyId) })
	if l.current == nil || !asked || l.current.Conn.GetState() != connectivity.Ready {
		return nil
	}
	return l.current
}
