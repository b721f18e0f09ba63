package mtls

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/test/bufconn"

	"github.com/chancery-project/chancery/trust"
)

// authority signs what the tests need, for one trust domain.
type authority struct {
	t      testing.TB
	domain trust.Domain
	key    *ecdsa.PrivateKey
	cert   *x509.Certificate
	serial int64
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func newAuthority(t testing.TB, domain string) *authority {
	t.Helper()
	td, err := trust.ParseDomain(domain)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{t: t, domain: td, key: newKey(t), serial: 1}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: domain, SerialNumber: rand.Text()}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(1000 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	a.cert = a.sign(template, template, &a.key.PublicKey)
	return a
}

func (a *authority) sign(template, parent *x509.Certificate, pub *ecdsa.PublicKey) *x509.Certificate {
	a.t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, pub, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert
}

// identity issues an SVID.
func (a *authority) identity(path string, ttl time.Duration, change func(*x509.Certificate)) *trust.Identity {
	a.t.Helper()
	a.serial++
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.serial), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(ttl), KeyUsage: x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		URIs: []*url.URL{{Scheme: "spiffe", Host: a.domain.String(), Path: path}},
	}
	if change != nil {
		change(template)
	}
	key := newKey(a.t)
	leaf := a.sign(template, a.cert, &key.PublicKey)
	i, err := trust.NewIdentity(id(a.t, a.domain.URI()+path), []*x509.Certificate{leaf}, key, a.bundle(1), time.Now())
	if err != nil {
		a.t.Fatal(err)
	}
	return i
}

func (a *authority) bundle(generation uint64, more ...*x509.Certificate) *trust.Bundle {
	a.t.Helper()
	b, err := trust.NewBundle(a.domain, generation, append(more, a.cert))
	if err != nil {
		a.t.Fatal(err)
	}
	return b
}

// revoking returns the bundle with a CRL that lists an SVID.
func (a *authority) revoking(i *trust.Identity) *trust.Bundle {
	a.t.Helper()
	der, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour),
		RevokedCertificateEntries: []x509.RevocationListEntry{{SerialNumber: i.Leaf().SerialNumber, RevocationTime: time.Now()}},
	}, a.cert, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	b := a.bundle(2)
	crls, err := trust.NewCRLs(b, [][]byte{der}, nil, time.Now())
	if err != nil {
		a.t.Fatal(err)
	}
	return b.WithCRLs(crls)
}

func id(t testing.TB, s string) trust.ID {
	t.Helper()
	id, err := trust.ParseID(s)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// bundles are those that both sides trust at the moment.
type bundles struct {
	mu  sync.Mutex
	all map[trust.Domain]*trust.Bundle
}

func trusted(all ...*trust.Bundle) *bundles {
	b := &bundles{all: map[trust.Domain]*trust.Bundle{}}
	for _, one := range all {
		b.all[one.Domain()] = one
	}
	return b
}

func (b *bundles) of(d trust.Domain) *trust.Bundle {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all[d]
}

func (b *bundles) set(d trust.Domain, one *trust.Bundle) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all[d] = one
}

// party is one side.
type party struct {
	*Endpoint
	own    atomic.Pointer[trust.Identity]
	closed chan error
}

func newParty(t testing.TB, own *trust.Identity, b *bundles, who Authorizer) *party {
	t.Helper()
	p := &party{closed: make(chan error, 10)}
	p.own.Store(own)
	e, err := New(Config{Own: p.own.Load, Bundles: b.of, Authorize: who, Closed: func(_ trust.ID, _ net.Addr, why error) { p.closed <- why }})
	if err != nil {
		t.Fatal(err)
	}
	p.Endpoint = e
	return p
}

// serve answers each connection with what comes, over a buffer: time can be a bubble's.
func serve(t *testing.T, config *tls.Config, wrap func(net.Listener) net.Listener) *bufconn.Listener {
	t.Helper()
	l := bufconn.Listen(1 << 16)
	secured := tls.NewListener(wrap(l), config)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := secured.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		all.Wait()
	})
	return l
}

// dial connects, and makes sure that the server took the client: in TLS 1.3 that shows with the first answer.
func dial(t *testing.T, l *bufconn.Listener, client *party, config *tls.Config) (*tls.Conn, error) {
	t.Helper()
	raw, err := l.DialContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := client.Client(raw, config)
	if err := echo(c); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// dialPlain is dial without anybody who watches.
func dialPlain(t *testing.T, l *bufconn.Listener, _ *party, config *tls.Config) (*tls.Conn, error) {
	t.Helper()
	raw, err := l.DialContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := tls.Client(raw, config)
	if err := echo(c); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// echo prefers the error of reading: that is what the other side said before it closed.
func echo(c net.Conn) error {
	_, unsent := c.Write([]byte("x"))
	_, err := io.ReadFull(c, make([]byte, 1))
	return cmp.Or(err, unsent)
}

func unwatched(l net.Listener) net.Listener { return l }

func TestHandshakes(t *testing.T) {
	td, other := newAuthority(t, "td"), newAuthority(t, "other")
	web, db, far := td.identity("/web", time.Hour, nil), td.identity("/db", time.Hour, nil), other.identity("/web", time.Hour, nil)
	clients := td.identity("/web", time.Hour, func(x *x509.Certificate) { x.ExtKeyUsage = x.ExtKeyUsage[:1] })
	forged := newAuthority(t, "td").identity("/web", time.Hour, nil) // another root, our trust domain
	both, own := trusted(td.bundle(1), other.bundle(1)), trusted(td.bundle(1))
	for name, tc := range map[string]struct {
		client, server *trust.Identity
		b              *bundles
		byClient       Authorizer
		byServer       Authorizer
		want           string // of the client's error
	}{
		"both welcome":                {web, db, own, IDs(db.ID), IDs(web.ID), ""},
		"of a federated domain":       {far, db, both, Anyone(), Members(other.domain), ""},
		"of a domain not trusted":     {far, db, own, Anyone(), Anyone(), "bad certificate"},
		"another server":              {web, db, own, IDs(web.ID), Anyone(), "none of those"},
		"another client":              {web, db, own, Anyone(), IDs(db.ID), "bad certificate"},
		"nobody is named":             {web, db, own, IDs(), Anyone(), "none of those"},
		"another trust domain":        {web, db, own, Members(other.domain), Anyone(), "none of the trust domains"},
		"another root's word for td":  {web, forged, own, Anyone(), Anyone(), "unknown authority"},
		"a server for clients alone":  {web, clients, own, Anyone(), Anyone(), "not for this role"},
		"a client for clients alone":  {clients, db, own, Anyone(), Anyone(), ""},
		"a client without an SVID":    {nil, db, own, Anyone(), Anyone(), "there is no SVID yet"},
		"a server without an SVID":    {web, nil, own, Anyone(), Anyone(), "internal error"},
		"the client refuses, by list": {web, db, own, Allowed(func() []trust.ID { return []trust.ID{web.ID} }), Anyone(), "none of those"},
	} {
		for kind, wrap := range map[string]func(*party) func(net.Listener) net.Listener{
			"watched": func(p *party) func(net.Listener) net.Listener { return p.Listener }, "plain": func(*party) func(net.Listener) net.Listener { return unwatched },
		} {
			server, client := newParty(t, tc.server, tc.b, tc.byServer), newParty(t, tc.client, tc.b, tc.byClient)
			l := serve(t, server.ServerTLS(), wrap(server))
			c, err := dial(t, l, client, client.ClientTLS())
			if (tc.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s, %s: %v; want something about %q", name, kind, err, tc.want)
			}
			if err != nil {
				if client.Open() != 0 {
					t.Errorf("%s, %s: a refused connection is watched", name, kind)
				}
				continue
			}
			if peer, err := Peer(c.ConnectionState()); err != nil || peer != tc.server.ID {
				t.Errorf("%s, %s: the peer is %s, %v", name, kind, peer, err)
			}
			if client.Open() != 1 {
				t.Errorf("%s, %s: %d connections are watched", name, kind, client.Open())
			}
			c.Close()
			if client.Open() != 0 {
				t.Errorf("%s, %s: a closed connection is watched", name, kind)
			}
		}
	}
}

func TestEndpointsNeedRules(t *testing.T) {
	ok := Config{Own: func() *trust.Identity { return nil }, Bundles: trusted().of, Authorize: Anyone()}
	if _, err := New(ok); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"no authorizer": func(c *Config) { c.Authorize = nil }, "no bundles": func(c *Config) { c.Bundles = nil },
		"no own": func(c *Config) { c.Own = nil }, "below 0": func(c *Config) { c.Every = -1 },
	} {
		c := ok
		change(&c)
		if e, err := New(c); err == nil || e != nil {
			t.Errorf("%s: there is an endpoint", name)
		}
	}
	if _, err := Peer(tls.ConnectionState{}); err == nil {
		t.Error("a peer without a certificate has an ID")
	}
}

// trouble is what may happen to a peer's certificate.
var troubles = map[string]struct {
	change func(*bundles, *authority, *trust.Identity)
	want   string
}{
	"ended":       {func(_ *bundles, _ *authority, _ *trust.Identity) { time.Sleep(2 * time.Hour) }, "expired"},
	"revoked":     {func(b *bundles, a *authority, i *trust.Identity) { b.set(a.domain, a.revoking(i)) }, "revoked"},
	"root left":   {func(b *bundles, a *authority, _ *trust.Identity) { b.set(a.domain, newAuthority(a.t, "td").bundle(2)) }, "unknown authority"},
	"not trusted": {func(b *bundles, a *authority, _ *trust.Identity) { b.set(a.domain, nil) }, "not trusted"},
}

// A session can be resumed, and is not once the server may not be trusted: crypto/tls verifies no certificate then, VerifyConnection does.
func TestResumptionChecksTheServer(t *testing.T) {
	for name, trouble := range troubles {
		for _, dial := range []func(*testing.T, *bufconn.Listener, *party, *tls.Config) (*tls.Conn, error){dial, dialPlain} {
			resumesAndIsRefused(t, name, trouble.want, trouble.change, dial)
		}
	}
}

// resumesAndIsRefused resumes a session with a server, and sees the next resumption refused once the server is in trouble.
func resumesAndIsRefused(t *testing.T, name, want string, change func(*bundles, *authority, *trust.Identity), dial func(*testing.T, *bufconn.Listener, *party, *tls.Config) (*tls.Conn, error)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		td, mine := newAuthority(t, "td"), newAuthority(t, "mine")
		b := trusted(td.bundle(1), mine.bundle(1))
		server, client := newParty(t, td.identity("/db", time.Hour, nil), b, Anyone()), newParty(t, mine.identity("/web", 500*time.Hour, nil), b, Anyone())
		l := serve(t, server.ServerTLS(), server.Listener)
		config := client.ClientTLS()
		config.ServerName, config.ClientSessionCache = "db", tls.NewLRUClientSessionCache(0)
		for i := range 3 {
			c, err := dial(t, l, client, config)
			if err != nil {
				t.Fatal(err)
			}
			if did := c.ConnectionState().DidResume; did != (i > 0) {
				t.Fatalf("%s: connection %d resumed: %v", name, i, did)
			}
			c.Close()
		}
		change(b, td, server.own.Load())
		if c, err := dial(t, l, client, config); err == nil {
			t.Errorf("%s: a server is taken, resumed: %v", name, c.ConnectionState().DidResume)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	})
}

// The ticket of a client that may not be trusted any more opens nothing; a client that has renewed comes in with what it has now.
func TestResumptionChecksTheClient(t *testing.T) {
	for name, trouble := range troubles {
		synctest.Test(t, func(t *testing.T) {
			td, mine := newAuthority(t, "td"), newAuthority(t, "mine")
			b := trusted(td.bundle(1), mine.bundle(1))
			server, client := newParty(t, mine.identity("/db", 500*time.Hour, nil), b, Anyone()), newParty(t, td.identity("/web", time.Hour, nil), b, Anyone())
			l := serve(t, server.ServerTLS(), unwatched)
			config := client.ClientTLS()
			config.ServerName, config.ClientSessionCache = "db", tls.NewLRUClientSessionCache(0)
			for i := range 2 {
				c, err := dial(t, l, client, config)
				if err != nil {
					t.Fatal(err)
				}
				if did := c.ConnectionState().DidResume; did != (i > 0) {
					t.Fatalf("%s: connection %d resumed: %v", name, i, did)
				}
				c.Close()
			}
			trouble.change(b, td, client.own.Load())
			if _, err := dial(t, l, client, config); err == nil || !strings.Contains(err.Error(), "bad certificate") {
				t.Errorf("%s: %v", name, err)
			}
			client.own.Store(mine.identity("/web", time.Hour, nil))
			c, err := dial(t, l, client, config)
			if err != nil {
				t.Fatalf("%s: with another SVID: %v", name, err)
			}
			if c.ConnectionState().DidResume {
				t.Errorf("%s: the old ticket was taken", name)
			}
			c.Close()
		})
	}
}

// VerifyConnection itself is asked on the server where a session is resumed, should the ticket ever be taken.
func TestResumptionVerifiesOnTheServer(t *testing.T) {
	td := newAuthority(t, "td")
	b := trusted(td.bundle(1))
	server, client := newParty(t, td.identity("/db", time.Hour, nil), b, Anyone()), newParty(t, td.identity("/web", time.Hour, nil), trusted(td.bundle(1)), Anyone())
	inner := server.ServerTLS()
	inner.WrapSession, inner.UnwrapSession = nil, nil
	type verdict struct {
		resumed bool
		err     error
	}
	verdicts := make(chan verdict, 3)
	verify := inner.VerifyConnection
	inner.VerifyConnection = func(cs tls.ConnectionState) error {
		err := verify(cs)
		verdicts <- verdict{cs.DidResume, err}
		return err
	}
	l := serve(t, inner, unwatched)
	config := client.ClientTLS()
	config.ServerName, config.ClientSessionCache = "db", tls.NewLRUClientSessionCache(0)
	for i := range 2 {
		c, err := dial(t, l, client, config)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		if v := <-verdicts; v.resumed != (i > 0) || v.err != nil {
			t.Fatalf("connection %d: %+v", i, v)
		}
	}
	b.set(td.domain, td.revoking(client.own.Load()))
	if _, err := dial(t, l, client, config); err == nil {
		t.Error("a revoked client is in")
	}
	if v := <-verdicts; !v.resumed || v.err == nil || !strings.Contains(v.err.Error(), "revoked") {
		t.Errorf("a revoked client, resumed: %+v", v)
	}
}

// Open connections end with what made them: on the side of servers and of clients.
func TestOpenConnectionsAreClosed(t *testing.T) {
	for name, trouble := range troubles {
		for _, side := range []string{"server", "client"} {
			synctest.Test(t, func(t *testing.T) {
				td, mine := newAuthority(t, "td"), newAuthority(t, "mine")
				peers := trusted(td.bundle(1), mine.bundle(1))
				all := trusted(td.bundle(1), mine.bundle(1)) // the peer goes on trusting
				bad, good := td.identity("/a", time.Hour, nil), mine.identity("/b", 500*time.Hour, nil)
				var judge *party
				var server, client *party
				if side == "server" {
					judge = newParty(t, good, peers, Anyone())
					server, client = judge, newParty(t, bad, all, Anyone())
				} else {
					judge = newParty(t, good, peers, Anyone())
					server, client = newParty(t, bad, all, Anyone()), judge
				}
				l := serve(t, server.ServerTLS(), server.Listener)
				c, err := dial(t, l, client, client.ClientTLS())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				ctx, cancel := context.WithCancel(t.Context())
				ran := make(chan error, 1)
				go func() { ran <- judge.Run(ctx) }()
				time.Sleep(59 * time.Minute)
				if err := echo(c); err != nil {
					t.Fatalf("%s, %s: closed too early: %v", name, side, err)
				}
				begun := time.Now()
				trouble.change(peers, td, bad)
				why := <-judge.closed
				if !strings.Contains(why.Error(), trouble.want) {
					t.Errorf("%s, %s: %v", name, side, why)
				}
				if waited := time.Since(begun); name != "ended" && waited > 30*time.Second {
					t.Errorf("%s, %s: closed after %s", name, side, waited)
				}
				if err := echo(c); err == nil {
					t.Errorf("%s, %s: the connection is open", name, side)
				}
				if judge.Open() != 0 {
					t.Errorf("%s, %s: it is watched still", name, side)
				}
				cancel()
				if err := <-ran; !errors.Is(err, context.Canceled) {
					t.Errorf("Run: %v", err)
				}
			})
		}
	}
}

// The end of a peer's certificate is not waited for by looking around: without Run it ends at its second.
func TestAConnectionEndsWithItsCertificate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		td := newAuthority(t, "td")
		b := trusted(td.bundle(1))
		server, client := newParty(t, td.identity("/db", 500*time.Hour, nil), b, Anyone()), newParty(t, td.identity("/web", time.Hour, nil), b, Anyone())
		l := serve(t, server.ServerTLS(), server.Listener)
		c, err := dial(t, l, client, client.ClientTLS())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		end := client.own.Load().NotAfter()
		<-server.closed
		if late := time.Since(end); late < 0 || late > time.Second {
			t.Errorf("closed %s after the end", late)
		}
	})
}

// Bundles that are looked up, and lists that change, need no new configuration; what stays the same closes nothing.
func TestRecheckKeepsWhoIsWelcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		td, next := newAuthority(t, "td"), newAuthority(t, "td")
		b := trusted(td.bundle(1))
		web := td.identity("/web", 500*time.Hour, nil)
		var list atomic.Pointer[[]trust.ID]
		list.Store(&[]trust.ID{web.ID})
		server := newParty(t, td.identity("/db", 500*time.Hour, nil), b, Allowed(func() []trust.ID { return *list.Load() }))
		client := newParty(t, web, b, Anyone())
		l := serve(t, server.ServerTLS(), server.Listener)
		c, err := dial(t, l, client, client.ClientTLS())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		b.set(td.domain, td.bundle(2, next.cert)) // a rotation begins
		server.Recheck()
		client.Recheck()
		b.set(td.domain, td.bundle(3)) // and is aborted
		server.Recheck()
		if err := echo(c); err != nil {
			t.Fatalf("a rotation closed it: %v", err)
		}
		b.set(td.domain, td.bundle(4, next.cert))
		again := newParty(t, next.identity("/web", time.Hour, nil), b, Anyone())
		d, err := dial(t, l, again, again.ClientTLS())
		if err != nil {
			t.Fatalf("an SVID under the new root: %v", err)
		}
		d.Close()
		list.Store(&[]trust.ID{})
		server.Recheck()
		if why := <-server.closed; !strings.Contains(why.Error(), "none of those") {
			t.Error(why)
		}
		if err := echo(c); err == nil {
			t.Error("it is open, though nobody is welcome")
		}
	})
}

// A connection that is given up is not watched, wherever its handshake was: neither once the peer has shown itself, nor after it was closed.
func TestNothingIsWatchedOfAHandshakeThatFails(t *testing.T) {
	td := newAuthority(t, "td")
	b := trusted(td.bundle(1))
	web, db := td.identity("/web", time.Hour, nil), td.identity("/db", time.Hour, nil)
	client := newParty(t, web, b, Anyone())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			// It shows its certificate, and another's proof that it has the key.
			shown := db.TLSCertificate()
			shown.PrivateKey = newKey(t)
			_ = tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{*shown}, ClientAuth: tls.RequireAnyClientCert}).Handshake()
			raw.Close()
		}
	}()
	if c, err := client.Dial(t.Context(), "tcp", l.Addr().String()); err == nil {
		c.Close()
		t.Fatal("a peer without the key of its certificate is taken")
	}
	if n := client.Open(); n != 0 {
		t.Errorf("%d connections are watched that never came to be", n)
	}

	raw, other := net.Pipe()
	defer other.Close()
	c := &conn{Conn: raw, endpoint: client.Endpoint}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c.watch(db.Chain, x509.ExtKeyUsageServerAuth); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a connection that is closed goes on with its handshake: %v", err)
	}
	if n := client.Open(); n != 0 {
		t.Errorf("%d connections are watched that are closed", n)
	}
}

func TestEquivalentAndLookup(t *testing.T) {
	old, now, far := newAuthority(t, "old"), newAuthority(t, "now"), newAuthority(t, "far")
	a, err := trust.NewAliases(now.domain, old.domain)
	if err != nil {
		t.Fatal(err)
	}
	to := Equivalent(a, IDs(id(t, "spiffe://old/web")))
	for s, want := range map[string]bool{"spiffe://old/web": true, "spiffe://now/web": true, "spiffe://far/web": false, "spiffe://now/db": false} {
		if err := to(id(t, s)); (err == nil) != want {
			t.Errorf("%s: %v", s, err)
		}
	}
	own, err := now.bundle(1).WithKin(old.bundle(1))
	if err != nil {
		t.Fatal(err)
	}
	// A federated bundle for a domain of our own does not count.
	lookup := Lookup(func() *trust.Bundle { return own }, func() []*trust.Bundle { return []*trust.Bundle{far.bundle(7), newAuthority(t, "old").bundle(9)} })
	for _, x := range []*authority{old, now, far} {
		if b := lookup(x.domain); b == nil || len(b.Roots()) != 1 || !b.HasRoot(x.cert) {
			t.Errorf("%s: %v", x.domain, b)
		}
	}
	if b := lookup(newAuthority(t, "unknown").domain); b != nil {
		t.Error("an unknown domain has a bundle")
	}
	if b := Lookup(func() *trust.Bundle { return nil }, func() []*trust.Bundle { return nil })(now.domain); b != nil {
		t.Error("nothing is known, and there is a bundle")
	}
}

// A path ends with the first of its certificates, a verdict with the last of its paths.
func TestEndOfAVerdict(t *testing.T) {
	at := func(hours ...int) (path []*x509.Certificate) {
		for _, h := range hours {
			path = append(path, &x509.Certificate{NotAfter: time.Unix(int64(h)*3600, 0)})
		}
		return path
	}
	for name, tc := range map[string]struct {
		paths [][]*x509.Certificate
		want  int64
	}{
		"the leaf": {[][]*x509.Certificate{at(1, 5, 9)}, 1}, "the issuer": {[][]*x509.Certificate{at(5, 1, 9)}, 1}, "the root": {[][]*x509.Certificate{at(5, 9, 1)}, 1},
		"the better path first": {[][]*x509.Certificate{at(5, 3), at(5, 2)}, 3}, "the better path last": {[][]*x509.Certificate{at(5, 2), at(5, 3)}, 3},
	} {
		if got := end(tc.paths); got.Unix() != tc.want*3600 {
			t.Errorf("%s: hour %d; want %d", name, got.Unix()/3600, tc.want)
		}
	}
}
