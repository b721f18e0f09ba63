package e2e

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const secretType = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

// SDS is a client of an SDS server on a Unix socket, which asks the way Envoy does: state of the world, one stream a secret,
// every answer acknowledged.
type SDS struct{ conn *grpc.ClientConn }

// DialSDS connects when first used.
func DialSDS(socket string) (*SDS, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("connecting to SDS at %s: %w", socket, err)
	}
	return &SDS{conn: conn}, nil
}

// Close closes the connection.
func (s *SDS) Close() { s.conn.Close() }

// Watch calls f with a secret each time that it is pushed, until f returns an error, which is returned, or ctx ends.
func (s *SDS) Watch(ctx context.Context, name string, f func(*tlsv3.Secret) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := secretv3.NewSecretDiscoveryServiceClient(s.conn).StreamSecrets(ctx)
	if err != nil {
		return fmt.Errorf("opening an SDS stream for %s: %w", name, err)
	}
	req := &discoveryv3.DiscoveryRequest{
		Node: &corev3.Node{Id: "e2e"}, TypeUrl: secretType, ResourceNames: []string{name},
	}
	for {
		if err := stream.Send(req); err != nil {
			return fmt.Errorf("asking SDS for %s: %w", name, err)
		}
		resp, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("waiting for secret %s: %w", name, err)
		}
		for _, resource := range resp.Resources {
			secret := new(tlsv3.Secret)
			if err := resource.UnmarshalTo(secret); err != nil {
				return fmt.Errorf("reading secret %s: %w", name, err)
			}
			if err := f(secret); err != nil {
				return err
			}
		}
		req.VersionInfo, req.ResponseNonce = resp.VersionInfo, resp.Nonce
	}
}

// FetchSDS returns the secrets of the given names as the server at the socket pushes them first.
func FetchSDS(ctx context.Context, socket string, names ...string) (map[string]*tlsv3.Secret, error) {
	client, err := DialSDS(socket)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	got := errors.New("got it")
	secrets := map[string]*tlsv3.Secret{}
	for _, name := range names {
		err := client.Watch(ctx, name, func(secret *tlsv3.Secret) error {
			secrets[name] = secret
			return got
		})
		if !errors.Is(err, got) {
			return nil, err
		}
	}
	return secrets, nil
}

// SecretChain returns the certificates of a tls_certificate secret, leaf first, having checked that the key belongs to the leaf.
func SecretChain(secret *tlsv3.Secret) ([]*x509.Certificate, error) {
	c := secret.GetTlsCertificate()
	if c == nil {
		return nil, fmt.Errorf("secret %s holds no certificate", secret.GetName())
	}
	pair, err := tls.X509KeyPair(c.GetCertificateChain().GetInlineBytes(), c.GetPrivateKey().GetInlineBytes())
	if err != nil {
		return nil, fmt.Errorf("secret %s: %w", secret.GetName(), err)
	}
	if _, ok := pair.PrivateKey.(crypto.Signer); !ok {
		return nil, fmt.Errorf("secret %s: its key cannot sign", secret.GetName())
	}
	return parseCerts(c.GetCertificateChain().GetInlineBytes())
}

// SecretRoots returns the roots of a validation_context secret.
func SecretRoots(secret *tlsv3.Secret) ([]*x509.Certificate, error) {
	v := secret.GetValidationContext()
	if v == nil {
		return nil, fmt.Errorf("secret %s holds no validation context", secret.GetName())
	}
	return parseCerts(v.GetTrustedCa().GetInlineBytes())
}
