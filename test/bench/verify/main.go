// Command verify measures trust.Verify with 20 trust domains of 5 roots each against crypto/x509 that knows one root, in pairs that take turns in
// the same run. Both see the same chains: a leaf and its issuer.
//
// It refuses to count a verification that fails, and to call a target met that is not.
package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net/url"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// Targets of DESIGN.md.
const (
	domains     = 20
	roots       = 5 // of each
	targetRatio = 1.2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "verify:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet("verify", flag.ContinueOnError)
	pairs := flags.Int("pairs", 21, "how often each side is measured")
	rounds := flags.Int("rounds", 10, "how often each of the 100 leaves is verified in a measurement")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var missed []error
	for _, names := range []string{"different", "equal"} {
		w, err := newWorld(names == "equal")
		if err != nil {
			return err
		}
		if err := w.compare(ctx, stdout, names, *pairs, *rounds); err != nil {
			missed = append(missed, err)
		}
	}
	return errors.Join(missed...)
}

// peer is a chain, and what each side verifies it by.
type peer struct {
	id    trust.ID
	chain []*x509.Certificate
	root  *x509.CertPool // the one that it leads to
}

type world struct {
	peers   []peer
	bundles map[trust.Domain]*trust.Bundle
}

// newWorld makes the authorities of all trust domains. Roots of one trust domain have names of their own, or one name, as where somebody renews a root
// under the old name.
func newWorld(equalNames bool) (*world, error) {
	w := &world{bundles: map[trust.Domain]*trust.Bundle{}}
	for d := range domains {
		td, err := trust.ParseDomain(fmt.Sprintf("domain-%d.example", d))
		if err != nil {
			return nil, err
		}
		var all []*x509.Certificate
		for r := range roots {
			name := td.String()
			if !equalNames {
				name = fmt.Sprintf("%s %d", name, r)
			}
			root, p, err := newPeer(td, name)
			if err != nil {
				return nil, err
			}
			all = append(all, root)
			w.peers = append(w.peers, p)
		}
		if w.bundles[td], err = trust.NewBundle(td, 1, all); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// newPeer makes a root, an issuer below it, and an SVID.
func newPeer(td trust.Domain, name string) (*x509.Certificate, peer, error) {
	ca := func(name string) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		}
	}
	id, err := trust.WorkloadID(td, "shop", "web")
	if err != nil {
		return nil, peer{}, err
	}
	rootKey, issuerKey, leafKey := newKey(), newKey(), newKey()
	root, err := sign(ca(name), nil, rootKey, rootKey)
	if err != nil {
		return nil, peer{}, err
	}
	issuer, err := sign(ca("issuer of "+name), root, issuerKey, rootKey)
	if err != nil {
		return nil, peer{}, err
	}
	leaf, err := sign(&x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}, URIs: []*url.URL{id.URL()},
	}, issuer, leafKey, issuerKey)
	if err != nil {
		return nil, peer{}, err
	}
	p := peer{id, []*x509.Certificate{leaf, issuer}, x509.NewCertPool()}
	p.root.AddCert(root)
	return root, p, nil
}

func newKey() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err) // crypto/rand does not fail
	}
	return key
}

func sign(template, parent *x509.Certificate, key, by *ecdsa.PrivateKey) (*x509.Certificate, error) {
	if parent == nil {
		parent = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// ours verifies by the bundle of the leaf's trust domain.
func (w *world) ours(p *peer, now time.Time) error {
	id, _, err := trust.Verify(p.chain, func(d trust.Domain) *trust.Bundle { return w.bundles[d] }, now)
	if err == nil && id != p.id {
		err = fmt.Errorf("verified %s as %s", p.id, id)
	}
	return err
}

// floor verifies by one root, as crypto/tls does.
func (w *world) floor(p *peer, now time.Time) error {
	intermediates := x509.NewCertPool()
	for _, c := range p.chain[1:] {
		intermediates.AddCert(c)
	}
	_, err := p.chain[0].Verify(x509.VerifyOptions{Roots: p.root, Intermediates: intermediates, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err
}

// measure returns what one verification takes.
func (w *world) measure(verify func(*peer, time.Time) error, rounds int) (time.Duration, error) {
	runtime.GC()
	begun := time.Now()
	for range rounds {
		for i := range w.peers {
			if err := verify(&w.peers[i], begun); err != nil {
				return 0, err
			}
		}
	}
	return time.Since(begun) / time.Duration(rounds*len(w.peers)), nil
}

func (w *world) compare(ctx context.Context, stdout io.Writer, names string, pairs, rounds int) error {
	var ratios []float64
	var ours, floor []time.Duration
	for i := range pairs + 1 {
		if err := ctx.Err(); err != nil {
			return err
		}
		a, err := w.measure(w.ours, rounds)
		if err != nil {
			return err
		}
		b, err := w.measure(w.floor, rounds)
		if err != nil {
			return err
		}
		if i == 0 {
			continue // warms up
		}
		ours, floor, ratios = append(ours, a), append(floor, b), append(ratios, float64(a)/float64(b))
	}
	slices.Sort(ours)
	slices.Sort(floor)
	slices.Sort(ratios)
	ratio := ratios[len(ratios)/2]
	fmt.Fprintf(stdout, "verify domains=%d roots=%d names=%s ours=%s floor=%s ratio=%.2f (pairs %.2f to %.2f) target=%.1f\n",
		domains, roots, names, ours[len(ours)/2], floor[len(floor)/2], ratio, ratios[0], ratios[len(ratios)-1], targetRatio)
	if ratio > targetRatio {
		return fmt.Errorf("roots with %s names: ratio %.2f is above the target of %.1f", names, ratio, targetRatio)
	}
	return nil
}
