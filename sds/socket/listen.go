package socket

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxPath is the room in sockaddr_un, less the closing zero.
const maxPath = len(syscall.RawSockaddrUnix{}.Path) - 1

// Listen opens the agent's socket. A socket that nobody answers is left over from a crash and is replaced; one that
// another process serves, and a path that is not a socket, are errors. A missing parent directory is made.
//
// A lock on PATH.lock is held until the listener is closed, and the kernel lets go of it with the process: of two that find
// the same left-over socket at once, one gets it, and the other cannot take a fresh one for left over.
//
// The socket's mode is 0666: who may connect is decided for each call, on credentials that the kernel vouches for.
// Whoever can write the directory can put a socket of their own in its place and pose as the agent, so it must belong
// to the agent's user.
func Listen(path string) (net.Listener, error) {
	if len(path) > maxPath {
		return nil, fmt.Errorf("listening on socket: path %q is %d bytes long; the kernel allows %d", path, len(path), maxPath)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("listening on socket: %w", err)
	}
	if _, err := isSocket(path); err != nil { // before a lock's file is left beside something else
		return nil, fmt.Errorf("listening on socket %s: %w", path, err)
	}
	lock, err := hold(path + ".lock")
	if err != nil {
		return nil, fmt.Errorf("listening on socket %s: %w", path, err)
	}
	ln, err := bind(path)
	if err != nil {
		lock.Close()
		return nil, err
	}
	return &listener{ln, lock}, nil
}

// listener holds its socket's lock.
type listener struct {
	*net.UnixListener
	lock *os.File
}

// Close removes the socket, and only then lets others have it. The lock's file stays: removing it would give two
// processes a lock each.
func (l *listener) Close() error {
	return errors.Join(l.UnixListener.Close(), ignoreClosed(l.lock.Close()))
}

// ignoreClosed makes a second Close of the lock no error, besides the listener's own.
func ignoreClosed(err error) error {
	if errors.Is(err, fs.ErrClosed) {
		return nil
	}
	return err
}

func hold(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("holding it: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errServed
	}
	return nil, fmt.Errorf("holding it by %s: %w", path, err)
}

func bind(path string) (*net.UnixListener, error) {
	if err := removeStale(path); err != nil {
		return nil, fmt.Errorf("listening on socket %s: %w", path, err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listening on socket: %w", err)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		ln.Close()
		return nil, fmt.Errorf("listening on socket: %w", err)
	}
	return ln, nil
}

var errServed = errors.New("another process serves this socket; stop it or choose another path")

// isSocket reports whether a socket lies there. Anything else that does is an error.
func isSocket(path string) (bool, error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return false, errors.New("a file that is not a socket is in the way; remove it or choose another path")
	}
	return true, nil
}

// removeStale removes a socket only when the kernel says that nobody listens on it (ECONNREFUSED). Any other answer,
// such as a full backlog, can come from a live process.
func removeStale(path string) error {
	if there, err := isSocket(path); !there || err != nil {
		return err
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		c.Close()
		return errServed
	case errors.Is(err, syscall.ECONNREFUSED):
		return os.Remove(path)
	case errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return fmt.Errorf("asking whether another process serves this socket: %w", err)
}
