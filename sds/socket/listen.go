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
)

// maxPath is the room in sockaddr_un, less the closing zero.
const maxPath = len(syscall.RawSockaddrUnix{}.Path) - 1

// Listen opens the agent's socket. A socket that nobody answers is left over from a crash and is replaced; one that
// another process serves, and a path that is not a socket, are errors. A missing parent directory is made.
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
	if err := removeStale(path); err != nil {
		return nil, fmt.Errorf("listening on socket %s: %w", path, err)
	}
	ln, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listening on socket: %w", err)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		ln.Close()
		return nil, fmt.Errorf("listening on socket: %w", err)
	}
	return ln, nil
}

// removeStale removes a socket only when the kernel says that nobody listens on it (ECONNREFUSED). Any other answer,
// such as a full backlog, can come from a live process.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return errors.New("a file that is not a socket is in the way; remove it or choose another path")
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		c.Close()
		return errors.New("another process serves this socket; stop it or choose another path")
	case errors.Is(err, syscall.ECONNREFUSED):
		return os.Remove(path)
	case errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return fmt.Errorf("asking whether another process serves this socket: %w", err)
}
