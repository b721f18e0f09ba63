package socket

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// Limit bounds the connections of each Unix user but root. Anybody on the machine may connect to the socket; without a
// bound anybody could use up the agent's file descriptors, of which each connection takes two, and with them its
// way to the server.
type Limit struct {
	most int

	mu    sync.Mutex // guards conns
	conns map[uint32]int
}

// maxPerUser is the limit where file descriptors abound: a node's sidecars often share one user.
const maxPerUser = 4096

// NewLimit returns a limit of 4,096 connections for each user, or an eighth of our file descriptors if that is less.
func NewLimit() *Limit {
	most := maxPerUser
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err == nil && files.Cur/8 < uint64(most) {
		most = max(1, int(files.Cur/8))
	}
	return &Limit{most: most, conns: map[uint32]int{}}
}

func (l *Limit) enter(uid uint32) error {
	if l == nil || uid == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns[uid] >= l.most {
		return fmt.Errorf("user %d has %d connections already", uid, l.most)
	}
	l.conns[uid]++
	return nil
}

func (l *Limit) leave(uid uint32) {
	if l == nil || uid == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns[uid]--; l.conns[uid] == 0 {
		delete(l.conns, uid)
	}
}
