// Package log owns `chancery log`: verifying issuance logs, proving that a certificate is in one, and searching them.
//
// It refuses to write to a log, and to pass off a part for the whole: what could not be read is named, as INCOMPLETE, and
// the exit code is 2.
package log

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// Command returns `chancery log`.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use: "log", Short: "Verify, prove and search what was issued", Args: process.Group, RunE: process.Help,
		Long: "Works on issuance logs: the folders that issuanceLog in a server's config names, also while the server runs.\n" +
			"docs/log.md describes their files.",
	}
	cmd.AddCommand(verifyCommand(), proveCommand(), checkProofCommand(), searchCommand(), auditCommand())
	return cmd
}

func verifyCommand() *cobra.Command {
	var earlier, key, format string
	cmd := &cobra.Command{
		Use: "verify DIR", Short: "Recompute everything in a log", Args: process.OneArg,
		Long: "Reads all of a log and recomputes everything: the checkpoint's signature, its root from the entries, each tile, that\n" +
			"each serial is used once, that each certificate follows its intent and has the hash that the intent announced.\n" +
			"With --checkpoint it also holds the log to a checkpoint that was copied away earlier: a log that was rebuilt is a\n" +
			"fork. Without --key the public key beside the log is believed, which whoever can write to the log could have changed.\n" +
			"Exit code 0: clean. 1: something does not fit; it is named.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			c := verify.Config{Dir: args[0], EarlierName: earlier}
			var err error
			if c.PublicKey, err = readKey(key); err != nil {
				return err
			}
			if earlier != "" {
				if c.Earlier, err = issuelog.ReadSmall(earlier); err != nil {
					return fmt.Errorf("--checkpoint: %w", err)
				}
			}
			report, err := verify.Log(cmd.Context(), c)
			if err != nil {
				return fmt.Errorf("log verify: %w", err)
			}
			return printReport(cmd.OutOrStdout(), format, args[0], report)
		},
	}
	cmd.Flags().StringVar(&earlier, "checkpoint", "", "file with an earlier checkpoint of the log, to which it is held")
	cmd.Flags().StringVar(&key, "key", "", "file with the log's public key (default: log.pub in DIR)")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// readKey reads a file with a public key; no file gives no key.
func readKey(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	return issuelog.ReadPublicKey(file)
}

func printReport(out io.Writer, format, dir string, r *verify.Report) error {
	if format == "json" {
		if err := process.WriteJSON(out, r); err != nil {
			return err
		}
	} else if len(r.Findings) == 0 {
		fmt.Fprintf(out, "%s: clean\n", r.Origin)
		fmt.Fprintf(out, "tree size %d, root %v\n", r.Size, r.Root)
		fmt.Fprintf(out, "%d intents, %d certificates, %d failed, %d intents without a result (count them as issued)\n", r.Intents, r.Certificates, r.Failed, r.Open)
		if r.Pending > 0 {
			fmt.Fprintf(out, "%d entries wait in the journal; they enter the tree within a second, or when the server starts\n", r.Pending)
		}
	} else {
		for _, f := range r.Findings {
			fmt.Fprintln(out, process.Printable(f.String()))
		}
	}
	if n := len(r.Findings) + r.More; n > 0 {
		return fmt.Errorf("log verify: %s: %d things do not fit (tree size %d)", dir, n, r.Size)
	}
	return nil
}

func proveCommand() *cobra.Command {
	var where sources
	var format string
	cmd := &cobra.Command{
		Use: "prove SERIAL", Short: "Prove that a certificate is in a log", Args: process.OneArg,
		Long: "Makes a proof that the entries of a serial (hex) are in a log. With -o json it is a file that `chancery log\n" +
			"check-proof` verifies without the log. Exit code 2: not found, and not all logs could be read.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			serial, err := process.CleanSerial(args[0])
			if err != nil {
				return err
			}
			p, r, err := where.prove(cmd.Context(), serial)
			if err != nil {
				return fmt.Errorf("log prove: %w", err)
			}
			if format == "json" {
				return process.WriteJSON(cmd.OutOrStdout(), p)
			}
			return printProof(cmd.OutOrStdout(), p, r.PublicKey, nil)
		},
	}
	where.add(cmd)
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text, or json for a proof to keep")
	return cmd
}

func checkProofCommand() *cobra.Command {
	var key, cert string
	cmd := &cobra.Command{
		Use: "check-proof FILE --key FILE", Short: "Verify a proof without the log", Args: process.OneArg,
		Long: "Verifies a proof of `chancery log prove -o json` with the log's public key: that the log has signed a tree with these\n" +
			"entries. With --cert, also that they are about this very certificate.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if key == "" {
				return errors.New("log check-proof: no --key; it should name a file with the log's public key (log.pub)")
			}
			public, err := readKey(key)
			if err != nil {
				return err
			}
			data, err := readFile(args[0])
			if err != nil {
				return fmt.Errorf("log check-proof: %w", err)
			}
			p, err := verify.DecodeProof(data)
			if err != nil {
				return fmt.Errorf("log check-proof: %s: %w", args[0], err)
			}
			der, err := readCertificate(cert)
			if err != nil {
				return err
			}
			if err := printProof(cmd.OutOrStdout(), p, public, der); err != nil {
				return fmt.Errorf("log check-proof: %s: %w", args[0], err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&key, "key", "", "file with the log's public key")
	cmd.Flags().StringVar(&cert, "cert", "", "file with the certificate (PEM) that the proof should be about")
	return cmd
}

func searchCommand() *cobra.Command {
	var where sources
	var since, format string
	cmd := &cobra.Command{
		Use: "search [ID|SERIAL]", Short: "Find what was issued to whom", Args: process.MaybeOneArg,
		Long: "Prints the entries of a SPIFFE ID or serial (hex), or of a time on. They are not verified: see `chancery log verify`.\n" +
			"Exit code 2: not all logs could be read; those are named.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			q, err := parseQuery(args, since, time.Now())
			if err != nil {
				return fmt.Errorf("log search: %w", err)
			}
			found, show := false, printer(cmd.OutOrStdout(), format)
			err = where.search(cmd.Context(), q, func(r *verify.Reader, f verify.Found) error {
				found = true
				return show(r, f)
			})
			if err == nil && !found { // standard output has entries only
				fmt.Fprintln(cmd.ErrOrStderr(), "chancery: log search: nothing found")
			}
			return err
		},
	}
	where.add(cmd)
	cmd.Flags().StringVar(&since, "since", "", "from this time on: RFC 3339, or a duration back from now, such as 2h")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text, or json: one object a line")
	return cmd
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const most = 2 << 20
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && len(data) > most {
		err = fmt.Errorf("%s has more than %d bytes", path, most)
	}
	return data, err
}
