package client

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client/anchor"
)

// Parent has issuers of a server signed by another one, whose config lists the identity of our token. Config.TTL is the
// lifetime to ask for; Config.ID and Current play no part.
type Parent struct{ client *Client }

// NewParent returns a parent.
func NewParent(c Config) *Parent {
	c.Current = nil // a certificate is not enough there
	return &Parent{New(c)}
}

// Sign has a request (PKCS#10, DER) signed, and returns the issuing certificate first. What it returns is not verified.
func (p *Parent) Sign(ctx context.Context, csr []byte) ([]*x509.Certificate, error) {
	c := p.client
	if c.config.Token == nil {
		return nil, errors.New("no token to come with")
	}
	req := &chanceryv1.SignIssuerRequest{Csr: csr}
	if c.config.TTL > 0 {
		req.Lifetime = durationpb.New(c.config.TTL)
	}
	var resp *chanceryv1.SignIssuerResponse
	err := c.ask(ctx, func(ctx context.Context, conn *grpc.ClientConn, t turn) (err error) {
		ctx, cancel := t.answer(ctx)
		defer cancel()
		if resp, err = chanceryv1.NewIssuersClient(conn).SignIssuer(ctx, req); err != nil {
			return refusedBy(err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	chain, err := anchor.Certificates(resp.GetChain())
	if err != nil {
		return nil, fmt.Errorf("reading issuer's chain: %w", err)
	}
	return chain, nil
}
