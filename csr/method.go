package csr

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/ca"
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

// begin takes the snapshot that a call is answered from, for leaf, chain and bundle (invariant 6), and finds out who calls.
func (s *Service) begin(ctx context.Context) (*ca.Issuer, caller, *Denial) {
	issuer, err := s.issuer()
	if err != nil {
		return nil, caller{}, notReady(err)
	}
	c, d := s.known(ctx)
	return issuer, c, d
}

// known finds out who calls, and refuses those whose identity is revoked.
func (s *Service) known(ctx context.Context) (caller, *Denial) {
	c, d := s.authenticate(ctx)
	if d == nil && s.revocations().Identity(c.ID.String()) {
		d = revoked(c.ID)
	}
	return c, d
}
