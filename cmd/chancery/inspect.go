package main

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/trust"
)

func newInspectCmd() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use: "inspect FILE|-", Short: "Say in words what PEM certificates and CSRs hold", Args: cobra.ExactArgs(1),
		Long: "Reads PEM from a file or standard input and prints each certificate and CSR: identity, validity, keys, usages, and\n" +
			"what would stop a SPIFFE validator from accepting it. Private keys in the input are named, never printed.",
		RunE: func(cmd *cobra.Command, args []string) error {
			data, err := readInput(args[0], cmd.InOrStdin())
			if err != nil {
				return err
			}
			return inspect(cmd.OutOrStdout(), data, format)
		},
	}
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

func readInput(name string, stdin io.Reader) ([]byte, error) {
	in := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, fmt.Errorf("inspect: %w", err)
		}
		defer f.Close()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, trust.MaxPEMBytes+1))
	if err != nil {
		return nil, fmt.Errorf("inspect: %w", err)
	}
	if len(data) > trust.MaxPEMBytes {
		return nil, fmt.Errorf("inspect: the input is larger than %d bytes", trust.MaxPEMBytes)
	}
	return data, nil
}

// inspected is one PEM block, as `inspect -o json` has it.
type inspected struct {
	Type        string     `json:"type"` // certificate, request, key or the PEM type
	SPIFFEID    string     `json:"spiffeId,omitempty"`
	Names       []string   `json:"names,omitempty"` // DNS names, IPs, addresses
	Subject     string     `json:"subject,omitempty"`
	Issuer      string     `json:"issuer,omitempty"`
	Serial      string     `json:"serial,omitempty"`
	NotBefore   *time.Time `json:"notBefore,omitempty"`
	NotAfter    *time.Time `json:"notAfter,omitempty"`
	Key         string     `json:"key,omitempty"`
	CA          bool       `json:"ca,omitempty"`
	SubjectKey  string     `json:"subjectKeyId,omitempty"`
	IssuerKey   string     `json:"authorityKeyId,omitempty"`
	Attestation string     `json:"attestation,omitempty"`
	Findings    []string   `json:"findings,omitempty"`
}

func inspect(out io.Writer, data []byte, format string) error {
	var all []inspected
	for rest := data; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		all = append(all, inspectBlock(block))
	}
	if len(all) == 0 {
		return errors.New("inspect: no PEM block found; expected -----BEGIN CERTIFICATE----- or a CSR")
	}
	switch format {
	case "json":
		return writeJSON(out, all)
	case "text":
		for _, i := range all {
			i.text(out)
		}
		return nil
	}
	return badFormat(format, "text", "json")
}

func inspectBlock(b *pem.Block) inspected {
	switch {
	case b.Type == "CERTIFICATE":
		cert, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return inspected{Type: "certificate", Findings: []string{"does not parse: " + err.Error()}}
		}
		return inspectCertificate(cert)
	case b.Type == "CERTIFICATE REQUEST" || b.Type == "NEW CERTIFICATE REQUEST":
		req, err := x509.ParseCertificateRequest(b.Bytes)
		if err != nil {
			return inspected{Type: "request", Findings: []string{"does not parse: " + err.Error()}}
		}
		return inspectRequest(req)
	case strings.HasSuffix(b.Type, "PRIVATE KEY"):
		return inspected{Type: "private key (not shown)"}
	}
	return inspected{Type: b.Type}
}

func inspectCertificate(c *x509.Certificate) inspected {
	i := inspected{
		Type: "certificate", Subject: c.Subject.String(), Issuer: c.Issuer.String(), Serial: fmt.Sprintf("%x", c.SerialNumber),
		NotBefore: new(c.NotBefore.UTC()), NotAfter: new(c.NotAfter.UTC()), Key: keyName(c.PublicKey), CA: c.IsCA,
		SubjectKey: fmt.Sprintf("%x", c.SubjectKeyId), IssuerKey: fmt.Sprintf("%x", c.AuthorityKeyId), Names: append([]string{}, c.DNSNames...),
	}
	for _, ip := range c.IPAddresses {
		i.Names = append(i.Names, ip.String())
	}
	if len(c.URIs) > 0 {
		i.SPIFFEID = c.URIs[0].String()
	}
	if !c.IsCA {
		if _, err := trust.LeafID(c); err != nil {
			i.Findings = append(i.Findings, err.Error())
		}
	}
	now := time.Now()
	if now.After(c.NotAfter) {
		i.Findings = append(i.Findings, "it has ended")
	} else if now.Before(c.NotBefore) {
		i.Findings = append(i.Findings, "it is not valid yet")
	}
	if a, err := ca.AttestationOf(c); err != nil {
		i.Findings = append(i.Findings, err.Error())
	} else if a != nil {
		i.Attestation = fmt.Sprintf("token seen %s, cluster %s, node %s", a.Time.UTC().Format(time.RFC3339), a.Cluster, a.Node)
	}
	return i
}

func inspectRequest(r *x509.CertificateRequest) inspected {
	i := inspected{Type: "request", Subject: r.Subject.String(), Key: keyName(r.PublicKey), Names: append([]string{}, r.DNSNames...)}
	if len(r.URIs) > 0 {
		i.SPIFFEID = r.URIs[0].String()
	}
	if err := r.CheckSignature(); err != nil {
		i.Findings = append(i.Findings, "the signature does not verify: "+err.Error())
	}
	return i
}

func keyName(pub any) string {
	t, err := ca.TypeOf(pub)
	if err != nil {
		return err.Error()
	}
	return string(t)
}

func (i inspected) text(out io.Writer) {
	fmt.Fprintln(out, i.Type)
	line := func(name, value string) {
		if value != "" {
			fmt.Fprintf(out, "  %-12s %s\n", name, value)
		}
	}
	line("SPIFFE ID", i.SPIFFEID)
	line("names", strings.Join(i.Names, ", "))
	line("subject", i.Subject)
	line("issuer", i.Issuer)
	line("serial", i.Serial)
	if i.NotAfter != nil {
		line("valid", i.NotBefore.Format(time.RFC3339)+" to "+i.NotAfter.Format(time.RFC3339))
	}
	line("key", i.Key)
	if i.CA {
		line("CA", "yes: it signs certificates")
	}
	line("key ID", i.SubjectKey)
	line("issuer key", i.IssuerKey)
	line("attested", i.Attestation)
	for _, f := range i.Findings {
		line("finding", f)
	}
}
