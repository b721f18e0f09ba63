package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

func newAuthorityCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "authority", Short: "Make and show the authorities of a server"}
	var path, format string
	init := &cobra.Command{
		Use: "init -c FILE", Short: "Make root and issuer, or adopt plugged-in ones", Args: cobra.NoArgs,
		Long: "Makes the authority document of the server whose config is given: with a new root and issuer, or, where the config\n" +
			"names a plugged-in issuer, with that. Writes the roots to roots.pem beside the state. Nothing that exists is changed.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := loadServerConfig(path)
			if err != nil {
				return err
			}
			return initAuthority(cmd.Context(), c, cmd.OutOrStdout())
		},
	}
	show := &cobra.Command{
		Use: "show -c FILE", Short: "Show the authorities of every trust domain", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := loadServerConfig(path)
			if err != nil {
				return err
			}
			return showAuthority(cmd.Context(), c, format, cmd.OutOrStdout())
		},
	}
	show.Flags().StringVarP(&format, "output", "o", "text", "text, json or pem (roots only)")
	for _, sub := range []*cobra.Command{init, show} {
		sub.Flags().StringVarP(&path, "config", "c", "", "config file of the server (YAML)")
		cmd.AddCommand(sub)
	}
	return cmd
}

// initAuthority makes sealing key, document and roots.pem, in this order; a crash leaves what a second run completes
// or refuses with the reason.
func initAuthority(ctx context.Context, c *serverConfig, out io.Writer) error {
	domain, err := trust.ParseDomain(c.TrustDomain)
	if err != nil {
		return fmt.Errorf("trustDomain: %w", err)
	}
	if _, err := ca.NewProfile("workload", c.Profile); err != nil {
		return err
	}
	st, err := store.CreateSQLite(ctx, c.State.SQLite)
	if err != nil {
		return err
	}
	defer st.Close()
	if _, _, err := st.Load(ctx); err == nil { // before a sealing key is made or the audit log opened
		return fmt.Errorf("the state %s has authorities already; `chancery authority show -c FILE` prints them", c.State.SQLite)
	}
	sealer, err := keys.LoadSealer(c.State.SealingKey)
	if errors.Is(err, os.ErrNotExist) {
		sealer, err = keys.CreateSealer(c.State.SealingKey)
	}
	if err != nil {
		return err
	}
	log, err := audit.Open(c.AuditLog)
	if err != nil {
		return err
	}
	defer log.Close()
	doc, err := authority.Init(ctx, authority.Config{
		Domain: domain, Store: st, Sealer: sealer, Log: log, Logger: slog.New(slog.DiscardHandler), Plugged: c.Issuer.plugged(),
	}, userName(uint32(os.Getuid())))
	if err != nil {
		return err
	}
	bundle, err := doc.Bundle(domain)
	if err != nil {
		return err
	}
	roots := rootsFile(c)
	if err := os.WriteFile(roots, bundle.PEM(), 0o644); err != nil {
		return fmt.Errorf("writing roots: %w; `chancery authority show -c FILE -o pem` prints them", err)
	}
	fmt.Fprintf(out, "Made the authorities of trust domain %s in %s.\n", domain, c.State.SQLite)
	fmt.Fprintf(out, "Agents need the roots in %s (serverRoots).\n", roots)
	fmt.Fprintf(out, "Keep %s apart from backups of the state: both together are the CA.\n", c.State.SealingKey)
	return nil
}

func rootsFile(c *serverConfig) string {
	return filepath.Join(filepath.Dir(c.State.SQLite), "roots.pem")
}

// showAuthority asks the running server, and reads the store itself only if no server holds it (decision D14).
func showAuthority(ctx context.Context, c *serverConfig, format string, out io.Writer) error {
	st, err := store.OpenSQLite(ctx, c.State.SQLite)
	if errors.Is(err, store.ErrLocked) {
		resp, err := askAdmin(ctx, adminSocket(c))
		if err != nil {
			return err
		}
		return printAuthorities(out, format, resp)
	}
	if errors.Is(err, store.ErrMissing) {
		return fmt.Errorf("%w: run `chancery authority init -c FILE` once", err)
	} else if err != nil {
		return err
	}
	defer st.Close()
	data, version, err := st.Load(ctx)
	if err != nil {
		return err
	}
	sealer, err := keys.LoadSealer(c.State.SealingKey)
	if err != nil {
		return err
	}
	doc, err := authority.DecodeDocument(data, version, sealer)
	if err != nil {
		return err
	}
	resp, err := describe(doc)
	if err != nil {
		return err
	}
	return printAuthorities(out, format, resp)
}

// authorityJSON is one authority in `authority show -o json`.
type authorityJSON struct {
	ID          string    `json:"id"` // subject key identifier
	Kind        string    `json:"kind"`
	State       string    `json:"state"`
	Generation  uint64    `json:"generation"`
	Subject     string    `json:"subject"`
	NotBefore   time.Time `json:"notBefore"`
	NotAfter    time.Time `json:"notAfter"`
	Certificate string    `json:"certificate"` // PEM
}

type domainJSON struct {
	TrustDomain string          `json:"trustDomain"`
	Generation  uint64          `json:"generation"`
	Authorities []authorityJSON `json:"authorities"`
}

func printAuthorities(out io.Writer, format string, resp *chanceryv1.GetAuthoritiesResponse) error {
	var domains []domainJSON
	for _, d := range resp.GetDomains() {
		dj := domainJSON{TrustDomain: d.GetTrustDomain(), Generation: d.GetGeneration(), Authorities: []authorityJSON{}}
		for _, a := range d.GetAuthorities() {
			cert, err := x509.ParseCertificate(a.GetCertificate())
			if err != nil {
				return fmt.Errorf("authority %s: %w", a.GetId(), err)
			}
			dj.Authorities = append(dj.Authorities, authorityJSON{
				a.GetId(), a.GetKind(), a.GetState(), a.GetGeneration(), cert.Subject.String(), cert.NotBefore.UTC(), cert.NotAfter.UTC(),
				string(trust.EncodeCertificates(cert)),
			})
		}
		domains = append(domains, dj)
	}
	switch format {
	case "json":
		return writeJSON(out, map[string]any{"domains": domains})
	case "pem":
		for _, d := range domains {
			for _, a := range d.Authorities {
				if a.Kind == string(authority.KindRoot) && a.State != string(authority.StateTainted) {
					fmt.Fprint(out, a.Certificate)
				}
			}
		}
		return nil
	case "text":
		for _, d := range domains {
			fmt.Fprintf(out, "trust domain %s, bundle generation %d\n", d.TrustDomain, d.Generation)
			for _, a := range d.Authorities {
				fmt.Fprintf(out, "  %-6s  %-8s  %s  until %s  %s\n", a.Kind, a.State, a.ID, a.NotAfter.Format(time.RFC3339), a.Subject)
			}
		}
		return nil
	}
	return badFormat(format, "text", "json", "pem")
}

func badFormat(got string, known ...string) error {
	return fmt.Errorf("--output %q is not known; use %s", got, strings.Join(known, ", "))
}

func writeJSON(out io.Writer, v any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
