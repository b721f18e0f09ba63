package inspect

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

// block is one PEM block, as `inspect -o json` has it.
type block struct {
	Type        string     `json:"type"` // certificate, request, CRL, private key (not shown), or the PEM type
	SPIFFEID    string     `json:"spiffeId,omitempty"`
	Names       []string   `json:"names,omitempty"` // DNS names, IPs, email addresses, other URIs
	Subject     string     `json:"subject,omitempty"`
	Issuer      string     `json:"issuer,omitempty"`
	Serial      string     `json:"serial,omitempty"`
	NotBefore   *time.Time `json:"notBefore,omitempty"`
	NotAfter    *time.Time `json:"notAfter,omitempty"`
	Key         string     `json:"key,omitempty"`
	Usages      []string   `json:"usages,omitempty"`
	CA          bool       `json:"ca,omitempty"`
	SubjectKey  string     `json:"subjectKeyId,omitempty"`
	IssuerKey   string     `json:"authorityKeyId,omitempty"`
	Attestation string     `json:"attestation,omitempty"`
	Number      string     `json:"number,omitempty"`
	ThisUpdate  *time.Time `json:"thisUpdate,omitempty"`
	NextUpdate  *time.Time `json:"nextUpdate,omitempty"`
	Revoked     []entry    `json:"revoked,omitempty"`
	Findings    []string   `json:"findings,omitempty"`
}

// entry is one certificate that a CRL revokes.
type entry struct {
	Serial string    `json:"serial"`
	Time   time.Time `json:"time"`
	Reason int       `json:"reason,omitempty"` // CRLReason of RFC 5280 section 5.3.1
}

// decode reads all PEM blocks.
func decode(data []byte) ([]block, error) {
	var all []block
	for rest := data; ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		all = append(all, inspectBlock(b))
	}
	begun := bytes.Count(data, []byte("-----BEGIN "))
	switch {
	case len(all) == 0 && begun == 0:
		return nil, errors.New("there is no PEM block; expected -----BEGIN CERTIFICATE-----, a CSR or a CRL")
	case len(all) < begun:
		return nil, fmt.Errorf("%d of %d PEM blocks do not decode; is the file cut off?", begun-len(all), begun)
	}
	return all, nil
}

func inspectBlock(b *pem.Block) block {
	switch {
	case b.Type == "CERTIFICATE":
		cert, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return block{Type: "certificate", Findings: []string{"does not parse: " + err.Error()}}
		}
		return inspectCertificate(cert, time.Now())
	case b.Type == "CERTIFICATE REQUEST" || b.Type == "NEW CERTIFICATE REQUEST":
		req, err := x509.ParseCertificateRequest(b.Bytes)
		if err != nil {
			return block{Type: "request", Findings: []string{"does not parse: " + err.Error()}}
		}
		return inspectRequest(req)
	case b.Type == "X509 CRL":
		crl, err := x509.ParseRevocationList(b.Bytes)
		if err != nil {
			return block{Type: "CRL", Findings: []string{"does not parse: " + err.Error()}}
		}
		return inspectCRL(crl, time.Now())
	case strings.HasSuffix(b.Type, "PRIVATE KEY"):
		return block{Type: "private key (not shown)"}
	}
	return block{Type: b.Type}
}

func inspectCertificate(c *x509.Certificate, now time.Time) block {
	b := block{
		Type: "certificate", Subject: c.Subject.String(), Issuer: c.Issuer.String(), Serial: fmt.Sprintf("%x", c.SerialNumber.Bytes()),
		NotBefore: new(c.NotBefore.UTC()), NotAfter: new(c.NotAfter.UTC()), Key: keyName(c.PublicKey), CA: c.IsCA, Usages: usages(c),
		SubjectKey: fmt.Sprintf("%x", c.SubjectKeyId), IssuerKey: fmt.Sprintf("%x", c.AuthorityKeyId),
	}
	b.setNames(c.URIs, c.DNSNames, c.IPAddresses, c.EmailAddresses)
	if !c.IsCA {
		if _, err := trust.LeafID(c); err != nil {
			b.find("%v", err)
		}
	}
	if now.After(c.NotAfter) {
		b.find("it has ended")
	} else if now.Before(c.NotBefore) {
		b.find("it is not valid yet")
	}
	if a, err := ca.AttestationOf(c); err != nil {
		b.find("%v", err)
	} else if a != nil {
		b.Attestation = fmt.Sprintf("token seen %s, cluster %s", a.Time.UTC().Format(time.RFC3339), a.Cluster)
		if a.Node != "" { // tokens that are bound to no pod have none
			b.Attestation += ", node " + a.Node
		}
	}
	return b
}

func inspectRequest(r *x509.CertificateRequest) block {
	b := block{Type: "request", Subject: r.Subject.String(), Key: keyName(r.PublicKey)}
	b.setNames(r.URIs, r.DNSNames, r.IPAddresses, r.EmailAddresses)
	if err := r.CheckSignature(); err != nil {
		b.find("the signature does not verify: %v", err)
	}
	return b
}

func inspectCRL(l *x509.RevocationList, now time.Time) block {
	b := block{Type: "CRL", Issuer: l.Issuer.String(), ThisUpdate: new(l.ThisUpdate.UTC()), IssuerKey: fmt.Sprintf("%x", l.AuthorityKeyId)}
	if l.Number != nil {
		b.Number = l.Number.String()
	}
	for _, e := range l.RevokedCertificateEntries {
		b.Revoked = append(b.Revoked, entry{fmt.Sprintf("%x", e.SerialNumber.Bytes()), e.RevocationTime.UTC(), e.ReasonCode})
	}
	if l.NextUpdate.IsZero() {
		b.find("it does not say when the next one comes")
		return b
	}
	b.NextUpdate = new(l.NextUpdate.UTC())
	if now.After(l.NextUpdate) {
		b.find("it has ended")
	} else if now.Before(l.ThisUpdate) {
		b.find("it is not valid yet")
	}
	return b
}

func (b *block) find(format string, args ...any) {
	b.Findings = append(b.Findings, fmt.Sprintf(format, args...))
}

func (b *block) setNames(uris []*url.URL, dns []string, ips []net.IP, emails []string) {
	for _, u := range uris {
		if u.Scheme == "spiffe" && b.SPIFFEID == "" {
			b.SPIFFEID = u.String()
		} else {
			b.Names = append(b.Names, u.String())
		}
	}
	b.Names = append(b.Names, dns...)
	for _, ip := range ips {
		b.Names = append(b.Names, ip.String())
	}
	b.Names = append(b.Names, emails...)
}

func keyName(pub any) string {
	t, err := ca.TypeOf(pub)
	if err != nil {
		return err.Error()
	}
	return string(t)
}

// usages names what the key may do, in the words of RFC 5280.
func usages(c *x509.Certificate) []string {
	var out []string
	for bit, name := range []string{"digitalSignature", "contentCommitment", "keyEncipherment", "dataEncipherment", "keyAgreement",
		"keyCertSign", "cRLSign", "encipherOnly", "decipherOnly"} {
		if c.KeyUsage&(1<<bit) != 0 {
			out = append(out, name)
		}
	}
	for _, u := range c.ExtKeyUsage {
		switch u {
		case x509.ExtKeyUsageServerAuth:
			out = append(out, "serverAuth")
		case x509.ExtKeyUsageClientAuth:
			out = append(out, "clientAuth")
		case x509.ExtKeyUsageAny:
			out = append(out, "anyExtendedKeyUsage")
		default:
			out = append(out, fmt.Sprintf("extended key usage %d", u))
		}
	}
	for _, oid := range c.UnknownExtKeyUsage {
		out = append(out, oid.String())
	}
	return out
}

func (b block) print(out io.Writer) {
	fmt.Fprintln(out, process.Printable(b.Type))
	line := func(name, value string) {
		if value != "" {
			fmt.Fprintf(out, "  %-12s %s\n", name, process.Printable(value))
		}
	}
	line("SPIFFE ID", b.SPIFFEID)
	line("names", strings.Join(b.Names, ", "))
	line("subject", b.Subject)
	line("issuer", b.Issuer)
	line("serial", b.Serial)
	if b.NotAfter != nil {
		line("valid", b.NotBefore.Format(time.RFC3339)+" to "+b.NotAfter.Format(time.RFC3339))
	}
	line("number", b.Number)
	if b.ThisUpdate != nil {
		valid := "from " + b.ThisUpdate.Format(time.RFC3339)
		if b.NextUpdate != nil {
			valid = b.ThisUpdate.Format(time.RFC3339) + " to " + b.NextUpdate.Format(time.RFC3339)
		}
		line("valid", valid)
	}
	line("key", b.Key)
	line("usages", strings.Join(b.Usages, ", "))
	if b.CA {
		line("CA", "yes: it signs certificates")
	}
	line("key ID", b.SubjectKey)
	line("issuer key", b.IssuerKey)
	line("attested", b.Attestation)
	if b.ThisUpdate != nil && len(b.Revoked) == 0 {
		line("revoked", "none")
	}
	for _, e := range b.Revoked {
		text := e.Serial + " at " + e.Time.Format(time.RFC3339)
		if e.Reason != 0 {
			text += ", " + trust.ReasonName(e.Reason)
		}
		line("revoked", text)
	}
	for _, f := range b.Findings {
		line("finding", f)
	}
}
