package svid

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// fetchTimeout bounds `svid fetch`.
const fetchTimeout = 15 * time.Second

// Command returns `chancery svid`, which looks for an agent at the usual sockets, in this order, if none is named.
func Command(usual ...string) *cobra.Command {
	cmd := &cobra.Command{Use: "svid", Short: "Fetch X.509-SVIDs from an agent's SPIFFE Workload API", Args: process.Group, RunE: process.Help}
	f := flags{usual: usual}
	fetch := &cobra.Command{
		Use: "fetch", Short: "Print the caller's SVIDs and bundles once", Args: process.NoArgs, PreRunE: f.check,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.fetch(cmd.Context(), cmd.OutOrStdout()) },
	}
	watch := &cobra.Command{
		Use: "watch", Short: "Print them at each renewal, until interrupted", Args: process.NoArgs, PreRunE: f.check,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return process.Ended(cmd.Context(), f.watch(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr()))
		},
	}
	for _, sub := range []*cobra.Command{fetch, watch} {
		sub.Flags().StringVar(&f.socket, "socket", "", "the agent's socket; default $SPIFFE_ENDPOINT_SOCKET, else the first that answers of "+strings.Join(usual, ", "))
		sub.Flags().StringVarP(&f.format, "output", "o", "text", "text, json (watch: one object a line) or pem (with the private key)")
		sub.Flags().StringVar(&f.write, "write", "", "also write svid.pem, svid_key.pem, bundle.pem and crl.pem (empty if there are no CRLs) into this folder, as a set, mode 0600")
		cmd.AddCommand(sub)
	}
	return cmd
}

type flags struct {
	usual                 []string
	socket, format, write string

	crls crls // of the answer that is shown
}

// check looks at the flags before anything is fetched.
func (f *flags) check(*cobra.Command, []string) error {
	return process.CheckFormat(f.format, "text", "json", "pem")
}

func (f *flags) fetch(ctx context.Context, out io.Writer) error {
	client, addr, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	got, err := client.FetchX509Context(ctx)
	if err != nil {
		return explain(addr, err)
	}
	return f.show(out, got, false)
}

func (f *flags) watch(ctx context.Context, out, stderr io.Writer) error {
	client, addr, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	err = client.WatchX509Context(ctx, &watcher{f, out, stderr, addr})
	if ctx.Err() != nil {
		return nil // interrupted: that is how watching ends
	}
	return explain(addr, err)
}

// watcher prints each update.
type watcher struct {
	flags  *flags
	out    io.Writer
	stderr io.Writer
	addr   string
}

// OnX509ContextUpdate implements workloadapi.X509ContextWatcher.
func (w *watcher) OnX509ContextUpdate(c *workloadapi.X509Context) {
	if err := w.flags.show(w.out, c, true); err != nil {
		fmt.Fprintf(w.stderr, "chancery: %v\n", err)
	}
}

// OnX509ContextWatchError implements workloadapi.X509ContextWatcher; the client tries again by itself.
func (w *watcher) OnX509ContextWatchError(err error) {
	if status.Code(err) != codes.Canceled {
		fmt.Fprintf(w.stderr, "chancery: %v; trying again\n", explain(w.addr, err))
	}
}

// connect finds the socket and makes a client for it, which connects when it is used.
func (f *flags) connect(ctx context.Context) (*workloadapi.Client, string, error) {
	addr, from, err := f.address()
	if err != nil {
		return nil, "", err
	}
	client, err := workloadapi.New(ctx, workloadapi.WithAddr(addr), workloadapi.WithDialOptions(grpc.WithStreamInterceptor(f.crls.intercept)))
	if err != nil {
		return nil, "", fmt.Errorf("%s: %q is no address of an agent, such as unix:///run/chancery/agent.sock: %w", from, addr, err)
	}
	return client, addr, nil
}

// address returns where the agent is, by the flag, the environment, or what answers; and which of these said so.
func (f *flags) address() (addr, from string, err error) {
	if f.socket != "" {
		if scheme, _, ok := strings.Cut(f.socket, "://"); ok && scheme != "unix" {
			return "", "", fmt.Errorf("--socket %q: give a path, or unix:// and a path", f.socket)
		}
		abs, err := filepath.Abs(strings.TrimPrefix(f.socket, "unix://"))
		if err != nil {
			return "", "", fmt.Errorf("--socket: %w", err)
		}
		return "unix://" + abs, "--socket", nil
	}
	if env, ok := workloadapi.GetDefaultAddress(); ok {
		return env, "$" + workloadapi.SocketEnv, nil
	}
	for _, path := range f.usual {
		if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
			conn.Close()
			return "unix://" + path, "the usual socket", nil
		}
	}
	return "", "", fmt.Errorf("no agent answers on %s; start one (`chancery dev` is the quickest) or name its socket with --socket", strings.Join(f.usual, " or "))
}

// explain says what a user can do about an error of the Workload API.
func explain(addr string, err error) error {
	message := status.Convert(err).Message()
	switch {
	case status.Code(err) == codes.PermissionDenied:
		return fmt.Errorf("the agent on %s has no identity for this user (uid %d): %s", addr, os.Getuid(), message)
	case errors.Is(err, context.DeadlineExceeded) || status.Code(err) == codes.DeadlineExceeded:
		return fmt.Errorf("the agent on %s has no identity to give yet; its log says why", addr)
	case status.Code(err) == codes.Unimplemented:
		return fmt.Errorf("what answers on %s is no agent: it does not know the SPIFFE Workload API; an agent's socket is named by `socket` in its config (%s)", addr, message)
	case status.Code(err) == codes.Unavailable:
		return fmt.Errorf("no agent answers on %s: is it running, and is this its socket? (%s)", addr, message)
	}
	return fmt.Errorf("asking the agent on %s: %w", addr, err)
}
