// Command chancery is a certificate authority and identity service for service meshes: server, node agent and the
// commands around them in one binary.
//
// This package owns the root command, the exit code and the version; each command lives in a room of its own below it.
// It refuses any decision: what is issued, to whom and when is decided in the packages that the rooms put together.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/cmd/chancery/agent"
	"github.com/chancery-project/chancery/cmd/chancery/ceremony"
	"github.com/chancery-project/chancery/cmd/chancery/dev"
	"github.com/chancery-project/chancery/cmd/chancery/doctor"
	"github.com/chancery-project/chancery/cmd/chancery/inspect"
	"github.com/chancery-project/chancery/cmd/chancery/log"
	"github.com/chancery-project/chancery/cmd/chancery/naming"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/replica"
	"github.com/chancery-project/chancery/cmd/chancery/revoke"
	"github.com/chancery-project/chancery/cmd/chancery/rotate"
	"github.com/chancery-project/chancery/cmd/chancery/server"
	"github.com/chancery-project/chancery/cmd/chancery/state"
	"github.com/chancery-project/chancery/cmd/chancery/status"
	"github.com/chancery-project/chancery/cmd/chancery/svid"
	"github.com/chancery-project/chancery/cmd/chancery/trust"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends a process that takes too long to stop
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run executes one command line and returns the exit code: 0 done, or ended as told where a command runs until then; 1
// failed, or interrupted before it was done.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	cmd := newRoot()
	cmd.SetArgs(args)
	cmd.SetIn(stdin)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	err := cmd.ExecuteContext(ctx)
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintln(stderr, "chancery: interrupted")
	default:
		fmt.Fprintf(stderr, "chancery: %v\n", err)
	}
	if e, ok := errors.AsType[*process.ExitError](err); ok {
		return e.Code
	}
	return 1
}

func newRoot() *cobra.Command {
	info, _ := debug.ReadBuildInfo()
	root := &cobra.Command{
		Use:   "chancery",
		Short: "Certificate authority and identity service for service meshes",
		Long: "Chancery issues X.509-SVIDs to workloads that prove themselves with Kubernetes service-account tokens,\n" +
			"serves them to proxies over SDS and the SPIFFE Workload API, and rotates them.\n\n" +
			"To see it work on this machine: chancery dev",
		SilenceErrors: true, SilenceUsage: true, Version: version(info), Args: process.Group, RunE: process.Help,
	}
	root.SetFlagErrorFunc(process.FlagError)
	authority := server.AuthorityCommand()
	authority.AddCommand(ceremony.Command(), ceremony.ImportCommand())
	root.AddCommand(server.Command(), agent.Command(), dev.Command(), authority,
		svid.Command(agent.DefaultSocket, dev.DefaultSocket()), inspect.Command(), log.Command(), revoke.Command(), revoke.RestoreCommand(),
		rotate.Command(dev.DefaultAdmin()), trust.Command(dev.DefaultAdmin()), naming.Command(),
		status.Command(), doctor.Command(), state.Command(), replica.Command())
	return root
}

// version says which module version and commit this binary was built from, as far as the build knows. info may be nil.
func version(info *debug.BuildInfo) string {
	if info == nil {
		return "unknown"
	}
	v := info.Main.Version
	if v == "" || v == "(devel)" {
		v = "devel"
	}
	set := map[string]string{}
	for _, s := range info.Settings {
		set[s.Key] = s.Value
	}
	if rev := set["vcs.revision"]; rev != "" {
		v += ", revision " + rev
		if set["vcs.modified"] == "true" {
			v += " with changes"
		}
	}
	return v + ", " + info.GoVersion
}
