package svid

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"google.golang.org/grpc"
)

// crls keeps the CRLs of each answer. go-spiffe reads answers and leaves the CRLs out, so they are taken from the message
// on its way to go-spiffe, which hands on what it has read before it reads the next: they belong to the same answer.
type crls struct{ ders [][]byte }

// intercept is a stream interceptor.
func (c *crls) intercept(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, next grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := next(ctx, desc, conn, method, opts...)
	return &crlStream{stream, c}, err
}

type crlStream struct {
	grpc.ClientStream
	crls *crls
}

// RecvMsg implements grpc.ClientStream.
func (s *crlStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if r, ok := m.(*workload.X509SVIDResponse); ok && err == nil {
		s.crls.ders = r.GetCrl()
	}
	return err
}

// pem returns the CRLs as concatenated PEM blocks; of none it is empty.
func (c *crls) pem() []byte {
	out := []byte{}
	for _, der := range c.ders {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})...)
	}
	return out
}

func (c *crls) parse() ([]*x509.RevocationList, error) {
	var out []*x509.RevocationList
	for _, der := range c.ders {
		list, err := x509.ParseRevocationList(der)
		if err != nil {
			return nil, fmt.Errorf("reading a CRL of the agent's answer: %w", err)
		}
		out = append(out, list)
	}
	return out, nil
}
