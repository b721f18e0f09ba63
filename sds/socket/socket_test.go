package socket

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestListen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "sub", "agent.sock")
	ln, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o666 {
		t.Errorf("mode of the socket: %v %v", info, err)
	}
	if _, err := Listen(path); err == nil || !strings.Contains(err.Error(), "another process serves this socket") {
		t.Errorf("a live socket was taken over: %v", err)
	}
	// A crash leaves the socket behind.
	ln.(*listener).SetUnlinkOnClose(false)
	ln.Close()
	if ln, err = Listen(path); err != nil {
		t.Fatalf("stale socket: %v", err)
	}
	ln.Close()

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(file); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("a plain file was replaced: %v", err)
	}
	if _, err := os.Lstat(file + ".lock"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a lock is left beside it: %v", err)
	}
	if _, err := Listen("/" + strings.Repeat("x", 108)); err == nil || !strings.Contains(err.Error(), "the kernel allows 107") {
		t.Errorf("long path: %v", err)
	}
}

// Of many that find the socket of a crashed agent at once, exactly one serves it, and callers reach that one.
func TestOneTakesALeftOverSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	for range 50 {
		stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		stale.SetUnlinkOnClose(false)
		stale.Close()
		var wg sync.WaitGroup
		listeners := make(chan net.Listener, 8)
		for range cap(listeners) {
			wg.Go(func() {
				if ln, err := Listen(path); err == nil {
					listeners <- ln
				} else if !errors.Is(err, errServed) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if len(listeners) != 1 {
			t.Fatalf("%d of 8 serve the socket", len(listeners))
		}
		ln := <-listeners
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatalf("the one that serves the socket is not reached: %v", err)
		}
		c.Close()
		if err := ln.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A process that holds the lock keeps its socket, also while it does not answer.
func TestHeldSocketIsNotTaken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	lock, err := hold(path + ".lock")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path); !errors.Is(err, errServed) {
		t.Errorf("got %v", err)
	}
	lock.Close()
	ln, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	if err := os.Remove(path + ".lock"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(t.TempDir(), "elsewhere"), path+".lock"); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path); err == nil {
		t.Error("a link was followed")
	}
}

func TestPeer(t *testing.T) {
	ln, err := Listen(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	client, err := net.Dial("unix", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	conn, auth, err := Credentials{}.ServerHandshake(accepted)
	if err != nil {
		t.Fatal(err)
	}
	p := auth.(Info).Peer
	if p.UID != uint32(os.Getuid()) || p.GID != uint32(os.Getgid()) || p.PID != int32(os.Getpid()) {
		t.Errorf("peer is %+v", p)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if p.PIDFD != nil && p.PIDFD.Close() == nil {
		t.Error("the pidfd outlived its connection")
	}
	one, two := net.Pipe()
	defer one.Close()
	defer two.Close()
	if _, _, err := (Credentials{}).ServerHandshake(one); err == nil || !strings.Contains(err.Error(), "not a Unix socket") {
		t.Errorf("a peer without credentials was accepted: %v", err)
	}
}
