package mtls_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/mtls"
)

// A server and a client over HTTP/2. Who calls is known by ID, and connections end with the certificates of their peers.
func Example_http() {
	bundle, issue := authority("example.org")
	web, db := issue("/ns/shop/sa/web"), issue("/ns/shop/sa/db")

	server, err := mtls.New(mtls.Config{
		Own:       func() *trust.Identity { return db }, // in a program: what its agent or keeper has now
		Bundles:   mtls.Lookup(func() *trust.Bundle { return bundle }, func() []*trust.Bundle { return nil }),
		Authorize: mtls.IDs(web.ID),
	})
	if err != nil {
		log.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	config := server.ServerTLS()
	config.NextProtos = []string{"h2", "http/1.1"}
	s := &http.Server{TLSConfig: config, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		peer, err := mtls.Peer(*r.TLS)
		if err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		fmt.Fprintf(w, "hello %s over %s", peer, r.Proto)
	})}
	go s.ServeTLS(server.Listener(l), "", "")
	defer s.Close()

	client, err := mtls.New(mtls.Config{
		Own:       func() *trust.Identity { return web },
		Bundles:   trust.Only(bundle),
		Authorize: mtls.IDs(db.ID),
	})
	if err != nil {
		log.Fatal(err)
	}
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: client.ClientTLS(), ForceAttemptHTTP2: true}}
	defer c.CloseIdleConnections()
	answer, err := c.Get("https://" + l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", text)
	// Output: hello spiffe://example.org/ns/shop/sa/web over HTTP/2.0
}

// A client that dials. A server that is not the one that is meant is refused, though its certificate is good.
func Example_dial() {
	bundle, issue := authority("example.org")
	web, db, test := issue("/ns/shop/sa/web"), issue("/ns/shop/sa/db"), issue("/ns/test/sa/db")
	server, err := mtls.New(mtls.Config{Own: func() *trust.Identity { return test }, Bundles: trust.Only(bundle), Authorize: mtls.Anyone()})
	if err != nil {
		log.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	s := &http.Server{TLSConfig: server.ServerTLS(), ErrorLog: log.New(io.Discard, "", 0)}
	go s.ServeTLS(server.Listener(l), "", "")
	defer s.Close()

	client, err := mtls.New(mtls.Config{
		Own:       func() *trust.Identity { return web },
		Bundles:   trust.Only(bundle),
		Authorize: mtls.Allowed(func() []trust.ID { return []trust.ID{db.ID} }), // such as the IDs of a service, from secure naming
	})
	if err != nil {
		log.Fatal(err)
	}
	_, err = client.Dial(context.Background(), "tcp", l.Addr().String())
	fmt.Println(err)
	// Output: verifying peer: peer spiffe://example.org/ns/test/sa/db is none of those that are welcome
}

// authority stands for what issues identities.
func authority(domain string) (*trust.Bundle, func(path string) *trust.Identity) {
	td, err := trust.ParseDomain(domain)
	if err != nil {
		log.Fatal(err)
	}
	rootKey := key()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: domain}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	root := sign(template, template, &rootKey.PublicKey, rootKey)
	bundle, err := trust.NewBundle(td, 1, []*x509.Certificate{root})
	if err != nil {
		log.Fatal(err)
	}
	return bundle, func(path string) *trust.Identity {
		leafKey := key()
		leaf := sign(&x509.Certificate{
			SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
			BasicConstraintsValid: true, URIs: []*url.URL{{Scheme: "spiffe", Host: domain, Path: path}},
		}, root, &leafKey.PublicKey, rootKey)
		id, err := trust.ParseID(td.URI() + path)
		if err != nil {
			log.Fatal(err)
		}
		identity, err := trust.NewIdentity(id, []*x509.Certificate{leaf}, leafKey, bundle, time.Now())
		if err != nil {
			log.Fatal(err)
		}
		return identity
	}
}

func key() *ecdsa.PrivateKey {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		log.Fatal(err)
	}
	return k
}

func sign(template, parent *x509.Certificate, pub *ecdsa.PublicKey, by *ecdsa.PrivateKey) *x509.Certificate {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, pub, by)
	if err != nil {
		log.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		log.Fatal(err)
	}
	return cert
}
