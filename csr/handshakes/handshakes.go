// Package handshakes owns when the server computes for connections that come: about as many TLS handshakes at a time as there
// are processors, those that were begun before those that are new.
//
// A handshake costs more than the certificate that is then asked for. When thousands of agents connect at once, as after an
// outage, and all handshakes go on side by side, each takes as long as all of them: the callers give up before theirs is done,
// all that was computed is thrown away, and they come again. So a new one waits in line before anything is computed for it, and
// is sent away, which costs next to nothing, while its caller still has the patience to come again or to go elsewhere.
//
// It refuses connections that have waited too long. A place is held only while there is something to compute, never while the
// other side is waited for: who connects and says nothing keeps nobody from it.
package handshakes

import (
	"container/list"
	"errors"
	"net"
	"runtime"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
)

// DefaultMaxWait is how long a connection waits for its handshake to be begun: less than agents wait for one (csr/client:
// connectTime).
const DefaultMaxWait = 2 * time.Second

// errBusy is why a connection was closed.
var errBusy = errors.New("too many handshakes at once: this one was not begun in time")

// Config says how many at a time.
type Config struct {
	AtOnce  int           // that are computed; 0 = as many as there are processors for Go
	MaxWait time.Duration // before one is begun; 0 = DefaultMaxWait
	Refused func()        // told of each that was sent away; nil = nobody
}

// Bound returns credentials whose handshakes, as a server, are bounded.
func Bound(inner credentials.TransportCredentials, c Config) credentials.TransportCredentials {
	if c.AtOnce <= 0 {
		c.AtOnce = runtime.GOMAXPROCS(0)
	}
	if c.MaxWait <= 0 {
		c.MaxWait = DefaultMaxWait
	}
	if c.Refused == nil {
		c.Refused = func() {}
	}
	return &bound{inner, &line{free: c.AtOnce}, c}
}

type bound struct {
	credentials.TransportCredentials
	line   *line
	config Config
}

// Clone returns credentials that share the bound.
func (b *bound) Clone() credentials.TransportCredentials {
	return &bound{b.TransportCredentials.Clone(), b.line, b.config}
}

// ServerHandshake does a handshake when there is a place for it.
func (b *bound) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c := &conn{Conn: raw, bound: b, shaking: true}
	out, info, err := b.TransportCredentials.ServerHandshake(c)
	c.end()
	return out, info, err
}

// conn is a connection that holds a place from when something was read until it reads again. Its fields belong to the
// handshake; it is a plain connection after that.
type conn struct {
	net.Conn
	bound   *bound
	shaking bool
	begun   bool
	holds   bool
}

// Read gives up the place while it waits, and takes one once there is something to work on.
func (c *conn) Read(p []byte) (int, error) {
	if !c.shaking {
		return c.Conn.Read(p)
	}
	c.leave()
	n, err := c.Conn.Read(p)
	if err != nil {
		return n, err // nothing left to compute
	}
	if !c.bound.line.enter(c.begun, c.bound.config.MaxWait) {
		c.bound.config.Refused()
		return 0, errBusy
	}
	c.begun, c.holds = true, true
	return n, nil
}

func (c *conn) leave() {
	if c.holds {
		c.holds = false
		c.bound.line.leave()
	}
}

func (c *conn) end() {
	c.leave()
	c.shaking = false
}

// line is where connections wait for a place.
type line struct {
	mu         sync.Mutex // guards all
	free       int
	begun, new list.List // of chan struct{}, closed when the place is handed over
}

// enter waits for a place. One that was begun waits as long as it takes: what was computed for it is not thrown away, and there
// are no more of these than places and answers on their way.
func (l *line) enter(begun bool, most time.Duration) bool {
	l.mu.Lock()
	if l.free > 0 {
		l.free--
		l.mu.Unlock()
		return true
	}
	mine := make(chan struct{})
	if begun {
		l.begun.PushBack(mine)
		l.mu.Unlock()
		<-mine
		return true
	}
	place := l.new.PushBack(mine)
	l.mu.Unlock()
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-mine:
		return true
	case <-timer.C:
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-mine: // at the same moment
		return true
	default:
		l.new.Remove(place)
		return false
	}
}

// leave hands a place over, or frees it.
func (l *line) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, waiting := range []*list.List{&l.begun, &l.new} {
		if first := waiting.Front(); first != nil {
			close(waiting.Remove(first).(chan struct{}))
			return
		}
	}
	l.free++
}
