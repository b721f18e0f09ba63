package server

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/issuance"
	"github.com/chancery-project/chancery/trust"
)

// csrCommand returns `chancery authority csr`.
func csrCommand(file *string) *cobra.Command {
	var fresh bool
	cmd := &cobra.Command{
		Use: "csr -c FILE", Short: "Print a request for the next issuer's certificate, for a root that is kept elsewhere", Args: process.NoArgs,
		Long: "Makes the key of the next issuer, where the config says that keys lie, and prints a certificate signing request (PEM)\n" +
			"for the CA that keeps the root. The same request is printed again until its certificate is imported.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := Load(*file)
			if err != nil {
				return err
			}
			der, err := requestIssuer(cmd.Context(), s, fresh)
			if err != nil {
				return err
			}
			return pem.Encode(cmd.OutOrStdout(), &pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
		},
	}
	cmd.Flags().BoolVar(&fresh, "new", false, "drop an open request and its key, and make new ones")
	return cmd
}

// requestIssuer makes a request in a running server, or in the state if no server holds it (decision D14).
func requestIssuer(ctx context.Context, s *Settings, fresh bool) (der []byte, err error) {
	err = s.EitherWay(ctx, func() error {
		return s.withAuthority(ctx, func(c authority.Config, actor string) error {
			der, err = authority.Request(ctx, c, actor, fresh)
			return err
		})
	}, func(ctx context.Context, c chanceryv1.AdminClient) error {
		resp, err := c.RequestIssuer(ctx, &chanceryv1.RequestIssuerRequest{Fresh: fresh})
		der = resp.GetRequest()
		return err
	})
	return der, err
}

// importCommand returns `chancery authority import`.
func importCommand(file *string) *cobra.Command {
	return &cobra.Command{
		Use: "import -c FILE CHAIN.pem", Short: "Take an issuer's certificate that was signed elsewhere into use", Args: process.OneArg,
		Long: "Takes the certificate that the request of `authority csr` was answered with, followed by those between it and the root,\n" +
			"if there are any. The chain is checked as a whole: key, usage, path, root, lifetime, lints. One that fails changes nothing.\n" +
			"A server that runs signs with the new issuer once connected agents have its CRL, after 10 s at the latest.",
		RunE: func(cmd *cobra.Command, args []string) error {
			chain, err := readCertificates(args[0])
			if err != nil {
				return err
			}
			s, err := Load(*file)
			if err != nil {
				return err
			}
			if err := importIssuer(cmd.Context(), s, chain); err != nil {
				return fmt.Errorf("importing %s: %w", args[0], err)
			}
			out, cert := cmd.OutOrStdout(), chain[0]
			fmt.Fprintf(out, "Issuer %x is active, until %s.\n", cert.SubjectKeyId, cert.NotAfter.UTC().Format(time.RFC3339))
			if s.parent != nil {
				return nil
			}
			half := cert.NotBefore.Add(cert.NotAfter.Sub(cert.NotBefore) / 2)
			fmt.Fprintf(out, "It should be renewed from %s on: `chancery authority csr -c %s`, and import.\n", half.UTC().Format(time.RFC3339), *file)
			return nil
		},
	}
}

// importIssuer imports into a running server, or into the state if no server holds it (decision D14).
func importIssuer(ctx context.Context, s *Settings, chain []*x509.Certificate) error {
	req := new(chanceryv1.ImportIssuerRequest)
	for _, c := range chain {
		req.Certificates = append(req.Certificates, c.Raw)
	}
	return s.EitherWay(ctx, func() error {
		return s.withAuthority(ctx, func(c authority.Config, actor string) error { return authority.Import(ctx, c, actor, chain) })
	}, func(ctx context.Context, c chanceryv1.AdminClient) error {
		_, err := c.ImportIssuer(ctx, req)
		return err
	})
}

// readCertificates reads a PEM file of certificates.
func readCertificates(path string) ([]*x509.Certificate, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading certificates: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, trust.MaxPEMBytes+1))
	if err != nil {
		return nil, fmt.Errorf("reading certificates from %s: %w", path, err)
	}
	certs, err := trust.ParseCertificates(data)
	if err != nil {
		return nil, fmt.Errorf("reading certificates from %s: %w", path, err)
	}
	return certs, nil
}

// withAuthority calls f with all that changes the authority document, while no server holds it.
func (s *Settings) withAuthority(ctx context.Context, f func(c authority.Config, actor string) error) error {
	logger := slog.New(slog.DiscardHandler)
	st, err := s.place.Open(ctx, logger)
	if err != nil {
		return s.explainStore(err)
	}
	defer st.Close()
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if err != nil {
		return err
	}
	log, err := audit.Open(s.AuditLog)
	if err != nil {
		return err
	}
	defer log.Close()
	issued, listed, err := issuance.Open(s.IssuanceLog, log, logger)
	if err != nil {
		return err
	}
	if issued != nil {
		defer issued.Close()
		defer log.Close() // before it
	}
	kept, err := s.keys.Open(ctx, sealer, logger)
	if err != nil {
		return s.wrong(err)
	}
	if kept != nil {
		defer kept.Close()
	}
	return f(authority.Config{
		Domain: s.domain, Store: st, Sealer: sealer, Log: log, Logger: logger, Replica: s.place.Replica(), Mark: s.place.Mark(), Plugged: s.Issuer.plugged(), IssuanceLog: listed,
		Profiles: []*ca.Profile{s.profile, ca.ServerProfile()}, Keys: kept, KeyType: s.keys.Type(), RootTTL: s.lifetimes.Root, IssuerTTL: s.lifetimes.Issuer,
	}, process.UserName(uint32(os.Getuid())))
}
