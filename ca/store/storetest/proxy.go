package storetest

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Proxy is a TCP port that leads to a store, until the test ends, and that can be cut like a cable.
type Proxy struct {
	Addr string // host:port

	network, to string
	listener    net.Listener

	mu    sync.Mutex        // guards what follows
	conns map[net.Conn]bool // false: lost
	cut   bool
	gate  chan struct{} // while it is open nothing comes through; nil: all does
}

// NewProxy makes one that leads to an address.
func NewProxy(t testing.TB, network, to string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{Addr: l.Addr().String(), network: network, to: to, listener: l, conns: map[net.Conn]bool{}}
	go p.accept()
	t.Cleanup(func() {
		l.Close()
		p.Cut()
	})
	return p
}

// Cut ends all connections, and each new one.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
	p.open()
	for c := range p.conns {
		c.Close()
	}
}

// Hang lets nothing through, on old connections or new ones, and ends none.
func (p *Proxy) Hang() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gate == nil {
		p.gate = make(chan struct{})
	}
}

// Lose makes the connections that there are dead, without a word to either end; new ones work.
func (p *Proxy) Lose() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		p.conns[c] = false
	}
}

// Mend lets all through again; what was held back comes first.
func (p *Proxy) Mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = false
	p.open()
}

func (p *Proxy) open() {
	if p.gate != nil {
		close(p.gate)
		p.gate = nil
	}
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		if p.add(c) {
			go p.lead(c)
		}
	}
}

// add takes a connection into the books, or ends it.
func (p *Proxy) add(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut {
		c.Close()
		return false
	}
	p.conns[c] = true
	return true
}

func (p *Proxy) lead(in net.Conn) {
	defer p.forget(in)
	out, err := net.Dial(p.network, p.to)
	if err != nil || !p.add(out) {
		return
	}
	defer p.forget(out)
	done := make(chan struct{}, 2)
	for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
		go func() {
			p.copy(way[1], way[0], in)
			done <- struct{}{}
		}()
	}
	<-done
}

func (p *Proxy) copy(to io.Writer, from io.Reader, in net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		gate, works := p.gate, p.conns[in]
		p.mu.Unlock()
		if !works && err == nil {
			continue // into nowhere
		}
		if gate != nil {
			<-gate
		}
		if _, werr := to.Write(buf[:n]); err != nil || werr != nil {
			return
		}
	}
}

func (p *Proxy) forget(c net.Conn) {
	c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}
