// Package endpoint owns the bundle endpoint: how this authority's roots are shown to those who federate with it (SPIFFE Federation), over
// HTTP that somebody else has put into TLS.
//
// It needs nothing but the roots: it answers while no certificate can be issued. It refuses every method but GET and HEAD, and takes nothing
// from who asks but the path and the entity tags that he has.
package endpoint

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"

	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// Config is what a Handler is made of.
type Config struct {
	// Bundle returns the bundle of the present trust domain, with its kin. It is asked for each request, so it should cost little; the same
	// bundle again costs nothing more.
	Bundle func() (*trust.Bundle, error)
	// RefreshHint is how often those who federate are asked to come.
	RefreshHint time.Duration
	Logger      *slog.Logger
}

// Handler serves the bundle of the present trust domain at /, and that of each domain of the authority at /DOMAIN.
type Handler struct {
	config Config
	pages  atomic.Pointer[pages] // of the bundle that was asked for last
}

// pages are what is served of a bundle, by path.
type pages struct {
	of     *trust.Bundle
	byPath map[string]page
}

type page struct {
	body []byte
	tag  string
}

// New returns a handler.
func New(c Config) *Handler { return &Handler{config: c} }

// ServeHTTP answers.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "a bundle can be read only", http.StatusMethodNotAllowed)
		return
	}
	all, err := h.current()
	if err != nil { // who asks is anybody, and need not know
		h.config.Logger.Error("bundle endpoint", "reason", err.Error())
		http.Error(w, "the bundle cannot be read now", http.StatusServiceUnavailable)
		return
	}
	p, ok := all.byPath[r.URL.Path]
	if !ok {
		http.Error(w, "there is no such bundle here", http.StatusNotFound)
		return
	}
	head := w.Header()
	head.Set("ETag", p.tag)
	head.Set("Cache-Control", "max-age="+strconv.Itoa(int(h.config.RefreshHint/time.Second)))
	if matches(r.Header.Values("If-None-Match"), p.tag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	head.Set("Content-Type", spiffebundle.MediaType)
	head.Set("X-Content-Type-Options", "nosniff")
	head.Set("Content-Length", strconv.Itoa(len(p.body)))
	if r.Method == http.MethodGet {
		w.Write(p.body)
	}
}

// current returns the pages of the bundle that there is now.
func (h *Handler) current() (*pages, error) {
	b, err := h.config.Bundle()
	if err != nil {
		return nil, err
	}
	if have := h.pages.Load(); have != nil && (have.of == b || have.of.Generation() == b.Generation() && have.of.SameRoots(b)) {
		return have, nil
	}
	next := &pages{of: b, byPath: map[string]page{}}
	for i, one := range append([]*trust.Bundle{b}, b.Kin()...) {
		// A former domain has no roots, and is served all the same: whoever still federates with it learns that nothing of it is trusted.
		body, err := spiffebundle.FromTrust(one, h.config.RefreshHint).Marshal()
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(body)
		p := page{body, `"` + hex.EncodeToString(sum[:16]) + `"`}
		next.byPath["/"+one.Domain().String()] = p
		if i == 0 {
			next.byPath["/"] = p
		}
	}
	h.pages.Store(next)
	return next, nil
}

// matches reports whether one of the tags in If-None-Match is ours (RFC 9110 section 13.1.2); a weak one counts as it is.
func matches(fields []string, tag string) bool {
	for _, f := range fields {
		for one := range strings.SplitSeq(f, ",") {
			if one = strings.TrimSpace(one); one == "*" || strings.TrimPrefix(one, "W/") == tag {
				return true
			}
		}
	}
	return false
}

// Bounds on what anybody who can connect may do.
const (
	maxConnections = 500
	maxHeader      = 16 << 10
	readTimeout    = 10 * time.Second // of a TLS handshake, and of a whole request
	writeTimeout   = 20 * time.Second
	idleTimeout    = 30 * time.Second
)

// suites of TLS 1.2 are those of Mozilla's "intermediate", which the standard names; crypto/tls has some with CBC besides.
var suites = []uint16{
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
	tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
}

// Serve serves a handler over TLS until ctx ends. A connection beyond those that are allowed at a time waits until another one has ended.
func Serve(ctx context.Context, l net.Listener, config *tls.Config, h http.Handler, logger *slog.Logger) error {
	config = config.Clone()
	config.MinVersion, config.CipherSuites = tls.VersionTLS12, suites
	s := &http.Server{
		Handler: h, TLSConfig: config, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelDebug), // each failed handshake of anybody
	}
	s.Protocols = new(http.Protocols)
	s.Protocols.SetHTTP1(true) // an answer or two for each connection
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.ServeTLS(netutil.LimitListener(l, maxConnections), "", ""); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving the bundle endpoint on %s: %w", l.Addr(), err)
	}
	return nil
}
