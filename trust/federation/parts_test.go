package federation

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// ca is a root that signs in-process.
type ca struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func newCA(name string) ca {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(60 * 24 * time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := must(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))
	return ca{must(x509.ParseCertificate(der)), key}
}

// leaf signs a certificate for a name, an IP address or a SPIFFE ID.
func (c ca) leaf(names ...string) tls.Certificate {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(30 * 24 * time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true,
	}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if u := must(url.Parse(n)); u.Scheme != "" {
			template.URIs = append(template.URIs, u)
		} else {
			template.DNSNames = append(template.DNSNames, n)
		}
	}
	der := must(x509.CreateCertificate(rand.Reader, template, c.cert, key.Public(), c.key))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (c ca) pool() (*x509.CertPool, error) {
	p := x509.NewCertPool()
	p.AddCert(c.cert)
	return p, nil
}

// serve starts an HTTPS server that shows a certificate.
func serve(t testing.TB, cert tls.Certificate, h http.Handler) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{cert}}
	s.Config.ErrorLog = log.New(t.Output(), "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL
}

var foreignDomain = must(trust.ParseDomain("b.example"))

// bundle returns one of the foreign domain in JSON.
func bundle(n uint64, roots ...*x509.Certificate) []byte {
	return must((&spiffebundle.Bundle{Domain: foreignDomain, Roots: roots, Sequence: n, HasSequence: true, RefreshHint: 2 * time.Minute}).Marshal())
}

// write answers with a bundle.
func write(data []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Write(data)
	}
}

func web(t testing.TB, address string, roots func() (*x509.CertPool, error)) *Client {
	t.Helper()
	c, err := NewClient(ClientConfig{Relationship: Relationship{Domain: foreignDomain, URL: address, Profile: Web}, Roots: roots})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func svid(t testing.TB, address, id string, bundleOf func(trust.Domain) (*trust.Bundle, error)) *Client {
	t.Helper()
	c, err := NewClient(ClientConfig{Relationship: Relationship{Domain: foreignDomain, URL: address, Profile: SPIFFE, EndpointID: must(trust.ParseID(id))}, Bundle: bundleOf})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// network is an HTTPS server on pipes, for synctest: what waits in the kernel is not idle.
type network struct {
	server *http.Server
	conns  chan net.Conn
	done   chan struct{}
	once   sync.Once
}

func newNetwork(cert tls.Certificate, h http.HandlerFunc) *network {
	n := &network{conns: make(chan net.Conn), done: make(chan struct{})}
	n.server = &http.Server{Handler: h, TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}}, ErrorLog: log.New(io.Discard, "", 0)}
	go n.server.ServeTLS(n, "", "")
	return n
}

func (n *network) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case n.conns <- server:
		return client, nil
	case <-n.done:
		return nil, errors.New("the network is down")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (n *network) close() { n.server.Close() }

func (n *network) Accept() (net.Conn, error) {
	select {
	case c := <-n.conns:
		return c, nil
	case <-n.done:
		return nil, net.ErrClosed
	}
}

func (n *network) Close() error { n.once.Do(func() { close(n.done) }); return nil }

func (n *network) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }
