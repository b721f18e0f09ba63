package main

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	securityv1alpha1 "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/test/bench/parts"
)

const (
	floorArgument  = "floor" // the program's first argument in its role as the floor
	floorAddrFile  = "floor.addr"
	floorRootsFile = "floor-roots.pem"
)

// floor is the least a server of the Istio API can do and still hand out valid SVIDs only to holders of valid tokens:
// no log, no cache, no lint, no admission, no metrics. All that can be done once is done before the first call.
type floor struct {
	securityv1alpha1.UnimplementedIstioCertificateServiceServer
	keys map[string]any // the JWKS by key id
	root *x509.Certificate
	key  crypto.Signer
	pem  string // the root, as sent
}

// serveFloor serves until the parent is gone: its end of our standard input closes.
func serveFloor(dir string) error {
	f, err := newFloor(dir)
	if err != nil {
		return err
	}
	certificate, err := f.serverCertificate()
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	// gRPC's defaults throughout, as a bare server would have them.
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{certificate},
		MinVersion:   tls.VersionTLS13,
	})))
	securityv1alpha1.RegisterIstioCertificateServiceServer(server, f)
	if err := os.WriteFile(filepath.Join(dir, floorRootsFile), []byte(f.pem), 0o600); err != nil {
		return fmt.Errorf("writing root: %w", err)
	}
	// Renamed into place, so that the parent never reads half an address.
	path := filepath.Join(dir, floorAddrFile)
	if err := os.WriteFile(path+".new", []byte("listen="+listener.Addr().String()+"\n"), 0o600); err != nil {
		return fmt.Errorf("writing address: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("writing address: %w", err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		server.Stop()
	}()
	return server.Serve(listener)
}

func newFloor(dir string) (*floor, error) {
	text, err := os.ReadFile(filepath.Join(dir, jwksFile))
	if err != nil {
		return nil, fmt.Errorf("reading JWKS: %w", err)
	}
	var set jose.JSONWebKeySet
	if err := json.Unmarshal(text, &set); err != nil {
		return nil, fmt.Errorf("parsing JWKS: %w", err)
	}
	f := &floor{keys: make(map[string]any)}
	for _, k := range set.Keys {
		f.keys[k.KeyID] = k.Key
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making root key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "floor root"},
		NotBefore:             time.Now().Add(-time.Minute),
		NotAfter:              time.Now().Add(24 * time.Hour),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		IsCA:                  true,
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("signing root: %w", err)
	}
	if f.root, err = x509.ParseCertificate(der); err != nil {
		return nil, fmt.Errorf("parsing root: %w", err)
	}
	f.key, f.pem = key, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return f, nil
}

func (f *floor) serverCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("making server key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		NotBefore:    time.Now().Add(-time.Minute),
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     []string{"localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, f.root, key.Public(), f.key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("signing server certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// CreateCertificate verifies the token and the certificate request and signs, all anew on each call.
func (f *floor) CreateCertificate(ctx context.Context, in *securityv1alpha1.IstioCertificateRequest) (*securityv1alpha1.IstioCertificateResponse, error) {
	id, err := f.authenticate(ctx)
	if err != nil {
		return nil, status.Error(codes.Unauthenticated, err.Error())
	}
	public, err := publicKey(in.GetCsr())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	leaf, err := f.sign(id, public, time.Duration(in.GetValidityDuration())*time.Second)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &securityv1alpha1.IstioCertificateResponse{CertChain: []string{leaf, f.pem}}, nil
}

// authenticate returns the SPIFFE ID of the call's token once its signature, issuer, audience and times hold.
func (f *floor) authenticate(ctx context.Context) (*url.URL, error) {
	values := metadata.ValueFromIncomingContext(ctx, "authorization")
	if len(values) != 1 || !strings.HasPrefix(values[0], "Bearer ") {
		return nil, errors.New("want one bearer token")
	}
	token, err := jwt.ParseSigned(values[0][len("Bearer "):], []jose.SignatureAlgorithm{jose.RS256})
	if err != nil {
		return nil, errors.New("malformed token")
	}
	key, ok := f.keys[token.Headers[0].KeyID]
	if !ok {
		return nil, errors.New("unknown key")
	}
	var claims jwt.Claims
	if err := token.Claims(key, &claims); err != nil {
		return nil, errors.New("bad signature")
	}
	expected := jwt.Expected{Issuer: parts.TokenIssuer, AnyAudience: jwt.Audience{parts.TokenAudience}, Time: time.Now()}
	if err := claims.ValidateWithLeeway(expected, 0); err != nil || claims.Expiry == nil {
		return nil, errors.New("claims do not hold")
	}
	account, ok := strings.CutPrefix(claims.Subject, "system:serviceaccount:")
	namespace, name, both := strings.Cut(account, ":")
	if !ok || !both {
		return nil, errors.New("not a service account")
	}
	return &url.URL{Scheme: "spiffe", Host: parts.TrustDomain, Path: "/ns/" + namespace + "/sa/" + name}, nil
}

// publicKey takes the key out of a request that proves possession of it.
func publicKey(text string) (*ecdsa.PublicKey, error) {
	block, _ := pem.Decode([]byte(text))
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return nil, errors.New("want a PEM certificate request")
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, errors.New("malformed certificate request")
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, errors.New("certificate request not signed by its key")
	}
	public, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || public.Curve != elliptic.P256() {
		return nil, errors.New("want a P-256 key")
	}
	return public, nil
}

func (f *floor) sign(id *url.URL, public *ecdsa.PublicKey, ttl time.Duration) (string, error) {
	if ttl <= 0 || ttl > time.Hour {
		ttl = time.Hour
	}
	serial := make([]byte, 17)
	_, _ = rand.Read(serial[1:]) // crypto/rand never fails
	serial[0] = 1                // 128 random bits, never zero, never negative
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          new(big.Int).SetBytes(serial),
		NotBefore:             now.Add(-time.Minute),
		NotAfter:              now.Add(ttl),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{id},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, f.root, public, f.key)
	if err != nil {
		return "", err
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), nil
}
