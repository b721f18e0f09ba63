// Package files owns the plugged-in issuer: certificates and key that an admin, cert-manager or another tool puts into
// a folder, in the layout of Istio's cacerts Secret or of a kubernetes.io/tls Secret.
//
// Files are read as a set and judged by content, on a ticker: a mounted Secret changes by swapping a symbolic link,
// which file notifications miss more often than not. What does not pass every check is never used, and the last good
// set stays. It refuses sets that are incomplete, that do not fit together, or whose certificates have ended.
package files

import (
	"bytes"
	"context"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// Layout names the files of a folder.
type Layout struct {
	cert, key, chain, roots string // chain may be empty: then cert holds the whole chain
}

// The layouts.
var (
	// CACerts is Istio's: ca-cert.pem, ca-key.pem, cert-chain.pem, root-cert.pem.
	CACerts = Layout{"ca-cert.pem", "ca-key.pem", "cert-chain.pem", "root-cert.pem"}
	// TLS is that of cert-manager and kubernetes.io/tls Secrets: tls.crt, tls.key, ca.crt.
	TLS = Layout{"tls.crt", "tls.key", "", "ca.crt"}
)

// pollEvery is how often a folder is read.
const pollEvery = 5 * time.Second

// Set is what a folder held at one moment.
type Set struct {
	Key    crypto.Signer
	Chain  []*x509.Certificate // the issuing certificate first; no root
	Roots  []*x509.Certificate
	digest [sha256.Size]byte
}

// Read reads a folder. Errors name the file and what should be in it.
func Read(dir string, l Layout) (*Set, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("opening issuer folder: %w", err)
	}
	defer root.Close()
	names := []string{l.cert, l.key, l.chain, l.roots}
	content := map[string][]byte{}
	sum := sha256.New()
	for _, name := range names {
		if name == "" {
			continue
		}
		data, err := readBounded(root, name)
		if err != nil {
			return nil, fmt.Errorf("reading issuer: %s: %w", filepath.Join(dir, name), err)
		}
		content[name] = data
		fmt.Fprintf(sum, "%s %d\n", name, len(data))
		sum.Write(data)
	}
	s, err := l.parse(content, dir)
	if err != nil {
		return nil, err
	}
	sum.Sum(s.digest[:0])
	return s, nil
}

func readBounded(root *os.Root, name string) ([]byte, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, trust.MaxPEMBytes+1))
	if err != nil {
		return nil, err
	}
	if len(data) > trust.MaxPEMBytes {
		return nil, fmt.Errorf("larger than %d bytes", trust.MaxPEMBytes)
	}
	return data, nil
}

func (l Layout) parse(content map[string][]byte, dir string) (*Set, error) {
	at := func(name string) string { return filepath.Join(dir, name) }
	certs, err := trust.ParseCertificates(content[l.cert])
	if err != nil {
		return nil, fmt.Errorf("reading issuer: %s: %w", at(l.cert), err)
	}
	key, err := trust.ParseKey(content[l.key])
	if err != nil {
		return nil, fmt.Errorf("reading issuer: %s: %w", at(l.key), err)
	}
	roots, err := trust.ParseCertificates(content[l.roots])
	if err != nil {
		return nil, fmt.Errorf("reading issuer: %s: %w", at(l.roots), err)
	}
	if l.chain != "" && len(bytes.TrimSpace(content[l.chain])) > 0 { // empty where the root itself issues
		more, err := trust.ParseCertificates(content[l.chain])
		if err != nil {
			return nil, fmt.Errorf("reading issuer: %s: %w", at(l.chain), err)
		}
		certs = append(certs, more...)
	}
	if !trust.SameKey(certs[0].PublicKey, key.Public()) {
		return nil, fmt.Errorf("reading issuer: the key in %s does not belong to the first certificate in %s", at(l.key), at(l.cert))
	}
	return &Set{Key: key, Chain: withoutRepeats(certs, roots), Roots: withoutRepeats(roots, nil)}, nil
}

// withoutRepeats drops repeated certificates, and those of except, but never the first.
func withoutRepeats(certs, except []*x509.Certificate) []*x509.Certificate {
	out := certs[:1:1]
	for _, c := range certs[1:] {
		if !slices.ContainsFunc(slices.Concat(out, except), c.Equal) {
			out = append(out, c)
		}
	}
	return out
}

// Watcher reads a folder again and again and hands over each new set.
type Watcher struct {
	Dir    string
	Layout Layout
	Last   *Set             // what is in use
	Apply  func(*Set) error // takes a set into use, or says why not
	Logger *slog.Logger
}

// Run watches until ctx ends. A set that cannot be read or applied is tried again each time, and reported when the reason
// changes.
func (w *Watcher) Run(ctx context.Context) error {
	ticker := time.NewTicker(pollEvery)
	defer ticker.Stop()
	var reported string
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		err := w.check()
		switch {
		case err == nil:
			reported = ""
		case err.Error() != reported:
			reported = err.Error()
			w.Logger.Error("new issuer files are not used; the last good ones stay in use", "reason", reported)
		}
	}
}

func (w *Watcher) check() error {
	s, err := Read(w.Dir, w.Layout)
	if err != nil {
		return err
	}
	if s.digest == w.Last.digest {
		return nil
	}
	if err := w.Apply(s); err != nil {
		return err
	}
	w.Last = s
	return nil
}
