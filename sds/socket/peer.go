// Package socket owns the agent's Unix socket: opening it without taking it from a live process, and learning from
// the kernel which process is at the other end of a connection.
//
// It refuses to say who a peer is where the kernel does not vouch for it. What a peer may have is not its business.
package socket

import (
	"context"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// Peer is the process at the other end of a connection, as the kernel noted it when the connection was made.
type Peer struct {
	UID, GID uint32
	PID      int32 // in our PID namespace; 0 if the peer is not visible from there

	// Start tells processes apart that had the same PID one after the other: when the process was started, in clock ticks
	// since the machine was. Where that cannot be known it is a number of this connection alone, with the highest bit set.
	Start uint64

	// PIDFD refers to that very process, even after its PID has been given to another. It is closed with the
	// connection; use it through SyscallConn. Nil where the kernel has no SO_PEERPIDFD (before Linux 6.5) or the
	// process had already ended.
	PIDFD *os.File
}

// Credentials are gRPC server credentials that add no security, but learn from the kernel who connects.
type Credentials struct {
	Limit *Limit // of connections; nil = none
}

// ServerHandshake asks the kernel for the peer's credentials.
func (cr Credentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	p, err := peerOfConn(c)
	if err != nil {
		return nil, nil, err
	}
	if err := cr.Limit.enter(p.UID); err != nil {
		if p.PIDFD != nil {
			p.PIDFD.Close()
		}
		return nil, nil, err
	}
	c = &peerConn{Conn: c, peer: p, limit: cr.Limit}
	return c, Info{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, p}, nil
}

// ClientHandshake is not supported: these credentials are for the server.
func (Credentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("peer credentials are for servers only")
}

// Info names the protocol.
func (Credentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix_peercred"}
}

// Clone returns the same credentials; they have no state.
func (c Credentials) Clone() credentials.TransportCredentials { return c }

// OverrideServerName does nothing on a server.
func (Credentials) OverrideServerName(string) error { return nil }

// peerConn gives back what its peer holds when it is closed.
type peerConn struct {
	net.Conn
	peer  Peer
	limit *Limit
	once  sync.Once
}

// Close closes the connection and the peer's pidfd.
func (c *peerConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() {
		c.limit.leave(c.peer.UID)
		if c.peer.PIDFD != nil {
			err = errors.Join(err, c.peer.PIDFD.Close())
		}
	})
	return err
}

// Info carries the peer of a connection to the handlers of its calls.
type Info struct {
	credentials.CommonAuthInfo
	Peer Peer
}

// AuthType names the kind of authentication.
func (Info) AuthType() string { return "unix_peercred" }

func peerOfConn(c net.Conn) (Peer, error) {
	sc, ok := c.(*net.UnixConn)
	if !ok {
		return Peer{}, fmt.Errorf("connection of type %T is not a Unix socket; its peer cannot be known", c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return Peer{}, fmt.Errorf("reading peer credentials: %w", err)
	}
	var p Peer
	var ucred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		if ucred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); credErr != nil {
			return
		}
		if n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err == nil {
			p.PIDFD = os.NewFile(uintptr(n), "pidfd")
		}
	})
	if err := errors.Join(err, credErr); err != nil {
		return Peer{}, fmt.Errorf("reading peer credentials: %w", err)
	}
	p.UID, p.GID, p.PID = ucred.Uid, ucred.Gid, ucred.Pid
	p.Start = startOf(p)
	return p, nil
}

// startOf returns when a process was started, as the kernel counts it, or else a number that no other connection has.
func startOf(p Peer) uint64 {
	unknown := mrand.Uint64() | 1<<63
	if p.PID <= 0 {
		return unknown
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID))
	if err != nil {
		return unknown
	}
	if p.PIDFD != nil && !alive(p.PIDFD) { // its PID may be another's by now
		return unknown
	}
	start, ok := startTime(string(stat))
	if !ok {
		return unknown
	}
	return start
}

// startTime reads field 22 of /proc/PID/stat. The second, in brackets, is what the program calls itself, and may hold anything.
func startTime(stat string) (uint64, bool) {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return 0, false
	}
	n, err := strconv.ParseUint(fields[19], 10, 63)
	return n, err == nil
}

// alive reports whether a pidfd's process has not ended.
func alive(pidfd *os.File) bool {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return false
	}
	var gone error
	err = raw.Control(func(fd uintptr) { gone = unix.PidfdSendSignal(int(fd), 0, nil, 0) })
	return err == nil && !errors.Is(gone, unix.ESRCH) // EPERM: it is another user's, and lives
}

// PeerOf returns the peer that a gRPC call comes from; ok is false if the connection was not made with Credentials.
func PeerOf(ctx context.Context) (p Peer, ok bool) {
	if gp, found := peer.FromContext(ctx); found {
		if info, is := gp.AuthInfo.(Info); is {
			return info.Peer, true
		}
	}
	return Peer{}, false
}
