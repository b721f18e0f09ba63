// Package https owns HTTPS calls to a parent CA: JSON in, JSON out, against the roots of a file, within bounds.
//
// It refuses plain HTTP beyond this machine, redirects (the next host would get the credential too), proxies, and answers
// that are larger than a chain can be. Secrets of a call are taken out of every error, also where the other side repeats them.
package https

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/chancery-project/chancery/trust"
)

const (
	maxAnswer   = 2 << 20 // a chain in PEM within JSON
	maxText     = 300     // of an error that the other side sends
	dialTimeout = 10 * time.Second
)

// Endpoint is where a parent answers.
type Endpoint struct {
	base  *url.URL
	roots string // file; empty: the system's roots
}

// New checks an address, such as https://vault.example:8200, and takes the PEM file of the roots that vouch for it; an empty
// one means the system's roots. The file is read for each call.
func New(address, roots string) (*Endpoint, error) {
	u, err := url.Parse(address)
	switch {
	case err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return nil, fmt.Errorf("%q is not an address such as https://host:8200", address)
	case u.Scheme == "http" && loopback(u.Hostname()):
		if roots != "" {
			return nil, fmt.Errorf("%s is plain HTTP, so roots would not be used; write https, or leave them out", address)
		}
	case u.Scheme != "https":
		return nil, fmt.Errorf("%s should begin with https://; plain HTTP is for this machine's own addresses only", address)
	}
	return &Endpoint{u, roots}, nil
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// StatusError is an answer other than 200.
type StatusError struct {
	Status int
	Body   []byte // at most as much as an answer may have
}

// Error gives the status, and of the body nothing: see Text.
func (e *StatusError) Error() string {
	return fmt.Sprintf("HTTP status %d %s", e.Status, http.StatusText(e.Status))
}

// Call is one request.
type Call struct {
	Path    string // below the endpoint's address
	Header  map[string]string
	In      any
	Secrets []string // taken out of errors
}

// Post makes a call and decodes the answer into out; nil if it is of no interest. A status other than 200 (or 204 without an
// answer) is a *StatusError.
func (e *Endpoint) Post(ctx context.Context, c Call, out any) error {
	err := e.post(ctx, c, out)
	if _, ok := errors.AsType[*StatusError](err); ok || err == nil {
		return err
	}
	return errors.New(Clean(err.Error(), c.Secrets...))
}

func (e *Endpoint) post(ctx context.Context, c Call, out any) error {
	body, err := json.Marshal(c.In)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.base.JoinPath(c.Path).String(), bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	for k, v := range c.Header {
		req.Header.Set(k, v)
	}
	client, err := e.client()
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return fmt.Errorf("reading the answer of %s: %w", req.URL, err)
	case len(data) > maxAnswer:
		return fmt.Errorf("the answer of %s has more than %d bytes", req.URL, maxAnswer)
	case out == nil && resp.StatusCode == http.StatusNoContent:
		return nil
	case resp.StatusCode != http.StatusOK:
		return &StatusError{resp.StatusCode, data}
	case out == nil:
		return nil
	}
	if err := json.Unmarshal(data, out); err != nil { // unknown fields are the other side's business
		return fmt.Errorf("the answer of %s is not the JSON that it should be: %w", req.URL, err)
	}
	return nil
}

// client is made for each call: they are hours apart, and the roots may have changed.
func (e *Endpoint) client() (*http.Client, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if e.roots != "" {
		certs, err := Certificates(e.roots)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		for _, c := range certs {
			config.RootCAs.AddCert(c)
		}
	}
	return &http.Client{
		Transport: &http.Transport{
			TLSClientConfig: config, DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10, TLSHandshakeTimeout: dialTimeout,
			DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext,
		},
		CheckRedirect: func(r *http.Request, _ []*http.Request) error {
			return fmt.Errorf("it redirects to %s; give the address that answers itself", r.URL.Host)
		},
	}, nil
}

// Certificates reads a PEM file of certificates, bounded.
func Certificates(path string) ([]*x509.Certificate, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, trust.MaxPEMBytes+1))
	if err != nil {
		return nil, err
	}
	certs, err := trust.ParseCertificates(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return certs, nil
}

// Clean bounds a text of the other side's, makes it one line, and takes secrets out of it.
func Clean(text string, secrets ...string) string {
	for _, s := range secrets {
		if s != "" {
			text = strings.ReplaceAll(text, s, "[secret]")
		}
	}
	text = strings.Join(strings.Fields(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))), " ")
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "..."
	}
	return text
}
