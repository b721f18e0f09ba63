package sds

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/chancery-project/chancery/sds/wake"
)

// pump keeps one SDS stream up to date. Its only standing goroutine is the handler's, which waits for requests;
// changes wake it for one turn.
type pump struct {
	server *Server
	source Source
	sub    *subscription
	waiter wake.Waiter

	mu   sync.Mutex          // held for a whole turn, sending included: one response is out before the next is made
	push func(v *View) error // sends what is new in v; nil once the stream has ended
}

// turn takes in what a request changes, sends what is new, and waits for the next change. A change that comes while
// a slow client holds up a turn is not queued: the next turn takes the view of its moment.
func (p *pump) turn(request func() error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.push == nil {
		return nil
	}
	if err := request(); err != nil {
		return err
	}
	view, changed := p.source()
	if err := p.push(view); err != nil {
		return err
	}
	p.server.observe(p.sub, view)
	p.server.wakes.Wait(&p.waiter, changed)
	return nil
}

// wake takes a turn because of a change. If sending fails, gRPC has ended the stream, which the handler notices.
func (p *pump) wake() { _ = p.turn(func() error { return nil }) }

// end makes sure that nothing is sent any more.
func (p *pump) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.push = nil
	p.sub.unsettled(0)
	p.server.wakes.Leave(&p.waiter)
}

// follow runs one stream until its client or the server ends it: each request goes to handle, and after that, and
// whenever the view or a file has changed, push brings the client up to date. The two are never called at once.
func follow[Req any](in interface{ Recv() (Req, error) }, p *pump, handle func(Req) error, push func(*View) error) error {
	defer p.end()
	p.mu.Lock()
	p.push = push
	p.mu.Unlock()
	for {
		r, err := in.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := p.turn(func() error { return handle(r) }); err != nil {
			return err
		}
	}
}

// followFiles wakes all streams when the content of a file changes, until ctx ends.
func (s *Server) followFiles(ctx context.Context) {
	changed := s.files.Changes()
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		changed = s.files.Changes() // before the streams look, so that no change falls between
		s.mu.Lock()
		for sub := range s.streams {
			go sub.pump.wake()
		}
		s.mu.Unlock()
	}
}
