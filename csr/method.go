package csr

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/csr/lines"
)

// method describes a unary call whose handler decides when the request is read. gRPC's own unary handlers are given a
// request that was read already: anybody could make the server hold 2 MiB for each call of each connection. Ours reads
// only what a known caller sends; a stranger is answered as soon as that is clear. On the wire the two are the same.
func method(name string, handle func(ctx context.Context, read func(proto.Message) error) (proto.Message, error)) grpc.StreamDesc {
	return grpc.StreamDesc{
		StreamName:    name,
		ServerStreams: true, // so that gRPC checks that exactly one request comes
		Handler: func(_ any, stream grpc.ServerStream) error {
			resp, err := handle(stream.Context(), func(m proto.Message) error { return stream.RecvMsg(m) })
			if err != nil {
				return err
			}
			return stream.SendMsg(resp)
		},
	}
}

// begin takes the snapshot that a call is answered from, for leaf, chain and bundle (invariant 6), and finds out who calls. What it
// returns has to be left, also with a denial.
func (s *Service) begin(ctx context.Context) (*lines.Call, caller, *Denial) {
	var err error
	r := evidence.Enter(s.ledger, func() (*lines.Call, *evidence.Calls) {
		var pair *held.Pair
		if pair, err = s.issuers(); err != nil {
			return nil, nil
		}
		return s.chains.Of(pair, s.ledger)
	})
	if err != nil {
		return nil, caller{}, notReady(err)
	}
	c, d := s.known(ctx)
	return r, c, d
}

// known finds out who calls, and refuses those whose identity is revoked.
func (s *Service) known(ctx context.Context) (caller, *Denial) {
	c, d := s.authenticate(ctx)
	if d == nil && s.revocations().Identity(c.ID.String()) {
		d = revoked(c.ID)
	}
	return c, d
}

// Call is a call of an API that stands beside issuance, by a caller who is known.
type Call struct {
	Caller
	Requester audit.Requester
	Read      func(proto.Message) error // reads the request
}

// Method describes a unary call of another API with the same callers: they authenticate, wait for a slot, and are refused,
// counted and logged as those who ask for certificates.
func (s *Service) Method(api, name string, handle func(context.Context, Call) (proto.Message, *Denial)) grpc.StreamDesc {
	return method(name, func(ctx context.Context, read func(proto.Message) error) (proto.Message, error) {
		start := time.Now()
		r, c, d := s.begin(ctx)
		defer r.Leave()
		if d == nil {
			d = s.admit(ctx, c)
		}
		var resp proto.Message
		if d == nil {
			defer s.admission.Release()
			resp, d = handle(ctx, Call{c.Caller, c.requester(), read})
		}
		s.metrics.observe(api, c.Method, outcome(d), time.Since(start))
		if d != nil {
			s.denied(c, "", d)
			return nil, d.status(d.message(c))
		}
		return resp, nil
	})
}
