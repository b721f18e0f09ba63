package csr_test

import (
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/trust"
)

// countingKey counts signatures.
type countingKey struct {
	crypto.Signer
	n atomic.Int32
}

func (k *countingKey) Sign(r io.Reader, digest []byte, o crypto.SignerOpts) ([]byte, error) {
	k.n.Add(1)
	return k.Signer.Sign(r, digest, o)
}

func TestInvariant10NothingIsSignedIfTheLogCannotBeWritten(t *testing.T) {
	w := newWorld(t)
	full := must(audit.Open("/dev/full"))
	defer full.Close()
	key := &countingKey{Signer: w.made.IssuerKey}
	use := func(log *audit.Log) {
		w.issuer.Store(must(ca.NewIssuer(ca.IssuerConfig{
			Domain: td, Key: key, Chain: []*x509.Certificate{w.made.Issuer}, LogID: ca.MinLogID + 1, Log: log,
			Bundle: must(trust.NewBundle(td, 1, []*x509.Certificate{w.made.Root})),
		})))
	}
	use(full)
	good := bearer(token(claims{}))
	resp, err := w.istio(good, ask(""))
	wantStatus(t, err, codes.Unavailable, csr.ReasonNotReady, "")
	if st, _, retry := refusal(err); retry <= 0 || strings.Contains(st.Message(), "/dev/full") || len(resp.GetCertChain()) > 0 {
		t.Errorf("got %v, again after %s, %d certificates", st, retry, len(resp.GetCertChain()))
	}
	batch, err := w.native(good, askNative(""), askNative(""))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range batch.GetResults() {
		if f := r.GetRefusal(); codes.Code(f.GetCode()) != codes.Unavailable || f.GetReason() != csr.ReasonNotReady || f.GetRetryAfter().AsDuration() <= 0 || strings.Contains(f.GetMessage(), "/dev") {
			t.Errorf("got %v", r)
		}
	}
	if n := key.n.Load(); n != 0 {
		t.Errorf("%d signatures were made", n)
	}
	if !strings.Contains(w.output.String(), "/dev/full") {
		t.Errorf("the server's log does not say why:\n%s", w.output)
	}

	use(w.log) // the disk has room again
	if _, err := w.istio(good, ask("")); err != nil || key.n.Load() != 1 {
		t.Errorf("after that: %v, %d signatures", err, key.n.Load())
	}
}

func TestInvariant2KeyOnlyFromTheCSR(t *testing.T) {
	w := newWorld(t)
	key := newKey()
	r := ask("")
	r.Csr = toPEM(newCSR(key, webURI))
	resp, err := w.istio(bearer(token(claims{})), r)
	if err != nil {
		t.Fatal(err)
	}
	leaf := leafOf(t, resp.GetCertChain(), webURI)
	if !trust.SameKey(leaf.PublicKey, key.Public()) || len(leaf.URIs) != 1 || leaf.IsCA ||
		len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.EmailAddresses) > 0 || leaf.Subject.String() != "" {
		t.Errorf("the leaf has names %q %q %q, subject %q", leaf.URIs, leaf.DNSNames, leaf.IPAddresses, leaf.Subject)
	}
}

// While the issuer changes all the time, each answer's leaf, chain and roots are of one issuer.
func TestInvariant6LeafChainAndRootsAreOneSnapshot(t *testing.T) {
	w := newWorld(t)
	var issuers []*ca.Issuer
	bySKI := map[string]*ca.Issuer{}
	for i := range 3 {
		made := must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID + 1, Log: w.log}))
		x := must(ca.NewIssuer(ca.IssuerConfig{
			Domain: td, Key: made.IssuerKey, Chain: []*x509.Certificate{made.Issuer}, LogID: ca.MinLogID + 1, Log: w.log,
			Bundle: must(trust.NewBundle(td, uint64(i+1), []*x509.Certificate{made.Root})),
		}))
		issuers = append(issuers, x)
		bySKI[string(made.Issuer.SubjectKeyId)] = x
	}
	w.issuer.Store(issuers[0])
	done := make(chan struct{})
	var swaps sync.WaitGroup
	swaps.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
				w.issuer.Store(issuers[i%3])
			}
		}
	})
	conn := w.dial(nil)
	ctx := w.context(bearer(token(claims{})))
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for range 15 {
				resp, err := w.istio(bearer(token(claims{})), ask(""))
				if err != nil {
					t.Error(err)
					return
				}
				if !wantSnapshot(t, bySKI, leafOf(t, resp.GetCertChain(), webURI), resp.GetCertChain()[2]) {
					return
				}
			}
		})
		callers.Go(func() {
			for range 15 {
				resp, err := chanceryv1.NewIssuanceClient(conn).Issue(ctx, &chanceryv1.IssueRequest{
					Requests: []*chanceryv1.CertificateRequest{askNative(""), askNative("")},
				})
				if err != nil {
					t.Error(err)
					return
				}
				for i := range 2 {
					leaf := verifyNative(t, resp, i, webURI)
					if g := bySKI[string(leaf.AuthorityKeyId)].Bundle().Generation(); g != resp.GetBundle().GetGeneration() {
						t.Errorf("leaf of issuer %d with bundle %d", g, resp.GetBundle().GetGeneration())
					}
				}
			}
		})
	}
	callers.Wait()
	close(done)
	swaps.Wait()
}

func wantSnapshot(t *testing.T, bySKI map[string]*ca.Issuer, leaf *x509.Certificate, roots string) bool {
	t.Helper()
	i := bySKI[string(leaf.AuthorityKeyId)]
	if i == nil || string(i.Bundle().PEM()) != roots {
		t.Error("the roots are not those of the leaf's issuer")
		return false
	}
	return true
}

// Anybody can cause refusals, so their number in the logs is bounded; the metrics count all.
func TestRefusalsInTheLogsAreBounded(t *testing.T) {
	w := newWorld(t)
	conn := w.dial(nil)
	const calls = 1500
	var wg sync.WaitGroup
	begun := time.Now()
	for range 10 {
		wg.Go(func() {
			for range calls / 10 {
				chanceryv1.NewIssuanceClient(conn).Issue(t.Context(), &chanceryv1.IssueRequest{})
			}
		})
	}
	wg.Wait()
	most := 1000 + int(time.Since(begun).Seconds()*100) + 1
	logged := len(w.records(audit.Denied))
	if left := int(w.metric("chancery_csr_denials_not_logged_total")); logged > most || logged < 1000 || logged+left != calls {
		t.Errorf("%d of %d refusals are in the audit log, %d were counted as left out; want 1,000 to %d", logged, calls, left, most)
	}
	if n := w.metric("chancery_csr_request_seconds", "native", csr.ReasonNoCredential); n != calls {
		t.Errorf("the metrics have %v refusals", n)
	}
	if n := strings.Count(w.output.String(), "certificate request refused"); n > most {
		t.Errorf("%d refusals are in the server's log", n)
	}
}

func TestLongTextFromTheNetworkIsShortenedInTheLogs(t *testing.T) {
	w := newWorld(t, withBroken("broken", func() error { return errors.New(strings.Repeat("long ", 1000)) }))
	long := strings.Repeat("spiffe://", 50_000)
	w.native(bearer(token(claims{}), "clusterid", "Kubernetes"), askNative(long))
	r := ask("")
	r.Metadata = must(structpb.NewStruct(map[string]any{"ImpersonatedIdentity": long}))
	w.istio(bearer(token(claims{}), "clusterid", "Kubernetes"), r)
	w.istio(bearer("x", "clusterid", "broken"), ask(""))
	w.istio(bearer("x", "clusterid", strings.Repeat("c", 4000)), ask(""))
	records := w.records(audit.Denied)
	if len(records) != 4 {
		t.Errorf("%d refusals are in the audit log, want 4", len(records))
	}
	for _, r := range records {
		if len(r.SPIFFEID) > 510 || len(r.Detail) > 510 {
			t.Errorf("record with %d and %d bytes", len(r.SPIFFEID), len(r.Detail))
		}
	}
	if n := len(w.output.String()); n > 10_000 {
		t.Errorf("the server's log has %d bytes, want few", n)
	}
}

// No token gets into an audit log, a server log or an answer, whatever is wrong with it.
func TestTokensAreNowhere(t *testing.T) {
	w := newWorld(t, withPods, withBroken("broken", func() error { return fmt.Errorf("no details") }),
		withBroken("panics", func() error { panic("bug") }))
	tokens := map[string]string{
		"good":          token(claims{uid: "uid-web"}),
		"expired":       token(claims{expires: -time.Minute}),
		"bad signature": token(claims{key: "wrong"}),
		"unknown key":   token(claims{kid: "other"}),
		"audience":      token(claims{audience: "vault"}),
		"pod gone":      token(claims{uid: "uid-gone"}),
		"ztunnel":       ztunnel(),
		"garbage":       strings.Repeat("Z2FyYmFnZQ", 30),
		"two parts":     strings.Repeat("Z2FyYmFnZQ", 30) + "." + strings.Repeat("eyJhbGciOiJ", 30),
		"not base64":    strings.Repeat("Z2F!YmFnZQ", 30) + ".?." + strings.Repeat("eyJhbGciOiJ", 30),
	}
	var said strings.Builder
	for _, tok := range tokens {
		for _, c := range []call{
			bearer(tok), bearer(tok, "clusterid", "Kubernetes"), bearer(tok, "clusterid", "east"), bearer(tok, "clusterid", "broken"),
			bearer(tok, "clusterid", "panics"), {headers: []string{"authorization", tok}}, {headers: []string{"authorization", "Basic " + tok}},
			bearer(tok, "authorization", "Bearer "+tok), {bearer(tok, "clusterid", "Kubernetes").headers, w.svid(webURI, nil)},
		} {
			for _, identity := range []string{"", dbURI} {
				_, err := w.istio(c, ask(identity))
				resp, nativeErr := w.native(c, askNative(identity), &chanceryv1.CertificateRequest{SpiffeId: identity})
				st, _, _ := refusal(err)
				nativeSt, _, _ := refusal(nativeErr)
				fmt.Fprintln(&said, st.Proto(), nativeSt.Proto(), resp.GetResults())
			}
		}
	}
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	w.log.Close()
	for where, text := range map[string]string{
		"answers": said.String(), "server log": w.output.String(), "audit log": string(must(os.ReadFile(w.logPath))),
	} {
		if len(text) < 1000 {
			t.Errorf("%s: only %d bytes; did the calls run?", where, len(text))
		}
		for name, tok := range tokens {
			for part := range strings.SplitSeq(tok, ".") {
				if len(part) > 30 && strings.Contains(text, part[:30]) || len(part) > 30 && strings.Contains(text, part[len(part)-30:]) {
					t.Errorf("%s: there is a part of the token %q", where, name)
				}
			}
		}
	}
}
