// Package rotate owns `chancery rotate`: what an admin asks a running server about the rotation of its root and issuers, and how the
// answer is said.
//
// It decides nothing, and refuses to make a gate look passed that was overridden, or a rotation done that was taken back.
package rotate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/admin"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/rotating"
)

// patience is how long the server may take: a change is a write to the store, tried again after a conflict.
const patience = 30 * time.Second

// Asker has the flags of a subcommand that asks a server about what is under way, and says what it answers. There is one for each.
type Asker struct {
	name   string // of the command whose subcommand it is, such as "rotate"
	server admin.Flags
	format string
}

// NewAsker returns one for a subcommand of `chancery NAME`. Dev is the admin socket of `chancery dev`.
func NewAsker(name, dev string) *Asker { return &Asker{name: name, server: admin.Flags{Dev: dev}} }

// Add adds the flags.
func (c *Asker) Add(cmd *cobra.Command, formats string) {
	c.server.Add(cmd)
	cmd.Flags().StringVarP(&c.format, "output", "o", "text", formats)
}

// Ask asks the server, and names the subcommand in what goes wrong.
func (c *Asker) Ask(ctx context.Context, name string, do func(context.Context, chanceryv1.AdminClient) error) error {
	if err := process.CheckFormat(c.format, "text", "json"); err != nil {
		return err
	}
	if err := c.server.Call(ctx, patience, do); err != nil {
		return fmt.Errorf("%s %s: %w", c.name, name, err)
	}
	return nil
}

// Plan asks what a rotation would do, and prints it.
func (c *Asker) Plan(cmd *cobra.Command, q *chanceryv1.StartRotationRequest) error {
	var resp *chanceryv1.PlanRotationResponse
	err := c.Ask(cmd.Context(), "plan", func(ctx context.Context, a chanceryv1.AdminClient) (err error) {
		resp, err = a.PlanRotation(ctx, q)
		return err
	})
	if err != nil {
		return err
	}
	return printPlan(cmd.OutOrStdout(), c.format, c.server.Again(), q, resp)
}

// Start starts a rotation, and prints that it has begun.
func (c *Asker) Start(cmd *cobra.Command, q *chanceryv1.StartRotationRequest) error {
	var resp *chanceryv1.RotationStatus
	err := c.Ask(cmd.Context(), "start", func(ctx context.Context, a chanceryv1.AdminClient) (err error) {
		resp, err = a.StartRotation(ctx, q)
		return err
	})
	if err != nil {
		return err
	}
	return printChanged(cmd.OutOrStdout(), c.format, c.server.Again(), "started", resp)
}

// Command returns `chancery rotate`. Dev is the admin socket of `chancery dev`, which is asked if it answers and no server is named.
func Command(dev string) *cobra.Command {
	cmd := &cobra.Command{
		Use: "rotate", Short: "Replace the root or the issuer, with evidence that everybody follows", Args: process.Group, RunE: process.Help,
		Long: "Replaces the root, with the issuer under it, or the issuer alone, in phases: prepare, distribute, activate, reissue, retire.\n" +
			"Each phase ends once its gates have passed: servers and consumers have said that they are ready for the next one. Nothing is\n" +
			"restarted, and no connection is lost. docs/rotation.md says what each gate waits for, and what to do if it waits for long.",
	}
	ask := func() *Asker { return NewAsker("rotate", dev) }
	cmd.AddCommand(planCommand(ask()), startCommand(ask()), statusCommand(ask()), OverrideCommand(ask()))
	for _, c := range changes {
		cmd.AddCommand(ChangeCommand(ask(), c.name, c.short, c.long))
	}
	return cmd
}

// what are the flags that say what shall be rotated.
type what struct {
	root, issuer bool
	reason       string
}

func (w *what) add(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&w.root, "root", false, "the root, and the issuer under it")
	cmd.Flags().BoolVar(&w.issuer, "issuer", false, "the issuer, under the same root")
	cmd.Flags().StringVar(&w.reason, "reason", "", "compromised: the key may be known to others, so that what is under it is taken out as fast as can be")
}

// request checks what was asked for.
func (w *what) request() (*chanceryv1.StartRotationRequest, error) {
	q := &chanceryv1.StartRotationRequest{Kind: "root", Reason: w.reason}
	switch {
	case w.root == w.issuer:
		return nil, errors.New("what? Use either --root (the root, and the issuer under it) or --issuer (under the same root)")
	case w.reason != "" && w.reason != rotating.Compromised:
		return nil, fmt.Errorf("--reason %q is not known; use %s, or leave it out", w.reason, rotating.Compromised)
	case w.issuer:
		q.Kind = "issuer"
	}
	return q, nil
}

func planCommand(c *Asker) *cobra.Command {
	var w what
	cmd := &cobra.Command{
		Use: "plan --root|--issuer [--reason compromised] -c FILE|--admin SOCKET", Short: "Say what a rotation would do, and how long it may take", Args: process.NoArgs,
		Long: "Prints the phases of a rotation, what each waits for and how long it may take with the lifetimes that there are. It changes nothing.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := w.request()
			if err != nil {
				return fmt.Errorf("rotate plan: %w", err)
			}
			return c.Plan(cmd, q)
		},
	}
	w.add(cmd)
	c.Add(cmd, "text or json")
	return cmd
}

func startCommand(c *Asker) *cobra.Command {
	var w what
	cmd := &cobra.Command{
		Use: "start --root|--issuer [--reason compromised] -c FILE|--admin SOCKET", Short: "Start a rotation", Args: process.NoArgs,
		Long: "Starts a rotation and returns at once; `chancery rotate status -w` watches it. Look at `chancery rotate plan` first. There is one at a\n" +
			"time. With --reason compromised the predecessor is tainted: nothing brings it back, and what it signed is replaced before its time.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := w.request()
			if err != nil {
				return fmt.Errorf("rotate start: %w", err)
			}
			return c.Start(cmd, q)
		},
	}
	w.add(cmd)
	c.Add(cmd, "text or json")
	return cmd
}

// changes are the subcommands that change a rotation and need no more than its ID.
var changes = []struct{ name, short, long string }{
	{"pause", "Let no gate of the rotation pass", "Lets no gate pass until `chancery rotate resume`: the rotation stays in its phase. Certificates are issued and renewed as ever."},
	{"resume", "Let the gates of a paused rotation pass again", "Ends a pause: gates that have passed meanwhile count at once."},
	{"abort", "Give a rotation up before its successor signs", "Gives a rotation up in phase prepare or distribute: the successor leaves, and all is as before. Later there is `chancery rotate rollback`."},
	{"rollback", "Go back to the predecessor", "Goes back to the predecessor: in prepare and distribute as `abort`; in activate and reissue the predecessor signs again and the\n" +
		"successor is taken out by the same phases. Not in retire, when the predecessor is not trusted any more, and never to one that is\n" +
		"tainted: there, start another rotation once this one is done."},
}

// target are the flags and the argument that name a change.
type target struct{ rotation, because string }

func (t *target) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&t.rotation, "rotation", "", "ID of the rotation that is meant; another one is not touched (default: the one under way)")
}

// ChangeCommand returns a subcommand that changes what is under way.
func ChangeCommand(c *Asker, name, short, long string) *cobra.Command {
	var t target
	cmd := &cobra.Command{
		Use: name + " -c FILE|--admin SOCKET", Short: short, Long: long, Args: process.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.Change(cmd, &chanceryv1.ChangeRotationRequest{Change: name, Rotation: t.rotation})
		},
	}
	t.add(cmd)
	c.Add(cmd, "text or json")
	return cmd
}

// OverrideCommand returns the subcommand that lets a gate pass.
func OverrideCommand(c *Asker) *cobra.Command {
	var t target
	cmd := &cobra.Command{
		Use: "override GATE --because TEXT -c FILE|--admin SOCKET", Short: "Let a gate pass without its evidence", Args: process.OneArg,
		Long: "Lets a gate of the phase pass though not all is there that it waits for: replicas, consumers, readers or stragglers, as\n" +
			"`chancery " + c.name + " status` shows them. Who is waited for may refuse others, or be refused, until it has caught up. It counts for this\n" +
			"phase only, and goes with its reason into the audit log and into the authority document. docs/rotation.md says what each risks.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := rotating.CheckBecause(t.because); err != nil {
				return fmt.Errorf("%s override: %w", c.name, err)
			}
			return c.Change(cmd, &chanceryv1.ChangeRotationRequest{Change: "override", Gate: args[0], Because: t.because, Rotation: t.rotation})
		},
	}
	t.add(cmd)
	cmd.Flags().StringVar(&t.because, "because", "", "why, for those who read the audit log")
	c.Add(cmd, "text or json")
	return cmd
}

// isAbout refuses to change a rotation of the root or an issuer by a command for migrations. A migration is a rotation, too.
func (c *Asker) isAbout(x *chanceryv1.Rotation) error {
	if "chancery "+c.name == migrate && x != nil && x.GetToDomain() == "" {
		return fmt.Errorf("no migration is under way, but rotation %s of the %s, in phase %s: see `chancery rotate status`", x.GetId(), process.Printable(x.GetKind()), process.Printable(x.GetPhase()))
	}
	return nil
}

// Change asks for a change of the rotation under way, and prints what that has led to: of that very one, also if it ends and another begins
// meanwhile.
func (c *Asker) Change(cmd *cobra.Command, q *chanceryv1.ChangeRotationRequest) error {
	var resp *chanceryv1.RotationStatus
	err := c.Ask(cmd.Context(), q.GetChange(), func(ctx context.Context, a chanceryv1.AdminClient) (err error) {
		if resp, err = a.GetRotation(ctx, new(chanceryv1.GetRotationRequest)); err != nil {
			return err
		}
		if err := c.isAbout(resp.GetRotation()); err != nil {
			return err
		}
		if q.Rotation == "" {
			q.Rotation = resp.GetRotation().GetId() // empty if there is none: the server says so
		}
		resp, err = a.ChangeRotation(ctx, q)
		return err
	})
	if err != nil {
		return err
	}
	return printChanged(cmd.OutOrStdout(), c.format, c.server.Again(), q.GetChange(), resp)
}

func statusCommand(c *Asker) *cobra.Command {
	return StatusCommand(c, "Show the rotation under way, and what it waits for",
		"Prints the phase of the rotation under way, its gates, who they wait for and why, and when it ends at the latest; or, if none is\n"+
			"under way, how the last ones ended.\n\n"+
			"With -w it goes on until the rotation ends: on a terminal as a table that is drawn anew, else a line for each change (with -o json\n"+
			"an object). Exit code then: 0 done, or no rotation was ever started; 2 aborted or rolled back; 1 the server could not be asked, or\n"+
			"it was interrupted. If none is under way, it is that of the last one.")
}

// StatusCommand returns the subcommand that shows what is under way.
func StatusCommand(c *Asker, short, long string) *cobra.Command {
	var watch bool
	cmd := &cobra.Command{
		Use: "status [-w] -c FILE|--admin SOCKET", Short: short, Long: long, Args: process.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if watch {
				return c.watch(cmd.Context(), cmd.OutOrStdout())
			}
			resp, err := c.status(cmd.Context())
			if err != nil {
				return err
			}
			return printStatus(cmd.OutOrStdout(), c.format, resp)
		},
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "go on until the rotation ends")
	c.Add(cmd, "text or json (with -w: one object a line)")
	return cmd
}

func (c *Asker) status(ctx context.Context) (resp *chanceryv1.RotationStatus, err error) {
	err = c.Ask(ctx, "status", func(ctx context.Context, a chanceryv1.AdminClient) (err error) {
		resp, err = a.GetRotation(ctx, new(chanceryv1.GetRotationRequest))
		return err
	})
	return resp, err
}
