package trust

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	base "github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// readBundle reads the bundle of a trust domain from a file, or from the standard input: in JSON, or in PEM.
func readBundle(cmd *cobra.Command, name, domain, file string) (*spiffebundle.Bundle, error) {
	td, err := base.ParseDomain(domain)
	if err != nil {
		return nil, fmt.Errorf("trust %s: %w", name, err)
	}
	in := cmd.InOrStdin()
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, fmt.Errorf("trust %s: %w", name, err)
		}
		defer f.Close()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, spiffebundle.MaxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("trust %s: reading %s: %w", name, file, err)
	}
	var b *spiffebundle.Bundle
	if bytes.Contains(data, []byte("-----BEGIN ")) {
		b, err = spiffebundle.ParsePEM(td, data)
	} else {
		b, err = spiffebundle.Parse(td, data)
	}
	if err != nil {
		return nil, fmt.Errorf("trust %s: %s: %w", name, file, err)
	}
	return b, nil
}

// diff compares what a server has with a file, or with what it had before.
func (a *asking) diff(cmd *cobra.Command, args []string) error {
	domain := args[0]
	if err := checkDomain("diff", domain); err != nil {
		return err
	}
	var file *spiffebundle.Bundle
	if len(args) > 1 {
		var err error
		if file, err = readBundle(cmd, "diff", domain, args[1]); err != nil {
			return err
		}
	}
	resp, err := a.list(cmd.Context(), "diff", domain)
	if err != nil {
		return err
	}
	d := resp.GetDomains()[0]
	have, err := parse(domain, d.GetBundle())
	if err != nil {
		return fmt.Errorf("trust diff: what the server has: %w", err)
	}
	if have == nil {
		return fmt.Errorf("trust diff: the server has no bundle of %s yet", domain)
	}
	from, to := have, file
	if file == nil {
		if from, err = parse(domain, d.GetPrevious()); err != nil {
			return fmt.Errorf("trust diff: what the server had before: %w", err)
		}
		if to = have; from == nil {
			return fmt.Errorf("trust diff: the server knows no other bundle of %s than the present one; name a file to compare it with", domain)
		}
	}
	gone, came := without(from.Roots, to.Roots), without(to.Roots, from.Roots)
	if err := printDiff(cmd.OutOrStdout(), a.format, from, to, gone, came); err != nil {
		return err
	}
	if len(gone)+len(came) > 0 {
		return &process.ExitError{Code: 2, Err: errors.New("trust diff: the roots differ")}
	}
	return nil
}

func without(all, other []*x509.Certificate) []*x509.Certificate {
	return slices.DeleteFunc(slices.Clone(all), func(c *x509.Certificate) bool { return slices.ContainsFunc(other, c.Equal) })
}
