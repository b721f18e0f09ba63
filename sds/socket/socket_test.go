package socket

import (
	"net"
	"os"
	"path/filepath"
	"strings"
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
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
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
	if _, err := Listen("/" + strings.Repeat("x", 108)); err == nil || !strings.Contains(err.Error(), "the kernel allows 107") {
		t.Errorf("long path: %v", err)
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
