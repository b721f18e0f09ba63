package parenttest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/parent/renewal"
)

// Config says what the suite may expect.
type Config struct {
	// Start serves the protocol on behalf of a peer and returns the parent that calls it. It calls Switch.
	Start func(*testing.T, *Peer) renewal.Parent
	// Secrets are what must be in no error and no log.
	Secrets []string
}

// trouble is one way in which a parent can fail.
type trouble struct {
	name    string
	sign    func(*x509.CertificateRequest) ([]*x509.Certificate, error) // default: a good one
	fault   Fault
	down    bool
	want    string // in the error
	outcome string // in the metric
}

// Run runs the suite.
func Run(t *testing.T, c Config) {
	t.Run("signs and is asked again", func(t *testing.T) { good(t, c) })
	t.Run("trouble never touches the issuer in use", func(t *testing.T) { troubles(t, c) })
	t.Run("hanging", func(t *testing.T) { hanging(t, c) })
}

func start(t *testing.T, c Config) (*World, *Peer, *renewal.Renewer) {
	t.Helper()
	w := NewWorld(t)
	p := NewPeer(w)
	parent := c.Start(t, p)
	t.Cleanup(func() { close(p.closed) }) // before the server of Start is closed, which waits for its handlers
	return w, p, w.Renewer(parent)
}

func good(t *testing.T, c Config) {
	w, p, r := start(t, c)
	for n := 1; n <= 3; n++ {
		p.set(issues(w.Above, Lifetime+time.Duration(n)*time.Hour, nil), "")
		if err := r.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		if leaf := w.Issue(t); leaf.CheckSignatureFrom(w.Above.Cert) == nil {
			t.Error("the leaf is signed by the parent itself")
		}
	}
	in, err := w.Keeper.Issuer()
	if err != nil {
		t.Fatal(err)
	}
	if chain := in.Chain(); len(chain) != 2 || !chain[1].Equal(w.Above.Cert) {
		t.Errorf("the issuer's chain has %d certificates; want its own and the parent's", len(chain))
	}
	if n := w.Metric(t, "chancery_ca_parent_requests_total", "outcome=ok"); n != 3 || w.Metric(t, "chancery_ca_parent_up") != 1 {
		t.Errorf("%v requests count as ok", n)
	}
	if left := w.Metric(t, "chancery_ca_parent_renewal_seconds"); left < 0.35*Lifetime.Seconds() || left > 0.65*1.2*Lifetime.Seconds() {
		t.Errorf("the next renewal is %v seconds away", left)
	}
	before := in.SKI()
	if w.Open(t); w.Keeper == nil {
		t.Fatal("not reopened")
	}
	if in, err = w.Keeper.Issuer(); err != nil || in.SKI() != before {
		t.Errorf("after a restart the issuer is another one: %v", err)
	}
}

// list has the troubles; inUse ends when the issuer in use does.
func list(t *testing.T, w *World, inUse time.Time) []trouble {
	stranger := NewCA(t, "above", NewCA(t, "root", nil, nil), nil) // of the same names
	narrow := NewCA(t, "narrow", w.Root, func(c *x509.Certificate) { c.MaxPathLen, c.MaxPathLenZero = 0, true })
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	long := Lifetime + 10*time.Hour
	changed := func(f func(*x509.Certificate)) func(*x509.CertificateRequest) ([]*x509.Certificate, error) {
		return issues(w.Above, long, f)
	}
	return []trouble{
		{name: "other key", outcome: "refused", want: "another key", sign: func(csr *x509.CertificateRequest) ([]*x509.Certificate, error) {
			forged := *csr
			forged.PublicKey = other.Public()
			return issues(w.Above, long, nil)(&forged)
		}},
		{name: "not a CA", outcome: "refused", want: "not a CA certificate", sign: changed(func(c *x509.Certificate) {
			c.IsCA, c.MaxPathLen, c.MaxPathLenZero, c.SubjectKeyId = false, 0, false, []byte("12345678901234567890")
		})},
		{name: "no cRLSign", outcome: "refused", want: "lacks cRLSign", sign: changed(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCertSign })},
		{name: "unknown root", outcome: "refused", want: "does not lead to a root", sign: issues(stranger, long, nil)},
		{name: "no room in the path", outcome: "refused", want: "path length of 0", sign: issues(narrow, long, nil)},
		{name: "ended", outcome: "refused", want: "it ended at", sign: changed(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) })},
		{name: "far in the future", outcome: "refused", want: "in the future", sign: changed(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) })},
		{name: "too short", outcome: "refused", want: "nothing would be gained", sign: changed(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(time.Minute) })},
		{name: "no longer than the one in use", outcome: "refused", want: "nothing would be gained", sign: changed(func(c *x509.Certificate) { c.NotAfter = inUse })},
		{name: "a refusal", outcome: "failed", want: errRefused.Error(), sign: func(*x509.CertificateRequest) ([]*x509.Certificate, error) { return nil, errRefused }},
		{name: "down", outcome: "failed", down: true},
		{name: "garbage", outcome: "failed", fault: Garbage},
		{name: "oversized", outcome: "failed", fault: Oversized},
	}
}

func troubles(t *testing.T, c Config) {
	w, p, r := start(t, c)
	// The first issuer: refused if it is too short for what it will sign.
	p.set(issues(w.Above, 10*time.Minute, nil), "")
	if err := r.Renew(t.Context()); err == nil || !strings.Contains(err.Error(), "it should live 1h0m0s at least") {
		t.Fatalf("a first issuer of 10 minutes: %v", err)
	}
	p.set(issues(w.Above, Lifetime, nil), "")
	if err := r.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	in, err := w.Keeper.Issuer()
	if err != nil {
		t.Fatal(err)
	}
	roots := w.Keeper.Document().Domains[w.Domain.String()].Generation
	for _, tr := range list(t, w, in.NotAfter()) {
		if tr.sign == nil {
			tr.sign = issues(w.Above, Lifetime+time.Hour, nil)
		}
		p.set(tr.sign, tr.fault)
		if tr.down {
			p.down()
		}
		before := w.Metric(t, "chancery_ca_parent_requests_total", "outcome="+tr.outcome)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		err := r.Renew(ctx)
		cancel()
		if tr.down {
			p.up()
		}
		if err == nil || !strings.Contains(err.Error(), tr.want) || r.Err() == nil {
			t.Errorf("%s: got %v; want %q", tr.name, err, tr.want)
			continue
		}
		t.Logf("%s: %v", tr.name, err)
		if n := w.Metric(t, "chancery_ca_parent_requests_total", "outcome="+tr.outcome); n != before+1 || w.Metric(t, "chancery_ca_parent_up") != 0 {
			t.Errorf("%s: it is not counted as %s", tr.name, tr.outcome)
		}
		for _, s := range c.Secrets {
			if strings.Contains(err.Error()+w.Logged.String(), s) {
				t.Errorf("%s: the error or the log shows a secret: %v", tr.name, err)
			}
		}
		if now, err := w.Keeper.Issuer(); err != nil || now.SKI() != in.SKI() {
			t.Fatalf("%s: the issuer in use is another one: %v", tr.name, err)
		}
		w.Issue(t)
	}
	if w.Keeper.Document().Domains[w.Domain.String()].Generation != roots {
		t.Error("the roots changed")
	}
	p.set(issues(w.Above, Lifetime+2*time.Hour, nil), "")
	if err := r.Renew(t.Context()); err != nil || r.Err() != nil {
		t.Errorf("after all of it: %v, %v", err, r.Err())
	}
	if now, err := w.Keeper.Issuer(); err != nil || now.SKI() == in.SKI() {
		t.Errorf("after all of it the issuer is the old one: %v", err)
	}
	w.Issue(t)
}

// hanging: a parent that does not answer holds up its own renewal, ends with it, and nothing else.
func hanging(t *testing.T, c Config) {
	w, p, r := start(t, c)
	if err := r.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.set(issues(w.Above, Lifetime+time.Hour, nil), Hanging)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Renew(ctx) }()
	select {
	case <-p.hung:
	case err := <-done:
		t.Fatalf("a parent that hangs answered: %v", err)
	}
	for range 5 {
		w.Issue(t)
		w.Keeper.Document()
	}
	select {
	case err := <-done:
		t.Fatalf("a parent that hangs answered: %v", err)
	default:
	}
	cancel()
	select {
	case err := <-done:
		if err == nil {
			t.Error("it says that there is a new issuer")
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the call does not end with its context")
	}
	p.set(issues(w.Above, Lifetime+time.Hour, nil), "")
	if err := r.Renew(t.Context()); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	w.Issue(t)
}
