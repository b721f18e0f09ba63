package client_test

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/admission"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/trust"
)

// counting passes connections on to a server, and counts them.
func counting(t testing.TB, server string) (addr string, n *atomic.Int32) {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	t.Cleanup(func() { l.Close() })
	n = new(atomic.Int32)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n.Add(1)
			go pass(c, server)
		}
	}()
	return l.Addr().String(), n
}

func pass(c net.Conn, server string) {
	defer c.Close()
	to, err := net.Dial("tcp", server)
	if err != nil {
		return
	}
	defer to.Close()
	done := make(chan struct{}, 2)
	for _, way := range [][2]net.Conn{{c, to}, {to, c}} {
		go func() {
			io.Copy(way[0], way[1])
			done <- struct{}{}
		}()
	}
	<-done
}

func wantBusy(t testing.TB, c *client.Client) {
	t.Helper()
	_, err := issue(t, c)
	if r, ok := errors.AsType[*client.Refused](err); !ok || r.Reason != csr.ReasonBusy {
		t.Errorf("got %v, want %s", err, csr.ReasonBusy)
	}
}

// While the only server is busy, the tries of one agent share a connection: each would cost a handshake else, just when there is
// no time. It is not used for anything later, nor where there is another server to go to, nor for another SVID.
func TestD19ABusyServersConnectionIsKept(t *testing.T) {
	w := newWorld(t, func(c *csr.Config) {
		c.Admission = admission.Config{Global: admission.Rate{PerSecond: 1e-9, Burst: 2}}
	})
	addr, n := counting(t, w.addr)
	want := func(what string, connections int32) {
		t.Helper()
		if got := n.Swap(0); got != connections {
			t.Errorf("%s: %d connections, want %d", what, got, connections)
		}
	}
	cfg := w.config()
	cfg.Servers = []string{addr}
	own := w.identity(cfg.ID)
	c := client.New(cfg)
	for range 2 {
		wantIssued(t, c)
	}
	want("two that are served", 2)
	for range 4 {
		wantBusy(t, c)
	}
	want("four that are refused", 1)

	cfg.Current = func() *trust.Identity { return own }
	c = client.New(cfg)
	wantBusy(t, c)
	wantBusy(t, c)
	want("with an SVID", 1)
	own = w.identity(cfg.ID)
	wantBusy(t, c)
	want("with the next SVID", 1)

	other, _ := counting(t, w.addr)
	cfg.Servers = []string{addr, other}
	c = client.New(cfg)
	for range 3 {
		wantBusy(t, c)
	}
	if got := n.Swap(0); got < 1 || got > 2 { // they take turns, the first is drawn
		t.Errorf("with two servers: %d connections to the first of three; want one or two", got)
	}
}
