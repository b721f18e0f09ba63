package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/trust"
)

// fetchTimeout bounds `svid fetch`.
const fetchTimeout = 15 * time.Second

func newSVIDCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "svid", Short: "Fetch X.509-SVIDs from an agent's SPIFFE Workload API"}
	var f svidFlags
	fetch := &cobra.Command{
		Use: "fetch", Short: "Print the caller's SVIDs and bundles once", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.fetch(cmd.Context(), cmd.OutOrStdout()) },
	}
	watch := &cobra.Command{
		Use: "watch", Short: "Print them at each renewal, until interrupted", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.watch(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	for _, sub := range []*cobra.Command{fetch, watch} {
		sub.Flags().StringVar(&f.socket, "socket", "", "the agent's socket; default $SPIFFE_ENDPOINT_SOCKET, "+defaultSocket+", or that of `chancery dev`")
		sub.Flags().StringVarP(&f.format, "output", "o", "text", "text, json (watch: one object a line) or pem (with the private key)")
		sub.Flags().StringVar(&f.write, "write", "", "also write svid.pem, svid_key.pem and bundle.pem into this folder, as a set, mode 0600")
		cmd.AddCommand(sub)
	}
	return cmd
}

type svidFlags struct{ socket, format, write string }

// svidJSON is one SVID in JSON.
type svidJSON struct {
	SPIFFEID  string    `json:"spiffeId"`
	Serial    string    `json:"serial"` // hex
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
	Issuer    string    `json:"issuer"`
	Hint      string    `json:"hint"`
}

// svidsJSON is the whole answer in JSON; bundles hold PEM certificates by trust domain.
type svidsJSON struct {
	SVIDs   []svidJSON          `json:"svids"`
	Bundles map[string][]string `json:"bundles"`
}

func (f *svidFlags) fetch(ctx context.Context, out io.Writer) error {
	client, addr, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	got, err := client.FetchX509Context(ctx)
	if err != nil {
		return f.explain(addr, err)
	}
	return f.show(out, got, false)
}

func (f *svidFlags) watch(ctx context.Context, out, stderr io.Writer) error {
	client, addr, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	err = client.WatchX509Context(ctx, &svidWatcher{f, out, stderr, addr})
	if ctx.Err() != nil {
		return nil // interrupted: that is how watching ends
	}
	return f.explain(addr, err)
}

// svidWatcher prints each update.
type svidWatcher struct {
	flags  *svidFlags
	out    io.Writer
	stderr io.Writer
	addr   string
}

// OnX509ContextUpdate implements workloadapi.X509ContextWatcher.
func (w *svidWatcher) OnX509ContextUpdate(c *workloadapi.X509Context) {
	if err := w.flags.show(w.out, c, true); err != nil {
		fmt.Fprintf(w.stderr, "chancery: %v\n", err)
	}
}

// OnX509ContextWatchError implements workloadapi.X509ContextWatcher; the client tries again by itself.
func (w *svidWatcher) OnX509ContextWatchError(err error) {
	if status.Code(err) != codes.Canceled {
		fmt.Fprintf(w.stderr, "chancery: %v; trying again\n", w.flags.explain(w.addr, err))
	}
}

// connect finds the socket: the flag, the environment, the usual place, or a running `chancery dev`.
func (f *svidFlags) connect(ctx context.Context) (*workloadapi.Client, string, error) {
	addr, err := f.address()
	if err != nil {
		return nil, "", err
	}
	client, err := workloadapi.New(ctx, workloadapi.WithAddr(addr))
	if err != nil {
		return nil, "", fmt.Errorf("agent socket %s: %w", addr, err)
	}
	return client, addr, nil
}

func (f *svidFlags) address() (string, error) {
	if f.socket != "" {
		abs, err := filepath.Abs(f.socket)
		if err != nil {
			return "", fmt.Errorf("--socket: %w", err)
		}
		return "unix://" + abs, nil
	}
	if env, ok := workloadapi.GetDefaultAddress(); ok {
		return env, nil
	}
	candidates := []string{defaultSocket, filepath.Join(devDir(), "agent.sock")}
	for _, path := range candidates {
		if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
			conn.Close()
			return "unix://" + path, nil
		}
	}
	return "", fmt.Errorf("no agent answers on %v; start one (`chancery dev` is the quickest) or name its socket with --socket", candidates)
}

// explain says what a user can do about an error of the Workload API.
func (f *svidFlags) explain(addr string, err error) error {
	switch {
	case status.Code(err) == codes.PermissionDenied:
		return fmt.Errorf("the agent on %s has no identity for this user (uid %d): %s", addr, os.Getuid(), status.Convert(err).Message())
	case errors.Is(err, context.DeadlineExceeded) || status.Code(err) == codes.DeadlineExceeded:
		return fmt.Errorf("the agent on %s has no identity to give yet; its log says why", addr)
	}
	return fmt.Errorf("agent on %s: %w", addr, err)
}

func (f *svidFlags) show(out io.Writer, c *workloadapi.X509Context, again bool) error {
	if f.write != "" {
		if err := writeSVID(f.write, c); err != nil {
			return err
		}
	}
	switch f.format {
	case "json":
		if again {
			return json.NewEncoder(out).Encode(toJSON(c))
		}
		return writeJSON(out, toJSON(c))
	case "pem":
		return showPEM(out, c)
	case "text":
		showText(out, c)
		return nil
	}
	return badFormat(f.format, "text", "json", "pem")
}

func toJSON(c *workloadapi.X509Context) svidsJSON {
	j := svidsJSON{SVIDs: []svidJSON{}, Bundles: map[string][]string{}}
	for _, s := range c.SVIDs {
		leaf := s.Certificates[0]
		j.SVIDs = append(j.SVIDs, svidJSON{
			s.ID.String(), fmt.Sprintf("%x", leaf.SerialNumber), leaf.NotBefore.UTC(), leaf.NotAfter.UTC(), leaf.Issuer.String(), s.Hint,
		})
	}
	for _, b := range c.Bundles.Bundles() {
		var certs []string
		for _, r := range b.X509Authorities() {
			certs = append(certs, string(trust.EncodeCertificates(r)))
		}
		j.Bundles[b.TrustDomain().Name()] = certs
	}
	return j
}

func showText(out io.Writer, c *workloadapi.X509Context) {
	for _, s := range c.SVIDs {
		leaf := s.Certificates[0]
		fmt.Fprintf(out, "%s\n  serial %x\n  valid  %s to %s (%s left)\n  issuer %s\n", s.ID, leaf.SerialNumber,
			leaf.NotBefore.UTC().Format(time.RFC3339), leaf.NotAfter.UTC().Format(time.RFC3339),
			time.Until(leaf.NotAfter).Round(time.Second), leaf.Issuer)
	}
	for _, b := range c.Bundles.Bundles() {
		for _, r := range b.X509Authorities() {
			fmt.Fprintf(out, "trusts %s by %s until %s\n", b.TrustDomain().Name(), r.Subject, r.NotAfter.UTC().Format(time.RFC3339))
		}
	}
}

func showPEM(out io.Writer, c *workloadapi.X509Context) error {
	for _, s := range c.SVIDs {
		key, err := trust.EncodeKey(s.PrivateKey)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "%s%s", trust.EncodeCertificates(s.Certificates...), key)
	}
	_, err := out.Write(bundlePEM(c))
	return err
}

func bundlePEM(c *workloadapi.X509Context) []byte {
	var roots []*x509.Certificate
	for _, b := range c.Bundles.Bundles() {
		if slices.ContainsFunc(c.SVIDs[:1], func(s *svidOf) bool { return s.ID.TrustDomain() == b.TrustDomain() }) {
			roots = append(roots, b.X509Authorities()...)
		}
	}
	return trust.EncodeCertificates(roots...)
}
