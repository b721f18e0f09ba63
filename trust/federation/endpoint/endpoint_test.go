package endpoint

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
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	gospiffe "github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/federation"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

type ca struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func newCA(name string) ca {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := must(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))
	return ca{must(x509.ParseCertificate(der)), key}
}

// leaf signs a certificate for 127.0.0.1, or an SVID.
func (c ca) leaf(id string) tls.Certificate {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true,
	}
	if id == "" {
		template.IPAddresses = []net.IP{net.ParseIP("127.0.0.1")}
	} else {
		template.URIs = []*url.URL{must(url.Parse(id))}
	}
	der := must(x509.CreateCertificate(rand.Reader, template, c.cert, key.Public(), c.key))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

var quiet = slog.New(slog.DiscardHandler)

func domain(name string) trust.Domain { return must(trust.ParseDomain(name)) }

// shown is a bundle that can be replaced.
type shown struct{ b *trust.Bundle }

func (s *shown) bundle() (*trust.Bundle, error) {
	if s.b == nil {
		return nil, errors.New("key of issuer 4f2a is gone")
	}
	return s.b, nil
}

// TestAnswers: what is served at which path, to which method, with which headers.
func TestAnswers(t *testing.T) {
	old, present := newCA("old"), newCA("new")
	kin := must(trust.NewBundle(domain("old.example"), 1, []*x509.Certificate{old.cert}))
	gone := must(trust.NewBundle(domain("gone.example"), 1, nil))
	s := &shown{must(must(trust.NewBundle(domain("new.example"), 42, []*x509.Certificate{present.cert})).WithKin(kin, gone))}
	h := New(Config{Bundle: s.bundle, RefreshHint: 90 * time.Second, Logger: quiet})
	ask := func(method, path string, header ...string) *http.Response {
		r := httptest.NewRequest(method, path, nil)
		for i := 0; i < len(header); i += 2 {
			r.Header.Add(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Result()
	}
	bundleAt := func(path, td string) *spiffebundle.Bundle {
		resp := ask("GET", path)
		if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "application/json" || resp.Header.Get("Cache-Control") != "max-age=90" {
			t.Errorf("%s: %d %v", path, resp.StatusCode, resp.Header)
		}
		b, err := spiffebundle.Read(spiffeid.RequireTrustDomainFromString(td), resp.Body) // of go-spiffe
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		n, ok := b.SequenceNumber()
		hint, hinted := b.RefreshHint()
		if !ok || n != s.b.Generation() || !hinted || hint != 90*time.Second {
			t.Errorf("%s: sequence %d %v, hint %s %v", path, n, ok, hint, hinted)
		}
		return b
	}
	for path, want := range map[string]*x509.Certificate{"/": present.cert, "/new.example": present.cert, "/old.example": old.cert, "/gone.example": nil} {
		got := bundleAt(path, "x.example").X509Authorities()
		if want == nil && len(got) != 0 || want != nil && (len(got) != 1 || !got[0].Equal(want)) {
			t.Errorf("%s: %d roots", path, len(got))
		}
	}
	for _, path := range []string{"/other.example", "/new.example/", "//", "/../", "/OLD.example", "/new.example%00"} {
		if resp := ask("GET", path); resp.StatusCode != 404 {
			t.Errorf("%s: %d", path, resp.StatusCode)
		}
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "X"} {
		if resp := ask(method, "/"); resp.StatusCode != 405 || resp.Header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: %d %v", method, resp.StatusCode, resp.Header)
		}
	}
	get, head := ask("GET", "/"), ask("HEAD", "/")
	if body := must(io.ReadAll(head.Body)); head.StatusCode != 200 || len(body) != 0 || head.Header.Get("Content-Length") != get.Header.Get("Content-Length") || head.Header.Get("ETag") != get.Header.Get("ETag") {
		t.Errorf("HEAD: %d %v %q", head.StatusCode, head.Header, body)
	}
	tag := get.Header.Get("ETag")
	if tag == "" || tag == ask("GET", "/old.example").Header.Get("ETag") {
		t.Errorf("tag %q", tag)
	}
	for field, want := range map[string]int{tag: 304, "W/" + tag: 304, `"x", ` + tag: 304, "*": 304, `"x"`: 200, "": 200, strings.Trim(tag, `"`): 200} {
		resp := ask("GET", "/", "If-None-Match", field)
		if resp.StatusCode != want || resp.Header.Get("ETag") != tag || want == 304 && len(must(io.ReadAll(resp.Body))) > 0 {
			t.Errorf("If-None-Match %s: %d %v", field, resp.StatusCode, resp.Header)
		}
	}
	if resp := ask("GET", "/", "If-None-Match", `"x"`, "If-None-Match", tag); resp.StatusCode != 304 {
		t.Errorf("two fields: %d", resp.StatusCode)
	}
	// The same again has the same tag; another generation, or other roots of it, another one.
	again := *s.b
	s.b = &again
	if got := ask("GET", "/").Header.Get("ETag"); got != tag {
		t.Errorf("tag %s of the same bundle", got)
	}
	s.b = s.b.WithGeneration(43)
	if got := ask("GET", "/", "If-None-Match", tag); got.StatusCode != 200 || got.Header.Get("ETag") == tag {
		t.Errorf("another generation: %d %v", got.StatusCode, got.Header)
	}
	bundleAt("/", "new.example")
	s.b = nil
	if resp := ask("GET", "/"); resp.StatusCode != 503 || strings.Contains(string(must(io.ReadAll(resp.Body))), "4f2a") {
		t.Errorf("without a bundle: %d", resp.StatusCode)
	}
}

// serve serves as production does, on loopback.
func serve(t *testing.T, cert tls.Certificate, h http.Handler) string {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- Serve(ctx, l, &tls.Config{Certificates: []tls.Certificate{cert}}, h, quiet) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "https://" + l.Addr().String()
}

// TestWithClients: our endpoint with our client and with go-spiffe's, and go-spiffe's endpoint with our client, by both profiles.
func TestWithClients(t *testing.T) {
	root, webCA := newCA("root"), newCA("web")
	td := domain("b.example")
	const id = "spiffe://b.example/chancery/server"
	s := &shown{must(trust.NewBundle(td, 7, []*x509.Certificate{root.cert}))}
	ours := New(Config{Bundle: s.bundle, RefreshHint: 5 * time.Minute, Logger: quiet})
	pool := x509.NewCertPool()
	pool.AddCert(webCA.cert)

	theirs := spiffebundle.FromX509Authorities(spiffeid.RequireTrustDomainFromString("b.example"), []*x509.Certificate{root.cert})
	theirs.SetSequenceNumber(7)
	theirs.SetRefreshHint(5 * time.Minute)
	handler := must(gospiffe.NewHandler(theirs.TrustDomain(), theirs))

	for name, h := range map[string]http.Handler{"our endpoint": ours, "go-spiffe's endpoint": handler} {
		web, svid := serve(t, webCA.leaf(""), h), serve(t, root.leaf(id), h)
		check := func(how string, sequence uint64, roots []*x509.Certificate, hint time.Duration, err error) {
			t.Helper()
			if err != nil || sequence != 7 || len(roots) != 1 || !roots[0].Equal(root.cert) || hint != 5*time.Minute {
				t.Errorf("%s, %s: %d, %d roots, %s, %v", name, how, sequence, len(roots), hint, err)
			}
		}
		for how, c := range map[string]federation.ClientConfig{
			"our client, https_web": {Relationship: federation.Relationship{Domain: td, URL: web, Profile: federation.Web}, Roots: func() (*x509.CertPool, error) { return pool, nil }},
			"our client, https_spiffe": {
				Relationship: federation.Relationship{Domain: td, URL: svid, Profile: federation.SPIFFE, EndpointID: must(trust.ParseID(id))},
				Bundle:       func(trust.Domain) (*trust.Bundle, error) { return s.b, nil },
			},
		} {
			client := must(federation.NewClient(c))
			for range 2 { // the second time as a 304, from ours
				b, err := client.Fetch(t.Context())
				if err != nil {
					t.Fatalf("%s, %s: %v", name, how, err)
				}
				check(how, b.Sequence, b.Roots, b.RefreshHint, err)
			}
		}
		if name != "our endpoint" {
			continue
		}
		for how, c := range map[string]struct {
			url    string
			option gospiffe.FetchOption
		}{
			"go-spiffe's client, https_web":    {web, gospiffe.WithWebPKIRoots(pool)},
			"go-spiffe's client, https_spiffe": {svid, gospiffe.WithSPIFFEAuth(theirs, spiffeid.RequireFromString(id))},
		} {
			b, err := gospiffe.FetchBundle(t.Context(), theirs.TrustDomain(), c.url, c.option)
			if err != nil {
				t.Fatalf("%s: %v", how, err)
			}
			n, _ := b.SequenceNumber()
			hint, _ := b.RefreshHint()
			check(how, n, b.X509Authorities(), hint, nil)
		}
	}
}

// TestBounds: who sends much, or nothing, does not get far.
func TestBounds(t *testing.T) {
	root := newCA("root")
	s := &shown{must(trust.NewBundle(domain("b.example"), 7, []*x509.Certificate{root.cert}))}
	address := serve(t, root.leaf(""), New(Config{Bundle: s.bundle, RefreshHint: time.Minute, Logger: quiet}))
	pool := x509.NewCertPool()
	pool.AddCert(root.cert)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}
	defer transport.CloseIdleConnections()
	do := func(r *http.Request) int {
		resp, err := transport.RoundTrip(r)
		if err != nil {
			return 0
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	r := must(http.NewRequestWithContext(t.Context(), "GET", address, nil))
	r.Header.Set("If-None-Match", strings.Repeat("x", 8<<10))
	if code := do(r); code != 200 {
		t.Errorf("a header of 8 KiB: %d", code)
	}
	r.Header.Set("If-None-Match", strings.Repeat("x", 64<<10))
	if code := do(r); code == 200 {
		t.Errorf("a header of 64 KiB: %d", code)
	}
	r = must(http.NewRequestWithContext(t.Context(), "POST", address, strings.NewReader(strings.Repeat("x", 1<<20))))
	if code := do(r); code != 0 && code != 405 {
		t.Errorf("a body: %d", code)
	}
	old := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}}
	if _, err := old.RoundTrip(must(http.NewRequestWithContext(t.Context(), "GET", address, nil))); err == nil {
		t.Error("TLS 1.1 is spoken")
	}
	for suite, want := range map[uint16]bool{tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256: true, tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA: false} {
		conn, err := tls.Dial("tcp", strings.TrimPrefix(address, "https://"), &tls.Config{RootCAs: pool, MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{suite}})
		if err == nil {
			conn.Close()
		}
		if (err == nil) != want {
			t.Errorf("TLS 1.2 with %s: %v", tls.CipherSuiteName(suite), err)
		}
	}
}

// FuzzRequest: nothing that is asked leads to a panic, or to another answer than a bundle of ours or none.
func FuzzRequest(f *testing.F) {
	root := newCA("root")
	b := must(trust.NewBundle(domain("b.example"), 7, []*x509.Certificate{root.cert}))
	h := New(Config{Bundle: func() (*trust.Bundle, error) { return b, nil }, RefreshHint: time.Minute, Logger: quiet})
	f.Add("GET", "/", "")
	f.Add("HEAD", "/b.example", `W/"a", "b"`)
	f.Add("POST", "/%2e%2e/", "*")
	f.Fuzz(func(t *testing.T, method, path, tag string) {
		r := &http.Request{Method: method, URL: &url.URL{Path: path}, Header: http.Header{"If-None-Match": {tag}}}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		known := path == "/" || path == "/b.example"
		if ok := fmt.Sprint(w.Code); (method == "GET" || method == "HEAD") && known != (ok == "200" || ok == "304") || w.Code > 405 {
			t.Errorf("%q %q: %d", method, path, w.Code)
		}
	})
}
